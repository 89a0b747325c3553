"""An address that a person typed, checked before anything is sent to it."""

from __future__ import annotations

from urllib.parse import SplitResult, urlsplit

from blocktrain.errors import UserError


def checked_url(url: str, program: str = "a coordinator") -> str:
    """Without its last slash."""
    try:
        # urlsplit raises for a port that is no number and for a broken IPv6 address, but not for most other
        # nonsense.
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise UserError(f"{url!r} is no address of {program}; expected http(s)://HOST[:PORT]")
    return url.rstrip("/")


def port_of(parts: SplitResult) -> int:
    return parts.port or (443 if parts.scheme == "https" else 80)
