"""Which weights Muon moves, how fast, and that saved state goes on as if never saved."""

from __future__ import annotations

import pytest
import torch

from blocktrain.config import TrainingConfig
from blocktrain.model.block import Block
from blocktrain.training.inner import training_config
from blocktrain.training.optimizer import Optimizer, learning_rate_factor, split_parameters
from tests.tiny import shaken, some_tokens, tiny_codebook, tiny_objective, tiny_recipe


def one_step(block: Block, optimizer: Optimizer, step: int) -> None:
    objective = tiny_objective()
    tokens, targets = some_tokens(2, 16, seed=step), some_tokens(2, 16, seed=step + 1)
    loss = objective.loss(block, tokens, targets, tiny_codebook(objective))
    loss.total.backward()  # type: ignore[no-untyped-call]
    optimizer.step(step)


def test_the_learning_rate_rises_linearly_and_falls_along_a_cosine() -> None:
    config = TrainingConfig(steps=110, warmup_steps=10)
    assert learning_rate_factor(0, config) == pytest.approx(0.1)
    assert learning_rate_factor(4, config) == pytest.approx(0.5)
    assert learning_rate_factor(9, config) == pytest.approx(1.0)
    assert learning_rate_factor(10, config) == pytest.approx(1.0)
    assert learning_rate_factor(60, config) == pytest.approx(0.5)
    assert learning_rate_factor(110, config) == pytest.approx(0.0, abs=1e-12)
    factors = [learning_rate_factor(step, config) for step in range(10, 111)]
    assert factors == sorted(factors, reverse=True)


def test_the_cosine_ends_at_the_final_share_and_stays_there() -> None:
    config = TrainingConfig(steps=50, warmup_steps=0, final_lr=0.1)
    assert learning_rate_factor(0, config) == 1.0
    assert learning_rate_factor(50, config) == pytest.approx(0.1)
    assert learning_rate_factor(5000, config) == pytest.approx(0.1)


@pytest.mark.parametrize(("steps", "warmup"), [(5, 5), (5, 50), (1, 0), (1, 1)])
def test_a_warm_up_as_long_as_the_run_still_moves_the_weights(steps: int, warmup: int) -> None:
    config = TrainingConfig(steps=steps, warmup_steps=warmup)
    assert all(0 < learning_rate_factor(step, config) <= 1 for step in range(steps))


def test_muon_gets_the_matrices_of_the_layers_and_adamw_the_rest() -> None:
    block = tiny_objective().build(0, seed=0)
    optimizer = Optimizer(block, TrainingConfig())
    names = {id(parameter): name for name, parameter in block.named_parameters()}
    muon, adamw = optimizer.parts
    assert isinstance(muon, torch.optim.Muon)
    assert isinstance(adamw, torch.optim.AdamW)
    matrices = {names[id(p)] for p in muon.param_groups[0]["params"]}
    rest = {names[id(p)] for p in adamw.param_groups[0]["params"]}
    inside = [
        "attention.q",
        "attention.k",
        "attention.v",
        "attention.out",
        "feedforward.up",
        "feedforward.down",
    ]
    assert matrices == {f"layers.0.{name}.weight" for name in inside}
    assert not matrices & rest
    assert matrices | rest == set(names.values())
    assert {"embedding.weight", "out.weight", "hint.weight", "logit_scale", "condition.null"} <= rest


def test_adamw_alone_keeps_the_rates_and_decay_of_the_two_groups() -> None:
    config = TrainingConfig(optimizer="adamw", matrix_lr=1e-2, other_lr=1e-3, weight_decay=0.2)
    parts = Optimizer(tiny_objective().build(0, seed=0), config).parts
    assert [type(part) for part in parts] == [torch.optim.AdamW] * 2
    assert [part.param_groups[0]["lr"] for part in parts] == [1e-2, 1e-3]
    assert [part.param_groups[0]["weight_decay"] for part in parts] == [0.2, 0.0]


def test_a_step_uses_the_scheduled_rate_and_clears_the_gradients() -> None:
    block = shaken(tiny_objective().build(0, seed=0))
    optimizer = Optimizer(block, TrainingConfig(steps=100, warmup_steps=10, matrix_lr=1e-2, other_lr=1e-3))
    one_step(block, optimizer, 4)
    assert [part.param_groups[0]["lr"] for part in optimizer.parts] == pytest.approx([5e-3, 5e-4])
    assert all(parameter.grad is None for parameter in block.parameters())


def test_gradients_are_clipped_together() -> None:
    """AdamW forgets the scale of a gradient, so a plain look at the clipped gradient itself."""
    block = shaken(tiny_objective().build(0, seed=0))
    optimizer = Optimizer(block, TrainingConfig(clip_norm=1e-3))
    for parameter in optimizer.parameters:
        parameter.grad = torch.ones_like(parameter)
    seen: list[torch.Tensor] = []
    for part in optimizer.parts:
        part.register_step_pre_hook(
            lambda part, *_: seen.extend(p.grad.clone() for p in part.param_groups[0]["params"])
        )
    optimizer.step(0)
    assert torch.stack([grad.norm() for grad in seen]).norm().item() == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("key", ["matrix_lr", "other_lr"])
def test_the_reference_may_have_rates_of_its_own(key: str) -> None:
    recipe = tiny_recipe(f"training.{key}=0.004", f"training.reference_{key}=0.002")
    assert getattr(training_config(recipe, reference=False), key) == 0.004
    assert getattr(training_config(recipe, reference=True), key) == 0.002
    same = tiny_recipe(f"training.{key}=0.004", f"training.reference_{key}=none")
    assert getattr(training_config(same, reference=True), key) == 0.004


@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_saved_state_goes_on_bit_for_bit(kind: str) -> None:
    config = tiny_recipe(f"training.optimizer={kind}").training
    straight = shaken(tiny_objective().build(0, seed=0))
    optimizer = Optimizer(straight, config)
    for step in range(3):
        one_step(straight, optimizer, step)
    resumed = tiny_objective().build(0, seed=9)
    resumed.load_state_dict(straight.state_dict())
    second = Optimizer(resumed, config)
    second.load_state_tensors({name: t.clone() for name, t in optimizer.state_tensors().items()})
    for step in range(3, 6):
        one_step(straight, optimizer, step)
        one_step(resumed, second, step)
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), resumed.parameters(), strict=True))


def test_an_mlp_block_is_split_too() -> None:
    matrices, rest = split_parameters(tiny_objective("model.mixer=none").build(0, seed=0))
    assert len(matrices) == 2
    assert rest
