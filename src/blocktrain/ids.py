"""Typed ids and seeds derived from names, the same on every machine and Python version."""

from __future__ import annotations

import hashlib
from typing import NewType

CorpusHash = NewType("CorpusHash", str)


def derive_seed(*parts: str | int) -> int:
    """A 63-bit seed for a purpose, for instance derive_seed("noise", run_seed, block, step)."""
    # With its type: the block 1 and the name "1" have different seeds. The separator keeps "a", "bc" and
    # "ab", "c" apart.
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    # 63 bits: torch and numpy both take it, and no sign gets in the way.
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
