"""Machines as a plan sees them: groups of equal ones, from options, a file, or the workers of a run.

A file comes from the user; a run's status from a coordinator, which may be a stranger: its
numbers are believed, and go into nothing but the plan that is printed.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from blocktrain.config import did_you_mean
from blocktrain.errors import UserError
from blocktrain.wire.messages import WorkerState

SUSTAINED_SHARE = 0.45
"""Of a data sheet's peak. A block of a billion parameters had 0.50 on an H200 (docs/experiments.md); no other
card was measured."""
MAX_FILE_BYTES = 1 << 20
MAX_MACHINES = 1_000_000
LEAST, MOST = 1e-9, 1e9
"""Of memory, speed and lines: sums and quotients of such numbers stay finite."""


@dataclass(frozen=True)
class Card:
    """A GPU by its data sheet: memory, and dense bf16 operations per second (fp16 where it has no bf16)."""

    memory_gb: float
    peak_tflops: float


CARDS: Mapping[str, Card] = {
    "b200": Card(180, 2250),
    "h200": Card(141, 989),
    "h100": Card(80, 989),
    "a100": Card(80, 312),
    "a100-40": Card(40, 312),
    "l40s": Card(48, 362),
    "a6000": Card(48, 155),
    "rtx-5090": Card(32, 209),
    "rtx-4090": Card(24, 165),
    "rtx-3090": Card(24, 71),
    "l4": Card(24, 121),
    "rtx-4060": Card(8, 60),
    "t4": Card(16, 65),
}


@dataclass(frozen=True, kw_only=True)
class MachineGroup:
    """Equal machines, each with one device that trains."""

    count: int = 1
    device: str
    memory_gb: float
    tflops: float
    """10^12 operations per second that training keeps up."""
    up_mbit: float = 20.0
    down_mbit: float = 100.0

    def __post_init__(self) -> None:
        if not 1 <= self.count <= MAX_MACHINES:
            raise UserError(f"machines: count must be between 1 and {MAX_MACHINES:,}, found {self.count}")
        for key in ("memory_gb", "tflops", "up_mbit", "down_mbit"):
            value = getattr(self, key)
            # A worker on a CPU does not say how much memory it has; nothing else is without end.
            unknown = key == "memory_gb" and value == math.inf
            if not (unknown or LEAST <= value <= MOST):
                raise UserError(
                    f"machines: {key} must be between {LEAST:g} and {MOST:g}, found {str(value)[:40]}"
                )

    @property
    def memory_bytes(self) -> float:
        return 1e9 * self.memory_gb

    @property
    def device_type(self) -> str:
        return "cpu" if self.device == "cpu" else "cuda"

    @property
    def compute(self) -> float:
        """All of them together."""
        return self.count * self.tflops


KEYS = {
    "count": int,
    "device": str,
    "memory_gb": float,
    "tflops": float,
    "up_mbit": float,
    "down_mbit": float,
}


def group_of(values: Mapping[str, Any], where: str) -> MachineGroup:
    """A group from its keys; what a known card leaves out comes from its data sheet."""
    unknown = sorted(set(values) - set(KEYS))
    if unknown:
        raise UserError(
            f"{where}: unknown key {unknown[0]!r}; expected {', '.join(KEYS)}{did_you_mean(unknown[0], KEYS)}"
        )
    found: dict[str, Any] = {}
    for key, value in values.items():
        wanted = KEYS[key]
        fits = isinstance(value, (int, float) if wanted is float else wanted) and not isinstance(value, bool)
        if not fits:
            raise UserError(f"{where}: {key} must be {wanted.__name__}, found {value!r}")
        found[key] = value
    device = str(found.get("device", "")).lower().replace(" ", "-")
    card = CARDS.get(device)
    if card is not None:
        found = {"memory_gb": card.memory_gb, "tflops": SUSTAINED_SHARE * card.peak_tflops, **found}
    missing = [key for key in ("device", "memory_gb", "tflops") if key not in found]
    if missing:
        raise UserError(
            f"{where}: {missing[0]} is missing; name a known device ({', '.join(CARDS)}), or give device, "
            f"memory_gb and tflops (what it keeps up in training){did_you_mean(device, CARDS)}"
        )
    return MachineGroup(**{**found, "device": device})


def parse_group(text: str) -> MachineGroup:
    """`8x rtx-4090 up_mbit=30 down_mbit=100`: how many, which device, and any key of a file."""
    where, values = f"--machine {text!r}", {}
    for word in text.split():
        key, equals, value = word.partition("=")
        if not equals:
            # A bare word is a count or a device.
            key, value = (
                ("count", word[:-1]) if word[-1:] == "x" and word[:-1].isdigit() else ("device", word)
            )
        if key in values:
            raise UserError(f"{where}: {key} stands twice")
        wanted = KEYS.get(key, str)
        try:
            values[key] = wanted(value)
        except ValueError:
            raise UserError(f"{where}: {key} must be {wanted.__name__}, found {value!r}") from None
    return group_of(values, where)


def read_groups(path: Path) -> list[MachineGroup]:
    """A TOML or JSON file with a list `machines`."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise UserError(f"{path} is larger than {MAX_FILE_BYTES} bytes; expected a list of machines")
        text = path.read_text(encoding="utf-8")
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"cannot read machines from {path}: {error}") from None
    listed = values.get("machines") if isinstance(values, dict) else None
    if not isinstance(listed, list) or not listed or not all(isinstance(one, dict) for one in listed):
        raise UserError(
            f"{path}: expected one table [[machines]] for each kind of machine, such as count = 8, device = "
            '"rtx-4090", up_mbit = 30'
        )
    return [group_of(one, f"{path}, machines {number}") for number, one in enumerate(listed, 1)]


def groups_of_workers(workers: Iterable[WorkerState], flops_per_token: float) -> list[MachineGroup]:
    """The live workers of a run that have delivered, each as fast as it was. Equal ones are one group.

    A line is at least as fast as this says: a worker counts its transfers both ways in one time.
    """

    def rounded(value: float) -> float:
        # Two digits, so that equal machines look equal.
        return float(f"{max(value, LEAST):.1e}")

    found: Counter[MachineGroup] = Counter()
    for worker in workers:
        if not worker.live or not worker.tokens_per_second:
            continue
        kind, _, name = worker.device.partition(" ")
        seconds = worker.seconds_transferring or math.inf
        up, down = (sum(moved.model_dump().values()) for moved in (worker.up, worker.down))
        group = MachineGroup(
            device="cpu" if kind == "cpu" else name.strip("()").lower() or kind,
            memory_gb=worker.memory_bytes / 1e9 if worker.memory_bytes else math.inf,
            tflops=rounded(worker.tokens_per_second * flops_per_token / 1e12),
            up_mbit=rounded(8 * up / 1e6 / seconds),
            down_mbit=rounded(8 * down / 1e6 / seconds),
        )
        found[group] += 1
    return [replace(group, count=count) for group, count in found.items()]
