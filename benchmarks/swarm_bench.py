"""What the swarm benchmarks share: a recipe of a given block size, programs, and waiting for them.

AdamW, because Muon's matrix products take seconds per step on a CPU and these benchmarks are not about it.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import blocktrain
from blocktrain.config import ModelConfig, ObjectiveConfig
from blocktrain.data.tokenizer import ByteTokenizer
from blocktrain.model.block import num_parameters
from blocktrain.model.objective import Objective

T = TypeVar("T")
POLL_SECONDS = 0.05


def recipe_text(
    *, width: int, layers: int, context: int, batch: int, steps_per_round: int, rounds: int, codec: str
) -> str:
    return f"""\
name = "benchmark"
seed = 1
[model]
width = {width}
heads = {width // 64}
blocks = 1
layers_per_block = {layers}
context = {context}
[data]
corpus = "builtin"
[training]
batch = {batch}
optimizer = "adamw"
warmup_steps = 10
reference = false
[evaluation]
max_bytes = 2000
[swarm]
steps_per_round = {steps_per_round}
rounds = {rounds}
replicas = 1
codec = "{codec}"
evaluate_every_seconds = 100000.0
[trust]
judge = "off"
stamp_bits = 0
"""


def block_parameters(width: int, layers: int, context: int) -> int:
    model = ModelConfig(width=width, heads=width // 64, blocks=1, layers_per_block=layers, context=context)
    objective = Objective(model, ObjectiveConfig(), vocabulary=ByteTokenizer.vocabulary)
    return num_parameters(objective.build(0, seed=0))


@dataclass
class Program:
    process: subprocess.Popen[bytes]
    log: Path

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def line(self, pattern: str) -> re.Match[str]:
        return until(pattern, lambda: re.search(pattern, self.text()), 120, self)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def cpu_seconds(self) -> float:
        """Processor time so far: what the clock would say on an idle machine with one core for it."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)


def until(what: str, condition: Callable[[], T | None], seconds: float, program: Program) -> T:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        if program.process.poll() is not None:
            raise SystemExit(f"{program.log.name} ended while waiting for {what}:\n{program.text()[-2000:]}")
        time.sleep(POLL_SECONDS)
    raise SystemExit(f"{what}: not within {seconds:.0f} s; see {program.log}")


def start(arguments: Sequence[str], log: Path, *, threads: int, prefix: Sequence[str] = ()) -> Program:
    """`blocktrain ARGUMENTS…`, perhaps inside a namespace (`prefix`)."""
    source = str(Path(blocktrain.__file__).parents[1])
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "blocktrain", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": str(threads)},
        )
    return Program(process, log)


@contextlib.contextmanager
def ending(*programs: Program) -> Iterator[None]:
    """Kill whatever of these still runs at the end, each by its own pid."""
    try:
        yield
    finally:
        for program in programs:
            program.kill()
