"""What an operator shows beside a run and no decision depends on: a reference, the address of a gateway."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

from blocktrain.errors import UserError
from blocktrain.wire.messages import ReferenceState

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

    def references(self) -> tuple[ReferenceState, ...]:
        return tuple(one for one in (self.end_to_end, self.bigram) if one is not None)

    @property
    def gateway_origin(self) -> str | None:
        found = GATEWAY_ADDRESS.fullmatch(self.gateway or "")
        return found["origin"] if found else None


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
