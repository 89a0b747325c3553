"""Update frames: the layout is the written one, the length is exact, strangers' bytes never surprise.

The reference below is written from the words of `codec`'s docstring, value by value, and shares no code
with it.
"""

from __future__ import annotations

import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blocktrain.codec_spec import CodecSpec
from blocktrain.errors import RecipeError, WireError
from blocktrain.wire import codec as codec_module
from blocktrain.wire.byte_source import FileBytes
from blocktrain.wire.chunks import FrameReason
from blocktrain.wire.codec import FrameError, Schema, UpdateFrame, decode, encode, frame_length
from blocktrain.wire.hashing import content_hash

SPARSE, SIGN, DENSE = CodecSpec("sparse"), CodecSpec("sign"), CodecSpec("dense")
FOUR, EIGHT = CodecSpec.parse("bits:4"), CodecSpec.parse("bits:8")
TILE = Schema((("w", (64, 64)),))
SHAPES: list[tuple[int, ...]] = [
    (),
    (7,),
    (63, 65),
    (64, 64),
    (65, 64),
    (64, 130),
    (70, 129),
    (4096,),
    (4097,),
    (2, 4100),
    (16, 16, 33),
]

shapes = st.sampled_from(SHAPES)
codecs = st.sampled_from(
    [SPARSE, SIGN, FOUR, EIGHT, DENSE, *(CodecSpec("sparse", k) for k in (1, 2, 3, 63, 66, 257, 4095, 4096))]
)
schemas = st.lists(shapes, min_size=1, max_size=3).map(
    lambda found: Schema(tuple((f"t{number}", shape) for number, shape in enumerate(found)))
)
kinds = st.sampled_from(["gaussian", "heavy", "ties", "zeros", "tiny"])
seeds = st.integers(0, 2**32 - 1)


def some_values(kind: str, seed: int, shape: tuple[int, ...]) -> Any:
    random = np.random.default_rng(seed)
    makers: dict[str, Callable[[], Any]] = {
        "gaussian": lambda: 1e-2 * random.standard_normal(shape),
        "heavy": lambda: 1e-3 * random.standard_t(2, shape),
        "ties": lambda: random.integers(-2, 3, shape) * 0.25,
        "zeros": lambda: np.zeros(shape),
        "tiny": lambda: 1e-41 * random.standard_normal(shape),
    }
    return np.asarray(makers[kind](), np.float32)


def some_tensors(kind: str, seed: int, schema: Schema) -> dict[str, Any]:
    return {
        name: some_values(kind, seed + number, shape) for number, (name, shape) in enumerate(schema.tensors)
    }


def refusal(codec: CodecSpec, schema: Schema, payload: bytes) -> FrameError:
    with pytest.raises(FrameError) as caught:
        decode(codec, schema, payload)
    return caught.value


# The reference.


def chunk_positions(shape: tuple[int, ...]) -> list[list[int]]:
    """Flat positions of each chunk's values, in the order of the frame."""
    size = int(np.prod(shape))
    if len(shape) == 2 and min(shape) >= 64:
        rows, columns = shape
        bands = []
        for side in shape:
            whole = side - side % 64
            bands.append(
                [[(start, start + 64) for start in range(0, whole, 64)], [(whole, side)][: side % 64]]
            )
        return [
            [row * columns + column for row in range(*down) for column in range(*across)]
            for downs in bands[0]
            for acrosses in bands[1]
            for down in downs
            for across in acrosses
        ]
    return [list(range(start, min(start + 4096, size))) for start in range(0, size, 4096)]


