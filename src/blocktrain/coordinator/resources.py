"""What the coordinator's services share: the run, its storage, the clock, and the bell that wakes threads."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from blocktrain.coordinator.metrics import Metrics
from blocktrain.coordinator.published_text import PublishedText
from blocktrain.coordinator.run import Run
from blocktrain.coordinator.storage.blobs import Blobs
from blocktrain.coordinator.storage.ledger import Ledger
from blocktrain.coordinator.storage.open_rounds import OpenRounds
from blocktrain.coordinator.storage.store import Store
from blocktrain.coordinator.storage.unneeded_payloads import UnneededPayloads
from blocktrain.coordinator.storage.weights import WeightCache
from blocktrain.threads import Changes
from blocktrain.wire.identity import Identity
from blocktrain.wire.tokens import secret_of


class Resources:
    def __init__(
        self,
        run: Run,
        store: Store,
        blobs: Blobs,
        identity: Identity,
        clock: Callable[[], float],
        *,
        text: PublishedText | None = None,
        new_id: Callable[[], str] = lambda: secrets.token_hex(16),
    ) -> None:
        """`text` is None where workers must bring the run's text. `new_id` names assignments; a simulation,
        which must repeat itself, counts instead."""
        self.run, self.store, self.blobs, self.clock = run, store, blobs, clock
        self.text, self.new_id = text, new_id
        self.ledger, self.weights = Ledger(identity), WeightCache(run, blobs)
        self.open_rounds = OpenRounds(run)
        self.unneeded = UnneededPayloads(store, blobs)
        self.secret = secret_of(identity, "judging")
        """Known to the coordinator's key only: draws evidence, chooses what sketches look at."""
        self.changes, self.metrics = Changes(), Metrics()
