"""What an operator shows beside a run, and is told of it; no decision depends on any of it."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from blocktrain.errors import UserError
from blocktrain.wire.messages import ReferenceState, SpokenPiece, StatusAnswer
from blocktrain.wording import counted

KEY_FILE = "coordinator.key"
"""In the data folder: who holds it is the operator."""

GATEWAY_ADDRESS = re.compile(
    r"(?P<origin>https?://(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+)(?::[0-9]{1,5})?)(?:/[A-Za-z0-9._~/-]*)?"
)
"""Only what may stand in a Content-Security-Policy as it is."""


@dataclass
class Display:
    gateway: str | None = None
    end_to_end: ReferenceState | None = None
    bigram: ReferenceState | None = None
    """Set once by the thread that scores the model."""
    speaking: tuple[SpokenPiece, ...] = ()
    """Set with each score by the same thread, where blocks are specialised."""
    pin: str | None = None
    """SHA-256 of a certificate that signed itself: a link to this run must carry it."""

    def references(self) -> tuple[ReferenceState, ...]:
        return tuple(one for one in (self.end_to_end, self.bigram) if one is not None)

    @property
    def gateway_origin(self) -> str | None:
        found = GATEWAY_ADDRESS.fullmatch(self.gateway or "")
        return found["origin"] if found else None


ADDRESS_FILE = "address.json"
"""In the data folder: where the coordinator was reached last, for `blocktrain invite`."""


OTHERS_CANNOT = "can be reached from this machine only: start it with --host 0.0.0.0, or behind a proxy"


def only_from_here(link: str) -> bool:
    host = urlsplit(link).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")


def opening_lines(status: StatusAnswer, admission: str, data_dir: Path, link: str) -> list[str]:
    """What a host wants to know when a coordinator starts: which run this is, who may join, and how."""
    slowest = min(block.head_version for block in status.blocks)
    if status.finished:
        state = f"finished after {counted(status.rounds, 'round')}"
    elif any(block.head_version for block in status.blocks):
        state = f"goes on at round {slowest}/{status.rounds}"
    else:
        state = f"new, {counted(status.rounds, 'round')}"
    who, line = {
        "open": ("anybody may join", f"blocktrain join {link}"),
        "invite": ("by invitation", f"blocktrain invite --data-dir {data_dir} (prints the line to send)"),
        "allowlist": ("only ids in allowlist.txt", f"blocktrain join {link}"),
    }[admission]
    return [
        f"run      {status.name} {status.run_id[:12]}: {state}; {who}; data in {data_dir}",
        f"page     {link.partition('#')[0]}/",
        f"friends  {line}",
        *([f"         ({link.partition('#')[0]} {OTHERS_CANNOT})"] if only_from_here(link) else []),
        f"model    blocktrain checkpoint {data_dir} --to model",
    ]


def keep_address(data_dir: Path, url: str, pin: str | None) -> None:
    (data_dir / ADDRESS_FILE).write_text(json.dumps({"url": url, "pin": pin}), encoding="utf-8")


def kept_address(data_dir: Path) -> tuple[str, str | None]:
    """Address and pin of the coordinator that used this data folder last."""
    try:
        found = json.loads((data_dir / ADDRESS_FILE).read_text(encoding="utf-8"))
        return str(found["url"]), None if found["pin"] is None else str(found["pin"])
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(
            f"{data_dir} does not say where its coordinator is: start it once, or name it with --address "
            "http(s)://HOST[:PORT]"
        ) from None


def make_display(gateway: str | None, reference: str | None, corpus_sha256: str) -> Display:
    if gateway is not None and GATEWAY_ADDRESS.fullmatch(gateway) is None:
        raise UserError(f"--gateway {gateway!r}: expected an address such as http://127.0.0.1:8000")
    return Display(
        gateway=None if gateway is None else gateway.rstrip("/"),
        end_to_end=None if reference is None else end_to_end_reference(reference, corpus_sha256),
    )


def end_to_end_reference(reference: str, corpus_sha256: str) -> ReferenceState:
    """A cross entropy, or the report.json of a `blocktrain train` on the run's text."""
    try:
        ce, source = float(reference), "given by the operator"
    except ValueError:
        path = Path(reference).expanduser()
        try:
            report = json.loads(path.read_text(encoding="utf-8"))
            text, ce = report["corpus_sha256"], float(report["reference"]["ce"])
            scored, trained = int(report["scored_tokens"]), int(report["tokens"]["reference"])
        except OSError as error:
            raise UserError(
                f"--reference {path}: {error.strerror}; expected a number or a report.json"
            ) from None
        except (ValueError, KeyError, TypeError):
            raise UserError(
                f"--reference {path}: expected the report.json of a `blocktrain train` with its reference"
            ) from None
        # Cross entropies of different texts cannot be compared, and the dashboard would draw them as one.
        if text != corpus_sha256:
            raise UserError(
                f"--reference {path} is about text {text[:12]}…, this run trains on {corpus_sha256[:12]}…"
            ) from None
        source = f"{path.name}: {scored} held-out tokens, after {trained} training tokens"
    if not math.isfinite(ce) or ce <= 0:
        raise UserError(f"--reference {reference}: expected a cross entropy above 0, found {ce}")
    return ReferenceState(name="end to end", ce=ce, source=source)
