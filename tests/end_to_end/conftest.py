from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

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
