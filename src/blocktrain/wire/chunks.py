"""Chunks of values as records of bytes: the `sparse`, `sign` and `bits` codes, and their bit packing.

Works on batches of equal chunks, arrays of [chunk, value] and [chunk, byte]. Knows nothing of tensors or
frames (see `codec`, which holds the layout in words). Same input, same bytes on every CPU: ties go to the
lowest index, and sums have a written order.

Covered: each field of a record is checked before it is used. Not covered: the record's length, which
the caller has made right.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

MAX_HALF: Final = 65504.0
"""Largest fp16; magnitudes saturate here, and error feedback keeps the rest."""
_MAX_HALF_BITS: Final = 0x7BFF
GROUP_VALUES: Final = 64
"""Values of a chunk that share a magnitude in `bits`: one row of a tile, as rows differ in scale."""

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
Bits = NDArray[np.bool_]


class FrameReason(StrEnum):
    """Why a frame is refused."""

    WRONG_LENGTH = "wrong_length"
    INDEX_ORDER = "index_order"
    INDEX_RANGE = "index_range"
    CODE_RANGE = "code_range"
    PADDING = "padding"
    BAD_MAGNITUDE = "bad_magnitude"
    NOT_FINITE = "not_finite"
    SCHEMA_MISMATCH = "schema_mismatch"


class ChunkError(Exception):
    """A bad chunk of a batch; `codec` knows which tensor it lies in."""

    def __init__(self, reason: FrameReason, chunk: int, problem: str) -> None:
        super().__init__(problem)
        self.reason = reason
        self.chunk = chunk


def _require(is_good: Bits, reason: FrameReason, problem: str) -> None:
    """Refuse the first chunk of which anything is not good."""
    # All at once and the culprit only on failure: sound frames, which are nearly all, pay for one vector
    # operation.
    if not is_good.all():
        raise ChunkError(reason, int(np.argwhere(~is_good)[0, 0]), problem)


class Chunks(Protocol):
    """How chunks of equal size become records of equal size."""

    def record_bytes(self, num_values: int) -> int: ...
    def encode(self, values: Floats) -> Bytes: ...
    def decode(self, records: Bytes, num_values: int) -> Floats: ...


_SIGNS_OF_BYTE: Final[Floats] = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"),
    np.float32(-1),
    np.float32(1),
)
"""The eight signs that a byte holds, lowest bit first."""


class SignChunks:
    def record_bytes(self, num_values: int) -> int:
        return _bytes_of(num_values) + 2

    def encode(self, values: Floats) -> Bytes:
        # The mean magnitude is the best single one by least squares: 1 bit a value, error 0.60 on gaussians.
        magnitudes = np.minimum(np.abs(values), np.float32(MAX_HALF))
        mean = _ordered_sum(magnitudes) / np.float32(values.shape[1])
        return np.concatenate([_pack_bits(values < 0), _half_bytes(mean[:, None])], axis=1)

    def decode(self, records: Bytes, num_values: int) -> Floats:
        magnitude = _read_magnitudes(records[:, -2:])
        if num_values % 8:
            unused = records[:, -3:-2] >> np.uint8(num_values % 8)
            _require(unused == 0, FrameReason.PADDING, "bits behind the last code are set")
        # Eight values a byte from a table: 0.8 ns a value, where unpacking bits and choosing took 4.9.
        values = np.take(_SIGNS_OF_BYTE, records[:, :-2], axis=0).reshape(len(records), -1)[:, :num_values]
        values *= magnitude
        return values


class SparseChunks:
    def __init__(self, k: int) -> None:
        self._k = k

    def record_bytes(self, num_values: int) -> int:
        kept = min(self._k, num_values)
        return _bytes_of(12 * kept) + _bytes_of(2 * kept) + 4

    def encode(self, values: Floats) -> Bytes:
        magnitudes = np.minimum(np.abs(values), np.float32(MAX_HALF))
        # Two magnitudes per chunk, 2 bits a kept value: error 0.94 on gaussians, 0.72 on uneven rows; with
        # magnitudes per tensor, as Templar has them, 0.94 and 0.74 (docs/history).
        index = _largest(magnitudes, min(self._k, values.shape[1]))
        low_high, is_high = _two_magnitudes(np.take_along_axis(magnitudes, index, axis=1))
        negative = np.take_along_axis(values, index, axis=1) < 0
        codes = np.stack([negative, is_high], axis=2).reshape(len(values), -1)
        return np.concatenate([_pack_12(index), _pack_bits(codes), _half_bytes(low_high)], axis=1)

    def decode(self, records: Bytes, num_values: int) -> Floats:
        kept = min(self._k, num_values)
        end_of_index = _bytes_of(12 * kept)
        # Strictly ascending also means that no index repeats, so a hostile frame cannot write one value
        # twice.
        index = _unpack_12(records[:, :end_of_index], kept)
        _require(index[:, 1:] > index[:, :-1], FrameReason.INDEX_ORDER, "indices do not ascend")
        _require(index[:, -1] < num_values, FrameReason.INDEX_RANGE, f"an index is not under {num_values}")
        codes = _unpack_bits(records[:, end_of_index:-4], 2 * kept)
        low_high = _read_magnitudes(records[:, -4:])
        _require(low_high[:, 0] <= low_high[:, 1], FrameReason.BAD_MAGNITUDE, "magnitudes are not in order")
        kept_values = np.where(codes[:, 1::2], low_high[:, 1:], low_high[:, :1])
        values = np.zeros((len(records), num_values), np.float32)
        signed = np.where(codes[:, ::2], -kept_values, kept_values)
        np.put_along_axis(values, index, signed, axis=1)
        return values


class BitsChunks:
    """Every value as a multiple of its group's step, in two's complement.

    The group's largest magnitude travels and not the step, which fp16 would hold less well.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        # Symmetric: the lowest code of two's complement is never used, so both signs reach equally far.
        self._most = (1 << (width - 1)) - 1

    def record_bytes(self, num_values: int) -> int:
        return _bytes_of(self._width * num_values) + 2 * _groups_of(num_values)

    def encode(self, values: Floats) -> Bytes:
        num_chunks, num_values = values.shape
        # The step comes from the magnitude as fp16 holds it, as the decoder will see it: then decoding and
        # encoding again gives the same bytes.
        groups = _in_groups(np.clip(values, -MAX_HALF, MAX_HALF))
        largest = _half_bytes(np.abs(groups).max(axis=2))
        step = self._step(largest.view("<f2").astype(np.float32))
        # A group of zeros has a step of zero: its codes are zero and not 0 / 0.
        scaled = np.divide(groups, step, out=np.zeros_like(groups), where=step > 0)
        codes = np.clip(np.rint(scaled), -self._most, self._most).astype(np.int8)
        return np.concatenate([self._pack(codes.reshape(num_chunks, -1)[:, :num_values]), largest], axis=1)

    def decode(self, records: Bytes, num_values: int) -> Floats:
        split = _bytes_of(self._width * num_values)
        step = self._step(_read_magnitudes(records[:, split:]))
        codes = self._unpack(records[:, :split], num_values)
        values = _in_groups(codes.astype(np.float32)) * step
        return values.reshape(len(records), -1)[:, :num_values]

    def _step(self, largest: Floats) -> Floats:
        return (largest / np.float32(self._most))[:, :, None]

    def _pack(self, codes: NDArray[np.int8]) -> Bytes:
        if self._width == 8:
            return codes.view(np.uint8)
        # Two codes in a byte, the first in its low half.
        nibbles = np.zeros((len(codes), 2 * _bytes_of(4 * codes.shape[1])), np.uint8)
        nibbles[:, : codes.shape[1]] = codes.view(np.uint8) & 0xF
        nibbles[:, ::2] |= nibbles[:, 1::2] << 4
        return nibbles[:, ::2]

    def _unpack(self, packed: Bytes, num_values: int) -> NDArray[np.int8]:
        codes = np.ascontiguousarray(packed).view(np.int8)
        if self._width == 4:
            nibbles = np.stack([packed << 4, packed & 0xF0], axis=2).reshape(len(packed), -1)
            _require(nibbles[:, num_values:] == 0, FrameReason.PADDING, "bits behind the last code are set")
            # The codes lie in the upper halves, so an arithmetic shift extends their sign.
            codes = nibbles[:, :num_values].view(np.int8) >> 4
        _require(codes >= -self._most, FrameReason.CODE_RANGE, f"a code is under {-self._most}")
        return codes


