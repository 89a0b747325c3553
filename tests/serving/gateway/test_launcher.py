from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from blocktrain.errors import DeviceError, UserError
from blocktrain.listening import open_port
from blocktrain.local.launcher import LaunchConfig, Launcher, block_groups
from blocktrain.local.processes import restart_pause
from blocktrain.serving.gateway.limits import parse_limits
from tests.forked import quick_python
from tests.waiting import until

from .conftest import Served


@pytest.mark.parametrize(
    ("blocks", "stages", "groups"),
    [
        (3, 3, [[0], [1], [2]]),
        (5, 2, [[0, 1], [2, 3, 4]]),
        (4, 1, [[0, 1, 2, 3]]),
        (2, 5, [[0], [1], [0], [1], [0]]),
    ],
)
def test_blocks_are_spread_evenly_and_more_stages_are_spares(
    blocks: int, stages: int, groups: list[list[int]]
) -> None:
    assert block_groups(blocks, stages) == groups


def test_blocks_that_feed_each_other_stay_together() -> None:
    assert block_groups(3, 2, together=True) == [[0, 1, 2], [0, 1, 2]]


def test_a_program_that_never_stays_up_is_given_up() -> None:
    assert [restart_pause(n) for n in (0, 1, 3, 5, 6)] == [0.0, 0.25, 1.0, 4.0, None]


def test_limits_are_set_by_name() -> None:
    limits = parse_limits(["max_active=7", "requests_per_minute=none", "wait_seconds=1.5"])
    assert (limits.max_active, limits.requests_per_minute, limits.wait_seconds) == (7, None, 1.5)
    for wrong in ("colour=1", "max_active=none", "max_active=1.5", "max_active", "wait_seconds=inf"):
        with pytest.raises(UserError, match="limit"):
            parse_limits([wrong])


def test_a_port_in_use_is_told_in_a_sentence() -> None:
    taken = open_port("127.0.0.1", 0)
    taken.listen()
    with pytest.raises(UserError, match="choose another --port"):
        open_port("127.0.0.1", taken.getsockname()[1])
    taken.close()


@pytest.fixture
def launched(checkpoint: Path, tmp_path: Path, quick_children: None) -> Iterator[tuple[Launcher, Served]]:
    launcher = Launcher(LaunchConfig(checkpoint=checkpoint, num_stages=2, port=0, logs=tmp_path))
    stop = threading.Event()
    try:
        served = Served(launcher.start(stop))
        watching = threading.Thread(target=launcher.watch, args=(stop,), daemon=True)
        watching.start()
        yield launcher, served
        stop.set()
        watching.join(5)
    finally:
        launcher.end()


@pytest.mark.usefixtures("quick_children")
def test_a_launch_that_is_stopped_leaves_no_process(checkpoint: Path, tmp_path: Path) -> None:
    config = LaunchConfig(checkpoint=checkpoint, num_stages=1, port=0, logs=tmp_path)
    launcher, stop = Launcher(config), threading.Event()
    stop.set()
    with pytest.raises(KeyboardInterrupt):
        launcher.start(stop)
    launcher.end()
    assert launcher.stages[0].exit_code() is not None


STARTS_A_CHILD = """
import pathlib, sys, threading
from blocktrain.local.processes import await_line, start_child
child = start_child("stage", sys.argv[2:], pathlib.Path(sys.argv[1]))
await_line(child, r"stage ready listen=(\\S+)", 120, threading.Event())
print(child.process.pid, flush=True)
threading.Event().wait()
"""


