"""The demo's attacker: a stranger who joins like anybody and sends the opposite of honest work.

It takes an update that was merged, which anyone may read, reverses its sign and hands it in under its own
key, so its size and shape look honest, and applied it would undo training. It speaks the
public protocol only; whatever becomes of it is the coordinator's doing.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field

from blocktrain.client.coordinator import RequestRefused, public_client
from blocktrain.client.run import Layout
from blocktrain.errors import WireError
from blocktrain.threads import Stopped
from blocktrain.training.update import decoded_delta
from blocktrain.wire.codec import encode
from blocktrain.wire.hashing import content_hash
from blocktrain.wire.identity import Identity
from blocktrain.wire.messages import (
    Assignment,
    AssignmentRequest,
    CommitRequest,
    Finished,
    JoinRequest,
    Outcome,
    RunAnswer,
)

LABEL = "attacker"
PAUSE_SECONDS = 0.3
ATTEMPTS = 5


@dataclass
class Fate:
    """What became of the attacker."""

    worker_id: str
    sent: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    """Verdicts: `refused: harmful`, `accepted: on_time` and so on."""
    shut_out: str = ""
    """The coordinator's sentence when it would no longer have anything of it."""

    def sentence(self) -> str:
        if not self.sent:
            return f"joined and was not let near a block{': ' + self.shut_out if self.shut_out else ''}"
        told = ", ".join(f"{count} {outcome}" for outcome, count in self.outcomes.most_common())
        ending = f"; then shut out: {self.shut_out}" if self.shut_out else ""
        return f"sent {self.sent} reversed update{'s' if self.sent > 1 else ''}: {told}{ending}"


class Attacker:
    """Runs in a thread of its own until the run is over, it is shut out, or told to stop."""

    def __init__(self, url: str) -> None:
        self.stop = threading.Event()
        identity = Identity.generate()
        self.client = public_client(url, identity, stop=self.stop, attempts=ATTEMPTS)
        self.fate = Fate(identity.worker_id)
        self.started = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self.started = True
        self._thread.start()

    def end(self) -> Fate:
        self.stop.set()
        if self.started:
            self._thread.join(timeout=30)
        self.client.close()
        return self.fate

    def _run(self) -> None:
        try:
            run = self.client.run()
            self.client.audience = run.run_id
            self.client.join(JoinRequest(corpus_sha256=run.corpus_sha256, label=LABEL))
            while not self.stop.is_set() and self._takes_part(run):
                pass
        except RequestRefused as refusal:
            self.fate.shut_out = str(refusal)
        except (Stopped, WireError) as error:
            self.fate.shut_out = self.fate.shut_out or ("" if self.stop.is_set() else str(error))

    def _takes_part(self, run: RunAnswer) -> bool:
        """One assignment; False when there are no more."""
        answer = self.client.ask(AssignmentRequest())
        if isinstance(answer, Finished):
            return False
        if not isinstance(answer, Assignment):
            self.stop.wait(answer.seconds)
            return True
        payload = self._reversed(Layout.of(run.blocks[answer.block]))
        head = self.client.block(answer.block)
        if payload is not None and head.head_version >= answer.round:
            self._hand_in(answer, payload, head.head_hash)
            return True
        if payload is None:
            self.client.hand_back(answer.assignment_id)
        self.stop.wait(PAUSE_SECONDS)
        return True

    def _reversed(self, layout: Layout) -> bytes | None:
        """The newest merged update of a block with its sign turned; None before there is one."""
        head = self.client.block(layout.block).head_version
        merges = self.client.merges(layout.block, max(0, head - 1)).merges
        if not merges or layout.codec.sends_weights:
            return None
        honest = self.client.payload(merges[-1].inputs[0].payload_hash, layout.payload_bytes)
        # With its sign turned a real update has the norm and the shape of honest work, so only the loss can
        # tell.
        delta = decoded_delta(layout.codec, layout.schema, honest, {})
        return encode(layout.codec, layout.schema, {name: -value for name, value in delta.items()})

    def _hand_in(self, assignment: Assignment, payload: bytes, base_hash: str) -> None:
        digest = content_hash(payload)
        request = CommitRequest(payload_hash=digest, payload_bytes=len(payload), base_hash=base_hash)
        try:
            _, verdict = self.client.commit_and_reveal(assignment.assignment_id, request, payload)
        except RequestRefused as refusal:
            # Banned: that is the end of it, and everything else is one update that was not taken.
            if refusal.status == 403:
                raise
            self.fate.outcomes[f"not taken ({refusal.reason})"] += 1
            self.fate.sent += 1
            self.stop.wait(PAUSE_SECONDS)
            return
        self.fate.sent += 1
        while verdict.outcome is Outcome.PENDING and not self.stop.wait(PAUSE_SECONDS):
            verdict = self.client.verdict(digest)
        self.fate.outcomes[f"{verdict.outcome.value} ({verdict.reason.value})"] += 1
