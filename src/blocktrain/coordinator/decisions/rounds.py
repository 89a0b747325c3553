"""When a round closes, how long it lasts, and who works in it: pure functions of facts and time.

`round_state` holds every rule in the order in which it is applied. Offsets are seconds from the beginning of
a round to an update's arrival. Every answer carries the sentence that the API, the log and the page show.
"""

from __future__ import annotations

import itertools
import math
import operator
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from blocktrain.config import SwarmConfig, TrustConfig
from blocktrain.wording import counted, duration

FEW_ARRIVALS = 4
"""Below this many observations a quantile means nothing; twice the slowest is used."""
HISTORY_ARRIVALS = 32
"""How many of the latest offsets of a block count."""
DEADLINE_STEP = 2.0
"""A round is at most this many times as long, or as short, as the arrivals before its last round ask for.
Six workers that revealed minutes late moved a deadline from 8 s to over 80 s in one round."""


PACE_ROUNDS = 8
"""Rounds of a block from which the time left is told."""


@dataclass(frozen=True, kw_only=True)
class Arrivals:
    """What has come for a block's open round, and how long it took in earlier ones. Workers are named by
    their ids."""

    version: int
    """Head snapshot; also the number of the open round."""
    begun: float | None
    on_time: frozenset[str] = frozenset()
    """Workers whose update on the head waits for the merge."""
    late: frozenset[str] = frozenset()
    """Workers whose update on an older version waits for the merge."""
    counted: frozenset[str] = frozenset()
    """Workers that had a good verdict on the head's round; they may be in a merge that is under way."""
    refused: frozenset[str] = frozenset()
    """Workers whose update on the head was refused."""
    judging: tuple[float, ...] = ()
    """Arrival times of updates without a verdict."""
    history: Sequence[float] = ()
    """Offsets of updates that counted in earlier rounds, the latest HISTORY_ARRIVALS. Refused ones are not
    among them: who does no work must not bend the deadlines of those who do."""
    before: Sequence[float] = ()
    """The same without the last round."""
    this_round: Sequence[float] = ()
    """Offsets of the open round, of updates that count or, while there are none, of those that came; read
    only where there is no history."""
    merging: bool = False
    """A merge is under way: its inputs are fixed, and what arrives now belongs to the next one."""
    claimed_until: float | None = None
    """Time after which the process that merges is taken to be dead."""


@dataclass(frozen=True, kw_only=True)
class RoundFacts(Arrivals):
    """Everything that decides when a block's open round closes."""

    live: frozenset[str]
    """Workers on the block that sent a request within `swarm.lease_seconds`."""
    established: Mapping[str, int] = field(default_factory=dict)
    """Those of them that are off probation, with their good verdicts so far."""


@dataclass(frozen=True)
class RoundClock:
    deadline: float | None
    """None while the round has not begun."""
    reason: str
    period_began: float | None
    """Beginning of the round, or of its last re-set deadline."""


@dataclass(frozen=True)
class OpenRound:
    on_time: int
    late: int
    wanted: int
    """On-time updates that close the round before its deadline."""
    workers: int
    """Workers that the round waits for."""
    clock: RoundClock
    period_began: float | None
    """Beginning of the round, or of its last re-set deadline: what was refused before it may be tried
    again."""
    close: bool
    reason: str


def round_clock(arrivals: Arrivals, swarm: SwarmConfig, now: float) -> RoundClock:
    """The deadline of a block's open round; who works at the block has no part in it."""
    seconds, reason = round_seconds(arrivals.history, arrivals.this_round, swarm, arrivals.before)
    if arrivals.begun is None:
        reason = f"begins with the first assignment, then lasts {duration(seconds)}: {reason}"
        return RoundClock(None, reason, None)
    # While there is nothing to merge it is re-set by whole rounds until it is ahead.
    nothing = not (arrivals.on_time or arrivals.late or arrivals.judging)
    resets = max(0, math.ceil((now - arrivals.begun) / seconds) - 1) if nothing else 0
    if resets:
        often = "once" if resets == 1 else f"{resets} times"
        reason += f"; re-set {often}, as nothing had arrived"
    return RoundClock(arrivals.begun + seconds * (1 + resets), reason, arrivals.begun + seconds * resets)


