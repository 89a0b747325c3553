"""Serving frames: what an engine and a stage say to each other, bytes in and values out.

A frame is a fixed little-endian header, msgpack metadata of the frame's type (frame_metadata.py), and a raw
payload:

    magic 4s | version u8 | type u8 | codec u8 | zero u8 | session u64 | epoch u32 | traversal u32
    base position u32 | rows u32 | deadline ms u32 | metadata length u32 | payload length u32
    crc32 of metadata and payload u32 | crc32 of the header so far u32

A TRAVERSE carries the ids from `base` on and asks for the last `rows` rows; LOG_PROBS carries the rows, and
behind them the blocks' log-weights where the model's pooling follows the text. WELCOME says in `rows` how
many tokens of a row the stage sends at most where only the best are asked for (0: it cannot).
A HAND_ON carries ids like a TRAVERSE and behind them the activations of these positions (`ActivationCodec`).
Ids take 1, 2 or 4 bytes each, as the vocabulary needs. Rows are fp32, fp64 or quantised (see `Codec`).
Knows nothing of sockets, models or time: a deadline is the milliseconds that were left at sending.

Covered: any bytes give values or ServingFrameError; both checksums, every length against the receiver's
limits before anything is allocated, payload length against rows and vocabulary,
ids inside the vocabulary, NaN and infinite rows and activations. Not covered: who sent it (TLS,
`serving/transport.py`), or rows that are well formed and wrong.
"""

from __future__ import annotations

import enum
import functools
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from blocktrain.errors import WireError

MAGIC: Final = b"BTSF"
VERSION: Final = 1
_LAYOUT: Final = struct.Struct("<4sBBBBQIIIIIIII")
_CHECKSUM: Final = struct.Struct("<I")
HEADER_BYTES: Final = _LAYOUT.size + _CHECKSUM.size
MAX_METADATA_BYTES: Final = 4096
NO_DEADLINE: Final = 0xFFFF_FFFF


class FrameType(enum.IntEnum):
    HELLO = 1
    WELCOME = 2
    REFUSED = 3
    """The connection is of no use: another model, no room, no access. Its sentence says why."""
    TRAVERSE = 4
    """Rows for new ids behind what the session has cached."""
    SCORE = 5
    """Rows for these ids alone; nothing is kept."""
    EXACT = 6
    """One float64 row for these ids alone."""
    LOG_PROBS = 7
    RESEND = 8
    """The session's cache is gone or another than the sender thinks: send its ids from the start."""
    FAILED = 9
    RELEASE = 10
    """Free the session's caches; not answered."""
    PING = 11
    PONG = 12
    GOODBYE = 13
    """The stage is draining: it finishes what it has and takes nothing new."""
    REFINE = 14
    """Ids, then the rows of a sweep so far: have the stage's blocks refine them. Nothing is kept."""
    REFINED = 15
    """The rows for the next block; behind the last block LOG_PROBS comes instead."""
    HAND_ON = 16
    """From stage to stage of a serial model: ids, and what the parts before made of them. The stage behind
    the last hop answers the client that its metadata names."""


class Codec(enum.IntEnum):
    """How rows travel. Q16 and Q8 hold, per row, an fp32 maximum m and codes c with the value
    m - SPAN * (c / top)^2, so that likely tokens are the finest; `row_tolerance` bounds the error."""

    NONE = 0
    F32 = 1
    F64 = 2
    Q16 = 3
    Q8 = 4
    BEST = 5
    """The best tokens alone, with their scores as Q16; see `encode_best`."""


_TYPES: Final = {kind.value: kind for kind in FrameType}
_CODECS: Final = {codec.value: codec for codec in Codec}
"""By number: an enum that is called takes ten times as long as a table."""


class ActivationCodec(enum.Enum):
    """How values between the parts of a serial model travel; `encode_activations` has the layouts."""

    F64 = "f64"
    """In EXACT alone."""
    F32 = "f32"
    BF16 = "bf16"
    Q8 = "q8"


ACTIVATION_GROUP: Final = 64
"""Values of Q8 that share a scale: residual streams have single channels a hundred times the others, which
with one scale for a whole row would leave two or three codes to the rest."""

