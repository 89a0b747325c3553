"""`blocktrain doctor`: what readings mean, and readings of real servers."""

from __future__ import annotations

import asyncio
import http.server
import json
import threading
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import torch

from blocktrain.config import Recipe
from blocktrain.doctor import findings
from blocktrain.doctor.findings import (
    FIRST_TOO_NEW_TORCH,
    OLDEST_PYTHON,
    OLDEST_TORCH,
    Certificate,
    CoordinatorReading,
    Device,
    Disk,
    Finding,
    Need,
    Severity,
    StageProbe,
    Tcp,
    Versions,
    worst,
)
from blocktrain.doctor.machine import read_device, read_disk, read_proxy, shipped_needs
from blocktrain.serving.engine.local import LocalEngine
from blocktrain.serving.gateway.main import background_gateway
from blocktrain.serving.stage.main import load_blocks
from blocktrain.serving.stage.stage import Stage, StageConfig
from blocktrain.training.cost import PeakMemory
from blocktrain.training.inner import build_codebook
from blocktrain.training.memory import training_bytes
from blocktrain.training.optimizer import Optimizer
from blocktrain.training.setup import Setup
from blocktrain.wire.signing import DEFAULT_WINDOW_SECONDS
from tests.cli.program import Outcome, run_main
from tests.cli.servers import closed_port, coordinator_at, make_certificate
from tests.tiny import tiny_recipe

GB = 10**9
NOW = datetime(2026, 11, 15, tzinfo=UTC)
RUNNING = CoordinatorReading("http://h:8420", None, "", "coordinator", "tiny", 0.2, 0.01)
TRUSTED = Certificate(None, ("h",), NOW + timedelta(days=60), False)

# --- what readings mean


def test_a_sound_machine_has_nothing_to_mend() -> None:
    device = Device("cpu", "2 cores", 8 * GB)
    found = [
        *findings.about_versions(Versions((3, 12, 1), "2.11.0+cu130", "0.1.0")),
        findings.about_device(device),
        findings.about_blocks(device, [Need("demo", GB), Need("large", 2 * GB)]),
        findings.about_disk(Disk("/data", 50 * GB, True)),
        findings.about_files(65536),
        findings.about_tcp(Tcp("bbr", True)),
        findings.about_proxy({}, None),
        findings.about_coordinator(RUNNING),
        findings.about_clock(RUNNING),
        findings.about_tls("https://h", TRUSTED, NOW),
        findings.about_text(None),
    ]
    assert all(finding is not None and finding.cause is None for finding in found)
    assert worst(finding for finding in found if finding is not None) is Severity.OK


