"""Pieces of text in the shapes of completions and chat, whole or as chunks of a stream; `responses` has those
of its own route."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

from pydantic import BaseModel
from pydantic_core import to_json

from blocktrain.serving.engine.requests import ModelInfo
from blocktrain.serving.gateway import openai_messages as shapes
from blocktrain.serving.gateway.choices import Piece, parted
from blocktrain.serving.gateway.text import token_label


class AnswerFormat(ABC):
    """The shape of one answer; a stream has one, too, and asks it for events in order."""

    prefix: ClassVar[str]

    def __init__(self, model: ModelInfo, top: int | None) -> None:
        """`top` as the request's log-probs: None for none, or how many alternatives."""
        self.tokenizer, self.top = model.tokenizer, top
        self.id = f"{self.prefix}{secrets.token_hex(12)}"
        self.created = int(time.time())

    @abstractmethod
    def do_without(self, blocks: Sequence[int]) -> None:
        """What follows was written without these blocks."""

    @abstractmethod
    def whole(self, pieces: Sequence[Piece], usage: shapes.Usage) -> BaseModel: ...

    @abstractmethod
    def events(self, piece: Piece, usage: Callable[[], shapes.Usage]) -> Iterator[str]:
        """A piece as server-sent events, which may show the usage so far. The reason for the end comes in an
        event of its own: some clients do not read the text that stands beside it."""

    @abstractmethod
    def ending(self, usage: shapes.Usage) -> Iterator[str]:
        """The events behind the last piece."""

    @abstractmethod
    def broken_off(self, error: shapes.ApiErrorBody) -> str:
        """The last event of an answer that cannot be completed."""

    def scores(self, piece: Piece) -> list[shapes.ChatLogprob]:
        """The log-probs of a piece's tokens, each with its alternatives."""
        found = [token.score for token in piece.scored if token.score is not None]
        return [
            shapes.ChatLogprob(
                **vars(self._score(score.token, score.logprob)),
                top_logprobs=[self._score(token, value) for token, value in score.top],
            )
            for score in found
        ]

    def _score(self, token: int, logprob: float) -> shapes.TopLogprob:
        # As bytes too: a token may be part of a character, and its label then stands for more than one token.
        raw = self.tokenizer.decode([token])
        return shapes.TopLogprob(token=token_label(raw), logprob=logprob, bytes=list(raw))


class ChunkFormat(AnswerFormat):
    """Streams of chunks that are each a part of the whole answer, with `[DONE]` at the end."""

    def __init__(
        self,
        model: ModelInfo,
        top: int | None,
        options: shapes.StreamOptions | None,
        *,
        block_weights: bool = False,
    ) -> None:
        super().__init__(model, top)
        self.options, self.block_weights = options or shapes.StreamOptions(), block_weights
        self.heading: dict[str, Any] = {
            "id": self.id,
            "created": self.created,
            "model": model.name,
            "system_fingerprint": f"bt-{model.model_hash[:16]}",
        }
        """What every chunk of one answer repeats."""
        self._whole_fingerprint = self.heading["system_fingerprint"]
        self._around: dict[int, tuple[str, str]] = {}

    def do_without(self, blocks: Sequence[int]) -> None:
        # A model that lacks blocks writes another text: by its fingerprint it is another model, in every
        # chunk from the first that is.
        lacking = "-without-" + ",".join(map(str, blocks)) if blocks else ""
        found = self._whole_fingerprint + lacking
        if found != self.heading["system_fingerprint"]:
            self.heading["system_fingerprint"] = found
            self._around.clear()

    @abstractmethod
    def chunks(self, piece: Piece, usage: shapes.Usage | None) -> Iterator[BaseModel]: ...

    @abstractmethod
    def usage_chunk(self, usage: shapes.Usage) -> BaseModel: ...

    def events(self, piece: Piece, usage: Callable[[], shapes.Usage]) -> Iterator[str]:
        options = self.options
        is_text = not piece.first and piece.finish_reason is None
        if is_text and self.top is None and not self.block_weights and not options.continuous_usage_stats:
            before, behind = self._around_text(piece.index)
            yield f"{before}{to_json(piece.text).decode()}{behind}"
            return
        for chunk in self.chunks(piece, usage() if options.continuous_usage_stats else None):
            yield self._event(chunk)

    def _event(self, chunk: BaseModel) -> str:
        options = self.options
        hidden = set() if options.include_usage or options.continuous_usage_stats else {"usage"}
        return f"data: {chunk.model_dump_json(exclude=hidden)}\n\n"

    def _around_text(self, index: int) -> tuple[str, str]:
        """What stands before and behind the text of a choice's chunks, which is all that differs between
        them. Made once: a chunk as a model and its JSON took 0.1 ms for every token."""
        if index not in self._around:
            # Nobody can guess it, so no name of a model holds it.
            mark = secrets.token_hex(16)
            (chunk,) = self.chunks(Piece(index, mark, []), None)
            before, behind = self._event(chunk).split(f'"{mark}"')
            self._around[index] = before, behind
        return self._around[index]

    def ending(self, usage: shapes.Usage) -> Iterator[str]:
        if self.options.include_usage:
            yield f"data: {self.usage_chunk(usage).model_dump_json()}\n\n"
        yield "data: [DONE]\n\n"

    def broken_off(self, error: shapes.ApiErrorBody) -> str:
        return f"data: {shapes.ApiErrorAnswer(error=error).model_dump_json()}\n\n"


