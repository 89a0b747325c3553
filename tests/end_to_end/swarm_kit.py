"""Real programs on loopback for the tests: a coordinator and workers, each started and ended by its pid."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blocktrain.client.coordinator import CoordinatorClient, public_client
from blocktrain.config import Recipe, resolve_recipe
from blocktrain.coordinator.storage.ledger import VerificationReport, verify_ledger
from blocktrain.wire.messages import LedgerEntry, MergeRecord, StatusAnswer
from tests.forked import start_blocktrain
from tests.waiting import PATIENCE_SECONDS, until

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
    if isinstance(value, tuple):
        return repr(list(value))
    return str(value).lower() if isinstance(value, bool) else repr(value)


class Program:
    """One process and its log."""

    def __init__(self, log: Path, arguments: list[str], environment: dict[str, str]) -> None:
        self.log, self._log_start = log, log.stat().st_size if log.exists() else 0
        self._process = start_blocktrain(arguments, log, log, environment=environment)
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def running(self) -> bool:
        return self._process.is_alive()

    def wait(self, seconds: float = PATIENCE_SECONDS) -> int | None:
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

    def stop(self) -> int | None:
        self.send(signal.SIGTERM)
        return self.wait()

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
    clients: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    corpus: str = "builtin"
    """Where the text of the coordinator started last lies, as a worker's user would say."""

    def start(self, name: str, arguments: list[str], environment: dict[str, str] | None = None) -> Program:
        program = Program(self.folder / f"{name}.log", arguments, environment or {})
        self.programs.append(program)
        return program

    def worker(self, url: str, name: str = "worker", *more: str) -> Program:
        options = ["--data-dir", str(self.folder / name), "--device", "cpu", "--corpus", self.corpus]
        return self.start(name, ["worker", "--coordinator", url, *options, *more])

    def open(self, client: CoordinatorClient) -> CoordinatorClient:
        """Closed at the end of the test."""
        return self.clients.enter_context(client)

    def close(self) -> None:
        self.clients.close()
        for program in self.programs:
            program.kill()


@dataclass
class Coordinator:
    kit: Kit
    recipe: Recipe
    port: int = 0
    options: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    name: str = "coordinator"
    program: Program | None = None
    _client: CoordinatorClient | None = None

    @property
    def data_dir(self) -> Path:
        return self.kit.folder / self.name

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> Coordinator:
        recipe = write_recipe(self.recipe, self.kit.folder / "recipe.toml")
        self.kit.corpus = self.recipe.data.corpus
        arguments = ["coordinator", str(recipe), "--data-dir", str(self.data_dir), "--port", str(self.port)]
        arguments += self.options
        program = self.kit.start(f"{self.name}-program", arguments, self.environment)
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
        """Always the same: a test asks hundreds of times, and opening one costs more than asking."""
        if self._client is None:
            self._client = self.kit.open(public_client(self.url, attempts=30))
        return self._client

    def status(self) -> StatusAnswer:
        return self.client().status()

    def finished(self) -> StatusAnswer:
        def done() -> StatusAnswer | None:
            status = self.status()
            return status if status.finished else None

        return until("the run finishes", done)

    def version(self, block: int = 0) -> int:
        return self.client().block(block).head_version

    def reach(self, version: int, block: int = 0, seconds: float = PATIENCE_SECONDS) -> None:
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
