"""A coordinator may send a worker no nearer than where it is itself: no router, no loopback, no metadata."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpcore2
import pytest

from blocktrain.client.coordinator import CoordinatorClient
from blocktrain.client.places import ForbiddenPlace, MovedNearer, Nearness, nearness_of
from blocktrain.client.traffic import Traffic
from blocktrain.errors import UserError, WireError
from blocktrain.wire.identity import Identity
from blocktrain.wire.messages import CommitAnswer, Upload
from tests.worker.test_traffic_and_client import BLOB, Handler, Served, served

__all__ = ["served"]

PUBLIC, PRIVATE, LINK_LOCAL, LOOPBACK = "8.8.8.8", "192.168.1.1", "169.254.169.254", "127.0.0.1"


@pytest.mark.parametrize(
    ("address", "nearness"),
    [
        ("8.8.8.8", Nearness.PUBLIC),
        ("2606:4700::1111", Nearness.PUBLIC),
        ("10.1.2.3", Nearness.PRIVATE),
        ("172.31.0.1", Nearness.PRIVATE),
        ("100.100.100.100", Nearness.PRIVATE),
        ("fd00:ec2::1", Nearness.PRIVATE),
        ("169.254.169.254", Nearness.SPECIAL),
        ("fe80::1%eth0", Nearness.SPECIAL),
        ("fec0::1", Nearness.SPECIAL),
        ("224.0.0.1", Nearness.SPECIAL),
        ("255.255.255.255", Nearness.SPECIAL),
        ("198.18.0.1", Nearness.SPECIAL),
        # Where clouds keep credentials below the link-local: Oracle, Azure, Alibaba, Amazon, Google.
        ("192.0.0.192", Nearness.SPECIAL),
        ("168.63.129.16", Nearness.SPECIAL),
        ("100.100.100.200", Nearness.SPECIAL),
        ("fd00:ec2::254", Nearness.SPECIAL),
        ("fd20:ce::254", Nearness.SPECIAL),
        ("::ffff:168.63.129.16", Nearness.SPECIAL),
        ("127.8.8.8", Nearness.LOOPBACK),
        ("0.0.0.0", Nearness.LOOPBACK),
        ("::1", Nearness.LOOPBACK),
        ("::", Nearness.LOOPBACK),
        # IPv4 inside IPv6: mapped, 6to4 and NAT64.
        ("::ffff:8.8.8.8", Nearness.PUBLIC),
        ("::ffff:127.0.0.1", Nearness.LOOPBACK),
        ("2002:c0a8:0101::1", Nearness.PRIVATE),
        ("64:ff9b::8.8.8.8", Nearness.PUBLIC),
        ("64:ff9b::127.0.0.1", Nearness.LOOPBACK),
        ("64:ff9b:1::8.8.8.8", Nearness.PUBLIC),
        ("64:ff9b:1:7::169.254.169.254", Nearness.SPECIAL),
    ],
)
def test_the_nearness_of_an_address(address: str, nearness: Nearness) -> None:
    assert nearness_of(address) >= nearness
    if not address.startswith("2002:"):
        assert nearness_of(address) == nearness


class Network:
    """Names with the addresses a test gives them; every connection ends at one server of ours."""

    def __init__(self, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: dict[str, list[str]] = {}
        self.reached: list[str] = []
        self.down: set[str] = set()
        lookup, connect = socket.getaddrinfo, httpcore2.SyncBackend.connect_tcp

        def getaddrinfo(host: str, asked: int, *more: Any, **named: Any) -> list[Any]:
            return [
                one
                for address in self.names.get(host, [host])
                for one in lookup(address, asked, *more, **named)
            ]

        def connect_tcp(backend: Any, host: str, asked: int, *more: Any) -> httpcore2.NetworkStream:
            # Always digits: a name would be looked up again, after the check.
            socket.inet_aton(host)
            if host in self.down:
                raise httpcore2.ConnectError("down")
            self.reached.append(host)
            monkeypatch.setattr(socket, "getaddrinfo", lookup)
            try:
                return connect(backend, "127.0.0.1", port, *more)
            finally:
                monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)

        monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
        monkeypatch.setattr(httpcore2.SyncBackend, "connect_tcp", connect_tcp)


@pytest.fixture
def network(served: Served, monkeypatch: pytest.MonkeyPatch) -> Network:
    return Network(served.server.server_port, monkeypatch)


@pytest.fixture
def joined(served: Served, network: Network) -> Iterator[CoordinatorClient]:
    """A client of http://run.example; a test says where that is."""
    network.names["run.example"] = [PUBLIC]
    with CoordinatorClient(
        "http://run.example", Identity.generate(), Traffic(), served.stop, served.lines.append, 2
    ) as client:
        yield client


def redirect(to: str) -> Any:
    return lambda handler: handler.answer(307, b"", Location=to)


def fine(handler: Handler) -> None:
    handler.answer(200, BLOB)