_SPAN: Final = {Codec.Q16: 64.0, Codec.Q8: 32.0}
"""Nats below a row's maximum that a code can express; what lies below reads as the end of the span."""
_CODE: Final[dict[Codec, np.dtype[Any]]] = {
    Codec.Q16: np.dtype("<u2"),
    Codec.Q8: np.dtype("u1"),
}


class ServingFrameReason(enum.Enum):
    MAGIC = "not a serving frame"
    VERSION = "another version of the protocol"
    TYPE = "a frame type or codec that does not exist"
    CHECKSUM = "bytes changed on the way"
    TOO_LARGE = "a length above the limit"
    METADATA = "metadata that is not of its type"
    PAYLOAD = "a payload that does not fit its header"
    NOT_FINITE = "NaN or infinite numbers"


class ServingFrameError(WireError):
    """Bytes that are no frame, or a frame no sound peer sends: `reason`, and a sentence as message."""

    def __init__(self, reason: ServingFrameReason, sentence: str) -> None:
        super().__init__(f"{reason.value}: {sentence}")
        self.reason = reason


def refuse(reason: ServingFrameReason, sentence: str) -> NoReturn:
    raise ServingFrameError(reason, sentence)


@dataclass(frozen=True)
class FrameLimits:
    """The most a receiver takes in one frame."""

    metadata_bytes: int = MAX_METADATA_BYTES
    payload_bytes: int = 0


GREETING_LIMITS: Final = FrameLimits()
"""Before HELLO and WELCOME are exchanged nobody may make the other side allocate more."""


class Header(NamedTuple):
    # A tuple: both sides make two for every traversal, and a frozen dataclass takes four times as long to
    # make. So with `Frame`.
    type: FrameType
    codec: Codec = Codec.NONE
    session: int = 0
    epoch: int = 0
    traversal: int = 0
    base: int = 0
    rows: int = 0
    deadline_ms: int = NO_DEADLINE
    metadata_bytes: int = 0
    payload_bytes: int = 0
    body_checksum: int = 0

    @property
    def body_bytes(self) -> int:
        return self.metadata_bytes + self.payload_bytes


class Frame(NamedTuple):
    header: Header
    metadata: bytes = b""
    payload: bytes = b""

    @property
    def type(self) -> FrameType:
        return self.header.type

    @property
    def num_bytes(self) -> int:
        return HEADER_BYTES + len(self.metadata) + len(self.payload)


def encode_frame(header: Header, metadata: bytes = b"", payload: bytes = b"") -> bytes:
    """The frame's bytes; lengths and checksums are filled in here."""
    checksum = zlib.crc32(payload, zlib.crc32(metadata))
    fixed = _LAYOUT.pack(
        MAGIC,
        VERSION,
        header.type,
        header.codec,
        0,
        header.session,
        header.epoch,
        header.traversal,
        header.base,
        header.rows,
        header.deadline_ms,
        len(metadata),
        len(payload),
        checksum,
    )
    return b"".join((fixed, _CHECKSUM.pack(zlib.crc32(fixed)), metadata, payload))


def decode_header(raw: bytes, limits: FrameLimits) -> Header:
    """The header in the first HEADER_BYTES of a frame; its lengths are within `limits`."""
    if len(raw) != HEADER_BYTES:
        refuse(ServingFrameReason.PAYLOAD, f"expected a header of {HEADER_BYTES} bytes, found {len(raw)}")
    if raw[:4] != MAGIC:
        refuse(ServingFrameReason.MAGIC, f"expected {MAGIC!r} first, found {raw[:4]!r}; check the address")
    if raw[4] != VERSION:
        refuse(ServingFrameReason.VERSION, f"expected version {VERSION}, found {raw[4]}; update one side")
    # Before any field is believed: a flipped bit in a length would otherwise make us wait for bytes that
    # never come.
    if _CHECKSUM.unpack_from(raw, _LAYOUT.size)[0] != zlib.crc32(raw[: _LAYOUT.size]):
        refuse(ServingFrameReason.CHECKSUM, "the header's checksum does not match; send it again")
    _, _, kind, codec, zero, *numbers = _LAYOUT.unpack_from(raw)
    try:
        header = Header(_TYPES[kind], _CODECS[codec], *numbers)
    except KeyError:
        refuse(ServingFrameReason.TYPE, f"type {kind}, codec {codec}")
    # Refused today, so that a later version can give the byte a meaning without old peers misreading it.
    if zero:
        refuse(ServingFrameReason.TYPE, f"expected 0 in the spare byte, found {zero}")
    for part, found, limit in (
        ("metadata", header.metadata_bytes, limits.metadata_bytes),
        ("payload", header.payload_bytes, limits.payload_bytes),
    ):
        if found > limit:
            refuse(ServingFrameReason.TOO_LARGE, f"expected {part} of at most {limit} bytes, found {found}")
    return header