def _groups_of(num_values: int) -> int:
    return -(-num_values // GROUP_VALUES)


def _in_groups(values: Floats) -> Floats:
    """[chunk, value] as [chunk, group, value], the last group filled up with zeros."""
    num_chunks, num_values = values.shape
    missing = _groups_of(num_values) * GROUP_VALUES - num_values
    if missing:
        values = np.pad(values, ((0, 0), (0, missing)))
    return values.reshape(num_chunks, -1, GROUP_VALUES)


def _bytes_of(num_bits: int) -> int:
    return (num_bits + 7) // 8


def _ordered_sum(values: Floats) -> Floats:
    """Row sums by halving: an order that no BLAS, compiler or vector width can change."""
    width = 1 << (values.shape[1] - 1).bit_length()
    if width != values.shape[1]:
        values = np.pad(values, ((0, 0), (0, width - values.shape[1])))
    while width > 1:
        width //= 2
        values = values[:, :width] + values[:, width:]
    return values[:, 0]


def _largest(magnitudes: Floats, k: int) -> NDArray[np.int64]:
    """Ascending positions of the k largest of each row; of equal ones, those with the lowest index."""
    num_chunks, num_values = magnitudes.shape
    # The bits of floats that are not negative sort like the floats, and no subnormal is flushed to zero.
    bits = magnitudes.view(np.uint32)
    # A partition and not a sort: 48 M values encode in 0.48 s with `sparse:64` (docs/history).
    threshold = np.partition(bits, num_values - k, axis=1)[:, num_values - k, None]
    chosen = bits >= threshold
    tied = np.count_nonzero(chosen, axis=1) > k
    if tied.any():
        # More values equal the threshold than there is room for: the first of them in the row are kept.
        above, equal = bits[tied] > threshold[tied], bits[tied] == threshold[tied]
        room = k - np.count_nonzero(above, axis=1, keepdims=True)
        chosen[tied] = above | (equal & (np.cumsum(equal, axis=1) <= room))
    _, index = np.nonzero(chosen)
    return index.reshape(num_chunks, k)


def _two_magnitudes(magnitudes: Floats) -> tuple[NDArray[np.float64], Bits]:
    """The two magnitudes nearest to each row in least squares, and which value takes the higher.

    Exact 2-means in one dimension: in descending order, the best split of the prefix sums.
    """
    # A split into n high and k - n low ones leaves least error where (sum high)^2 / n + (sum low)^2 / (k - n)
    # is largest.
    k = magnitudes.shape[1]
    descending = np.sort(magnitudes, axis=1)[:, ::-1].astype(np.float64)
    num_high = np.arange(1, k + 1)
    num_low = np.maximum(k - num_high, 1)
    sum_high = np.cumsum(descending, axis=1)
    sum_low = sum_high[:, -1:] - sum_high
    split = np.argmax(np.square(sum_high) / num_high + np.square(sum_low) / num_low, axis=1)[:, None]
    high = np.take_along_axis(sum_high / num_high, split, axis=1)
    # Rounding of the prefix sums can leave the lower mean a little under zero or above the higher one.
    low = np.minimum(np.maximum(np.take_along_axis(sum_low / num_low, split, axis=1), 0.0), high)
    is_high = magnitudes >= np.take_along_axis(descending, split, axis=1)
    return np.concatenate([low, high], axis=1), is_high


def _half_bytes(magnitudes: NDArray[np.floating]) -> Bytes:
    return np.ascontiguousarray(magnitudes.astype("<f2")).view(np.uint8)


def _read_magnitudes(part: Bytes) -> Floats:
    halves = np.ascontiguousarray(part)
    bits = halves.view("<u2")
    _require(bits <= _MAX_HALF_BITS, FrameReason.BAD_MAGNITUDE, "a magnitude is negative or not finite")
    return halves.view("<f2").astype(np.float32)


def _pack_bits(bits: Bits) -> Bytes:
    return np.packbits(bits, axis=1, bitorder="little")


def _unpack_bits(packed: Bytes, num_bits: int) -> Bits:
    bits = np.unpackbits(packed, axis=1, bitorder="little")
    # One update has one frame: with free padding bits a copy could get another hash.
    _require(bits[:, num_bits:] == 0, FrameReason.PADDING, "bits behind the last code are set")
    return bits[:, :num_bits].view(np.bool_)


def _pack_12(index: NDArray[np.int64]) -> Bytes:
    """Two indices in three bytes; an odd last one in two."""
    num_chunks, k = index.shape
    pairs = np.zeros((num_chunks, (k + 1) // 2, 2), np.uint16)
    pairs.reshape(num_chunks, -1)[:, :k] = index
    first, second = pairs[:, :, 0], pairs[:, :, 1]
    triples = np.stack([first & 0xFF, first >> 8 | (second & 0xF) << 4, second >> 4], axis=2)
    return triples.astype(np.uint8).reshape(num_chunks, -1)[:, : _bytes_of(12 * k)]


def _unpack_12(packed: Bytes, k: int) -> NDArray[np.int64]:
    num_chunks, num_bytes = packed.shape
    triples = np.zeros((num_chunks, (k + 1) // 2, 3), np.uint16)
    triples.reshape(num_chunks, -1)[:, :num_bytes] = packed
    a, b, c = triples[:, :, 0], triples[:, :, 1], triples[:, :, 2]
    index = np.stack([a | (b & 0xF) << 8, b >> 4 | c << 4], axis=2).reshape(num_chunks, -1)
    _require(index[:, k:] == 0, FrameReason.PADDING, "bits behind the last index are set")
    return index[:, :k].astype(np.int64)
