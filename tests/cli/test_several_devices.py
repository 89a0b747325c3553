"""`worker --devices`: one worker for each device, ended together, restarted one by one; and pausing (A3)."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from blocktrain.client.coordinator import public_client
from blocktrain.client.texts import fetched_manifest
from blocktrain.doctor.findings import Device, Disk
from blocktrain.doctor.plan import joining_plan
from blocktrain.errors import DeviceError, UserError
from blocktrain.local import crew
from blocktrain.local.crew import Crew, Member, folder_names, named_devices, restart_after
from blocktrain.local.processes import Child
from blocktrain.wording import size
from blocktrain.worker.shifts import CONTRIBUTION_FILE, PAUSE_FILE, Contribution, Shifts, Terms
from tests.cli.program import ENVIRONMENT, command, run_main
from tests.cli.servers import coordinator_at
from tests.forked import quick_python
from tests.tiny import prose, tiny_recipe


@pytest.mark.parametrize(
    ("text", "gpus", "expected"),
    [
        ("all", 2, ["cuda:0", "cuda:1"]),
        ("all", 0, ["cpu"]),
        ("0,1", 2, ["cuda:0", "cuda:1"]),
        ("1", 2, ["cuda:1"]),
        ("cuda:0, cpu", 1, ["cuda:0", "cpu"]),
        ("cpu,cpu", 0, ["cpu", "cpu"]),
    ],
)
def test_devices_are_named_as_people_write_them(text: str, gpus: int, expected: list[str]) -> None:
    assert named_devices(text, lambda: (gpus, "cpu")) == expected


@pytest.mark.parametrize(
    ("text", "told"),
    [("gpu", "found 'gpu'"), ("0,", "found ''"), ("0,2", "there is no cuda:2 here, the number of GPUs is 2")],
)
def test_devices_that_are_not_there_are_misuse(text: str, told: str) -> None:
    with pytest.raises(DeviceError, match=told):
        named_devices(text, lambda: (2, "cpu"))


def test_each_device_has_the_same_folder_at_every_start() -> None:
    assert folder_names(["cuda:0", "cuda:1", "cpu", "cpu"]) == ["cuda-0", "cuda-1", "cpu", "cpu-1"]


def test_a_crash_is_restarted_and_an_end_is_not() -> None:
    assert [restart_after(code, 0) for code in (0, 2, 130)] == [None, None, None]
    assert restart_after(-9, 0) == 0.0
    assert restart_after(1, 3) == 1.0
    assert restart_after(1, 6) is None


def member(folder: Path, *verb: object) -> Member:
    return Member("cpu", folder, [str(word) for word in verb], {"PYTHONPATH": ENVIRONMENT["PYTHONPATH"]})


def test_one_that_crashes_comes_back_and_what_each_gave_is_summed_up(tmp_path: Path) -> None:
    """`version` in the place of a worker, and a process of ours that is killed once."""
    said: list[str] = []
    crash, fine = member(tmp_path / "a", "version"), member(tmp_path / "b", "version")
    crew = Crew(tmp_path, [crash, fine], said.append)
    for one, rounds in ((crash, 2), (fine, 3)):
        one.start(0.0)
        assert one.child is not None
        one.child.process.wait(60)
        given = Contribution(1.0, 1.0, 10, Counter(accepted=rounds), 5, 7)
        (one.folder / CONTRIBUTION_FILE).write_text(json.dumps(vars(given)))
    assert crash.child is not None
    crash.child.process.returncode = -9
    assert crew._look(100.0)
    assert not crash.ended
    assert fine.ended
    first = crash.child
    assert crew._look(101.0)
    assert crash.child is not first
    crash.child.process.wait(60)
    assert not crew._look(200.0)
    assert (crash.given + fine.given).verdicts == Counter(accepted=5)
    assert "cpu: ended with exit code -9; starting it again" in said
    assert said.count("cpu: 0.1.0") == 3
    for one in (crash, fine):
        assert one.child is not None
        one.child.kill()  # closes its stdin


@pytest.fixture
def logging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Member]:
    """A member that runs, whose log a test writes and which is full at 1000 B."""
    monkeypatch.setattr(crew, "MAX_LOG_BYTES", 1000)
    one = member(tmp_path)
    one.child = Child("cpu", subprocess.Popen(["sleep", "600"]), one.log, 0)
    yield one
    one.child.kill()


def test_a_log_is_bounded_and_every_line_is_passed_on(tmp_path: Path, logging: Member) -> None:
    one, told = logging, list[str]()
    with one.log.open("ab", buffering=0) as held_by_the_worker:
        for number in range(200):
            held_by_the_worker.write(b"line %d of a worker that runs for years\n" % number)
            told += one.lines()
            assert one.log.stat().st_size <= 1000
    assert told == [f"line {number} of a worker that runs for years" for number in range(200)]
    assert one.older_log.stat().st_size < 1100
    kept = (one.older_log.read_text() + one.log.read_text()).splitlines()
    assert kept == told[-len(kept) :]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["worker.log", "worker.log.old"]


def test_a_full_disk_costs_an_older_log_and_no_work(logging: Member, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    logging.log.write_bytes(b"a line\n" * 200)
    assert len(logging.lines()) == 200
    assert logging.log.stat().st_size == 0


def test_a_line_that_is_half_written_is_not_lost(logging: Member) -> None:
    logging.log.write_bytes(b"a line\n" * 200 + b"half a ")
    assert len(logging.lines()) == 200
    with logging.log.open("ab") as file:
        file.write(b"line\n")
    assert logging.lines() == ["half a line"]
    assert logging.log.stat().st_size == 0


def test_the_last_lines_of_one_that_has_ended_stay_where_its_failure_looks(logging: Member) -> None:
    assert logging.child is not None
    logging.child.kill()
    logging.log.write_bytes(b"a line\n" * 200 + b"blocktrain: the reason\n")
    assert logging.lines()[-1] == "blocktrain: the reason"
    assert str(logging.child.failure()).startswith("cpu: the reason")


@pytest.fixture
def invited(tmp_path: Path) -> Iterator[str]:
    """A run by invitation that would go on for long."""
    (tmp_path / "text.txt").write_bytes(prose(4000))
    recipe = tiny_recipe(
        f"data.corpus={tmp_path / 'text.txt'}", "swarm.rounds=100000", "swarm.steps_per_round=1",
        "swarm.replicas=1", "trust.judge=off", "trust.admission=invite",
    )  # fmt: skip
    with coordinator_at(tmp_path / "run", recipe) as url:
        yield url


def test_two_workers_join_by_one_link_and_one_ctrl_c_ends_both(invited: str, tmp_path: Path) -> None:
    invite = ("invite", "--data-dir", tmp_path / "run", "--address", invited, "--devices", "2")
    link = run_main(*invite).out.split()[-1]
    crew = command(
        "worker", "--coordinator", link, "--data-dir", tmp_path / "anna", "--devices", "cpu,cpu",
        "--label", "anna", "--max-up", "50", "--corpus", tmp_path / "text.txt", python=quick_python(),
    )  # fmt: skip
    started = subprocess.Popen(crew, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    assert started.stderr is not None
    working, said = set(), []
    for line in started.stderr:
        said.append(line)
        if " verdict " in line:
            working.add(line.partition(":")[0])
        if working == {"cpu", "cpu-1"}:
            break
    started.send_signal(signal.SIGINT)
    said += started.communicate(timeout=60)[1].splitlines()
    assert started.returncode == 0, "".join(said)
    assert re.match(r"2 workers contributed \d+ updates? \(\d+ accepted", said[-1])
    with public_client(invited) as client:
        workers = client.workers().workers
    assert sorted(one.label for one in workers) == ["anna cpu", "anna cpu-1"]
    assert (tmp_path / "anna" / "cpu" / "key.pem").read_bytes() != (
        tmp_path / "anna" / "cpu-1" / "key.pem"
    ).read_bytes()


def test_the_plan_names_every_device_and_limit(invited: str) -> None:
    with public_client(invited) as client:
        run, status = client.run(), client.status()
        manifest = fetched_manifest(client, run)
    devices, disk = [Device("cpu"), Device("cpu")], Disk("here", None, True)
    plan = joining_plan(invited, run, status, devices, disk, 4.0, ["5 Mbit/s up"], manifest=manifest)
    assert "device   cpu, cpu: 2 workers" in plan
    assert any(line.startswith("memory   about") and "for each worker" in line for line in plan)
    assert "limits   5 Mbit/s up" in plan
    text = size(sum(shard.tokens for shard in manifest.training))
    assert f"text     up to {text} down, as it is needed; kept within the disk space above" in plan


def test_a_worker_pauses_and_goes_on_by_verb(tmp_path: Path) -> None:
    assert "no worker has used" in run_main("pause", "--data-dir", tmp_path / "other").complaint
    said: list[str] = []
    begun: list[int] = []

    def work(ended: threading.Event) -> None:
        begun.append(1)
        if len(begun) == 1:
            assert run_main("pause", "--data-dir", tmp_path).code == 0
            assert ended.wait(30)

    def say(line: str) -> None:
        said.append(line)
        if line.startswith("paused"):
            assert "resumed" in run_main("resume", "--data-dir", tmp_path).out

    Shifts(Terms(), Contribution(), work, say, folder=tmp_path).run(threading.Event())
    assert said == ["paused: asked to by `blocktrain pause`; `blocktrain resume` goes on", "resumed"]
    assert len(begun) == 2
    assert "was not paused" in run_main("resume", "--data-dir", tmp_path).out


def test_a_pause_holds_for_the_workers_of_all_devices_and_over_a_restart(tmp_path: Path) -> None:
    (tmp_path / PAUSE_FILE).touch()
    said: list[str] = []
    stop = threading.Event()

    def say(line: str) -> None:
        said.append(line)
        stop.set()

    Shifts(Terms(), Contribution(), lambda _: None, say, folder=tmp_path / "cpu-1").run(stop)
    assert said == ["paused: asked to by `blocktrain pause`; `blocktrain resume` goes on"]


def test_signals_to_several_workers_pause_and_resume_all(tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2)]
    Crew(tmp_path, [], print).obey_signals()
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert (tmp_path / PAUSE_FILE).exists()
        os.kill(os.getpid(), signal.SIGUSR2)
        assert not (tmp_path / PAUSE_FILE).exists()
    finally:
        for number, handler in zip((signal.SIGUSR1, signal.SIGUSR2), before, strict=True):
            signal.signal(number, handler)


def test_a_key_and_several_devices_do_not_go_together(tmp_path: Path) -> None:
    told = run_main(
        "worker", "--coordinator", "http://h:1", "--devices", "all", "--key", tmp_path / "key.pem"
    )
    assert (told.code, "--key goes with one worker" in told.complaint) == (UserError.exit_code, True)
