"""Memory of a training step: a block, the same layers end to end, and end to end in micro-batches.

    python benchmarks/micro_batches.py wikitext-2 --set data.corpus=W [--parts 4] [--device cpu] [--json FILE]

The most that three steps take, each row in a process of its own: on a GPU the peak of its allocator, on a CPU
what the process has resident above what it had before the model was made. `--parts` cuts a batch into as many
micro-batches, whose gradients add up to the same step. Nearly all that a large batch takes is activations,
and who lacks the memory for them cuts the batch before the model: without these rows a block looks better
than it is. Nothing fails here: what a block saves is a finding.
"""

from __future__ import annotations

import argparse
import re
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from provenance import write_report

from blocktrain.config import find_recipe, load_recipe
from blocktrain.data.batches import open_batches
from blocktrain.data.corpora import open_text
from blocktrain.training.device import find_device
from blocktrain.training.inner import BlockTrainer
from blocktrain.training.setup import Setup

STEPS = 3


def measure(
    name: str, settings: list[str], device_name: str, index: int | None, parts: int
) -> dict[str, Any]:
    """In a process of its own, which has held nothing else."""
    recipe, device = load_recipe(find_recipe(name), settings), find_device(device_name)
    at_once = -(-recipe.training.batch // parts)
    recipe = load_recipe(find_recipe(name), [*settings, f"training.micro_batch={at_once}"])
    text = open_text(recipe)
    setup = Setup.of(recipe, text.manifest.vocabulary)
    before = resident_bytes("VmRSS")
    block = (setup.initial_reference() if index is None else setup.initial(index)).to(device)
    batches, codebook = open_batches(recipe, text, device), setup.codebook().to(device)
    trainer = BlockTrainer(recipe, setup.objective, block, index, batches, codebook)
    for step in range(STEPS):
        trainer.step(step, index or 0)
    return {
        "trained": "end to end" if index is None else "block",
        "sequences": recipe.training.batch,
        "at_once": at_once,
        "width": recipe.model.width,
        "layers": block.num_layers,
        "device": device.type,
        "peak_bytes": int(torch.cuda.max_memory_allocated(device))
        if device.type == "cuda"
        else resident_bytes("VmHWM") - before,
    }


def resident_bytes(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--parts", type=int, default=4)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    seed = load_recipe(find_recipe(options.recipe), options.set).seed
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        waiting = [
            pool.submit(measure, options.recipe, options.set, options.device, index, parts)
            for index in (0, None)
            for parts in (1, options.parts)
        ]
        rows = [one.result() for one in waiting]
    print("| trained | sequences at once | peak | of end to end with the whole batch |\n|---|---|---|---|")
    for row in rows:
        peak, whole = row["peak_bytes"], rows[2]["peak_bytes"]
        print(
            f"| {row['trained']}, {row['layers']} layers of width {row['width']} | {row['at_once']} of "
            f"{row['sequences']} | {peak / 1e9:.2f} GB | {peak / whole:.3f} |"
        )
    write_report(options.json, "micro-batches", rows, [seed])
    return 0


if __name__ == "__main__":
    sys.exit(main())
