"""The files under deploy/: units that systemd accepts, a container file whose paths and commands are real."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from blocktrain.cli.reference import all_verbs
from blocktrain.client.coordinator import RequestRefused
from blocktrain.errors import DamagedError, StorageError
from blocktrain.wire.messages import ErrorReason
from tests.docs.pages import ROOT

UNITS = sorted((ROOT / "deploy").glob("*.service"))
PROGRAM = "/opt/blocktrain/.venv/bin/blocktrain"
OPTIONS = {verb.name: {one.name for one in verb.parameters} for verb in all_verbs()}
INSTRUCTIONS = {
    "FROM", "ARG", "RUN", "WORKDIR", "COPY", "USER", "VOLUME", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK",
    "ENTRYPOINT", "CMD",
}  # fmt: skip


def options_exist(words: list[str]) -> bool:
    return {word for word in words if word.startswith("--")} <= OPTIONS[words[0]]


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_a_unit_starts_the_program_with_options_that_exist(unit: Path) -> None:
    (started,) = re.findall(r"^ExecStart=(.*)$", unit.read_text(), re.MULTILINE)
    program, *words = shlex.split(started)
    assert program == PROGRAM
    assert options_exist(words)
    assert "RestartPreventExitStatus=2" in unit.read_text()
    # Unquoted and without braces, systemd splits it into words; without a value it is no word at all.
    assert words[-1] == "$ARGS"
    (example,) = re.findall(r"^# ARGS=(.*)$", unit.read_text(), re.MULTILINE)
    assert options_exist([words[0], *shlex.split(example)])


def test_a_service_is_started_again_after_a_failure_and_not_after_misuse() -> None:
    """What is not up yet is a failure; what only a person can change is misuse."""
    assert (StorageError.exit_code, DamagedError.exit_code) == (1, 2)
    for reason in (ErrorReason.BANNED, ErrorReason.INVITE_REQUIRED, ErrorReason.NOT_LISTED):
        assert RequestRefused(403, reason, "no", None).exit_code == 2
    for reason in (ErrorReason.UNAVAILABLE, ErrorReason.ADDRESS_FULL):
        assert RequestRefused(403, reason, "not now", None).exit_code == 1


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_accepts_a_unit(unit: Path, tmp_path: Path) -> None:
    """With a program that exists here in place of the one it will start."""
    copy = tmp_path / unit.name
    copy.write_text(unit.read_text().replace(PROGRAM, "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", copy], capture_output=True, text=True, check=False
    )
    told = "\n".join(line for line in done.stderr.splitlines() if unit.name in line)
    assert (done.returncode, told) == (0, "")


def instructions() -> list[tuple[str, str]]:
    text = (ROOT / "deploy" / "Containerfile").read_text()
    joined = re.sub(r"\\\n\s*", " ", text)
    lines = [line for line in joined.splitlines() if line and not line.startswith("#")]
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in lines)]


def test_the_container_file_copies_what_the_package_is_built_from() -> None:
    found = instructions()
    assert {name for name, _ in found} <= INSTRUCTIONS
    assert found[0][0] == "FROM"
    copied = [word for name, rest in found if name == "COPY" for word in rest.split()[:-1]]
    assert {"pyproject.toml", "README.md", "src", "recipes"} <= set(copied)
    for source in copied:
        assert (ROOT / source).exists(), source
    assert any("'.[data]'" in rest for name, rest in found if name == "RUN"), "a run may be on BPE tokens"


def test_the_container_file_starts_a_coordinator_as_nobody_special() -> None:
    last = dict(instructions())
    assert json.loads(last["ENTRYPOINT"]) == ["blocktrain"]
    assert options_exist(json.loads(last["CMD"]))
    assert last["USER"] == "blocktrain"
    names = [name for name, _ in instructions()]
    assert names.index("USER") > max(number for number, name in enumerate(names) if name == "RUN")


# --- compose -----------------------------------------------------------------------------------------

COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]


def words_of(script: str) -> list[str]:
    """What follows `blocktrain` in a line of shell."""
    return shlex.split(script.partition("blocktrain ")[2].replace("$$", "$"))


def test_compose_is_what_the_compose_specification_allows() -> None:
    schema = ["--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run(
        [sys.executable, "-m", "check_jsonschema", *schema, ROOT / "deploy" / "compose.yaml"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "ok -- validation done"), done.stdout


def test_compose_names_only_services_volumes_and_configs_that_it_has() -> None:
    for name, service in SERVICES.items():
        assert "image" in service, name
        assert set(service.get("depends_on", ())) <= set(SERVICES), name
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            assert source in COMPOSE["volumes"] or (ROOT / "deploy" / source).exists(), volume
        assert {one["source"] for one in service.get("configs", ())} <= set(COMPOSE["configs"]), name
    built = COMPOSE["x-coordinator"]["build"]
    assert (ROOT / "deploy" / built["context"] / built["dockerfile"]).exists()


def test_compose_runs_two_coordinators_of_one_run_with_one_key() -> None:
    first, second = (words_of(SERVICES[name]["command"][0]) for name in ("coordinator", "second-coordinator"))
    assert first == second
    assert options_exist(first)
    assert {"--database", "--blobs"} <= set(first)
    assert SERVICES["second-coordinator"]["command"][0].startswith("cp /first/coordinator.key /data/")
    assert options_exist(SERVICES["worker"]["command"])
    both = ["coordinator:8420", "second-coordinator:8420"]
    assert " ".join(both) in COMPOSE["configs"]["balancer"]["content"]
    scraped = yaml.safe_load(COMPOSE["configs"]["prometheus"]["content"])["scrape_configs"]
    assert scraped[0]["static_configs"][0]["targets"] == both
    for name in ("grafana-data", "grafana-dashboards"):
        assert yaml.safe_load(COMPOSE["configs"][name]["content"])["apiVersion"] == 1


def test_compose_has_no_secret_of_its_own() -> None:
    text = (ROOT / "deploy" / "compose.yaml").read_text()
    for secret in re.findall(r"PASSWORD\w*: (.*)", text):
        assert secret.startswith("${"), secret
        assert secret.endswith(":?}"), secret


# --- clusters ----------------------------------------------------------------------------------------


def test_the_slurm_script_is_bash_and_starts_a_worker_that_exists() -> None:
    script = ROOT / "deploy" / "slurm" / "worker.sbatch"
    done = subprocess.run(["bash", "-n", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    (started,) = re.findall(r'^srun "\$PROGRAM" (.*) &$', script.read_text(), re.MULTILINE)
    assert options_exist(shlex.split(started))
    assert re.search(r"^#SBATCH --signal=B:TERM@", script.read_text(), re.MULTILINE)


def test_the_skypilot_task_has_the_keys_of_a_task_and_starts_a_worker_that_exists() -> None:
    task = yaml.safe_load((ROOT / "deploy" / "skypilot" / "worker.yaml").read_text())
    assert set(task) == {"name", "resources", "envs", "workdir", "setup", "run"}
    assert options_exist(words_of(task["run"].replace("/blocktrain ", " blocktrain ")))
    for script in (task["setup"], task["run"]):
        done = subprocess.run(["bash", "-n", "-c", script], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
