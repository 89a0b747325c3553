"""Serving frames: every value comes back, and no bytes crash the reader or make it allocate."""

from __future__ import annotations

import contextlib
import struct
import tracemalloc
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blocktrain.wire import frames
from blocktrain.wire.frame_metadata import (
    Ask,
    Failure,
    FailureCode,
    Hello,
    ModelShape,
    Welcome,
    decode_metadata,
    encode_metadata,
)
from blocktrain.wire.frames import (
    HEADER_BYTES,
    ActivationCodec,
    Codec,
    Frame,
    FrameLimits,
    FrameType,
    Header,
    ServingFrameError,
    ServingFrameReason,
    activation_bytes,
    best_bytes,
    decode_activations,
    decode_best,
    decode_body,
    decode_header,
    decode_ids,
    decode_rows,
    encode_activations,
    encode_best,
    encode_frame,
    encode_ids,
    encode_rows,
    row_bytes,
    row_tolerance,
)

LIMITS = FrameLimits(payload_bytes=1 << 16)
SHAPE = ModelShape("tiny", "a" * 64, "b" * 64, 256, 64, 96, 3)
METADATA = [
    Hello("c" * 32, SHAPE, "secret"),
    Welcome(SHAPE, [0, 2], 64, 1024),
    Ask([1], 7),
    Failure(FailureCode.BUSY, "no room"),
]


def decode_frame(raw: bytes) -> Frame:
    return decode_body(decode_header(raw[:HEADER_BYTES], LIMITS), raw[HEADER_BYTES:])


u32 = st.integers(0, 2**32 - 1)
headers = st.builds(
    Header,
    type=st.sampled_from(FrameType),
    codec=st.sampled_from(Codec),
    session=st.integers(0, 2**64 - 1),
    epoch=u32,
    traversal=u32,
    base=u32,
    rows=u32,
    deadline_ms=u32,
)


def valid_frame() -> bytes:
    header = Header(FrameType.TRAVERSE, Codec.F32, 9, 1, 2, 3, 4, 500)
    return encode_frame(header, encode_metadata(METADATA[2]), encode_ids([1, 2, 3], 256))


@given(headers, st.binary(max_size=64), st.binary(max_size=300))
def test_frame_round_trips(header: Header, metadata: bytes, payload: bytes) -> None:
    frame = decode_frame(encode_frame(header, metadata, payload))
    assert (frame.metadata, frame.payload) == (metadata, payload)
    for name in ("type", "codec", "session", "epoch", "traversal", "base", "rows", "deadline_ms"):
        assert getattr(frame.header, name) == getattr(header, name)


@given(st.binary(max_size=200))
def test_random_bytes_give_a_typed_error(raw: bytes) -> None:
    with pytest.raises(ServingFrameError):
        decode_frame(raw)


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_any_changed_byte_is_noticed(place: int, change: int) -> None:
    raw = bytearray(valid_frame())
    raw[place % len(raw)] ^= change
    with pytest.raises(ServingFrameError):
        decode_frame(bytes(raw))


@given(st.integers(0, 10_000))
def test_truncated_and_extended_frames_are_refused(cut: int) -> None:
    raw = valid_frame()
    for damaged in (raw[: cut % len(raw)], raw + b"\0" * (1 + cut % 9)):
        with pytest.raises(ServingFrameError):
            decode_frame(damaged)


@given(st.binary(min_size=HEADER_BYTES - 4, max_size=HEADER_BYTES - 4))
def test_headers_with_a_right_checksum_give_a_value_or_a_typed_error(fixed: bytes) -> None:
    fixed = frames.MAGIC + bytes([frames.VERSION]) + fixed[5:]
    raw = fixed + struct.pack("<I", zlib.crc32(fixed))
    try:
        header = decode_header(raw, LIMITS)
    except ServingFrameError:
        return
    assert header.payload_bytes <= LIMITS.payload_bytes


def test_a_length_above_the_limit_is_refused_before_anything_is_allocated() -> None:
    fixed = bytearray(encode_frame(Header(FrameType.TRAVERSE))[: HEADER_BYTES - 4])
    struct.pack_into("<I", fixed, HEADER_BYTES - 12, 2**32 - 1)
    raw = bytes(fixed) + struct.pack("<I", zlib.crc32(fixed))
    tracemalloc.start()
    with pytest.raises(ServingFrameError) as caught:
        decode_header(raw, LIMITS)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert caught.value.reason is ServingFrameReason.TOO_LARGE
    assert peak < 100_000


@given(st.sampled_from(METADATA), st.integers(0, 10_000), st.binary(max_size=40))
def test_mutated_metadata_gives_a_value_or_a_typed_error(value: object, place: int, noise: bytes) -> None:
    raw = bytearray(encode_metadata(value))  # type: ignore[arg-type]
    raw[place % len(raw) : place % len(raw) + len(noise)] = noise
    frame = Frame(Header(FrameType.HELLO), bytes(raw))
    for kind in (Hello, Welcome, Ask, Failure):
        with contextlib.suppress(ServingFrameError):
            assert isinstance(decode_metadata(frame, kind), kind)


@pytest.mark.parametrize("value", METADATA, ids=lambda v: type(v).__name__)
def test_metadata_round_trips(value: object) -> None:
    frame = Frame(Header(FrameType.HELLO), encode_metadata(value))  # type: ignore[arg-type]
    assert decode_metadata(frame, type(value)) == value  # type: ignore[type-var]


