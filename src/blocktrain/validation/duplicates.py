"""Finding copies: a small sketch of an update, and how much of one sketch is in another.

A sketch holds the non-zero values at places that the coordinator's secret chose, so that a copier does not
know where to change a few. Two workers who trained on different text agree at some places in sign, rarely in
value; a copy agrees in value wherever it was not changed, also after being multiplied by a constant.

Covered: exact copies, under any key and in any later round that is still compared; copies with up to about
60 % of the indices changed; copies scaled. Not covered: copies with noise on every value, or with a third of
their signs turned (they train nothing: assigned-versus-random tells), and copies across blocks (their shapes
differ).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from blocktrain.codec_spec import CodecSpec

SKETCH_VALUES = 4096
"""Non-zero values a sketch aims at; at 40 % kept, 1600 are shared, an error of 1 % in the agreement."""
MAX_PLACES = 1 << 20
FEWEST_SHARED = 24
"""Below this an agreement means nothing."""
FEWEST_SHARE = 0.2
"""A copy shares at least this much of its places with its source."""
TOLERANCE = 2e-3
"""Relative difference of equal values: a little above the resolution of fp16."""
COPIED_SHARE = 0.3
"""Share of the sketch that must be equal in value; 40 % where 60 % of the indices were changed."""


@dataclass(frozen=True)
class Sketch:
    places: NDArray[np.uint32]
    """Ascending."""
    values: NDArray[np.float32]

    def to_bytes(self) -> bytes:
        return self.places.astype("<u4").tobytes() + self.values.astype("<f4").tobytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> Sketch:
        half = len(data) // 2
        return cls(np.frombuffer(data[:half], "<u4"), np.frombuffer(data[half:], "<f4"))


def sketch_of(tensors: Mapping[str, NDArray[np.float32]], seed: int, codec: CodecSpec) -> Sketch:
    """The sketch of an update's delta. Equal seeds (one per run and block) and codecs look at equal places.

    How many places follows from the codec and not from the update, whose sender could otherwise choose which
    places are looked at: `sparse:64` sends one value in 64, so 64 times the places give as many values.
    """
    flat = np.concatenate([tensors[name].reshape(-1) for name in sorted(tensors)])
    wanted = int(min(MAX_PLACES, SKETCH_VALUES / codec.density))
    places = np.arange(flat.size)
    if wanted < flat.size:
        places = np.unique(np.random.default_rng(seed).integers(0, flat.size, wanted))
    kept = places[flat[places] != 0]
    if len(kept) > 2 * SKETCH_VALUES:
        # A fixed order that does not follow the position (2^64 over the golden ratio): cut by position, a
        # sketch would look at the first tensors only, and a copier could change just those.
        mixed = kept.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        kept = kept[np.sort(np.argsort(mixed)[: 2 * SKETCH_VALUES])]
    return Sketch(kept.astype(np.uint32), flat[kept].astype(np.float32))


@dataclass(frozen=True)
class Likeness:
    shared: int
    """Places that both have."""
    equal: float
    """Share of the later sketch whose values are those of the earlier one, times one constant; less the share
    that has these values with the other sign."""

    @property
    def is_copy(self) -> bool:
        return self.shared >= FEWEST_SHARED and self.equal >= COPIED_SHARE


def likeness(earlier: Sketch, later: Sketch) -> Likeness:
    # Too few places in common say nothing: one in five is less than the 40 % that is left of a copy with 60 %
    # of its indices changed.
    _, left, right = np.intersect1d(earlier.places, later.places, assume_unique=True, return_indices=True)
    if len(left) < FEWEST_SHARED or len(left) < FEWEST_SHARE * len(later.places):
        return Likeness(len(left), 0.0)
    # A copy has one ratio everywhere, 1 or the constant it was multiplied by; two honest updates agree at
    # some places in sign, rarely in value. So: the most ratios within one tolerance.
    ratios = later.values[right].astype(np.float64) / earlier.values[left]
    same, turned = (np.sort(np.log(one[one > 0])) for one in (ratios, -ratios))
    if not len(same):
        return Likeness(len(left), 0.0)

    def within(logs: NDArray[np.float64]) -> NDArray[np.int64]:
        """How many lie in each window that begins with one of `same`."""
        begins = np.searchsorted(logs, same, side="left")
        return np.searchsorted(logs, same + 2 * TOLERANCE, side="right") - begins

    # `sign` has one size for a chunk, so there every honest pair has one ratio, with either sign about as
    # often. Without what is turned, 38 % of an honest update of a small block was "equal" to an earlier one.
    commonest = int((within(same) - within(turned)).max())
    # A share of the whole later sketch, not of the shared places: changed indices are part of its claim.
    return Likeness(len(left), commonest / len(later.places))


def most_alike(later: Sketch, earlier: Sequence[tuple[str, Sketch]]) -> tuple[str, Likeness] | None:
    """The update that `later` has most of, by name; None where there is nothing to compare."""
    found = [(name, likeness(sketch, later)) for name, sketch in earlier]
    return max(found, key=lambda one: one[1].equal, default=None)
