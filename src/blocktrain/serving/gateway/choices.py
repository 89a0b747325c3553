"""What a request asks to be written, and the pieces it is written in.

A request asks for one or more choices (prompts times `n`). `write_choices` runs them side by side and
hands every piece to `emit` as it comes: an echoed prompt first, then one piece for each traversal.
Knows engines and text; knows nothing of HTTP or of OpenAI's shapes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from blocktrain.data.tokenizer import Tokenizer
from blocktrain.ids import derive_seed
from blocktrain.serving.engine.engine import Generation, TextEngine
from blocktrain.serving.engine.requests import Chunk, GenerationRequest, GenerationStats, TokenLogprob
from blocktrain.serving.gateway.limits import ChoiceTurns
from blocktrain.serving.gateway.text import FinishReason, Offsets, TextStream


@dataclass(frozen=True)
class Choice:
    index: int
    request: GenerationRequest
    stops: tuple[str, ...] = ()
    echo: bool = False
    ignore_end: bool = False
    """Write on behind the token that ends a document."""


def choice_seed(seed: int, number: int) -> int:
    """The first choice has the request's own seed, so that `n` never changes it."""
    return seed if number == 0 else derive_seed("choice", seed, number)


@dataclass(frozen=True)
class ScoredToken:
    token: bytes
    offset: int
    """The character of the choice's text at which the token begins."""
    score: TokenLogprob | None
    """None for the first token of a prompt, which nothing predicts."""


@dataclass(frozen=True)
class Piece:
    index: int
    text: str
    scored: list[ScoredToken]
    first: bool = False
    finish_reason: FinishReason | None = None


Emit = Callable[[Piece], Awaitable[None]]


@dataclass
class Totals:
    """What a request has cost so far, over all its choices."""

    completion_tokens: int = 0
    text_bytes: int = 0
    stats: list[GenerationStats] = field(default_factory=list)

    def sum(self, name: str) -> int:
        return sum(int(getattr(stats, name)) for stats in self.stats)

    @property
    def degraded_blocks(self) -> list[int]:
        return sorted({block for stats in self.stats for block in stats.degraded_blocks})


class ChoiceWriter:
    """Turns the chunks of one choice into pieces, until a stop sequence, the end of a document or the last
    token."""

    def __init__(self, choice: Choice, tokenizer: Tokenizer) -> None:
        self.choice, self.tokenizer = choice, tokenizer
        self.stream = TextStream(choice.stops, choice.request.min_tokens)
        self.end = None if choice.ignore_end else tokenizer.end
        self.offsets = Offsets()
        self.text_bytes = 0
        self.begun = False
        self._received = 0
        self._pending: list[tuple[bytes, TokenLogprob | None]] = []
        """Tokens whose text is still held back: it may become a stop sequence."""

    def echo(self, scores: Sequence[TokenLogprob] | None) -> Piece:
        """The prompt as the first piece; with nothing to generate, also the last."""
        tokens = [self.tokenizer.decode([token]) for token in self.choice.request.prompt]
        text = b"".join(tokens).decode("utf-8", "replace")
        offsets = self.offsets.of(tokens)
        rows = [] if scores is None else [None, *scores]
        scored = [ScoredToken(*row) for row in zip(tokens, offsets, rows, strict=bool(rows))]
        return self._piece(text, scored, "length" if self.choice.request.max_tokens == 0 else None)

    def add(self, chunk: Chunk) -> Piece:
        # What a model writes behind the end of a document is another document. The token itself has no text,
        # and counts as little as a stop sequence does.
        end = self.end
        ended = end is not None and end in chunk.tokens
        kept = chunk.tokens[: chunk.tokens.index(end)] if end is not None and ended else chunk.tokens
        tokens = [self.tokenizer.decode([token]) for token in kept]
        scores = chunk.logprobs[: len(kept)] if chunk.logprobs is not None else [None] * len(tokens)
        self._pending += zip(tokens, scores, strict=True)
        self._received += len(tokens)
        text = self.stream.push(tokens)
        if self.stream.stopped or ended:
            return self._generated(text + self.stream.finish(), "stop")
        if self._received >= self.choice.request.max_tokens:
            return self.finish(text)
        return self._generated(text, None)

    def finish(self, text: str = "") -> Piece:
        """The last piece, where no stop sequence came."""
        return self._generated(text + self.stream.finish(), "length")

    def _generated(self, text: str, reason: FinishReason | None) -> Piece:
        # Tokens are reported with the piece that shows their last byte, so counts and text agree.
        count = self.stream.kept_tokens - (self._received - len(self._pending))
        shown, self._pending = self._pending[:count], self._pending[count:]
        self.text_bytes += sum(len(token) for token, _ in shown)
        offsets = self.offsets.of(token for token, _ in shown)
        pairs = zip(shown, offsets, strict=True)
        return self._piece(text, [ScoredToken(token, at, score) for (token, score), at in pairs], reason)

    def _piece(self, text: str, scored: list[ScoredToken], reason: FinishReason | None) -> Piece:
        piece = Piece(self.choice.index, text, scored, not self.begun, reason)
        self.begun = True
        return piece


