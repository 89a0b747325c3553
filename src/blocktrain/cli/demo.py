"""`blocktrain demo`: the first thing a newcomer runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from blocktrain.cli.options import DeviceOption
from blocktrain.config import find_recipe, load_recipe
from blocktrain.local.processes import stopping


def demo(
    out: Annotated[Path, typer.Option("--out", help="Folder for the results.")] = Path("runs/swarm-demo"),
    device: DeviceOption = "cpu",
    once: Annotated[
        bool, typer.Option("--once", help="End after the summary instead of staying up.")
    ] = False,
) -> None:
    """Train with four workers and an attacker, verify, serve and sample, on this machine in three minutes."""
    from rich.console import Console

    from blocktrain.local.demo import MARKER, Demo, clear_earlier_demo
    from blocktrain.training.storage import write_json

    recipe = load_recipe(find_recipe("demo"))
    clear_earlier_demo(out, recipe.name)
    # Before anything else is written: a demo that was killed can then be cleared by the next one.
    write_json(out / MARKER, {"recipe": recipe.to_dict()})
    with stopping() as stop:
        Demo(recipe, out.absolute(), device, Console(stderr=True), stop).run(once=once)
