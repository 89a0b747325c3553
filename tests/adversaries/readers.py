"""Every function that reads a stranger's bytes, with samples of what it should get.

A reader takes any bytes and returns whether they meant something to it; the errors it is meant to raise count
as "no". Anything else it raises is a finding. The default suite feeds them random and mutated bytes,
`benchmarks/fuzz.py` lets a coverage-guided fuzzer loose on them.
"""

from __future__ import annotations

import hashlib
import json
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec
import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import BaseModel, TypeAdapter, ValidationError

from blocktrain.codec_spec import CodecSpec
from blocktrain.config import Recipe, resolve_recipe
from blocktrain.coordinator.http.downloads import byte_range
from blocktrain.coordinator.http.signed_requests import invalid_message
from blocktrain.coordinator.refusals import Refusal
from blocktrain.data.dataset import Manifest, ShardEntry, check_shard, read_manifest
from blocktrain.errors import DataError, RecipeError
from blocktrain.serving.gateway import openai_messages, responses
from blocktrain.training.snapshot import SnapshotError, from_safetensors, to_safetensors
from blocktrain.wire import frame_metadata, frames, messages
from blocktrain.wire.codec import FrameError, Schema, decode, encode, frame_length
from blocktrain.wire.identity import Identity
from blocktrain.wire.signing import SignatureError, body_digest, sign_request, verify_request
from blocktrain.wire.tokens import is_stamp, make_invite, read_invite

NOW = 1_800_000_000.0
AUDIENCE = "ab" * 32
SCHEMA = Schema((("bias", (7,)), ("table", (5000,)), ("weight", (70, 130))))
"""Dense fp16, contiguous chunks with a rest, and tiles with both kinds of edge."""
CODECS = tuple(map(CodecSpec.parse, ("sparse:64", "sparse:3", "sign", "bits:4", "bits:8", "dense")))
LIMITS = frames.FrameLimits(payload_bytes=1 << 14)
VOCABULARY = 256
IDENTITY = Identity(Ed25519PrivateKey.from_private_bytes(bytes(range(32))))
"""Known to everybody: what the fuzzer finds today must fail tomorrow too."""


@dataclass(frozen=True)
class Reader:
    name: str
    read: Callable[[bytes], bool]
    samples: tuple[bytes, ...]
    """What a sound peer sends."""


# --- updates and snapshots ------------------------------------------------------------------------------


def some_tensors(seed: int = 0) -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
    generator = np.random.default_rng(seed)
    return {
        name: generator.standard_normal(shape).astype(np.float32) * np.float32(0.01)
        for name, shape in SCHEMA.tensors
    }


def codec_reader(codec: CodecSpec) -> Reader:
    length = frame_length(codec, SCHEMA)

    def read(data: bytes) -> bool:
        """Three of four inputs get the right length: one with another fails the first check."""
        if data[:1] < b"\xc0":
            data = data[:length].ljust(length, b"\0")
        try:
            tensors = decode(codec, SCHEMA, data)
        except FrameError:
            return False
        assert all(np.isfinite(tensor).all() for tensor in tensors.values())
        assert {name: tensor.shape for name, tensor in tensors.items()} == dict(SCHEMA.tensors)
        return True

    return Reader(f"update {codec}", read, (encode(codec, SCHEMA, some_tensors()),))


def read_snapshot(data: bytes) -> bool:
    try:
        tensors = from_safetensors(data, SMALL)
    except SnapshotError:
        return False
    assert all(np.isfinite(tensor).all() for tensor in tensors.values())
    return True


SMALL = Schema((("a", (3, 4)), ("b", (5,))))


def small_snapshot() -> bytes:
    return to_safetensors({name: np.ones(shape, np.float32) for name, shape in SMALL.tensors})


# --- serving frames -------------------------------------------------------------------------------------

METADATA: dict[frames.FrameType, type[msgspec.Struct]] = {
    frames.FrameType.HELLO: frame_metadata.Hello,
    frames.FrameType.WELCOME: frame_metadata.Welcome,
    frames.FrameType.REFUSED: frame_metadata.Failure,
    frames.FrameType.TRAVERSE: frame_metadata.Ask,
    frames.FrameType.SCORE: frame_metadata.Ask,
    frames.FrameType.EXACT: frame_metadata.Ask,
    frames.FrameType.FAILED: frame_metadata.Failure,
    frames.FrameType.HAND_ON: frame_metadata.Handed,
}
WIDTH = 8


def read_serving_frame(data: bytes) -> bool:
    try:
        header = frames.decode_header(data[: frames.HEADER_BYTES], LIMITS)
        frame = frames.decode_body(header, data[frames.HEADER_BYTES :])
        if frame.type in METADATA:
            frame_metadata.decode_metadata(frame, METADATA[frame.type])
        if frame.type is frames.FrameType.LOG_PROBS:
            rows = frames.decode_rows(frame.payload, frame.header.codec, frame.header.rows, VOCABULARY)
            assert np.isfinite(rows).all()
        elif frame.type is frames.FrameType.HAND_ON:
            codec = frame_metadata.decode_metadata(frame, frame_metadata.Handed).ask.activations
            values = frames.decode_activations(frame.payload, codec, frame.header.rows, WIDTH)
            assert np.isfinite(values).all()
        else:
            assert all(0 <= one < VOCABULARY for one in frames.decode_ids(frame.payload, VOCABULARY))
    except frames.ServingFrameError:
        return False
    return True