def decode_body(header: Header, body: bytes) -> Frame:
    if len(body) != header.body_bytes:
        refuse(ServingFrameReason.PAYLOAD, f"expected {header.body_bytes} more bytes, found {len(body)}")
    # Against broken memory and middleboxes. An adversary can compute a CRC; TLS is what stops one.
    if zlib.crc32(body) != header.body_checksum:
        refuse(ServingFrameReason.CHECKSUM, "the body's checksum does not match; send it again")
    return Frame(header, body[: header.metadata_bytes], body[header.metadata_bytes :])


# ---- token ids ----------------------------------------------------------------------------------


@functools.cache
def id_dtype(vocabulary: int) -> np.dtype[Any]:
    # One byte per token for a vocabulary of bytes: a request is hardly more than its ids.
    for name in ("u1", "<u2"):
        if vocabulary <= np.iinfo(name).max + 1:
            return np.dtype(name)
    return np.dtype("<u4")


def encode_ids(ids: Sequence[int], vocabulary: int) -> bytes:
    dtype = id_dtype(vocabulary)
    # A traversal mostly has one, for which an array takes four times as long.
    return bytes(ids) if dtype.itemsize == 1 else np.array(ids, dtype).tobytes()


def decode_ids(payload: bytes, vocabulary: int) -> list[int]:
    if vocabulary == 256:
        return list(payload)
    ids: list[int] = _checked_ids(payload, vocabulary).tolist()
    return ids


def _checked_ids(payload: bytes, vocabulary: int) -> NDArray[Any]:
    dtype = id_dtype(vocabulary)
    if len(payload) % dtype.itemsize:
        refuse(
            ServingFrameReason.PAYLOAD, f"expected ids of {dtype.itemsize} bytes, found {len(payload)} bytes"
        )
    ids = np.frombuffer(payload, dtype)
    # An id beyond the table would read another row of memory or raise deep inside torch.
    if vocabulary < 1 << 8 * dtype.itemsize and len(ids) and int(ids.max()) >= vocabulary:
        refuse(ServingFrameReason.PAYLOAD, f"expected ids below {vocabulary}, found {int(ids.max())}")
    return ids


def prefix_checksum(ids: Sequence[int], before: int = 0) -> int:
    """Names what a cache was built from, behind what was named `before`. Guards against mistakes, not against
    an adversary."""
    return zlib.crc32(struct.pack(f"<{len(ids)}I", *ids), before)


# ---- rows of log-probs --------------------------------------------------------------------------


def row_bytes(codec: Codec, vocabulary: int) -> int:
    if codec == Codec.NONE:
        return 0
    if codec in _CODE:
        return 4 + vocabulary * _CODE[codec].itemsize
    return vocabulary * (4 if codec == Codec.F32 else 8)


def encode_rows(rows: NDArray[np.float32] | NDArray[np.float64], codec: Codec) -> bytes:
    """Rows [R, V] as they travel."""
    if codec not in _CODE:
        return rows.astype("<f4" if codec == Codec.F32 else "<f8").tobytes()
    span, top = code_range(codec)
    # Codes grow with the square root of the distance: fine where a choice is decided, coarse where nothing is
    # chosen.
    maxima = rows.max(axis=-1, keepdims=True).astype("<f4")
    # Below the maximum as it travels, in fp32: the receiver subtracts from that one.
    below = np.clip(maxima.astype(np.float64) - rows, 0, span)
    codes = np.rint(top * np.sqrt(below / span)).astype(_CODE[codec])
    return np.concatenate([maxima.view(np.uint8), codes.view(np.uint8)], axis=1).tobytes()


