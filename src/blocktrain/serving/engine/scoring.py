"""Scoring a given text: the windows of training evaluation, and rows turned into log-probs of tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any, TypeVar

from blocktrain.serving.engine.api import DeadlineError, RequestError, TokenLogprob
from blocktrain.serving.engine.decoding import token_logprob
from blocktrain.serving.engine.sampling import Row

T = TypeVar("T")


def check_scorable(tokens: Sequence[int], vocabulary: int, top: int) -> None:
    if not tokens:
        raise RequestError("there is nothing to score; expected at least one token")
    if not all(0 <= token < vocabulary for token in tokens):
        raise RequestError(f"the text holds token ids outside 0..{vocabulary - 1}")
    if not 0 <= top <= vocabulary:
        raise RequestError(f"top log-probs must be between 0 and {vocabulary}, found {top}")


def windows(tokens: Sequence[int], context: int) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
    """Inputs and targets of non-overlapping windows; every token but the first is a target once."""
    for start in range(0, len(tokens) - 1, context):
        end = min(start + context, len(tokens) - 1)
        yield tokens[start:end], tokens[start + 1 : end + 1]


def scored_window(log_probs: Row, targets: Sequence[int], top: int) -> list[TokenLogprob]:
    return [token_logprob(row, target, top) for row, target in zip(log_probs, targets, strict=True)]


async def under_deadline(work: Coroutine[Any, Any, T], seconds: float, what: str) -> T:
    try:
        async with asyncio.timeout(seconds):
            return await work
    except TimeoutError:
        raise DeadlineError(f"the deadline of {seconds:g} s passed while {what}; allow more time") from None
