"""Training steps of the demo recipe in a fixed time, by how torch's threads wait (docs/decisions/0013).

    python benchmarks/busy_threads.py --seconds 15 --rounds 3 --busy 4

Each way runs in a process of its own, in turns, because OpenMP reads its settings once. `--busy` starts
that many processes that do nothing but count, as a volunteer's other programs might.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

WAYS = {
    "spin (torch's default)": {},
    "passive": {"OMP_WAIT_POLICY": "PASSIVE"},
    "GOMP_SPINCOUNT=0": {"GOMP_SPINCOUNT": "0"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}


def count_steps(seconds: float) -> int:
    """Steps of block 0 that this process makes, the first one (which warms up) left out."""
    import torch

    from blocktrain.config import find_recipe, load_recipe
    from blocktrain.training.local import LocalRun, Silent

    stop = threading.Event()

    class Counting(Silent):
        steps = 0

        def stepped(self, unit: str, step: int, total: int, ce: float, tokens: int) -> None:
            if step == 1:
                threading.Timer(seconds, stop.set).start()
            self.steps = step - 1

    counting = Counting()
    # With 200 steps every one is a point of the loss curve, and told to the observer.
    recipe = load_recipe(find_recipe("demo"), ["training.steps=200", "training.reference=false"])
    with tempfile.TemporaryDirectory() as folder:
        try:
            LocalRun(recipe, Path(folder) / "run", torch.device("cpu"), counting, stop).train(resume=False)
        except Exception as error:
            if not stop.is_set():
                raise RuntimeError("training ended by itself") from error
    return counting.steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--busy", type=int, default=0)
    parser.add_argument("--count", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.count:
        print(count_steps(options.seconds))
        return
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_", "KMP_"))}
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(options.busy)]
    try:
        for _ in range(options.rounds):
            for way, settings in WAYS.items():
                command = [sys.executable, __file__, "--count", "--seconds", str(options.seconds)]
                done = subprocess.run(
                    command, env={**clean, **settings}, capture_output=True, check=True, timeout=300
                )
                print(
                    f"{time.strftime('%H:%M')} load={os.getloadavg()[0]:.1f} {way}: {int(done.stdout)}",
                    flush=True,
                )
    finally:
        for child in busy:
            child.kill()


if __name__ == "__main__":
    main()