def is_gone(pid: int) -> bool:
    """Whether the process ended; one that nobody has waited for yet has ended too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for the child in /proc")
def test_a_child_ends_when_its_parent_is_killed(checkpoint: Path, tmp_path: Path) -> None:
    verb = ["stage", str(checkpoint), "--blocks", "0", "--listen", "127.0.0.1:0"]
    command = [sys.executable, "-c", STARTS_A_CHILD, str(tmp_path / "stage.log"), *verb]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert not is_gone(pid)
        parent.kill()
    until("the child is gone", lambda: is_gone(pid))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for the children in /proc")
def test_killing_serve_leaves_no_process(checkpoint: Path) -> None:
    with verb("serve", str(checkpoint), "--stages", "2", "--port", "0") as process:
        assert process.stdout is not None
        assert "http://" in process.stdout.readline()
        listed = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert len(listed) == 3
        # It starts a stage again itself, so answers wait for one instead of changing their text.
        commands = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in listed]
        assert sum(b"--lost-blocks\0wait\0" in command for command in commands) == 1
        process.kill()
    until("all are gone", lambda: all(is_gone(int(pid)) for pid in listed))


@pytest.mark.slow
def test_processes_serve_and_a_killed_one_comes_back(
    launched: tuple[Launcher, Served], served: Served
) -> None:
    launcher, remote = launched
    fields: dict[str, Any] = {"model": "tiny", "prompt": "The value ", "seed": 5, "max_tokens": 40}
    with remote.openai(max_retries=5) as client, served.openai() as local:
        expected = local.completions.create(**fields).choices[0].text
        assert client.completions.create(**fields).choices[0].text == expected
        for program in launcher.programs:
            killed = program.pid
            assert killed is not None
            os.kill(killed, signal.SIGKILL)
            until("it is started again", lambda: program.pid != killed)  # noqa: B023
            until("it is ready again", lambda: is_ready(remote))
            assert client.completions.create(**fields).choices[0].text == expected


def is_ready(remote: Served) -> bool:
    try:
        with remote.http() as client:
            return bool(client.get("/readyz").json()["reason"] == "ready")
    except httpx2.HTTPError:
        return False


@contextmanager
def verb(*arguments: str, python: str = sys.executable, **options: Any) -> Iterator[subprocess.Popen[str]]:
    command = [python, "-m", "blocktrain", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def output(*arguments: str, text: str = "") -> str:
    command = [sys.executable, "-m", "blocktrain", *arguments]
    done = subprocess.run(command, input=text.encode(), capture_output=True, check=True, timeout=120)
    return done.stdout.decode(errors="replace")


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_serve_that_is_ended_while_it_starts_leaves_no_folder_behind(
    checkpoint: Path, tmp_path: Path, stop: signal.Signals
) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    serve = ("serve", str(checkpoint), "--stages", "1", "--port", "0")
    with verb(*serve, python=quick_python(), env=environment) as process:
        logs = until("its children have logs", lambda: list(tmp_path.glob("blocktrain-serve-*/stage-0.log")))
        assert logs
        process.send_signal(stop)
        process.wait(60)
    assert list(tmp_path.glob("blocktrain-serve-*")) == []


@pytest.mark.slow
def test_serve_rolls_back_by_its_flag(checkpoint: Path, other_checkpoint: Path, tmp_path: Path) -> None:
    kept = tmp_path / "versions"
    for name, path in (("000001", checkpoint), ("000002", other_checkpoint)):
        shutil.copytree(path, kept / name)
        (kept / name / "versions.json").write_text("[3, 3, 3]" if path is checkpoint else "[4, 4, 4]")
    (kept / "current").write_text("000002")
    options = ["--versions", str(kept), "--stages", "1", "--port", "0", "--logs", str(tmp_path / "logs")]
    with verb("serve", "http://127.0.0.1:9", *options, "--roll-back", "1", python=quick_python()) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        assert said.startswith("serving tiny at http://")
        with httpx2.Client(base_url=said.split()[3]) as client:
            assert client.get("/v1/models/tiny").json()["versions"] == [3, 3, 3]
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


def test_serve_finds_its_port_taken_before_it_starts_a_stage(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from typer.testing import CliRunner

    from blocktrain.cli.main import app

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with open_port("127.0.0.1", 0) as taken:
        taken.listen()
        port = str(taken.getsockname()[1])
        failure = CliRunner().invoke(app, ["serve", str(checkpoint), "--port", port]).exception
    assert isinstance(failure, UserError)
    assert f"cannot listen on 127.0.0.1:{port}" in str(failure)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["serve", "chat", "generate"])
def test_a_device_that_is_not_here_is_misuse_and_leaves_no_folder(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    from typer.testing import CliRunner

    from blocktrain.cli.main import app

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    prompt = ["--prompt", "x"] if name == "generate" else []
    failure = CliRunner().invoke(app, [name, str(checkpoint), "--device", "cuda:99", *prompt]).exception
    assert isinstance(failure, DeviceError)
    assert failure.exit_code == 2
    assert "device 'cuda:99' does not exist here" in str(failure)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_gateway_takes_one_more_model_by_its_flag(checkpoint: Path, other_checkpoint: Path) -> None:
    with verb("gateway", str(checkpoint), "--also", f"{other_checkpoint}=", "--port", "0") as process:
        assert process.stdout is not None
        found = re.fullmatch(r"gateway ready url=(\S+) model=tiny,other\n", process.stdout.readline())
        assert found is not None
        listed = httpx2.get(f"{found[1]}/v1/models").json()["data"]
        assert [card["id"] for card in listed] == ["tiny", "other"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_one_more_model_needs_a_checkpoint(checkpoint: Path) -> None:
    from typer.testing import CliRunner

    from blocktrain.cli.main import app

    failure = CliRunner().invoke(app, ["gateway", str(checkpoint), "--also", "127.0.0.1:9000"]).exception
    assert isinstance(failure, UserError)
    assert "--also expects CHECKPOINT=HOST:PORT" in str(failure)


@pytest.mark.slow
def test_the_verbs_work_together_and_ctrl_c_ends_everything(checkpoint: Path, served: Served) -> None:
    with verb("serve", str(checkpoint), "--stages", "2", "--port", "0") as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        url = re.search(r"http://\S+", first).group()  # type: ignore[union-attr]
        pid = int(re.search(r"pid (\d+)", first).group(1))  # type: ignore[union-attr]
        text = output("generate", "--url", url, "--prompt", "The value ", "--max-bytes", "20")
        same = output("generate", str(checkpoint), "--prompt", "The value ", "--max-bytes", "20")
        assert text.startswith("The value ")
        assert text == same
        said = output("chat", "--url", url, "--seed", "1", "--max-bytes", "9", text="hello\n\n/new\nhello\n")
        answers = said.split("model> ")[1:]
        assert len(answers) == 2
        assert answers[0] == answers[1]
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_chat_in_one_process(checkpoint: Path) -> None:
    from typer.testing import CliRunner

    from blocktrain.cli.main import app

    done = CliRunner().invoke(app, ["chat", str(checkpoint), "--max-bytes", "8"], input="hello\n")
    assert done.exit_code == 0, done.output
    assert "model> " in done.stdout


def test_generate_and_chat_need_one_source(checkpoint: Path) -> None:
    from typer.testing import CliRunner

    from blocktrain.cli.main import app

    for arguments in (
        ["chat"],
        ["generate", "--prompt", "x"],
        ["chat", str(checkpoint), "--url", "http://x"],
    ):
        failure = CliRunner().invoke(app, arguments).exception
        assert isinstance(failure, UserError)
        assert "either a checkpoint folder or --url" in str(failure)


@pytest.mark.parametrize("option", [["--mode", "ar"], ["--passes", "2"]], ids=str)
def test_a_mode_without_a_gateway_is_refused_instead_of_ignored(checkpoint: Path, option: list[str]) -> None:
    from typer.testing import CliRunner

    from blocktrain.cli.main import app

    failure = CliRunner().invoke(app, ["generate", str(checkpoint), "--prompt", "x", *option]).exception
    assert isinstance(failure, UserError)
    assert "are for a gateway, and this command uses none" in str(failure)


def test_a_gateway_that_is_not_there_is_told_in_a_sentence() -> None:
    from blocktrain.client.gateway import GatewayClient, GatewayError

    free = open_port("127.0.0.1", 0)
    url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with GatewayClient(url) as client, pytest.raises(GatewayError, match="no answer .* `blocktrain serve`"):
        client.model()
    free.close()
    with pytest.raises(UserError, match="not the address of a gateway"):
        GatewayClient("127.0.0.1:8000")


def test_refusals_of_the_gateway_reach_the_command_line(served: Served) -> None:
    from blocktrain.client.gateway import GatewayClient, GatewayError

    with GatewayClient(served.url + "/v1") as client, pytest.raises(GatewayError, match="temperature"):
        list(client.complete({"model": client.model(), "prompt": "x", "temperature": -1}))


def test_a_program_that_is_killed_while_it_is_asked_for_leaves_the_others_their_start() -> None:
    """Of tests/zygote.py: three failed with it when a signal came between a question and its answer."""
    address = str(Path(quick_python()).parent / "zygote")
    request = json.dumps([["--version"], "/", {}]).encode()
    for sent in (b"", len(request).to_bytes(4, "big"), len(request).to_bytes(4, "big") + request):
        with socket.socket(socket.AF_UNIX) as asking, open(os.devnull, "r+b") as nowhere:
            asking.connect(address)
            if sent:
                socket.send_fds(asking, [sent[:4]], [nowhere.fileno()] * 3)
                asking.sendall(sent[4:])
    shown = subprocess.run([quick_python(), "-m", "blocktrain", "--version"], capture_output=True, check=True)
    assert shown.stdout.strip()