def resealed(data: bytes) -> bytes:
    """With checksums and lengths that fit, so that what lies behind them is reached."""
    data = data.ljust(frames.HEADER_BYTES, b"\0")
    body = data[frames.HEADER_BYTES :]
    metadata = min(struct.unpack_from("<I", data, 36)[0] % 4097, len(body))
    head = frames.MAGIC + bytes([frames.VERSION]) + data[5:7] + b"\0" + data[8:36]
    head += struct.pack("<III", metadata, len(body) - metadata, zlib.crc32(body))
    return head + struct.pack("<I", zlib.crc32(head)) + body


def read_resealed_frame(data: bytes) -> bool:
    return read_serving_frame(resealed(data))


def serving_samples() -> Iterator[bytes]:
    shape = frame_metadata.ModelShape("tiny", "a" * 64, "b" * 64, VOCABULARY, 64, 96, 3)
    kind, codec = frames.FrameType, frames.Codec
    for type_, metadata in (
        (kind.HELLO, frame_metadata.Hello("c" * 32, shape, "secret")),
        (kind.WELCOME, frame_metadata.Welcome(shape, [0, 2], 64, 1024)),
        (kind.TRAVERSE, frame_metadata.Ask([1], 7)),
        (kind.FAILED, frame_metadata.Failure(frame_metadata.FailureCode.BUSY, "no room")),
    ):
        yield frames.encode_frame(
            frames.Header(type_),
            frame_metadata.encode_metadata(metadata),
            frames.encode_ids([1, 2, 3], VOCABULARY),
        )
    for activations in frames.ActivationCodec:
        onward = [frame_metadata.Hop("127.0.0.1:9", [2])]
        ask = frame_metadata.Ask([1], 7, None, onward, activations)
        payload = frames.encode_activations(np.linspace(-3, 3, 2 * WIDTH).reshape(2, WIDTH), activations)
        yield frames.encode_frame(
            frames.Header(kind.HAND_ON, codec.Q16, rows=2),
            frame_metadata.encode_metadata(frame_metadata.Handed("c" * 32, kind.TRAVERSE, ask)),
            payload,
        )
    rows = np.log(np.full((2, VOCABULARY), 1 / VOCABULARY))
    for code in (codec.F32, codec.Q16, codec.Q8):
        header = frames.Header(kind.LOG_PROBS, code, 1, 2, 3, 4, 2)
        yield frames.encode_frame(header, b"", frames.encode_rows(rows, code))


# --- messages -------------------------------------------------------------------------------------------


@cache
def message_types() -> tuple[TypeAdapter[BaseModel], ...]:
    """Everything that either side parses: requests, answers and what the gateway takes."""
    found = [
        kind
        for module in (messages, openai_messages, responses)
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, BaseModel) and kind is not BaseModel
    ]
    return tuple(
        TypeAdapter(kind) for kind in sorted(set(found), key=lambda kind: (kind.__module__, kind.__name__))
    )


def read_message(data: bytes) -> bool:
    """The first byte chooses the message."""
    kinds = message_types()
    adapter = kinds[(data[0] if data else 0) % len(kinds)]
    try:
        value = adapter.validate_json(data[1:])
    except ValidationError as error:
        invalid_message(
            error.errors(include_url=False, include_input=False)
        )  # the answer must not fail either
        return False
    value.model_dump_json()
    return True


def message_samples() -> Iterator[bytes]:
    digest, worker = "0f" * 32, "0f" * 16
    gain = messages.GainReport(mean=0.1, error=0.01, windows=30)
    for value in (
        messages.JoinRequest(
            corpus_sha256=digest, versions={"torch": "2.9"}, challenge=digest, stamp="0f" * 8
        ),
        messages.AssignmentRequest(holding={"0": 3}, prefer_block=0, after=worker),
        messages.HeartbeatRequest(step=3, loss=2.5),
        messages.CommitRequest(
            payload_hash=digest, payload_bytes=9, base_hash=digest, account=messages.Account()
        ),
        messages.EvidenceReport(held_out=gain, assigned=gain, other=gain, tokens=9),
        messages.BanRequest(reason="noise", seconds=60),
        messages.Receipt(sequence=1, entry_hash=digest, signature="0f" * 64),
        openai_messages.CompletionRequest(model="tiny", prompt="a"),
        openai_messages.ChatRequest(
            model="tiny", messages=[openai_messages.ChatMessage(role="user", content="a")]
        ),
        responses.ResponsesRequest(model="tiny", input="a"),
    ):
        names = [adapter._type for adapter in message_types()]
        yield bytes([names.index(type(value))]) + value.model_dump_json(exclude_unset=True).encode()


