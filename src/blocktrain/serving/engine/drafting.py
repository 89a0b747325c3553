"""Guessing the next tokens in the gateway's own process, with its first blocks and each request's own noise.

A draft is sampled with the noise the real choice will use, so it is accepted wherever these blocks and the
consensus agree on the winner. The drafts of all requests are made together, a token of each at a time, in the
computing thread; one that comes joins at the next token. For a draft that is alone the first block runs
ahead, and the others read its guesses at once. A wrong draft costs time, never a different text.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blocktrain.model.generation import shared_length, window_start
from blocktrain.model.objective import Objective
from blocktrain.model.quick import QuickBlocks
from blocktrain.model.sampling import (
    EXACT_TOLERANCE,
    Row,
    SampledToken,
    Sampler,
    best_scores,
    choose,
    normalised,
)
from blocktrain.model.tails import INPUTS, Tail
from blocktrain.serving.batching import Batcher
from blocktrain.serving.blocks import RoughBlocks
from blocktrain.serving.engine.draft_length import FEW_REQUESTS, DraftLength, Traversed, most_flights

log = logging.getLogger(__name__)

STEPS_AT_MOST = 4
"""Tokens the cache is behind by that are taken one by one; more go through one pass of the block."""
TAIL_STEPS = 64
"""The same of a tail. With more, the text is read again and gets another tail. A trial without drafts leaves
a text some 30 tokens behind: to read these for 64 texts takes three blocks of width 384 more than a second,
and as many steps of all a quarter of one."""
READ_FIRST = 32
"""Tokens the cache is behind by that it reads while the request goes on without a draft."""
KEPT_TEXTS, KEPT_BYTES = 32, 1 << 28
"""Windows that were read and are kept for others that begin alike, and the memory that all of them may take:
of long ones far fewer are kept. With 16, of 16 prompts that fill the context, one client waited for reading
in 8 of each text's 80 ms."""

READ_AT_ONCE = 4
"""Tokens that the other blocks read in one pass behind the first: four rows take 1.4 times as long as one,
five 2.2 times (two blocks of width 384, the kernel's rows come in fours)."""
LEAST_LEAD_MARGIN = 0.5
"""A token that the first block alone chose by less is left to all: 59 of 100 such hold, 96 of the others."""

MOST_OF_ALL, QUIET_SECONDS = 0.75, 0.002
"""Drafts begin when so many of all requests are there and no more came for so long. With half of them and
2 ms eight clients wrote 1,500 bytes a second on two cores instead of 1,840 (demo model): mostly four each
went together, and a pass of a stage over four texts takes 0.8 of the time of one over eight."""

MOST_DRAFT_BLOCKS = 3
"""Blocks that draft where nothing else was asked for: of four, one agrees with all on 91 % of bytes, two on
95 % and three on 97 %. A third one takes 1.4 times as long for each token and halves the misses, each of
which costs a round trip."""


def blocks_for_drafts(objective: Objective, most: int | None) -> list[int]:
    """The first of the smallest blocks that have no others upstream; block 0 never has. None of a serial
    model, whose parts predict nothing alone. Without a number given, never all of three or more."""
    if objective.is_serial:
        return []
    model = objective.model
    alone = [block for block in range(model.blocks) if not objective.upstream(block)]
    # A draft pays by being cheaper than what it predicts, and blocks of one shape take each step together.
    shape = model.of_block(min(alone, key=model.step_cost))
    alike = [block for block in alone if model.of_block(block) == shape]
    if most is None:
        # A gateway that holds every block needs no stages; with two there is one other, which guesses less.
        most = min(MOST_DRAFT_BLOCKS, max(2, model.blocks - 1))
    return alike[: max(1, most)]


@dataclass(frozen=True)
class DraftedToken:
    token: int
    margin: float
    """By how much it won."""
    blocks: int = 0
    """How many blocks guessed it; 0 where it was looked up."""


class Read(NamedTuple):
    """A window and the cache that holds it."""

    cache: Any
    seen: list[int]
    start: int


