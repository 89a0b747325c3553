"""Text to tokens and back, behind the small interface that a BPE tokenizer can satisfy too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int64]


class Tokenizer(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def vocabulary(self) -> int: ...

    @property
    def end(self) -> int | None:
        """The token that ends a document; None where text alone ends one."""

    @property
    def front(self) -> Sequence[int]:
        """The tokens that `encode` puts in front of a text."""

    def encode(self, text: bytes) -> Tokens:
        """Tokens of UTF-8 text."""

    def decode(self, tokens: Iterable[int]) -> bytes:
        """The bytes the tokens stand for; they may end inside a character."""


def token_dtype(vocabulary: int) -> np.dtype[Any]:
    """How tokens lie in a shard: as narrow as they can be."""
    return np.dtype("<u1" if vocabulary <= 1 << 8 else "<u2" if vocabulary <= 1 << 16 else "<u4")


class ByteTokenizer:
    """One token per byte: nothing to train, nothing to download, every text is representable."""

    name = "byte"
    vocabulary = 256
    end = None
    front = ()

    def encode(self, text: bytes) -> Tokens:
        return np.frombuffer(text, dtype=np.uint8).astype(np.int64)

    def decode(self, tokens: Iterable[int]) -> bytes:
        return bytes(int(token) for token in tokens)
