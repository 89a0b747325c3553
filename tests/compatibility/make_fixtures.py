"""Makes folders as commit 59aa936 leaves them, which later versions must open, and what it made of them.

    git worktree add /tmp/old 59aa936
    python -m tests.compatibility.make_fixtures /tmp/old tests/compatibility/made-by-59aa936.tar.xz

Run it with an old tree only: the archive says what *that* code did. It uses the command line alone. Every
recipe names its text by a relative path, so that the folders can be unpacked anywhere.

In the archive:

- `half/`, `half-turns/`: `train` killed in its second group, and in the middle of its only one;
- `whole/`, `whole-turns/`: the same runs left alone; `whole/checkpoint` is the finished checkpoint;
- `swarm/`: a coordinator and a worker killed at a moment when an update was on its way, with their keys;
- `expected.json`: scores of `evaluate`, text of `generate`, the ledger's summary, and the machine.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import safetensors
import torch

from tests.waiting import until

RECIPE = """
name = "compatibility"
seed = 3
[model]
width = 16
heads = 2
blocks = 2
layers_per_block = 1
context = 24
feedforward = 2
condition_width = 4
[data]
corpus = "text.txt"
[training]
steps = 30
batch = 4
warmup_steps = 2
checkpoint_seconds = 1e-9
[evaluation]
max_bytes = 600
pooling_bytes = 500
noise_draws = 2
sample_bytes = 16
"""
TURNS = """
[objective]
codebook = "learned"
kind = "chain"
hint_probability = 0.0
[swarm]
steps_per_round = 5
"""
SWARM = """
[swarm]
steps_per_round = 4
rounds = 6
replicas = 1
evaluate_every_seconds = 600.0
[trust]
stamp_bits = 0
"""
RECIPES = {
    "recipe.toml": RECIPE,
    "turns.toml": RECIPE.replace("warmup_steps = 2", 'warmup_steps = 2\norder = "turns"') + TURNS,
    "swarm.toml": RECIPE.replace("blocks = 2", "blocks = 1") + SWARM,
}
RUNS = {"recipe.toml": ("half", "whole"), "turns.toml": ("half-turns", "whole-turns")}
WORDS = "one block learns from noise alone and every worker sends what it found home"
LEFT_OUT = ("curves.png", "metrics.jsonl", "lock")


def machine() -> dict[str, str]:
    """Where floating-point sums come out alike to the last bit."""
    return {"torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability()}


class OldTree:
    def __init__(self, tree: Path, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "blocktrain", *arguments],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            encoding="latin-1",
        )

    def run(self, *arguments: str) -> str:
        process = self.start(*arguments)
        out, _ = process.communicate()
        if process.returncode != 0:
            raise SystemExit(f"{' '.join(arguments)} ended with {process.returncode}")
        return out

    def kill(self, *processes: subprocess.Popen[str]) -> None:
        for process in processes:
            process.send_signal(signal.SIGKILL)
        for process in processes:
            process.wait()


def saved_step(path: Path) -> int:
    """The step that a state file of `train` was saved at; -1 before there is one."""
    try:
        with safetensors.safe_open(str(path), framework="pt") as file:
            metadata = json.dumps(file.metadata())
    except (OSError, safetensors.SafetensorError):
        return -1
    found = re.search(r'step\\*": *\\*"?([0-9]+)', metadata)
    return int(found.group(1)) if found else -1


def unsettled(folder: Path) -> bool:
    """True if a worker has formed an update and does not yet know its end."""
    for path in folder.glob("*/block-0.feedback"):
        try:
            with safetensors.safe_open(str(path), framework="np") as file:
                return bool(json.loads((file.metadata() or {}).get("outbox", "{}")).get("updates"))
        except (OSError, safetensors.SafetensorError):
            return False
    return False


def train_half(old: OldTree, recipe: str, out: str, state: str) -> None:
    process = old.start("train", recipe, "--out", out, "--device", "cpu")
    until(f"{out} is half-way", lambda: saved_step(old.folder / out / "state" / state) >= 7)
    old.kill(process)


def stop_swarm(old: OldTree) -> None:
    arguments = ["coordinator", "swarm.toml", "--data-dir", "swarm/coordinator", "--port", "0"]
    coordinator = old.start(*arguments)
    assert coordinator.stdout is not None
    url = ""
    while not url:
        found = re.search(r"coordinator ready url=(\S+)", coordinator.stdout.readline())
        url = found.group(1) if found else ""
    arguments = ["worker", "--coordinator", url, "--data-dir", "swarm/worker", "--corpus", "text.txt"]
    worker = old.start(*arguments, "--device", "cpu")
    swarm = old.folder / "swarm"

    def half_way() -> bool:
        """Two updates merged or about to be, and a third one formed whose end the worker does not know."""
        payloads = list((swarm / "coordinator" / "blobs" / "payloads").glob("*"))
        return len(payloads) >= 3 and unsettled(swarm / "worker")

    until("an update is on its way", half_way)
    old.kill(worker, coordinator)


def make(old: OldTree) -> None:
    words = WORDS.split()
    text = " ".join(words[(n * n + n // 7) % len(words)] for n in range(2_000))
    (old.folder / "text.txt").write_text(text)
    (old.folder / "score.txt").write_text(text[-700:])
    for name, content in RECIPES.items():
        (old.folder / name).write_text(content)
    train_half(old, "recipe.toml", "half", "group-1.safetensors")
    train_half(old, "turns.toml", "half-turns", "group-0.safetensors")
    for recipe, (_, whole) in RUNS.items():
        old.run("train", recipe, "--out", whole, "--device", "cpu")
    checkpoint = "whole/checkpoint"
    scores = old.run("evaluate", checkpoint, "--text", "score.txt", "--json", "--device", "cpu")
    flags = ["--prompt", "one block ", "--max-bytes", "24", "--seed", "5", "--device", "cpu"]
    written = old.run("generate", checkpoint, *flags)
    stop_swarm(old)
    ledger = old.run("ledger", "verify", "swarm/coordinator", "--receipts", "swarm/worker", "--json")
    expected = {
        "machine": machine(),
        "evaluate": json.loads(scores),
        "generate": written,
        "ledger": json.loads(ledger),
    }
    (old.folder / "expected.json").write_text(json.dumps(expected, indent=1))


def pack(folder: Path, archive: Path) -> None:
    # State that only the killed runs need, and pictures: out of the archive, which is kept small.
    for path in sorted(folder.rglob("*"), reverse=True):
        needless = path.name in LEFT_OUT or "whole" in path.parts[-3] and path.parent.name == "state"
        if path.is_file() and needless:
            path.unlink()
    with tarfile.open(archive, "w:xz", preset=9) as tar:
        tar.add(folder, arcname=".")


def main() -> None:
    tree, archive = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()
    folder = Path(tempfile.mkdtemp(prefix="compatibility-"))
    make(OldTree(tree, folder))
    pack(folder, archive)
    shutil.rmtree(folder)
    print(f"{archive}: {archive.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
