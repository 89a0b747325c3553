"""The documentation as blocks of commands, and what runs them.

What a fence's first line says decides what is done with the block:

    sh           run as one script; must end with 0
    sh server    one command, started and left running until its page or another server takes its port
    sh norun     cannot be run here (root, the network, other machines); syntax and options are checked
    python       run as a script
    others       not commands
"""

from __future__ import annotations

import os
import queue
import re
import shlex
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
FENCE = re.compile(
    r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<body>.*?)^(?P=indent)```$", re.DOTALL | re.MULTILINE
)
READY = re.compile(r"(ready (url|listen)=|^serving .* at http)")
READY_SECONDS = 60


@dataclass(frozen=True)
class Fence:
    page: str
    line: int
    info: tuple[str, ...]
    body: str

    @property
    def kind(self) -> str:
        return self.info[0] if self.info else ""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def fences(path: Path) -> list[Fence]:
    text = path.read_text(encoding="utf-8")
    return [
        Fence(
            name_of(path), text[: found.start()].count("\n") + 1, tuple(found["info"].split()), found["body"]
        )
        for found in FENCE.finditer(text)
    ]


def commands(script: str) -> list[list[str]]:
    """The words of each command of a shell script, pipes and assignments taken apart."""
    joined = re.sub(r"\\\n\s*", " ", script)
    found = []
    for line in joined.splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        part: list[str] = []
        for word in [*lexer, ";"]:
            if set(word) <= set(";|&()"):
                found.append(part)
                part = []
            elif part or not re.fullmatch(r"\w+=.*", word):
                part.append(word)
    return [part for part in found if part]


@dataclass
class Runner:
    """Runs the blocks of one page in one folder, with free ports in place of the documented ones
    and one round where a swarm is told its number."""

    folder: Path
    environment: Mapping[str, str]
    ports: Mapping[int, int]
    servers: dict[int, subprocess.Popen[str]] = field(default_factory=dict)

    def adapted(self, script: str) -> str:
        for documented, free in self.ports.items():
            script = re.sub(rf"\b{documented}\b", str(free), script)
        script = script.replace("0.0.0.0", "127.0.0.1")
        script = re.sub(r"swarm\.rounds=\d+", "swarm.rounds=1", script)
        return re.sub(
            r"(blocktrain (?:join|(?:worker|doctor|judge) --coordinator) \S+)", rf"\1 {self.corpus()}", script
        )

    def corpus(self) -> str:
        """These runs train on a short text, which a worker's user must name; the recipes' own is builtin."""
        text = self.environment.get("BLOCKTRAIN_DATA_CORPUS")
        return "" if text is None else f"--corpus {text}"

    def run(self, fence: Fence) -> str:
        if fence.kind == "python":
            (self.folder / "example.py").write_text(self.adapted(fence.body))
            return self.shell("python example.py", fence)
        if "server" in fence.info:
            self.serve(fence)
            return ""
        return self.shell(self.adapted(fence.body), fence)

    def shell(self, script: str, fence: Fence) -> str:
        done = subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", script],
            cwd=self.folder, env=dict(self.environment), stdin=subprocess.DEVNULL, timeout=120,
            capture_output=True, text=True, errors="replace",
        )  # fmt: skip
        told = (
            f"{fence} ended with {done.returncode}:\n{script}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        )
        assert done.returncode == 0, told
        return done.stdout

    def serve(self, fence: Fence) -> None:
        script = self.adapted(fence.body)
        named = re.search(r"--port (\d+)", script)
        assert named is not None, f"{fence}: a server names its port, so that it can be given a free one"
        port = int(named[1])
        self.end(port)
        process = subprocess.Popen(
            ["bash", "-c", f"exec {script.strip()}"], cwd=self.folder, env=dict(self.environment),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True,
            errors="replace",
        )  # fmt: skip
        self.servers[port] = process
        await_ready(process, fence)

    def end(self, port: int) -> None:
        process = self.servers.pop(port, None)
        if process is None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(40)
        finally:
            process.kill()

    def close(self) -> None:
        for port in list(self.servers):
            self.end(port)


def await_ready(process: subprocess.Popen[str], fence: Fence) -> None:
    """Until it says so; what it says later is read and thrown away, or it would stop at a full pipe."""
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def read() -> None:
        assert process.stdout is not None
        with process.stdout as output:
            for line in output:
                lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    said = []
    while (line := lines.get(timeout=READY_SECONDS)) is not None:
        said.append(line)
        if READY.search(line):
            return
    raise AssertionError(f"{fence} ended with {process.wait()} before it was ready:\n{''.join(said)}")


def free_ports(count: int) -> list[int]:
    import socket

    held = [socket.socket() for _ in range(count)]
    try:
        for one in held:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in held]
    finally:
        for one in held:
            one.close()


def blocktrain_words() -> Iterator[tuple[str, list[str]]]:
    """Every `blocktrain …` that the pages name, in fences, indented blocks and code spans."""
    for path in pages():
        text = path.read_text(encoding="utf-8")
        for fence in fences(path):
            if fence.kind in ("sh", "bash"):
                for words in commands(fence.body):
                    if words[0].rpartition("/")[2] == "blocktrain":
                        yield str(fence), words[1:]
        prose = FENCE.sub("", text)
        indented = re.sub(r"\\\n\s*", " ", prose)
        for line in re.findall(r"^ {4}(blocktrain .*)$", indented, re.MULTILINE):
            yield name_of(path), shlex.split(line)[1:]
        for span in re.findall(r"`(?:\.venv/bin/)?blocktrain ([a-z][^`]*)`", prose):
            yield name_of(path), re.sub(r"\s+", " ", span).split(" ")


def environment_of(home: Path, shims: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BLOCKTRAIN_")}
    return {**kept, "HOME": str(home), "PATH": f"{shims}{os.pathsep}{kept['PATH']}", "COLUMNS": "140"}
