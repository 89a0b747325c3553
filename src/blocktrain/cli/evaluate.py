"""`blocktrain evaluate`: score a text with a checkpoint on this machine."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blocktrain.cli.options import DeviceOption, ModelArgument, to_stderr
from blocktrain.errors import DataError

if TYPE_CHECKING:
    from rich.table import Table


def evaluate(
    checkpoint: ModelArgument,
    text: Annotated[Path, typer.Option("--text", help="UTF-8 text to score.")],
    json_: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
    device: DeviceOption = "auto",
    draws: Annotated[int | None, typer.Option("--draws", min=1, help="Noise draws for euler.")] = None,
) -> None:
    """Score a text: cross entropy of each block and of both compositions."""
    from rich.console import Console

    from blocktrain import api
    from blocktrain.data.corpora import read_text

    content = read_text(text, "--text names a file to score, any UTF-8 text")
    if len(content) < 2:  # before a model is fetched from far away
        raise DataError(f"{text} has {len(content)} byte(s); scoring needs at least 2: name a longer one")
    result = api.evaluate(api.load(checkpoint, device=device, tell=to_stderr), content, draws=draws).to_dict()
    if json_:
        print(json.dumps(result, indent=2))
    else:
        Console().print(_table(result, text))


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