def decode_rows(payload: bytes, codec: Codec, rows: int, vocabulary: int) -> NDArray[np.float64]:
    expected = rows * row_bytes(codec, vocabulary)
    if len(payload) != expected or codec in (Codec.NONE, Codec.BEST):
        refuse(
            ServingFrameReason.PAYLOAD,
            f"expected {rows} rows of {vocabulary} as {codec.name} in {expected} bytes, found {len(payload)}",
        )
    # A hostile maximum may be NaN or huge; it is found below, and a warning would only fill the log.
    with np.errstate(invalid="ignore", over="ignore"):
        if codec in _CODE:
            span, top = code_range(codec)
            records = np.frombuffer(payload, np.uint8).reshape(rows, row_bytes(codec, vocabulary))
            maxima = np.ascontiguousarray(records[:, :4]).view("<f4").astype(np.float64)
            codes = np.ascontiguousarray(records[:, 4:]).view(_CODE[codec]).astype(np.float64)
            values = maxima - span * (codes / top) ** 2
        else:
            flat = np.frombuffer(payload, "<f4" if codec == Codec.F32 else "<f8")
            values = flat.astype(np.float64).reshape(rows, vocabulary)
    if not np.isfinite(values).all():
        refuse(ServingFrameReason.NOT_FINITE, "expected finite log-probs; the stage's weights are damaged")
    return values


def best_bytes(count: int, vocabulary: int) -> int:
    """What a row of the codec BEST takes with so many tokens."""
    return count * id_dtype(vocabulary).itemsize + row_bytes(Codec.Q16, count)


def encode_best(
    ids: NDArray[np.int64], scores: NDArray[np.float64], vocabulary: int, counts: Sequence[int]
) -> list[bytes]:
    """The best tokens of each row [R, K], in any order, and their scores, for answers of so many rows each.
    Every other token of a row has at most the lowest of them."""
    narrow, codes = ids.astype(id_dtype(vocabulary)), encode_rows(scores, Codec.Q16)
    size, start, answers = row_bytes(Codec.Q16, ids.shape[1]), 0, []
    for count in counts:
        first, start = start, start + count
        answers.append(narrow[first:start].tobytes() + codes[first * size : start * size])
    return answers


