"""Text of a model on a terminal: strangers trained it, so it may hold what a terminal would obey.

Where the output is no terminal (a pipe, a file) bytes go out as they are.
"""

from __future__ import annotations

import sys

KEPT = b"\n\t"
_BYTES = bytes(ord("?") if (n < 32 and n not in KEPT) or n == 127 else n for n in range(256))
_CHARACTERS = {n: "\N{REPLACEMENT CHARACTER}" for n in (*range(32), *range(127, 160)) if n not in KEPT}


def harmless_bytes(text: bytes) -> bytes:
    return text.translate(_BYTES)


def harmless(text: str) -> str:
    """Without escape sequences, bells and other control characters; line breaks and tabs stay."""
    return text.translate(_CHARACTERS)


def for_stdout(text: str) -> str:
    return harmless(text) if sys.stdout.isatty() else text


def bytes_for_stdout(text: bytes) -> bytes:
    return harmless_bytes(text) if sys.stdout.isatty() else text
