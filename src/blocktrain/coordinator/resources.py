"""What the coordinator's services share: the run, its storage, the clock, and the bell that wakes threads."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from blocktrain.coordinator.metrics import Metrics
from blocktrain.coordinator.published_text import PublishedText
from blocktrain.coordinator.run import Run
from blocktrain.coordinator.storage.blobs import Blobs
from blocktrain.coordinator.storage.ledger import Ledger
from blocktrain.coordinator.storage.store import Store
from blocktrain.coordinator.storage.unneeded_payloads import UnneededPayloads
from blocktrain.coordinator.storage.weights import WeightCache
from blocktrain.threads import Changes


@dataclass(frozen=True)
class Resources:
    run: Run
    store: Store
    blobs: Blobs
    ledger: Ledger
    weights: WeightCache
    unneeded: UnneededPayloads
    clock: Callable[[], float]
    secret: bytes = bytes(32)
    """Known to the coordinator's key only: draws evidence, chooses what sketches look at."""
    new_id: Callable[[], str] = partial(secrets.token_hex, 16)
    """Names assignments; a simulation, which must repeat itself, counts instead."""
    changes: Changes = field(default_factory=Changes)
    metrics: Metrics = field(default_factory=Metrics)
    text: PublishedText | None = None
    """None where workers must bring the run's text."""
