"""Where a coordinator may send this machine: no nearer than the place where the coordinator itself is.

A coordinator names other places: object storage for uploads and downloads, mirrors of the text, redirects.
One on the public network must not make a volunteer's machine talk to its router, to its own ports, or to the
metadata of its cloud. Every connection is checked here, whatever named its address.

Covered: addresses in digits, names, redirects, IPv4 inside IPv6, a name that has one address when it is
checked and another when it is used (the address that was checked is connected to), a coordinator's own name
that moves nearer. Not covered: a person who types the address of something that is no coordinator;
neighbours that have public addresses; something near that redirects to a public coordinator of another name,
which then may send us as near; and a NAT64 of a network's own that keeps the address in other bits than the
last.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import threading
from collections.abc import Callable
from enum import IntEnum
from typing import TypeVar

import httpcore2

from blocktrain.errors import UserError, WireError

Connection = TypeVar("Connection")

PRIVATE_NETWORKS = [
    ipaddress.ip_network(network)
    # 100.64.0.0/10 is what providers and private networks over the Internet (Tailscale) hand out.
    for network in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "fc00::/7")
]
METADATA_NETWORKS = [
    ipaddress.ip_network(network)
    # Oracle (and what else IETF keeps there), Azure, Alibaba, Amazon, Google: beside 169.254.169.254.
    for network in (
        "192.0.0.0/24", "168.63.129.16/32", "100.100.100.200/32", "fd00:ec2::254/128", "fd20:ce::254/128"
    )
]  # fmt: skip
NAT64_NETWORKS = [ipaddress.ip_network("64:ff9b::/96"), ipaddress.ip_network("64:ff9b:1::/48")]
ALLOWED_PLACES = "BLOCKTRAIN_ALLOW_PLACES"
"""The variable that names places, HOST or HOST:PORT, which may be nearer than the coordinator."""


class Nearness(IntEnum):
    """How near an address is; a coordinator may send us to its own nearness and to what is farther off."""

    PUBLIC = 0
    PRIVATE = 1
    SPECIAL = 2
    """Link-local, where clouds keep a machine's credentials, and whatever else is not global."""
    LOOPBACK = 3

    @property
    def named(self) -> str:
        return {0: "a public", 1: "a private", 2: "a link-local or reserved", 3: "a loopback"}[
            self
        ] + " address"


def nearness_of(text: str) -> Nearness:
    address = ipaddress.ip_address(text)
    found = _nearness(address)
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped
        if inner is not None:
            return _nearness(inner)
        if any(address in network for network in NAT64_NETWORKS):
            return _nearness(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        if address.sixtofour is not None:
            # A gateway may unwrap it, so the nearer one counts.
            found = max(found, _nearness(address.sixtofour))
    return found


def _nearness(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> Nearness:
    # The unspecified address (0.0.0.0) leads to this machine; so may the rest of 0.0.0.0/8.
    zero = isinstance(address, ipaddress.IPv4Address) and int(address) >> 24 == 0
    if address.is_loopback or address.is_unspecified or zero:
        return Nearness.LOOPBACK
    if any(address in network for network in METADATA_NETWORKS):
        return Nearness.SPECIAL
    if any(address in network for network in PRIVATE_NETWORKS):
        return Nearness.PRIVATE
    site_local = isinstance(address, ipaddress.IPv6Address) and address.is_site_local
    special = address.is_link_local or address.is_multicast or address.is_reserved or site_local
    return Nearness.SPECIAL if special or not address.is_global else Nearness.PUBLIC


class ForbiddenPlace(WireError):
    """A place, given in digits, that this run's coordinator may not send us to: nothing was sent there."""

    exit_code = UserError.exit_code
    """The same command meets it again, so systemd does not repeat it."""


class LeadsNearer(httpcore2.ConnectError):
    """A name that leads to such a place: silence, as of a name that leads nowhere.

    A network that asks for a password first, or a router without its line, answers every name with an address
    of its own for a while.
    """


class AllowedPlaces:
    """Which addresses may be connected to. The coordinator's own, which a person typed, sets the bound."""

    def __init__(self) -> None:
        self._own: str | None = None
        """The host that is asked first is the coordinator: nothing else can have been named before it
        answers. Any port of it: http may redirect to https."""
        self._bound = Nearness.LOOPBACK
        self._lock = threading.Lock()
        self._allowed = set(os.environ.get(ALLOWED_PLACES, "").lower().replace(",", " ").split())

    def connected(self, host: str, port: int, connect: Callable[[str], Connection]) -> Connection:
        """What `connect` makes of the first address of the host that may be reached and can be."""
        with self._lock:
            self._own = self._own or host
            is_own = self._own == host
        there = f"{in_brackets(host)}:{port}"
        anywhere = not self._allowed.isdisjoint((host, in_brackets(host), there))
        allowed, forbidden = list[str](), list[str]()
        for address in addresses_of(host, port):
            may = anywhere or nearness_of(address) <= self._bound
            (allowed if may else forbidden).append(address)
        failure: Exception | None = None
        for address in allowed:
            try:
                connection = connect(address)
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout) as error:
                failure = error
                continue
            if is_own:
                with self._lock:
                    # Only ever farther off: a name could lead to this machine first and to its owner later.
                    self._bound = min(self._bound, nearness_of(address))
            return connection
        if failure is None and forbidden:
            raise self._refusal(host, there, forbidden[0], is_own)
        raise failure or httpcore2.ConnectError(f"{host} has no address")

    def _refusal(self, host: str, there: str, address: str, is_own: bool) -> Exception:
        near, bound = nearness_of(address).named, self._bound.named
        if is_own:
            return LeadsNearer(
                f"the coordinator's own name {there} leads to {in_brackets(address)}, {near}, and led to "
                f"{bound} before; nothing was sent there. If this machine is in the coordinator's network "
                "now, start again"
            )
        digits = in_digits(host)
        leads = "is" if digits else f"leads to {in_brackets(address)},"
        sentence = (
            f"the coordinator sends this machine to {there}, which {leads} {near}, and is itself at {bound}; "
            "nothing was sent there. If that is the run's storage in a network of yours, join by the "
            f"coordinator's address in that network or set {ALLOWED_PLACES}={there}; otherwise ask the run's "
            "host for storage with an address as public as the coordinator's"
        )
        return ForbiddenPlace(sentence) if digits else LeadsNearer(sentence)


def in_digits(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def in_brackets(host: str) -> str:
    """As it stands in front of a port."""
    return f"[{host}]" if ":" in host else host


def addresses_of(host: str, port: int) -> list[str]:
    """In digits, in the order in which they should be tried."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError, OverflowError) as error:  # the last one: of a port beyond all numbers
        raise httpcore2.ConnectError(str(error)) from error
    addresses = dict[str, None]()
    for *_, place in found:
        # A link-local address needs its interface, which Python keeps beside it.
        scope = f"%{place[3]}" if len(place) == 4 and place[3] else ""
        addresses[f"{place[0]}{scope}"] = None
    return list(addresses)
