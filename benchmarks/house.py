"""How well a reader gets through this source tree: sizes, names, comments, and two walks.

    python benchmarks/house.py [--tree FOLDER] [--json] [--walk update|token] [--no-walks] [--leave-out LOOPS]

The first part reads the files. The second part *runs* the tree with a profiler: a coordinator and a worker
that train a tiny block, then a stage and a gateway that write a few tokens, all as the programs that users
start, so that it works on any commit whose command line is this one. docs/decisions/0011-the-house-
measured.md has the numbers and says how this ruler differs from counting by hand.

Words of a walk:

- *hop*: the first call of a function of the tree in one program. Loops and second calls are not counted,
  and lambdas and comprehensions are not functions. The hops are put in order thread by thread, because a
  thread (the worker's sender, the coordinator's judge, one that answers requests) is where a reader starts
  again at the top.
- *module change*: two hops in a row, in one thread, in two modules.
- *return*: the walk leaves a module for another and comes straight back (A, B, A).
- The walk of an *update* is everything that both programs call from the moment an assignment is lent until
  the worker has committed the next one: training, forming, committing, revealing, judging, merging,
  catching up. It is the third update of a run, so that joining and opening files are over. Heartbeats and
  polls are in it.
  On a slow machine loops that have nothing to do with the update run in that time too; `--leave-out
  nonces,metrics,shift,scoring,payloads` walks without these threads.
- The walk of a *token* is everything that gateway and stage call for the second of two requests.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import tokenize
import urllib.request
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

READY_SECONDS = 900.0
"""Importing torch under a profiler took longer than two minutes on two cores with a load of 40."""
UPDATE_WALKED = 2
"""Index of the update that is followed: the first two pay for joining, first snapshots and lazy imports."""

RECIPE = """
name = "house"
[model]
width = 32
heads = 2
blocks = 1
layers_per_block = 1
context = 32
[data]
corpus = "{text}"
[training]
steps = 4
batch = 4
warmup_steps = 2
reference = false
[evaluation]
max_bytes = 700
pooling_bytes = 500
noise_draws = 1
sample_bytes = 0
[swarm]
rounds = 6
steps_per_round = 3
replicas = 1
evaluate_every_seconds = 600.0
[trust]
stamp_bits = 0
"""


@dataclass(frozen=True)
class Aim:
    """A number to reach; `most` or `least` says from which side."""

    bound: float
    side: str = "most"

    def reached(self, value: float) -> bool:
        return value <= self.bound if self.side == "most" else value >= self.bound

    def __str__(self) -> str:
        return f"{'<=' if self.side == 'most' else '>='} {self.bound:g}"


AIMS = {
    "source lines": Aim(21_000),
    "one-caller helpers, % of functions": Aim(8),
    "comments per 100 lines": Aim(3, "least"),
    "comments per 100 lines, model": Aim(8, "least"),
    "class names defined twice": Aim(0),
    "lines of cli": Aim(2_000),
    # 150 hops, 35 modules and 12 returns as a reader counts them by hand: a profiler sees properties and
    # constructors too, 1.93, 1.18 and 1.67 times as many on the tree that both counted (decision 0011).
    "update: hops": Aim(290),
    "update: modules": Aim(41),
    "update: returns": Aim(20),
}


# ---------------------------------------------------------------------------------------- reading the files


def comment_lines(source: str) -> int:
    """Comments that say something to a reader: those that only steer a tool do not count."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    steering = re.compile(r"#\s*(noqa|type:|fmt:|pragma)")
    return sum(token.type == tokenize.COMMENT and not steering.match(token.string) for token in tokens)


