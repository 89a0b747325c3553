"""Notices to the operator: what is told, when, and that a receiver that fails costs the run nothing."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from blocktrain.coordinator import notices as module
from blocktrain.coordinator.main import run_coordinator
from blocktrain.coordinator.notices import STALL_SECONDS, Known, Webhook, notices, notified
from blocktrain.errors import UserError
from blocktrain.wire.messages import BanRequest
from tests.coordinator.conftest import Place, Running, tiny_recipe

PATIENCE = 30


class Receiver:
    """A real HTTP server that keeps what it is sent, and fails as often as it is told to."""

    def __init__(self) -> None:
        self.received: queue.Queue[dict[str, Any]] = queue.Queue()
        self.failures: list[int] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                status = outer.failures.pop(0) if outer.failures else 200
                self.send_response(status)
                self.send_header("content-length", "0")
                self.end_headers()
                if status == 200:
                    outer.received.put(body)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/hook/secret"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def next(self) -> dict[str, Any]:
        return self.received.get(timeout=PATIENCE)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    found = Receiver()
    yield found
    found.server.shutdown()
    found.server.server_close()


def test_a_ban_and_the_finish_are_told_once(local: Place, receiver: Receiver) -> None:
    receiver.failures = [503]  # the first try fails; the notice comes all the same
    with (
        local.serve(tiny_recipe(blocks=1, rounds=1)) as running,
        notified(running.coordinator, receiver.url),
    ):
        bad, good = running.peer(join=False), running.peer()
        bad.join(label="mallory")
        name = bad.identity.worker_id
        running.coordinator.workers.ban(name, BanRequest(reason="sends noise", seconds=7200))
        told = receiver.next()
        run = running.coordinator.resources.run.run_id
        assert (told["event"], told["worker_id"], told["run_id"]) == ("ban", name, run)
        assert told["text"] == f"tiny {run[:8]}: banned {name[:8]} mallory for 2 h 0 min: sends noise"
        assert told["content"] == told["text"]
        running.coordinator.workers.ban(name, BanRequest(reason="pardon", seconds=0))  # no news
        good.deliver(good.lend())
        told = receiver.next()
        assert (told["event"], told["text"]) == ("finish", f"tiny {run[:8]}: finished after 1 round")
        assert receiver.received.empty()


def test_a_stall_and_its_end_are_told_once(running: Running) -> None:
    peer = running.peer()
    peer.deliver(peer.lend(prefer_block=0))
    running.wait_for_version(0, 1)
    status = running.coordinator.status()
    known = Known(status.ledger_length, finished=False)

    def look(seconds: float, started: float = 0.0) -> list[str]:
        nonlocal known
        later = status.model_copy(update={"server_time": status.server_time + seconds, "workers": ()})
        found, known = notices(known, later, (), started)
        return [f"{one.event}: {one.text}" for one in found]

    assert look(STALL_SECONDS - 1) == []
    told = "stall: block 0 has closed no round for 15 min 1 s; nobody is at work"
    assert look(STALL_SECONDS + 1) == [told]
    assert look(STALL_SECONDS + 60) == []
    assert look(10) == ["resumed: rounds close again"]
    # A coordinator that was down for a week has not stalled.
    week = 7 * 86400.0
    assert look(week, started=status.server_time + week - 5) == []


def test_a_receiver_that_never_answers_costs_no_round_and_is_given_up(
    local: Place, receiver: Receiver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "LONGEST_WAIT_SECONDS", 0.0)
    receiver.failures = [500] * 1000
    with local.serve(tiny_recipe(blocks=1, rounds=1)) as running:
        hook = Webhook(running.coordinator, receiver.url)
        peer = running.peer()
        for number in range(module.MAX_WAITING + 8):
            ban = BanRequest(reason=f"number {number}", seconds=60)
            running.coordinator.workers.ban(f"{number:032x}", ban)
        hook.look()
        assert len(hook._waiting) == module.MAX_WAITING  # bounded: the oldest are dropped
        peer.deliver(peer.lend())
        running.wait_for_version(0, 1)
        for _ in range(module.MAX_TRIES):
            hook.send()
        assert len(hook._waiting) == module.MAX_WAITING - 1
        (line,) = [one.getMessage() for one in caplog.records if "gave up" in one.getMessage()]
        assert "answered 500" in line
        assert "secret" not in line


def test_a_webhook_that_is_no_address_is_told_before_a_run_is_made(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    with pytest.raises(UserError, match="is not the address of a webhook"):
        run_coordinator(Path("recipes/demo.toml"), data_dir=folder, webhook="hooks.example.org/x")
    assert not folder.exists()
