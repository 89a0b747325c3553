"""What makes a block large on one device changes its memory and not its result."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from blocktrain.errors import DeviceError, RecipeError
from blocktrain.model import cross_entropy
from blocktrain.model.cross_entropy import chunked_cross_entropy
from blocktrain.training import memory
from blocktrain.training.cost import PeakMemory
from blocktrain.training.inner import BlockTrainer
from blocktrain.training.memory import fitting_micro_batch, training_bytes
from tests.tiny import some_noise, tiny_recipe
from tests.training.test_inner_loop import losses, trainer

LLAMA = ("model.family=llama", "model.kv_heads=1", "model.condition_width=64")
CPU = torch.device("cpu")


def weights(trained: BlockTrainer) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in trained.block.parameters()])


@pytest.mark.parametrize(
    "overrides",
    [
        LLAMA,
        ("objective.hint_probability=0.5",),
        ("objective.hint_probability=1",),
        ("objective.hint_probability=0.5", "objective.sweep_probability=0.3"),
        ("objective.codebook=learned", "training.order=turns", "objective.hint_probability=0.5"),
        ("objective.codebook=own", "objective.hint_probability=0"),
        ("objective.loss=mse",),
    ],
    ids=["llama", "hints", "all hinted", "sweep", "learned codebook", "own output map", "mse"],
)
@pytest.mark.parametrize("size", [1, 3])
def test_micro_batches_add_up_to_the_batch(overrides: tuple[str, ...], size: int) -> None:
    """With AdamW off: nearly a sign, it makes a whole step of the rounding of a gradient that is zero."""
    common = (*overrides, "training.batch=8", "training.other_lr=1e-9", "training.clip_norm=1e9")
    whole, parts = trainer(*common), trainer(*common, f"training.micro_batch={size}")
    assert losses(parts, 3) == pytest.approx(losses(whole, 3), abs=1e-4)
    gradients = []
    for one in (whole, parts):
        one._gradients(3, 0, None)
        gradients.append(torch.cat([p.grad.flatten() for p in one.block.parameters() if p.grad is not None]))
    assert float((gradients[0] - gradients[1]).norm() / gradients[0].norm()) < 2e-3


@pytest.mark.parametrize("overrides", [LLAMA, ()], ids=["llama", "blocktrain"])
def test_recomputing_changes_memory_and_no_bit(overrides: tuple[str, ...]) -> None:
    deep = (*overrides, "model.layers_per_block=4", "model.blocks=1")
    kept, again = trainer(*deep), trainer(*deep, "training.recompute=true")
    activations = []
    for one in (kept, again):
        memory = PeakMemory(CPU)
        with memory.count_activations():
            one.step(0, 0)
        activations.append(memory.activations)
    assert losses(kept, 3) == losses(again, 3)
    assert torch.equal(weights(kept), weights(again))
    assert activations[1] < activations[0] / 2


def test_cross_entropy_in_chunks_is_cross_entropy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "CHUNK_VALUES", 1)
    monkeypatch.setattr(cross_entropy, "FEWEST_ROWS", 3)
    z, rows = some_noise(10, 8).requires_grad_(), some_noise(20, 8, seed=1).requires_grad_()
    targets, weight = torch.arange(10) % 20, torch.linspace(0.1, 1, 10)
    total, ce = chunked_cross_entropy(z, rows, targets, weight)
    found = torch.autograd.grad(3 * total, [z, rows])
    expected = F.cross_entropy(z @ rows.T, targets, reduction="none")
    torch.testing.assert_close(ce, expected.detach())
    wanted = torch.autograd.grad(3 * (expected * weight).sum(), [z, rows])
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    "overrides", [LLAMA, ("objective.hint_probability=0.5", "objective.sweep_probability=0.3")]
)
def test_a_step_in_chunks_equals_one_that_holds_its_logits(
    overrides: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = trainer(*overrides)
    held = losses(one, 2)
    monkeypatch.setattr(cross_entropy, "CHUNK_VALUES", 1)
    monkeypatch.setattr(cross_entropy, "FEWEST_ROWS", 50)
    other = trainer(*overrides)
    assert not other.objective.holds_logits(4 * 32)
    assert losses(other, 2) == pytest.approx(held, abs=2e-4)


def test_momentum_in_two_bytes_trains_alike_and_comes_back() -> None:
    one, two = trainer(), trainer("training.momentum=bfloat16")
    assert losses(two, 6) == pytest.approx(losses(one, 6), abs=2e-2)
    state = two.optimizer.state_tensors()
    assert {str(value.dtype) for key, value in state.items() if "momentum" in key} == {"torch.bfloat16"}
    resumed = trainer("training.momentum=bfloat16")
    resumed.block.load_state_dict(two.block.state_dict())
    resumed.optimizer.load_state_tensors(state)
    assert float(two.step(6, 0)) == float(resumed.step(6, 0))
    assert torch.equal(weights(two), weights(resumed))


def out_of_memory_above(trained: BlockTrainer, most: int) -> None:
    """The trainer's device holds `most` sequences."""
    real = trained._loss

    def limited(*arguments: object) -> object:
        if len(arguments[1]) > most:  # type: ignore[arg-type]
            raise torch.OutOfMemoryError("no room")
        return real(*arguments)

    trained._loss = limited  # type: ignore[assignment]


def test_out_of_memory_names_the_settings_to_change() -> None:
    one = trainer("training.batch=8", "training.micro_batch=4")
    out_of_memory_above(one, 2)
    with pytest.raises(DeviceError, match=r"micro_batch below 4 \(or auto\) or training.recompute = true"):
        one.step(0, 0)


def test_auto_finds_a_micro_batch_that_fits() -> None:
    one, whole = trainer("training.batch=8", "training.micro_batch=auto"), trainer("training.batch=8")
    out_of_memory_above(one, 2)
    assert float(one.step(0, 0)) == pytest.approx(float(whole.step(0, 0)), abs=1e-5)
    assert one.micro_batch == 2
    out_of_memory_above(one, 0)
    with pytest.raises(DeviceError, match="ran out of memory"):
        one.step(1, 0)


def test_the_block_s_own_weights_are_not_asked_for_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = trainer("training.batch=8", "training.micro_batch=8")
    held = 4 * weights(one).numel()
    just_enough = math.ceil(training_bytes(one.recipe, one.objective, block=0) / 0.9)
    said = tmp_path / "meminfo"
    monkeypatch.setattr(memory, "MEMORY_FILE", said)
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    for missing, found in ((0, 8), (held // 2, 4)):
        free = memory.RESIDENT_ON_CPU * (just_enough - held - missing)
        said.write_text(f"MemAvailable: {math.ceil(free / 1024)} kB\n")
        assert fitting_micro_batch(one.recipe, one.objective, one.block, 0) == found


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["training.micro_batch=0"], "at least 1, or `auto`"),
        (["training.micro_batch=some"], "training.micro_batch must be int"),
        (["training.optimizer=adamw", "training.momentum=bfloat16"], "AdamW keeps fp32"),
    ],
)
def test_bad_settings_are_refused(overrides: list[str], told: str) -> None:
    with pytest.raises(RecipeError, match=told):
        tiny_recipe(*overrides)
