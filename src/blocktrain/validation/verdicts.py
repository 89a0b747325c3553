"""From findings to a verdict: one function per check, each answer with its reason and its sentence.

Order as in protocol.md: norm, duplicate, evidence, probation; the guard comes after the merge. Pure; what a
verdict means for the worker's rating is its `mark`.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from blocktrain.config import Recipe, TrustConfig
from blocktrain.training.optimizer import learning_rate_factor
from blocktrain.training.setup import with_swarm_schedule
from blocktrain.validation.duplicates import Likeness
from blocktrain.validation.evidence import FINAL_ERRORS, Evidence, Gain
from blocktrain.validation.reputation import Mark
from blocktrain.wire.messages import VerdictReason

WANTED_ERRORS = 3.0
"""Standard errors above zero that make a gain, where honest ones have twice as many. At 2, three of nine
noise updates of honest norm passed in the first rounds, where nearly any change helps a little; honest ones
had 5 to 14."""


@dataclass(frozen=True)
class Finding:
    """A reason not to merge an update, or to merge it (`counts`)."""

    counts: bool
    reason: VerdictReason
    sentence: str
    mark: Mark


def schedule_factor(recipe: Recipe, round_: int) -> float:
    """Mean learning rate of a round as a share of the peak."""
    steps = recipe.swarm.steps_per_round
    config = with_swarm_schedule(recipe).training
    return sum(learning_rate_factor(round_ * steps + step, config) for step in range(steps)) / steps


def norm_finding(
    norm: float, running_median: float | None, trust: TrustConfig, fading: float = 1.0
) -> Finding | None:
    """None where the norm is usual. `fading` (at most 1) is this round's learning rate against that of the
    rounds behind the median: at the end of a schedule honest updates shrink."""
    if not running_median:
        return None
    low, high = trust.norm_low * min(1.0, fading), trust.norm_high
    ratio = norm / running_median
    if low <= ratio <= high:
        return None
    sentence = f"norm {norm:.3g} is {ratio:.3g} times this block's median; expected {low:.2g} to {high:g}"
    mark = Mark.BAD if ratio > high else Mark.NEUTRAL  # a small one may be a weak machine's
    return Finding(False, VerdictReason.NORM, sentence, mark)


def duplicate_finding(source: str, likeness: Likeness) -> Finding | None:
    if not likeness.is_copy:
        return None
    sentence = f"{likeness.equal:.0%} of it equals update {source[:12]}, which was committed before"
    return Finding(False, VerdictReason.DUPLICATE, sentence, Mark.BAD)


def wanted_errors(recent_scores: Sequence[float]) -> float:
    """Standard errors above zero that a gain must have: half of what counted updates of the block lately
    had, at most WANTED_ERRORS. Where honest gains sink into the noise, at the end of a schedule, the sign
    decides; asking for more would stop the block."""
    if not recent_scores:
        return WANTED_ERRORS
    return min(WANTED_ERRORS, max(0.0, statistics.median(recent_scores) / 2))


def evidence_finding(evidence: Evidence, recent_scores: Sequence[float] = ()) -> Finding:
    """`recent_scores` are those of the block's last updates that counted."""
    gain = evidence.held_out
    if not math.isfinite(gain.mean):
        return Finding(False, VerdictReason.HARMFUL, "held-out loss is no longer finite", Mark.BAD)
    sentence = f"held-out loss changes by {-gain.mean:+.4f} +- {gain.error:.4f} over {gain.windows} windows"
    wanted = wanted_errors(recent_scores)
    if gain.mean > wanted * gain.error:
        return Finding(True, VerdictReason.ON_TIME, sentence, Mark.GOOD)
    if gain.mean < 0 and gain.exceeds(FINAL_ERRORS):
        return Finding(False, VerdictReason.HARMFUL, sentence, Mark.BAD)
    needed = f"; to count it must fall by more than {wanted:.1f} standard errors (longer rounds show more)"
    return Finding(False, VerdictReason.NO_GAIN, sentence + needed, Mark.NEUTRAL)


def excused(finding: Finding) -> Finding:
    """Of an update that came late: what others merged meanwhile may be what makes it overshoot, so its harm
    says nothing about the worker."""
    return dataclasses.replace(finding, mark=Mark.NEUTRAL) if finding.mark is Mark.BAD else finding