def decode_best(
    payload: bytes, rows: int, count: int, vocabulary: int
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
    """Ids and scores [R, K], and how far each score may lie from the encoded one (`row_tolerance`)."""
    end, size = rows * count * id_dtype(vocabulary).itemsize, row_bytes(Codec.Q16, count)
    if len(payload) != end + rows * size:
        refuse(
            ServingFrameReason.PAYLOAD,
            f"expected the best {count} of {vocabulary} for {rows} rows in {end + rows * size} bytes, found "
            f"{len(payload)}",
        )
    ids = _checked_ids(payload[:end], vocabulary).astype(np.int64).reshape(rows, count)
    # As `decode_rows` and `row_tolerance` find them from rows of any codec, in a third of the time: codes are
    # read once, and where a maximum is finite all scores are.
    records = np.frombuffer(payload, _best_record(count), rows, end)
    maxima = records["maximum"]
    if not np.isfinite(maxima).all():
        refuse(ServingFrameReason.NOT_FINITE, "expected finite scores; the stage's weights are damaged")
    span, top = code_range(Codec.Q16)
    codes = records["codes"].astype(np.float64)
    tolerance = (codes + 0.25) * (span / float(top) ** 2)
    codes *= codes
    codes *= -span / float(top) ** 2
    codes += maxima[:, None]
    return ids, codes, tolerance


@functools.cache
def _best_record(count: int) -> np.dtype[Any]:
    return np.dtype([("maximum", "<f4"), ("codes", "<u2", (count,))])


def log_weight_bytes(blocks: int) -> int:
    """What the log-weights of so many blocks take in one row."""
    return 8 * blocks


def encode_log_weights(logs: NDArray[np.float64]) -> bytes:
    """Log-weights [R, B] behind the rows, where pooling follows the text."""
    return logs.astype("<f8").tobytes()


def decode_log_weights(payload: bytes, rows: int, blocks: int) -> NDArray[np.float64]:
    expected = rows * log_weight_bytes(blocks)
    if len(payload) != expected:
        refuse(
            ServingFrameReason.PAYLOAD,
            f"expected {rows} rows of {blocks} log-weights in {expected} bytes, found {len(payload)}",
        )
    logs = np.frombuffer(payload, "<f8").reshape(rows, blocks)
    if blocks and not np.isfinite(logs).all():
        refuse(ServingFrameReason.NOT_FINITE, "expected finite log-weights; the stage's weights are damaged")
    return logs


# ---- activations ----------------------------------------------------------------------------------


def activation_bytes(codec: ActivationCodec, width: int) -> int:
    """What one position takes between two parts."""
    if codec is ActivationCodec.Q8:
        return 4 * -(-width // ACTIVATION_GROUP) + width
    return width * {ActivationCodec.F64: 8, ActivationCodec.F32: 4, ActivationCodec.BF16: 2}[codec]


def encode_activations(values: NDArray[Any], codec: ActivationCodec) -> bytes:
    """Values [T, D] as they travel. BF16: the upper half of fp32, rounded to even. Q8: for each position the
    fp32 scales of its groups, then a signed byte for each value."""
    if codec is ActivationCodec.F64:
        return values.astype("<f8").tobytes()
    single = np.ascontiguousarray(values, dtype="<f4")
    if codec is ActivationCodec.F32:
        return single.tobytes()
    if codec is ActivationCodec.BF16:
        bits: NDArray[np.uint32] = single.view("<u4")
        halves = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
        return bytes(halves.tobytes())
    positions, width = single.shape
    groups = -(-width // ACTIVATION_GROUP)
    padded = np.zeros((positions, groups * ACTIVATION_GROUP), "<f4")
    padded[:, :width] = single
    grouped = padded.reshape(positions, groups, ACTIVATION_GROUP)
    scales = (np.abs(grouped).max(axis=-1) / 127).astype("<f4")
    # A group of zeros has the scale 0, and any divisor gives its codes.
    codes = np.rint(grouped / np.where(scales > 0, scales, 1)[..., None]).astype(np.int8)
    flat = codes.reshape(positions, -1)[:, :width]
    return np.concatenate([scales.view(np.uint8), flat.view(np.uint8)], axis=1).tobytes()


def decode_activations(payload: bytes, codec: ActivationCodec, positions: int, width: int) -> NDArray[Any]:
    """Values [T, D]: fp64 of F64, fp32 of the others."""
    expected = positions * activation_bytes(codec, width)
    if len(payload) != expected:
        refuse(
            ServingFrameReason.PAYLOAD,
            f"expected {positions} positions of {width} values as {codec.value} in {expected} bytes, "
            f"found {len(payload)}",
        )
    values: NDArray[Any]
    if codec is ActivationCodec.Q8:
        groups = -(-width // ACTIVATION_GROUP)
        records = np.frombuffer(payload, np.uint8).reshape(positions, 4 * groups + width)
        scales = np.ascontiguousarray(records[:, : 4 * groups]).view("<f4")
        codes = np.ascontiguousarray(records[:, 4 * groups :]).view(np.int8)
        # A hostile scale may be NaN or huge; it is found below.
        with np.errstate(invalid="ignore", over="ignore"):
            values = codes * np.repeat(scales, ACTIVATION_GROUP, axis=1)[:, :width]
    elif codec is ActivationCodec.BF16:
        values = (np.frombuffer(payload, "<u2").astype("<u4") << 16).view("<f4").reshape(positions, width)
    else:
        kind = "<f8" if codec is ActivationCodec.F64 else "<f4"
        values = np.frombuffer(payload, kind).reshape(positions, width)
    if not np.isfinite(values).all():
        refuse(ServingFrameReason.NOT_FINITE, "expected finite activations; a stage's weights are damaged")
    return values


@functools.cache
def code_range(codec: Codec) -> tuple[float, int]:
    """Nats that a quantised codec spans, and its largest code."""
    return _SPAN[codec], int(np.iinfo(_CODE[codec]).max)


def row_tolerance(rows: NDArray[np.float64], codec: Codec) -> NDArray[np.float64]:
    """How far each decoded value may lie from the encoded one, rounding of fp32 aside."""
    if codec not in _CODE:
        return np.zeros_like(rows)
    span, top = code_range(codec)
    codes = top * np.sqrt(np.clip(rows.max(axis=-1, keepdims=True) - rows, 0, None) / span)
    # Half a code to either side: span * ((c + 1/2)^2 - c^2) / top^2.
    tolerance: NDArray[np.float64] = span * (codes + 0.25) / float(top) ** 2
    return tolerance
