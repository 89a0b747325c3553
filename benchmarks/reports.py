"""Every published report: is it newer than the code it measures, and has it the numbers of its kind?

    make reports
    python benchmarks/reports.py [--strict]

`fresh`: since the commit in the report no definition changed that the kind's programs can come to run
(`reach.py`) and that lies under the kind's paths, nor a recipe among them; or some did, and a run of both
commits gave the same numbers to the last digit (`same.py`). `stale`: those named did.
`unknown`: the report names no commit, a tree with changes, or a commit that is not in this history. Exits 1
when a file is of no kind or lacks numbers of its kind, and with --strict also when one is not fresh.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import reach

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
SAME = ROOT / "docs" / "history" / "same-numbers.json"
"""Pairs of commits between which a program gave the same numbers (`same.py`)."""

TRAINING = (
    *(f"src/blocktrain/model/{name}.py" for name in ("adaptive", "block", "composition", "cross_entropy")),
    *(f"src/blocktrain/model/{name}.py" for name in ("families", "layers", "llama", "noise", "objective")),
    *(f"src/blocktrain/model/{name}.py" for name in ("pooling", "qwen3", "sweep")),
    *(f"src/blocktrain/data/{name}.py" for name in ("batches", "corpora", "shards")),
    *(f"src/blocktrain/training/{name}.py" for name in ("evaluation", "frozen", "inner", "muon")),
    *(f"src/blocktrain/training/{name}.py" for name in ("optimizer", "setup")),
)
"""What a loss after so many steps depends on. Not: how weights are stored, exchanged, exported or planned,
nor how a model writes text (caches, captured and packed passes, sampling): a loss reads whole windows."""
SWARM = (
    *TRAINING,
    *(f"src/blocktrain/training/{name}.py" for name in ("exchange", "merge", "update")),
    *(f"src/blocktrain/{room}" for room in ("wire", "coordinator", "worker")),
)
TRUST = (*SWARM, "src/blocktrain/validation", "src/blocktrain/judge")
SERVING = ("src/blocktrain/serving", "src/blocktrain/model", "src/blocktrain/wire/frames.py")


def verbs(*names: str) -> tuple[str, ...]:
    return tuple(f"src/blocktrain/cli/{name}.py:{name}" for name in names)


PROGRAMS_OF_A_SWARM = verbs("coordinator", "worker")


@dataclass(frozen=True)
class Kind:
    files: str
    """Which files of docs/results are of this kind."""
    programs: tuple[str, ...]
    """What runs to make them: `file.py`, whose `main` it is, or `file.py:function`."""
    paths: tuple[str, ...]
    """Where the code lies that the numbers depend on."""
    schema: Mapping[str, type | tuple[type, ...]]
    """What a report (or each of its rows) must have."""
    apart: tuple[str, ...] = ()
    """How the names of definitions begin that are reached by name only and never run in these programs."""


NUMBER = (int, float)
WITHOUT_A_JUDGE = ("Judging.", "Rounds._guarded", "UpdateRow.judge_", "LayerCache.")
"""The recipes of T6 and T7 turn the judge off, and training has no caches."""
KINDS: Mapping[str, Kind] = {
    "data, throughput": Kind(
        "data-throughput.json",
        ("benchmarks/data.py:throughput",),
        ("src/blocktrain/data", "src/blocktrain/training/inner.py", "benchmarks/data.py"),
        {"ratio": NUMBER, "ratios": list, "device": str},
    ),
    "data, prepare": Kind(
        "data-prepare.json",
        ("benchmarks/data.py:prepare_rate", "src/blocktrain/cli/data.py:prepare"),
        ("src/blocktrain/data", "benchmarks/data.py"),
        {"ratio": NUMBER, "prepare_mb_per_processor_s": NUMBER, "peak_mb": NUMBER},
    ),
    "data, synthetic": Kind(
        "data-synthetic.json",
        ("benchmarks/data.py:synthetic_rate", "src/blocktrain/cli/data.py:prepare"),
        ("src/blocktrain/data", "benchmarks/data.py"),
        {"prepare_mb_per_processor_s": NUMBER, "peak_mb": NUMBER},
    ),
    "demo": Kind(
        "demo.json",
        (*verbs("demo", "gateway", "stage"), *PROGRAMS_OF_A_SWARM),
        (*TRUST, "src/blocktrain/model", "src/blocktrain/local", "recipes/demo.toml"),
        {"ce_per_round": list, "reference_ce": NUMBER, "bytes_moved": int, "seconds": NUMBER},
    ),
    "fleet": Kind(
        "fleet.json",
        ("benchmarks/fleet.py", *verbs("coordinator")),
        ("src/blocktrain/coordinator", "src/blocktrain/wire/signing.py", "benchmarks/fleet.py"),
        {"workers": int, "updates_per_second": NUMBER, "latency": dict, "lost": list, "rows": dict},
    ),
    "specialise": Kind(
        "specialise-*.json",
        ("benchmarks/specialise.py",),
        (*TRAINING, "benchmarks/specialise.py"),
        {"units": list, "pools": (list, dict)},
    ),
    **{
        name: Kind(
            f"{name}.json",
            ("benchmarks/litepaper.py:simulate",),
            (*SWARM, "src/blocktrain/simulation", "recipes/asynchrony.toml"),
            {"network": str, "final_ce": NUMBER},
        )
        for name in ("t4", "t5")
    },
    **{
        name: Kind(
            f"{name}*.json",
            (f"benchmarks/litepaper.py:{program}", *PROGRAMS_OF_A_SWARM),
            (*SWARM, f"recipes/swarm-{name}.toml"),
            {"row": str, "consensus": NUMBER, "seconds": NUMBER},
            WITHOUT_A_JUDGE,
        )
        for name, program in (("t6", "six_workers"), ("t7", "over_http"))
    },
    "activations": Kind(
        "activations.json",
        ("benchmarks/activations.py",),
        ("benchmarks/activations.py", *SERVING),
        {"activations": str, "ce": NUMBER, "largest_error": NUMBER},
    ),
    **{
        name: Kind(
            f"serving-{files}.json",
            ("benchmarks/serving.py:run_benchmark", "benchmarks/serving.py:stage_role"),
            ("benchmarks/serving.py", *SERVING),
            {"mode": str, "rtt_ms": int, "bytes_per_second": NUMBER, "bytes_per_traversal": NUMBER},
        )
        for name, files in (("serving", "one-client"), ("serving, five stages", "five-stages"))
    },
    "serving-cost": Kind(
        "serving-cost*.json",
        ("benchmarks/clients.py:run_cost", *verbs("gateway", "stage")),
        ("benchmarks/clients.py", *SERVING),
        {"mode": str, "clients": int, "gateway_ms": NUMBER, "stage_ms": NUMBER, "total_ms": NUMBER},
    ),
    "serving-clients": Kind(
        "serving-clients-*.json",
        (
            "benchmarks/serving.py:run_load",
            "benchmarks/serving.py:stage_role",
            "benchmarks/clients.py:load_role",
        ),
        ("benchmarks/serving.py", "benchmarks/clients.py", *SERVING),
        {"rtt_ms": int, "ratio": NUMBER},
    ),
    "serving-gpu": Kind(
        "serving-gpu.json",
        ("benchmarks/serving_gpu.py",),
        ("benchmarks/serving_gpu.py", *SERVING),
        {"shape": str, "clients": int, "ours": NUMBER},
    ),
    "lossless": Kind(
        "lossless.json",
        ("benchmarks/serving.py:lossless_role", *verbs("stage")),
        ("benchmarks/lossless.py", *SERVING),
        {"texts": int, "bytes": int, "kills": int, "retries": int},
    ),
    "t8": Kind(
        "t8.json",
        ("benchmarks/large_shapes.py",),
        ("benchmarks/large_shapes.py", *SERVING),
        {"shape": str, "p50_seconds": NUMBER, "ar_p50_seconds": NUMBER, "litepaper_seconds": NUMBER},
    ),
    "refine": Kind(
        "refine*.json",
        ("benchmarks/refine.py", *PROGRAMS_OF_A_SWARM),
        (*SWARM, "benchmarks/refine.py"),
        {"gap": NUMBER, "end_to_end": NUMBER},
    ),
    "micro-batches": Kind(
        "micro-batches*.json",
        ("benchmarks/micro_batches.py:measure",),
        (*TRAINING, "benchmarks/micro_batches.py"),
        {"trained": str, "at_once": int, "peak_bytes": int, "device": str},
    ),
    "unequal": Kind(
        "unequal*.json",
        ("benchmarks/unequal.py",),
        (*TRAINING, "benchmarks/unequal.py"),
        {"pools": dict, "gain": NUMBER, "blocks": list},
    ),
    "search": Kind(
        "search*.json",
        ("benchmarks/search.py",),
        (*TRAINING, "benchmarks/search.py", "benchmarks/specialise.py"),
        {"size": dict, "rates": dict, "trials": list, "table": list},
    ),
    "gap": Kind(
        "gap-*.json",
        ("benchmarks/gap.py",),
        (*TRAINING, "benchmarks/gap.py", "benchmarks/tune.py"),
        {"gaps": list, "trials": list, "steps": dict},
    ),
    **{
        name: Kind(
            f"{name}.json",
            ("benchmarks/noise_tables.py:train_row",),
            (*TRAINING, "benchmarks/noise_tables.py", "recipes/litepaper.toml"),
            {"row": dict, "ce": NUMBER, "consensus": NUMBER},
        )
        for name in ("t1", "t2", "t3")
    },
    "long attacks": Kind(
        "attack-long*.json",
        ("benchmarks/attacks.py:run_long", *verbs("coordinator")),
        (*TRUST, "tests/adversaries", "benchmarks/attacks.py", "recipes/demo.toml"),
        {"number": int, "attack": str, "size": str, "rounds": int, "loss": str, "passed": bool},
    ),
    "attacks": Kind(
        "attack-*.json",
        (
            "benchmarks/attacks.py:lasting_rows",
            *(f"benchmarks/attacks.py:play_{name}" for name in ("campaign", "stale", "poisoned", "serial")),
            *verbs("coordinator"),
        ),
        (*TRUST, "tests/adversaries", "benchmarks/attacks.py"),
        {"number": int, "attack": str, "happened": str, "loss": str, "passed": bool},
    ),
    "rules": Kind(
        "rules.json",
        ("benchmarks/attacks.py:run_rules",),
        (*TRAINING, "tests/adversaries", "benchmarks/attacks.py"),
        {"rises": dict},
    ),
    "tune": Kind(
        "tune-*.json",
        ("benchmarks/tune.py",),
        (*TRAINING, "benchmarks/tune.py"),
        {"trials": list, "best": dict},
    ),
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


def changed_since(commit: str, kind: Kind) -> list[str] | None:
    """Definitions and recipes that are others now; None if the commit is not in this history."""
    try:
        before, now = reach.tree(commit), reach.tree("HEAD")
    except subprocess.CalledProcessError:
        return None
    if any(program.partition(":")[0] not in before.files for program in kind.programs):
        return ["programs of another name"]
    recipes = [path for path in kind.paths if path.endswith(".toml") and path in now.files]
    return [
        *(path for path in recipes if settings(before.files.get(path)) != settings(now.files[path])),
        *(
            name
            for name in reach.changed(
                reach.reached(commit, kind.programs), reach.reached("HEAD", kind.programs), kind.paths
            )
            if not name.startswith(kind.apart)
        ),
    ]


def settings(recipe: bytes | None) -> dict[str, Any] | None:
    """What a recipe says, without its comments and its layout; None for one that is not there."""
    return None if recipe is None else tomllib.loads(recipe.decode())


def state_of(report: Any, kind: Kind) -> str:
    commit = commit_of(report)
    if commit is None:
        return "unknown: no commit"
    changed = changed_since(commit, kind)
    if changed is None:
        return f"unknown: commit {commit[:7]} is not in this history"
    if not changed:
        return f"fresh: {commit[:7]}"
    for same in json.loads(SAME.read_text(encoding="utf-8")) if SAME.exists() else ():
        if (KINDS[same["kind"]], same["before"]) == (kind, commit) and changed_since(
            same["after"], kind
        ) == []:
            return f"fresh: {commit[:7]}, with the same numbers at {same['after'][:7]} (another {changed[0]})"
    names = ", ".join(changed[:4])
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
