"""A coordinator may send a worker no nearer than where it is itself: no router, no loopback, no metadata."""

from __future__ import annotations

import ipaddress
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpcore2
import pytest

from blocktrain.client import coordinator as client_module
from blocktrain.client.coordinator import CoordinatorClient
from blocktrain.client.places import ALLOWED_PLACES, ForbiddenPlace, Nearness, nearness_of
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
            ipaddress.ip_address(host)
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
    to = redirect(f"http://{'store.example' if named else there}:9000/x")
    served.script = [to, fine if may else to]
    if may:
        assert joined.fetch("/v1/snapshots/1") == BLOB
        assert network.reached == [own, there]
        return
    with pytest.raises(WireError, match="nothing was sent there") as refused:
        joined.fetch("/v1/snapshots/1")
    # Digits stay what they are; a name may lead elsewhere tomorrow.
    assert isinstance(refused.value, ForbiddenPlace) is not named
    assert refused.value.exit_code == (WireError if named else UserError).exit_code
    assert set(network.reached) == {own}
    place = f"store.example:9000, which leads to {there}," if named else f"{there}:9000, which is"
    assert f"the coordinator sends this machine to {place}" in str(refused.value)
    assert "join by the coordinator's address in that network" in str(refused.value)
    assert f"set {ALLOWED_PLACES}={place.partition(',')[0]};" in str(refused.value)


def test_a_name_that_leads_nearer_for_a_moment_ends_no_worker(
    served: Served, network: Network, joined: CoordinatorClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a network that answers every name with its own page until somebody logs in."""
    joined.attempts = None
    moments: list[list[str]] = [[], [PRIVATE], [PRIVATE], ["1.1.1.1"]]

    def next_moment(attempt: int, chance: float) -> float:
        network.names["store.example"] = moments[min(attempt + 1, 3)]
        return 0.0

    monkeypatch.setattr(client_module, "backoff_seconds", next_moment)
    for _ in range(2):
        network.names["store.example"] = moments[0]
        served.script = [redirect("http://store.example/x")] * 4 + [fine]
        assert joined.fetch("/v1/snapshots/1") == BLOB
        joined.reconnect()
    assert set(network.reached) == {PUBLIC, "1.1.1.1"}
    said = [line for line in served.lines if "trying again" in line]
    assert ["has no address" in line for line in said] == [True, False] * 2
    assert all("store.example:80, which leads to 192.168.1.1" in line for line in said[1::2])


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
    with pytest.raises(ForbiddenPlace, match=r"192\.168\.1\.1:80, which is a private address"):
        joined.reveal("ab", b"payload", answer)
    assert network.reached == [PUBLIC]


def test_a_mirror_is_no_nearer_than_the_coordinator(
    served: Served, network: Network, joined: CoordinatorClient, tmp_path: Path
) -> None:
    served.script = [fine]
    joined.fetch("/v1/run")
    network.names["mirror.example"] = [LOOPBACK]
    with pytest.raises(
        WireError,
        match=r"did not answer: .* mirror\.example:80, which leads to 127\.0\.0\.1, a loopback address",
    ):
        joined.download_from_mirror("http://mirror.example/x", tmp_path / "x", len(BLOB))
    with pytest.raises(ForbiddenPlace, match=r"127\.0\.0\.1:80, which is a loopback address"):
        joined.download_from_mirror("http://127.0.0.1/x", tmp_path / "x", len(BLOB))
    assert network.reached == [PUBLIC]


@pytest.mark.parametrize(
    ("host", "address", "told"),
    [
        ("[fd00::1]", "fd00::1", r"to \[fd00::1\]:9000, which is a private address"),
        (
            "store.example",
            "fd00::1",
            r"to store\.example:9000, which leads to \[fd00::1\], a private address",
        ),
    ],
)
def test_an_address_of_ipv6_is_told_in_brackets(
    served: Served, network: Network, joined: CoordinatorClient, host: str, address: str, told: str
) -> None:
    network.names["store.example"] = [address]
    served.script = [redirect(f"http://{host}:9000/x")] * 2
    with pytest.raises(WireError, match=told):
        joined.fetch("/v1/snapshots/1")


@pytest.mark.parametrize(
    ("allowed", "there", "may"),
    [
        ("store.example", "store.example:9000", True),
        ("other.example, Store.example:9000", "store.example:9000", True),
        ("store.example:9001", "store.example:9000", False),
        ("example", "store.example:9000", False),
        ("192.168.1.1:9000", "192.168.1.1:9000", True),
        ("192.168.1.1:9000", "store.example:9000", False),
        ("fd00::1", "[fd00::1]:9000", True),
        ("[fd00::1]:9000", "[fd00::1]:9000", True),
    ],
)
def test_a_person_may_allow_a_place_that_is_nearer(
    served: Served, network: Network, monkeypatch: pytest.MonkeyPatch, allowed: str, there: str, may: bool
) -> None:
    network.names.update({"run.example": [PUBLIC], "store.example": [PRIVATE]})
    monkeypatch.setenv(ALLOWED_PLACES, allowed)
    served.script = [redirect(f"http://{there}/x"), fine if may else redirect(f"http://{there}/x")]
    with CoordinatorClient(
        "http://run.example", Identity.generate(), Traffic(), served.stop, served.lines.append, 2
    ) as client:
        if may:
            assert client.fetch("/v1/snapshots/1") == BLOB
        else:
            with pytest.raises(WireError, match="nothing was sent there"):
                client.fetch("/v1/snapshots/1")


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
    with pytest.raises(WireError, match=r"led to a public address before; .* now, start again") as silence:
        joined.fetch("/v1/run")
    assert silence.value.exit_code == WireError.exit_code
    assert "the coordinator's own name run.example:80 leads to 127.0.0.1" in served.lines[0]
    assert network.reached == [PUBLIC]
    network.names["run.example"] = [PUBLIC]
    served.script = [fine]
    assert joined.fetch("/v1/run") == BLOB


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


def test_a_redirect_to_another_port_of_the_coordinator_sets_the_bound_too(
    served: Served, network: Network, joined: CoordinatorClient
) -> None:
    """Something on this machine answers http for the name, and sends to https, where it is public."""

    def moved(handler: Handler) -> None:
        network.names["run.example"] = [PUBLIC]
        handler.answer(307, b"", Location="http://run.example:8443/x")

    network.names["run.example"] = [LOOPBACK]
    served.script = [moved, fine, redirect("http://127.0.0.1:22/x")]
    joined.fetch("/v1/run")
    with pytest.raises(ForbiddenPlace, match="is itself at a public address"):
        joined.fetch("/v1/snapshots/1")
    assert network.reached == [LOOPBACK, PUBLIC]


def test_a_port_beyond_all_numbers_is_silence(served: Served) -> None:
    served.client.attempts = 2
    served.script = [redirect("http://127.0.0.1:99999999999999999999/x")] * 2
    with pytest.raises(WireError, match="did not answer"):
        served.client.fetch("/v1/snapshots/1")


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
