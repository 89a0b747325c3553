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
from dataclasses import dataclass, field
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

    async def rows(self, traversal: Traversal) -> Rows | BestRows:
        """Log-probs of what follows each of the last prefixes of the traversal's text. Traversals are asked
        in the order in which they are begun, and several may be under way."""

    async def exact(self, tokens: Sequence[int]) -> Row:
        """Log-probs of what follows `tokens`, computed in float64."""

    def fork(self) -> RowSource | None:
        """A source that begins with what this one was asked so far; None where it cannot be had."""

    def drop(self) -> None:
        """Free what is held at once: the text goes on without this source."""

    async def close(self) -> None:
        """Free what is held for this generation."""


@dataclass(eq=False)
class Flight:
    """A traversal under way."""

    traversal: Traversal
    rows: asyncio.Task[Rows | BestRows]
    began: float


@dataclass(eq=False)
class Fork:
    """What would follow if the second choice for a drafted token were right."""

    text: list[int]
    """Up to that choice."""
    source: RowSource
    drafter: Drafter | LookupDrafter
    guess: list[DraftedToken] = field(default_factory=list)
    flight: Flight | None = None
    """None while it is drafted."""

    def is_text(self, tokens: Sequence[int]) -> bool:
        """Whether that choice was right, and the traversal behind it was not given up."""
        given_up = self.flight is not None and self.flight.traversal.void
        return not given_up and len(self.text) == len(tokens) and self.text[-1] == tokens[-1]


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
    forks: list[Fork] = []
    forked: set[int] = set()  # the places of drafted tokens that have or had one
    drafting: asyncio.Task[list[DraftedToken]] | None = None
    drafting_fork: Fork | None = None  # whose text `drafting` continues; None for the text itself
    drafted_from, worth_it, whole, calm = 0, True, False, 0
    async with AsyncExitStack() as held:
        source = open_source()
        held.push_async_callback(lambda: source.close())
        held.callback(_leave, forks)
        # Ended before the source is closed: one that goes on would leave caches behind.
        tasks = await held.enter_async_context(Tasks())
        if drafter is not None:
            held.enter_context(drafter)
        last = time.monotonic()
        while len(tokens) < end:
            text = [*tokens, *(one.token for one in guess)]
            may_draft = drafter is not None and drafter.drafts_now and not whole and not again
            most = min(drafter.flights, source.most_flights) if drafter is not None and not calm else 1
            if drafter is not None and may_draft and drafting is None and len(flights) + len(forks) < most:
                writer, line, ahead = drafter, text, guess
                places = {position - len(tokens) for position in forked}
                place = drafter.fork_at(guess, places) if flights else None
                branch = source.fork() if place is not None else None
                if place is not None and branch is not None:
                    line = [*text[: len(tokens) + place], guess[place].rival]
                    drafting_fork = Fork(line, branch, drafter.forked())
                    # If this one is needed, all before it has been verified.
                    writer, ahead = drafting_fork.drafter, []
                    forks.append(drafting_fork)
                    forked.add(len(line) - 1)
                if drafting_fork is not None or worth_it:
                    # Never past the point where the visible context slides: a traversal has one window.
                    room = min(window_start(len(line), context) + context, end - 1) - len(line)
                    room = min(room, MOST_AHEAD - len(ahead), drafter.length.most_of(most))
                    draft = writer.draft(line, room, ahead, flying=bool(flights))
                    drafting, drafted_from = tasks.start(draft), len(line)
            waited = [task for task in (drafting, flights[0].rows if flights else None) if task is not None]
            if waited and not again:
                await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)

            piece: list[DraftedToken] = []
            if not whole:
                piece, again = again, []
            if drafting is not None and drafting.done() and drafting_fork is not None:
                fork, drafting_fork = drafting_fork, None
                fork.guess, drafting = drafting.result(), None
                line = [*fork.text, *(one.token for one in fork.guess)]
                traversal = Traversal(line, len(fork.guess) + 1)
                fork.flight = Flight(traversal, tasks.start(fork.source.rows(traversal)), time.monotonic())
                stats.traversals += 1
                stats.drafted += len(fork.guess)
                continue
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
                traversal = Traversal(text, len(text) - asked + 1, whole)
                flights.append(Flight(traversal, tasks.start(source.rows(traversal)), time.monotonic()))
                asked, whole = len(text) + 1, False
                stats.traversals += 1
                stats.drafted += len(piece)
            if len(flights) == 1:
                flights[0].traversal.leads = True
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
            sound = not (whole or failed)
            went_on = sound and held_true
            # The fork whose text was written, if one was. Of the others those further on may still be.
            taken = next((f for f in forks if sound and not held_true and f.is_text(tokens)), None)
            over = [f for f in forks if f is not taken and not (went_on and len(f.text) > len(tokens))]
            forks[:] = [f for f in forks if f not in over]
            _leave(over)
            if drafting is not None and (drafting_fork not in forks if drafting_fork else not went_on):
                drafting.cancel()
                drafting = drafting_fork = None
            if not went_on:
                # What was sent behind this place continues a text that was never written, or is sent again.
                for other in flights:
                    other.traversal.void = True
                flights.clear()
                forked.clear()
                again, guess = (guess if held_true else []), []
                asked = len(tokens)
            if taken is not None and taken.flight is None:
                # Nothing was sent for it, so the text goes on where it was; its draft is for this place.
                taken.source.drop()
                drafter, drafting_fork = taken.drafter, None
            elif taken is not None and taken.flight is not None:
                source.drop()
                source, drafter, guess = taken.source, taken.drafter, taken.guess
                stats.forks_taken += 1
                taken.flight.traversal.leads = True
                flights.append(taken.flight)
                asked = len(tokens) + len(guess) + 1
            if taken is not None:
                forks.clear()
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


def _leave(forks: Sequence[Fork]) -> None:
    """Nobody waits for them any more."""
    for fork in forks:
        if fork.flight is not None:
            fork.flight.traversal.void = True
        fork.source.drop()


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
