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
    config = dataclasses.replace(recipe.training, steps=recipe.swarm.total_steps)
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
    if gain.mean > wanted_errors(recent_scores) * gain.error:
        return Finding(True, VerdictReason.ON_TIME, sentence, Mark.GOOD)
    if gain.mean < 0 and gain.exceeds(FINAL_ERRORS):
        return Finding(False, VerdictReason.HARMFUL, sentence, Mark.BAD)
    return Finding(False, VerdictReason.NO_GAIN, sentence, Mark.NEUTRAL)


def probation_finding(good_verdicts: int, needed: int, established: bool) -> Finding | None:
    """`good_verdicts` with this one. Where nobody is established the newcomers are the run."""
    if good_verdicts >= needed or not established:
        return None
    sentence = f"on probation: {good_verdicts} of {needed} good verdicts; scored, not merged"
    return Finding(False, VerdictReason.PROBATION, sentence, Mark.GOOD)


# --- the guard ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GuardDecision:
    publish: bool
    drop: str | None
    """The update to leave out before trying again; None with `publish` false means: hold the block."""
    sentence: str


def guard_decision(merged: Gain, gains: Mapping[str, float]) -> GuardDecision:
    """After a merge: publish, leave out the update with the lowest gain of its own, or hold the block."""
    change = f"held-out loss changes by {-merged.mean:+.4f} +- {merged.error:.4f}"
    harmful = not math.isfinite(merged.mean) or (merged.mean < 0 and merged.exceeds(FINAL_ERRORS))
    if not harmful:
        return GuardDecision(True, None, change)
    worst = min(sorted(gains), key=lambda update: gains[update])
    return GuardDecision(False, worst, f"the merge fails its guard: {change}")
