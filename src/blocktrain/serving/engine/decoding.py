"""Modes `ar` and `verify`: draft, score in traversals, accept while the sampler agrees.

While one traversal is under way `verify` drafts on and sends the next, on the assumption that all drafts
before it hold; where one does not, all that was sent behind it is void. Knows a source of rows (consensus
log-probs for a text) and a drafter (guesses); nothing of where the blocks are. `ar` is `verify` without a
drafter.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from blocktrain.model.generation import window_start
from blocktrain.model.sampling import EXACT_TOLERANCE, Row, Sampler, choose
from blocktrain.serving.engine.draft_length import Traversed
from blocktrain.serving.engine.drafting import DraftedToken, Drafter
from blocktrain.serving.engine.lookup import LookupDrafter
from blocktrain.serving.engine.requests import Chunk, GenerationRequest, GenerationStats, TokenLogprob
from blocktrain.serving.engine.rows import BestRows, Rows, Traversal

T = TypeVar("T")

CALM_TRAVERSALS = 8
"""So many go one at a time after a stage failed."""
MOST_AHEAD = 64
"""Tokens drafted and not verified: where 95 of 100 hold, all of 64 do once in 27 times."""


class RowSource(Protocol):
    """What one generation asks of the blocks."""

    most_flights: int
    """Traversals that may be under way."""
    slides: bool
    """Whether the rows of a traversal may lie on both sides of the place where the visible context slides."""

    async def rows(self, traversal: Traversal) -> Rows | BestRows:
        """Log-probs of what follows each of the last prefixes of the traversal's text. Traversals are asked
        in the order in which they are begun, and several may be under way."""

    async def exact(self, tokens: Sequence[int]) -> Row:
        """Log-probs of what follows `tokens`, computed in float64."""

    async def close(self) -> None:
        """Free what is held for this generation."""


@dataclass(eq=False)
class Flight:
    """A traversal under way."""

    traversal: Traversal
    rows: asyncio.Future[Rows | BestRows]
    began: float


async def decode(
    request: GenerationRequest,
    sampler: Sampler,
    stats: GenerationStats,
    *,
    context: int,
    open_source: Callable[[], RowSource],
    drafter: Drafter | LookupDrafter | None,
) -> AsyncGenerator[Chunk]:
    """A chunk for each traversal that counts. Frees the source at the end, also when the consumer closes or
    forgets it."""
    tokens = list(request.prompt)
    end = len(tokens) + request.max_tokens
    asked = len(tokens)  # the first position whose token no flight tells
    guess: list[DraftedToken] = []  # drafted behind `tokens`, and sent
    again: list[DraftedToken] = []  # drafted and to be sent once more
    flights: deque[Flight] = deque()
    drafting: asyncio.Task[list[DraftedToken]] | None = None
    drafted_from, worth_it, whole, calm = 0, True, False, 0
    async with AsyncExitStack() as held:
        source = open_source()
        held.push_async_callback(source.close)
        # Ended before the source is closed: one that goes on would leave caches behind.
        tasks = await held.enter_async_context(Tasks())
        if drafter is not None:
            held.enter_context(drafter)
        last = time.monotonic()
        while len(tokens) < end:
            text = [*tokens, *(one.token for one in guess)]
            may_draft = drafter is not None and drafter.drafts_now and worth_it and not whole and not again
            most = min(drafter.flights, source.most_flights) if drafter is not None and not calm else 1
            if drafter is not None and may_draft and drafting is None and len(flights) < most:
                stop = window_start(len(text), context) + context
                if drafter.slides and source.slides:
                    stop = window_start(stop + 1, context) + context
                room = min(stop, end - 1) - len(text)
                room = min(room, MOST_AHEAD - len(guess), drafter.length.most_of(most))
                draft = drafter.draft(text, room, guess, flying=bool(flights))
                drafting, drafted_from = tasks.start(draft), len(text)
            waited = [task for task in (drafting, flights[0].rows if flights else None) if task is not None]
            if waited and not again:
                await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)

            piece: list[DraftedToken] = []
            if not whole:
                piece, again = again, []
            if drafting is not None and drafting.done():
                piece, drafting = drafting.result(), None
                # Where all flights have landed, the token behind the draft's text is known by now.
                known = tokens[drafted_from:]
                if [one.token for one in piece[: len(known)]] != known:
                    continue
                piece = piece[len(known) :]
                # With nothing under way a draft does not wait for a long text to be read here.
                worth_it = bool(piece or known or not flights)
            if piece or not flights:
                guess += piece
                text += [one.token for one in piece]
                num_rows = len(text) - asked + 1
                traversal = Traversal(text, num_rows, whole, leads=not flights, written=len(tokens))
                began = time.monotonic()
                if drafter is None:
                    # Nothing is done meanwhile, and a task that is waited for takes as long as to encode
                    # the question.
                    rows: asyncio.Future[Rows | BestRows] = asyncio.get_running_loop().create_future()
                    rows.set_result(await source.rows(traversal))
                else:
                    rows = tasks.start(source.rows(traversal))
                flights.append(Flight(traversal, rows, began))
                asked, whole = len(text) + 1, False
                stats.traversals += 1
                stats.drafted += len(piece)
            if not flights[0].rows.done():
                continue

            # Row i is what follows the text up to there, so it is valid only while all drafts before it were
            # chosen; the first row that disagrees with the draft still gives a token.
            flight = flights.popleft()
            found, landed = flight.rows.result(), time.monotonic()
            failed = bool(flights) and flights[0].traversal.void
            if flights:
                flights[0].traversal.leads = True
            written: list[int] = []
            logprobs: list[TokenLogprob] = []
            judged: list[DraftedToken] = []
            held_true = True
            for i in range(flight.traversal.num_rows):
                choice = found.choose(i, sampler, tokens)
                if not choice.settled and not isinstance(found, Rows):
                    # A token that not all stages sent may be better.
                    stats.second_questions += 1
                    whole = True
                    break
                if not choice.settled:
                    # A near tie, about once in 2,000 tokens with Q16 rows: one more round trip decides it.
                    exact = await source.exact(tokens)
                    stats.traversals += 1
                    stats.exact_passes += 1
                    choice = choose(exact, sampler, len(tokens), EXACT_TOLERANCE, tokens)
                tokens.append(choice.token)
                written.append(choice.token)
                if request.logprobs is not None:
                    assert isinstance(found, Rows), "log-probs are asked for over the whole vocabulary"
                    row, weights = found.log_probs[i], found.weights[i]
                    logprobs.append(token_logprob(row, choice.token, request.logprobs, weights))
                if guess:
                    judged.append(guess.pop(0))
                    held_true = judged[-1].token == choice.token
                    if not held_true:
                        break
            calm = CALM_TRAVERSALS if failed else max(0, calm - 1)
            if whole or failed or not held_true:
                # What was sent behind this place continues a text that was never written, or is sent again.
                for other in flights:
                    other.traversal.void = True
                flights.clear()
                if drafting is not None:
                    drafting.cancel()
                    drafting = None
                again, guess = (guess if held_true else []), []
                asked = len(tokens)
            worth_it = True

            accepted = len(judged) - (not held_true)
            stats.accepted += accepted
            stats.tokens += len(written)
            if drafter is not None and written:
                margins = [one.margin for one in judged]
                drafter.observe(
                    Traversed(
                        margins,
                        accepted,
                        len(written),
                        landed - last,
                        landed - flight.began,
                        rows=flight.traversal.num_rows,
                        blocks=judged[0].blocks if judged else 0,
                    ),
                    found.weights[len(written) - 1],
                )
            if written:
                yield Chunk(written, logprobs if request.logprobs is not None else None)
                last = time.monotonic()


class Tasks:
    """Tasks of one generation; those that are left at its end are cancelled."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        # Nobody asks what became of a void traversal; looked at here, its error is not reported as lost.
        if not task.cancelled():
            task.exception()

    async def __aenter__(self) -> Tasks:
        return self

    async def __aexit__(self, *error: object) -> None:
        left = list(self._running)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


def token_logprob(row: Row, token: int, top: int, weights: Row) -> TokenLogprob:
    best = np.argsort(-row, kind="stable")[:top]
    tops = [(int(t), float(row[t])) for t in best]
    return TokenLogprob(token, float(row[token]), tops, [float(weight) for weight in weights])