def read_tree(package: Path) -> dict[str, Any]:
    """Everything that can be said of the files without running them."""
    files = {path.relative_to(package): path.read_text() for path in sorted(package.rglob("*.py"))}
    lines = {path: len(source.splitlines()) for path, source in files.items()}
    comments = {path: comment_lines(source) for path, source in files.items()}
    functions, classes, words = [], Counter[str](), Counter[str]()
    for source in files.values():
        words.update(re.findall(r"\w+", source))
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                functions.append((node.name, (node.end_lineno or node.lineno) - node.lineno + 1))
            elif isinstance(node, ast.ClassDef):
                classes[node.name] += 1
    # A private name that stands twice in the whole tree is defined once and used once: the review's ruler,
    # so that its 288 of 2,081 comes out again. It misses helpers that share a name, in both trees alike.
    helpers = sum(name[0] == "_" and name[:2] != "__" and words[name] == 2 for name, _ in functions)
    modules = Counter(path.stem for path in files if path.stem != "__init__")
    packages: Counter[str] = Counter()
    for path in files:
        packages[path.parts[0] if len(path.parts) > 1 else "(root)"] += lines[path]
    total, model = sum(lines.values()), packages["model"]
    in_model = sum(count for path, count in comments.items() if path.parts[0] == "model")
    lengths = sorted(length for _, length in functions)
    return {
        "source lines": total,
        "files": len(files),
        "functions": len(functions),
        "function length, median": lengths[len(lengths) // 2],
        "function length, 95 of 100": lengths[len(lengths) * 95 // 100],
        "one-caller helpers": helpers,
        "one-caller helpers, % of functions": round(100 * helpers / len(functions), 1),
        "comments per 100 lines": round(100 * sum(comments.values()) / total, 2),
        "comments per 100 lines, model": round(100 * in_model / max(1, model), 2),
        "class names defined twice": sum(count > 1 for count in classes.values()),
        "classes": ", ".join(sorted(name for name, count in classes.items() if count > 1)),
        "module names used twice": sum(count > 1 for count in modules.values()),
        "modules": ", ".join(sorted(name for name, count in modules.items() if count > 1)),
        "lines of cli": packages["cli"],
        "packages": dict(sorted(packages.items(), key=lambda item: -item[1])),
    }


# ------------------------------------------------------------------------------------- following a real run


@dataclass(frozen=True)
class Call:
    """One call of a function of the tree, as the profiler saw it."""

    time: float
    program: str
    thread: str
    module: str
    function: str


@dataclass(frozen=True)
class Walk:
    hops: int
    modules: int
    module_changes: int
    returns: int
    steps: tuple[str, ...] = ()


def walk_of(calls: Iterable[Call], start: float, end: float, leave_out: Sequence[str] = ()) -> Walk:
    """The walk through the calls between two moments: thread after thread, each function once."""
    visited: set[tuple[str, str, str]] = set()
    threads: dict[tuple[str, str], list[Call]] = {}
    for call in sorted(calls, key=lambda call: call.time):
        place = (call.program, call.module, call.function)
        left_out = call.thread.partition("@")[0] in leave_out
        if start <= call.time <= end and place not in visited and not left_out:
            visited.add(place)
            threads.setdefault((call.program, call.thread), []).append(call)
    changes = returns = 0
    for hops in threads.values():
        rooms = [hop.module for hop in hops]
        rooms = rooms[:1] + [now for before, now in zip(rooms, rooms[1:], strict=False) if now != before]
        changes += len(rooms) - 1
        returns += sum(first == third for first, third in zip(rooms, rooms[2:], strict=False))
    return Walk(
        hops=len(visited),
        modules=len({module for _, module, _ in visited}),
        module_changes=changes,
        returns=returns,
        steps=tuple(
            f"{hop.program}/{hop.thread} {hop.module}:{hop.function}"
            for hops in threads.values()
            for hop in hops
        ),
    )


def record(output: Path, package: Path, arguments: list[str]) -> None:
    """`blocktrain ARGUMENTS...` in this process, with every call of the package written down at its end."""
    prefix, program = f"{package}{os.sep}", arguments[0]
    seen: list[tuple[float, str, Any]] = []

    def profile(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(prefix) and not code.co_name.startswith("<"):
            thread = threading.current_thread()
            seen.append((time.time(), f"{thread.name}@{thread.ident}", code))

    threading.setprofile(profile)
    sys.setprofile(profile)
    sys.argv = ["blocktrain", *arguments]
    try:
        from blocktrain.cli import main

        main()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        calls = []
        for moment, thread, code in list(seen):
            module = code.co_filename.removeprefix(prefix).removesuffix(".py").replace(os.sep, ".")
            calls.append((moment, program, thread, module, code.co_qualname))
        output.write_text(json.dumps(calls))


@dataclass
class Recorded:
    """A program of the tree that runs under the profiler."""

    process: subprocess.Popen[bytes]
    log: Path
    output: Path

    def await_line(self, pattern: str) -> str:
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline:
            found = re.search(pattern, self.log.read_text(errors="replace"))
            if found:
                return found.group(1)
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        raise SystemExit(f"no line like {pattern!r} in {self.log}:\n{self.log.read_text(errors='replace')}")

    def calls(self) -> list[Call]:
        """Ends the program politely, and reads what it wrote down."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.process.wait(READY_SECONDS)
        return [Call(*one) for one in json.loads(self.output.read_text())]


class Tree:
    """The programs of one source tree, run in a scratch folder."""

    def __init__(self, package: Path, folder: Path) -> None:
        self.package, self.folder = package, folder
        self.environment = {**os.environ, "PYTHONPATH": str(package.parent), "OMP_NUM_THREADS": "1"}
        self.started: list[Recorded] = []

    def start(self, name: str, arguments: list[str]) -> Recorded:
        log, output = self.folder / f"{name}.log", self.folder / f"{name}.json"
        command = [sys.executable, __file__, "--record", str(output), "--tree", str(self.package), "--"]
        with log.open("wb") as file:
            process = subprocess.Popen(
                [*command, *arguments], stdout=file, stderr=file, env=self.environment, cwd=self.folder
            )
        self.started.append(Recorded(process, log, output))
        return self.started[-1]

    def recipe(self) -> Path:
        words = [f"{number * 7919 % 997:x}" for number in range(60)]
        text = " ".join(words[number * number % 59] for number in range(8_000))
        (self.folder / "text.txt").write_text(text)
        path = self.folder / "recipe.toml"
        path.write_text(RECIPE.format(text=self.folder / "text.txt"))
        return path

    def end(self) -> None:
        for program in self.started:
            if program.process.poll() is None:
                program.process.kill()
                program.process.wait()


@contextmanager
def tree_in_a_scratch_folder(package: Path) -> Iterator[Tree]:
    with tempfile.TemporaryDirectory(prefix="house-") as folder:
        tree = Tree(package, Path(folder))
        try:
            yield tree
        finally:
            tree.end()


def update_walk(package: Path, leave_out: Sequence[str]) -> Walk:
    with tree_in_a_scratch_folder(package) as tree:
        data = tree.folder / "coordinator"
        verb = ["coordinator", str(tree.recipe()), "--data-dir", str(data), "--port", "0"]
        coordinator = tree.start("coordinator", verb)
        url = coordinator.await_line(r"coordinator ready url=(\S+)")
        text = str(tree.folder / "text.txt")
        verb = ["worker", "--coordinator", url, "--data-dir", str(tree.folder / "worker"), "--device", "cpu"]
        worker = tree.start("worker", [*verb, "--corpus", text])
        if worker.process.wait(READY_SECONDS) != 0:
            raise SystemExit(f"the worker failed:\n{worker.log.read_text(errors='replace')}")
        calls = [*worker.calls(), *coordinator.calls()]
        # The moments come from the run's own books, whose tables are the same in every tree.
        (database,) = (path for path in data.iterdir() if path.suffix in (".db", ".sqlite", ".sqlite3"))
        with sqlite3.connect(database) as connection:
            moments = connection.execute(
                "SELECT assignments.made, updates.committed FROM updates "
                "JOIN assignments USING (assignment_id) ORDER BY updates.commit_sequence"
            ).fetchall()
        return walk_of(calls, moments[UPDATE_WALKED][0], moments[UPDATE_WALKED + 1][1], leave_out)


def token_walk(package: Path, leave_out: Sequence[str]) -> Walk:
    with tree_in_a_scratch_folder(package) as tree:
        training = tree.start("train", ["train", str(tree.recipe()), "--out", "run", "--device", "cpu"])
        training.process.wait(READY_SECONDS)
        checkpoint = str(tree.folder / "run" / "checkpoint")
        stage = tree.start("stage", ["stage", checkpoint, "--blocks", "0"])
        address = stage.await_line(r"stage ready listen=(\S+)")
        gateway = tree.start("gateway", ["gateway", checkpoint, "--stages", address, "--port", "0"])
        found = gateway.await_line(r"(gateway ready url=\S+ model=\S+)")
        url, model = re.findall(r"=(\S+)", found)
        body = {"model": model, "prompt": "1f 2a ", "max_tokens": 6, "stream": True, "seed": 1}
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        for _ in range(2):  # the first opens links and imports what is imported late
            start = time.time()
            with urllib.request.urlopen(request, timeout=READY_SECONDS) as answer:
                answer.read()
            end = time.time()
        return walk_of([*gateway.calls(), *stage.calls()], start, end, leave_out)


# ---------------------------------------------------------------------------------------------- the command


def measured(package: Path, walks: bool, leave_out: Sequence[str]) -> dict[str, Any]:
    facts = read_tree(package)
    for name, walk in (("update", update_walk), ("token", token_walk)) if walks else ():
        numbers = asdict(walk(package, leave_out))
        numbers.pop("steps")
        facts |= {f"{name}: {key.replace('_', ' ')}": value for key, value in numbers.items()}
    return facts


def table(facts: dict[str, Any]) -> str:
    rows = []
    for name, value in facts.items():
        if isinstance(value, dict):
            rows += [f"  {package:<34} {lines:>8,}" for package, lines in value.items()]
        elif isinstance(value, str):
            rows.append(f"  {value}" if value else "  none")
        else:
            aim = AIMS.get(name)
            told = "" if aim is None else f"   {aim} {'reached' if aim.reached(value) else 'NOT REACHED'}"
            rows.append(f"{name:<36} {value:>8,}{told}")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--tree", type=Path, default=Path(__file__).parents[1], help="a checkout; default: this"
    )
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    parser.add_argument("--no-walks", action="store_true", help="read the files only")
    parser.add_argument("--walk", choices=("update", "token"), help="print every hop of one walk")
    parser.add_argument("--leave-out", default="", help="threads that a walk goes without, by commas")
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("program", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.record is not None:
        record(options.record, options.tree, options.program)
        return
    package = (options.tree / "src" / "blocktrain").resolve()
    leave_out = [name for name in options.leave_out.split(",") if name]
    if options.walk is not None:
        walk = (update_walk if options.walk == "update" else token_walk)(package, leave_out)
        print("\n".join(walk.steps))
        print(
            f"{walk.hops} hops, {walk.modules} modules, {walk.module_changes} changes, {walk.returns} returns"
        )
        return
    facts = measured(package, not options.no_walks, leave_out)
    print(json.dumps(facts, indent=1) if options.json else table(facts))


if __name__ == "__main__":
    main()
