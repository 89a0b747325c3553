"""Parts of a serial model, each trained with the exact loss through its frozen neighbours."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import blocktrain
from blocktrain.config import Recipe, resolve_recipe
from blocktrain.data.corpora import open_text
from blocktrain.data.shards import Shards
from blocktrain.ids import CorpusHash
from blocktrain.model.block import Block
from blocktrain.training.frozen import gradient_behind
from blocktrain.training.hugging_face import whole_name
from blocktrain.training.inner import BlockTrainer
from blocktrain.training.local import LocalRun, Silent
from blocktrain.training.memory import block_needs
from blocktrain.training.setup import Setup
from blocktrain.training.snapshot import tensors_of
from blocktrain.validation.scorer import Scorer, Work
from tests.tiny import prose, shaken

CPU = torch.device("cpu")
MODEL = {"family": "llama", "width": 32, "heads": 4, "kv_heads": 2, "feedforward_width": 48, "context": 32}
PARTS = {"blocks": 3, "block_layers": [1, 2, 1]}


def recipe_of(model: dict[str, Any], kind: str, **training: Any) -> Recipe:
    return resolve_recipe(
        {
            "model": {**MODEL, **model},
            "objective": {"kind": kind},
            "training": {"steps": 4, "batch": 6, "warmup_steps": 1, **training},
            "evaluation": {"max_bytes": 700, "pooling_bytes": 500, "sample_bytes": 0},
            "swarm": {"steps_per_round": 2, "rounds": 2, "replicas": 1},
        }
    )


def serial(**training: Any) -> tuple[Setup, list[Block]]:
    setup = Setup.of(recipe_of(PARTS, "serial", **training))
    return setup, [shaken(setup.initial(part), seed=part).train() for part in range(3)]


def joined(parts: list[Block], setup: Setup) -> Block:
    """The same weights as one model."""
    whole = Setup.of(recipe_of({"blocks": 1, "layers_per_block": 4}, "denoise")).initial(0)
    model = setup.recipe.model
    whole.load_state_dict(
        {
            whole_name(name, model.layers_before(index)): tensor
            for index, part in enumerate(parts)
            for name, tensor in part.state_dict().items()
        }
    )
    return whole


def trainer_of(setup: Setup, parts: list[Block], index: int) -> BlockTrainer:
    tokens = torch.tensor(list(prose(3000))).numpy()
    shards = Shards.of(setup.recipe, tokens, CorpusHash("00" * 32), CPU)
    others = [copy.deepcopy(parts[other]) for other in setup.objective.frozen(index)]
    codebook = setup.codebook()
    return BlockTrainer(setup.recipe, setup.objective, parts[index], index, shards, codebook, frozen=others)


@pytest.mark.parametrize("micro_batch", [None, 2])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_part_gets_the_gradients_that_it_has_in_the_whole_model(
    index: int, recompute: bool, micro_batch: int | None
) -> None:
    setup, parts = serial(micro_batch=micro_batch, recompute=recompute)
    whole = joined(parts, setup).train()
    trainer = trainer_of(setup, parts, index)
    tokens, targets = trainer.shards.batch(0, 1, index)
    ce = trainer._gradients(1, 0, trainer._upstream(1, 0))
    loss = setup.objective.loss(whole, tokens, targets, torch.zeros(0, 32))
    loss.total.backward()  # type: ignore[no-untyped-call]
    assert float(ce) == pytest.approx(float(loss.ce), abs=1e-6)
    expected = dict(whole.named_parameters())
    for name, parameter in parts[index].named_parameters():
        other = expected[whole_name(name, setup.recipe.model.layers_before(index))].grad
        torch.testing.assert_close(parameter.grad, other, rtol=1e-4, atol=1e-6)
    assert all(p.grad is None for part in trainer.behind for p in part.parameters())


def test_of_own_activations_and_those_of_the_parts_behind_one_kind_is_held_at_a_time() -> None:
    """A part in front takes no more than the last one, which has nobody behind it, and a fraction of all."""

    def held(trainer: BlockTrainer) -> int:
        """Most bytes that wait for a backward pass at once."""
        now = most = 0

        class Saved:
            def __init__(self, tensor: Tensor) -> None:
                nonlocal now, most
                self.tensor, self.size = tensor, tensor.numel() * tensor.element_size()
                now += self.size
                most = max(most, now)

            def __del__(self) -> None:
                nonlocal now
                now -= self.size

        with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
            trainer._gradients(1, 0, trainer._upstream(1, 0))
        return most

    setup, parts = serial()
    of_parts = [held(trainer_of(setup, parts, index)) for index in range(len(parts))]
    whole = Setup.of(recipe_of({"blocks": 1, "layers_per_block": 4}, "denoise"))
    assert max(of_parts) < 0.6 * held(trainer_of(whole, [whole.initial(0)], 0))


def test_a_frozen_part_in_two_bytes_gives_nearly_the_same_gradient() -> None:
    setup, parts = serial()
    tokens = torch.randint(0, 256, (2, 20), generator=torch.Generator().manual_seed(0))
    table = torch.zeros(0, 32)
    features: Tensor = parts[0](tokens, table).features_BTD

    def found(behind: list[Block]) -> Tensor:
        return gradient_behind(setup.objective, behind, features, tokens, tokens, table, 1.0)[1].float()

    exact = found(parts[1:])
    narrow = [copy.deepcopy(part) for part in parts[1:]]
    for part in narrow:
        for parameter in part.parameters():
            parameter.data = parameter.data.bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = found(narrow)
    assert torch.nn.functional.cosine_similarity(exact.flatten(), rough.flatten(), dim=0) > 0.99


@pytest.mark.parametrize("order", ["turns", "sequential"])
def test_a_local_run_refines_the_parts_of_a_model_and_resumes_to_the_same_weights(
    order: str, tmp_path: Path
) -> None:
    corpus = tmp_path / "prose.txt"
    corpus.write_bytes(prose(6000))
    values = recipe_of(PARTS, "serial", order=order).to_dict()
    values["data"]["corpus"] = str(corpus)
    recipe = resolve_recipe(values)
    run = LocalRun(recipe, tmp_path / "run", CPU, Silent())
    assert run.reference is None
    run.train(resume=False)
    report = run.finish()
    assert report.scores.pooling.weights == (0.0, 0.0, 1.0)
    assert report.scores.consensus.ce < 5.54, "ln 256 is 5.545"
    found = blocktrain.evaluate(blocktrain.load(tmp_path / "run" / "checkpoint"), prose(500))
    assert (found.blocks, found.to_dict()["blocks"]) == ([], []), "parts predict nothing alone"
    again = LocalRun(recipe, tmp_path / "run", CPU, Silent())
    assert not again.train(resume=True)
    for block, other in zip(run.blocks, again.blocks, strict=True):
        torch.testing.assert_close(block.state_dict(), other.state_dict(), rtol=0, atol=0)


def test_a_judge_scores_a_part_by_the_loss_of_the_whole_model(tmp_path: Path) -> None:
    corpus = tmp_path / "prose.txt"
    corpus.write_bytes(prose(6000))
    values = recipe_of(PARTS, "serial").to_dict()
    values["data"]["corpus"] = str(corpus)
    recipe = resolve_recipe(values)
    setup, parts = serial()
    weights = {index: tensors_of(part) for index, part in enumerate(parts)}
    scorer = Scorer(recipe, open_text(recipe))
    base = weights.pop(0)
    better = {name: one if "embed" in name else 0.5 * one for name, one in base.items()}
    found = scorer.evidence(0, base, better, Work(0, 0, 2), 3, weights)
    assert found.held_out.mean != 0, "an inner part says nothing of its own"
    assert scorer.guard(0, base, [base], 8, 3, weights) == [[0.0] * 8]


def test_a_part_needs_room_for_itself_and_one_visitor() -> None:
    setup, _ = serial()
    first, _, last = block_needs(setup.recipe, setup.objective, "cuda")
    whole = recipe_of({"blocks": 1, "layers_per_block": 4}, "denoise")
    assert max(first, last) < block_needs(whole, Setup.of(whole).objective, "cuda")[0]
