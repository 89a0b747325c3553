"""When a round closes and what a late update is worth: pure functions, time is an argument.

Offsets are seconds from the beginning of a round to an update's arrival. Under `carry` the deadline is the
quantile of observed offsets that lets in `swarm.deadline_quantile` of them, times a slack, bounded; under
`drop` it is fixed. Every answer carries the sentence that the API, the log and the dashboard show.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from blocktrain.config import SwarmConfig
from blocktrain.wire.messages import Outcome, VerdictReason

FEW_ARRIVALS = 4
"""Below this many observations a quantile means nothing; twice the slowest is used."""
HISTORY_ARRIVALS = 32
"""How many of the latest offsets of a block count."""


@dataclass(frozen=True)
class Deadline:
    at: float | None
    """Server time; None while the round has not begun."""
    reason: str
    since: float | None = None
    """Beginning of the current period: of the round, or of its last re-set deadline."""


@dataclass(frozen=True)
class Closing:
    close: bool
    reason: str


@dataclass(frozen=True)
class Lateness:
    """What an update of some age is worth."""

    outcome: Outcome
    weight: float
    reason: VerdictReason
    sentence: str


def round_seconds(
    history: Sequence[float], this_round: Sequence[float], swarm: SwarmConfig
) -> tuple[float, str]:
    """Length of a round from earlier rounds' offsets; from its own where there is no history yet."""
    if swarm.policy == "drop":
        return swarm.drop_deadline_seconds, "fixed by swarm.drop_deadline_seconds (policy drop)"
    offsets = history or this_round
    if not offsets:
        return swarm.max_deadline_seconds, "nothing has arrived yet: swarm.max_deadline_seconds"
    if len(offsets) < FEW_ARRIVALS:
        wanted, reason = 2 * max(offsets), f"twice the slowest of {len(offsets)} arrivals"
    else:
        wanted = quantile(offsets, swarm.deadline_quantile) * swarm.deadline_slack
        reason = (
            f"{swarm.deadline_quantile:.0%} of the last {len(offsets)} arrivals took at most "
            f"{wanted / swarm.deadline_slack:.1f} s, times {swarm.deadline_slack:g}"
        )
    seconds = min(max(wanted, swarm.min_deadline_seconds), swarm.max_deadline_seconds)
    return seconds, reason if seconds == wanted else f"{reason}, bounded to {seconds:g} s"


def round_deadline(
    begun: float | None,
    now: float,
    pending: int,
    history: Sequence[float],
    this_round: Sequence[float],
    swarm: SwarmConfig,
) -> Deadline:
    """The deadline in force; with nothing to merge it is re-set by whole rounds until it is ahead."""
    seconds, reason = round_seconds(history, this_round, swarm)
    if begun is None:
        return Deadline(None, f"begins with the first assignment, then {seconds:.1f} s: {reason}")
    resets = max(0, math.ceil((now - begun) / seconds) - 1) if not pending else 0
    if resets:
        often = "once" if resets == 1 else f"{resets} times"
        reason += f"; re-set {often}, as nothing had arrived"
    return Deadline(begun + seconds * (1 + resets), reason, begun + seconds * resets)


def stand_in_steps(
    missing: int, seconds_left: float | None, own_seconds: float | None, swarm: SwarmConfig
) -> int:
    """Steps that a lone worker takes for one of the `missing` replicas in the time its round has left, given
    the seconds that its own steps took it before; 0 where either is not known yet."""
    if missing < 1 or not own_seconds or seconds_left is None or swarm.policy == "drop":
        return 0
    spare = swarm.stand_in * seconds_left / own_seconds - 1
    return max(0, math.floor(min(spare, 1.0) * swarm.steps_per_round))


def own_share(stand_in: int, swarm: SwarmConfig) -> float:
    """Of an update's time, what its sender's own steps took: standing in must not lengthen later rounds."""
    return swarm.steps_per_round / (swarm.steps_per_round + stand_in)


def wanted_updates(seats: int, moved: int, swarm: SwarmConfig) -> int:
    """Updates that close a round early: one from every live worker on the block and from the `moved` ones,
    which have delivered and are elsewhere or gone, and all replicas.

    Where a replica is missing for good, rounds last until their deadline; a worker that runs ahead trains
    meanwhile. Closing without it was measured and not kept (docs/experiments.md, T4).
    """
    return max(seats + moved, swarm.replicas)


def should_close(now: float, on_time: int, late: int, wanted: int, deadline: Deadline) -> Closing:
    """Only updates on the head count towards the quorum: a late one must not cut off its own successor."""
    if on_time >= wanted:
        return Closing(True, f"all {wanted} wanted updates have arrived")
    passed = deadline.at is not None and now >= deadline.at
    if passed and on_time + late:
        return Closing(True, f"deadline passed with {on_time} of {wanted} updates, {late} late ones")
    return Closing(False, f"{on_time} of {wanted} updates have arrived")


def lateness(age: int, swarm: SwarmConfig) -> Lateness:
    """`age` is the version the update will merge into, less one, less its base version."""
    if age <= 0:
        return Lateness(Outcome.ACCEPTED, 1.0, VerdictReason.ON_TIME, "on time: counts fully")
    if swarm.policy == "drop":
        return Lateness(
            Outcome.REFUSED, 0.0, VerdictReason.DROPPED, f"{age} rounds late; this run drops them"
        )
    if age > swarm.max_age:
        sentence = f"{age} rounds late, at most {swarm.max_age} are carried; keep it as error feedback"
        return Lateness(Outcome.REFUSED, 0.0, VerdictReason.TOO_OLD, sentence)
    weight = swarm.age_decay**age
    sentence = f"{age} rounds late: counts at weight {weight:g}"
    return Lateness(Outcome.LATE, weight, VerdictReason.CARRIED, sentence)


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
