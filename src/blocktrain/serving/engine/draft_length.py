"""How many tokens to draft before a traversal: policies that learn from what came of earlier drafts.

Pure state, fed with margins, counts, seconds and the time. A draft of any length gives the same text; these
decide only how long it takes.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from blocktrain.serving.engine.requests import MAX_DRAFT_TOKENS

MARGINS = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Borders, in nats, between the classes of margins that chances are counted for."""
KEEP = 0.99
"""What an earlier observation counts after one more: the last 100 of a class decide."""
KEEP_COST = 0.9
HALF_LIFE_SECONDS = 2.0
"""In this time the cost of a draft counts half, where none was made to measure it again."""
FLIGHTS = 8
"""Traversals of one request under way at most."""
FLIGHTS_OF_ALL = 8
"""The same of all requests together, but for one each: with more of them processors are busy anyhow. Eight
requests on two cores took 0.83 and 0.89 of the processor time for a byte with one flight each instead of two,
and wrote 1.14 and 1.11 times as much (wikitext-2 at 100 ms, demo at 0)."""
FLIGHT_TOKENS = 12
"""Drafted for each traversal, where several may be under way. A stage's pass takes 15 ms and 0.5 for each
token: with 8, text came as fast (a simulation over recorded drafts), for a quarter more passes."""
LEAST_CHANCE = 0.05
"""That the next token holds, where a draft costs its request nothing: stages compute what is void, too."""
FIRST_CHANCES = (0.55, 0.8, 0.9, 0.96, 0.97, 0.985, 0.995, 0.998, 0.999)
"""That a token of each class of margins holds, before any was seen: so many of one block's do, of four."""
FIRST_COUNT = 4.0
"""Tokens of each class that this counts for."""
SETTLING, COUNTED = 2, 2
"""Traversals of each request, in the mean, that pass after drafts began or ended, and those counted then."""
LEAST_SECONDS = 0.3
"""Of counting: a shorter time says little."""
FIRST_PATIENCE, MOST_PATIENCE = 8.0, 64.0
"""Seconds until the slower way is tried again: twice as long whenever it was still slower."""
TRIAL_SHARE = 12
"""And at least so many times as long as it took to find out."""
MOST_READING_SECONDS = 10.0
"""So long drafts are not judged while the gateway reads texts for them: that pays later."""
SLOWER = 1.001
"""What the shortest traversal of late counts, for each one since: 700 later twice as long."""
AWAY_SECONDS = 1.0
"""After so long without a request at a load, traversals pass as after a change."""


