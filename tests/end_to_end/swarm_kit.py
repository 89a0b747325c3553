"""Real programs on loopback for the tests: a coordinator, workers, and a proxy that pulls the plug.

Every process is started and ended by its own pid. Nothing sleeps for a time: `until` polls a condition
and fails with a sentence when its deadline passes.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

import blocktrain.cli
from blocktrain.client.coordinator import CoordinatorClient
from blocktrain.client.traffic import Traffic
from blocktrain.config import Recipe, resolve_recipe
from blocktrain.coordinator.storage.ledger import VerificationReport, verify_ledger
from blocktrain.data import corpora
from blocktrain.wire.identity import Identity
from blocktrain.wire.messages import LedgerEntry, MergeRecord, StatusAnswer

T = TypeVar("T")
READY_SECONDS = 60.0
POLL_SECONDS = 0.02
OTHER_BUILTIN = "TEST_OTHER_BUILTIN"
"""In a program's environment: its Python comes with other documentation."""

TINY = {
    "name": "tiny",
    "seed": 7,
    "model": {"width": 32, "heads": 2, "blocks": 1, "layers_per_block": 1, "context": 32},
    "training": {"batch": 4, "warmup_steps": 2, "reference": False},
    "evaluation": {"max_bytes": 2000, "pooling_bytes": 1000, "noise_draws": 1},
    "swarm": {
        "steps_per_round": 3,
        "rounds": 4,
        "replicas": 1,
        "codec": "dense",
        "max_deadline_seconds": 60.0,
        "lease_seconds": 10.0,
        "evaluate_every_seconds": 600.0,
    },
    "trust": {"judge": "off", "stamp_bits": 0},
}


def until(what: str, condition: Callable[[], T | None], seconds: float = READY_SECONDS) -> T:
    """The first true value of `condition`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(POLL_SECONDS)
    raise AssertionError(f"{what}: not within {seconds:.0f} s")


def tiny_recipe(text: Path, **sections: dict[str, Any]) -> Recipe:
    values: dict[str, Any] = {
        key: dict(value) if isinstance(value, dict) else value for key, value in TINY.items()
    }
    values["data"] = {"corpus": str(text)}
    for section, changes in sections.items():
        values[section] = {**values.get(section, {}), **changes}
    return resolve_recipe(values)


def write_recipe(recipe: Recipe, path: Path) -> Path:
    lines = [f"name = {recipe.name!r}", f"seed = {recipe.seed}"]
    for section, values in recipe.to_dict().items():
        if isinstance(values, dict):
            lines.append(f"[{section}]")
            lines += [f"{key} = {_toml(value)}" for key, value in values.items() if value is not None]
    path.write_text("\n".join(lines) + "\n")
    return path


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)


processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["tests.end_to_end.swarm_kit_preload"])


def run_program(log: Path, arguments: list[str], environment: dict[str, str]) -> None:
    """`blocktrain ARGUMENTS…` in a process forked from one that has imported torch: starts are quick."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(environment)
    os.environ["OMP_NUM_THREADS"] = "1"  # for processes this one starts
    torch.set_num_threads(1)
    if OTHER_BUILTIN in environment:
        corpora.builtin_text = lambda: b"the documentation of another Python. " * 20_000
    sys.argv = ["blocktrain", *arguments]
    with open(1, "w", closefd=False) as sys.stdout, open(2, "w", closefd=False) as sys.stderr:
        blocktrain.cli.main()


class Program:
    """One process and its log."""

    def __init__(self, log: Path, arguments: list[str], environment: dict[str, str]) -> None:
        self.log, self._log_start = log, log.stat().st_size if log.exists() else 0
        self._process = processes.Process(target=run_program, args=(log, arguments, environment))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def running(self) -> bool:
        return self._process.is_alive()

    def wait(self, seconds: float) -> int | None:
        """The exit code; None if it is still running."""
        self._process.join(seconds)
        return self._process.exitcode

    def send(self, number: signal.Signals) -> None:
        if self.running:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """kill -9"""
        self.send(signal.SIGKILL)
        self._process.join()

    def stop(self, seconds: float = 30.0) -> int | None:
        self.send(signal.SIGTERM)
        return self.wait(seconds)

    def text(self) -> str:
        if not self.log.exists():
            return ""
        with self.log.open("rb") as file:
            file.seek(self._log_start)
            return file.read().decode(errors="replace")


@dataclass
class Kit:
    """Starts programs and ends whatever is left of them."""

    folder: Path
    programs: list[Program] = field(default_factory=list)
    corpus: str = "builtin"
    """Where the text of the coordinator started last lies, as a worker's user would say."""

    def start(self, name: str, arguments: list[str], environment: dict[str, str] | None = None) -> Program:
        program = Program(self.folder / f"{name}.log", arguments, environment or {})
        self.programs.append(program)
        return program

    def worker(self, url: str, name: str = "worker", *more: str) -> Program:
        options = ["--data-dir", str(self.folder / name), "--device", "cpu", "--corpus", self.corpus]
        return self.start(name, ["worker", "--coordinator", url, *options, *more])

    def close(self) -> None:
        for program in self.programs:
            program.kill()


