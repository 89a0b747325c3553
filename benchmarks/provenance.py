"""Where a report's numbers come from: code, command, machine, versions, seeds and date.

`write_report` is how a benchmark writes JSON. A report is an object whose key `provenance` holds what this
module found out; what a benchmark has as a list lies under `rows`. `benchmarks/reports.py` reads it again. A
machine that got a copy of the tree without its history is told the commit in BLOCKTRAIN_COMMIT.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from blocktrain.training.source import source_commit


@dataclass(frozen=True, kw_only=True)
class Provenance:
    kind: str
    """What it is a report of; `reports.KINDS` has the published ones."""
    commit: str | None
    clean: bool
    """Whether the tree was that of the commit; a told commit is believed."""
    command: str
    hardware: str
    versions: dict[str, str]
    seeds: list[int]
    date: str


def provenance(kind: str, seeds: Sequence[int] = ()) -> Provenance:
    described = source_commit() or ""
    return Provenance(
        kind=kind,
        commit=described.removesuffix("-dirty") or None,
        clean=bool(described) and not described.endswith("-dirty"),
        command=shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *map(_named, sys.argv[1:])]),
        hardware=hardware(),
        versions=library_versions(),
        seeds=list(seeds),
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
    )


def _named(argument: str) -> str:
    """Without the folders of one machine, which mean nothing on another and are nobody's business."""
    key, equals, value = argument.partition("=")
    if Path(value).is_absolute():
        return f"{key}{equals}{Path(value).name}"
    return Path(argument).name if Path(argument).is_absolute() else argument


def hardware() -> str:
    import torch

    cores = f"{len(os.sched_getaffinity(0))} CPU cores ({cpu_name()})"
    return f"{torch.cuda.get_device_name()}, {cores}" if torch.cuda.is_available() else cores


def cpu_name() -> str:
    described = Path("/proc/cpuinfo")
    lines = described.read_text().splitlines() if described.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def library_versions() -> dict[str, str]:
    import numpy
    import torch

    return {"python": platform.python_version(), "torch": str(torch.__version__), "numpy": numpy.__version__}


def write_report(
    path: Path | None,
    kind: str,
    numbers: Mapping[str, Any] | Sequence[Any],
    seeds: Sequence[int] = (),
) -> None:
    """Nothing where no path was asked for, so that benchmarks need no condition of their own."""
    if path is None:
        return
    body = dict(numbers) if isinstance(numbers, Mapping) else {"rows": list(numbers)}
    report = {"provenance": asdict(provenance(kind, seeds)), **body}
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def check_claims(claims: Mapping[str, bool]) -> int:
    """The exit code of a benchmark: 1, with the claims that do not hold on stderr, or 0."""
    failed = [claim for claim, holds in claims.items() if not holds]
    for claim in failed:
        print(f"not so: {claim}", file=sys.stderr, flush=True)
    return 1 if failed else 0
