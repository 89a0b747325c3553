"""Membership in a run: joining it at the start, and again when the coordinator no longer knows this
worker."""

from __future__ import annotations

from blocktrain.client.coordinator import CoordinatorClient, RequestRefused
from blocktrain.wire.messages import JoinRequest
from blocktrain.wire.tokens import find_stamp
from blocktrain.worker.live_view import PlainView
from blocktrain.worker.state import StateFolder


class Membership:
    def __init__(
        self, client: CoordinatorClient, request: JoinRequest, state: StateFolder, view: PlainView
    ) -> None:
        self.client, self.request, self.state, self.view = client, request, state, view

    def join(self) -> None:
        """Safe to repeat: a member that joins again gets its first receipt."""
        try:
            answer = self.client.join(self.request)
        except RequestRefused as refusal:
            if refusal.reason != "stamp_required":
                raise
            # Only a stranger is asked for a stamp, so the hashing is not done before somebody asks.
            asked = self.client.challenge()
            self.view.line(f"stamping bits={asked.bits}: some seconds of hashing, once")
            stamp = find_stamp(asked.challenge, asked.bits, self.client.stop.is_set)
            stamped = self.request.model_copy(update={"challenge": asked.challenge, "stamp": stamp})
            answer = self.client.join(stamped)
        self.state.save_receipt(answer.receipt)
        self.view.line(f"joined {self.client.url} worker={answer.worker_id} device={self.request.device}")