def round_state(facts: RoundFacts, swarm: SwarmConfig, trust: TrustConfig, now: float) -> OpenRound:
    """The open round of a block: who it waits for, until when, and whether it closes now."""
    on_time, late = len(facts.on_time), len(facts.late)

    # Where there are established workers the round waits for these alone, so that a crowd of newcomers can
    # neither hold it up nor close it early. A worker established during this round (its verdict on the head
    # was the last it needed) does not count yet, so it cannot close the round before its equals deliver.
    needed = trust.probation_verdicts
    established = {
        worker for worker, good in facts.established.items() if good - (worker in facts.counted) >= needed
    }
    awaited = established or facts.live

    # An update that counts from a worker nobody waits for must not take the place of one that is awaited: it
    # raises the number that is wanted. Without established workers those are the workers that delivered and
    # are elsewhere, or gone.
    moved = 0 if established else len(facts.on_time - facts.live)
    extra = len(facts.on_time - established) if established else 0

    # A worker that was refused has had its turn. Without a judge it may try the round again at once, so it
    # is still awaited.
    refused = facts.refused & awaited if established else facts.refused
    given_up = 0 if trust.judge == "off" else len(refused)

    # All replicas are wanted, also those that are missing: then rounds last until their deadline, and workers
    # that run ahead train meanwhile. Closing without them was measured, not kept (docs/history, T4).
    wanted = max(1, max(len(awaited) + moved, swarm.replicas) - given_up) + extra

    clock = round_clock(facts, swarm, now)
    deadline, period_began = clock.deadline, clock.period_began
    # Where everybody at the block was refused nobody is waited for, and they may try again soon: one
    # worker alone waited 306 s in a small judged run. Not at once, or who sends noise could try as often
    # as it takes.
    nothing = not (on_time or late or facts.judging)
    if facts.begun is not None and period_began is not None and nothing and facts.live <= facts.refused:
        shortest = swarm.min_deadline_seconds
        period_began = max(period_began, now - (now - facts.begun) % shortest)

    def state(close: bool, reason: str) -> OpenRound:
        return OpenRound(on_time, late, wanted, len(awaited), clock, period_began, close, reason)

    if facts.version >= swarm.rounds:
        return state(False, "the block has had all its rounds")

    # A process that died while merging left a fixed set of inputs: the next process finishes the merge.
    if facts.merging:
        abandoned = facts.claimed_until is None or facts.claimed_until < now
        return state(abandoned, "continues a merge that was begun" if abandoned else "is being merged")

    # Only updates on the head make the quorum: a late one must not cut off its own successor.
    passed = deadline is not None and now >= deadline
    if on_time >= wanted:
        reason = f"all {wanted} wanted updates have arrived"
    elif passed and (on_time or late):
        reason = f"deadline passed with {on_time} of {wanted} updates, {late} late ones"
    else:
        return state(False, f"{on_time} of {wanted} updates have arrived")

    # What arrived in time waits for its judge, but not for longer than the judge's patience.
    in_time = [one for one in facts.judging if deadline is None or one <= deadline]
    if any(one > now - trust.judge_patience_seconds for one in in_time):
        return state(False, f"{reason}; waits for the judge")
    return state(True, reason)


def round_seconds(
    history: Sequence[float], this_round: Sequence[float], swarm: SwarmConfig, before: Sequence[float] = ()
) -> tuple[float, str]:
    """Length of a round from earlier rounds' offsets; from its own where there is no history yet. The round
    before this one was computed from `before`."""
    if swarm.policy == "drop":
        return swarm.drop_deadline_seconds, "fixed by swarm.drop_deadline_seconds (policy drop)"
    offsets = history or this_round
    if not offsets:
        return swarm.max_deadline_seconds, "no update has arrived yet (swarm.max_deadline_seconds)"
    wanted, reason = _wanted_seconds(offsets, swarm)
    if before:
        last = _wanted_seconds(before, swarm)[0]
        near = min(max(wanted, last / DEADLINE_STEP), last * DEADLINE_STEP)
        if near != wanted:
            wanted, reason = near, f"{reason}; held to {near:.1f} s, as the round before had {last:.1f} s"
    seconds = min(max(wanted, swarm.min_deadline_seconds), swarm.max_deadline_seconds)
    return seconds, reason if seconds == wanted else f"{reason}, bounded to {seconds:g} s"


