"""Tokens to text while they arrive: whole characters only, nothing of a stop sequence.

Knows bytes, stop sequences and UTF-8; knows nothing of models, requests or HTTP. Promise: the pieces of
a `TextStream` joined together are the same text for any way of cutting the tokens into pieces.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Literal

FinishReason = Literal["stop", "length"]


class TextStream:
    """Takes tokens as byte strings and gives text; ends at the first stop sequence, which is left out.

    What could still become a stop sequence, or is the front part of a character, is held back until more
    arrives. Bytes that are not UTF-8 come out as U+FFFD.
    """

    def __init__(self, stops: Iterable[str] = (), min_tokens: int = 0) -> None:
        """Stop sequences are looked for behind the first `min_tokens` tokens."""
        self.stops = [stop.encode() for stop in stops if stop]
        self._unstoppable = min_tokens
        self.stopped = False
        self.kept_tokens = 0
        """Tokens whose bytes all lie in front of the stop sequence, among those released so far."""
        self._held: list[bytes] = []
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, tokens: Iterable[bytes]) -> str:
        """The text that can be shown now. After a stop, nothing more comes out."""
        if self.stopped:
            return ""
        come = list(tokens)
        shown = ""
        if self._unstoppable:
            free, come = come[: self._unstoppable], come[self._unstoppable :]
            self._unstoppable -= len(free)
            self._held.extend(free)
            shown = self._release(b"".join(free))
        # Bytes, not characters: a stop sequence may begin inside a token, and a character span two of them.
        self._held.extend(come)
        held = b"".join(self._held)
        cut = first_stop(held, self.stops)
        self.stopped = cut is not None
        return shown + self._release(held[: len(held) - held_back(held, self.stops) if cut is None else cut])

    def finish(self) -> str:
        """What was held back, once no more tokens come."""
        text = "" if self.stopped else self._release(b"".join(self._held))
        return text + self._decoder.decode(b"", final=True)

    def _release(self, shown: bytes) -> str:
        # A token counts once all its bytes are shown, so usage is the same for every way of cutting chunks.
        left = len(shown)
        while self._held and len(self._held[0]) <= left:
            left -= len(self._held.pop(0))
            self.kept_tokens += 1
        if left:
            self._held[0] = self._held[0][left:]
        return self._decoder.decode(shown)


def first_stop(text: bytes, stops: Sequence[bytes]) -> int | None:
    """Where the stop sequence that is complete first begins: judged by its end, so that the answer is the
    same whether the text came at once or byte by byte."""
    ends = [(place + len(stop), place) for stop in stops if (place := text.find(stop)) >= 0]
    return min(ends)[1] if ends else None


def held_back(text: bytes, stops: Sequence[bytes]) -> int:
    """How many bytes at the end may be the front of a stop sequence."""
    longest = max((len(stop) - 1 for stop in stops), default=0)
    for size in range(min(longest, len(text)), 0, -1):
        tail = text[len(text) - size :]
        if any(stop.startswith(tail) for stop in stops):
            return size
    return 0


def token_label(token: bytes) -> str:
    """A token as the API shows it: its text, or `bytes:\\xe2` as OpenAI writes part of a character."""
    try:
        return token.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


class Offsets:
    """At which character of the text each token begins; parts of one character share its offset."""

    def __init__(self) -> None:
        self.place = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def of(self, tokens: Iterable[bytes]) -> list[int]:
        """Offsets of the tokens that follow those given before."""
        offsets = []
        for token in tokens:
            offsets.append(self.place)
            self.place += len(self._decoder.decode(token))
        return offsets
