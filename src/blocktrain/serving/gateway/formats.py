"""Pieces of text in the shapes of the two OpenAI routes, whole or as chunks of a stream."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pydantic import BaseModel

from blocktrain.data.tokenizer import Tokenizer
from blocktrain.serving.engine.requests import Mode, TokenLogprob
from blocktrain.serving.gateway.choices import Piece, ScoredToken, Totals
from blocktrain.serving.gateway.openai_messages import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprob,
    ChatLogprobs,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    TopLogprob,
    TraversalUsage,
    Usage,
)
from blocktrain.serving.gateway.text import token_label


@dataclass(frozen=True)
class Heading:
    """What every chunk of one answer repeats."""

    id: str
    created: int
    model: str
    system_fingerprint: str


def new_heading(prefix: str, model: str, model_hash: str) -> Heading:
    return Heading(f"{prefix}-{secrets.token_hex(12)}", int(time.time()), model, f"bt-{model_hash[:16]}")


class Format(Protocol):
    def whole(self, pieces: Sequence[Piece], usage: Usage) -> BaseModel: ...

    def chunk(self, piece: Piece) -> BaseModel: ...

    def usage_chunk(self, usage: Usage) -> BaseModel: ...


class CompletionFormat:
    def __init__(self, heading: Heading, tokenizer: Tokenizer, top: int | None) -> None:
        self.heading, self.tokenizer, self.top = vars(heading), tokenizer, top

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> Completion:
        return Completion(**self.heading, choices=[self._choice(piece) for piece in pieces], usage=usage)

    def chunk(self, piece: Piece) -> Completion:
        return Completion(**self.heading, choices=[self._choice(piece)])

    def usage_chunk(self, usage: Usage) -> Completion:
        return Completion(**self.heading, choices=[], usage=usage)

    def _choice(self, piece: Piece) -> CompletionChoice:
        logprobs = None if self.top is None else self._logprobs(piece.scored)
        return CompletionChoice(
            index=piece.index, text=piece.text, logprobs=logprobs, finish_reason=piece.finish_reason
        )

    def _logprobs(self, scored: Sequence[ScoredToken]) -> CompletionLogprobs:
        return CompletionLogprobs(
            tokens=[token_label(token.token) for token in scored],
            token_logprobs=[None if token.score is None else token.score.logprob for token in scored],
            top_logprobs=[self._top(token.score) for token in scored] if self.top else None,
            text_offset=[token.offset for token in scored],
        )

    def _top(self, score: TokenLogprob | None) -> dict[str, float] | None:
        """The most likely tokens and, as OpenAI does, the chosen one."""
        if score is None:
            return None
        rows = [*score.top, (score.token, score.logprob)]
        return {token_label(self.tokenizer.decode([token])): logprob for token, logprob in rows}


class ChatFormat:
    def __init__(self, heading: Heading, tokenizer: Tokenizer, top: int | None) -> None:
        self.heading, self.tokenizer, self.top = vars(heading), tokenizer, top

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> ChatCompletion:
        choices = [
            ChatChoice(
                index=piece.index,
                message=AssistantMessage(content=piece.text),
                logprobs=self._logprobs(piece),
                finish_reason=piece.finish_reason,
            )
            for piece in pieces
        ]
        return ChatCompletion(**self.heading, choices=choices, usage=usage)

    def chunk(self, piece: Piece) -> ChatChunk:
        choice = ChatChunkChoice(
            index=piece.index,
            delta=ChatDelta(role="assistant" if piece.first else None, content=piece.text),
            logprobs=self._logprobs(piece),
            finish_reason=piece.finish_reason,
        )
        return ChatChunk(**self.heading, choices=[choice])

    def usage_chunk(self, usage: Usage) -> ChatChunk:
        return ChatChunk(**self.heading, choices=[], usage=usage)

    def _logprobs(self, piece: Piece) -> ChatLogprobs | None:
        if self.top is None:
            return None
        return ChatLogprobs(content=[self._row(t.score) for t in piece.scored if t.score is not None])

    def _row(self, score: TokenLogprob) -> ChatLogprob:
        own = self._one(score.token, score.logprob)
        tops = [self._one(token, logprob) for token, logprob in score.top]
        return ChatLogprob(**vars(own), top_logprobs=tops)

    def _one(self, token: int, logprob: float) -> TopLogprob:
        raw = self.tokenizer.decode([token])
        return TopLogprob(token=token_label(raw), logprob=logprob, bytes=list(raw))


def usage_of(totals: Totals, prompt_tokens: int, mode: Mode) -> Usage:
    traversals = totals.sum("traversals")
    cost = TraversalUsage(
        mode=mode,
        traversals=traversals,
        scoring_traversals=totals.sum("scoring_traversals"),
        text_bytes=totals.text_bytes,
        bytes_per_traversal=round(totals.text_bytes / traversals, 3) if traversals else 0.0,
        drafted_tokens=totals.sum("drafted"),
        accepted_tokens=totals.sum("accepted"),
        wire_bytes_sent=totals.sum("wire_bytes_sent"),
        wire_bytes_received=totals.sum("wire_bytes_received"),
        degraded_blocks=totals.degraded_blocks,
    )
    tokens = totals.completion_tokens
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=tokens,
        total_tokens=prompt_tokens + tokens,
        blocktrain=cost,
    )
