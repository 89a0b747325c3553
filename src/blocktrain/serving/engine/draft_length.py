"""How many blocks draft, and how many tokens before a traversal: policies that learn from earlier drafts.

Pure state, fed with margins, counts, seconds and the time. A draft of any length by any blocks gives the same
text; these decide only how long it takes.
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
FIRST_BLOCK_SECONDS = 0.001
"""Of one token by one block, before any was measured."""
FIRST_COUNT = 4.0
"""Tokens of each class that this counts for."""
FEW_REQUESTS = 4
"""So many never keep a gateway busy."""
USUAL_DRAFT, BUSY_SHARE = 8, 0.5
"""A gateway is busy that takes such a part of the shortest traversal or more to draft so many tokens for all
requests."""
WEIGHED_DRAFT = 6
"""Tokens, for which one block is weighed against several where the gateway is busy: drafts of 4 to 12 bring
about as much for their time."""
SETTLING, COUNTED = 2, 4
"""Traversals of each request, in the mean, that pass after another way began, and those counted then."""
SETTLING_SECONDS = 0.5
"""And so long after a load began, in which prompts are read and memory is taken."""
LEAST_SECONDS = 1.0
"""Of counting. Traversals of many requests land in bursts, and in 0.3 s one way had 931 and 281 tokens a
second."""
CLEARLY_WORSE, CLEARLY_COUNTED = 0.85, 8
"""A trial without drafts ends after so many traversals of each request if it writes less than this part of
what drafts did: with 8 clients on loopback after 0.1 s instead of 1.2, of every 3 s while a load is new."""
BETTER = 1.05
"""Another way must write so much more before it is kept: two runs of one way differ by as much."""
KNOWN_SECONDS = 30.0
"""So long what was found before counts half, beside what is found now."""
FIRST_PATIENCE, MOST_PATIENCE = 4.0, 64.0
"""Seconds until a slower way is tried again: twice as long whenever it was still slower."""
TRIAL_SHARE = 12
"""And at least so many times as long as it took to find out."""
LEAST_ROWS = 2.0
"""Rows of a traversal in the mean, from which on what each of them costs is worked out."""
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
    rows: int = 1
    """Asked for in this traversal, right or wrong."""
    blocks: int = 0
    """How many blocks drafted these tokens; 0 where nothing was drafted."""


class DraftLength:
    """Drafts of a fixed length, and the questions that every policy answers."""

    patience_seconds = 0.0
    """So long a draft waits for those of other requests to begin with, where it `gathers`."""

    def __init__(self, most: int) -> None:
        self.most = most
        """No draft is longer."""

    def most_of(self, flights: int) -> int:
        """Tokens of a draft at most, where so many traversals may be under way."""
        return self.most

    def gathers(self, requests: int) -> bool:
        """Whether drafts of so many requests wait for one another, so that their traversals meet on the
        stages."""
        return requests > FEW_REQUESTS

    def blocks(self, requests: int, held: int, *, at_once: bool) -> int:
        """How many of the blocks held here draft while so many requests are under way; 0 for no drafts.
        `at_once`: they are stepped together, and take little longer than one."""
        return held

    def go_on(
        self,
        margins: Sequence[float],
        requests: int,
        now: float,
        *,
        blocks: int,
        flying: bool = False,
        unsent: int = 0,
    ) -> bool:
        """Whether so many blocks draft one more token behind unverified tokens that won by these margins,
        while so many requests are under way. `flying`: the text waits for a traversal anyhow. `unsent`: so
        many of those tokens wait to be sent with the next one."""
        return True

    def stepped(
        self, seconds: float, requests: int, now: float, *, blocks: int, texts: int | None = None
    ) -> None:
        """A token was drafted by so many blocks for each of so many texts, or of all requests; this is each
        text's part of the time."""

    def observe(self, found: Traversed, requests: int, now: float, *, reading: bool = False) -> None:
        """Learn from a traversal. `reading`: the gateway still reads texts before it can draft for them."""


