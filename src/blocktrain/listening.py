"""The address a server listens on: taken before anything slow is loaded, and shown as one can open it."""

from __future__ import annotations

import socket

from blocktrain.errors import UserError


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


def url_of(opened: socket.socket, scheme: str = "http") -> str:
    """Where a client on this machine reaches it; 0.0.0.0 and :: mean every address and cannot be opened."""
    host, port = opened.getsockname()[:2]
    shown = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    return f"{scheme}://[{shown}]:{port}" if ":" in shown else f"{scheme}://{shown}:{port}"
