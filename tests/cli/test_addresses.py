"""Verbs that are given a wrong address say so at once; a worker that is stopped early says that."""

from __future__ import annotations

import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from blocktrain.serving.engine.local import LocalEngine
from blocktrain.serving.gateway.main import background_gateway
from tests.cli.program import ENVIRONMENT, command, run_main, run_program
from tests.cli.servers import coordinator_at
from tests.coordinator.conftest import tiny_recipe
from tests.forked import quick_python


@pytest.fixture(scope="module")
def gateway(trained: tuple[Path, object]) -> Iterator[str]:
    with background_gateway(LocalEngine(trained[0] / "checkpoint")) as url:
        yield url


@pytest.mark.parametrize("verb", [("status",), ("workers", "ls"), ("contributions",)])
def test_an_address_without_a_scheme_is_misuse(verb: tuple[str, ...]) -> None:
    outcome = run_main(*verb, "foo")
    assert outcome.code == 2
    assert "'foo' is not the address of a coordinator; expected http(s)://HOST[:PORT]" in outcome.complaint


def test_the_status_of_a_gateway_is_refused_in_words(gateway: str) -> None:
    outcome = run_main("status", gateway)
    assert outcome.code == 2
    assert f"{gateway} is not a coordinator" in outcome.complaint


def test_text_asked_of_a_coordinator_or_another_program_is_refused_in_words(tmp_path: Path) -> None:
    with coordinator_at(tmp_path / "run", tiny_recipe()) as coordinator:
        outcome = run_main("generate", "--url", coordinator, "--prompt", "Once upon")
    assert outcome.code == 2
    assert f"{coordinator} is not a gateway: it answered 404 to GET /v1/models" in outcome.complaint
    assert "the address that `blocktrain serve` or `gateway` printed" in outcome.complaint


def test_a_refused_request_does_not_print_its_prompt_as_if_it_were_an_answer(gateway: str) -> None:
    outcome = run_main("generate", "--url", gateway, "--prompt", "Once upon", "--mode", "nonsense")
    assert outcome.code == 2
    assert "mode" in outcome.complaint
    assert outcome.out == ""


def test_a_gateway_has_no_page_that_loads_scripts_from_elsewhere(gateway: str) -> None:
    assert httpx2.get(f"{gateway}/docs").status_code == 404
    assert httpx2.get(f"{gateway}/redoc").status_code == 404
    assert httpx2.get(f"{gateway}/openapi.json").status_code == 200


def test_a_worker_does_not_join_a_gateway(gateway: str, tmp_path: Path) -> None:
    outcome = run_program("worker", "--coordinator", gateway, "--data-dir", tmp_path / "worker")
    assert outcome.code == 2
    assert f"{gateway} is not a coordinator" in outcome.complaint


def test_a_label_that_is_not_printable_is_misuse(tmp_path: Path) -> None:
    options = ("--coordinator", "http://127.0.0.1:1", "--data-dir", tmp_path / "worker")
    outcome = run_program("worker", *options, "--label", "<b>me</b>")
    assert outcome.code == 2
    assert "--label '<b>me</b>': expected at most 64 letters" in outcome.complaint


def test_ctrl_c_before_joining_ends_a_worker_with_130(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    options = ("--coordinator", url, "--data-dir", tmp_path / "worker")
    words = command("worker", *options, python=quick_python())
    with subprocess.Popen(words, env=ENVIRONMENT, stderr=subprocess.PIPE) as worker:
        assert worker.stderr is not None
        line = worker.stderr.readline().decode()
        while "no answer from" not in line:
            assert worker.poll() is None, line
            line = worker.stderr.readline().decode()
        worker.send_signal(signal.SIGINT)
        rest = worker.stderr.read().decode()
        assert worker.wait(30) == 130
    assert f"blocktrain: stopped before {url} had answered" in rest
    assert "Traceback" not in rest


@pytest.mark.parametrize(
    ("option", "value", "complaint"),
    [
        ("--gateway", "127.0.0.1:8000", "expected an address such as http://127.0.0.1:8000"),
        ("--gateway", "http://host; script-src *", "expected an address such as"),
        ("--reference", "no-such-report.json", "expected a number or a report.json"),
        ("--reference", "-1", "expected a cross entropy above 0"),
    ],
)
def test_what_a_coordinator_cannot_show_is_misuse(
    tmp_path: Path, option: str, value: str, complaint: str
) -> None:
    outcome = run_main("coordinator", "demo", "--data-dir", tmp_path, "--port", "0", option, value)
    assert outcome.code == 2
    assert complaint in outcome.complaint
