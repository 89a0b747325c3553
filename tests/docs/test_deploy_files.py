"""The files under deploy/: units that systemd accepts, a container file whose paths and commands are real."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

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


def test_the_container_file_starts_a_coordinator_as_nobody_special() -> None:
    last = dict(instructions())
    assert json.loads(last["ENTRYPOINT"]) == ["blocktrain"]
    assert options_exist(json.loads(last["CMD"]))
    assert last["USER"] == "blocktrain"
    names = [name for name, _ in instructions()]
    assert names.index("USER") > max(number for number, name in enumerate(names) if name == "RUN")
