"""Does a program still give the numbers that it gave at an older commit?

    python benchmarks/same.py specialise OLD_COMMIT -- benchmarks/specialise.py --docs D --texts {own} --quick

runs the command in a copy of the tree of OLD_COMMIT and in one of HEAD, on the CPU, and compares every number
of the two reports (`--json FILE` is added, unless --report names the file; {own} is a folder that each run
has for itself). A new option changes a program's code and none of its published numbers: where all are equal
to the last digit, that is written to docs/history/same-numbers.json, and `reports.py` calls a report of that
kind and commit fresh as long as nothing has changed since HEAD. A CPU says nothing of what is done on a GPU
only: it is refused where a line that mentions cuda, or one below it, is another.

Workers over HTTP have other numbers in each run, as their updates arrive in another order. For T6 and T7 the
command is then T4's: its simulation runs the coordinator's rounds, and has the same numbers each time.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import reach
import reports
from provenance import provenance

NOT_COMPARED = frozenset(("provenance", "commit", "commits", "seconds", "wall_seconds"))


def differences(before: Any, after: Any, where: str = "") -> Iterator[str]:
    """Places where the newer report lacks, or has otherwise, what the older one has."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in before.keys() - NOT_COMPARED:
            yield from differences(before[key], after.get(key), f"{where}.{key}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from differences(one, other, f"{where}[{index}]")
    elif before != after:
        yield f"{where}: {before} and {after}"


def on_cuda(tree: reach.Tree, key: reach.Key) -> list[str]:
    """Lines of a definition that mention cuda, each with what is indented below it."""
    file, name = key
    text = "\n".join(map(ast.unparse, tree.module(file).parts.get(name, ()))) if file in tree.files else ""
    found: list[str] = []
    below = None
    for line in text.splitlines():
        depth = len(line) - len(line.lstrip())
        if below is None or depth <= below:
            below = depth if "cuda" in line.lower() else None
        if below is not None:
            found.append(line)
    return found


def run_at(commit: str, command: Sequence[str], report: str | None, folder: Path) -> Any:
    tree, own = folder / commit, str(folder / f"{commit}-own")
    found = report.replace("{own}", own) if report else str(folder / f"{commit}.json")
    packed = subprocess.run(["git", "archive", commit], cwd=reach.ROOT, capture_output=True, check=True)
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        archive.extractall(tree, filter="data")
    paths = os.pathsep.join(str(tree / part) for part in ("src", "benchmarks", ""))
    environment = {**os.environ, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "", "BLOCKTRAIN_COMMIT": commit}
    words = [word.replace("{own}", own) for word in command] + ([] if report else ["--json", found])
    ended = subprocess.run([sys.executable, *words], cwd=tree, env=environment)
    if ended.returncode not in (0, 1):  # 1: a claim fails, which a tiny run may
        raise SystemExit(f"{' '.join(words)} ended with {ended.returncode} at {commit[:7]}")
    return json.loads(Path(found).read_text(encoding="utf-8"))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kind", choices=reports.KINDS)
    parser.add_argument("commit")
    parser.add_argument(
        "--report", help="the file that the command writes, such as {own}/T1-one-process.json"
    )
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    before, after = (
        subprocess.check_output(["git", "rev-parse", name], cwd=reach.ROOT, text=True).strip()
        for name in (options.commit, "HEAD")
    )
    kind = reports.KINDS[options.kind]
    changed = reports.changed_since(before, kind) or []
    trees = reach.tree(before), reach.tree(after)
    reached = reach.reached(before, kind.programs).keys() | reach.reached(after, kind.programs).keys()
    for key in sorted(key for key in reached if key[1] in changed):
        if on_cuda(trees[0], key) != on_cuda(trees[1], key):
            parser.error(f"{':'.join(key)} does something else on cuda now, of which a CPU says nothing")
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(2) as both:
        old, new = both.map(
            lambda commit: run_at(commit, options.command, options.report, Path(name)), (before, after)
        )
    if wrong := list(differences(old, new)):
        print(f"{len(wrong)} numbers are others, as {wrong[0]}", file=sys.stderr)
        return 1
    entry = {"kind": options.kind, "before": before, "after": after, "changed": changed}
    made = asdict(provenance(options.kind))
    entry |= {key: made[key] for key in ("command", "hardware", "versions", "date")}
    known = json.loads(reports.SAME.read_text(encoding="utf-8")) if reports.SAME.exists() else []
    kept = [one for one in known if (one["kind"], one["before"]) != (options.kind, before)]
    reports.SAME.write_text(json.dumps([*kept, entry], indent=1) + "\n", encoding="utf-8")
    print(f"the same numbers at {before[:7]} and {after[:7]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
