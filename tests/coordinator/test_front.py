"""Slow and silent connections are closed, and a crowd of them keeps nobody out."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import pytest

from blocktrain import connections
from blocktrain.connections import ConnectionTable
from blocktrain.coordinator.main import make_server
from blocktrain.coordinator.service import opened
from blocktrain.listening import open_port
from blocktrain.wire.messages import ErrorAnswer
from tests.coordinator.conftest import CORPUS, Place, Running, tiny_recipe

HEAD = b"GET /healthz HTTP/1.1\r\nHost: x\r\n"


def connected(running: Running, source: str = "127.0.0.1") -> socket.socket:
    address = urlsplit(running.url)
    return socket.create_connection((address.hostname, address.port), timeout=30, source_address=(source, 0))


def all_of(connection: socket.socket) -> bytes:
    """Until the server closes it."""
    answer = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(65536):
            answer += piece
    return answer


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HEAD_SECONDS", "LINGER_SECONDS", "STALL_SECONDS"):
        monkeypatch.setattr(connections, name, 0.2)


@pytest.mark.usefixtures("hasty")
def test_a_head_that_does_not_end_is_answered_with_too_slow(running: Running) -> None:
    with connected(running) as connection:
        connection.sendall(HEAD)
        answer = all_of(connection)
    assert b" 408 " in answer.split(b"\r\n", 1)[0]
    assert b'"too_slow"' in answer


def test_a_connection_that_comes_while_the_server_stops_does_not_hold_it(tmp_path: Path) -> None:
    ready = threading.Event()
    with (
        opened(tiny_recipe(), CORPUS, tmp_path, scoring=False) as coordinator,
        open_port("127.0.0.1", 0) as listener,
    ):
        server = make_server(coordinator, ready.set)
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        assert ready.wait(30)
        # As it is for a connection that the system took just before the port was closed.
        server.connections.closing = True
        with socket.create_connection(listener.getsockname(), timeout=30) as late:
            assert all_of(late) == b""
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


def test_what_is_no_http_is_refused_in_the_error_document(running: Running) -> None:
    with connected(running) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: a\r\nno colon here\r\n\r\n")
        head, body = all_of(connection).split(b"\r\n\r\n", 1)
    assert b" 400 " in head.split(b"\r\n", 1)[0]
    assert b"application/json" in head
    assert ErrorAnswer.model_validate_json(body).error.reason == "invalid_message"


@pytest.mark.usefixtures("hasty")
def test_a_head_that_dribbles_in_is_not_given_more_time(running: Running) -> None:
    with connected(running) as connection:
        connection.sendall(HEAD)
        connection.settimeout(0.02)
        closed = False
        while not closed:  # ends by the suite's time-out where the server does not close it
            try:
                closed = bool(connection.recv(65536))
            except TimeoutError:
                connection.sendall(b"X: 1\r\n")
            except (ConnectionResetError, BrokenPipeError):
                closed = True
        assert httpx2.get(f"{running.url}/healthz").status_code == 200


@pytest.mark.usefixtures("hasty")
def test_a_connection_that_says_nothing_is_closed_without_a_word(running: Running) -> None:
    with connected(running) as connection:
        assert all_of(connection) == b""


@pytest.mark.usefixtures("hasty")
def test_a_second_request_on_a_connection_has_its_own_time(running: Running) -> None:
    with connected(running) as connection:
        connection.sendall(HEAD + b"\r\n" + HEAD)
        answer = all_of(connection)
    assert answer.count(b"HTTP/1.1 200") == 1
    assert answer.count(b"HTTP/1.1 408") == 1


def test_a_head_of_many_small_lines_is_too_long_however_it_arrives(running: Running) -> None:
    start = b"GET /healthz HTTP/1.1\r\nHost: x\r\n"
    with connected(running) as connection:
        # Just above the limit: the server has read everything that was sent, so its refusal arrives.
        connection.sendall(start + b"A: b\r\n" * 3_000 + b"\r\n")
        assert b" 400 " in all_of(connection).split(b"\r\n", 1)[0]
    with connected(running) as connection:
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            connection.sendall(start + b"A: b\r\n" * 20_000 + b"\r\n")
        # Far above it, the reset of the closed connection may overtake the refusal; it is never a 200.
        answer = all_of(connection)
    assert answer == b"" or b" 400 " in answer.split(b"\r\n", 1)[0]


@pytest.mark.usefixtures("hasty")
def test_a_refused_body_may_not_go_on_for_ever(running: Running) -> None:
    with connected(running) as connection:
        connection.sendall(b"POST /v1/join HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\n\r\n{")
        answer = all_of(connection)
    assert b" 413 " in answer.split(b"\r\n", 1)[0]


@pytest.mark.usefixtures("hasty")
def test_an_answer_that_nobody_reads_is_given_up(local: Place) -> None:
    recipe = tiny_recipe(blocks=1)
    wide = dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, width=512))
    with local.serve(wide) as running:
        snapshot = running.peer().block(0).head_hash
        with connected(running) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            request = f"GET /v1/snapshots/{snapshot} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
            with contextlib.suppress(ConnectionResetError, BrokenPipeError):
                while True:  # each answer has over 10 MB: the server soon has nowhere to put them
                    connection.sendall(request)
        assert httpx2.get(f"{running.url}/healthz").status_code == 200


@pytest.fixture
def crowded(local: Place, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    monkeypatch.setattr(connections, "MAX_PER_NETWORK", 4)
    with local.serve(tiny_recipe()) as running:
        yield running


def test_silent_connections_make_room_for_who_speaks_from_their_own_address(crowded: Running) -> None:
    silent = [connected(crowded) for _ in range(12)]
    for connection in silent:
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            connection.sendall(HEAD)
    for _ in range(3):
        assert httpx2.get(f"{crowded.url}/healthz").status_code == 200
    assert all_of(silent[0]) == b""
    for connection in silent:
        connection.close()


def test_one_address_does_not_use_up_the_room_of_another(crowded: Running) -> None:
    silent = [connected(crowded, "127.0.0.2") for _ in range(12)]
    with connected(crowded) as honest:
        honest.sendall(HEAD)
        assert all_of(silent[0]) == b""
        honest.sendall(b"Connection: close\r\n\r\n")
        assert b" 200 " in all_of(honest)
    for connection in silent:
        connection.close()


def test_the_longest_silent_of_a_full_network_is_closed_first() -> None:
    table: ConnectionTable[str] = ConnectionTable(limit=10, limit_per_network=2)
    assert table.enter("a", "home", 1.0) is None
    assert table.enter("b", "home", 2.0) is None
    table.works("a")
    assert table.enter("c", "home", 3.0) == "b"


def test_a_full_network_of_busy_connections_takes_no_more() -> None:
    table: ConnectionTable[str] = ConnectionTable(limit=10, limit_per_network=2)
    for name in ("a", "b"):
        table.enter(name, "home", 1.0)
        table.works(name)
    assert table.enter("c", "home", 2.0) == "c"
    assert table.enter("d", "elsewhere", 2.0) is None


def test_a_full_server_closes_the_longest_silent_of_all() -> None:
    table: ConnectionTable[str] = ConnectionTable(limit=3, limit_per_network=2)
    for time, name in enumerate(("a", "b", "c")):
        table.enter(name, name, float(time))
    table.works("a")
    table.waits("a", 4.0)
    assert table.enter("d", "d", 5.0) == "b"


def test_a_full_server_takes_from_the_network_that_has_most() -> None:
    table: ConnectionTable[str] = ConnectionTable(limit=4, limit_per_network=4)
    table.enter("newcomer", "home", 1.0)
    for time, name in enumerate(("x", "y", "z"), 2):
        table.enter(name, "crowd", float(time))
    assert table.enter("w", "elsewhere", 9.0) == "x"


def test_a_body_that_comes_slowly_loses_its_place_before_one_that_comes_fast() -> None:
    table: ConnectionTable[str] = ConnectionTable(limit=10, limit_per_network=2)
    table.enter("upload", "home", 1.0)
    table.enter("dribble", "home", 2.0)
    table.waits("upload", 1.0 + 1e6 / connections.MIN_BYTES_PER_SECOND)
    table.waits("dribble", 2.0 + 3 / connections.MIN_BYTES_PER_SECOND)
    assert table.enter("new", "home", 9.0) == "dribble"


def test_who_leaves_makes_room() -> None:
    table: ConnectionTable[str] = ConnectionTable(limit=1, limit_per_network=1)
    table.enter("a", "home", 1.0)
    table.leave("a")
    table.leave("a")
    assert table.enter("b", "home", 2.0) is None
