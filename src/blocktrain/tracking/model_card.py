"""The README.md of an exported model: YAML front matter for the Hub, and the report's numbers in words.

YAML values are written as JSON, which every YAML reader takes, so nothing in a name can break out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from blocktrain.config import Recipe
from blocktrain.training.report import TrainingReport

Rows = list[tuple[str, float]]
AnyReport = TrainingReport | Mapping[str, Any]
"""The report of `train`, or of `swarm` as its JSON."""


def model_card(recipe: Recipe, corpus_sha256: str, report: AnyReport | None) -> str:
    scores = report_scores(report) if report is not None else []
    return "\n".join([*_front_matter(recipe, scores), *_body(recipe, corpus_sha256, report, scores)]) + "\n"


def report_scores(report: AnyReport) -> Rows:
    """Held-out cross entropies of a `train` or a `swarm` report, in nats per byte."""
    if isinstance(report, TrainingReport):
        scores = report.scores
        rows = [("bigram counts", scores.bigram_ce)]
        rows += [(f"block {number} alone", score.ce) for number, score in enumerate(scores.blocks)]
        rows += [(f"composed, {name}", score.ce) for name, score in scores.composed()]
        if scores.reference is not None:
            rows.append(("the same layers trained end to end", scores.reference.ce))
        return rows
    final = report.get("final") or {}
    rows = [(f"block {number} alone", ce) for number, ce in enumerate(final.get("block_ce", []))]
    named = (("composed, euler", final.get("euler_ce")), ("composed, consensus", final.get("consensus_ce")))
    return rows + [(name, ce) for name, ce in named if ce is not None]


def _front_matter(recipe: Recipe, scores: Rows) -> list[str]:
    ours = recipe.model.family == "blocktrain"
    lines = [
        "---",
        f"library_name: {'blocktrain' if ours else 'transformers'}",
        "pipeline_tag: text-generation",
        f"tags: [blocktrain, {'byte-level' if ours else recipe.model.family}, block-local-training]",
    ]
    if scores:
        text = {"name": recipe.data.corpus, "type": "text"}
        metrics = [{"type": "cross_entropy", "name": name, "value": round(ce, 6)} for name, ce in scores]
        result = {"task": {"type": "text-generation"}, "dataset": text, "metrics": metrics}
        lines.append("model-index: " + json.dumps([{"name": recipe.name, "results": [result]}]))
    return [*lines, "---", ""]


def _body(recipe: Recipe, corpus_sha256: str, report: AnyReport | None, scores: Rows) -> list[str]:
    model = recipe.model
    kind = "byte-level" if model.family == "blocktrain" else model.family
    lines = [
        f"# {one_line(recipe.name)}",
        "",
        f"A {kind} language model of {model.blocks} blocks with {model.layers_per_block} layers of width "
        f"{model.width} each, context {model.context}. Every block was trained alone with BlockTrain; "
        "composed, they predict the next token.",
        "",
        "```",
        "blocktrain import FOLDER --to checkpoint",
        "blocktrain generate checkpoint --prompt 'The '",
        "```",
        "",
        f"Text: `{one_line(recipe.data.corpus)}`, sha256 `{corpus_sha256}`. Seed {recipe.seed}. The whole "
        "recipe is in `config.json`.",
        "",
        "## Scores",
        "",
    ]
    if report is None:
        return [*lines, "No report came with this checkpoint."]
    lines += ["| model | cross entropy, nats per byte, held-out text |", "|---|---|"]
    lines += [f"| {name} | {ce:.4f} |" for name, ce in scores]
    return [*lines, "", *_cost(report)]


def _cost(report: AnyReport) -> list[str]:
    if isinstance(report, TrainingReport):
        block, reference = report.peak_memory["block"] or 0, report.peak_memory["reference"]
        tokens = report.tokens["per_block"]
        told = f"{tokens:,} bytes of text per block; one block peaked at {block / 1e6:.0f} MB"
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