class CompletionFormat(ChunkFormat):
    prefix = "cmpl-"

    def whole(self, pieces: Sequence[Piece], usage: shapes.Usage) -> shapes.Completion:
        return shapes.Completion(
            **self.heading, choices=[self._choice(piece) for piece in pieces], usage=usage
        )

    def chunks(self, piece: Piece, usage: shapes.Usage | None) -> Iterator[shapes.Completion]:
        for part in parted(piece):
            yield shapes.Completion(**self.heading, choices=[self._choice(part)], usage=usage)

    def usage_chunk(self, usage: shapes.Usage) -> shapes.Completion:
        return shapes.Completion(**self.heading, choices=[], usage=usage)

    def _choice(self, piece: Piece) -> shapes.CompletionChoice:
        logprobs, scores = None, [token.score for token in piece.scored]
        weights = [None if score is None else score.weights for score in scores]
        if self.top is not None:
            tops: list[dict[str, float] | None] = []
            for score in scores:
                # The most likely tokens and, as OpenAI does, the chosen one.
                rows = [] if score is None else [*score.top, (score.token, score.logprob)]
                labels = {token_label(self.tokenizer.decode([token])): value for token, value in rows}
                tops.append(None if score is None else labels)
            logprobs = shapes.CompletionLogprobs(
                tokens=[token_label(token.token) for token in piece.scored],
                token_logprobs=[None if score is None else score.logprob for score in scores],
                top_logprobs=tops if self.top else None,
                text_offset=[token.offset for token in piece.scored],
            )
        return shapes.CompletionChoice(
            index=piece.index,
            text=piece.text,
            logprobs=logprobs,
            block_weights=weights if self.block_weights else None,
            finish_reason=piece.finish_reason,
        )


class ChatFormat(ChunkFormat):
    prefix = "chatcmpl-"

    def whole(self, pieces: Sequence[Piece], usage: shapes.Usage) -> shapes.ChatCompletion:
        choices = [
            shapes.ChatChoice(message=shapes.AssistantMessage(content=piece.text), **self._ending(piece))
            for piece in pieces
        ]
        return shapes.ChatCompletion(**self.heading, choices=choices, usage=usage)

    def chunks(self, piece: Piece, usage: shapes.Usage | None) -> Iterator[shapes.ChatChunk]:
        choices = []
        if piece.first:
            delta = shapes.ChatDelta(role="assistant", content="")
            choices.append(shapes.ChatChunkChoice(index=piece.index, delta=delta))
        for part in parted(piece):
            delta = shapes.ChatDelta(content=None if part.finish_reason else part.text)
            choices.append(shapes.ChatChunkChoice(delta=delta, **self._ending(part)))
        for choice in choices:
            yield shapes.ChatChunk(**self.heading, choices=[choice], usage=usage)

    def usage_chunk(self, usage: shapes.Usage) -> shapes.ChatChunk:
        return shapes.ChatChunk(**self.heading, choices=[], usage=usage)

    def _ending(self, piece: Piece) -> dict[str, Any]:
        """What whole choices and chunks have in common."""
        logprobs = None if self.top is None else shapes.ChatLogprobs(content=self.scores(piece))
        return {"index": piece.index, "logprobs": logprobs, "finish_reason": piece.finish_reason}