@pytest.mark.parametrize(
    ("own", "there", "may"),
    [
        (PUBLIC, PUBLIC, True),
        (PUBLIC, PRIVATE, False),
        (PUBLIC, LINK_LOCAL, False),
        (PUBLIC, LOOPBACK, False),
        (PRIVATE, PUBLIC, True),
        (PRIVATE, "10.0.0.9", True),
        (PRIVATE, LINK_LOCAL, False),
        (PRIVATE, LOOPBACK, False),
        (LOOPBACK, PRIVATE, True),
        (LOOPBACK, LINK_LOCAL, True),
        (LOOPBACK, LOOPBACK, True),
    ],
)
@pytest.mark.parametrize("named", [False, True])
def test_a_redirect_leads_no_nearer_than_the_coordinator(
    served: Served, network: Network, joined: CoordinatorClient, own: str, there: str, may: bool, named: bool
) -> None:
    network.names.update({"run.example": [own], "store.example": [there]})
    served.script = [redirect(f"http://{'store.example' if named else there}:9000/x"), fine]
    if may:
        assert joined.fetch("/v1/snapshots/1") == BLOB
        assert network.reached == [own, there]
    else:
        with pytest.raises(ForbiddenPlace, match="nothing was sent there") as refused:
            joined.fetch("/v1/snapshots/1")
        assert network.reached == [own]
        assert there in str(refused.value)
        assert "join by the coordinator's address in that network" in str(refused.value)
        assert refused.value.exit_code == UserError.exit_code


@pytest.mark.parametrize("in_parts", [False, True])
def test_an_upload_goes_no_nearer_than_the_coordinator(
    served: Served, network: Network, joined: CoordinatorClient, in_parts: bool
) -> None:
    served.script = [fine]
    joined.fetch("/v1/run")
    store = "http://192.168.1.1/admin?reboot=1"
    parts = [store] if in_parts else []
    upload = {"url": store, "presigned": True, "expires_seconds": 60.0, "parts": parts, "part_bytes": 10}
    answer = CommitAnswer.model_construct(upload=Upload.model_validate(upload))
    with pytest.raises(ForbiddenPlace, match="192.168.1.1:80 is a private address"):
        joined.reveal("ab", b"payload", answer)
    assert network.reached == [PUBLIC]


def test_a_mirror_is_no_nearer_than_the_coordinator(
    served: Served, network: Network, joined: CoordinatorClient, tmp_path: Path
) -> None:
    served.script = [fine]
    joined.fetch("/v1/run")
    network.names["mirror.example"] = [LOOPBACK]
    with pytest.raises(ForbiddenPlace, match=r"mirror\.example:80 leads to 127\.0\.0\.1, a loopback address"):
        joined.download_from_mirror("http://mirror.example/x", tmp_path / "x", len(BLOB))
    assert network.reached == [PUBLIC]


def test_of_several_addresses_of_a_name_only_those_far_enough_are_tried(
    served: Served, network: Network, joined: CoordinatorClient
) -> None:
    network.names["store.example"] = [LOOPBACK, "1.1.1.1", "9.9.9.9"]
    network.down.add("1.1.1.1")
    served.script = [redirect("http://store.example/x"), fine]
    assert joined.fetch("/v1/snapshots/1") == BLOB
    assert network.reached == [PUBLIC, "9.9.9.9"]


def test_a_coordinators_name_that_moves_to_this_machine_is_refused(
    served: Served, network: Network, joined: CoordinatorClient
) -> None:
    served.script = [fine]
    joined.fetch("/v1/run")
    joined.reconnect()  # as after a suspension
    network.names["run.example"] = [LOOPBACK]
    with pytest.raises(MovedNearer, match="led to a public address before; start again"):
        joined.fetch("/v1/run")
    assert network.reached == [PUBLIC]


def test_a_name_that_led_nearer_first_opens_nothing_later(
    served: Served, network: Network, joined: CoordinatorClient
) -> None:
    for address in (LOOPBACK, PUBLIC):
        network.names["run.example"] = [address]
        served.script = [fine]
        joined.fetch("/v1/run")
        joined.reconnect()
    served.script = [redirect("http://127.0.0.1:22/x")]
    with pytest.raises(ForbiddenPlace, match="is itself at a public address"):
        joined.fetch("/v1/snapshots/1")
    assert network.reached == [LOOPBACK, PUBLIC, PUBLIC]


@pytest.mark.parametrize("to", ["ftp://store.example/x", "file:///etc/passwd"])
def test_an_address_that_is_no_http_is_explained_and_not_tried_for_ever(served: Served, to: str) -> None:
    served.script = [redirect(to)]
    with pytest.raises(WireError, match="an address that it cannot use"):
        served.client.fetch("/v1/snapshots/1")


def test_a_ring_of_redirects_is_explained(served: Served) -> None:
    served.script = [redirect("/v1/snapshots/1")] * 30
    with pytest.raises(WireError, match="an address that it cannot use"):
        served.client.fetch("/v1/snapshots/1")


def test_a_name_without_an_address_is_asked_again_like_any_silence(served: Served) -> None:
    stranger = CoordinatorClient(
        "http://nobody.invalid", Identity.generate(), Traffic(), threading.Event(), served.lines.append, 2
    )
    with stranger, pytest.raises(WireError, match="did not answer"):
        stranger.run()
