"""Muon on the layers' matrices, AdamW on everything else, and the learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from blocktrain.config import TrainingConfig
from blocktrain.model.block import Block
from blocktrain.training.muon import BatchedMuon
from blocktrain.training.ranks import ALONE, Ranks, local, split

ADAM_BETAS = (0.9, 0.98)  # 0.98: runs are short, and 0.999 would average over all of one


def learning_rate_factor(step: int, config: TrainingConfig) -> float:
    """Linear warm-up, then a cosine down to `final_lr`; `step` counts from 0."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    span = max(1, config.steps - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / span)
    return config.final_lr + (1 - config.final_lr) * 0.5 * (1 + math.cos(math.pi * progress))


def split_parameters(module: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The matrices of a block's layers, and the rest; a codebook has none."""
    names = module.matrices() if isinstance(module, Block) else set()
    matrices: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, parameter in module.named_parameters():
        (matrices if name in names else rest).append(parameter)
    return matrices, rest


class Optimizer:
    """The two optimizers of one module, stepped, scheduled and saved as one."""

    def __init__(self, module: nn.Module, config: TrainingConfig, ranks: Ranks = ALONE) -> None:
        # Blocks like `other_lr` 3e-3, the reference 1e-3: sharing one would flatter the blocks by 0.028.
        matrices, rest = split_parameters(module)
        self.config, self.ranks = config, ranks
        self.parameters = matrices + rest
        self.parts: list[torch.optim.Optimizer] = []
        if matrices and config.optimizer == "muon":
            self.parts.append(
                BatchedMuon(
                    matrices,
                    lr=config.matrix_lr,
                    weight_decay=config.weight_decay,
                    momentum=0.95,
                    adjust_lr_fn="match_rms_adamw",
                    buffer_dtype=getattr(torch, config.momentum),
                    ranks=ranks,
                )
            )
        elif matrices:
            self.parts.append(_adamw(matrices, config.matrix_lr, config.weight_decay, ranks))
        # No decay on embeddings, norms and scales: zero is not where they should go.
        self.parts.append(_adamw(rest, config.other_lr, 0.0, ranks))
        self.peak_lrs = [part.param_groups[0]["lr"] for part in self.parts]

    def step(self, step: int) -> None:
        """Clip, apply the gradients at the learning rate of `step`, and clear them."""
        if self.ranks.sharded:
            gradients = [one.grad for one in self.parameters if one.grad is not None]
            shrinking = (self.config.clip_norm / (self.ranks.norm(gradients) + 1e-6)).clamp(max=1.0)
            for gradient in gradients:
                local(gradient).mul_(shrinking)
        else:
            nn.utils.clip_grad_norm_(self.parameters, self.config.clip_norm)
        factor = learning_rate_factor(step, self.config)
        for part, peak in zip(self.parts, self.peak_lrs, strict=True):
            part.param_groups[0]["lr"] = peak * factor
            part.step()
        self.clear_gradients()

    def clear_gradients(self) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def state_tensors(self) -> dict[str, Tensor]:
        """Every state tensor under a stable name: part, parameter, key."""
        return {
            f"{i}.{j}.{key}": value
            for i, part in enumerate(self.parts)
            for j, state in part.state_dict()["state"].items()
            for key, value in state.items()
        }

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        states: list[dict[int, dict[str, Tensor]]] = [{} for _ in self.parts]
        for name, value in tensors.items():
            i, j, key = name.split(".", 2)
            states[int(i)].setdefault(int(j), {})[key] = value
        for part, state in zip(self.parts, states, strict=True):
            for number, values in state.items():
                parameter = part.param_groups[0]["params"][number]
                for key, value in values.items():
                    if value.shape == parameter.shape and value.ndim:  # not the counter of steps
                        values[key] = split(value, parameter)
            part.load_state_dict({"state": state, "param_groups": part.state_dict()["param_groups"]})


def _adamw(
    parameters: Sequence[nn.Parameter], lr: float, weight_decay: float, ranks: Ranks
) -> torch.optim.AdamW:
    # One kernel for all of it on a GPU; elsewhere the plain loop, whose numbers the golden runs have. A
    # sharded block has tensors in parts and whole ones, which one kernel does not take together.
    fused = not ranks.sharded and all(parameter.device.type == "cuda" for parameter in parameters)
    return torch.optim.AdamW(
        parameters,
        lr=lr,
        betas=ADAM_BETAS,
        eps=1e-10,
        weight_decay=weight_decay,
        fused=fused,
        foreach=False if ranks.sharded else None,
    )
