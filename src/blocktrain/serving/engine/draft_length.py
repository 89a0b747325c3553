"""How many tokens to draft before a traversal: policies that learn from what came of earlier drafts.

Pure state, fed with margins, counts and seconds. A draft of any length gives the same text; these decide
only how long it takes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from blocktrain.serving.engine.api import MAX_DRAFT_TOKENS

MARGINS = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Borders, in nats, between the classes of margins that chances are counted for."""
_KEEP = 0.99


class DraftLength(Protocol):
    """When to stop drafting, learning from what came of earlier drafts."""

    @property
    def most(self) -> int:
        """No draft is longer."""

    def go_on(self, margins: Sequence[float]) -> bool:
        """Whether to draft one more token behind tokens that won by these margins."""

    def chance(self, margin: float) -> float:
        """That a token which won by this margin is accepted, when those before it are."""

    def observe(
        self, margins: Sequence[float], accepted: int, draft_seconds: float, traversal_seconds: float
    ) -> None:
        """What came of a draft: how many of its tokens were accepted, and what it cost."""


class FixedLength:
    def __init__(self, length: int) -> None:
        self.most = length

    def go_on(self, margins: Sequence[float]) -> bool:
        return True

    def chance(self, margin: float) -> float:
        return 1 - 0.5 * math.exp(-margin)

    def observe(
        self, margins: Sequence[float], accepted: int, draft_seconds: float, traversal_seconds: float
    ) -> None:
        pass


class AdaptiveLength:
    """Draft on while the next token is worth its time; shared by all requests of an engine.

    A token that won its draft by a wide margin is seldom wrong, so the chance of acceptance is counted by
    margin. The next token brings (chance that all before it hold) * (its own chance) tokens and costs the
    time of a draft, in which the engine makes `rate` tokens by going on as usual.
    """

    most = MAX_DRAFT_TOKENS

    def __init__(self) -> None:
        self.tries = np.full(len(MARGINS) + 1, 2.0)
        self.hits = self.tries * np.linspace(0.5, 0.98, len(MARGINS) + 1)
        self.draft_seconds = 0.002
        """Per drafted token."""
        self.tokens, self.seconds = 1.0, 0.05
        """Of recent traversals, older ones counting less."""

    def chance(self, margin: float) -> float:
        bucket = int(np.searchsorted(MARGINS, margin))
        return float(self.hits[bucket] / self.tries[bucket])

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    def go_on(self, margins: Sequence[float]) -> bool:
        usual = float(self.hits.sum() / self.tries.sum())
        gain = usual * math.prod(self.chance(margin) for margin in margins)
        return gain > self.draft_seconds * self.rate

    def observe(
        self, margins: Sequence[float], accepted: int, draft_seconds: float, traversal_seconds: float
    ) -> None:
        for i, margin in enumerate(margins[: accepted + 1]):
            bucket = int(np.searchsorted(MARGINS, margin))
            self.tries[bucket] = _KEEP * self.tries[bucket] + 1
            self.hits[bucket] = _KEEP * self.hits[bucket] + (i < accepted)
        if margins:
            self.draft_seconds += 0.1 * (draft_seconds / len(margins) - self.draft_seconds)
        self.tokens = 0.9 * self.tokens + accepted + 1
        self.seconds = 0.9 * self.seconds + draft_seconds + traversal_seconds
