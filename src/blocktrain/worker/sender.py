"""The sender: forms updates from finished rounds and delivers them, one after the other.

Runs beside training. The payload, and the error feedback it leaves, are on disk before the coordinator
hears of them, so that a killed worker can deliver them again or take them back, and never counts the
same progress twice. What came too late returns to error feedback; what was found wanting is forgotten.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from blocktrain.client.coordinator import CoordinatorClient, Refusal
from blocktrain.client.run import Layout
from blocktrain.client.snapshots import Base, Snapshots
from blocktrain.threads import Stopped
from blocktrain.training.update import Weights, decoded_delta, encode_update
from blocktrain.wire.hashing import content_hash
from blocktrain.wire.messages import Account, CommitRequest, Outcome, Receipt, Verdict
from blocktrain.worker.decisions import Sent, is_forgotten, share_to_return, verdict_wait_seconds
from blocktrain.worker.progress import Progress
from blocktrain.worker.standing import Flight, Standing
from blocktrain.worker.state import StateFolder, Unsettled

TICK_SECONDS = 0.2


@dataclass(frozen=True)
class Parcel:
    """A formed update, from now on identified by its payload's hash."""

    update: Unsettled
    payload: bytes
    layout: Layout
    round: int


class Sender:
    def __init__(
        self,
        client: CoordinatorClient,
        snapshots: Snapshots,
        state: StateFolder,
        progress: Progress,
        stop: threading.Event,
        beta: float,
        account: Callable[[], Account],
        join: Callable[[], None],
        refused: Callable[[], None],
    ) -> None:
        self.client, self.snapshots, self.state, self.progress = client, snapshots, state, progress
        self.stop, self.beta, self.account, self.join = stop, beta, account, join
        self.refused = refused
        self._queue: queue.Queue[tuple[Standing, Flight]] = queue.Queue()
        self._unsettled: dict[int, list[Unsettled]] = {}
        self._saving = threading.Lock()
        self._idle = threading.Event()
        self._idle.set()

    def send(self, standing: Standing, flight: Flight) -> None:
        self._idle.clear()
        self._queue.put((standing, flight))

    def wait_until_idle(self, seconds: float) -> bool:
        return self._idle.wait(seconds)

    def run(self) -> None:
        while not self.stop.is_set():
            try:
                standing, flight = self._queue.get(timeout=TICK_SECONDS)
            except queue.Empty:
                self._idle.set()
                continue
            self._deliver(standing, flight)
            if self._queue.empty():
                self._idle.set()

    # --- a finished round

    def _deliver(self, standing: Standing, flight: Flight) -> None:
        while not standing.wait_for_version(flight.assignment.round, TICK_SECONDS):
            if self.stop.is_set():
                self._queue.put((standing, flight))
                return
        parcel, base = self._form(standing, flight)
        verdict = self._hand_over(parcel)
        self._account_for(standing, parcel, base, verdict)
        standing.judged(flight, gone=verdict is None or verdict.outcome is Outcome.REFUSED)

    def _form(self, standing: Standing, flight: Flight) -> tuple[Parcel, Base]:
        layout = self.snapshots.layouts[standing.block]
        draft = standing.draft(flight)
        encoded = encode_update(
            layout.codec,
            layout.schema,
            base=draft.base.weights,
            origin=draft.origin.now(),
            local=draft.place.now(),
            feedback=draft.feedback,
            beta=self.beta,
        )
        update = Unsettled(
            assignment_id=flight.assignment.assignment_id,
            payload_hash=content_hash(encoded.payload),
            base_version=draft.base.version,
            base_hash=draft.base.hash,
            loss=flight.loss,
        )
        standing.formed(flight, Sent(update.payload_hash, update.base_version), encoded.feedback)
        self.snapshots.keep_payload(update.payload_hash, encoded.payload)
        self._remember(standing, update)
        return Parcel(update, encoded.payload, layout, flight.assignment.round), draft.base

    def _remember(self, standing: Standing, update: Unsettled) -> None:
        """Feedback and the update that was taken out of it, in one write; settled ones are left out."""
        flying = {flight.sent.payload_hash for flight in standing.flights() if flight.sent is not None}
        before = self._unsettled.get(standing.block, [])
        kept = [one for one in before if one.payload_hash in flying] + [update]
        self._unsettled[standing.block] = kept
        self.keep_feedback(standing)

    # --- an update of a previous process

    def deliver_leftovers(self, block: int) -> None:
        """Before anything else: deliver what a killed process had formed, or take it back."""
        if not self.state.has_unsettled(block):
            return
        feedback, updates = self.state.load_feedback(block)
        leftover = Standing(block, Base(0, "", {}), feedback, max_age=0)
        self._unsettled[block] = list(updates)
        for update in updates:
            payload = self.snapshots.kept_payload(update.payload_hash)
            if payload is None:
                self.progress.line(f"lost payload={update.payload_hash[:12]}: no longer in the cache")
                continue
            parcel = Parcel(update, payload, self.snapshots.layouts[block], update.base_version)
            base = self.snapshots.on_disk(block, update.base_version, update.base_hash)
            self._account_for(leftover, parcel, base, self._hand_over(parcel))
        self._unsettled[block] = []
        self.state.save_feedback(block, leftover.feedback, [])

    # --- both

    def _hand_over(self, parcel: Parcel) -> Verdict | None:
        """Commit, then reveal; None if the coordinator will not have it."""
        update = parcel.update
        request = CommitRequest(
            payload_hash=update.payload_hash,
            payload_bytes=len(parcel.payload),
            base_hash=update.base_hash,
            loss=update.loss,
            account=self.account(),
        )
        while True:
            try:
                answer = self.client.commit(update.assignment_id, request)
                verdict = answer.verdict or self.client.reveal(update.payload_hash, parcel.payload, answer)
                self.keep_receipt(answer.receipt, verdict.receipt)
                return self._settled(update.payload_hash, verdict)
            except Refusal as refusal:
                if refusal.reason == "not_joined":
                    self.join()
                    continue
                self.progress.judged(parcel.layout.block, parcel.round, "refused", 0, str(refusal))
                return None

    def _settled(self, payload_hash: str, verdict: Verdict) -> Verdict | None:
        """The verdict once a judge has given it; the round cannot close before, so nothing is held up."""
        asked = 0
        while verdict.outcome is Outcome.PENDING:
            if self.stop.wait(verdict_wait_seconds(asked)):
                raise Stopped("the worker is stopping")
            verdict = self.client.verdict(payload_hash)
            asked += 1
        if asked:
            self.keep_receipt(verdict.receipt)
        return verdict

    def _account_for(
        self, standing: Standing, parcel: Parcel, base: Base | None, verdict: Verdict | None
    ) -> None:
        share = 1.0
        if verdict is not None:
            age = max(0, verdict.head_version - parcel.update.base_version)
            self.progress.judged(standing.block, parcel.round, verdict.outcome.value, age, verdict.sentence)
            if is_forgotten(verdict.outcome, verdict.reason):
                self.forget(standing, parcel.update.payload_hash)
                return
            share = share_to_return(verdict.outcome, verdict.weight)
        if share > 0:
            self.take_back(standing, parcel.update.payload_hash, parcel.payload, base, share)

    def take_back(
        self, standing: Standing, payload_hash: str, payload: bytes, base: Base | None, share: float
    ) -> None:
        layout = self.snapshots.layouts[standing.block]
        if base is None and layout.codec.sends_weights:
            self.progress.line(f"lost payload={payload_hash[:12]}: its base is no longer in the cache")
            return
        weights: Weights = base.weights if base is not None else {}
        standing.returned(decoded_delta(layout.codec, layout.schema, payload, weights), share)
        self._settle(standing, payload_hash)

    def forget(self, standing: Standing, payload_hash: str) -> None:
        standing.forget()
        self._settle(standing, payload_hash)
        self.refused()

    def _settle(self, standing: Standing, payload_hash: str) -> None:
        kept = [one for one in self._unsettled.get(standing.block, []) if one.payload_hash != payload_hash]
        self._unsettled[standing.block] = kept
        self.keep_feedback(standing)

    def keep_receipt(self, *receipts: Receipt) -> None:
        """Proof of what the coordinator acknowledged, for `blocktrain ledger verify --receipts`."""
        for receipt in receipts:
            self.state.save_receipt(receipt)

    def abandon(self) -> list[str]:
        """At the end: updates that were never formed go to error feedback; returns their assignments."""
        abandoned = []
        with contextlib.suppress(queue.Empty):
            while True:
                standing, flight = self._queue.get_nowait()
                standing.drop(flight)
                self.keep_feedback(standing)
                abandoned.append(flight.assignment.assignment_id)
        return abandoned

    def keep_feedback(self, standing: Standing) -> None:
        """Write what error feedback and updates on their way are now; the trainer does so too."""
        with self._saving:
            unsettled = self._unsettled.get(standing.block, [])
            self.state.save_feedback(standing.block, standing.feedback, unsettled)
