"""How others merge updates when some are hostile: rules that look at the updates alone, not at held-out text.

Baselines beside the judge and the guard. Each takes the updates of a round, how many attackers it is built to
bear, and what it returned in the round before.

Krum: Blanchard et al., 2017, here with the mean of the n - f best. Trimmed mean: Yin et al., 2018. Centred
clipping: Karimireddy et al., 2021.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from blocktrain.training.update import Weights
from tests.adversaries.training import blended, mean_of, norm_of, scaled

Rule = Callable[[Sequence[Weights], int, Weights], Weights]


def mean(updates: Sequence[Weights], hostile: int, before: Weights) -> Weights:
    return mean_of(updates)


def trimmed_mean(updates: Sequence[Weights], hostile: int, before: Weights) -> Weights:
    """Of every value the `hostile` largest and smallest are left out; the median where nothing would stay."""
    cut = min(hostile, (len(updates) - 1) // 2)
    return {
        name: np.sort(np.stack([one[name] for one in updates]), axis=0)[cut : len(updates) - cut].mean(axis=0)
        for name in updates[0]
    }


def krum(updates: Sequence[Weights], hostile: int, before: Weights) -> Weights:
    """The mean of those that are nearest to their n - f - 2 nearest neighbours."""
    neighbours = max(1, len(updates) - hostile - 2)
    distances = [[norm_of(blended(one, other, -1.0)) ** 2 for other in updates] for one in updates]
    scores = [sum(sorted(row)[1 : neighbours + 1]) for row in distances]
    best = sorted(range(len(updates)), key=scores.__getitem__)[: len(updates) - hostile]
    return mean_of(updates[index] for index in best)


def centred_clipping(updates: Sequence[Weights], hostile: int, before: Weights) -> Weights:
    """From the last result a step towards each update, none longer than the median way."""
    ways = [blended(one, before, -1.0) for one in updates]
    longest = statistics.median(map(norm_of, ways))
    clipped = [scaled(way, min(1.0, longest / max(norm_of(way), 1e-12))) for way in ways]
    return blended(before, mean_of(clipped), 1.0)


RULES: Mapping[str, Rule] = {
    "mean": mean,
    "trimmed mean": trimmed_mean,
    "Krum": krum,
    "centred clipping": centred_clipping,
}