class ReadText:
    """What some blocks have read of a request's text. The computing thread's own once a draft has begun; the
    event loop only asks how far it is."""

    def __init__(self, drafting: Drafting, blocks: int) -> None:
        self.drafting, self.blocks = drafting, blocks
        """How many of the blocks held here."""
        self.cache: Any = drafting.steps(blocks).new_cache()
        self.seen: list[int] = []
        """The window with its drafts: what the cache or the tail holds of it, and what was due then."""
        self.start = 0
        """Of the window, in the text."""
        self.before: Read | None = None
        """The window before, or behind: a wrong draft comes back from beyond the place where it slides."""
        self.tail: Tail | None = None
        """The end of what was read, while many texts are drafted for: the cache is behind then."""
        self.tail_start = 0
        """Where in the text its positions begin."""
        self.is_fresh = False
        """Whether the cache was read or copied, and no step has gone on from it."""

    @property
    def is_among_many(self) -> bool:
        """Whether it is drafted for by its tail."""
        # A tail stays where requests come and go: to make it costs a pass over the text.
        least = FEW_REQUESTS if self.tail is None else FEW_REQUESTS // 2
        return self.drafting.has_tails and self.drafting.num_open > least

    def reach(self, length: int, start: int) -> int:
        """Up to where nothing must be read, in a text of so many tokens, whose window begins at `start`."""
        tail = self.tail
        if tail is not None and self.is_among_many:
            end = self.tail_start + tail.length
            if length - end <= TAIL_STEPS + 1:
                return length
        before = self.before
        if start != self.start and before is not None and before.start == start:
            return start + int(before.cache.length)
        return start + (self.cache.length if start == self.start else 0)

    def catch_up(self, text: Sequence[int], context: int, *, many: bool) -> list[int]:
        """Have the cache, or for `many` texts the tail, hold what it shares with the text; gives what is due
        before a guess."""
        start = window_start(len(text), context)
        window = list(text[start:])
        tail, self.tail = self.tail, None
        if tail is not None and many:
            # What is held beyond the text they share was a wrong draft.
            shared = self.start + shared_length(self.seen, list(text[self.start :]))
            held = self.tail_start + tail.length
            keep = min(shared, len(text) - 1, held)
            # Where a wrong draft was very long, little is left of the tail.
            near = len(text) - keep <= TAIL_STEPS + 1 and held - keep <= INPUTS // 2
            if near and keep > max(self.start, self.tail_start):
                # Where the window slides it goes on: to read the new one takes as long as ten steps, and to
                # copy it from another text brought as much as it took.
                tail.truncate(keep - self.tail_start)
                self.cache.truncate(keep - start if start == self.start else 0)
                self.tail, self.seen, self.start = tail, window, start
                return list(text[keep:])
        # Not held any more: its slot is the lowest that is free.
        tail = None
        if start != self.start:
            left = Read(self.cache, self.seen, self.start)
            fits = self.before is not None and self.before.start == start
            new = self.before if fits else None
            self.before = left
            self.cache, self.seen, self.start = new or Read(self._steps.new_cache(), [], start)
        shared = shared_length(self.seen, window)
        keep = min(shared, len(window) - 1, self.cache.length)
        if len(window) - keep > READ_FIRST:
            # 32 prompts of 128 bytes took the gateway 8 s (width 384), in which it drafted next to nothing.
            self.is_fresh = True
            cache, length = self.drafting.like(window[:-1], self.blocks)
            if length > keep:
                self.cache, keep = cache, length
        self.cache.truncate(keep)
        due = window[keep:]
        if len(due) > STEPS_AT_MOST + 1:
            self._steps.extend(due[:-1], self.cache)
            # A prompt, or the beginning of a window: not what one text wrote without drafts.
            if len(due) > READ_FIRST and not shared:
                self.drafting.keep(window[:-1], self.cache, self.blocks)
            due = due[-1:]
        self.seen = window
        if many and isinstance(self._steps, QuickBlocks):
            self.tail, self.tail_start = self._steps.tail_of(self.cache), start
        return due

    @property
    def _steps(self) -> RoughBlocks:
        return self.drafting.steps(self.blocks)


@dataclass(eq=False)
class Draft:
    """One draft under way."""

    drafter: Drafter
    read: ReadText
    weights: Row
    """The share of each block that drafts."""
    text: list[int]
    most: int
    """Tokens to draft at most; 0 where the text is only read."""
    margins: list[float]
    """Of all tokens that are not verified, those of this draft last."""
    done: asyncio.Future[list[DraftedToken]]
    flying: bool = False
    """A traversal of the text is under way."""
    due: list[int] = field(default_factory=list)
    """What the cache still has to read before a row says what follows the text; the last token at least."""
    tokens: list[DraftedToken] = field(default_factory=list)

    @property
    def blocks(self) -> int:
        """How many draft."""
        return self.read.blocks

    def chosen_from(self, row: Row) -> SampledToken:
        # The tolerance does not matter here: a token that is not settled is drafted all the same.
        return choose(row, self.drafter.sampler, len(self.text), EXACT_TOLERANCE, self.text)

    def append(self, choice: SampledToken) -> None:
        self.margins.append(choice.margin)
        self.text.append(choice.token)
        self.read.seen.append(choice.token)
        self.tokens.append(DraftedToken(choice.token, choice.margin, self.blocks))
        self.due = [choice.token]


