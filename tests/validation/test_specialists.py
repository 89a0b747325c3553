"""A specialised block is judged on its own cluster and on the rest: real training, real text of two kinds."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from blocktrain.config import DataConfig, EvaluationConfig, ModelConfig, Recipe, SwarmConfig, TrainingConfig
from blocktrain.data.batches import open_batches
from blocktrain.data.dataset import Dataset
from blocktrain.errors import DataError
from blocktrain.training.inner import BlockTrainer
from blocktrain.training.setup import Setup, with_swarm_schedule
from blocktrain.training.snapshot import tensors_of
from blocktrain.training.update import difference
from blocktrain.validation.evidence import Evidence, Gain, evidence_of, report_of
from blocktrain.validation.ruling import Ruling, evidence_ruling
from blocktrain.validation.scorer import Scorer, Work
from blocktrain.wire.messages import VerdictReason
from tests.kinds import two_kinds
from tests.validation.kit import Weights, applied

CPU = torch.device("cpu")
RECIPE = Recipe(
    model=ModelConfig(width=32, heads=2, blocks=2, layers_per_block=1, context=32, condition_width=8),
    data=DataConfig(dataset="set", own_share=0.75),
    training=TrainingConfig(batch=8, warmup_steps=5),
    evaluation=EvaluationConfig(batch=64),
    swarm=SwarmConfig(steps_per_round=20, rounds=8),
)
STEPS = RECIPE.swarm.steps_per_round


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return two_kinds(tmp_path_factory.mktemp("kinds"))


@pytest.fixture(scope="module")
def scorer(dataset: Dataset) -> Scorer:
    return Scorer(RECIPE, dataset)


def trained(recipe: Recipe, dataset: Dataset, draws_as: int, base: Weights | None = None) -> Weights:
    """Block 0 after its first round on batches of block `draws_as`, or after its second from `base`."""
    setup = Setup.of_swarm(with_swarm_schedule(recipe))
    module = setup.initial(0)
    if base is not None:
        module.load_state_dict({name: torch.from_numpy(value) for name, value in base.items()})

    class Drawn:
        batches = open_batches(recipe, dataset, CPU)

        def batch(self, shard: int, step: int, block: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
            return self.batches.batch(shard, step, draws_as)

    trainer = BlockTrainer(setup.recipe, setup.objective, module, 0, Drawn(), setup.codebook())
    first = 0 if base is None else STEPS
    for step in range(first, first + STEPS):
        trainer.step(step, 0)
    return tensors_of(module)


@pytest.fixture(scope="module")
def base(dataset: Dataset) -> Weights:
    """Block 0 after its first round, as an honest specialist in prose."""
    return trained(RECIPE, dataset, draws_as=0)


@pytest.fixture(scope="module")
def deltas(dataset: Dataset, base: Weights) -> tuple[Weights, Weights]:
    """What a second round on prose alone takes away from the weights, and one on numbers alone."""
    alone = dataclasses.replace(RECIPE, data=dataclasses.replace(RECIPE.data, own_share=1.0))
    prose, numbers = (difference(base, trained(alone, dataset, kind, base)) for kind in (0, 1))
    return prose, numbers


def less(first: Weights, second: Weights, share: float) -> Weights:
    """A fifth of the first and, the other way, a share of the second."""
    return {
        name: np.asarray(np.float32(0.2) * (first[name] - np.float32(share) * second[name])) for name in first
    }


def judged(scorer: Scorer, base: Weights, delta: Weights) -> tuple[Evidence, Ruling]:
    found = scorer.evidence(0, base, applied(base, delta), Work(0, STEPS, STEPS), seed=3)
    assert evidence_of(report_of(found)) == found
    return found, evidence_ruling(found)


def test_an_honest_specialist_counts(scorer: Scorer, dataset: Dataset, base: Weights) -> None:
    found, ruling = judged(scorer, base, difference(base, trained(RECIPE, dataset, 0, base)))
    assert ruling.counts, ruling.sentence
    assert found.own is not None
    assert found.rest is not None
    assert found.own.mean > 0
    # Three of four windows are of its own cluster, as three of four sequences were in training.
    assert found.own.windows == pytest.approx(3 * found.rest.windows, abs=3)
    assert found.own.windows + found.rest.windows == found.held_out.windows


@pytest.mark.parametrize(
    ("own_cluster", "share", "named"), [(True, 0.5, "its own cluster"), (False, 0.2, "other clusters")]
)
def test_who_poisons_a_cluster_and_gains_more_in_the_mean_is_refused(
    scorer: Scorer,
    base: Weights,
    deltas: tuple[Weights, Weights],
    own_cluster: bool,
    share: float,
    named: str,
) -> None:
    gained, harmed = reversed(deltas) if own_cluster else deltas
    found, ruling = judged(scorer, base, less(gained, harmed, share))
    assert ruling.reason is VerdictReason.HARMFUL
    assert named in ruling.sentence
    assert found.held_out.mean > 0, "so much is gained elsewhere that the mean hides it"


@pytest.mark.parametrize(
    ("own", "rest", "reason"),
    [
        (0.1, 0.1, VerdictReason.ON_TIME),
        (0.1, -0.05, VerdictReason.ON_TIME),
        (0.1, -0.15, VerdictReason.HARMFUL),
        (-0.05, 0.5, VerdictReason.HARMFUL),
        (-0.01, 0.5, VerdictReason.ON_TIME),
        (float("nan"), 0.5, VerdictReason.HARMFUL),
    ],
)
def test_each_part_is_ruled_on_for_itself(own: float, rest: float, reason: VerdictReason) -> None:
    """A little may be lost elsewhere; nothing beyond noise at home."""
    parts = [Gain(mean, 0.01, 30) for mean in (own, rest)]
    all_of_it = Gain(0.08, 0.01, 60)
    assert evidence_ruling(Evidence(all_of_it, all_of_it, all_of_it, 1000, *parts)).reason is reason


def test_blocks_that_are_alike_are_judged_on_all_text(dataset: Dataset, base: Weights) -> None:
    alike = Scorer(dataclasses.replace(RECIPE, data=DataConfig(dataset="set")), dataset)
    found = alike.evidence(0, base, base, Work(0, STEPS, STEPS), seed=3)
    assert (found.own, found.rest) == (None, None)
    assert report_of(found).own is None


def test_a_cluster_without_held_out_text_says_what_to_do(dataset: Dataset) -> None:
    manifest = dataclasses.replace(dataset.manifest, held_out=dataset.manifest.held_out[:1])
    with pytest.raises(DataError, match=r"cluster 1 has none .* larger --held-out"):
        Scorer(RECIPE, Dataset(Path(dataset.folder), manifest))