def test_nested_metadata_cannot_exhaust_the_stack() -> None:
    frame = Frame(Header(FrameType.HELLO), b"\x91" * 4000)
    with pytest.raises(ServingFrameError):
        decode_metadata(frame, Ask)


@given(st.integers(2, 100_000).flatmap(lambda v: st.tuples(st.just(v), st.lists(st.integers(0, v - 1)))))
def test_ids_round_trip(case: tuple[int, list[int]]) -> None:
    vocabulary, ids = case
    assert decode_ids(encode_ids(ids, vocabulary), vocabulary) == ids


@given(st.binary(max_size=65), st.sampled_from([7, 256, 300, 70_000]))
def test_any_ids_payload_gives_known_ids_or_a_typed_error(raw: bytes, vocabulary: int) -> None:
    try:
        ids = decode_ids(raw, vocabulary)
    except ServingFrameError:
        return
    assert all(0 <= token < vocabulary for token in ids)


@pytest.mark.parametrize("codec", [Codec.F32, Codec.F64, Codec.Q16, Codec.Q8])
def test_rows_come_back_within_their_stated_tolerance(codec: Codec) -> None:
    random = np.random.default_rng(0)
    rows = -np.abs(random.normal(0, 4, (20, 256))).astype(np.float32)
    payload = encode_rows(rows, codec)
    assert len(payload) == 20 * row_bytes(codec, 256)
    decoded = decode_rows(payload, codec, 20, 256)
    assert (np.abs(decoded - rows) <= row_tolerance(decoded, codec) + 1e-5).all()


def test_the_best_tokens_come_back_as_rows_would() -> None:
    random = np.random.default_rng(0)
    scores = random.normal(0, 20, (5, 8))
    ids = random.permuted(np.tile(np.arange(300), (5, 1)), axis=1)[:, :8]
    (payload,) = encode_best(ids, scores, 300, [5])
    found_ids, found, tolerance = decode_best(payload, 5, 8, 300)
    expected = decode_rows(encode_rows(scores, Codec.Q16), Codec.Q16, 5, 8)
    assert found_ids.tolist() == ids.tolist()
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    # A maximum that was rounded up to fp32 may have left code 1 to the best.
    np.testing.assert_allclose(tolerance, row_tolerance(expected, Codec.Q16), rtol=1e-5, atol=1e-6)


@settings(max_examples=200)
@given(st.binary(max_size=80), st.sampled_from([7, 256, 300]), st.integers(1, 3), st.integers(1, 4))
def test_any_best_tokens_give_finite_scores_or_a_typed_error(
    raw: bytes, vocabulary: int, rows: int, count: int
) -> None:
    raw = (raw * 80)[: rows * best_bytes(count, vocabulary)] if len(raw) % 2 else raw
    try:
        ids, scores, tolerance = decode_best(raw, rows, count, vocabulary)
    except ServingFrameError:
        return
    assert ids.shape == scores.shape == tolerance.shape == (rows, count)
    assert np.isfinite(scores).all()
    assert (ids < vocabulary).all()


@settings(max_examples=200)
@given(st.binary(max_size=80), st.sampled_from(Codec), st.integers(1, 4))
def test_any_rows_payload_gives_finite_rows_or_a_typed_error(raw: bytes, codec: Codec, rows: int) -> None:
    vocabulary = 4
    raw = (raw * 40)[: rows * row_bytes(codec, vocabulary)] if len(raw) % 2 else raw
    try:
        decoded = decode_rows(raw, codec, rows, vocabulary)
    except ServingFrameError:
        return
    assert decoded.shape == (rows, vocabulary)
    assert np.isfinite(decoded).all()


@pytest.mark.parametrize("codec", [Codec.F32, Codec.F64, Codec.Q16, Codec.Q8])
def test_no_rows_are_read_as_no_rows(codec: Codec) -> None:
    """A fuzzer found that quantised ones raised ValueError."""
    assert decode_rows(b"", codec, 0, 256).shape == (0, 256)


def test_activations_come_back_within_their_codec() -> None:
    # 70 is no multiple of a group, and one channel is a hundred times the others.
    values = np.random.default_rng(0).normal(size=(3, 70)).astype(np.float32)
    values[:, 5] *= 100
    found = {}
    for codec in ActivationCodec:
        sent = encode_activations(values, codec)
        assert len(sent) == 3 * activation_bytes(codec, 70)
        found[codec] = decode_activations(sent, codec, 3, 70)
    assert (found[ActivationCodec.F64] == values).all()
    assert (found[ActivationCodec.F32] == values).all()
    assert (found[ActivationCodec.BF16] == torch.from_numpy(values).bfloat16().float().numpy()).all()
    errors = np.abs(found[ActivationCodec.Q8] - values)
    assert errors[:, 64:].max() < 0.02, "the second group has a scale of its own"
    assert encode_activations(np.zeros((1, 70)), ActivationCodec.Q8) == bytes(78)


@given(raw=st.binary(max_size=200), codec=st.sampled_from(ActivationCodec), positions=st.integers(0, 3))
def test_any_activations_payload_gives_finite_values_or_a_typed_error(
    raw: bytes, codec: ActivationCodec, positions: int
) -> None:
    try:
        decoded = decode_activations(raw, codec, positions, 8)
    except ServingFrameError:
        return
    assert decoded.shape == (positions, 8)
    assert np.isfinite(decoded).all()