def most_flights(requests: int) -> int:
    """How many traversals each of so many requests may have under way."""
    return max(1, min(FLIGHTS, FLIGHTS_OF_ALL // max(1, requests)))


@dataclass(frozen=True)
class Traversed:
    """What came of a traversal and the drafts in it."""

    margins: Sequence[float]
    """By how much each drafted token won, up to the first wrong one."""
    accepted: int
    tokens: int
    """Written."""
    seconds: float
    """Since the text was last written on."""
    traversal_seconds: float


class DraftLength:
    """Drafts of a fixed length, and the questions that every policy answers."""

    def __init__(self, most: int) -> None:
        self.most = most
        """No draft is longer."""

    def most_of(self, flights: int) -> int:
        """Tokens of a draft at most, where so many traversals may be under way."""
        return self.most

    def go_on(
        self, margins: Sequence[float], requests: int, now: float, *, flying: bool = False, unsent: int = 0
    ) -> bool:
        """Whether to draft one more token behind unverified tokens that won by these margins, while so many
        requests are under way. `flying`: the text waits for a traversal anyhow. `unsent`: so many of those
        tokens wait to be sent with the next one."""
        return True

    def stepped(self, seconds: float, requests: int, now: float) -> None:
        """A step that drafted a token for each text took this long."""

    def observe(self, found: Traversed, requests: int, now: float, *, reading: bool = False) -> None:
        """Learn from a traversal. `reading`: the gateway still reads texts before it can draft for them."""


class Comparison:
    """Whether drafts pay: what all requests together write a second with them, and without.

    Gateway and stages may share processors, and a batch makes traversals dear or cheap for all: what a draft
    costs the others no request can tell. With 32 clients on two cores a step took half as long as a
    traversal, and yet text took 0.55 of the processor time with drafts. So both ways are tried, each for two
    traversals of every request, and the faster one is kept; the other one is tried again from time to time.
    """

    def __init__(self) -> None:
        self.drafts = True
        """What is done now."""
        self.best = True
        self.speeds: dict[bool, float] = {}
        """Tokens a second of all requests, with drafts and without."""
        self.known_at: dict[bool, float] = {}
        self.patience = FIRST_PATIENCE
        self.last = -math.inf
        self._settle(-math.inf)

    def _settle(self, now: float) -> None:
        self.is_settling, self.since = True, now
        self._count()

    def _count(self) -> None:
        self.traversals, self.tokens, self.seconds = 0, 0, 0.0

    def observe(
        self, found: Traversed, seconds: float, requests: int, now: float, *, least: float, reading: bool
    ) -> None:
        """A traversal landed, `seconds` after the one before it. None of late took less than `least`."""
        if now - self.last > found.seconds + AWAY_SECONDS:
            old = [way for way, at in self.known_at.items() if now - at > MOST_PATIENCE]
            for way in old:
                del self.speeds[way], self.known_at[way]
            self.best = max(self.speeds, key=self.speeds.__getitem__, default=True)
            self.drafts = self.best
            self._settle(now)
        self.last = now
        self.traversals += 1
        if self.is_settling:
            reads = self.drafts and reading and now - self.since < MOST_READING_SECONDS
            if self.traversals >= SETTLING * requests and not reads:
                self.is_settling = False
                self._count()
            return
        self.tokens += found.tokens
        self.seconds += seconds
        if self.traversals < COUNTED * requests or self.seconds < LEAST_SECONDS:
            return
        tried, speed = self.drafts, self.tokens / self.seconds
        # What was found just before counts too; what was found long ago may be true no more.
        if now - self.known_at.get(tried, -math.inf) < FIRST_PATIENCE:
            speed = (speed + self.speeds[tried]) / 2
        self.speeds[tried] = speed
        self.known_at[tried] = now
        best = max(self.speeds, key=self.speeds.__getitem__)
        if best != self.best:
            self.patience = FIRST_PATIENCE
        elif tried != best:
            self.patience = max(min(2 * self.patience, MOST_PATIENCE), TRIAL_SHARE * (now - self.since))
        self.best, other = best, not best
        # Without drafts a traversal brings a token: where they bring more than that can, nothing is tried.
        hopeless = best and self.speeds[best] * least > requests
        due = other not in self.speeds or now - self.known_at[other] > self.patience
        self.drafts = other if due and not hopeless else best
        if self.drafts == tried:
            self._count()
        else:
            self._settle(now)


class Costs:
    """What things take while about so many requests are under way; older observations count less."""

    def __init__(self) -> None:
        self.step_seconds, self.step_at = 0.0, -math.inf
        """Of one step of all drafts, and when the last one was made. None so far: the first one is free, and
        the second already knows its cost."""
        self.tokens, self.seconds = 1.0, 0.05
        """Of recent traversals with their drafts."""
        self.traversal_seconds = 0.0
        """Of recent ones, in the mean."""
        self.comparison = Comparison()

    def trust(self, now: float) -> float:
        """What `step_seconds` counts now, of 1 just after a step."""
        return math.pow(0.5, max(0.0, now - self.step_at) / HALF_LIFE_SECONDS)


class AdaptiveLength(DraftLength):
    """Draft on while the next token is worth its time; shared by all requests of an engine.

    A token that won its draft by a wide margin is rarely wrong, so the chance of acceptance is counted by
    margin. The next token brings (chance that all before it hold) * (its own chance) tokens. It costs one
    step of all drafts, and in that time a request makes `rate` tokens by going on as usual. So drafts are
    long where the network is slow or the text is easy, and short where processors are busy.

    Costs are kept apart by how many requests are under way, in powers of two: what a burst of 64 taught says
    nothing about the one request after it. And a cost that nobody measured lately is believed less and
    less: before, one burst of 32 ended drafting until the gateway was started again. Whether to draft at all
    is left to a `Comparison`.
    """

    def __init__(self) -> None:
        super().__init__(MAX_DRAFT_TOKENS)
        self.tries = [FIRST_COUNT] * len(FIRST_CHANCES)
        self.hits = [FIRST_COUNT * chance for chance in FIRST_CHANCES]
        self.by_load: dict[int, Costs] = {}
        self.least_seconds = math.inf
        """The shortest traversal of late."""
        self.last = -math.inf
        """When the last one landed."""

    def most_of(self, flights: int) -> int:
        return self.most if flights == 1 else FLIGHT_TOKENS

    def costs(self, requests: int) -> Costs:
        # Rounded: as many requests as a power of two, and some that come and go, are one load.
        return self.by_load.setdefault(round(math.log2(max(1, requests))), Costs())

    def go_on(
        self, margins: Sequence[float], requests: int, now: float, *, flying: bool = False, unsent: int = 0
    ) -> bool:
        costs = self.costs(requests)
        # The first token is what the comparison is about: where drafts seemed too dear, both ways were alike.
        if not (costs.comparison.drafts and margins):
            return costs.comparison.drafts
        gain = sum(self.hits) / sum(self.tries)
        for margin in margins:
            bucket = bisect(MARGINS, margin)
            gain *= self.hits[bucket] / self.tries[bucket]
        step_seconds = costs.step_seconds * costs.trust(now)
        # Drafts that cost too much lower the usual rate, and would look cheap beside it. The rate without any
        # was measured, or else a traversal brings a token.
        plain, alone = costs.comparison.speeds.get(False), costs.traversal_seconds
        least_rate = plain / requests if plain else 1 / alone if alone else 0.0
        rate = max(costs.tokens / costs.seconds, least_rate)
        # One request alone waits for what is under way: what is drafted meanwhile costs it nothing, unless
        # tokens wait longer to be sent than a traversal takes.
        idle = flying and requests == 1 and unsent * step_seconds < alone
        cost = rate * step_seconds
        return gain > (min(cost, LEAST_CHANCE) if idle else cost)

    def stepped(self, seconds: float, requests: int, now: float) -> None:
        costs = self.costs(requests)
        kept = KEEP_COST * costs.trust(now)
        costs.step_seconds = kept * costs.step_seconds + (1 - kept) * seconds
        costs.step_at = now

    def observe(self, found: Traversed, requests: int, now: float, *, reading: bool = False) -> None:
        for i, margin in enumerate(found.margins):
            bucket = bisect(MARGINS, margin)
            self.tries[bucket] = KEEP * self.tries[bucket] + 1
            self.hits[bucket] = KEEP * self.hits[bucket] + (i < found.accepted)
        costs = self.costs(requests)
        costs.tokens = KEEP_COST * costs.tokens + found.tokens
        costs.seconds = KEEP_COST * costs.seconds + found.seconds
        mean = costs.traversal_seconds or found.traversal_seconds
        costs.traversal_seconds = mean + (1 - KEEP_COST) * (found.traversal_seconds - mean)
        self.least_seconds = min(found.traversal_seconds, SLOWER * self.least_seconds)
        # The time since anybody's last traversal, but for that in which there was no request.
        seconds, self.last = min(now - self.last, found.seconds), now
        costs.comparison.observe(found, seconds, requests, now, least=self.least_seconds, reading=reading)
