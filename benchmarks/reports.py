"""Every published report: is it newer than the code it measures, and has it the numbers of its kind?

    make reports
    python benchmarks/reports.py [--strict]

`fresh`: no code under the kind's paths changed since the commit in the report; comments and docstrings are no
code. `stale`: some did, in the files named. `unknown`: the report names no commit (all of before 2026-11-16),
a tree with changes, or one that is not in this history. Exits 1 when a file is of no kind or lacks numbers of
its kind, and with --strict also when one is not fresh.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"

TRAINING = (
    "src/blocktrain/model",
    *(f"src/blocktrain/data/{name}.py" for name in ("batches", "corpora", "shards")),
    *(f"src/blocktrain/training/{name}.py" for name in ("evaluation", "frozen", "inner", "muon")),
    *(f"src/blocktrain/training/{name}.py" for name in ("optimizer", "setup")),
)
"""What a loss after so many steps depends on. Not: how weights are stored, exchanged, exported or planned."""
PREPARE = ("src/blocktrain/data", "benchmarks/data.py")
SWARM = (
    *TRAINING,
    *(f"src/blocktrain/training/{name}.py" for name in ("exchange", "merge", "update")),
    *(f"src/blocktrain/{room}" for room in ("wire", "coordinator", "worker")),
)
TRUST = (*SWARM, "src/blocktrain/validation", "src/blocktrain/judge")


@dataclass(frozen=True)
class Kind:
    files: str
    """Which files of docs/results are of this kind."""
    paths: tuple[str, ...]
    """The code that the numbers depend on."""
    schema: Mapping[str, type | tuple[type, ...]]
    """What a report (or each of its rows) must have."""
    by_hand: str = ""
    """Why a report of this kind was not written by a program, where that is so."""


NUMBER = (int, float)
TRAIN_SCHEMA: Mapping[str, type | tuple[type, ...]] = {
    **{"composed": dict, "blocks": list, "recipe": dict, "seed": int, "versions": dict, "flops": dict},
}
KINDS: Mapping[str, Kind] = {
    "equal operations": Kind(
        "wikitext-2-equal-flops.json",
        (*TRAINING, "recipes/wikitext-2.toml"),
        {"seed 0": dict, "seed 1": dict},
        by_hand="joined from the reports of four runs",
    ),
    "train": Kind("wikitext-2*.json", (*TRAINING, "recipes/wikitext-2.toml"), TRAIN_SCHEMA),
    "train, litepaper": Kind("litepaper.json", (*TRAINING, "recipes/litepaper.toml"), TRAIN_SCHEMA),
    "train, memory": Kind("memory-*.json", (*TRAINING, "recipes/wikitext-2.toml"), TRAIN_SCHEMA),
    "data, prepare": Kind(
        "data-prepare*.json",
        PREPARE,
        {"ratio": NUMBER, "prepare_mb_per_processor_s": NUMBER, "peak_mb": NUMBER},
    ),
    "data, synthetic": Kind(
        "data-synthetic.json", PREPARE, {"prepare_mb_per_processor_s": NUMBER, "peak_mb": NUMBER}
    ),
    "data, throughput": Kind(
        "data-throughput*.json",
        ("src/blocktrain/data", "src/blocktrain/training/inner.py", "benchmarks/data.py"),
        {"ratio": NUMBER, "ratios": list, "device": str},
    ),
    "demo": Kind(
        "demo.json",
        (*TRUST, "src/blocktrain/local", "recipes/demo.toml"),
        {"ce_per_round": list, "reference_ce": NUMBER, "bytes_moved": int, "seconds": NUMBER},
    ),
    "depth": Kind(
        "depth.json",
        (*TRAINING, "benchmarks/depth.py"),
        {"depth": list, "units": list},
        by_hand="seed 0 is of two runs, and its end-to-end column was typed with four digits",
    ),
    "fleet": Kind(
        "fleet*.json",
        ("src/blocktrain/coordinator", "src/blocktrain/wire/signing.py", "benchmarks/fleet.py"),
        {"workers": int, "updates_per_second": NUMBER, "latency": dict, "lost": list, "rows": dict},
    ),
    "merge": Kind(
        "merge-*.json",
        (
            "src/blocktrain/coordinator",
            "src/blocktrain/wire/codec.py",
            "src/blocktrain/training/merge.py",
            "benchmarks/merge.py",
        ),
        {"parameters": int, "seconds": NUMBER, "processor_seconds": NUMBER, "peak_bytes": int},
    ),
    "large_blocks": Kind(
        "large-blocks*.json",
        (*TRAINING, "src/blocktrain/training/memory.py", "benchmarks/large_blocks.py"),
        {"results": list},
    ),
    "one_billion": Kind(
        "one-billion.json",
        (*SWARM, "benchmarks/one_billion.py", "recipes/one-billion.toml"),
        {"training_loss": list, "final": dict, "greedy": list, "versions": list},
    ),
    "specialise": Kind(
        "specialise-*.json", (*TRAINING, "benchmarks/specialise.py"), {"units": list, "pools": (list, dict)}
    ),
    "sweep": Kind("sweep.json", (*TRAINING, "benchmarks/sweep.py"), {"rows": list, "recipe": dict}),
    "t4": Kind("t4.json", (*SWARM, "src/blocktrain/simulation"), {"network": str, "final_ce": NUMBER}),
    "t5": Kind("t5.json", (*SWARM, "src/blocktrain/simulation"), {"network": str, "final_ce": NUMBER}),
    "t6": Kind(
        "t6.json",
        (*SWARM, "recipes/swarm-t6.toml"),
        {"one_process": dict, "six_workers": dict, "six_workers_32_rounds": dict},
        by_hand="joined from three runs",
    ),
    "t7": Kind(
        "t7-*.json",
        (*SWARM, "recipes/swarm-t7.toml"),
        {"final": dict, "bytes_total": int, "coordinator": dict},
    ),
    "activations": Kind(
        "activations.json",
        ("benchmarks/activations.py", "src/blocktrain/wire/frames.py"),
        {"activations": str, "ce": NUMBER, "largest_error": NUMBER},
    ),
    "serving": Kind(
        "serving-one-client.json",
        ("benchmarks/serving.py", "src/blocktrain/serving"),
        {"mode": str, "rtt_ms": int, "bytes_per_second": NUMBER, "bytes_per_traversal": NUMBER},
    ),
    "serving-cost": Kind(
        "serving-cost*.json",
        ("benchmarks/clients.py", "src/blocktrain/serving"),
        {"mode": str, "clients": int, "gateway_ms": NUMBER, "stage_ms": NUMBER, "total_ms": NUMBER},
    ),
    "serving-clients": Kind(
        "serving-clients-*.json",
        ("benchmarks/serving.py", "benchmarks/clients.py", "src/blocktrain/serving"),
        {"rtt_ms": int, "ratio": NUMBER},
    ),
    "serving-gpu": Kind(
        "serving-gpu.json",
        ("benchmarks/serving_gpu.py", "src/blocktrain/serving"),
        {"shape": str, "clients": int, "ours": NUMBER},
    ),
    "lossless": Kind(
        "lossless.json",
        ("benchmarks/lossless.py", "src/blocktrain/serving"),
        {"texts": int, "bytes": int, "kills": int, "retries": int},
    ),
    "t8": Kind(
        "t8.json",
        ("benchmarks/large_shapes.py", "src/blocktrain/wire/frames.py", "src/blocktrain/serving"),
        {"shape": str, "p50_seconds": NUMBER, "ar_p50_seconds": NUMBER, "litepaper_seconds": NUMBER},
    ),
    "refine": Kind(
        "refine*.json", (*TRAINING, "benchmarks/refine.py"), {"gap": NUMBER, "end_to_end": NUMBER}
    ),
    "unequal": Kind(
        "unequal*.json", (*TRAINING, "benchmarks/unequal.py"), {"pools": dict, "gain": NUMBER, "blocks": list}
    ),
    "gap": Kind(
        "gap-*.json", (*TRAINING, "benchmarks/gap.py"), {"gaps": list, "trials": list, "steps": dict}
    ),
    **{
        name: Kind(
            f"{name}.json",
            (*TRAINING, "benchmarks/noise_tables.py", "recipes/litepaper.toml"),
            {"row": dict, "ce": NUMBER, "consensus": NUMBER},
        )
        for name in ("t1", "t2", "t3")
    },
    "attacks": Kind(
        "attack-*.json",
        (
            "src/blocktrain/validation",
            "src/blocktrain/coordinator",
            "tests/adversaries",
            "benchmarks/attacks.py",
        ),
        {"number": int, "attack": str, "happened": str, "loss": str, "passed": bool},
    ),
    "rules": Kind("rules.json", (*TRAINING, "tests/adversaries", "benchmarks/attacks.py"), {"rises": dict}),
    "tune": Kind("tune-*.json", (*TRAINING, "benchmarks/tune.py"), {"trials": list, "best": dict}),
}
"""First match wins. Kinds that benchmarks can write and nobody has published yet need no line here."""


def kind_of(name: str) -> Kind | None:
    return next((kind for kind in KINDS.values() if fnmatch(name, kind.files)), None)


def lacking(report: Any, kind: Kind) -> list[str]:
    """What the schema asks for and the report does not have."""
    if isinstance(report, dict) and "rows" in report and "rows" not in kind.schema:
        report = report["rows"]
    parts = report if isinstance(report, list) else [report]
    found = [
        f"{key} ({type(part.get(key)).__name__})"
        for part in parts
        for key, wanted in kind.schema.items()
        if not isinstance(part.get(key), wanted)
    ]
    return found or ([] if parts else ["any row"])


def commit_of(report: Any) -> str | None:
    """The commit of a clean tree, wherever a report of its time keeps it."""
    if not isinstance(report, dict):
        return None
    made = report.get("provenance", report)
    if "commit" in made:
        return made["commit"] if made.get("clean") else None
    commit = str(report.get("versions", {}).get("commit", ""))
    return commit if commit and not commit.endswith("-dirty") else None


@cache
def code_of(commit: str, file: str) -> str | None:
    """What of a file can change a number; None where the commit does not have it."""
    command = ["git", "-C", str(ROOT), "show", f"{commit}:{file}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return None
    if not file.endswith(".py"):
        return done.stdout
    tree = ast.parse(done.stdout)
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            # Strings that stand alone: docstrings, also those below a constant or field.
            node.body = [one for one in body if not _is_text(one)]  # type: ignore[attr-defined]
    return ast.dump(tree)


def _is_text(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def changed_since(commit: str, paths: tuple[str, ...]) -> list[str] | None:
    """Files whose code is another now; None if the commit is not in this history."""
    command = ["git", "-C", str(ROOT), "diff", "--name-only", "--no-renames", f"{commit}..HEAD", "--", *paths]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return None
    return [file for file in done.stdout.splitlines() if code_of(commit, file) != code_of("HEAD", file)]


def state_of(report: Any, kind: Kind) -> str:
    commit = commit_of(report)
    if commit is None:
        return "unknown: no commit" + (f" ({kind.by_hand})" if kind.by_hand else "")
    changed = changed_since(commit, kind.paths)
    if changed is None:
        return f"unknown: commit {commit[:7]} is not in this history"
    if not changed:
        return f"fresh: {commit[:7]}"
    names = ", ".join(file.removeprefix("src/blocktrain/") for file in changed[:4])
    more = f" and {len(changed) - 4} more" if len(changed) > 4 else ""
    return f"stale: since {commit[:7]} another {names}{more}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--strict", action="store_true", help="exit 1 unless every report is fresh")
    options = parser.parse_args()
    wrong, not_fresh = 0, 0
    for path in sorted(RESULTS.glob("*.json")):
        report, kind = json.loads(path.read_text(encoding="utf-8")), kind_of(path.name)
        if kind is None:
            state, missing = "of no kind: see KINDS", ["a kind"]
        else:
            state, missing = state_of(report, kind), lacking(report, kind)
        wrong += bool(missing)
        not_fresh += not state.startswith("fresh")
        print(f"{path.name:32} {state}{'; lacks ' + ', '.join(missing[:3]) if missing else ''}")
    print(f"{wrong} not as their kind should be, {not_fresh} not known to be fresh")
    return 1 if wrong or (options.strict and not_fresh) else 0


if __name__ == "__main__":
    sys.exit(main())
