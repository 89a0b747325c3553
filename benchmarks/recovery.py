"""From `kill -9` of a worker to its next accepted update, for a block of 64 MB.

The worker is killed in the middle of a round and started again at once; the clock runs from the start of
the new process to the coordinator's verdict on an update that it computed, so it includes Python, torch,
the text, the snapshot, the round's steps, compression and the upload.

    python benchmarks/recovery.py [--repeats 3]
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from pathlib import Path

from swarm_bench import Program, block_parameters, ending, recipe_text, start, until

WIDTH, LAYERS, CONTEXT, BATCH = 512, 5, 64, 2
STEPS_PER_ROUND, CODEC = 4, "sparse:64"
PASS_SECONDS = 12.0
ACCEPTED = r"train block=0 (?:.*\n)+?.*outcome=accepted"


def worker_of(url: str, folder: Path, number: int) -> Program:
    arguments = ["worker", "--coordinator", url, "--data-dir", str(folder / "worker"), "--device", "cpu"]
    return start(arguments, folder / f"worker-{number}.log", threads=1)


def kill_mid_round(worker: Program) -> None:
    """Wait for a few merged rounds, then for the next one to have begun."""
    until(
        "three rounds are merged",
        lambda: len(re.findall("rebase block=0", worker.text())) >= 3,
        180,
        worker,
    )
    seen = len(re.findall("train block=0", worker.text()))
    until(
        "another round begins",
        lambda: len(re.findall("train block=0", worker.text())) > seen,
        60,
        worker,
    )
    worker.kill()


def measure(repeats: int, folder: Path) -> list[float]:
    recipe = folder / "recipe.toml"
    recipe.write_text(
        recipe_text(
            width=WIDTH,
            layers=LAYERS,
            context=CONTEXT,
            batch=BATCH,
            codec=CODEC,
            steps_per_round=STEPS_PER_ROUND,
            rounds=100_000,
        )
    )
    arguments = ["coordinator", str(recipe), "--data-dir", str(folder / "coordinator"), "--port", "0"]
    coordinator = start(arguments, folder / "coordinator.log", threads=1)
    found = []
    with ending(coordinator):
        url = coordinator.line(r"coordinator ready url=(\S+)").group(1)
        worker = worker_of(url, folder, 0)
        for number in range(1, 1 + repeats):
            with ending(worker):
                kill_mid_round(worker)
            started = time.monotonic()
            worker = worker_of(url, folder, number)
            with ending(*([] if number < repeats else [worker])):
                worker.line(ACCEPTED)
                found.append(time.monotonic() - started)
                cpu = worker.cpu_seconds()
            print(f"restart {number}: accepted after {found[-1]:.1f} s ({cpu:.1f} s of one core)", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    size = 4 * block_parameters(WIDTH, LAYERS, CONTEXT) / 1e6
    with tempfile.TemporaryDirectory() as folder:
        found = measure(options.repeats, Path(folder))
    passed = max(found) <= PASS_SECONDS
    print(f"block of {size:.0f} MB, codec {CODEC}, {STEPS_PER_ROUND} steps per round")
    print(f"slowest restart {max(found):.1f} s ({'pass' if passed else 'FAIL'}: at most {PASS_SECONDS:g} s)")
    raise SystemExit(0 if passed else 1)


if __name__ == "__main__":
    main()
