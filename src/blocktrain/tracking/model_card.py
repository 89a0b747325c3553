"""The README.md of an exported model: YAML front matter for the Hub, and the report's numbers in words.

YAML values are written as JSON, which every YAML reader takes, so nothing in a name can break out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blocktrain.config import ModelConfig
from blocktrain.data.bpe import FileTokenizer
from blocktrain.data.tokenizer import ByteTokenizer
from blocktrain.errors import UserError
from blocktrain.training.checkpoint import Description
from blocktrain.training.report import TrainingReport

MAX_REPORT_BYTES = 64 << 20
"""A report holds 200 points of each curve and a sample; nothing that is one comes near this size."""

Rows = list[tuple[str, float]]
AnyReport = TrainingReport | Mapping[str, Any]
"""The report of `train`, or of `swarm` as its JSON."""


def model_card(described: Description, report: AnyReport | None) -> str:
    scores = report_scores(report) if report is not None else []
    return "\n".join([*_front_matter(described, scores), *_body(described, report, scores)]) + "\n"


def report_scores(report: AnyReport) -> Rows:
    """Held-out cross entropies of a `train` or a `swarm` report, in nats per byte."""
    if isinstance(report, TrainingReport):
        scores = report.scores
        rows = [("bigram counts", scores.bigram_ce)]
        rows += [(f"block {number} alone", score.ce) for number, score in enumerate(scores.blocks)]
        rows += [(f"composed, {name}", score.ce) for name, score in scores.composed()]
        if scores.reference is not None:
            rows.append(("the same layers trained end to end", scores.reference.ce))
        # Reports have losses per token.
        return [(name, ce / scores.bytes_per_token) for name, ce in rows]
    final = report.get("final") or {}
    rows = [(f"block {number} alone", ce) for number, ce in enumerate(final.get("block_ce", []))]
    named = (("composed, euler", final.get("euler_ce")), ("composed, consensus", final.get("consensus_ce")))
    rows += [(name, ce) for name, ce in named if ce is not None]
    per_token = float(final.get("bytes_per_token", 1.0))
    return [(name, ce / per_token) for name, ce in rows]


def _front_matter(described: Description, scores: Rows) -> list[str]:
    recipe, by_bytes = described.recipe, isinstance(described.tokenizer, ByteTokenizer)
    ours = recipe.model.family == "blocktrain"
    lines = [
        "---",
        f"library_name: {'blocktrain' if ours else 'transformers'}",
        "pipeline_tag: text-generation",
        f"tags: [blocktrain, {'byte-level, ' if by_bytes else ''}block-local-training]",
    ]
    if scores:
        text = {"name": recipe.data.corpus, "type": "text"}
        metrics = [{"type": "cross_entropy", "name": name, "value": round(ce, 6)} for name, ce in scores]
        result = {"task": {"type": "text-generation"}, "dataset": text, "metrics": metrics}
        lines.append("model-index: " + json.dumps([{"name": recipe.name, "results": [result]}]))
    return [*lines, "---", ""]


def _shapes(model: ModelConfig) -> str:
    """The blocks' layers and widths: once where they are alike."""
    found = [model.of_block(block) for block in range(model.blocks)]
    told = [f"{one.layers_per_block} layers of width {one.width}" for one in found]
    return f"{told[0]} each" if len(set(told)) == 1 else ", ".join(told)


def _body(described: Description, report: AnyReport | None, scores: Rows) -> list[str]:
    recipe, model = described.recipe, described.recipe.model
    unit = "byte" if isinstance(described.tokenizer, ByteTokenizer) else "token"
    lines = [
        f"# {one_line(recipe.name)}",
        "",
        f"A {unit}-level language model of {model.blocks} blocks with {_shapes(model)}, context "
        f"{model.context}. Every block was trained alone with BlockTrain; composed, they predict the next "
        f"{unit}.",
        "",
        "```",
        "blocktrain import FOLDER --to checkpoint",
        "blocktrain generate checkpoint --prompt 'The '",
        "```",
        "",
        f"Text: `{one_line(recipe.data.corpus)}`, sha256 `{described.corpus_sha256}`. Seed {recipe.seed}. "
        "The whole recipe is in `config.json`.",
        "",
    ]
    tokenizer = described.tokenizer
    if isinstance(tokenizer, FileTokenizer) and len(tokenizer.template_front()) > len(tokenizer.front):
        lines += [
            "The text that this model was trained on has no begin-of-text token, and BlockTrain puts none in "
            "front of a prompt or a scored text. The template in `tokenizer.json` does: other programs read "
            "the same tokens only with `add_special_tokens=False`.",
            "",
        ]
    lines += ["## Scores", ""]
    if report is None:
        return [*lines, "No report came with this checkpoint."]
    lines += ["| model | cross entropy, nats per byte, held-out text |", "|---|---|"]
    lines += [f"| {name} | {ce:.4f} |" for name, ce in scores]
    return [*lines, "", *_cost(report)]


def _cost(report: AnyReport) -> list[str]:
    if isinstance(report, TrainingReport):
        block, reference = report.peak_memory["block"] or 0, report.peak_memory["reference"]
        tokens = report.tokens["per_block"]
        told = f"{tokens:,} tokens of text per block; one block peaked at {block / 1e6:.0f} MB"
        if reference:
            told += f", end to end at {reference / 1e6:.0f} MB"
        versions = ", ".join(f"{name} {one_line(version)}" for name, version in report.versions.items())
        return [f"{told} ({report.memory_method}). Made by {versions}."]
    workers = len(report.get("workers", []))
    moved, seconds = report.get("bytes_total", 0), report.get("wall_seconds", 0.0)
    return [f"Trained by {workers} workers that moved {moved / 1e6:.1f} MB in all, in {seconds:.0f} s."]


def one_line(text: str) -> str:
    """Without what Markdown could take for structure."""
    return "".join(letter for letter in text if letter.isprintable() and letter not in "`<>|")


def find_report(checkpoint: Path, named: Path | None, described: Description) -> AnyReport | None:
    """The report of this checkpoint; a neighbour that belongs to another run is left out."""
    path = named or checkpoint.absolute().parent / "report.json"
    try:
        if path.stat().st_size > MAX_REPORT_BYTES:
            raise UserError(f"{path} is longer than any report")
        report = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if named is None:
            return None
        raise UserError(f"no report at {path}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    if belongs(report, described):
        return TrainingReport.of_json(report) if "composed" in report else dict(report)
    if named is None:
        return None
    raise UserError(f"{path} is not the report of {checkpoint}: another run's name or text")


def belongs(report: Any, described: Description) -> bool:
    if not isinstance(report, dict) or report.get("name") != described.recipe.name:
        return False
    if "composed" in report:
        # The name alone does not tell runs apart: every run of a recipe has the same one.
        return bool(report.get("corpus_sha256") == described.corpus_sha256)
    return isinstance(report.get("final"), dict)