@dataclass
class Coordinator:
    kit: Kit
    recipe: Recipe
    port: int = 0
    options: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    program: Program | None = None

    @property
    def data_dir(self) -> Path:
        return self.kit.folder / "coordinator"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> Coordinator:
        recipe = write_recipe(self.recipe, self.kit.folder / "recipe.toml")
        self.kit.corpus = self.recipe.data.corpus
        arguments = ["coordinator", str(recipe), "--data-dir", str(self.data_dir), "--port", str(self.port)]
        arguments += self.options
        program = self.kit.start("coordinator-program", arguments, self.environment)
        self.program = program

        def listening() -> str:
            assert program.running, program.text()
            found = re.search(r"coordinator ready url=\S+:(\d+)", program.text())
            return found.group(1) if found else ""

        self.port = int(until("the coordinator listens", listening))
        return self

    def kill(self) -> None:
        assert self.program is not None
        self.program.kill()

    def client(self) -> CoordinatorClient:
        return CoordinatorClient(
            self.url, Identity.generate(), Traffic(), threading.Event(), lambda _: None, attempts=30
        )

    def status(self) -> StatusAnswer:
        return self.client().status()

    def finished(self, seconds: float = READY_SECONDS) -> StatusAnswer:
        def done() -> StatusAnswer | None:
            status = self.status()
            return status if status.finished else None

        return until("the run finishes", done, seconds)

    def version(self, block: int = 0) -> int:
        return self.client().block(block).head_version

    def reach(self, version: int, block: int = 0, seconds: float = READY_SECONDS) -> None:
        until(f"block {block} reaches {version}", lambda: self.version(block) >= version, seconds)

    def merges(self, block: int = 0) -> list[MergeRecord]:
        return list(self.client().merges(block, 0).merges)

    def ledger(self) -> list[LedgerEntry]:
        entries: list[LedgerEntry] = []
        client = self.client()
        while True:
            page = client.ledger(len(entries))
            entries += page.entries
            if len(entries) >= page.length:
                return entries

    def verify(self) -> VerificationReport:
        client = self.client()
        report = verify_ledger(
            self.ledger(),
            lambda wanted: client.payload(wanted, 1 << 30),
            lambda wanted: client.fetch(f"/v1/snapshots/{wanted}"),
            client.run().coordinator_key,
        )
        assert report.ok, report.reason
        return report


@dataclass
class Plug:
    """When to pull it: on a request that fits, at a moment of its life."""

    method: str
    path_ends: str
    moment: str
    """`half`: half of the body has been sent; `answered`: the answer is at the proxy, which keeps it;
    `delivered`: the answer has reached the worker."""
    after_seconds: float = 0.0


class Proxy:
    """HTTP between a worker and the coordinator that kills the coordinator at a chosen moment."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.coordinator = coordinator
        self.plug: Plug | None = None
        self.pulled = threading.Event()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def arm(self, plug: Plug) -> None:
        self.pulled.clear()
        self.plug = plug

    def close(self) -> None:
        self._server.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            with client, socket.create_connection(("127.0.0.1", self.coordinator.port)) as upstream:
                near, far = client.makefile("rb"), upstream.makefile("rb")
                while self._exchange(client, near, upstream, far):
                    pass
        except OSError:
            pass

    def _exchange(self, client: socket.socket, near: Any, upstream: socket.socket, far: Any) -> bool:
        head = _read_head(near)
        if not head:
            return False
        method, path = head.split(b" ", 2)[0].decode(), head.split(b" ", 2)[1].decode()
        length = _content_length(head)
        upstream.sendall(head)
        for part in (length // 2, length - length // 2):
            upstream.sendall(near.read(part))
            if length and part == length // 2 and self._pulls(method, path, "half"):
                return False
        answer = _read_head(far)
        body = _read_body(far, answer)
        if not answer or self._pulls(method, path, "answered"):
            return False
        client.sendall(answer + body)
        self._pulls(method, path, "delivered")
        return True

    def _pulls(self, method: str, path: str, moment: str) -> bool:
        plug = self.plug
        fits = (
            plug is not None
            and (plug.method, plug.moment) == (method, moment)
            and path.partition("?")[0].endswith(plug.path_ends)
        )
        if not fits or plug is None:
            return False
        self.plug = None
        if plug.after_seconds:
            threading.Event().wait(plug.after_seconds)
        self.coordinator.kill()
        self.pulled.set()
        return True


def _read_head(file: Any) -> bytes:
    lines = []
    while line := file.readline():
        lines.append(line)
        if line == b"\r\n":
            return b"".join(lines)
    return b""


def _content_length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.split(b":")[1])
    return 0


def _read_body(file: Any, head: bytes) -> bytes:
    if b"transfer-encoding: chunked" not in head.lower():
        body: bytes = file.read(_content_length(head))
        return body
    pieces = []
    while True:
        size = file.readline()
        pieces.append(size + file.read(int(size, 16) + 2))
        if int(size, 16) == 0:
            return b"".join(pieces)
