"""The guard: which updates of a merge to publish, from what merges of some of them do to the loss of the
judge's text, held-out and training text alike.

Covered: a majority that hides one direction behind a little honest work. Each of its updates passes the judge
alone; together they would take half of the merge's progress. Pure; `coordinator.rounds` makes the merges.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from blocktrain.validation.evidence import FINAL_STANDARD_ERRORS, Gain

FEWEST_TO_CHOOSE = 3
"""Updates from which on the guard looks whether some of them alone make a better merge. With two and few
windows chance leaves out an honest one now and then."""
FEWEST_IN_REFINING = 2
"""The same for a part of a serial model, where the sign of a gain decides and noise may pass its judge:
beside one honest update it halved the step round after round, 0.028 nats after two (attack 26)."""
MOST_CHOICES = 7
LEAST_SHARE = 4
"""At least one of so many updates is kept."""
CHOICE_STANDARD_ERRORS = 3.0
"""Standard errors by which fewer updates must be better than all: the best of several by chance is not."""
STRICT_STANDARD_ERRORS = 1.5
"""The same where some are doubted, and among fewer: once some must go, size is no virtue. With 3, one hidden
update beside three honest ones cost 0.02 in a round, and where gains sink into the noise, later, eight of
thirty came in and the loss rose by 0.025."""
DOUBTED_AFTER = 2
"""Merges in a row that the guard made without a worker's update, after which the worker is doubted. Chance
does that to few honest ones; a majority that hides is left out of the first rounds, where gains are large."""


def is_doubted(latest_first: Sequence[bool]) -> bool:
    """True if the guard excluded the worker's last two updates."""
    return len(latest_first) >= DOUBTED_AFTER and all(latest_first[:DOUBTED_AFTER])


def merge_choices(gains: Mapping[str, float], *, refining: bool = False) -> list[tuple[str, ...]]:
    """Sets of updates whose merges are compared: all of them, then fewer and fewer; those with the lowest
    gain of their own are left out first. `refining`: of a part of a serial model."""
    ordered = sorted(sorted(gains), key=lambda update: -gains[update])
    count = len(ordered)
    if count < (FEWEST_IN_REFINING if refining else FEWEST_TO_CHOOSE):
        return [tuple(ordered)]
    # At most seven merges of evenly spaced sizes. Halving instead left 0.02 of what five colluders cost.
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
    """Publish the largest choice that is not worse than the best beyond noise; a merge that harms loses its
    worst update first. `differences` are the gains of each choice on the same windows, `doubted` the updates
    whose workers the guard has excluded before."""

    def finite_mean(found: Sequence[float]) -> float:
        mean = Gain.of(found).mean
        return mean if math.isfinite(mean) else -math.inf

    # The windows are the same, so a choice is compared with the best window by window: common noise cancels.
    best = max(differences, key=finite_mean)
    lost = [Gain.of([one - top for one, top in zip(found, best, strict=True)]) for found in differences]
    # Merging everything is the rule and needs strong evidence against it, unless some are doubted already.
    tolerance = CHOICE_STANDARD_ERRORS if doubted.isdisjoint(choices[0]) else STRICT_STANDARD_ERRORS
    tolerances = [tolerance] + [STRICT_STANDARD_ERRORS] * (len(lost) - 1)
    good_enough = [not one.is_loss(errors) for one, errors in zip(lost, tolerances, strict=True)]
    chosen = good_enough.index(True) if any(good_enough) else 0
    merged = Gain.of(differences[chosen])
    change = f"the loss changes by {-merged.mean:+.4f} +- {merged.error:.4f}"
    if merged.is_loss(FINAL_STANDARD_ERRORS):
        return GuardDecision(False, choices[0][-1:], f"the merge fails its guard: {change}")
    # The choices are nested, so what is left out are the last of the first one.
    left_out = choices[0][len(choices[chosen]) :]
    if not left_out:
        return GuardDecision(True, (), change)
    gained = f"{-lost[0].mean:.4f} +- {lost[0].error:.4f}"
    return GuardDecision(True, left_out, f"the merge is better by {gained} without it and others like it")