def probation_finding(good_verdicts: int, needed: int, established: bool) -> Finding | None:
    """`good_verdicts` with this one. Where nobody is established the newcomers are the run."""
    if good_verdicts >= needed or not established:
        return None
    sentence = f"on probation: {good_verdicts} of {needed} good verdicts; scored, not merged"
    return Finding(False, VerdictReason.PROBATION, sentence, Mark.GOOD)


# --- the guard ------------------------------------------------------------------------------------------

FEWEST_TO_CHOOSE = 3
"""Updates from which on the guard looks whether some of them alone make a better merge."""
MOST_CHOICES = 7
CHOICE_ERRORS = 3.0
"""Standard errors by which fewer updates must be better than all: the best of several by chance is not."""
LEAST_SHARE = 4
"""At least one of so many updates is kept."""
DOUBTED_AFTER = 2
"""Merges in a row that the guard made without a worker's update, after which the worker is doubted. Chance
does that to few honest ones; a majority that hides is left out of the first rounds, where gains are large."""
STRICT_ERRORS = 1.5
"""The same where some are doubted, and among fewer: once some must go, size is no virtue. With 3, one hidden
update beside three honest ones cost 0.02 in a round, and where gains sink into the noise, later, eight of
thirty came in and the loss rose by 0.025."""


def is_doubted(latest_first: Sequence[bool]) -> bool:
    """Of a worker, by whether the guard left its last updates out."""
    return len(latest_first) >= DOUBTED_AFTER and all(latest_first[:DOUBTED_AFTER])


def merge_choices(gains: Mapping[str, float]) -> list[tuple[str, ...]]:
    """Sets of updates whose merges are compared: all of them, then fewer and fewer; those with the lowest
    gain of their own are left out first."""
    ordered = sorted(sorted(gains), key=lambda update: -gains[update])
    count = len(ordered)
    if count < FEWEST_TO_CHOOSE:
        return [tuple(ordered)]
    least = -(-count // LEAST_SHARE)
    sizes = {count - step * (count - least) // (MOST_CHOICES - 1) for step in range(MOST_CHOICES)}
    return [tuple(ordered[:size]) for size in sorted(sizes, reverse=True)]


@dataclass(frozen=True)
class GuardDecision:
    publish: bool
    leave_out: tuple[str, ...]
    """Updates to take out of the merge; with `publish` false, before trying again."""
    sentence: str


def guard_decision(
    differences: Sequence[Sequence[float]],
    choices: Sequence[tuple[str, ...]],
    doubted: frozenset[str] = frozenset(),
) -> GuardDecision:
    """Which choice to publish, from what each gains on the same windows: the largest that is not worse than
    the best beyond noise. A majority that agrees to hide one direction behind a little honest work passes its
    judges one by one, and would take half of the merge's progress. A merge that harms loses its worst update.
    `doubted` are updates whose workers the guard has left out before.
    """
    best = max(differences, key=lambda found: _finite(Gain.of(found).mean))
    lost = [Gain.of([one - top for one, top in zip(found, best, strict=True)]) for found in differences]
    errors = CHOICE_ERRORS if doubted.isdisjoint(choices[0]) else STRICT_ERRORS
    good_enough = [not _is_harm(lost[0], errors), *(not _is_harm(one, STRICT_ERRORS) for one in lost[1:])]
    chosen = good_enough.index(True) if any(good_enough) else 0
    merged = Gain.of(differences[chosen])
    change = f"held-out loss changes by {-merged.mean:+.4f} +- {merged.error:.4f}"
    if _is_harm(merged):
        return GuardDecision(False, choices[0][-1:], f"the merge fails its guard: {change}")
    left_out = choices[0][len(choices[chosen]) :]
    if not left_out:
        return GuardDecision(True, (), change)
    gained = f"{-lost[0].mean:.4f} +- {lost[0].error:.4f}"
    sentence = f"the merge is better by {gained} without it and others like it"
    return GuardDecision(True, left_out, sentence)


def _is_harm(gain: Gain, errors: float = FINAL_ERRORS) -> bool:
    return not math.isfinite(gain.mean) or (gain.mean < 0 and gain.exceeds(errors))


def _finite(value: float) -> float:
    return value if math.isfinite(value) else -math.inf
