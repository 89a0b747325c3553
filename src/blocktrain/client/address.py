"""An address that a person typed or was sent, checked before anything is sent to it."""

from __future__ import annotations

import re
from dataclasses import dataclass
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
        raise UserError(f"{url!r} is not the address of {program}; expected http(s)://HOST[:PORT]")
    return url.rstrip("/")


def port_of(parts: SplitResult) -> int:
    return parts.port or (443 if parts.scheme == "https" else 80)


@dataclass(frozen=True)
class RunLink:
    """All that a volunteer needs to join a run: `URL#invite=TOKEN,pin=SHA256`, or a plain address.

    What stands behind `#` is never sent to a server, and nothing in it means anything to a shell.
    """

    url: str
    invite: str | None = None
    pin: str | None = None
    """SHA-256 of the coordinator's certificate in hex: it is believed, and no other one is."""

    @classmethod
    def parse(cls, text: str) -> RunLink:
        place, _, rest = text.strip().partition("#")
        url, found = checked_url(place), dict[str, str]()
        for part in rest.split(",") if rest else ():
            name, _, value = part.partition("=")
            if name not in ("invite", "pin") or not value or name in found:
                raise UserError(
                    f"the part of the link after # is damaged: {part[:40]!r}; copy the whole line again"
                )
            found[name] = value
        link = cls(url, found.get("invite"), found.get("pin"))
        if link.pin is not None and not re.fullmatch(r"[0-9a-f]{64}", link.pin):
            raise UserError("the link's pin is not 64 hex digits; copy the whole line again")
        if link.pin is not None and not url.startswith("https://"):
            raise UserError(f"the link pins a certificate, and {url} has none; expected https://")
        return link

    def __str__(self) -> str:
        parts = [f"{name}={value}" for name, value in (("invite", self.invite), ("pin", self.pin)) if value]
        return f"{self.url}#{','.join(parts)}" if parts else self.url