DEVICE = Device("cpu", "2 cores", 1 * GB)
TROUBLES: dict[str, tuple[Finding | None, Severity, str]] = {
    "an old Python": (
        findings.about_versions(Versions((3, 10, 0), "2.11.0", "0"))[0], Severity.ERROR, "3.11"),
    "an old torch": (findings.about_versions(Versions((3, 12), "2.10.1", "0"))[1], Severity.ERROR, "2.11"),
    "a torch not tested": (
        findings.about_versions(Versions((3, 12), "2.14.0", "0"))[1], Severity.ERROR, "pip install"),
    "a torch of unknown version": (
        findings.about_versions(Versions((3, 12), "git", "0"))[1], Severity.ERROR, "torch git"),
    "a device that is not there": (
        findings.about_device(Device("cuda", problem="no driver")), Severity.ERROR, "no driver"),
    "no shipped block fits": (
        findings.about_blocks(DEVICE, [Need("demo", 2 * GB)]), Severity.WARNING, "model.width"),
    "the run's block does not fit": (
        findings.about_blocks(DEVICE, [Need("run", 2 * GB)], of_run=True), Severity.ERROR, "1.0 GB"),
    "little disk": (findings.about_disk(Disk("/data", 2 * GB, True)), Severity.WARNING, "--cache-gb"),
    "no disk": (findings.about_disk(Disk("/data", GB // 2, True)), Severity.ERROR, "free some space"),
    "a read-only folder": (findings.about_disk(Disk("/data", 9 * GB, False)), Severity.ERROR, "--data-dir"),
    "few files": (findings.about_files(1024), Severity.WARNING, "ulimit -n"),
    "hardly any files": (findings.about_files(64), Severity.ERROR, "ulimit -n"),
    "slow start after idle": (
        findings.about_tcp(Tcp("cubic", True)), Severity.WARNING, "tcp_slow_start_after_idle=0"),
    "a proxy": (
        findings.about_proxy({"HTTPS_PROXY": "http://p:1"}, "https://h"), Severity.WARNING, "directly"),
    "a clock nearly off": (
        findings.about_clock(replace(RUNNING, clock_seconds=DEFAULT_WINDOW_SECONDS / 2 + 1)),
        Severity.WARNING, "behind"),
    "a clock off": (
        findings.about_clock(replace(RUNNING, clock_seconds=-DEFAULT_WINDOW_SECONDS - 1)),
        Severity.ERROR, "ahead of"),
    "plain HTTP": (findings.about_tls("http://h:8420", None, NOW), Severity.WARNING, "https://"),
    "a certificate about to expire": (
        findings.about_tls("https://h", replace(TRUSTED, not_after=NOW + timedelta(days=3)), NOW),
        Severity.WARNING, "3 days"),
    "an expired certificate": (
        findings.about_tls("https://h", replace(TRUSTED, not_after=NOW - timedelta(days=3)), NOW),
        Severity.ERROR, "expired"),
    "another name": (
        findings.about_tls("https://h", replace(TRUSTED, error="Hostname mismatch"), NOW),
        Severity.ERROR, "Hostname mismatch"),
    "a dropped packet": (
        findings.about_stage(StageProbe("h:9", "timeout", "no answer")), Severity.ERROR, "forward"),
    "text that is another": (findings.about_text("found sha256 ab"), Severity.ERROR, "--corpus"),
}  # fmt: skip


@pytest.mark.parametrize("case", TROUBLES)
def test_a_trouble_has_its_severity_its_cause_and_a_remedy(case: str) -> None:
    finding, severity, words = TROUBLES[case]
    assert finding is not None
    assert finding.severity is severity
    assert finding.cause
    assert finding.remedy
    assert words in " ".join((finding.found, finding.cause, finding.remedy))


def test_some_blocks_fitting_is_enough_where_no_run_asks_for_more() -> None:
    finding = findings.about_blocks(DEVICE, [Need("small", GB // 2), Need("large", 2 * GB)])
    assert finding.severity is Severity.OK
    assert "fits: small (500.0 MB); does not: large (2.0 GB)" in finding.found


def test_a_slow_line_does_not_make_a_right_clock_wrong() -> None:
    late = replace(RUNNING, clock_seconds=DEFAULT_WINDOW_SECONDS / 2 + 1, round_trip_seconds=4.0)
    finding = findings.about_clock(late)
    assert finding is not None
    assert finding.severity is Severity.OK


def test_passwords_of_a_proxy_are_not_shown() -> None:
    shown = read_proxy({"https_proxy": "http://me:secret@proxy:3128", "NO_PROXY": "x", "HTTP_PROXY": ""})
    assert list(shown) == ["https_proxy"]
    assert "secret" not in str(shown)
    assert "proxy" in shown["https_proxy"]


# --- readings of this machine


@pytest.mark.parametrize(
    "shape",
    [
        ("model.width=64", "model.layers_per_block=2", "training.batch=8", "model.context=128"),
        ("model.width=128", "model.layers_per_block=3", "model.feedforward=2", "training.batch=8",
         "model.context=128"),
        ("model.family=llama", "model.condition_width=64", "model.width=64", "model.heads=4",
         "model.kv_heads=2", "model.feedforward_width=176", "model.layers_per_block=3", "training.batch=8",
         "model.context=128"),
        ("model.family=llama", "model.condition_width=64", "model.width=128", "model.tied=true",
         "model.layers_per_block=2", "training.momentum=bfloat16", "training.batch=4", "model.context=128"),
        ("model.width=64", "model.convolution=0", "training.optimizer=adamw", "training.batch=16"),
        ("model.width=64", "model.mixer=none", "model.layers_per_block=2", "training.batch=16"),
    ],
    ids=("small", "deep and narrow", "llama", "llama tied", "adamw", "without attention"),
)  # fmt: skip
def test_the_memory_foretold_is_the_memory_counted(shape: tuple[str, ...]) -> None:
    recipe = tiny_recipe(*shape)
    foretold, counted = training_bytes(recipe, Setup.of(recipe).objective), counted_bytes(recipe)
    assert foretold == pytest.approx(counted, rel=0.08)


def counted_bytes(recipe: Recipe) -> int:
    from blocktrain.model.objective import Objective

    objective = Objective(recipe.model, recipe.objective, vocabulary=256)
    block, codebook = objective.build(0, 0), build_codebook(recipe, 256)()
    memory = PeakMemory(torch.device("cpu"))
    tokens = torch.zeros(recipe.training.batch, recipe.model.context, dtype=torch.long)
    hint = objective.draw_hint(0, tokens, codebook, torch.Generator())
    with memory.count_activations():
        loss = objective.loss(block, tokens, tokens, codebook, hint)
    loss.total.backward()  # type: ignore[no-untyped-call]
    optimizer = Optimizer(block, recipe.training)
    optimizer.step(0)
    memory.count_state(block, optimizer)
    return memory.peak_bytes


def test_the_foretold_memory_of_shipped_recipes_bounds_what_was_measured_on_cuda() -> None:
    measured = 2_097_736_704  # of a block on an H200 (docs/history/2026-11-15.md)
    needs = {need.recipe: need.num_bytes for need in shipped_needs()}
    assert measured < needs["wikitext-2"] < 2 * measured


def test_this_machine_has_memory_and_a_disk(tmp_path: Path) -> None:
    device = read_device("cpu")
    assert device.problem is None
    assert device.free_bytes
    disk = read_disk(tmp_path / "not" / "yet" / "there")
    assert disk.writable
    assert disk.free_bytes
    assert not (tmp_path / "not").exists()
    assert "does not exist here" in str(read_device("cuda:99").problem)


# --- readings of real servers


@pytest.fixture(scope="module")
def recipe(text_folder: Path) -> Recipe:
    return tiny_recipe(f"data.corpus={text_folder}", "trust.judge=off", "trust.stamp_bits=0")


def findings_of(outcome: Outcome) -> dict[str, dict[str, str]]:
    return {finding["topic"]: finding for finding in json.loads(outcome.out)["findings"]}


def checked(*arguments: str) -> tuple[int, dict[str, dict[str, str]]]:
    outcome = run_main("doctor", "--json", *arguments)
    return outcome.code, findings_of(outcome)


def test_a_sound_coordinator_is_found_sound(recipe: Recipe, tmp_path: Path) -> None:
    with coordinator_at(tmp_path, recipe) as url:
        code, found = checked("--coordinator", url, "--corpus", recipe.data.corpus)
        told = run_main("doctor", "--coordinator", url, "--corpus", recipe.data.corpus)
    assert code == 0
    for topic in ("coordinator", "clock", "text", "blocks"):
        assert found[topic]["severity"] == "ok", found[topic]
    assert "'run'" in found["coordinator"]["found"]
    assert "coordinator: " in told.out
    assert told.code == 0


def test_a_run_on_another_text_is_told_apart(recipe: Recipe, tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("something else entirely " * 200)
    with coordinator_at(tmp_path / "data", recipe) as url:
        code, found = checked("--coordinator", url, "--corpus", str(tmp_path / "other.txt"))
    assert code == 1
    assert "this machine's text is not the run's" in found["text"]["cause"]


def test_a_clock_an_hour_off_is_an_error(recipe: Recipe, tmp_path: Path) -> None:
    with coordinator_at(tmp_path, recipe, clock=lambda: time.time() + 3600) as url:
        code, found = checked("--coordinator", url)
    assert code == 1
    assert found["clock"]["severity"] == "error"
    assert "behind" in found["clock"]["found"]


def test_a_self_signed_certificate_is_refused_until_it_is_trusted(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls = make_certificate(tmp_path / "tls", days_left=300)
    with coordinator_at(tmp_path / "data", recipe, tls=tls) as url:
        code, found = checked("--coordinator", url)
        assert code == 1
        assert found["coordinator"]["severity"] == "error"
        assert "self-signed" in found["tls"]["cause"]
        assert "SSL_CERT_FILE" in found["tls"]["remedy"]
        monkeypatch.setenv("SSL_CERT_FILE", str(tls.certificate))
        code, found = checked("--coordinator", url, "--corpus", recipe.data.corpus)
    assert code == 0
    assert found["coordinator"]["severity"] == "ok"
    assert "127.0.0.1" in found["tls"]["found"]


def test_a_link_with_a_pin_is_understood_and_its_invitation_not_shown(recipe: Recipe, tmp_path: Path) -> None:
    tls = make_certificate(tmp_path / "tls", days_left=300)
    with coordinator_at(tmp_path / "data", recipe, tls=tls) as url:
        told = run_main("doctor", "--coordinator", f"{url}#invite=SECRET.x,pin={tls.pin()}")
        assert told.code == 0, told.out
        assert "it is the one that the link pins" in told.out
        assert "SECRET" not in told.out
        code, found = checked("--coordinator", f"{url}#pin={'00' * 32}")
    assert code == 1
    assert found["tls"]["remedy"] == "ask the run's host for a new link"
    assert found["coordinator"]["remedy"] == "see the finding about TLS"


def test_a_worker_ends_with_the_doctor_s_words_on_a_self_signed_certificate(
    recipe: Recipe, tmp_path: Path
) -> None:
    tls = make_certificate(tmp_path / "tls", days_left=300)
    with coordinator_at(tmp_path / "data", recipe, tls=tls) as url:
        outcome = run_main("worker", "--coordinator", url, "--data-dir", tmp_path / "worker")
    assert outcome.code == 2
    assert "answers, but its certificate is self-signed" in outcome.complaint
    assert "set SSL_CERT_FILE to it" in outcome.complaint


@pytest.mark.parametrize(("days", "severity"), [(3.5, "warning"), (-2.0, "error")])
def test_a_certificate_at_its_end_is_noticed(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, days: float, severity: str
) -> None:
    tls = make_certificate(tmp_path / "tls", days_left=days)
    monkeypatch.setenv("SSL_CERT_FILE", str(tls.certificate))
    with coordinator_at(tmp_path / "data", recipe, tls=tls) as url:
        _, found = checked("--coordinator", url)
    assert found["tls"]["severity"] == severity
    assert "expire" in found["tls"]["cause"]


def test_http_and_https_confused_are_told_apart(recipe: Recipe, tmp_path: Path) -> None:
    with coordinator_at(tmp_path / "plain", recipe) as url:
        code, found = checked("--coordinator", url.replace("http://", "https://"))
    assert code == 1
    assert "try the address with http://" in found["tls"]["remedy"]
    tls = make_certificate(tmp_path / "tls", days_left=300)
    with coordinator_at(tmp_path / "encrypted", recipe, tls=tls) as url:
        code, found = checked("--coordinator", url.replace("https://", "http://"))
    assert code == 1
    assert "try https://" in found["coordinator"]["remedy"]


def test_a_closed_port_and_an_unknown_name_are_told_apart() -> None:
    code, found = checked("--coordinator", f"http://127.0.0.1:{closed_port()}")
    assert code == 1
    assert "nothing listens there" in found["coordinator"]["cause"]
    assert "tls" not in found
    code, found = checked("--coordinator", "http://no-such-host.invalid:8420")
    assert code == 1
    assert "DNS" in found["coordinator"]["cause"]


def test_a_gateway_is_not_taken_for_a_coordinator(checkpoint: Path) -> None:
    with background_gateway(LocalEngine(checkpoint)) as url:
        code, found = checked("--coordinator", url)
    assert code == 1
    assert "is a gateway" in found["coordinator"]["found"]
    assert f"blocktrain chat --url {url}" in found["coordinator"]["remedy"]


class AnotherPage(http.server.BaseHTTPRequestHandler):
    """A web server that knows no run and answers everything."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<h1>welcome</h1>")

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def another_page() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), AnotherPage)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def test_another_web_server_is_no_coordinator_and_no_stage() -> None:
    with another_page() as place:
        code, found = checked("--coordinator", f"http://{place}", "--stage", place)
    assert code == 1
    assert "does not fit protocol 1" in found["coordinator"]["found"]
    assert "another program listens there" in found["stage"]["cause"]


@contextmanager
def running_stage(checkpoint: Path) -> Iterator[str]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    opening = Stage.open(*load_blocks(checkpoint, [0], torch.device("cpu")), StageConfig())
    stage = asyncio.run_coroutine_threadsafe(opening, loop).result(20)
    try:
        yield str(stage.address)
    finally:
        asyncio.run_coroutine_threadsafe(stage.close(), loop).result(20)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


def test_a_stage_answers_and_loopback_is_pointed_out(checkpoint: Path) -> None:
    with running_stage(checkpoint) as address:
        code, found = checked("--stage", address)
    assert code == 0
    assert "is a stage and answers" in found["stage"]["found"]
    assert "this machine only" in found["stage"]["cause"]
    code, found = checked("--stage", f"127.0.0.1:{closed_port()}")
    assert code == 1
    assert "nothing listens there" in found["stage"]["cause"]


@pytest.mark.parametrize(
    "arguments", [("--coordinator", "somewhere"), ("--coordinator", "http://h:0"), ("--stage", "nowhere")]
)
def test_an_address_that_is_none_is_misuse(arguments: tuple[str, ...]) -> None:
    outcome = run_main("doctor", *arguments)
    assert outcome.code == 2
    assert "expected" in outcome.complaint


def test_the_doctor_asks_for_the_versions_that_pyproject_does() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    oldest, newest = (f"{major}.{minor}" for major, minor in (OLDEST_TORCH, FIRST_TOO_NEW_TORCH))
    assert f"torch>={oldest},<{newest}" in project["dependencies"]
    assert project["requires-python"] == ">={}.{}".format(*OLDEST_PYTHON)
    remedy = findings.about_versions(Versions((3, 12), "2.10.1", "0"))[1].remedy
    assert remedy is not None
    assert f"torch>={oldest},<{newest}" in remedy
