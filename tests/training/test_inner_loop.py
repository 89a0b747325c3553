"""One step of one block: a function of its weights and of (seed, shard, step) alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from blocktrain.data.shards import Shards
from blocktrain.data.tokenizer import ByteTokenizer
from blocktrain.ids import CorpusHash, derive_seed
from blocktrain.model.block import Block
from blocktrain.model.objective import Objective
from blocktrain.training.frozen import upstream_features
from blocktrain.training.inner import BlockTrainer, Codebook, build_codebook
from blocktrain.training.optimizer import Optimizer
from tests.tiny import prose, shaken, tiny_recipe

CPU = torch.device("cpu")


def trainer(*overrides: str, index: int | None = 0, tokens: bytes | None = None) -> BlockTrainer:
    recipe = tiny_recipe(*overrides)
    objective = Objective(recipe.model, recipe.objective, vocabulary=256)
    shards = Shards.of(
        recipe, ByteTokenizer().encode(prose(4000) if tokens is None else tokens), CorpusHash("00"), CPU
    )
    if index is None:
        block = objective.build_reference(derive_seed("init", recipe.seed, "reference"))
    else:
        block = objective.build(index, derive_seed("init", recipe.seed, index))
    codebook = build_codebook(recipe, 256)
    shared = Optimizer(codebook, recipe.training) if codebook.learned else None
    return BlockTrainer(recipe, objective, block, index, shards, codebook, codebook_optimizer=shared)


def losses(trainer: BlockTrainer, steps: int) -> list[float]:
    return [float(trainer.step(step, shard=0)) for step in range(steps)]


def weights_equal(first: Block, second: Block) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


GOLDEN_RECIPE = (
    "training.steps=16",
    "training.batch=8",
    "training.matrix_lr=0.003",
    "training.other_lr=0.003",
    "training.reference_other_lr=0.001",
    "objective.hint_probability=0.15",
    "objective.logit_scale=12",
    "model.convolution=4",
)
GOLDEN: dict[int | None, list[float]] = {
    0: [5.5452, 4.9096, 4.2482, 4.104],
    None: [5.5452, 5.35, 5.0425, 4.8703],
}


@pytest.mark.parametrize("index", [0, None], ids=["block", "reference"])
def test_a_short_run_has_its_golden_loss(index: int | None) -> None:
    """Sixteen steps on text that never changes. A refactor that changes these numbers changed the model."""
    found = losses(trainer(*GOLDEN_RECIPE, index=index), 16)
    assert [found[i] for i in (0, 3, 7, 15)] == pytest.approx(GOLDEN[index], abs=1e-3)


@pytest.mark.usefixtures("unchanged_random_state")
def test_two_trainers_give_the_same_weights() -> None:
    first, second = trainer(), trainer()
    assert losses(first, 4) == losses(second, 4)
    assert weights_equal(first.block, second.block)


@pytest.mark.parametrize("override", ["seed=1", "model.convolution=0", "objective.hint_probability=1"])
def test_the_recipe_reaches_the_loss(override: str) -> None:
    assert losses(trainer(override), 6) != losses(trainer(), 6)


def test_a_step_leans_on_no_step_before_it() -> None:
    """Step 5 from given weights is the same whether or not this process took steps 0 to 4."""
    walked, fresh = trainer(), trainer()
    for step in range(5):
        walked.step(step, shard=0)
    fresh.block.load_state_dict(walked.block.state_dict())
    state = walked.optimizer.state_tensors()
    fresh.optimizer.load_state_tensors({name: tensor.clone() for name, tensor in state.items()})
    assert float(walked.step(5, shard=0)) == float(fresh.step(5, shard=0))
    assert weights_equal(walked.block, fresh.block)


@pytest.mark.parametrize(("index", "shard"), [(1, 0), (0, 1)], ids=["block", "shard"])
def test_another_block_or_shard_draws_other_noise_or_text(index: int, shard: int) -> None:
    first, other = trainer(index=0), trainer(index=index)
    other.block.load_state_dict(first.block.state_dict())
    first.step(0, shard=0)
    other.step(0, shard=shard)
    assert not weights_equal(first.block, other.block)


@pytest.mark.parametrize(
    "overrides",
    [
        ("objective.loss=mse",),
        ("model.mixer=none",),
        ("objective.hint_probability=0",),
        ("objective.hint_probability=1",),
        ("model.convolution=0",),
        ("model.context=1",),
        ("model.width=2", "model.heads=1"),
        ("model.blocks=1",),
        ("training.optimizer=adamw",),
        ("objective.codebook=learned", "training.order=turns"),
        ("objective.codebook=own", "objective.hint_probability=0"),
        ("training.batch=1", "objective.hint_probability=0"),
    ],
    ids=", ".join,
)
def test_every_ablation_learns(overrides: tuple[str, ...]) -> None:
    found = losses(trainer("training.batch=8", "training.steps=30", *overrides), 30)
    assert all(np.isfinite(found))
    assert np.mean(found[-5:]) < np.mean(found[:3])


def test_a_block_learns_a_text_that_repeats_itself() -> None:
    found = losses(trainer("training.batch=8", "training.steps=40", tokens=b"abcdefgh" * 200), 40)
    assert found[0] == pytest.approx(np.log(256), abs=1e-4)
    assert found[-1] < 0.3


def test_a_fixed_codebook_is_left_alone() -> None:
    one = trainer()
    before = one.codebook().clone()
    losses(one, 3)
    assert torch.equal(one.codebook(), before)
    assert not list(one.codebook.parameters())


def test_a_learned_codebook_moves_and_keeps_unit_rows() -> None:
    one = trainer("objective.codebook=learned", "training.order=turns")
    before = one.codebook().detach().clone()
    losses(one, 3)
    after = one.codebook().detach()
    assert not torch.allclose(before, after, atol=1e-4)
    torch.testing.assert_close(after.norm(dim=1), torch.ones(256))


def test_a_block_learns_its_own_output_map_and_has_no_codebook() -> None:
    one = trainer("objective.codebook=own", "objective.hint_probability=0")
    assert one.codebook().shape == (0, one.recipe.model.width)
    before = one.block.state_dict()["output_VD"].clone()
    found = losses(one, 3)
    assert found[0] == pytest.approx(np.log(256), abs=1e-4)
    assert not torch.allclose(before, one.block.state_dict()["output_VD"], atol=1e-4)


def test_a_trained_block_leaves_its_upstream_blocks_alone() -> None:
    one = trainer("objective.kind=chain", index=1)
    earlier = shaken(one.objective.build(0, seed=5))
    before = {name: tensor.clone() for name, tensor in earlier.state_dict().items()}
    chained = BlockTrainer(
        one.recipe, one.objective, one.block, 1, one.shards, one.codebook, frozen=[earlier]
    )
    losses(chained, 3)
    assert all(torch.equal(before[name], tensor) for name, tensor in earlier.state_dict().items())
    assert all(parameter.grad is None for parameter in earlier.parameters())


def test_features_run_through_the_frozen_blocks_in_order() -> None:
    recipe = tiny_recipe("objective.kind=chain", "model.blocks=3")
    objective = Objective(recipe.model, recipe.objective, vocabulary=256)
    first, second = (shaken(objective.build(b, seed=b), seed=b) for b in range(2))
    codebook: Codebook = build_codebook(recipe, 256)
    tokens = torch.arange(16)[None]
    with torch.no_grad():
        upstream = first(tokens, codebook()).features_BTD
        expected = second(tokens, codebook(), upstream_BTD=upstream).features_BTD
    found = upstream_features([first, second], tokens, codebook())
    assert found is not None
    torch.testing.assert_close(found, expected)


def unknown_cross_entropy(trainer: BlockTrainer) -> float:
    """Cross entropy of targets whose context is unknown but for one byte, given their noised selves."""
    tokens, targets = trainer.shards.batch(7, 0)
    generator = torch.Generator().manual_seed(0)
    table, length = trainer.codebook(), tokens.shape[1]
    hint = trainer.objective.draw_hint(1, targets, table, generator)
    assert hint is not None
    unknown = tokens.clone()
    unknown[:, 1:] = trainer.objective.unknown_token
    hinted = len(hint.z_PTD)
    with torch.no_grad():
        logits = trainer.block(unknown[:hinted], table, hint).logits_BTV
    entropy = torch.nn.functional.cross_entropy(
        logits[:, 1:].flatten(0, 1), targets[:hinted, 1:].flatten(), reduction="mean"
    )
    assert logits.shape[1] == length
    return float(entropy)


def test_the_loss_at_unknown_positions_falls_when_trained_for_sweep() -> None:
    """The noised target alone, passed through at the start, is worth 2.4 nats here."""
    options = (
        "objective.hint_probability=0.75",
        "objective.sweep_probability=0.5",
        "objective.sigma_min=0.15",
    )
    swept = trainer(*options, "training.steps=40", "training.batch=8", index=1)
    before = unknown_cross_entropy(swept)
    losses(swept, 40)
    after = unknown_cross_entropy(swept)
    assert after < 0.8 * before