def choices(drafts: Sequence[Draft], logits_NMV: NDArray[np.float32]) -> list[SampledToken]:
    """The token of each draft, from its blocks' rows."""
    weights_MN = np.array([draft.weights for draft in drafts])
    if not all(draft.drafter.sampler.plain for draft in drafts):
        logs_NMV = normalised(logits_NMV.astype(np.float64))
        rows_MV = np.einsum("mn,nmv->mv", weights_MN, logs_NMV)
        return [draft.chosen_from(row) for draft, row in zip(drafts, rows_MV, strict=True)]
    # The same in one operation for all: of eight drafts 100 instead of 210 us. What makes a row log-probs is
    # one number for all of it, and changes no choice.
    scores_MV = np.einsum("mn,nmv->mv", weights_MN, logits_NMV)
    places = [(draft.drafter.sampler, len(draft.text)) for draft in drafts]
    ids_M2, scores_M2 = best_scores(scores_MV, places, 1.0, 2)
    first_M = scores_M2.argmax(axis=1)
    return [
        SampledToken(int(ids[first]), True, float(abs(scores[0] - scores[-1])))
        for ids, scores, first in zip(ids_M2, scores_M2, first_M, strict=True)
    ]


class Drafting:
    """The drafts of all requests of an engine."""

    def __init__(self, batcher: Batcher, blocks: Sequence[int]) -> None:
        self.batcher, self.blocks = batcher, list(blocks)
        self.num_open = 0
        """Requests under way that draft."""
        self.num_unread = 0
        """Texts that wait to be read, and the one that is."""
        self._lock = threading.Condition()
        self._waiting: list[Draft] = []
        self._running = False
        self._kept: dict[int, list[tuple[list[int], Any]]] = defaultdict(list)
        """By how many blocks draft: texts that were read and their caches, the one used last at the end; the
        computing thread's own."""
        self._steps: dict[int, RoughBlocks] = {}
        self.at_once = bool(self.blocks) and batcher.held.is_quick(self.blocks)
        """Whether the blocks are stepped together, and guess on past their context."""
        self.has_tails = False
        """Whether many texts are drafted for by their tails; see `prepare`."""

    def steps(self, count: int) -> RoughBlocks:
        """The first so many blocks held here."""
        # Made at the first draft: not every engine is asked for one.
        if count not in self._steps:
            self._steps[count] = self.batcher.held.steps(tuple(self.blocks[:count]))
        return self._steps[count]

    def prepare(self) -> None:
        """Have what drafts for many be compiled, before anybody waits for a draft."""
        blocks = self.steps(len(self.blocks)) if self.at_once else None
        if not isinstance(blocks, QuickBlocks):
            return
        try:
            from blocktrain.model import quick_kernel

            if quick_kernel.HAS_VNNI:
                quick_kernel.compile_now()
                _ = blocks.tails  # rounds and packs the matrices
                self.has_tails = True
        except Exception as error:
            # Without a compiler drafts for many take longer, and all else goes on.
            log.warning("drafts not compiled reason=%r", f"{type(error).__name__}: {error}")

    def own_shares(self, weights: Row, count: int) -> Row:
        """The share of each of the first blocks held here. One of weight 0 may be the only one here; it still
        guesses better than nothing."""
        own = np.maximum(weights[self.blocks[:count]], 1e-9)
        shares: Row = own / own.sum()
        return shares

    def begin(
        self,
        drafter: Drafter,
        read: ReadText,
        text: Sequence[int],
        most: int,
        margins: Sequence[float],
        *,
        flying: bool = False,
    ) -> asyncio.Future[list[DraftedToken]]:
        loop = asyncio.get_running_loop()
        weights = self.own_shares(drafter.weights, read.blocks)
        done = loop.create_future()
        draft = Draft(drafter, read, weights, list(text), most, list(margins), done, flying)
        if not most:
            self.num_unread += 1
            draft.done.add_done_callback(self._was_read)
        with self._lock:
            self._waiting.append(draft)
            starts, self._running = not self._running, True
            self._lock.notify()
        if starts:
            # Not awaited: it ends when nobody's draft is left, and tells each when its own is done.
            loop.run_in_executor(self.batcher.executor, self._run, loop)
        return draft.done

    def _was_read(self, done: asyncio.Future[list[DraftedToken]]) -> None:
        self.num_unread -= 1

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        """Runs in the computing thread until no draft is left."""
        going: list[Draft] = []
        enough: list[Draft] = []
        """Drafts that began with those, and wait for them."""
        later: list[Draft] = []
        unread: list[Draft] = []
        patient_until = 0.0
        while True:
            with self._lock:
                if later and not (going or unread or self._waiting):
                    left = patient_until - time.monotonic()
                    self._lock.wait(max(0.0, min(left, QUIET_SECONDS) if self._most_are_in(later) else left))
                came, self._waiting = self._waiting, []
                self._running = goes_on = bool(going or later or came or unread)
            if not goes_on:
                return
            # One text is read for every step of the drafts. Of 64 that come at once the first get drafts
            # while the others are read, which takes a second; before, they all waited for the last.
            asked = unread + [draft for draft in came if not draft.most]
            unread = [draft for draft in asked if draft.blocks == self.blocks_now(draft.drafter.length)]
            # No drafts for now, or by other blocks: what is not read by then is asked for again.
            told = [draft for draft in asked if draft not in unread]
            # Taken out before anything can fail: it would be read, and fail, without end.
            reads, unread = unread[:1], unread[1:]
            if not later:
                patience = max((draft.drafter.length.patience_seconds for draft in came), default=0.0)
                patient_until = time.monotonic() + patience
            later += [draft for draft in came if draft.most]
            # Many requests begin and end their drafts together, so that their traversals meet on the stages.
            # Where each was sent as soon as it had enough, a pass of a stage had one or two of eight requests
            # in it, and took half as long as one of all eight.
            together = any(draft.drafter.gathers for draft in (*later, *going, *enough))
            enough_wait = len(later) >= self.num_open or time.monotonic() >= patient_until
            enough_wait |= self._most_are_in(later) and not came
            # Who comes late joins the others at their next token.
            begun = later if not together or enough_wait or going else []
            later = [] if begun else later
            try:
                for draft in begun + reads:
                    if not draft.done.cancelled():
                        read, context = draft.read, self.batcher.held.context
                        draft.due = read.catch_up(draft.text, context, many=read.is_among_many)
                told += reads
                now, wanted = time.monotonic(), going + [draft for draft in begun if draft.due]
                # A request that was given up needs no more.
                wanted = [draft for draft in wanted if not draft.done.cancelled()]
                going = [draft for draft in wanted if draft.drafter.goes_on(draft, self.num_open, now)]
                enough += [draft for draft in wanted if draft not in going]
                if together and len(going) < len(enough):
                    enough, going = enough + going, []
                if going:
                    self._step(going)
                if not together or not going:
                    told, enough = told + enough, []
                if told:
                    loop.call_soon_threadsafe(_finish, told)
            except Exception as error:  # those who wait are told; the next draft starts fresh
                for draft in going + enough + begun + reads:
                    loop.call_soon_threadsafe(_fail, draft.done, error)
                loop.call_soon_threadsafe(_finish, told)
                going, enough = [], []

    def _most_are_in(self, later: Sequence[Draft]) -> bool:
        """Whether most requests that can draft wait for one another there."""
        return len(later) >= MOST_OF_ALL * (self.num_open - self.num_unread)

    def _step(self, going: Sequence[Draft]) -> None:
        """One token more of each draft, or some of one that is alone."""
        # Requests that name a length of drafts draft with all blocks, the others with as many as pay.
        for count, has_tail in {(draft.blocks, draft.read.tail is not None) for draft in going}:
            alike = [d for d in going if (d.blocks, d.read.tail is not None) == (count, has_tail)]
            began, written, blocks = time.monotonic(), 1, self.steps(count)
            if len(alike) == 1 and count > 1 and not has_tail and isinstance(blocks, QuickBlocks):
                written = self._run_ahead(alike[0], blocks)
            else:
                self._step_together(alike, blocks)
            seconds = (time.monotonic() - began) / (written * len(alike))
            # Caches that were just read move together first: of 32, that took 0.5 s once and a step 0.1.
            fresh = sum(draft.read.is_fresh for draft in alike)
            for draft in alike:
                draft.read.is_fresh = False
            if fresh > len(alike) / 4:
                continue
            for length in {id(draft.drafter.length): draft.drafter.length for draft in alike}.values():
                length.stepped(seconds, self.num_open, time.monotonic(), blocks=count, texts=len(alike))

    def _step_together(self, going: Sequence[Draft], blocks: RoughBlocks) -> None:
        """A token of each."""
        texts = [draft.read.tail or draft.read.cache for draft in going]
        logits_NMV = blocks.step([draft.due.pop(0) for draft in going], texts).numpy()
        # Where a text is not read to its end yet, its row is of no use.
        asked = [m for m, draft in enumerate(going) if not draft.due]
        if asked:
            drafts = [going[m] for m in asked]
            if len(asked) < len(going):
                logits_NMV = logits_NMV[:, asked]
            for draft, choice in zip(drafts, choices(drafts, logits_NMV), strict=True):
                draft.append(choice)

    def _run_ahead(self, draft: Draft, blocks: QuickBlocks) -> int:
        """Some tokens of one draft, the same as one by one; gives how many. The first block guesses them for
        itself, and the others read its guesses in one pass: reading the matrices is most of a step, and it
        is right nine times of ten. Three blocks of width 384: 0.72 of the time of a token (decision 0023)."""
        first, others = blocks.leading
        cache, due, text = draft.read.cache, draft.due, list(draft.text)
        at, most = cache.length, max(1, min(READ_AT_ONCE + 1 - len(due), draft.most - len(draft.tokens)))
        cache.reserve(len(due) + most)
        guessed: list[int] = []
        logits_RV = [first.read(due, cache, at)[0, -1].numpy()]
        while len(logits_RV) < most and not draft.done.cancelled():
            row = normalised(logits_RV[-1].astype(np.float64))
            choice = choose(row, draft.drafter.sampler, len(text), EXACT_TOLERANCE, text)
            if choice.margin < LEAST_LEAD_MARGIN:
                break
            guessed.append(choice.token)
            text.append(choice.token)
            logits_RV.append(first.read(guessed[-1:], cache, at + len(due) + len(guessed) - 1)[0, 0].numpy())
        rest_NRV = others.read(due + guessed, cache, at)[:, -len(logits_RV) :].numpy()
        logs_NRV = normalised(np.concatenate([np.stack(logits_RV)[None], rest_NRV]).astype(np.float64))
        rows_RV = np.einsum("n,nrv->rv", draft.weights, logs_NRV)
        # Each row counts while all guesses before it were those of all blocks.
        written = 0
        for row, guess in zip(rows_RV, [*guessed, None], strict=True):
            draft.append(draft.chosen_from(row))
            written += 1
            if draft.tokens[-1].token != guess:
                break
        cache.length += len(due) + written - 1
        return written

    def blocks_now(self, length: DraftLength) -> int:
        """How many blocks draft for a request of this policy."""
        return length.blocks(self.num_open, len(self.blocks), at_once=self.at_once)

    def keep(self, text: list[int], cache: Any, count: int) -> None:
        """Have a copy of the cache of so many blocks, which holds this text, for others that begin alike."""
        kept = [*self._kept[count][1 - KEPT_TEXTS :], (text, cache.copy())]
        self._kept[count] = kept
        # What other numbers of blocks have read goes first: they do not draft now.
        for some in [other for other in self._kept.values() if other is not kept] + [kept]:
            while len(some) > (some is kept) and self._kept_bytes > KEPT_BYTES:
                del some[0]

    @property
    def _kept_bytes(self) -> int:
        return sum(cache.num_bytes for kept in self._kept.values() for _, cache in kept)

    def has_read(self, text: list[int], count: int) -> bool:
        """Whether a cache of so many blocks is kept that holds the text, or nearly."""
        # A list of its own: the computing thread changes the other one meanwhile.
        kept = list(self._kept.get(count, ()))
        return any(len(text) - shared_length(known, text) <= READ_FIRST for known, _ in kept)

    def like(self, text: list[int], count: int) -> tuple[Any, int]:
        """A cache that holds a beginning of the text, and how much of it; None and 0 where that is little."""
        kept = self._kept[count]
        lengths = [shared_length(known, text) for known, _ in kept]
        longest = max(lengths, default=0)
        if longest < READ_FIRST:
            return None, 0
        kept.append(kept.pop(lengths.index(longest)))
        return kept[-1][1].copy(), longest


