"""Update codecs: the tensors of one block as a frame of fixed layout, and back.

A frame has no header. Its length and the place of every byte follow from the codec and the block's
schema, which the receiver knows; nothing in it names a shape, a type or a size. Knows nothing of error
feedback (the caller keeps `tensors - decode(encode(tensors))`), norms or who sent it.

Layout, tensors in schema order, little-endian. Tensors under 4096 values: dense fp16. Others are cut into
chunks: 64x64 tiles of a matrix with both sides of 64 or more, 4096 contiguous values otherwise.
  sparse:K  per chunk K ascending 12-bit indices, K 2-bit codes (sign, magnitude bit), two fp16 magnitudes
  sign      per chunk one bit per value (1 is negative), one fp16 magnitude
  dense     fp32 of every value, no chunks
What is left at the edges of a tensor forms smaller chunks, so there is no padding to select.
Same input, same bytes on every CPU: ties go to the lowest index.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from blocktrain.errors import WireError

CHUNK_VALUES = 4096
TILE_SIDE = 64
DEFAULT_KEPT = 64

Tensors = Mapping[str, NDArray[np.float32]]


class FrameReason(StrEnum):
    """Why a frame is refused."""

    WRONG_LENGTH = "wrong_length"
    INDEX_ORDER = "index_order"
    INDEX_RANGE = "index_range"
    PADDING = "padding"
    BAD_MAGNITUDE = "bad_magnitude"
    NOT_FINITE = "not_finite"
    SCHEMA_MISMATCH = "schema_mismatch"


class FrameError(WireError):
    """A frame, or tensors to encode, that break the layout: `reason` and a `sentence`."""

    def __init__(self, reason: FrameReason, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason
        self.sentence = sentence


@dataclass(frozen=True)
class CodecSpec:
    """Which codec a run uses; written `sparse:64`, `sign` or `dense`."""

    kind: Literal["sparse", "sign", "dense"]
    k: int = DEFAULT_KEPT
    """Values kept of each chunk; used by `sparse` only."""

    @classmethod
    def parse(cls, text: str) -> CodecSpec:
        raise NotImplementedError


@dataclass(frozen=True)
class Schema:
    """Names and shapes of a block's tensors, in the order the frame holds them."""

    tensors: tuple[tuple[str, tuple[int, ...]], ...]

    @classmethod
    def of(cls, tensors: Tensors) -> Schema:
        raise NotImplementedError

    def schema_hash(self) -> str:
        raise NotImplementedError


def frame_length(codec: CodecSpec, schema: Schema) -> int:
    """Exact bytes of every frame of this codec and schema."""
    raise NotImplementedError


def encode(codec: CodecSpec, schema: Schema, tensors: Tensors) -> bytes:
    """The frame of `tensors`; fp16 magnitudes saturate at 65504, NaN and infinity are refused."""
    raise NotImplementedError


def decode(codec: CodecSpec, schema: Schema, payload: bytes | memoryview) -> dict[str, NDArray[np.float32]]:
    """The tensors of a frame, every byte of it checked, or FrameError."""
    raise NotImplementedError
