"""How many tokens to draft before a traversal: policies that learn from what came of earlier drafts.

Pure state, fed with margins, counts and seconds. A draft of any length gives the same text; these decide
only how long it takes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from blocktrain.serving.engine.requests import MAX_DRAFT_TOKENS

MARGINS = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Borders, in nats, between the classes of margins that chances are counted for."""
_KEEP = 0.99
"""What an earlier observation counts after one more: the last 100 of a class decide."""


class DraftLength:
    """Drafts of a fixed length, and the questions that every policy answers."""

    def __init__(self, most: int) -> None:
        self.most = most
        """No draft is longer."""

    def go_on(self, margins: Sequence[float]) -> bool:
        """Whether to draft one more token behind tokens that won by these margins."""
        return True

    def observe(
        self, margins: Sequence[float], accepted: int, draft_seconds: float, traversal_seconds: float
    ) -> None:
        """What came of a draft: how many of its tokens were accepted, and what it cost."""


class AdaptiveLength(DraftLength):
    """Draft on while the next token is worth its time; shared by all requests of an engine.

    A token that won its draft by a wide margin is rarely wrong, so the chance of acceptance is counted by
    margin. The next token brings (chance that all before it hold) * (its own chance) tokens and costs the
    time of a draft, in which the engine makes `rate` tokens by going on as usual. So drafts are long where
    the network is slow or the text is easy, and shrink to nothing where processors are short: with 32
    requests on one core they fell to half a token (docs/experiments.md).
    """

    def __init__(self) -> None:
        super().__init__(MAX_DRAFT_TOKENS)
        # As if two tokens of each class had been seen, 50 % accepted in the narrowest and 98 % in the widest.
        self.tries = np.full(len(MARGINS) + 1, 2.0)
        self.hits = self.tries * np.linspace(0.5, 0.98, len(MARGINS) + 1)
        self.draft_seconds = 0.002
        """Per drafted token; 1.8 to 2.6 ms were measured for two blocks of width 384 on one core."""
        self.tokens, self.seconds = 1.0, 0.05
        """A mean over recent traversals, older ones counting less."""

    def go_on(self, margins: Sequence[float]) -> bool:
        usual = float(self.hits.sum() / self.tries.sum())
        classes = np.searchsorted(MARGINS, margins)
        gain = usual * math.prod((self.hits[classes] / self.tries[classes]).tolist())
        return bool(gain > self.draft_seconds * self.tokens / self.seconds)

    def observe(
        self, margins: Sequence[float], accepted: int, draft_seconds: float, traversal_seconds: float
    ) -> None:
        # Tokens behind the first wrong one say nothing: they continue a text that was never written.
        for i, margin in enumerate(margins[: accepted + 1]):
            bucket = int(np.searchsorted(MARGINS, margin))
            self.tries[bucket] = _KEEP * self.tries[bucket] + 1
            self.hits[bucket] = _KEEP * self.hits[bucket] + (i < accepted)
        if margins:
            self.draft_seconds += 0.1 * (draft_seconds / len(margins) - self.draft_seconds)
        self.tokens = 0.9 * self.tokens + accepted + 1
        self.seconds = 0.9 * self.seconds + draft_seconds + traversal_seconds