def read_recipe(data: bytes) -> bool:
    """What a worker does with the recipe in a coordinator's answer."""
    try:
        values = json.loads(data)
        recipe = resolve_recipe(values) if isinstance(values, dict) else None
    except (ValueError, RecursionError, RecipeError):
        return False
    assert recipe is None or resolve_recipe(recipe.to_dict()) == recipe
    return recipe is not None


# --- datasets -------------------------------------------------------------------------------------------

SHARD = bytes(range(64)) * 2


def manifest(content: bytes = SHARD) -> Manifest:
    """One whose first training shard has this content and a right hash."""

    def entry(name: str, content: bytes) -> ShardEntry:
        sha256 = hashlib.sha256(content).hexdigest()
        return ShardEntry(name=name, sha256=sha256, tokens=64, documents=3, bytes=90, cluster=0)

    parts = {"training": "train", "pooling": "pool", "held_out": "held"}
    splits = {key: (entry(f"{name}-00000.bin", content + name.encode()),) for key, name in parts.items()}
    splits["training"] = (entry("train-00000.bin", content),)
    return Manifest(tokenizer="ab" * 32, vocabulary=0x4000, separator=(0,), clusters=1, left_out=0, **splits)


def read_dataset_manifest(data: bytes) -> bool:
    try:
        found = read_manifest(data)
    except DataError:
        return False
    assert found.to_bytes() == data
    assert all(Path(one.name).name == one.name for one in (*found.training, *found.held_out))
    return True


def read_shard(data: bytes) -> bool:
    """A shard that a mirror sent, whose maker also wrote the hash: what lies behind the hash is reached."""
    described = manifest(data)
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        try:
            check_shard(Path(file.name), described.training[0], described)
        except DataError:
            return False
    assert len(data) == 128
    assert max(np.frombuffer(data, "<u2")) < described.vocabulary
    return True


# --- signatures and headers -----------------------------------------------------------------------------

TARGET = "/v1/assignments?x=1"
FIELDS = ("Content-Digest", "Content-Length", "Signature-Input", "Signature")


def read_signed(data: bytes) -> bool:
    """Lines: method, target, then the signed fields."""
    method, target, *values = data.decode("latin-1").split("\n")[:6] + [""] * max(
        0, 6 - data.count(b"\n") - 1
    )
    headers = [(name, value) for name, value in zip(FIELDS, values, strict=False) if value]
    try:
        verify_request(method, target, headers, now=NOW, audience=AUDIENCE)
        return True
    except SignatureError as error:
        told = error.sentence
    assert told.isprintable()
    return False


def signed_sample() -> bytes:
    body = b"{}"
    headers = sign_request(
        IDENTITY, "POST", TARGET, now=NOW, nonce="n" * 22, content_digest=body_digest(body),
        content_length=len(body), audience=AUDIENCE,
    )  # fmt: skip
    return "\n".join(["POST", TARGET, *(headers[name] for name in FIELDS)]).encode()


def read_token(data: bytes) -> bool:
    text = data.decode("latin-1")
    return read_invite(IDENTITY.public_key, text, NOW) is not None


def read_stamp(data: bytes) -> bool:
    """Through its message, as the door does."""
    try:
        request = messages.JoinRequest.model_validate_json(data)
    except ValidationError:
        return False
    if request.challenge is None or request.stamp is None:
        return False
    is_stamp(request.challenge, request.stamp, 20)
    return True


def read_range(data: bytes) -> bool:
    try:
        start, end = byte_range(data.decode("latin-1"), 1000)
    except Refusal:
        return False
    assert 0 <= start < end <= 1000
    return True


@cache
def readers() -> tuple[Reader, ...]:
    join = messages.JoinRequest(corpus_sha256="0f" * 32, challenge="0f" * 32, stamp="0f" * 8)
    return (
        *map(codec_reader, CODECS),
        Reader("snapshot", read_snapshot, (small_snapshot(),)),
        Reader("serving frame", read_serving_frame, tuple(serving_samples())),
        Reader("serving frame with sound checksums", read_resealed_frame, tuple(serving_samples())),
        Reader("message", read_message, tuple(message_samples())),
        Reader("recipe", read_recipe, (json.dumps(Recipe().to_dict()).encode(),)),
        Reader("dataset manifest", read_dataset_manifest, (manifest().to_bytes(),)),
        Reader("dataset shard", read_shard, (SHARD,)),
        Reader("signed headers", read_signed, (signed_sample(),)),
        Reader("invitation", read_token, (make_invite(IDENTITY, NOW + 60).encode(),)),
        Reader("join with a stamp", read_stamp, (join.model_dump_json().encode(),)),
        Reader("range header", read_range, (b"bytes=0-99", b"bytes=-5", b"")),
    )
