"""The sending thread: forms updates from finished rounds and delivers them, one after the other.

Runs beside training. The payload, and the error feedback it leaves, are on disk before the coordinator hears
of them, so that a killed worker can deliver them again or take them back, and never counts the same progress
twice.
"""

from __future__ import annotations

from blocktrain.client.coordinator import CoordinatorClient, RequestRefused
from blocktrain.client.snapshots import Base, Snapshots
from blocktrain.threads import Stopped
from blocktrain.wire.messages import CommitRequest, ErrorReason, Outcome, Verdict, verdict_word
from blocktrain.worker.block_progress import BlockProgress, PendingUpdate, is_discarded
from blocktrain.worker.joining import Membership
from blocktrain.worker.live_view import PlainView
from blocktrain.worker.logic import TICK_SECONDS, WorkerLogic
from blocktrain.worker.state import StateFolder

FIRST_VERDICT_SECONDS = 0.05
LONGEST_VERDICT_SECONDS = 2.0


def verdict_wait_seconds(asked: int) -> float:
    """How long until a verdict is asked for again: soon at first, then less and less often."""
    return min(LONGEST_VERDICT_SECONDS, FIRST_VERDICT_SECONDS * 1.5 ** min(asked, 20))


class Sending:
    def __init__(
        self,
        logic: WorkerLogic,
        client: CoordinatorClient,
        membership: Membership,
        snapshots: Snapshots,
        state: StateFolder,
        view: PlainView,
    ) -> None:
        self.logic, self.client, self.membership = logic, client, membership
        self.snapshots, self.state, self.view = snapshots, state, view

    def run(self) -> None:
        while not self.logic.stop.is_set():
            if not self.logic.wait(self.logic.can_send, TICK_SECONDS):
                continue
            update = self.logic.next_to_send()
            assert update is not None
            progress = self.logic.blocks[update.block]
            progress.form(update)
            # Payload first: a note on disk without its payload could not be delivered after a kill.
            self.snapshots.keep_payload(update.payload_hash, update.payload)
            self.state.save_progress(progress)
            self._deliver(progress, update)
            self.logic.delivered(update)

    def deliver_leftovers(self, block: int) -> None:
        """Before anything else: deliver what a killed process had formed, or take it back."""
        feedback, updates = self.state.load_feedback(block)
        if not updates:
            return
        # A progress without weights: only its error feedback matters, nothing is being trained yet.
        progress = BlockProgress(
            self.snapshots.layouts[block], Base(0, "", {}), feedback, self.logic.swarm, pending=updates
        )
        for update in updates:
            payload = self.snapshots.kept_payload(update.payload_hash)
            if payload is None:
                self.view.line(f"gave up payload={update.payload_hash[:12]}: it is no longer in the cache")
                continue
            assert update.base is not None
            base = self.snapshots.on_disk(block, update.base.version, update.base.hash)
            if base is None and progress.layout.codec.sends_weights:
                # It can still be sent. Only if it is refused is its work lost: weights without their base
                # give no delta to put back into error feedback.
                self.view.line(f"sends payload={update.payload_hash[:12]} once: its base is not in the cache")
            update.payload, update.base = payload, base or update.base
            self._deliver(progress, update)
        self.state.save_feedback(block, progress.feedback, [])

    def _deliver(self, progress: BlockProgress, update: PendingUpdate) -> None:
        """Commit, reveal, wait for the verdict, and account for it."""
        assert update.base is not None
        request = CommitRequest(
            payload_hash=update.payload_hash,
            payload_bytes=len(update.payload),
            base_hash=update.base.hash,
            loss=update.loss,
            account=self.client.traffic.account(),
        )
        verdict: Verdict | None = None
        while verdict is None:
            try:
                verdict = self._obtain_verdict(update, request)
            except RequestRefused as refusal:
                if refusal.reason != ErrorReason.NOT_JOINED:
                    self.view.judged(update.block, update.round, "refused", 0, str(refusal), told=update.told)
                    # What was trained returns to error feedback below, so this lease is done with.
                    self.client.let_go(update.assignment_id)
                    break
                self.membership.join()
        progress.judged(update, verdict)
        self.state.save_progress(progress)
        if verdict is not None:
            age = max(0, verdict.head_version - update.base.version)
            word = verdict_word(verdict.outcome, verdict.held_against)
            self.view.judged(update.block, update.round, word, age, verdict.sentence, told=update.told)
            if is_discarded(verdict.outcome, verdict.reason):
                # What was trained ahead builds on the discarded update; the next heartbeat calls it off.
                self.logic.hurry_heartbeats()

    def _obtain_verdict(self, update: PendingUpdate, request: CommitRequest) -> Verdict:
        answer, verdict = self.client.commit_and_reveal(update.assignment_id, request, update.payload)
        self.state.save_receipt(answer.receipt)
        self.state.save_receipt(verdict.receipt)
        # The next update waits behind this one while a judge takes its time: how much of this one comes back
        # as error feedback is part of the next. Training goes on, and the round waits for the judge too, but
        # no longer than trust.judge_patience_seconds.
        asked = 0
        while verdict.outcome is Outcome.PENDING:
            if self.logic.stop.wait(verdict_wait_seconds(asked)):
                raise Stopped("the worker is stopping")
            verdict, asked = self.client.verdict(update.payload_hash), asked + 1
        if asked:
            self.state.save_receipt(verdict.receipt)
        return verdict