def _wanted_seconds(offsets: Sequence[float], swarm: SwarmConfig) -> tuple[float, str]:
    """What these arrivals ask for, before any bound."""
    if len(offsets) < FEW_ARRIVALS:
        return 2 * max(offsets), f"twice the slowest of {counted(len(offsets), 'arrival')}"
    # The slack keeps equal workers from being cut off by their own jitter.
    slowest = quantile(offsets, swarm.deadline_quantile)
    share, slack = f"{swarm.deadline_quantile:.0%}", swarm.deadline_slack
    reason = f"{share} of the last {len(offsets)} arrivals took at most {slowest:.1f} s, times {slack:g}"
    return slowest * slack, reason


@dataclass(frozen=True, kw_only=True)
class BlockPace:
    """How fast a block's rounds have closed lately."""

    version: int
    closed: Sequence[float]
    """When its last rounds closed, oldest first; at most PACE_ROUNDS."""
    first_seconds: float | None
    """How long the first of these took."""
    begun: float | None = None
    """When the open round began; None while nobody is at it."""


def run_seconds_left(blocks: Sequence[BlockPace], rounds: int, now: float) -> float | None:
    """Until the slowest block has had all its rounds; None where a block has closed none that would tell."""
    longest, open_blocks = 0.0, [block for block in blocks if block.version < rounds]
    # Where workers are fewer than blocks they take turns, of which a block's own pace knows nothing: a lone
    # worker at three blocks was told 9 s a minute before the end.
    merged = sorted(moment for block in blocks for moment in block.closed)
    if len(merged) > 1:
        # Over one merge of each block: two blocks that merge 10 s apart in rounds of 60 s have gaps of 10 and
        # 50 s, and 8000 s were told where 4810 were left.
        cycle = min(len(blocks), len(merged) - 1)
        turn = statistics.median(map(operator.sub, merged[cycle:], merged)) / cycle
        begun = max((block.begun for block in open_blocks if block.begun is not None), default=now)
        left = sum(rounds - block.version for block in open_blocks)
        longest = max(0.0, left * turn - min(max(0.0, now - begun), turn))
    for block in open_blocks:
        # The median, so that a coordinator that was down for a week does not make all rounds a week long.
        gaps = [after - before for before, after in itertools.pairwise(block.closed)]
        pace = statistics.median(gaps) if gaps else block.first_seconds
        if not pace:
            return None
        # From its own beginning: a run that was stopped, or extended, was told to have 0 s left.
        under_way = 0.0 if block.begun is None else min(max(0.0, now - block.begun), pace)
        longest = max(longest, (rounds - block.version) * pace - under_way)
    return longest


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def starts_clock(arrivals: Arrivals, others: int) -> bool:
    """The clock of a round starts with its first worker, and again where all `others` have gone with nothing
    delivered: a round that nobody works on must not use up its time."""
    return arrivals.begun is None or not (others or arrivals.on_time or arrivals.late)


def extra_steps(
    arrivals: Arrivals,
    deadline: float | None,
    others: int,
    round_: int,
    own_seconds: float | None,
    swarm: SwarmConfig,
    now: float,
) -> int:
    """Steps that a worker takes for an absent replica in the time its round leaves it, at most one replica's.

    `others` are the block's other live workers, `deadline` is the open round's, and `own_seconds` is how long
    its own steps took it last time. 0 where that, or the round's length, is not known yet.
    """
    history = arrivals.history
    seconds_left = round_seconds(history, (), swarm, arrivals.before)[0] if history else None
    if round_ == arrivals.version:
        # In the open round a replica that has delivered is not missing, and only the rest of it is left.
        others += len(arrivals.on_time)
        seconds_left = seconds_left if deadline is None else deadline - now
    if others >= swarm.replicas - 1 or not own_seconds or seconds_left is None or swarm.policy == "drop":
        return 0
    spare = swarm.stand_in * seconds_left / own_seconds - 1
    return max(0, math.floor(min(spare, 1.0) * swarm.steps_per_round))


def own_share(extra: int, swarm: SwarmConfig) -> float:
    """Share of an update's time spent on the worker's own steps; only that enters the deadline history, or
    steps for absent replicas would make later rounds longer."""
    return swarm.steps_per_round / (swarm.steps_per_round + extra)
