"""What each way to cut a model costs a machine, and where it ends: the table and picture of docs/frontier.md.

    python benchmarks/frontier.py [--write]

The text is the documentation by bytes, the model twelve layers of width 384, 4000 steps of 32,768 bytes.
Losses are read from the reports in docs/results; nothing is trained here. Memory, operations and bytes sent
are computed by the functions that `blocktrain plan`, the doctor and the schedule ask. `--write` puts table
and picture into docs; without it the run exits 1 where docs/frontier.md has another table.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from blocktrain.codec_spec import CodecSpec
from blocktrain.config import Recipe, resolve_recipe
from blocktrain.tracking.curves import save
from blocktrain.training.cost import forward_flops_per_token, training_flops
from blocktrain.training.memory import training_bytes
from blocktrain.training.setup import Setup
from blocktrain.training.snapshot import schema_of
from blocktrain.wire.codec import frame_length

ROOT = Path(__file__).resolve().parents[1]
PAGE, PICTURE = ROOT / "docs" / "frontier.md", ROOT / "docs" / "pictures" / "frontier.png"
BEGIN, END = "<!-- table -->\n", "<!-- end of table -->\n"
STEPS, STEPS_PER_ROUND, MICRO_BATCH = 4000, 30, 8


@dataclass(frozen=True)
class Row:
    name: str
    machines: str
    memory: int
    """Bytes of the machine that needs most, by the formula, with MICRO_BATCH sequences at once."""
    operations: float
    """Of all machines together."""
    sent: int
    """Bytes that a machine sends for a round, in `sign`; 0 where it trains alone."""
    losses: tuple[float, ...]
    """Held out, nats per byte, one for each seed."""
    report: str


def result(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "docs" / "results" / f"{name}.json").read_text())
    return found


def recipe_of(layers: Sequence[int], kind: str = "denoise", family: str = "blocktrain") -> Recipe:
    model = {"width": 384, "heads": 6, "context": 512, "blocks": len(layers), "family": family}
    model |= {"block_layers": list(layers)} if len(set(layers)) > 1 else {"layers_per_block": layers[0]}
    training = {"batch": 64, "steps": STEPS, "micro_batch": MICRO_BATCH}
    return resolve_recipe({"model": model, "training": training, "objective": {"kind": kind}})


def cost(layers: Sequence[int], kind: str = "denoise", family: str = "blocktrain") -> tuple[int, float, int]:
    """Memory of the largest machine, operations of all, bytes that the largest sends for a round."""
    recipe = recipe_of(layers, kind, family)
    setup = Setup.of(recipe)
    with torch.device("meta"):
        blocks = [setup.objective.build(index, seed=0) for index in range(len(layers))]
    memory = max(training_bytes(recipe, setup.objective, block=index) for index in range(len(layers)))
    forward = [forward_flops_per_token(recipe.model, block, setup.vocabulary) for block in blocks]
    tokens = STEPS * recipe.training.batch * recipe.model.context
    operations = float(sum(training_flops(one, 0, tokens) for one in forward))
    sign = CodecSpec.parse("sign")
    return memory, operations, max(frame_length(sign, schema_of(block)) for block in blocks)


def rows() -> list[Row]:
    specialise = result("specialise-4000")
    unequal, refine = result("unequal"), result("refine")
    # A unit without an index is the whole model end to end.
    ends = [unit for unit in specialise["units"] if unit["index"] is None]
    whole = tuple(unit["ce_per_byte"]["valid"] for unit in sorted(ends, key=lambda unit: unit["seed"]))
    small, large = ("four small", "three small, one large")
    pooled = (unequal["pools"][small]["consensus_ce"],)
    mixed = (unequal["pools"][large]["consensus_ce"],)
    weighed = [pool for pool in specialise["pools"] if pool["decays"]]
    specialists = tuple(
        pool["ce_per_byte"]["valid"] for pool in sorted(weighed, key=lambda pool: pool["seed"])
    )
    memory, operations, _ = cost([12])
    found = [Row("end to end", "1", memory, operations, 0, whole, "specialise-4000")]
    blocks = cost([3] * 4)
    found.append(Row("four blocks of 3 layers, pooled", "4", *blocks, pooled, "unequal"))
    found.append(
        Row("four blocks of 3 layers, each with its subject", "4", *blocks, specialists, "specialise-4000")
    )
    large_one = cost([3, 3, 3, 12])
    found.append(
        Row("three blocks of 3 layers and one of 12", "3 small, 1 large", *large_one, mixed, "unequal")
    )
    alone = cost([3])
    of_one = (unequal["pools"][small]["block_ce"][0],)
    found.append(Row("one block of 3 layers", "1", alone[0], alone[1], 0, of_one, "unequal"))
    llama = cost([12], family="llama")
    found.append(Row("Llama end to end", "1", llama[0], llama[1], 0, (refine["end_to_end"],), "refine"))
    parts = cost([3] * 4, "serial", "llama")
    name = "Llama, trained elsewhere, last quarter refined in four parts"
    found.append(Row(name, "4", *parts, (refine["parts"],), "refine"))
    return found


def table(found: Sequence[Row]) -> str:
    lines = [
        "| cut | machines | memory of the largest | operations of all | sent by a machine in a round | "
        "loss | report |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in found:
        losses = ", ".join(f"{loss:.4f}" for loss in row.losses)
        sent = f"{row.sent / 1e6:.2f} MB" if row.sent else "nothing"
        link = f"[{row.report}](results/{row.report}.json)"
        lines.append(
            f"| {row.name} | {row.machines} | {row.memory / 1e9:.2f} GB | "
            f"{row.operations / 1e15:.1f} x 10^15 | {sent} | {losses} | {link} |"
        )
    return "\n".join(lines) + "\n"


def draw(found: Sequence[Row]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=144, layout="constrained")
    axes = figure.subplots()
    for row in found:
        loss = sum(row.losses) / len(row.losses)
        axes.scatter(row.memory / 1e9, loss, s=30 + 8 * row.operations / 1e15, alpha=0.7)
        axes.annotate(
            row.name, (row.memory / 1e9, loss), xytext=(6, 5), textcoords="offset points", fontsize=7
        )
    axes.set(xlabel="memory of the largest machine (GB)", ylabel="held-out loss (nats per byte)")
    axes.set_title("Lower left is better; a larger dot takes more operations in all", fontsize=9)
    axes.margins(x=0.3, y=0.12)
    axes.set_xlim(0, None)
    axes.grid(alpha=0.25)
    save(figure, PICTURE)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put table and picture into docs")
    options = parser.parse_args(arguments)
    found = rows()
    print(table(found), end="")
    page = PAGE.read_text()
    before, rest = page.split(BEGIN)
    written, after = rest.split(END)
    if options.write:
        PAGE.write_text(before + BEGIN + table(found) + END + after)
        draw(found)
        return 0
    if written != table(found):
        print(f"not so: {PAGE.name} has this table; write it with --write", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
