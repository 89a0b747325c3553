"""Update codecs: the tensors of one block as a frame of fixed layout, and back.

A frame has no header. Its length and the place of every byte follow from the codec and the block's
schema, which the receiver knows; nothing in it names a shape, a type or a size. Knows nothing of error
feedback (the caller keeps `tensors - decode(encode(tensors))`), of norms or of who sent it.

Layout, tensors in schema order, little-endian, lowest bits first. Tensors of fewer than CHUNK_VALUES
values: dense fp16. Others are cut into chunks: TILE_SIDE x TILE_SIDE tiles of a matrix whose sides are
both that long, CHUNK_VALUES contiguous values otherwise. What is left at the edges makes smaller chunks,
after the whole ones, so there is no padding to select (and a chunk of fewer than K values keeps them all).
  sparse:K  per chunk K ascending 12-bit indices, K 2-bit codes (bit 0: negative, bit 1: which magnitude),
            the lower and the higher magnitude in fp16
  sign      per chunk one bit per value (1: negative), one fp16 magnitude
  bits:N    per chunk an N-bit code per value (4 or 8, two's complement, never the lowest), then one fp16
            magnitude m per group of 64 values; a value is code * (m / (2^(N-1) - 1)) in fp32
  dense     fp32 of every value, bit exact, no chunks
Same input, same bytes on every CPU: ties go to the lowest index, sums have a written order.

Covered: any bytes give tensors or FrameError; wrong length, unsorted, repeated or out-of-range indices,
NaN, infinity, negative magnitudes and set bits that no encoder writes are refused; memory is that of the
decoded tensors, or of one band of them, and one batch of chunks. Not covered: whether the values make sense
(norm, evidence).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from blocktrain.codec_spec import CHUNK_VALUES, TILE_SIDE, CodecSpec
from blocktrain.errors import WireError
from blocktrain.wire.byte_source import ByteSource
from blocktrain.wire.chunks import (
    MAX_HALF,
    BitsChunks,
    Bytes,
    ChunkError,
    Chunks,
    Floats,
    FrameReason,
    SignChunks,
    SparseChunks,
)

_HALF_EXPONENT: Final = 0x7C00
_BATCH_CHUNKS: Final = 256
"""Chunks worked on at once: 4 MB of fp32, which stays in cache and bounds what decoding allocates."""

BAND_VALUES: Final = 1 << 18
"""Values of a tensor that are decoded, merged and written at once, where its rows allow."""

Tensors = Mapping[str, Floats]
Values = Callable[[str, slice], Floats]
"""Reads a band of one tensor: its values in order, as a flat array."""


def held(tensors: Tensors) -> Values:
    """Reads from tensors that are in memory."""
    return lambda name, band: tensors[name].reshape(-1)[band]


class FrameError(WireError):
    """A frame, or tensors to encode, that break the layout: `reason` and a `sentence`."""

    def __init__(self, reason: FrameReason, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason
        self.sentence = sentence


@dataclass(frozen=True)
class Schema:
    """Names and shapes of a block's tensors, in the order the frame holds them."""

    tensors: tuple[tuple[str, tuple[int, ...]], ...]

    def __post_init__(self) -> None:
        # A stranger's coordinator names the tensors; two of one name would overwrite each other in silence.
        if len({name for name, _ in self.tensors}) != len(self.tensors):
            raise FrameError(FrameReason.SCHEMA_MISMATCH, "expected distinct tensor names in the schema")
        for name, shape in self.tensors:
            if any(side < 1 for side in shape):
                raise FrameError(
                    FrameReason.SCHEMA_MISMATCH, f"{name}: expected sides of at least 1, found {shape}"
                )

    @classmethod
    def of(cls, tensors: Tensors) -> Schema:
        """The schema of these tensors, in the mapping's order."""
        return cls(tuple((name, tuple(map(int, tensor.shape))) for name, tensor in tensors.items()))

    @property
    def num_values(self) -> int:
        return sum(math.prod(shape) for _, shape in self.tensors)

    def bands(self) -> Iterator[tuple[str, slice]]:
        """Every tensor in order of name, cut where its chunks end: what codecs can read alone, so that a
        block of any size is worked on in a few megabytes."""
        for name, shape in sorted(self.tensors):
            rows, columns = _as_matrix(shape)
            # Rows of tiles in a matrix, chunks in a vector; either way a band is contiguous.
            step = CHUNK_VALUES if rows == 1 else TILE_SIDE * columns
            step *= max(1, BAND_VALUES // step)
            size = rows * columns
            for start in range(0, size, step):
                yield name, slice(start, min(start + step, size))

    def schema_hash(self) -> str:
        # Here, so that a training machine with numpy alone can encode: hashing needs blake3.
        from blocktrain.wire.hashing import canonical_json, content_hash

        return content_hash(canonical_json([[name, list(shape)] for name, shape in self.tensors]))


def frame_length(codec: CodecSpec, schema: Schema) -> int:
    """Exact bytes of every frame of this codec and schema."""
    form = _form_of(codec)
    return sum(form.num_bytes(shape) for _, shape in schema.tensors)


def encode(codec: CodecSpec, schema: Schema, tensors: Tensors) -> bytes:
    """The frame of `tensors`; fp16 magnitudes saturate at MAX_HALF, NaN and infinity are refused."""
    _check_tensors(schema, tensors)
    form = _form_of(codec)
    # Empty and not zero: every byte is written, since the lengths of the parts add up to the whole.
    frame = np.empty(frame_length(codec, schema), np.uint8)
    offset = 0
    for name, shape in schema.tensors:
        size = form.num_bytes(shape)
        form.write(tensors[name], frame[offset : offset + size])
        offset += size
    return frame.tobytes()


class UpdateFrame:
    """A frame whose bands are decoded when they are asked for, every byte of them checked, or FrameError."""

    def __init__(self, codec: CodecSpec, schema: Schema, source: ByteSource) -> None:
        # The length first: a wrong one costs no memory and no time, whatever it claims to be.
        expected = frame_length(codec, schema)
        if len(source) != expected:
            raise FrameError(
                FrameReason.WRONG_LENGTH,
                f"expected a frame of {expected} bytes ({codec}, {len(schema.tensors)} tensors), found "
                f"{len(source)}; check that codec, block and recipe are those of the assignment",
            )
        self._source, self._form = source, _form_of(codec)
        self._places: dict[str, tuple[int, tuple[int, ...]]] = {}
        offset = 0
        for name, shape in schema.tensors:
            self._places[name] = offset, shape
            offset += self._form.num_bytes(shape)

    def read(self, name: str, band: slice) -> Floats:
        """The values of a band of `Schema.bands`, or of a whole tensor."""
        offset, shape = self._places[name]
        return self._form.read(self._source, offset, name, shape, band)


def decode(codec: CodecSpec, schema: Schema, payload: bytes | bytearray | memoryview) -> dict[str, Floats]:
    """The tensors of a frame, every byte of it checked, or FrameError."""
    frame = UpdateFrame(codec, schema, np.frombuffer(payload, np.uint8))
    return {
        name: frame.read(name, slice(0, math.prod(shape))).reshape(shape) for name, shape in schema.tensors
    }


def _check_tensors(schema: Schema, tensors: Tensors) -> None:
    if set(tensors) != {name for name, _ in schema.tensors}:
        raise FrameError(
            FrameReason.SCHEMA_MISMATCH,
            f"expected the {len(schema.tensors)} tensors of the schema, found others; encode one whole block",
        )
    for name, shape in schema.tensors:
        tensor = tensors[name]
        # float64 would be cast in silence, and other values than the caller's would travel.
        if tensor.shape != shape or tensor.dtype != np.float32:
            raise FrameError(
                FrameReason.SCHEMA_MISMATCH,
                f"{name}: expected float32 of shape {shape}, found {tensor.dtype} of shape {tensor.shape}",
            )
        _require_finite(np.isfinite(tensor), name, "training diverged, so lower its learning rate")


def _require_finite(finite: NDArray[np.bool_], name: str, remedy: str) -> None:
    if not finite.all():
        found = finite.size - np.count_nonzero(finite)
        raise FrameError(
            FrameReason.NOT_FINITE,
            f"{name}: expected finite values, found {found} NaN or infinite of {finite.size}; {remedy}",
        )


_SENDER: Final = "the sender's encoder is broken or hostile"


class _TensorForm(Protocol):
    """How one tensor lies in a frame."""

    def num_bytes(self, shape: tuple[int, ...]) -> int: ...
    def write(self, tensor: Floats, part: Bytes) -> None: ...
    def read(
        self, source: ByteSource, offset: int, name: str, shape: tuple[int, ...], band: slice
    ) -> Floats: ...


def _form_of(codec: CodecSpec) -> _TensorForm:
    # The one place that tells kinds apart: `CodecSpec` has checked that each has its number.
    match codec.kind:
        case "dense":
            return _DenseForm()
        case "sign":
            return _ChunkedForm(SignChunks())
        case "bits":
            assert codec.bits is not None
            return _ChunkedForm(BitsChunks(codec.bits))
        case "sparse":
            assert codec.kept is not None
            return _ChunkedForm(SparseChunks(codec.kept))


class _DenseForm:
    def num_bytes(self, shape: tuple[int, ...]) -> int:
        return 4 * math.prod(shape)

    def write(self, tensor: Floats, part: Bytes) -> None:
        part.view("<f4")[:] = tensor.reshape(-1)

    def read(self, source: ByteSource, offset: int, name: str, _: tuple[int, ...], band: slice) -> Floats:
        part = source[offset + 4 * band.start : offset + 4 * band.stop]
        values = part.view("<f4").astype(np.float32)
        _require_finite(np.isfinite(values), name, _SENDER)
        return values


class _HalfForm:
    def num_bytes(self, shape: tuple[int, ...]) -> int:
        return 2 * math.prod(shape)

    def write(self, tensor: Floats, part: Bytes) -> None:
        # fp16 ends at 65504; the cut stays in error feedback, where infinity would spoil the weights.
        part.view("<f2")[:] = np.clip(tensor.reshape(-1), -MAX_HALF, MAX_HALF)

    def read(self, source: ByteSource, offset: int, name: str, _: tuple[int, ...], band: slice) -> Floats:
        part = source[offset + 2 * band.start : offset + 2 * band.stop]
        # On the bits: an fp16 is NaN or infinite exactly when its exponent is all ones.
        finite = (part.view("<u2") & _HALF_EXPONENT) != _HALF_EXPONENT
        _require_finite(finite, name, _SENDER)
        return part.view("<f2").astype(np.float32)


@dataclass(frozen=True)
class _Region:
    """A grid of equal chunks in a tensor that is seen as a matrix, chunks in row-major order."""

    row: int
    column: int
    num_down: int
    num_across: int
    height: int
    width: int

    @property
    def num_chunks(self) -> int:
        return self.num_down * self.num_across

    @property
    def chunk_values(self) -> int:
        return self.height * self.width

    def of(self, matrix: Floats) -> Floats:
        """This region of the matrix as a view [down, height, across, width]."""
        rows = matrix[self.row : self.row + self.num_down * self.height]
        part = rows[:, self.column : self.column + self.num_across * self.width]
        return part.reshape(self.num_down, self.height, self.num_across, self.width)

    def inside(self, rows: slice, columns: slice) -> tuple[int, _Region] | None:
        """The chunks in these rows and columns of the matrix, and the number of the first of them."""
        top, bottom = _within(rows, self.row, self.height, self.num_down)
        left, right = _within(columns, self.column, self.width, self.num_across)
        if top >= bottom or left >= right:
            return None
        part = replace(
            self,
            row=self.row + top * self.height,
            column=self.column + left * self.width,
            num_down=bottom - top,
            num_across=right - left,
        )
        return top * self.num_across + left, part

    def batches(self) -> Iterator[_Region]:
        """The same chunks in the same order, at most about _BATCH_CHUNKS at a time."""
        # Whole rows of chunks where they fit, so that the order of chunks stays that of the frame.
        across = min(self.num_across, _BATCH_CHUNKS)
        down = max(1, _BATCH_CHUNKS // self.num_across)
        for y, x in product(range(0, self.num_down, down), range(0, self.num_across, across)):
            yield replace(
                self,
                row=self.row + y * self.height,
                column=self.column + x * self.width,
                num_down=min(down, self.num_down - y),
                num_across=min(across, self.num_across - x),
            )


def _within(span: slice, start: int, length: int, count: int) -> tuple[int, int]:
    """First and last (not included) of `count` chunks along a side that a span covers."""
    return max(0, (span.start - start) // length), min(count, -(-(span.stop - start) // length))


def _as_matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    # A chunk has 4,096 values, tile or row, so that an index takes 12 bits.
    if len(shape) == 2 and min(shape) >= TILE_SIDE:
        return shape[0], shape[1]
    return 1, math.prod(shape)


def _regions(shape: tuple[int, ...]) -> list[_Region]:
    """Whole chunks first, then what is left over at the right, at the bottom and in the corner."""
    rows, columns = _as_matrix(shape)
    height, width = (TILE_SIDE, TILE_SIDE) if rows > 1 else (1, CHUNK_VALUES)
    return [
        _Region(row, column, num_down, num_across, chunk_height, chunk_width)
        for row, num_down, chunk_height in _spans(rows, height)
        for column, num_across, chunk_width in _spans(columns, width)
    ]


def _spans(side: int, step: int) -> list[tuple[int, int, int]]:
    """(start, count, length) of the whole steps along a side, and of the rest."""
    whole, rest = divmod(side, step)
    spans = [(0, whole, step), (whole * step, 1, rest)]
    return [span for span in spans if span[1] and span[2]]


class _ChunkedForm:
    """Chunk records in order; small tensors in fp16 instead."""

    def __init__(self, chunks: Chunks) -> None:
        self._chunks = chunks
        self._half = _HalfForm()

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        # Norms, scales and biases: few values, so 16 bits of each cost next to nothing beside the matrices.
        if math.prod(shape) < CHUNK_VALUES:
            return self._half.num_bytes(shape)
        return sum(r.num_chunks * self._chunks.record_bytes(r.chunk_values) for r in _regions(shape))

    def write(self, tensor: Floats, part: Bytes) -> None:
        if tensor.size < CHUNK_VALUES:
            return self._half.write(tensor, part)
        matrix = tensor.reshape(_as_matrix(tensor.shape))
        whole = slice(0, matrix.shape[0]), slice(0, matrix.shape[1])
        for batch, _, start, end in self._batches(tensor.shape, *whole):
            values = batch.of(matrix).swapaxes(1, 2).reshape(batch.num_chunks, batch.chunk_values)
            part[start:end].reshape(batch.num_chunks, -1)[:] = self._chunks.encode(values)
        return None

    def read(self, source: ByteSource, offset: int, name: str, shape: tuple[int, ...], band: slice) -> Floats:
        if math.prod(shape) < CHUNK_VALUES:
            return self._half.read(source, offset, name, shape, band)
        height, width = _as_matrix(shape)
        rows, columns = slice(0, 1), band
        if height > 1:
            rows, columns = slice(band.start // width, band.stop // width), slice(0, width)
        matrix = np.empty((rows.stop - rows.start, columns.stop - columns.start), np.float32)
        for batch, first, start, end in self._batches(shape, rows, columns):
            records = source[offset + start : offset + end].reshape(batch.num_chunks, -1)
            try:
                values = self._chunks.decode(records, batch.chunk_values)
            # Only here is the tensor's name known, which is what a person needs to find the fault.
            except ChunkError as error:
                problem = f"{name}, chunk {first + error.chunk}: {error}; {_SENDER}"
                raise FrameError(error.reason, problem) from None
            grid = values.reshape(batch.num_down, batch.num_across, batch.height, batch.width)
            here = replace(batch, row=batch.row - rows.start, column=batch.column - columns.start)
            here.of(matrix)[:] = grid.swapaxes(1, 2)
        return matrix.reshape(-1)

    def _batches(
        self, shape: tuple[int, ...], rows: slice, columns: slice
    ) -> Iterator[tuple[_Region, int, int, int]]:
        """Each batch of chunks in these rows and columns, the number of its first chunk, and where its
        records begin and end in the tensor's part of the frame."""
        offset = chunks = 0
        for region in _regions(shape):
            size = self._chunks.record_bytes(region.chunk_values)
            if (found := region.inside(rows, columns)) is not None:
                first, wanted = found
                for batch in wanted.batches():
                    start = offset + first * size
                    yield batch, chunks + first, start, start + batch.num_chunks * size
                    first += batch.num_chunks
            offset, chunks = offset + region.num_chunks * size, chunks + region.num_chunks
