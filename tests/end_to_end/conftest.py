from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from blocktrain.data.bpe import train_bpe
from blocktrain.data.dataset import Dataset
from blocktrain.data.prepare import PrepareOptions, prepare
from tests.end_to_end.swarm_kit import Kit


@pytest.fixture
def kit(tmp_path: Path) -> Iterator[Kit]:
    kit = Kit(tmp_path)
    yield kit
    kit.close()


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small text with something to learn in it."""
    words = [hashlib.sha256(bytes([n])).hexdigest()[: 3 + n % 5] for n in range(40)]
    order = hashlib.shake_128(b"text").digest(12_000)
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(" ".join(words[byte % 40] for byte in order))
    return path


@pytest.fixture(scope="session")
def dataset(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Some documents as BPE tokens in several small shards."""
    folder = tmp_path_factory.mktemp("dataset")
    words = text.read_text().split(" ")
    (folder / "texts").mkdir()
    for n in range(0, len(words), 100):
        (folder / "texts" / f"{n:06d}.txt").write_text(f"{n} " + " ".join(words[n : n + 100]))
    (folder / "tokenizer.json").write_bytes(train_bpe([text.read_text()], 300))
    options = PrepareOptions(
        sources=(str(folder / "texts"),),
        tokenizer=str(folder / "tokenizer.json"),
        shard_tokens=4096,
        held_out=0.1,
        pooling=0.05,
    )
    prepare(options, folder / "set", processes=1, watch=lambda *_: None)
    return Dataset.open(folder / "set")
