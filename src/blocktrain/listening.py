"""The address a server listens on: taken before anything slow is loaded, and shown as one can open it."""

from __future__ import annotations

import ipaddress
import socket
import struct
import sys
from contextlib import suppress

from blocktrain.errors import UserError

SIOCGIFADDR = 0x8915
"""Linux: the address of a named interface."""


def open_port(host: str, port: int) -> socket.socket:
    """A bound socket; port 0 takes a free one."""
    opened = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    # A server that was killed leaves its port in TIME_WAIT for a minute; a restart should not have to wait.
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        opened.bind((host, port))
    except OSError as error:
        opened.close()
        raise UserError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --port") from None
    return opened


def lan_address() -> str | None:
    """This machine's address for others on its network; None where it is on none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Nothing is sent: the kernel only chooses the route, and with it the address that others see.
            probe.connect(("192.0.2.1", 9))
        except OSError:  # no way out of its own network, which is enough for friends on it
            return next(iter(interface_addresses()), None)
        return str(probe.getsockname()[0])


def interface_addresses() -> list[str]:
    """IPv4 addresses of this machine but loopback, where the system is Linux; elsewhere none are found."""
    if sys.platform != "linux":
        return []
    import fcntl

    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(asked, SIOCGIFADDR, struct.pack("256s", name.encode()))
                found.append(socket.inet_ntoa(answer[20:24]))
    return [address for address in found if not ipaddress.ip_address(address).is_loopback]


def url_for_others(opened: socket.socket, scheme: str = "http") -> str:
    """Where other machines reach it, as far as this one can tell."""
    host, port = opened.getsockname()[:2]
    address = lan_address() if host in ("0.0.0.0", "::") else None
    return url_of(opened, scheme) if address is None else f"{scheme}://{address}:{port}"


def url_of(opened: socket.socket, scheme: str = "http") -> str:
    """Where a client on this machine reaches it; 0.0.0.0 and :: mean every address and cannot be opened."""
    host, port = opened.getsockname()[:2]
    shown = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    return f"{scheme}://[{shown}]:{port}" if ":" in shown else f"{scheme}://{shown}:{port}"


def network_name(address: str) -> str:
    """What counts as one place: an IPv4 address or an IPv6 /64."""
    try:
        found = ipaddress.ip_address(address.split("%")[0])
    except ValueError:
        return address
    # ::ffff:1.2.3.4 is that IPv4 address, seen through a socket that takes both. Of IPv6 one home or host has
    # a whole /64 for itself, so counting single addresses would count nothing.
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    plain = mapped or found
    return str(plain if plain.version == 4 else ipaddress.ip_network((plain, 64), strict=False))
