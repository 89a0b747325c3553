"""A small `demo` recipe for the documentation's commands, and what they need."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from tests.coordinator.conftest import postgres, postgres_url, s3  # noqa: F401
from tests.docs.pages import ROOT, Fence, Runner, environment_of, free_ports
from tests.forked import quick_python
from tests.tiny import prose

SMALL = {
    "MODEL_WIDTH": "32",
    "MODEL_HEADS": "2",
    "MODEL_BLOCKS": "2",
    "MODEL_LAYERS_PER_BLOCK": "1",
    "MODEL_CONTEXT": "32",
    "DATA_CORPUS": "TEXT",
    "TRAINING_STEPS": "4",
    "TRAINING_BATCH": "4",
    "TRAINING_WARMUP_STEPS": "1",
    "EVALUATION_MAX_BYTES": "300",
    "EVALUATION_POOLING_BYTES": "300",
    "EVALUATION_NOISE_DRAWS": "1",
    "EVALUATION_SAMPLE_BYTES": "10",
    "SWARM_ROUNDS": "2",
    "SWARM_STEPS_PER_ROUND": "2",
    "SWARM_REPLICAS": "1",
    "TRUST_STAMP_BITS": "4",
}
"""The commands are the documentation's; the model they train is not."""


@pytest.fixture(scope="session")
def command_environment(tmp_path_factory: pytest.TempPathFactory, text_folder: Path) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("docs")
    environment = environment_of(folder, Path(quick_python()).parent)
    environment["PYTHONPATH"] = str(ROOT / "src")
    environment["OMP_NUM_THREADS"] = "1"
    for name, value in SMALL.items():
        environment[f"BLOCKTRAIN_{name}"] = str(text_folder) if value == "TEXT" else value
    return environment


@pytest.fixture(scope="session")
def trained_demo(command_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that pages after the first take for granted."""
    folder = tmp_path_factory.mktemp("trained-demo")
    runner = Runner(folder, command_environment, {})
    runner.shell("blocktrain train demo --out runs/demo", Fence("conftest", 0, ("sh",), ""))
    return folder / "runs" / "demo"


@pytest.fixture
def runner(command_environment: dict[str, str], tmp_path: Path) -> Iterator[Runner]:
    ports = dict(zip((8420, 8000), free_ports(2), strict=True))
    (tmp_path / "notes.txt").write_bytes(prose(800, seed=3))
    (tmp_path / "deploy").symlink_to(ROOT / "deploy")
    runner = Runner(tmp_path, {**command_environment, "HOME": str(tmp_path)}, ports)
    yield runner
    runner.close()


@pytest.fixture
def with_demo(runner: Runner, trained_demo: Path) -> None:
    shutil.copytree(trained_demo, runner.folder / "runs" / "demo")


@pytest.fixture
def with_run(runner: Runner) -> None:
    """Somebody's run, to be joined."""
    body = "blocktrain coordinator demo --data-dir given --port 8420"
    runner.serve(Fence("conftest", 0, ("sh", "server"), body))


@pytest.fixture
def with_database_and_bucket(runner: Runner, postgres_url: str, s3: str) -> None:  # noqa: F811
    httpx2.put(f"{s3}/runs").raise_for_status()
    amazon = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    runner.environment = {**runner.environment, **amazon, "DATABASE_URL": postgres_url}