def reference_values(codec: CodecSpec, shape: tuple[int, ...], payload: bytes) -> list[float]:
    size = int(np.prod(shape))
    if codec.kind == "dense":
        return list(struct.unpack(f"<{size}f", payload))
    if size < 4096:
        return list(struct.unpack(f"<{size}e", payload))
    values = [0.0] * size
    for positions in chunk_positions(shape):
        if codec.kind == "sign":
            split = -(-len(positions) // 8)
            (magnitude,) = struct.unpack("<e", payload[split : split + 2])
            for place, position in enumerate(positions):
                values[position] = -magnitude if payload[place // 8] >> place % 8 & 1 else magnitude
            payload = payload[split + 2 :]
        elif codec.kind == "bits":
            assert codec.bits is not None
            width, groups = codec.bits, -(-len(positions) // 64)
            split = -(-width * len(positions) // 8)
            codes = int.from_bytes(payload[:split], "little")
            largest = struct.unpack(f"<{groups}e", payload[split : split + 2 * groups])
            for place, position in enumerate(positions):
                code = codes >> width * place & (1 << width) - 1
                step = np.float32(largest[place // 64]) / np.float32((1 << width - 1) - 1)
                values[position] = float(np.float32(code - (code >> width - 1 << width)) * step)
            payload = payload[split + 2 * groups :]
        else:
            assert codec.kept is not None
            k = min(codec.kept, len(positions))
            ends = -(-12 * k // 8), -(-2 * k // 8)
            indices = int.from_bytes(payload[: ends[0]], "little")
            codes = int.from_bytes(payload[ends[0] : sum(ends)], "little")
            magnitudes = struct.unpack("<2e", payload[sum(ends) : sum(ends) + 4])
            for place in range(k):
                code = codes >> 2 * place & 3
                value = magnitudes[code >> 1]
                values[positions[indices >> 12 * place & 0xFFF]] = -value if code & 1 else value
            payload = payload[sum(ends) + 4 :]
    assert payload == b""
    return values


@given(codecs, shapes, kinds, seeds)
@settings(max_examples=60, deadline=None)
def test_frame_says_what_the_written_layout_says(
    codec: CodecSpec, shape: tuple[int, ...], kind: str, seed: int
) -> None:
    schema = Schema((("t", shape),))
    payload = encode(codec, schema, some_tensors(kind, seed, schema))
    expected = np.array(reference_values(codec, shape, payload), np.float32).reshape(shape)
    assert np.array_equal(decode(codec, schema, payload)["t"], expected)


# What every codec promises.


@given(codecs, schemas, kinds, seeds)
@settings(max_examples=60, deadline=None)
def test_frame_has_exactly_the_length_the_schema_says(
    codec: CodecSpec, schema: Schema, kind: str, seed: int
) -> None:
    payload = encode(codec, schema, some_tensors(kind, seed, schema))
    assert len(payload) == frame_length(codec, schema)
    for wrong in (payload[:-1], payload + b"\0", b"", payload * 2):
        assert refusal(codec, schema, wrong).reason is FrameReason.WRONG_LENGTH


@given(codecs, schemas, kinds, seeds)
@settings(max_examples=60, deadline=None)
def test_decoded_update_encodes_to_itself(codec: CodecSpec, schema: Schema, kind: str, seed: int) -> None:
    decoded = decode(codec, schema, encode(codec, schema, some_tensors(kind, seed, schema)))
    again = decode(codec, schema, encode(codec, schema, decoded))
    assert list(decoded) == [name for name, _ in schema.tensors]
    for name, shape in schema.tensors:
        assert decoded[name].shape == shape
        assert decoded[name].dtype == np.float32
        assert np.array_equal(decoded[name], again[name])


@given(codecs, shapes, st.sampled_from(["gaussian", "heavy", "ties", "zeros"]), seeds)
@settings(max_examples=60, deadline=None)
def test_what_is_left_for_error_feedback_is_never_larger_than_the_update(
    codec: CodecSpec, shape: tuple[int, ...], kind: str, seed: int
) -> None:
    schema = Schema((("t", shape),))
    values = some_values(kind, seed, shape)
    rest = values - decode(codec, schema, encode(codec, schema, {"t": values}))["t"]
    assert np.linalg.norm(rest) <= np.linalg.norm(values) * (1 + 1e-3)


@given(codecs, schemas, seeds, st.data())
@settings(max_examples=100, deadline=None)
def test_changed_bytes_give_finite_tensors_or_a_frame_error(
    codec: CodecSpec, schema: Schema, seed: int, data: st.DataObject
) -> None:
    payload = bytearray(encode(codec, schema, some_tensors("gaussian", seed, schema)))
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    assert_finite_or_refused(codec, schema, payload)


@given(codecs, schemas, seeds)
@settings(max_examples=60, deadline=None)
def test_random_bytes_give_finite_tensors_or_a_frame_error(
    codec: CodecSpec, schema: Schema, seed: int
) -> None:
    assert_finite_or_refused(codec, schema, np.random.default_rng(seed).bytes(frame_length(codec, schema)))


def assert_finite_or_refused(codec: CodecSpec, schema: Schema, payload: bytes | bytearray) -> bool:
    try:
        decoded = decode(codec, schema, payload)
    except FrameError:
        return False
    assert all(np.isfinite(tensor).all() for tensor in decoded.values())
    assert {name: tensor.shape for name, tensor in decoded.items()} == dict(schema.tensors)
    return True


def hammer(num_frames: int) -> int:
    """Read frames of one tile, half random, half genuine with three bytes changed; how many were accepted."""
    random = np.random.default_rng(0)
    genuine = encode(SPARSE, TILE, some_tensors("gaussian", 0, TILE))
    accepted = 0
    for number in range(num_frames):
        frame = bytearray(random.bytes(len(genuine)) if number % 2 else genuine)
        for position in random.integers(0, len(frame), 3):
            frame[position] = random.integers(256)
        accepted += assert_finite_or_refused(SPARSE, TILE, frame)
    return accepted


def test_thousands_of_hostile_frames_are_refused_or_read() -> None:
    assert 0 < hammer(4_000) < 2_000


@pytest.mark.slow
def test_a_hundred_thousand_hostile_frames_are_refused_or_read() -> None:
    assert 0 < hammer(100_000) < 50_000


@pytest.mark.parametrize("codec", [SPARSE, SIGN, FOUR, EIGHT, DENSE], ids=str)
def test_frame_of_another_schema_or_length_costs_no_memory(codec: CodecSpec) -> None:
    huge = Schema((("w", (1_000_000, 1_000_000)),))
    tracemalloc.start()
    try:
        assert refusal(codec, huge, bytes(116)).reason is FrameReason.WRONG_LENGTH
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("codec", [SPARSE, CodecSpec("sparse", 4096), SIGN, FOUR, EIGHT, DENSE], ids=str)
def test_decoding_needs_the_tensors_and_one_batch(codec: CodecSpec) -> None:
    schema = Schema((("w", (1024, 2048)),))
    payload = encode(codec, schema, some_tensors("gaussian", 0, schema))
    tracemalloc.start()
    try:
        decode(codec, schema, payload)
        batch_bytes = 256 * 4096 * 40
        assert tracemalloc.get_traced_memory()[1] < 4 * schema.num_values + batch_bytes
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("codec", [SPARSE, SIGN, FOUR, EIGHT, DENSE], ids=str)
def test_bands_decoded_alone_are_the_tensors_decoded_whole(
    codec: CodecSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Matrices with edges on both sides, a vector with a rest, small tensors; from memory and from a file."""
    monkeypatch.setattr(codec_module, "BAND_VALUES", 5000)
    shapes = (("z", (200, 130)), ("tall", (300, 64)), ("flat", (9, 1500)), ("v", (13000,)), ("s", ()))
    schema = Schema(shapes)
    payload = encode(codec, schema, some_tensors("gaussian", 0, schema))
    whole = decode(codec, schema, payload)
    (tmp_path / "payload").write_bytes(payload)
    with (tmp_path / "payload").open("rb") as file:
        frames = [
            UpdateFrame(codec, schema, one) for one in (np.frombuffer(payload, np.uint8), FileBytes(file))
        ]
        seen = dict.fromkeys(whole, 0)
        for name, band in schema.bands():
            assert band.start == seen[name]
            seen[name] = band.stop
            for frame in frames:
                assert frame.read(name, band).tobytes() == whole[name].reshape(-1)[band].tobytes()
    assert seen == {name: tensor.size for name, tensor in whole.items()}
    assert len(list(schema.bands())) > len(shapes)


def test_same_update_gives_the_same_bytes_on_every_cpu() -> None:
    """Hashes seen with and without AVX-512, AVX2 and FMA; a random generator could change with numpy."""
    schema = Schema((("a", (130, 200)), ("b", (5000,)), ("c", (3, 3))))
    tensors = {}
    for name, shape in schema.tensors:
        integers = np.arange(1, np.prod(shape) + 1, dtype=np.uint64) * np.uint64(2654435761)
        uniform = (integers % np.uint64(65521)).astype(np.float32).reshape(shape) / np.float32(65536) - 0.5
        tensors[name] = uniform * uniform * uniform
    hashes = [
        content_hash(encode(codec, schema, tensors))[:16] for codec in (SPARSE, SIGN, DENSE, FOUR, EIGHT)
    ]
    assert hashes == [
        "815dc9d62af9f040",
        "f656addff9955610",
        "0ba9e4d6bdd0e6ee",
        "fd8e9c00c1ea88d7",
        "1a0845cd5f7d2ebc",
    ]


def test_memory_layout_of_the_input_does_not_matter() -> None:
    values = some_values("gaussian", 0, (128, 70))
    schema = Schema((("w", (128, 70)),))
    for codec in (SPARSE, SIGN, FOUR, EIGHT, DENSE):
        assert encode(codec, schema, {"w": np.asfortranarray(values)}) == encode(codec, schema, {"w": values})


# Lengths that the protocol states.


def test_sparse_takes_116_bytes_and_sign_514_for_4096_values() -> None:
    assert frame_length(SPARSE, TILE) == 116
    assert frame_length(SIGN, TILE) == 514
    assert frame_length(DENSE, TILE) == 16384
    assert frame_length(FOUR, TILE) == 2048 + 128
    assert frame_length(EIGHT, TILE) == 4096 + 128
    whole = Schema((("up", (512, 2048)), ("down", (2048, 512)), ("table", (8, 4096))))
    assert frame_length(SPARSE, whole) == 116 * whole.num_values // 4096


def test_tensor_under_4096_values_is_fp16() -> None:
    schema = Schema((("gain", (384,)), ("w", (63, 65))))
    assert frame_length(SPARSE, schema) == frame_length(SIGN, schema) == 2 * (384 + 63 * 65)
    tensors = some_tensors("gaussian", 1, schema)
    decoded = decode(SPARSE, schema, encode(SPARSE, schema, tensors))
    for name, tensor in tensors.items():
        assert np.array_equal(decoded[name], tensor.astype(np.float16).astype(np.float32))


def test_edge_tiles_keep_at_most_the_values_they_have() -> None:
    corner = Schema((("w", (65, 65)),))
    one_column = 96 + 16 + 4
    corner_value = 2 + 1 + 4
    assert frame_length(SPARSE, corner) == 116 + 2 * one_column + corner_value
    assert frame_length(SIGN, corner) == 514 + 2 * (8 + 2) + (1 + 2)


# What each codec keeps.


@given(kinds, seeds, st.sampled_from([1, 3, 64, 255]))
@settings(max_examples=40, deadline=None)
def test_sparse_keeps_the_largest_of_each_chunk_and_of_equals_the_first(kind: str, seed: int, k: int) -> None:
    shape = (70, 129)
    schema = Schema((("t", shape),))
    values = some_values(kind, seed, shape)
    payload = encode(CodecSpec("sparse", k), schema, {"t": values})
    for positions in chunk_positions(shape):
        kept = min(k, len(positions))
        by_size = sorted(
            range(len(positions)), key=lambda place: (-abs(values.flat[positions[place]]), place)
        )
        ends = -(-12 * kept // 8), -(-2 * kept // 8)
        indices = int.from_bytes(payload[: ends[0]], "little")
        assert [indices >> 12 * place & 0xFFF for place in range(kept)] == sorted(by_size[:kept])
        payload = payload[sum(ends) + 4 :]


@given(st.sampled_from(["gaussian", "heavy", "ties"]), seeds, st.sampled_from([1, 2, 5, 9]))
@settings(max_examples=40, deadline=None)
def test_sparse_magnitudes_are_the_best_two_by_least_squares(kind: str, seed: int, k: int) -> None:
    values = some_values(kind, seed, (64, 64))
    decoded = decode(CodecSpec("sparse", k), TILE, encode(CodecSpec("sparse", k), TILE, {"w": values}))["w"]
    kept = np.sort(np.abs(values[decoded != 0]).astype(np.float64))
    error = np.sum((np.abs(values[decoded != 0]) - np.abs(decoded[decoded != 0])) ** 2)
    best = min(
        sum(np.sum((part - part.mean()) ** 2) for part in (kept[:split], kept[split:]) if len(part))
        for split in range(len(kept) + 1)
    )
    half_rounding = np.sum((kept * 2**-10) ** 2)
    assert error <= best + half_rounding + 1e-12


@given(st.sampled_from(["gaussian", "heavy"]), seeds, st.sampled_from([(64, 64), (70, 129), (5000,)]))
@settings(max_examples=40, deadline=None)
def test_sign_keeps_every_sign_and_the_mean_magnitude_of_real_values(
    kind: str, seed: int, shape: tuple[int, ...]
) -> None:
    values = some_values(kind, seed, shape)
    schema = Schema((("t", shape),))
    decoded = decode(SIGN, schema, encode(SIGN, schema, {"t": values}))["t"].reshape(-1)
    assert np.array_equal(decoded < 0, values.reshape(-1) < 0)
    for positions in chunk_positions(shape):
        chunk = np.abs(values.reshape(-1)[positions]).astype(np.float64)
        magnitude = abs(float(decoded[positions[0]]))
        assert magnitude == pytest.approx(chunk.mean(), rel=1e-3, abs=6e-8)
        # The least-squares bound of a one-bit code: what is left is the spread of the magnitudes.
        rest = np.linalg.norm(values.reshape(-1)[positions] - decoded[positions])
        assert rest <= np.sqrt(len(chunk)) * (chunk.std() + 1e-3 * chunk.mean() + 6e-8)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40))
@settings(max_examples=60, deadline=None)
def test_dense_is_exact_to_the_bit(values: list[float]) -> None:
    tensor = np.array(values, np.float32)
    schema = Schema((("t", tensor.shape),))
    payload = encode(DENSE, schema, {"t": tensor})
    assert payload == tensor.astype("<f4").tobytes()
    assert decode(DENSE, schema, payload)["t"].tobytes() == tensor.tobytes()


@pytest.mark.parametrize("codec", [SPARSE, SIGN, FOUR, EIGHT, DENSE], ids=str)
def test_update_of_zeros_is_legal(codec: CodecSpec) -> None:
    schema = Schema((("w", (65, 64)), ("b", (9,))))
    decoded = decode(codec, schema, encode(codec, schema, some_tensors("zeros", 0, schema)))
    assert not any(tensor.any() for tensor in decoded.values())
    frame = bytes(frame_length(codec, schema))
    if codec.kind != "sparse":
        assert not any(tensor.any() for tensor in decode(codec, schema, frame).values())


@pytest.mark.parametrize("codec", [SPARSE, SIGN], ids=str)
def test_values_beyond_fp16_saturate(codec: CodecSpec) -> None:
    schema = Schema((("w", (64, 64)), ("b", (2,))))
    tensors = {"w": np.full((64, 64), -3e38, np.float32), "b": np.array([1e30, -65519], np.float32)}
    decoded = decode(codec, schema, encode(codec, schema, tensors))
    assert decoded["w"].min() == -65504
    assert decoded["b"].tolist() == [65504, -65504]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("codec", [SPARSE, SIGN, FOUR, EIGHT, DENSE], ids=str)
def test_diverged_update_is_refused_before_it_is_sent(codec: CodecSpec, bad: float) -> None:
    values = some_values("gaussian", 0, (64, 64))
    values[3, 5] = bad
    with pytest.raises(FrameError, match="w: expected finite values, found 1 ") as caught:
        encode(codec, TILE, {"w": values})
    assert caught.value.reason is FrameReason.NOT_FINITE


@pytest.mark.parametrize(
    "tensors",
    [
        {},
        {"v": np.zeros((64, 64), np.float32)},
        {"w": np.zeros((64, 65), np.float32)},
        {"w": np.zeros((64, 64))},
        {"w": np.zeros((64, 64), np.float32), "v": np.zeros(1, np.float32)},
    ],
)
def test_tensors_of_another_schema_are_not_encoded(tensors: dict[str, Any]) -> None:
    with pytest.raises(FrameError) as caught:
        encode(SPARSE, TILE, tensors)
    assert caught.value.reason is FrameReason.SCHEMA_MISMATCH


# Hostile frames, one by one.


def sparse_frame(
    indices: list[int] | None = None, magnitudes: tuple[float, float] = (1.0, 2.0), codes: bytes = bytes(16)
) -> bytes:
    packed = sum(index << 12 * place for place, index in enumerate(indices or list(range(64))))
    return packed.to_bytes(96, "little") + codes + struct.pack("<2e", *magnitudes)


def test_hand_written_frame_is_read() -> None:
    decoded = decode(SPARSE, TILE, sparse_frame(list(range(4032, 4096)), codes=b"\xe4" * 16))["w"].reshape(-1)
    assert not decoded[:4032].any()
    assert decoded[4032:4036].tolist() == [1.0, -1.0, 2.0, -2.0]


@pytest.mark.parametrize(
    "indices",
    [
        [0, *range(63)],
        [1, 0, *range(2, 64)],
        [*range(63), 62],
        [*range(1, 64), 0],
    ],
    ids=["repeated first", "swapped", "repeated last", "wrapped"],
)
def test_indices_that_do_not_ascend_are_refused(indices: list[int]) -> None:
    error = refusal(SPARSE, TILE, sparse_frame(indices))
    assert error.reason is FrameReason.INDEX_ORDER
    assert error.sentence.startswith("w, chunk 0: ")
    assert isinstance(error, WireError)


def test_index_beyond_an_edge_chunk_is_refused_and_the_chunk_named() -> None:
    schema = Schema((("v", (4096 + 100,)),))
    good = encode(SPARSE, schema, some_tensors("gaussian", 0, schema))
    bad = good[:116] + sparse_frame([*range(63), 100])
    error = refusal(SPARSE, schema, bad)
    assert error.reason is FrameReason.INDEX_RANGE
    assert error.sentence.startswith("v, chunk 1: an index is not under 100")


@pytest.mark.parametrize(
    "magnitudes",
    [
        (np.nan, 1.0),
        (0.0, np.nan),
        (0.0, np.inf),
        (-np.inf, 0.0),
        (-1.0, 1.0),
        (-0.0, 1.0),
        (2.0, 1.0),
        (-6e-8, 0.0),
    ],
)
def test_bad_magnitudes_are_refused(magnitudes: tuple[float, float]) -> None:
    assert refusal(SPARSE, TILE, sparse_frame(magnitudes=magnitudes)).reason is FrameReason.BAD_MAGNITUDE
    sign = bytes(512) + struct.pack("<e", magnitudes[0])
    if not magnitudes[0] >= 0 or str(magnitudes[0]) == "-0.0":
        assert refusal(SIGN, TILE, sign).reason is FrameReason.BAD_MAGNITUDE


@pytest.mark.parametrize("magnitudes", [(6e-8, 6e-8), (0.0, 65504.0), (1.0, 1.0)])
def test_equal_tiny_and_largest_magnitudes_are_legal(magnitudes: tuple[float, float]) -> None:
    decoded = decode(SPARSE, TILE, sparse_frame(magnitudes=magnitudes, codes=b"\xaa" * 16))["w"]
    assert decoded.max() == np.float32(np.float16(magnitudes[1]))


@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7E00, 0x7C01])
def test_small_tensor_with_nan_or_infinity_is_refused(bits: int) -> None:
    schema = Schema((("gain", (2,)),))
    error = refusal(SIGN, schema, struct.pack("<2H", 0, bits))
    assert error.reason is FrameReason.NOT_FINITE
    assert "gain" in error.sentence


@pytest.mark.parametrize("bits", [0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001])
def test_dense_with_nan_or_infinity_is_refused(bits: int) -> None:
    schema = Schema((("gain", (2,)),))
    assert refusal(DENSE, schema, struct.pack("<2I", 0, bits)).reason is FrameReason.NOT_FINITE


def test_bits_that_no_encoder_writes_are_refused() -> None:
    codec, tail = CodecSpec("sparse", 3), Schema((("v", (4099,)),))
    good = encode(codec, TILE, some_tensors("gaussian", 0, TILE))
    assert len(good) == 5 + 1 + 4
    for position, bit in ((4, 0x10), (4, 0x80), (5, 0x40), (5, 0x80)):
        bad = bytearray(good)
        bad[position] |= bit
        assert refusal(codec, TILE, bytes(bad)).reason is FrameReason.PADDING
    last = bytearray(encode(SIGN, tail, some_tensors("gaussian", 0, tail)))
    last[514] |= 0x08
    assert refusal(SIGN, tail, bytes(last)).reason is FrameReason.PADDING


def test_bits_keep_every_value_within_half_a_step_of_its_row() -> None:
    rows = np.array([0.001, 0.01, 0.1, 1], np.float32).repeat(16)[:, None]
    values = rows * some_values("gaussian", 3, (64, 64))
    for codec, most in ((FOUR, 7), (EIGHT, 127)):
        decoded = decode(codec, TILE, encode(codec, TILE, {"w": values}))["w"]
        step = np.abs(values).max(axis=1, keepdims=True) / most
        assert (np.abs(decoded - values) <= 0.51 * step).all()


@pytest.mark.parametrize("codec", [FOUR, EIGHT], ids=str)
def test_the_lowest_code_and_padding_that_no_encoder_writes_are_refused(codec: CodecSpec) -> None:
    assert codec.bits is not None
    frame = bytearray(frame_length(codec, TILE))
    frame[0] = 1 << codec.bits - 1
    assert refusal(codec, TILE, bytes(frame)).reason is FrameReason.CODE_RANGE
    tail = Schema((("v", (4097,)),))
    last = bytearray(encode(FOUR, tail, some_tensors("gaussian", 0, tail)))
    last[2048 + 128] |= 0x10
    assert refusal(FOUR, tail, bytes(last)).reason is FrameReason.PADDING
    step = bytearray(frame_length(codec, TILE))
    step[-1] = 0x80
    assert refusal(codec, TILE, bytes(step)).reason is FrameReason.BAD_MAGNITUDE


@pytest.mark.parametrize("payload", [b"\x80\x04\x95pickle.", b"PK\x03\x04" + bytes(112)])
def test_pickle_or_zip_is_just_a_wrong_frame(payload: bytes) -> None:
    assert refusal(SPARSE, TILE, payload).reason in (FrameReason.WRONG_LENGTH, FrameReason.INDEX_ORDER)


# Names and settings.


@pytest.mark.parametrize(
    "text", ["sparse:64", "sparse:1", "sparse:4096", "sign", "bits:4", "bits:8", "dense"]
)
def test_codec_reads_back_from_its_text(text: str) -> None:
    assert str(CodecSpec.parse(text)) == text


def test_sparse_without_a_number_keeps_64() -> None:
    assert CodecSpec.parse("sparse") == CodecSpec("sparse") == CodecSpec("sparse", 64)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "sparse:",
        "sparse:0",
        "sparse:4097",
        "sparse:-1",
        "sparse:6.4",
        "sign:3",
        "bits",
        "bits:1",
        "dense:8",
        "sparse:064",
        "Sign",
        "sparse:٣",
        "top",
    ],
)
def test_unknown_codec_is_a_recipe_error(text: str) -> None:
    with pytest.raises(RecipeError, match="sparse:K"):
        CodecSpec.parse(text)


def test_schema_hash_sees_names_shapes_and_order() -> None:
    schemas = [
        Schema((("a", (2, 3)), ("b", ()))),
        Schema((("b", ()), ("a", (2, 3)))),
        Schema((("a", (3, 2)), ("b", ()))),
        Schema((("a", (2, 3)), ("c", ()))),
    ]
    assert len({schema.schema_hash() for schema in schemas}) == 4
    assert Schema.of({"a": np.zeros((2, 3), np.float32), "b": np.zeros((), np.float32)}) == schemas[0]


@pytest.mark.parametrize("tensors", [(("a", (1,)), ("a", (2,))), (("a", (0, 3)),), (("a", (-1,)),)])
def test_schema_with_repeated_names_or_empty_sides_is_refused(tensors: Any) -> None:
    with pytest.raises(FrameError):
        Schema(tensors)


def test_codec_needs_numpy_and_nothing_else() -> None:
    without = "import sys; sys.modules.update(dict.fromkeys(['torch', 'blake3', 'cryptography', 'pydantic']))"
    subprocess.run([sys.executable, "-c", f"{without}; import blocktrain.wire.codec"], check=True, timeout=60)
