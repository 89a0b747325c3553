"""The msgpack metadata of serving frames, one type for each frame that carries some.

Covered: types, sizes and unknown fields; anything else is a ServingFrameError. Apart from frames.py so
that a machine with numpy alone can still move frames.
"""

from __future__ import annotations

import enum
from typing import Annotated, Final, TypeVar

import msgspec

from blocktrain.wire.frames import ActivationCodec, Frame, FrameType, ServingFrameReason, refuse

MAX_SENTENCE: Final = 1000
MAX_NAME: Final = 200
MAX_NUM_BLOCKS: Final = 4096
MAX_PASSES: Final = 16
MAX_BEST_TOKENS: Final = 1024
MAX_HOPS: Final = 31
"""Stages behind the first of a serial model: with ordinary addresses they fit into 4 KiB of metadata."""

# Bounds in the types: msgspec checks them while it reads, before a list of strangers' values exists.
_Hash = Annotated[str, msgspec.Meta(max_length=64)]
_Sentence = Annotated[str, msgspec.Meta(max_length=MAX_SENTENCE)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**31)]
_Block = Annotated[int, msgspec.Meta(ge=0, lt=MAX_NUM_BLOCKS)]
_Blocks = Annotated[list[_Block], msgspec.Meta(max_length=256)]


class ModelShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What both sides must agree on before a row means anything."""

    name: Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
    model_hash: _Hash
    codebook_hash: _Hash
    vocabulary: _Count
    width: _Count
    context: _Count
    num_blocks: _Count


class Hello(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    client: _Hash
    """Random; sessions belong to it, so they outlive one connection."""
    model: ModelShape
    token: Annotated[str, msgspec.Meta(max_length=256)] = ""
    """The secret of a stage that asks for one."""


class Welcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    model: ModelShape
    blocks: _Blocks
    credits: Annotated[int, msgspec.Meta(ge=1, le=65536)]
    """Requests this client may have in flight on the connection."""
    max_rows: _Count
    """Rows one reply may carry."""


class Draw(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the engine will choose, for a stage that sends the best tokens of each row alone (codec BEST)."""

    seed: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
    position: _Count
    """Where in the whole text the token stands that the first row is for; keys the noise with the seed."""
    temperature: Annotated[float, msgspec.Meta(ge=0)]
    tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_BEST_TOKENS)]


class Hop(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A stage that goes on where the one before it ends."""

    address: Annotated[str, msgspec.Meta(max_length=400)]
    """HOST:PORT or HOST:PORT#PIN, as the gateway reaches it and the stage before it must too."""
    blocks: _Blocks


class Ask(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Metadata of TRAVERSE, SCORE and EXACT. Defaults are not sent: an older stage does not know them."""

    blocks: _Blocks
    prefix: Annotated[int, msgspec.Meta(ge=0, lt=2**32)] = 0
    """`prefix_checksum` of the ids before `base`, which the stage must have cached."""
    draw: Draw | None = None
    """With the codec BEST."""
    onward: Annotated[list[Hop], msgspec.Meta(max_length=MAX_HOPS)] = []
    """Of a serial model: who goes on behind these blocks, in order. The last of them answers."""
    activations: ActivationCodec = ActivationCodec.F32
    """How values travel between these stages."""
    like: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """With a session's first TRAVERSE: another session of the client, which has the ids before `base`
    cached."""


class Handed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Metadata of HAND_ON."""

    client: _Hash
    """Who asked the first stage, by the name in its HELLO: session and answer belong to it."""
    kind: FrameType
    """What was asked: TRAVERSE, SCORE or EXACT."""
    ask: Ask


class Refine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Metadata of REFINE. The payload has `num_known` ids and, once begun, the header's rows."""

    blocks: _Blocks
    """Neighbours, in order."""
    num_known: _Count
    seed: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
    position: _Count
    """Where in the whole text the first new token stands; keys the noise together with the seed."""
    passes: Annotated[int, msgspec.Meta(ge=1, le=MAX_PASSES)]
    """Euler steps of each block."""
    begun: bool


class FailureCode(enum.Enum):
    LATE = "late"
    BUSY = "busy"
    STALE = "stale"
    BAD_REQUEST = "bad_request"
    ONWARD = "onward"
    """The next stage of a serial model could not be reached from here."""
    INTERNAL = "internal"


class Failure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Metadata of FAILED and REFUSED."""

    code: FailureCode
    sentence: _Sentence


Metadata = TypeVar("Metadata", bound=msgspec.Struct)


def encode_metadata(value: msgspec.Struct) -> bytes:
    return msgspec.msgpack.encode(value)


def decode_metadata(frame: Frame, kind: type[Metadata]) -> Metadata:
    try:
        return msgspec.msgpack.decode(frame.metadata, type=kind)
    # Deeply nested bytes raise RecursionError and bad text UnicodeDecodeError: both are the sender's fault,
    # not ours.
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        refuse(ServingFrameReason.METADATA, f"expected {kind.__name__} in {frame.type.name}: {error}")


def sentence(text: str) -> str:
    """Cut to what a Failure may carry."""
    return text if len(text) <= MAX_SENTENCE else text[: MAX_SENTENCE - 1] + "…"
