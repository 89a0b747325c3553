"""Matrices orthogonalised together move as torch.optim.Muon moves them one by one, to rounding."""

from __future__ import annotations

import torch

from blocktrain.training.muon import BatchedMuon, orthogonalised
from tests.tiny import some_noise

SHAPES = [(32, 32), (128, 32), (32, 128), (32, 32), (128, 32), (16, 16)]
OPTIONS = {"lr": 0.01, "weight_decay": 0.1, "momentum": 0.95, "adjust_lr_fn": "match_rms_adamw"}


def matrices() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(some_noise(*shape, seed=i)) for i, shape in enumerate(SHAPES)]


def test_every_step_is_the_librarys_but_for_rounding() -> None:
    """The library multiplies in bf16 where we multiply in fp32 and round: a sum that lies between two values
    of bf16 may go to the other one."""
    ours, theirs = matrices(), matrices()
    batched, library = BatchedMuon(ours, **OPTIONS), torch.optim.Muon(theirs, **OPTIONS)  # type: ignore[arg-type]
    for step in range(5):
        before = [one.detach().clone() for one in ours]
        for i, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            other.data.copy_(one.data)
            one.grad = some_noise(*one.shape, seed=100 * step + i)
            other.grad = one.grad.clone()
        batched.step()
        library.step()  # type: ignore[no-untyped-call]
        for old, one, other in zip(before, ours, theirs, strict=True):
            off, moved = (one - other).detach().abs(), (other - old).detach().abs()
            assert float(off.max()) <= 0.05 * float(moved.max())
            assert float(off.mean()) <= 0.005 * float(moved.mean())


def test_a_matrix_without_a_gradient_stays_where_it_is() -> None:
    weights = matrices()
    before = weights[0].detach().clone()
    for weight in weights[1:]:
        weight.grad = torch.ones_like(weight)
    BatchedMuon(weights, **OPTIONS).step()  # type: ignore[arg-type]
    assert torch.equal(weights[0], before)
    assert not torch.equal(weights[3].detach(), matrices()[3].detach())


def test_an_orthogonalised_stack_has_singular_values_near_one() -> None:
    stack = some_noise(3, 64, 32)
    found = orthogonalised(stack, (3.4445, -4.775, 2.0315), steps=5, eps=1e-7)
    values = torch.linalg.svdvals(found.float())
    assert float(values.min()) > 0.5
    assert float(values.max()) < 1.5
