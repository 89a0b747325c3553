"""An event stream wakes at once, whichever process wrote; nothing here waits for its next look."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest

from blocktrain.coordinator.http import public_routes
from blocktrain.coordinator.operator_notes import KEY_FILE
from tests.coordinator.conftest import Running, served, tiny_recipe

FIRST_COMMENT = ": still here"


@pytest.fixture(autouse=True)
def no_second_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(public_routes, "LOOK_SECONDS", 3600.0)


@contextmanager
def events(running: Running) -> Iterator[Iterator[str]]:
    """Lines of a stream that has told all there was."""
    with httpx2.stream("GET", f"{running.url}/v1/events?since=0", timeout=20) as response:
        lines = response.iter_lines()
        assert FIRST_COMMENT in lines  # reads up to it
        yield lines


def next_kind(lines: Iterator[str]) -> str:
    for line in lines:
        if line.startswith("data: "):
            return str(json.loads(line.removeprefix("data: "))["kind"])
    raise AssertionError("the stream ended")


def test_a_stream_tells_at_once_what_this_process_writes(tmp_path: Path) -> None:
    with served(tmp_path, tiny_recipe()) as running, events(running) as lines:
        running.peer()
        assert next_kind(lines) == "join"


def test_a_stream_tells_at_once_what_another_process_writes(tmp_path: Path, postgres_url: str) -> None:
    recipe, shared = tiny_recipe(), str(tmp_path / "blobs")
    with served(tmp_path / "one", recipe, None, postgres_url, shared) as one:
        (tmp_path / "two").mkdir()
        shutil.copy(tmp_path / "one" / KEY_FILE, tmp_path / "two" / KEY_FILE)
        with served(tmp_path / "two", recipe, None, postgres_url, shared) as two, events(two) as lines:
            one.peer()
            assert next_kind(lines) == "join"
