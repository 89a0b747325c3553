"""Which codec a run's updates travel in: the one grammar of `swarm.codec`, and what follows from it.

Whoever needs to know what a codec does asks the codec (`sends_weights`, `density`, `bits`) and compares no
kinds. The bytes are `wire.codec`'s; this module stands below the recipe, which is checked with it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

from blocktrain.errors import RecipeError

# 64 x 64 = 4,096 values, so that an index within a chunk takes 12 bits: two in three bytes.
TILE_SIDE: Final = 64
CHUNK_VALUES: Final = TILE_SIDE * TILE_SIDE
DEFAULT_KEPT: Final = 64
BIT_WIDTHS: Final = (4, 8)

Kind = Literal["sparse", "sign", "bits", "dense"]


@dataclass(frozen=True)
class CodecSpec:
    """Written `sparse:64`, `sign`, `bits:4` or `dense`; `sparse` alone is `sparse:64`."""

    kind: Kind
    kept: int | None = None
    """`sparse` only: values kept of each chunk of CHUNK_VALUES."""
    bits: int | None = None
    """`bits` only: width of a value's code."""

    def __post_init__(self) -> None:
        if self.kind == "sparse" and self.kept is None:
            object.__setattr__(self, "kept", DEFAULT_KEPT)
        kept_is_good = self.kept in range(1, CHUNK_VALUES + 1) if self.kind == "sparse" else self.kept is None
        bits_is_good = self.bits in BIT_WIDTHS if self.kind == "bits" else self.bits is None
        if not (kept_is_good and bits_is_good):
            raise _bad_codec(f"{self.kind!r} with {self.kept if self.bits is None else self.bits}")

    @classmethod
    def parse(cls, text: str) -> CodecSpec:
        match text.partition(":"):
            case ["sparse", ":", number] if re.fullmatch("[1-9][0-9]{0,3}", number):
                return cls("sparse", kept=int(number))
            case ["bits", ":", number] if re.fullmatch("[1-9]", number):
                return cls("bits", bits=int(number))
            case ["sparse" | "sign" | "dense" as kind, "", ""]:
                return cls(kind)
        raise _bad_codec(repr(text))

    def __str__(self) -> str:
        number = self.kept if self.bits is None else self.bits
        return self.kind if number is None else f"{self.kind}:{number}"

    @property
    def sends_weights(self) -> bool:
        """True if a frame holds the worker's weights, so that reading its delta needs the base snapshot."""
        # Weights and not a delta, so that one worker at alpha 1 gives back its weights bit for bit.
        return self.kind == "dense"

    @property
    def density(self) -> float:
        """Share of a tensor's values that a frame can change; the rest decode to zero."""
        return 1.0 if self.kept is None else self.kept / CHUNK_VALUES


def _bad_codec(found: str) -> RecipeError:
    return RecipeError(
        f"swarm.codec: expected sparse:K with K from 1 to {CHUNK_VALUES}, sign, bits:4, bits:8 or dense, "
        f"found {found}; change it in the recipe"
    )
