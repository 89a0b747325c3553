"""Near-duplicates of held-out documents, found by samples of their shingles (FracMinHash).

A shingle is SHINGLE_BYTES bytes of the text in lower case with runs of white space made one space. One hash
in KEPT_ONE_IN is kept, the same ones in every document, so the share of a document's kept shingles that
another has estimates how much of its text the other repeats. Two documents are near-duplicates if one repeats
SAME_SHARE of the other, whichever is longer: a page that quotes a whole held-out page counts.

Why not exact lines: one changed word a line hides a copy. Why not MinHash: it estimates what two texts share
of both together, so a short page inside a long one goes unseen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Hashes = NDArray[np.uint32]
"""32 bits: with 4 million held-out shingles one in a thousand is found by chance, far from SAME_SHARE."""

SHINGLE_BYTES = 32
KEPT_ONE_IN = 16
SAME_SHARE = 0.8
"""At 0.5 to 0.7 most finds on 115 MB of documentation were pages that share a licence of 1.5 kB (up to 0.79
of a short page); from 0.8 on they were copies."""
MIN_SHARED = 4
"""Fewer kept shingles in common (about 100 bytes of text) are a stock phrase, not a copy."""

_FACTOR = 0x9E3779B1  # odd, so that multiplication modulo 2^32 loses nothing
_MASK = (1 << 32) - 1


def sketch(text: bytes) -> Hashes:
    """The kept shingle hashes of a document, sorted, each once. Shorter than a shingle: none."""
    plain = b" ".join(text.lower().split())
    if len(plain) < SHINGLE_BYTES:
        return np.empty(0, np.uint32)
    # A polynomial hash of every window by doubling: five steps for 32 bytes instead of 32.
    hashes = np.frombuffer(plain, np.uint8).astype(np.uint32)
    width, factor = 1, _FACTOR
    while width < SHINGLE_BYTES:
        longer = hashes[:-width] * np.uint32(factor)
        longer += hashes[width:]
        hashes, width, factor = longer, 2 * width, factor * factor & _MASK
    # Low bits of such a hash see only low bits of the text; these two lines spread them.
    hashes ^= hashes >> np.uint32(15)
    hashes *= np.uint32(0x85EBCA6B)
    return np.unique(hashes[hashes < np.uint32((1 << 32) // KEPT_ONE_IN)])


@dataclass(frozen=True)
class SketchIndex:
    """Sketches of the documents that training must not see, ready to be looked up."""

    hashes: Hashes
    """Sorted; a hash stands once for each document that has it."""
    owners: NDArray[np.int32]
    """Which document each hash is of."""
    sizes: NDArray[np.int32]
    """How many kept shingles each document has."""

    @classmethod
    def of(cls, sketches: Sequence[Hashes]) -> SketchIndex:
        sizes = np.array([len(one) for one in sketches], np.int32)
        hashes = np.concatenate([np.empty(0, np.uint32), *sketches])
        owners = np.repeat(np.arange(len(sketches), dtype=np.int32), sizes)
        order = np.argsort(hashes, kind="stable")
        return cls(hashes[order], owners[order], sizes)

    def has_near_duplicate(self, found: Hashes, *, among: int | None = None) -> bool:
        """True if a document with this sketch is a near-duplicate of one of the first `among` (None: all)."""
        if len(found) == 0 or len(self.hashes) == 0:
            return False
        first = np.searchsorted(self.hashes, found, "left")
        last = np.searchsorted(self.hashes, found, "right")
        hit = last > first
        if np.count_nonzero(hit) < MIN_SHARED:
            return False
        owners = np.concatenate([self.owners[a:b] for a, b in zip(first[hit], last[hit], strict=True)])
        if among is not None:
            owners = owners[owners < among]
        shared = np.bincount(owners, minlength=len(self.sizes))
        needed = np.maximum(MIN_SHARED, SAME_SHARE * np.minimum(len(found), self.sizes))
        return bool((shared >= needed).any())
