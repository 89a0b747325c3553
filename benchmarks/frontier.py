"""What each way to cut a model costs a machine, and where it ends: tables and picture of docs/frontier.md.

    python benchmarks/frontier.py [--write]

The text is the documentation by bytes, in two sizes: twelve layers of width 384, 4000 steps of 32,768 bytes,
on a GPU; and what two CPU cores train in minutes, of width 64, with the code of a later day. Losses are read
from the reports in docs/results and docs/history/results; nothing is trained here. Memory, operations and
bytes sent are computed by the functions that `blocktrain plan`, the doctor and the schedule ask. `--write`
puts tables and picture into docs; without it the run exits 1 where docs/frontier.md has other tables.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import reports
import search
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


@dataclass(frozen=True)
class Size:
    """What all rows of a report have in common; a machine of `batch` sequences takes `at_once` of them."""

    width: int
    heads: int
    context: int
    batch: int
    steps: int
    at_once: int
    codebook: str = "fixed"


MIXED = "three blocks of 3 layers and one of 12"
FULL = Size(384, 6, 512, 64, 4000, 8)
SMALL = Size(64, 2, 128, 16, 600, 16, "own")


@dataclass(frozen=True)
class Cut:
    """How a model is cut, and what trains it."""

    layers: Sequence[int]
    """Of each block or part."""
    kind: str = "denoise"
    family: str = "blocktrain"
    codec: str = "sign"
    replicas: int = 1
    """Machines of each block, which share its batch."""


@dataclass(frozen=True)
class Row:
    name: str
    machines: str
    memory: int
    """Bytes of the machine that needs most, by the formula."""
    operations: float
    """Of all machines together."""
    sent: int
    """Bytes that a machine sends for a round; 0 where it trains alone."""
    losses: tuple[float, ...]
    """Held out, nats per byte, one for each seed."""
    report: str
    """Its path below docs, without the ending; where seeds have reports of their own, that of the first."""
    size: str = ""


def result(path: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "docs" / f"{path}.json").read_text())
    return found


def recipe_of(cut: Cut, size: Size) -> Recipe:
    layers = cut.layers
    model: dict[str, Any] = {"width": size.width, "heads": size.heads, "context": size.context}
    model |= {"blocks": len(layers), "family": cut.family}
    model |= {"block_layers": list(layers)} if len(set(layers)) > 1 else {"layers_per_block": layers[0]}
    batch = size.batch // cut.replicas
    training = {"batch": batch, "steps": size.steps, "micro_batch": min(batch, size.at_once)}
    objective: dict[str, Any] = {"kind": cut.kind}
    if cut.family == "blocktrain":
        objective |= {"codebook": size.codebook, "hint_probability": 0.0}
    return resolve_recipe({"model": model, "training": training, "objective": objective})


def cost(cut: Cut, size: Size = FULL) -> tuple[int, float, int]:
    """Memory of the largest machine, operations of all, bytes that the largest sends for a round."""
    recipe, count = recipe_of(cut, size), len(cut.layers)
    setup = Setup.of(recipe)
    with torch.device("meta"):
        blocks = [setup.objective.build(index, seed=0) for index in range(count)]
    memory = max(training_bytes(recipe, setup.objective, block=index) for index in range(count))
    forward = [forward_flops_per_token(recipe.model, block, setup.vocabulary) for block in blocks]
    tokens = size.steps * size.batch * size.context
    operations = float(sum(training_flops(one, 0, tokens) for one in forward))
    alone = count * cut.replicas == 1
    codec = CodecSpec.parse(cut.codec)
    return memory, operations, 0 if alone else max(frame_length(codec, schema_of(one)) for one in blocks)


def large_rows() -> list[Row]:
    """Of the reports that a GPU made; those in history are of code that has changed since."""
    of_subjects, of_sizes, of_parts = (
        "results/specialise-equal-4000",
        "history/results/unequal",
        "history/results/refine",
    )
    specialise, unequal, refine = map(result, (of_subjects, of_sizes, of_parts))
    # A unit without an index is the whole model end to end.
    ends = [unit for unit in specialise["units"] if unit["index"] is None]
    whole = tuple(unit["ce_per_byte"]["valid"] for unit in sorted(ends, key=lambda unit: unit["seed"]))
    weighed = [pool for pool in specialise["pools"] if pool["decays"]]
    specialists = tuple(
        pool["ce_per_byte"]["valid"] for pool in sorted(weighed, key=lambda pool: pool["seed"])
    )
    four, llama = cost(Cut([3] * 4)), Cut([12], family="llama")
    [steps] = {unit["steps"] for unit in specialise["units"] if unit["index"] is not None}
    apart = cost(Cut([3] * 4), replace(FULL, steps=steps))
    pooled, mixed, _, of_one = losses_of_sizes([unequal])
    return [
        Row("end to end", "1", *cost(Cut([12])), whole, of_subjects),
        Row("four blocks of 3 layers, pooled", "4", *four, pooled, of_sizes),
        Row("four blocks of 3 layers, each with its subject", "4", *apart, specialists, of_subjects),
        Row(MIXED, "3 small, 1 large", *cost(Cut([3, 3, 3, 12])), mixed, of_sizes),
        Row("one block of 3 layers", "1", *cost(Cut([3])), of_one, of_sizes),
        Row("Llama end to end", "1", *cost(llama), (refine["end_to_end"],), of_parts),
        Row(
            "Llama, trained elsewhere, last quarter refined in four parts",
            "4",
            *cost(Cut([3] * 4, "serial", "llama")),
            (refine["parts"],),
            of_parts,
        ),
    ]


def small_rows() -> list[Row]:
    """Of the reports that a CPU made. Only rows of one text and size can be compared."""
    return [*rows_of_sizes(), *rows_of_replicas(), *rows_of_ideas(), *rows_of_parts()]


def rows_of_sizes() -> list[Row]:
    path, told = "results/unequal-small", "600 steps of 2,048 bytes"
    pooled, mixed, large, small = losses_of_sizes([result(path), result(f"{path}-1")])
    return [
        Row("end to end, 12 layers", "1", *cost(Cut([12]), SMALL), large, path, told),
        Row("four blocks of 3 layers, pooled", "4", *cost(Cut([3] * 4), SMALL), pooled, path, told),
        Row(MIXED, "3 small, 1 large", *cost(Cut([3, 3, 3, 12]), SMALL), mixed, path, told),
        Row("one block of 3 layers", "1", *cost(Cut([3]), SMALL), small, path, told),
    ]


def rows_of_replicas() -> list[Row]:
    path, found = "results/t6-whole", []
    for one in result(path)["rows"]:
        cut, name, machines = Cut([12]), "end to end, 12 layers, another split of the text", "1"
        if "workers_bytes" in one:
            cut, machines = Cut([12], codec="sparse:64", replicas=4), "4"
            name = f"the whole model on each of four, {one['row']} steps"
        losses = (one["consensus"],)
        found.append(Row(name, machines, *cost(cut, SMALL), losses, path, "600 steps of 2,048 bytes"))
    return found


def rows_of_ideas() -> list[Row]:
    path = "results/search"
    report = result(path)
    layers, blocks, steps = (report["size"][name] for name in ("layers", "blocks", "steps"))
    size = replace(SMALL, width=report["size"]["width"], steps=steps)
    cuts = {
        search.END_TO_END: (f"end to end, {layers * blocks} layers", "1", Cut([layers * blocks])),
        "equal blocks": (f"four blocks of {layers} layers, pooled", "4", Cut([layers] * blocks)),
        search.DEFAULT: (f"four blocks of {layers} layers, subjects", "4", Cut([layers] * blocks)),
    }
    found = []
    for idea, (name, machines, cut) in cuts.items():
        rows = sorted((row for row in report["table"] if row["name"] == idea), key=lambda row: row["seed"])
        memory, _, sent = cost(cut, size)
        operations, losses = float(rows[0]["operations"]), tuple(row["ce"] for row in rows)
        told = f"{steps} steps of 2,048 bytes for each block"
        found.append(Row(name, machines, memory, operations, sent, losses, path, told))
    return found


def rows_of_parts() -> list[Row]:
    path = "results/refine-small"
    report = result(path)
    size = Size(64, 2, 128, 8, report["steps"], 8)
    told = f"{size.steps} steps of 1,024 bytes"
    whole, parts = Cut([8], family="llama"), Cut([2] * 4, "serial", "llama")
    name = "Llama of 8 layers, last quarter refined in four parts, judged"
    return [
        Row("Llama of 8 layers end to end", "1", *cost(whole, size), (report["end_to_end"],), path, told),
        Row(name, "4", *cost(parts, size), (report["parts"],), path, told),
    ]


def losses_of_sizes(found: Sequence[dict[str, Any]]) -> list[tuple[float, ...]]:
    """Of four small blocks, of three and a large one, of the large one alone and of a small one alone."""
    small = [one["pools"]["four small"] for one in found]
    large = [one["pools"]["three small, one large"] for one in found]
    return [
        tuple(one["consensus_ce"] for one in small),
        tuple(one["consensus_ce"] for one in large),
        tuple(one["block_ce"][-1] for one in large),
        tuple(one["block_ce"][0] for one in small),
    ]


def table(found: Sequence[Row], power: int) -> str:
    """Of one size, or with a column that says which; operations in ten to the power."""
    sizes = any(row.size for row in found)
    names = ["cut", *(["size"] if sizes else []), "machines", "memory of the largest", "operations of all"]
    names += ["sent by a machine in a round", "loss", "report", "commit"]
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for row in found:
        memory = f"{row.memory / 1e9:.2f} GB" if row.memory > 1e8 else f"{row.memory / 1e6:.0f} MB"
        cells = [row.name, *([row.size] if sizes else []), row.machines, memory]
        cells.append(f"{row.operations / 10**power:.1f} x 10^{power}")
        sent = f"{row.sent / 1e6:.2f} MB" if row.sent > 1e5 else f"{row.sent / 1e3:.0f} kB"
        cells.append(sent if row.sent else "nothing")
        cells.append(", ".join(f"{loss:.4f}" for loss in row.losses))
        cells.append(f"[{row.report.rpartition('/')[2]}]({row.report}.json)")
        cells.append((reports.commit_of(result(row.report)) or "none")[:7])
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def draw(found: Sequence[Row]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.5, 4), dpi=144, layout="constrained")
    axes = figure.subplots()
    named: list[tuple[float, float]] = []
    dots = [(row, row.memory / 1e9, sum(row.losses) / len(row.losses)) for row in found]
    for row, memory, loss in sorted(dots, key=lambda dot: -dot[2]):
        axes.scatter(memory, loss, s=30 + 8 * row.operations / 1e15, alpha=0.7)
        # A name is about a gigabyte long and 0.003 nats high: below its dot where another one lies beside it.
        crowded = any(abs(memory - x) < 1 and abs(loss - y) < 0.003 for x, y in named)
        named.append((memory, loss))
        place = (6, -13) if crowded else (6, 5)
        axes.annotate(row.name, (memory, loss), xytext=place, textcoords="offset points", fontsize=7)
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
    found = large_rows()
    tables = [table(found, 15), table(small_rows(), 12)]
    print("\n".join(tables), end="")
    page = PAGE.read_text()
    before, *parts = page.split(BEGIN)
    written, after = zip(*(part.split(END) for part in parts), strict=True)
    if options.write:
        filled = (BEGIN + one + END + rest for one, rest in zip(tables, after, strict=True))
        PAGE.write_text("".join((before, *filled)))
        draw(found)
        return 0
    if list(written) != tables:
        print(f"not so: {PAGE.name} has these tables; write them with --write", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
