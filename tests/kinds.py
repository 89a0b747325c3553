"""A dataset of two kinds of text, clustered: sentences of few words, and lines of numbers."""

from __future__ import annotations

import hashlib
from pathlib import Path

from blocktrain.data.dataset import BYTE_SEPARATOR, Dataset, Manifest, ShardEntry
from tests.tiny import prose


def numbers(num_bytes: int, seed: int = 0) -> bytes:
    """Lines of sums: as easy to learn as prose, and of hardly a byte in common with it."""
    drawn = hashlib.shake_128(f"numbers {seed}".encode()).digest(num_bytes // 2)
    pairs = zip(drawn[::2], drawn[1::2], strict=False)
    return b"\n".join(f"{a}+{b}={a + b};".encode() for a, b in pairs)[:num_bytes]


KINDS = (prose, numbers)


def held_out_text(kind: int) -> bytes:
    return KINDS[kind](12_000, seed=1000)


def two_kinds(folder: Path) -> Dataset:
    """Two training shards of each kind, and a pooling and a held-out shard of each."""
    folder.mkdir(parents=True, exist_ok=True)

    def entry(name: str, text: bytes, cluster: int) -> ShardEntry:
        (folder / name).write_bytes(text)
        sha256, count = hashlib.sha256(text).hexdigest(), len(text)
        return ShardEntry(name=name, sha256=sha256, tokens=count, documents=1, bytes=count, cluster=cluster)

    manifest = Manifest(
        tokenizer="byte",
        vocabulary=256,
        separator=BYTE_SEPARATOR,
        clusters=2,
        left_out=0,
        training=tuple(entry(f"train-{n:05d}.bin", KINDS[n % 2](20_000, seed=n), n % 2) for n in range(4)),
        pooling=tuple(entry(f"pool-{n:05d}.bin", KINDS[n](6_000, seed=500), n) for n in range(2)),
        held_out=tuple(entry(f"held-{n:05d}.bin", held_out_text(n), n) for n in range(2)),
    )
    (folder / "dataset.json").write_bytes(manifest.to_bytes())
    return Dataset.open(folder)
