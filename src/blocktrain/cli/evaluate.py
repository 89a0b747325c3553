"""`blocktrain evaluate`: score a text with a checkpoint on this machine."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blocktrain.cli.options import DeviceOption, ModelArgument, opened_model
from blocktrain.errors import DataError

if TYPE_CHECKING:
    from rich.table import Table

    from blocktrain.training.checkpoint import Checkpoint


def evaluate(
    checkpoint: ModelArgument,
    text: Annotated[Path, typer.Option("--text", help="UTF-8 text to score.")],
    json_: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
    device: DeviceOption = "auto",
    draws: Annotated[int | None, typer.Option("--draws", min=1, help="Noise draws for euler.")] = None,
) -> None:
    """Score a text: cross entropy of each block and of both compositions."""
    from rich.console import Console

    from blocktrain.data.corpora import read_text
    from blocktrain.training.checkpoint import load_checkpoint
    from blocktrain.training.device import find_device

    content = read_text(text, "--text names a file to score, any UTF-8 text")
    if len(content) < 2:
        raise DataError(f"{text} has {len(content)} byte; scoring needs at least two")
    with opened_model(checkpoint) as folder:
        loaded = load_checkpoint(folder, find_device(device))
    result = score_text(loaded, content, draws)
    if json_:
        print(json.dumps(result, indent=2))
    else:
        Console().print(_table(result, text))


def score_text(checkpoint: Checkpoint, content: bytes, draws: int | None) -> dict[str, Any]:
    from blocktrain.training.evaluation import Evaluator

    config = checkpoint.recipe.evaluation
    config = dataclasses.replace(config, noise_draws=draws or config.noise_draws)
    evaluator = Evaluator(checkpoint.objective, checkpoint.codebook_VD, config, seed=checkpoint.recipe.seed)
    tokens = checkpoint.tokenizer.encode(content)
    euler = checkpoint.objective.composes_by_euler
    scores = evaluator.score(checkpoint.blocks, checkpoint.pooling, tokens, euler=euler)
    # Scores are per token; by bytes they compare between tokenizers.
    per_token = len(content) / len(tokens)
    composed = {"consensus": scores.consensus.to_dict(per_token)}
    if scores.euler is not None:
        composed["euler"] = scores.euler.to_dict(per_token)
    return {
        "composed": composed,
        "blocks": [score.to_dict(per_token) for score in scores.blocks],
        "bytes": len(content),
        "scored_tokens": len(tokens) - 1,
        "stride": checkpoint.recipe.model.context,
    }


def _table(result: dict[str, Any], text: Path) -> Table:
    from rich.table import Table

    table = Table(title=f"cross entropy on {text} ({result['scored_tokens']:,} tokens scored)")
    table.add_column("model")
    for column in ("nats/byte", "perplexity", "bits/byte"):
        table.add_column(column, justify="right")
    rows = [(f"composed: {name}", score) for name, score in result["composed"].items()]
    rows += [(f"block {i} alone", score) for i, score in enumerate(result["blocks"])]
    for name, score in rows:
        bits = score["bits_per_byte"]
        table.add_row(name, f"{bits * math.log(2):.4f}", f"{score['ppl']:.2f}", f"{bits:.3f}")
    return table
