"""Pieces of text in the shapes of the two OpenAI routes, whole or as chunks of a stream."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import BaseModel

from blocktrain.serving.engine.requests import Mode, ModelInfo
from blocktrain.serving.gateway.choices import Piece, Totals
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


class AnswerFormat(ABC):
    prefix: ClassVar[str]

    def __init__(self, model: ModelInfo, top: int | None) -> None:
        """`top` as the request's log-probs: None for none, or how many alternatives."""
        self.tokenizer, self.top = model.tokenizer, top
        self.heading: dict[str, Any] = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model.name,
            "system_fingerprint": f"bt-{model.model_hash[:16]}",
        }
        """What every chunk of one answer repeats."""

    @abstractmethod
    def whole(self, pieces: Sequence[Piece], usage: Usage) -> BaseModel: ...

    @abstractmethod
    def chunk(self, piece: Piece) -> BaseModel: ...

    @abstractmethod
    def usage_chunk(self, usage: Usage) -> BaseModel: ...


class CompletionFormat(AnswerFormat):
    prefix = "cmpl"

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> Completion:
        return Completion(**self.heading, choices=[self._choice(piece) for piece in pieces], usage=usage)

    def chunk(self, piece: Piece) -> Completion:
        return Completion(**self.heading, choices=[self._choice(piece)])

    def usage_chunk(self, usage: Usage) -> Completion:
        return Completion(**self.heading, choices=[], usage=usage)

    def _choice(self, piece: Piece) -> CompletionChoice:
        logprobs = None
        if self.top is not None:
            scores = [token.score for token in piece.scored]
            tops: list[dict[str, float] | None] = []
            for score in scores:
                # The most likely tokens and, as OpenAI does, the chosen one.
                rows = [] if score is None else [*score.top, (score.token, score.logprob)]
                labels = {token_label(self.tokenizer.decode([token])): value for token, value in rows}
                tops.append(None if score is None else labels)
            logprobs = CompletionLogprobs(
                tokens=[token_label(token.token) for token in piece.scored],
                token_logprobs=[None if score is None else score.logprob for score in scores],
                top_logprobs=tops if self.top else None,
                text_offset=[token.offset for token in piece.scored],
            )
        return CompletionChoice(
            index=piece.index, text=piece.text, logprobs=logprobs, finish_reason=piece.finish_reason
        )


class ChatFormat(AnswerFormat):
    prefix = "chatcmpl"

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> ChatCompletion:
        choices = [
            ChatChoice(message=AssistantMessage(content=piece.text), **self._ending(piece))
            for piece in pieces
        ]
        return ChatCompletion(**self.heading, choices=choices, usage=usage)

    def chunk(self, piece: Piece) -> ChatChunk:
        delta = ChatDelta(role="assistant" if piece.first else None, content=piece.text)
        return ChatChunk(**self.heading, choices=[ChatChunkChoice(delta=delta, **self._ending(piece))])

    def usage_chunk(self, usage: Usage) -> ChatChunk:
        return ChatChunk(**self.heading, choices=[], usage=usage)

    def _ending(self, piece: Piece) -> dict[str, Any]:
        """What whole choices and chunks have in common."""
        logprobs = None
        if self.top is not None:
            scores = [token.score for token in piece.scored if token.score is not None]
            rows = [
                ChatLogprob(
                    **vars(self._row(score.token, score.logprob)),
                    top_logprobs=[self._row(token, value) for token, value in score.top],
                )
                for score in scores
            ]
            logprobs = ChatLogprobs(content=rows)
        return {"index": piece.index, "logprobs": logprobs, "finish_reason": piece.finish_reason}

    def _row(self, token: int, logprob: float) -> TopLogprob:
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
