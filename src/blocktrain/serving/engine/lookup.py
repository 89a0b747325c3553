"""Guessing the next tokens from the text itself: what followed the last time these tokens came.

For models none of whose blocks can guess alone, as the parts of a serial one. It costs no computing, and
pays where a text repeats what stands in it: code, tables, names, answers that quote their question. A wrong
guess costs rows in a traversal, never a different text.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from blocktrain.model.sampling import Row
from blocktrain.serving.engine.draft_length import DraftLength, Traversed
from blocktrain.serving.engine.drafting import DraftedToken, Drafting

LONGEST, SHORTEST = 8, 2
"""Tokens at the end of the text that must have come before; the longest that did tell most."""
FIRST_GUESS = 4


def looked_up(tokens: Sequence[int], most: int) -> list[int]:
    """The `most` tokens that followed where the text's last tokens came the last time; none where they never
    came."""
    # As bytes, four for a token: a search in a text of 100,000 tokens takes a millisecond.
    data = np.asarray(tokens, "<u4").tobytes()
    for length in range(min(LONGEST, len(tokens) - 1), SHORTEST - 1, -1):
        suffix, end = data[-4 * length :], len(data) - 4
        while (at := data.rfind(suffix, 0, end)) >= 0:
            if at % 4 == 0:
                start = at // 4 + length
                # Where the text ends, it goes on in a circle: so do lists and tables.
                return [tokens[start + i % (len(tokens) - start)] for i in range(most)]
            # Bytes of two tokens that look like one.
            end = at + len(suffix) - 1
    return []


class LookupDrafter:
    """Guesses for one request: more after those that held, fewer after those that did not."""

    def __init__(self, drafting: Drafting, length: DraftLength) -> None:
        self.drafting, self.length = drafting, length
        self.most = min(FIRST_GUESS, length.most)

    @property
    def drafts_now(self) -> bool:
        """Looking up costs nothing."""
        return True

    @property
    def slides(self) -> bool:
        """No: what comes behind the window is looked up for the next traversal."""
        return False

    @property
    def flights(self) -> int:
        """One: what comes behind a guess is better looked up when it is known whether it held."""
        return 1

    def __enter__(self) -> LookupDrafter:
        self.drafting.num_open += 1
        return self

    def __exit__(self, *error: object) -> None:
        self.drafting.num_open -= 1

    async def draft(
        self, tokens: Sequence[int], most: int, ahead: Sequence[DraftedToken], *, flying: bool
    ) -> list[DraftedToken]:
        most = min(most, self.most)
        guess = looked_up(tokens, most) if most > 0 else []
        return [DraftedToken(token, margin=0.0) for token in guess]

    def observe(self, found: Traversed, weights: Row) -> None:
        if found.margins:
            # Twice what held: a stretch that is quoted goes on, and one that ended costs a few rows.
            self.most = min(self.length.most, max(1, 2 * found.accepted))