def _finish(drafts: Sequence[Draft]) -> None:
    for draft in drafts:
        if not draft.done.done():
            draft.done.set_result(draft.tokens)


def _fail(done: asyncio.Future[list[DraftedToken]], error: Exception) -> None:
    if not done.done():
        done.set_exception(error)


class Drafter:
    """Drafts for one request."""

    def __init__(self, drafting: Drafting, sampler: Sampler, length: DraftLength) -> None:
        self.drafting, self.sampler, self.length = drafting, sampler, length
        held = drafting.batcher.held
        self.context = held.context
        self.weights: Row = np.array(held.pooling.weights)
        """Of all blocks of the model, at the end of the text."""
        self.read: ReadText | None = None
        self._reading: asyncio.Future[list[DraftedToken]] | None = None
        """The cache reads a long stretch of text; no draft before it is through."""

    def __enter__(self) -> Drafter:
        self.drafting.num_open += 1
        return self

    def __exit__(self, *error: object) -> None:
        self.drafting.num_open -= 1
        # 64 clients that go away at once would leave a second of reading to the next one.
        if self._reading is not None:
            self._reading.cancel()

    @property
    def gathers(self) -> bool:
        """Whether the drafts of all requests wait for one another."""
        return self.length.gathers(self.drafting.num_open)

    @property
    def drafts_now(self) -> bool:
        """False where drafts do not pay, and the text is written as without a drafter."""
        return self.drafting.blocks_now(self.length) > 0

    @property
    def slides(self) -> bool:
        """Whether a draft may go past the place where the visible context slides."""
        return self.drafting.at_once

    @property
    def flights(self) -> int:
        """How many traversals the request may have under way."""
        return most_flights(self.drafting.num_open)

    async def draft(
        self, tokens: Sequence[int], most: int, ahead: Sequence[DraftedToken], *, flying: bool
    ) -> list[DraftedToken]:
        """Up to `most` tokens, as many as seem worth it; the last of `tokens`, those `ahead`, are drafts
        themselves. A long text is waited for until it is read here only if a traversal is `flying`."""
        margins, blocks = [one.margin for one in ahead], self.drafting.blocks_now(self.length)
        # Asked here too: where no token is worth its time, the computing thread is left alone.
        if most <= 0 or not blocks or not self._goes_on(margins, blocks, flying):
            return []
        if self.read is None or self.read.blocks != blocks:
            # Other blocks draft from now on. They read the text into caches of their own.
            if self._reading is not None:
                self._reading.cancel()
            self._reading, self.read = None, ReadText(self.drafting, blocks)
        read = self.read
        if self._reading is None or self._reading.done():
            start = window_start(len(tokens), self.context)
            # A prompt or a new window. The traversal need not wait until it is read here too: 128 bytes take
            # 60 ms at width 384, and of 64 requests that come at once the last would wait for all others.
            is_long = len(tokens) - max(start, read.reach(len(tokens), start)) > READ_FIRST
            is_long = is_long and not self.drafting.has_read(list(tokens[start:-1]), blocks)
            self._reading = self.drafting.begin(self, read, tokens, 0, []) if is_long else None
        if self._reading is not None:
            if not flying:
                return []
            # Shielded: a draft that is called off leaves the reading to the next one.
            await asyncio.shield(self._reading)
            if self.drafting.blocks_now(self.length) != blocks or not self._goes_on(margins, blocks, flying):
                return []
        return await self.drafting.begin(self, read, tokens, most, margins, flying=flying)

    def _goes_on(self, margins: Sequence[float], blocks: int, flying: bool) -> bool:
        now = time.monotonic()
        return self.length.go_on(margins, self.drafting.num_open, now, blocks=blocks, flying=flying)

    def observe(self, found: Traversed, weights: Row) -> None:
        """What came of a traversal, and all blocks' weights at its end: those of the next few tokens are
        about the same."""
        self.weights = weights
        reading = self.drafting.num_unread > 0
        self.length.observe(found, self.drafting.num_open, time.monotonic(), reading=reading)

    # ---- in the computing thread ----

    def goes_on(self, draft: Draft, requests: int, now: float) -> bool:
        drafted = len(draft.tokens)
        return drafted < draft.most and self.length.go_on(
            draft.margins, requests, now, blocks=draft.blocks, flying=draft.flying, unsent=drafted
        )