class Comparison:
    """Whether drafts pay: what all requests together write a second with them, and without.

    Gateway and stages may share processors, and a batch makes traversals dear or cheap for all: what a draft
    costs the others no request can tell. With 32 clients on two cores drafts halved what all of them wrote,
    and the rule for one request went on. So both ways are tried, each for six traversals of every request
    and a second at least (less where none are clearly slower), and the faster one is kept; the other one is
    tried again from time to time.
    """

    def __init__(self, *, drafts: bool) -> None:
        self.drafts = drafts
        """What is done now."""
        self.best = drafts
        self.speeds: dict[bool, float] = {}
        """Tokens a second of all requests, with drafts and without."""
        self.known_at: dict[bool, float] = {}
        self.found_once: dict[bool, bool] = {}
        """Whether it was found only once so far."""
        self.patience = FIRST_PATIENCE
        self.last = -math.inf
        self.is_new = True
        """Whether the load began just now, and what drafts is to be chosen."""
        self._settle(-math.inf)

    def _settle(self, now: float, seconds: float = 0.0) -> None:
        self.is_settling, self.since, self.until = True, now, now + seconds
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
                del self.speeds[way], self.known_at[way], self.found_once[way]
            # Of what is not known any more drafts are tried first.
            self.best = max(self.speeds, key=self.speeds.__getitem__, default=True)
            self.drafts = self.best
            self._settle(now, SETTLING_SECONDS)
            self.is_new = True
        self.last = now
        self.traversals += 1
        if self.is_settling:
            reads = self.drafts and reading and now - self.since < MOST_READING_SECONDS
            if self.traversals >= SETTLING * requests and now >= self.until and not reads:
                self.is_settling = False
                self._count()
            return
        self.tokens += found.tokens
        self.seconds += seconds
        tried, speed = self.drafts, self.tokens / self.seconds if self.seconds else math.inf
        # Without drafts a traversal brings one token, so that little is enough to see that it is slower.
        # Looked at between the bursts in which those of all requests land.
        clear = not tried and self.best and self.traversals >= CLEARLY_COUNTED * requests
        clear = clear and self.traversals % requests == 0 and speed < CLEARLY_WORSE * self.speeds[self.best]
        if not clear and (self.traversals < COUNTED * requests or self.seconds < LEAST_SECONDS):
            return
        # What was found just before counts too; what was found long ago may be true no more, and what was
        # found first may have been a start from cold: drafts had 700 tokens a second, and then 1,800.
        if now - self.known_at.get(tried, -math.inf) < KNOWN_SECONDS and not self.found_once[tried]:
            speed = (speed + self.speeds[tried]) / 2
        self.found_once[tried] = tried not in self.speeds
        self.speeds[tried] = speed
        self.known_at[tried] = now
        other = not self.best
        if self.speeds.get(other, 0.0) > BETTER * self.speeds.get(self.best, math.inf):
            self.best, self.patience = other, FIRST_PATIENCE
        elif tried == other:
            self.patience = max(min(2 * self.patience, MOST_PATIENCE), TRIAL_SHARE * (now - self.since))
        # Without drafts a traversal brings a token: where they bring more than that can, it is not tried,
        # but for once where many share a traversal. What one without drafts takes is not known before.
        other = not self.best
        known = other in self.speeds or requests == 1
        hopeless = self.best and known and self.speeds[self.best] * least > requests
        due = now - self.known_at.get(other, -math.inf) > self.patience
        self.drafts = other if due and not hopeless else self.best
        if self.drafts == tried:
            self._count()
        else:
            self._settle(now)


class Costs:
    """What things take one way at one load; older observations count less."""

    def __init__(self) -> None:
        self.step_seconds, self.step_at = 0.0, -math.inf
        """Of one token of one draft, and when the last one was made. None so far: the first one is free, and
        the second already knows its cost."""
        self.tokens, self.seconds = 1.0, 0.05
        """Of recent traversals with their drafts."""
        self.traversal_seconds, self.rows = 0.0, 1.0
        """Of recent ones, in the mean."""
        self.least_seconds = math.inf
        """The least that this mean was of late."""

    def trust(self, now: float) -> float:
        """What `step_seconds` counts now, of 1 just after a step."""
        return math.pow(0.5, max(0.0, now - self.step_at) / HALF_LIFE_SECONDS)