async def write_choices(
    engine: TextEngine, choices: Sequence[Choice], emit: Emit, totals: Totals, turns: ChoiceTurns
) -> None:
    """All choices side by side, or in turn. Every request is checked before the first piece of any."""
    # Not begun yet: a request that is wrong fails before any text is sent.
    generations = [engine.generate(c.request) if c.request.max_tokens else None for c in choices]
    totals.stats = [generation.stats for generation in generations if generation is not None]
    scoring = GenerationStats()
    totals.stats.append(scoring)
    known: dict[tuple[int, ...], list[TokenLogprob]] = {}
    turn = asyncio.Lock()

    async def prompt_scores(request: GenerationRequest) -> list[TokenLogprob] | None:
        if request.logprobs is None:
            return None
        if len(request.prompt) < 2:
            return []
        async with turn:  # the `n` choices of one prompt share its scores, computed by the first
            key = tuple(request.prompt)
            if key not in known:
                seconds = request.deadline_seconds
                known[key] = await engine.score(
                    request.prompt, top=request.logprobs, deadline_seconds=seconds, stats=scoring
                )
            return known[key]

    async def write(choice: Choice, generation: Generation | None) -> None:
        writer = ChoiceWriter(choice, engine.model.tokenizer)
        tokens = text_bytes = 0

        async def show(piece: Piece) -> None:
            nonlocal tokens, text_bytes
            # Counted piece by piece, so that a stream can say its usage so far.
            totals.completion_tokens += writer.stream.kept_tokens - tokens
            totals.text_bytes += writer.text_bytes - text_bytes
            tokens, text_bytes = writer.stream.kept_tokens, writer.text_bytes
            await emit(piece)

        if choice.echo:
            await show(writer.echo(await prompt_scores(choice.request)))
        elif generation is None:
            await show(writer.finish())
        if generation is not None:
            try:
                while (chunk := await turns.next(generation)) is not None:
                    piece = writer.add(chunk)
                    await show(piece)
                    # A stop sequence: what was drafted behind it is thrown away, and its caches are freed.
                    if piece.finish_reason is not None:
                        break
                else:
                    await show(writer.finish())
            finally:
                await generation.aclose()

    # One that fails cancels the others: half of `n` choices is no answer.
    async with asyncio.TaskGroup() as group:
        for choice, generation in zip(choices, generations, strict=True):
            group.create_task(write(choice, generation))


def joined(pieces: Sequence[Piece]) -> Piece:
    """The pieces of one choice as one."""
    text = "".join(piece.text for piece in pieces)
    scored = [token for piece in pieces for token in piece.scored]
    return Piece(pieces[0].index, text, scored, True, pieces[-1].finish_reason)


def parted(piece: Piece) -> Iterator[Piece]:
    """The text of a piece, if it has any, and then the reason for its end."""
    if piece.text or piece.scored or piece.finish_reason is None:
        yield replace(piece, finish_reason=None)
    if piece.finish_reason is not None:
        yield Piece(piece.index, "", [], finish_reason=piece.finish_reason)
