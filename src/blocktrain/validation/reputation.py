"""What a worker's verdicts say of it: rating x assigned-versus-random average x uptime.

Pure: a standing and an event give the next standing. The *rating* is the mean of a Beta posterior over good
and bad verdicts with forgetting, so one mistake does not end a career and an old good name does not last.
The *average* of the evidence's marks is about 0 for who copies or sends noise, and above 0 for who trained on
the text it was given. *Uptime* forgives every silence shorter than `SILENCE_GRACE_SECONDS`.

Promises: lateness, lost connections and withheld payloads are no cheating and touch neither rating nor
average; bad verdicts do not count while the median recent score of a block is not positive (then the run, not
the worker, has a problem).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from blocktrain.validation.ruling import Mark

FORGETTING = 0.95
"""Weight of all earlier verdicts at each new one: about the last 20 count."""
AVERAGE_STEP = 0.1
FIRST_AVERAGE = 0.25
"""A newcomer is neither a copier nor known to work."""
SILENCE_GRACE_SECONDS = 900.0
FREE_WITHHELD = 3
COMPARED_SHARE = 0.5
"""Share of the usual norm from which on an update's assigned and other text are compared."""
FEWEST_FOR_BAN = 6.0
"""Counted verdicts (after forgetting) before a low rating bans."""


@dataclass(frozen=True, kw_only=True)
class Standing:
    good: float = 0.0
    bad: float = 0.0
    """Both with forgetting."""
    good_verdicts: int = 0
    """All of them; what probation counts."""
    verdicts: int = 0
    average: float = FIRST_AVERAGE
    """Moving average of marks, in [-1, 1]."""
    silent_seconds: float = 0.0
    """Beyond the grace of each silence."""
    withheld: int = 0
    """Commits whose payload never came."""

    @property
    def rating(self) -> float:
        return (self.good + 1) / (self.good + self.bad + 2)


def after_verdict(standing: Standing, mark: Mark, compared: int | None, *, paused: bool = False) -> Standing:
    """`compared` is the evidence's assigned-versus-other mark, None where nothing was scored."""
    average = standing.average
    if compared is not None:
        average += AVERAGE_STEP * (compared - average)
    standing = replace(standing, verdicts=standing.verdicts + 1, average=average)
    # What says nothing about the worker also forgets nothing: a slow line must not wash a bad name clean.
    if mark is Mark.NEUTRAL or (paused and mark is Mark.BAD):
        return standing
    good, bad = FORGETTING * standing.good, FORGETTING * standing.bad
    if mark is Mark.GOOD:
        return replace(standing, good=good + 1, bad=bad, good_verdicts=standing.good_verdicts + 1)
    return replace(standing, good=good, bad=bad + 1)


def comparison(mark: int, norm: float | None, usual_norm: float | None) -> int | None:
    """The evidence's mark, or None for an update much smaller than usual: it shows so little
    of its text that the mark is a coin's, and a weak machine's average would end at zero or below."""
    if norm is not None and usual_norm and norm < COMPARED_SHARE * usual_norm:
        return None
    return mark


def after_silence(standing: Standing, seconds: float) -> Standing:
    beyond = max(0.0, seconds - SILENCE_GRACE_SECONDS)
    return replace(standing, silent_seconds=standing.silent_seconds + beyond) if beyond else standing


def after_withholding(standing: Standing) -> Standing:
    return replace(standing, withheld=standing.withheld + 1)


def after_giving_up(standing: Standing) -> Standing:
    """One assignment too many was given up without an update: a bad mark, and no verdict."""
    return replace(standing, good=FORGETTING * standing.good, bad=FORGETTING * standing.bad + 1)


def uptime(standing: Standing, known_seconds: float) -> float:
    """Share of the time since joining that it answered, times the share of its commits that it revealed."""
    # The first three broken commits are free: a crash between commit and payload happens to the honest.
    answering = 1.0 - min(1.0, standing.silent_seconds / known_seconds) if known_seconds > 0 else 1.0
    broken = max(0, standing.withheld - FREE_WITHHELD)
    return answering * (standing.verdicts + 1) / (standing.verdicts + 1 + broken)


def reputation(standing: Standing, known_seconds: float) -> float:
    """In [0, 1]; 0 for who does not train what it was given."""
    # A product: who copies has an average about 0 and so no reputation, however many of its updates counted.
    # Twenty copies reached a rating of 0.15 at best (docs/experiments.md).
    return standing.rating * max(0.0, standing.average) * uptime(standing, known_seconds)


def penalties_paused(recent_scores: Sequence[float]) -> bool:
    """Whether honest work does not score above zero at present, so that a bad score proves nothing."""
    # The median, so that a minority of attackers cannot pause the penalties of its own updates.
    return len(recent_scores) >= FEWEST_FOR_BAN and statistics.median(recent_scores) <= 0


def deserves_ban(standing: Standing, ban_below: float) -> bool:
    # With forgetting, six counted verdicts are at least seven real ones: bad luck alone does not ban.
    return standing.good + standing.bad >= FEWEST_FOR_BAN and standing.rating < ban_below


def on_probation(standing: Standing, needed: int) -> bool:
    return standing.good_verdicts < needed