class Load:
    """What is known of about so many requests under way."""

    def __init__(self, *, drafts: bool, alone: bool) -> None:
        self.comparison = Comparison(drafts=drafts)
        self.costs = {True: Costs(), False: Costs()}
        """With drafts, and without."""
        self.alone = alone
        """Whether one block drafts where the gateway is busy, or all that are held here."""
        self.step_seconds: dict[bool, float] = {}
        """The shortest time of late that a token of one text took, by one block alone and by several."""

    def step(self, blocks: int, held: int) -> float:
        """Seconds for a token of one text, by one block or by all that are held."""
        known = self.step_seconds.get(blocks == 1)
        if known is not None:
            return known
        other = self.step_seconds.get(blocks != 1, FIRST_BLOCK_SECONDS * (held if blocks == 1 else 1))
        return other / held if blocks == 1 else other * held

    @property
    def row_seconds(self) -> float:
        """By how much one more row of every request makes traversals longer, where that was measured."""
        plain, drafted = self.costs[False], self.costs[True]
        if drafted.rows < LEAST_ROWS:
            return 0.0
        # Not the mean without drafts: it is from a trial that is over, often at the start, when prompts were
        # read, and beside it rows looked half as dear as they were.
        more = drafted.traversal_seconds - min(plain.least_seconds, drafted.traversal_seconds)
        return more / (drafted.rows - 1)


