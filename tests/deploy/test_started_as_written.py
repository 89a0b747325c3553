"""The commands in the files under deploy/, started for real: only places, ports and devices are of this
machine."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest
import yaml

from blocktrain.client.coordinator import public_client
from blocktrain.wire.messages import StatusAnswer
from tests.deploy.test_deploy_files import COMPOSE, PROGRAM, SERVICES, UNITS
from tests.docs.pages import ROOT
from tests.end_to_end.swarm_kit import Coordinator, Kit, tiny_recipe, write_recipe
from tests.forked import quick_python
from tests.waiting import until

pytestmark = pytest.mark.deploy

LONG = {"rounds": 10_000, "lease_seconds": 5.0}


@contextmanager
def started(script: str, log: Path, **settings: str) -> Iterator[subprocess.Popen[bytes]]:
    """A line of shell as its service would run it."""
    # A `blocktrain` that is forked stands first: importing torch would take each program 4 s.
    path = f"{Path(quick_python()).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, **settings}
    with (
        log.open("wb") as output,
        subprocess.Popen(["bash", "-c", script], env=environment, stdout=output, stderr=output) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


def ready_url(process: subprocess.Popen[bytes], log: Path) -> str:
    def found() -> str:
        assert process.poll() is None, log.read_text()
        line = re.search(r"coordinator ready url=(\S+)", log.read_text())
        return line.group(1) if line else ""

    return until("the coordinator listens", found)


def status(url: str) -> StatusAnswer:
    with public_client(url) as client:
        return client.status()


def unit_script(name: str, folder: Path) -> str:
    """What systemd makes of a unit: its settings, then its program."""
    (unit,) = (one.read_text() for one in UNITS if one.name == name)
    settings = re.findall(r"^Environment=(.*)$", unit, re.MULTILINE)
    (command,) = re.findall(r"^ExecStart=(.*)$", unit, re.MULTILINE)
    command = command.replace(PROGRAM, "blocktrain").replace("/var/lib/blocktrain", str(folder))
    return f"{' '.join(settings)}; . {folder}/env; exec {command}"


def test_the_coordinator_of_the_unit_serves_its_recipe(tmp_path: Path, text: Path) -> None:
    recipe, log = write_recipe(tiny_recipe(text), tmp_path / "run.toml"), tmp_path / "log"
    (tmp_path / "env").write_text(f"RECIPE={recipe} PORT=0 ARGS='--set swarm.rounds=7'")
    with started(unit_script("blocktrain-coordinator.service", tmp_path), log) as process:
        assert status(ready_url(process, log)).rounds == 7
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0, log.read_text()


def test_the_coordinators_of_compose_serve_one_run_and_its_worker_joins(
    tmp_path: Path, text: Path, postgres_url: str, s3: str
) -> None:
    httpx2.put(f"{s3}/runs").raise_for_status()
    recipe = write_recipe(tiny_recipe(text, swarm=LONG), tmp_path / "run.toml")
    names = {"coordinator": "first", "second-coordinator": "second", "worker": "worker"}
    values = {"RECIPE": str(recipe), "DATABASE_URL": postgres_url, "AWS_ENDPOINT_URL": s3}
    settings = {name: values.get(name, "test") for name in COMPOSE["x-coordinator"]["environment"]}
    settings["AWS_REGION"] = COMPOSE["x-coordinator"]["environment"]["AWS_REGION"]

    def script(service: str) -> str:
        command = SERVICES[service]["command"]
        words = command[0].replace("$$", "$") if len(command) == 1 else f"exec blocktrain {' '.join(command)}"
        for name in names.values():
            (tmp_path / name).mkdir(exist_ok=True)
        words = words.replace("/data", str(tmp_path / names[service])).replace("0.0.0.0", "127.0.0.1")
        return words.replace("/first/", f"{tmp_path}/first/").replace("--port 8420", "--port 0")

    logs = {service: tmp_path / f"{service}.log" for service in names}
    with started(script("coordinator"), logs["coordinator"], **settings) as one:
        first = ready_url(one, logs["coordinator"])
        with started(script("second-coordinator"), logs["second-coordinator"], **settings) as other:
            second = ready_url(other, logs["second-coordinator"])
            assert status(second).run_id == status(first).run_id
            joins = script("worker").replace("http://balancer:8420", second)
            with started(joins, logs["worker"]) as worker:
                until("the worker joins", lambda: status(first).workers)
                worker.send_signal(signal.SIGTERM)
                assert worker.wait() == 0, logs["worker"].read_text()


def worker_script(service: str, folder: Path) -> str:
    if service == "slurm":
        srun = folder / "bin" / "srun"
        srun.parent.mkdir()
        srun.write_text('#!/bin/sh\nexec "$@"\n')
        srun.chmod(0o755)
        script = (ROOT / "deploy" / "slurm" / "worker.sbatch").read_text()
        script = f"PATH={srun.parent}:$PATH; BLOCKTRAIN_FOLDER={folder}\n{script}"
    elif service == "skypilot":
        installed = folder / "blocktrain-venv" / "bin"
        installed.mkdir(parents=True)
        shutil.copy(Path(quick_python()).with_name("blocktrain"), installed)
        script = (
            f"HOME={folder}\n" + yaml.safe_load((ROOT / "deploy/skypilot/worker.yaml").read_text())["run"]
        )
    else:
        (folder / "env").write_text("DEVICE=cpu CACHE_GB=1 ARGS=")  # make has ARGS of its own
        script = unit_script("blocktrain-worker.service", folder)
    return script.replace("--devices all", "--devices cpu")  # there is no GPU here


@pytest.mark.parametrize("service", ["slurm", "skypilot", "systemd"])
def test_a_worker_joins_and_leaves_when_it_is_told(
    kit: Kit, text: Path, tmp_path: Path, service: str
) -> None:
    coordinator, log = Coordinator(kit, tiny_recipe(text, swarm=LONG)).start(), tmp_path / "log"
    with started(worker_script(service, tmp_path), log, COORDINATOR=coordinator.url) as worker:

        def counted() -> bool:
            assert worker.poll() is None, log.read_text()
            return any(one.accepted for one in coordinator.status().workers)

        until("an update counts", counted)
        worker.send_signal(signal.SIGTERM)
        until("it has ended", lambda: worker.poll() is not None)
    assert coordinator.version() > 0
