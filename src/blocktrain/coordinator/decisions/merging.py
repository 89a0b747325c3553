"""How much of the updates' mean a merge takes: decided from facts, without database or clock."""

from __future__ import annotations

from collections.abc import Sequence

DIVERGED = 0.02
"""Rise of the held-out loss, in nats per token, over the lowest so far. Chosen, not fitted: ten times
the 0.0021 by which refined parts ended above end to end (docs/history/2026-11-16.md, refining without a
network)."""
LEAST_SHARE = 1 / 16
"""Below this a run does not learn; what is wrong with it then is the learning rate."""


def merging_weight(outer_lr: float, losses: Sequence[float]) -> float:
    """`swarm.outer_lr`, halved for each time that the held-out loss of a serial model has risen; `losses` are
    the run's scores, oldest first.

    All parts correct the same error at once, each as if the others stood still. Their steps add up, and where
    these are too long together, half as long is right before a lower learning rate is.
    """
    weight, lowest = outer_lr, float("inf")
    for loss in losses:
        if loss > lowest + DIVERGED:
            # From here on: the same rise is not counted again while the run finds its way back.
            weight, lowest = weight / 2, loss
        lowest = min(lowest, loss)
    return max(weight, outer_lr * LEAST_SHARE)