class AdaptiveLength(DraftLength):
    """Draft on while the next token is worth its time; shared by all requests of an engine.

    A token that won its draft by a wide margin is rarely wrong, so the chance of acceptance is counted by
    margin. The next token brings (chance that all before it hold) * (its own chance) tokens. It costs its
    part of a step and one more row, and in that time all requests together make tokens by going on as usual.
    So drafts are long where the network is slow or the text is easy, and short where processors are busy.

    All blocks held here draft, or the first one alone where they are stepped one by one and the gateway is
    busy. Costs are kept apart by how many requests are under way, in powers of two: what a burst of 64 taught
    says nothing about the one request after it. And a cost that nobody measured lately is believed less and
    less: before, one burst of 32 ended drafting until the gateway was started again. Whether to draft at all
    is left to a `Comparison`.
    """

    # Traversals of eight requests on loopback take 20 to 40 ms.
    patience_seconds = 0.04

    def __init__(self) -> None:
        super().__init__(MAX_DRAFT_TOKENS)
        self.tries = {alone: [FIRST_COUNT] * len(FIRST_CHANCES) for alone in (True, False)}
        """By margin, of tokens that one block drafted alone, and several."""
        self.hits = {alone: [FIRST_COUNT * chance for chance in FIRST_CHANCES] for alone in (True, False)}
        self.by_load: dict[int, Load] = {}
        self.least_seconds = math.inf
        """The shortest traversal of late."""
        self.last = -math.inf
        """When the last one landed."""

    def most_of(self, flights: int) -> int:
        return self.most if flights == 1 else FLIGHT_TOKENS

    def load(self, requests: int) -> Load:
        # Rounded: as many requests as a power of two, and some that come and go, are one load.
        load = round(math.log2(max(1, requests)))
        if load not in self.by_load:
            # Where fewer requests write more without drafts, so do more; and where by several blocks, too.
            below = [one for one in list(self.by_load) if one < load]
            fewer = self.by_load[max(below)] if below else Load(drafts=True, alone=True)
            new = Load(drafts=fewer.comparison.best, alone=fewer.alone)
            # The computing thread asks too.
            self.by_load.setdefault(load, new)
        return self.by_load[load]

    def is_busy(self, requests: int, held: int) -> bool:
        """True if drafts of all blocks held here, for so many requests, take longer than the network does."""
        seconds = requests * USUAL_DRAFT * self.load(requests).step(held, held)
        # As long as no traversal has landed the network may be a fast one.
        known = self.least_seconds if math.isfinite(self.least_seconds) else 0.0
        return requests > FEW_REQUESTS and seconds > BUSY_SHARE * known

    def gathers(self, requests: int) -> bool:
        # Where the network takes longer than one would wait, passes of a stage are not what counts.
        known = self.least_seconds if math.isfinite(self.least_seconds) else 0.0
        return requests > FEW_REQUESTS and known < self.patience_seconds

    def blocks(self, requests: int, held: int, *, at_once: bool) -> int:
        load = self.load(requests)
        if not load.comparison.drafts:
            return 0
        # Two blocks of width 128 and three of 384 write as much as one of them or more, whatever the load.
        if at_once or held < 2 or not self.is_busy(requests, held):
            return held
        # One block costs a part of what several do and is wrong more often. Which writes more depends on the
        # stages: where their passes are mostly bookkeeping, a long draft costs them little.
        plain, speeds = load.costs[False].traversal_seconds, []
        row = load.row_seconds
        if plain and load.comparison.is_new:
            for blocks, alone in ((1, True), (held, False)):
                chance = sum(self.hits[alone]) / sum(self.tries[alone])
                tokens = sum(chance**i for i in range(WEIGHED_DRAFT + 1))
                step = requests * load.step(blocks, held)
                speeds.append(tokens / (plain + WEIGHED_DRAFT * (row + step)))
            # A change has every text read again by other blocks, 32 of them for two seconds: not for little,
            # and not while they are written.
            least = BETTER if load.alone else 1 / BETTER
            load.alone = speeds[1] <= least * speeds[0]
            load.comparison.is_new = False
        return 1 if load.alone else held

    def go_on(
        self,
        margins: Sequence[float],
        requests: int,
        now: float,
        *,
        blocks: int,
        flying: bool = False,
        unsent: int = 0,
    ) -> bool:
        # The first token is what the comparison is about: where drafts seemed too dear, both ways were alike.
        if not margins:
            return True
        load, tries, hits = self.load(requests), self.tries[blocks == 1], self.hits[blocks == 1]
        costs = load.costs[True]
        gain = sum(hits) / sum(tries)
        for margin in margins:
            bucket = bisect(MARGINS, margin)
            gain *= hits[bucket] / tries[bucket]
        step_seconds = costs.step_seconds * costs.trust(now)
        # Drafts that cost too much lower the usual rate, and would look cheap beside it. The rate without any
        # was measured, or else a traversal brings a token.
        plain, alone = load.comparison.speeds.get(False), costs.traversal_seconds
        least_rate = plain / max(1, requests) if plain else 1 / alone if alone else 0.0
        rate = max(costs.tokens / costs.seconds, least_rate)
        # One request alone waits for what is under way: what is drafted meanwhile costs it nothing, unless
        # tokens wait longer to be sent than a traversal takes.
        idle = flying and requests == 1 and unsent * step_seconds < alone
        # The gateway drafts for some while stages verify for others, so the longer of both counts.
        cost = rate * max(requests * step_seconds, load.row_seconds)
        return gain > (min(cost, LEAST_CHANCE) if idle else cost)

    def stepped(
        self, seconds: float, requests: int, now: float, *, blocks: int, texts: int | None = None
    ) -> None:
        load, alone = self.load(requests), blocks == 1
        # What few of many texts took says little of them all.
        if texts is None or 2 * texts >= requests:
            load.step_seconds[alone] = min(seconds, SLOWER * load.step_seconds.get(alone, math.inf))
        costs = load.costs[True]
        kept = KEEP_COST * costs.trust(now)
        costs.step_seconds = kept * costs.step_seconds + (1 - kept) * seconds
        costs.step_at = now

    def observe(self, found: Traversed, requests: int, now: float, *, reading: bool = False) -> None:
        tries, hits = self.tries[found.blocks == 1], self.hits[found.blocks == 1]
        for i, margin in enumerate(found.margins):
            bucket = bisect(MARGINS, margin)
            tries[bucket] = KEEP * tries[bucket] + 1
            hits[bucket] = KEEP * hits[bucket] + (i < found.accepted)
        load = self.load(requests)
        # Of the way that is tried now: the first traversal of a text has no draft in either.
        costs = load.costs[load.comparison.drafts]
        costs.tokens = KEEP_COST * costs.tokens + found.tokens
        costs.seconds = KEEP_COST * costs.seconds + found.seconds
        mean = costs.traversal_seconds or found.traversal_seconds
        costs.traversal_seconds = mean + (1 - KEEP_COST) * (found.traversal_seconds - mean)
        costs.rows += (1 - KEEP_COST) * (found.rows - costs.rows)
        costs.least_seconds = min(costs.traversal_seconds, SLOWER * costs.least_seconds)
        self.least_seconds = min(found.traversal_seconds, SLOWER * self.least_seconds)
        # The time since anybody's last traversal, but for that in which there was no request.
        seconds, self.last = min(now - self.last, found.seconds), now
        load.comparison.observe(found, seconds, requests, now, least=self.least_seconds, reading=reading)
