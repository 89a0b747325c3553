"""What training costs: floating-point operations by formula, memory counted (memory.py estimates it).

A matrix product of n parameters costs 2n operations per token forward and 4n backward; attention adds
2 T D forward per layer and token (the causal half of two T x D products). Norms, convolutions and the
optimizer are left out, as is usual.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from blocktrain.config import ModelConfig
from blocktrain.model.block import Block
from blocktrain.training.optimizer import Optimizer

BACKWARD_OVER_FORWARD = 2


def forward_flops_per_token(config: ModelConfig, block: Block, vocabulary: int) -> int:
    linear = sum(
        module.weight.numel()
        for name, module in block.named_modules()
        if isinstance(module, torch.nn.Linear) and "condition" not in name and "gain_shift" not in name
    )
    features = config.heads * config.channels_per_head
    attention = 2 * config.context * features if config.mixer == "attention" else 0
    return 2 * (linear + vocabulary * config.width) + block.num_layers * attention


def training_flops(forward_per_token: int, frozen_forward_per_token: int, tokens: int) -> int:
    """Forward and backward of the trained block, and the forward passes of the frozen blocks upstream."""
    return tokens * (forward_per_token * (1 + BACKWARD_OVER_FORWARD) + frozen_forward_per_token)


class PeakMemory:
    """Peak bytes of a training phase: the allocator's on CUDA, weights + gradients + optimizer state +
    saved activations (each counted once) elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.method = "cuda allocator" if device.type == "cuda" else "counted"
        self.activations = self.state = 0
        self.earlier_peak = 0
        """The peak of the same phase, before it was interrupted."""

    def reset(self) -> None:
        self.activations = self.state = self.earlier_peak = 0
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    @contextmanager
    def count_activations(self) -> Iterator[None]:
        """Wrap one step; does nothing on CUDA."""
        if self.device.type == "cuda":
            yield
            return
        seen: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
        self.activations = max(self.activations, sum(seen.values()))

    def count_state(self, block: Block, optimizer: Optimizer) -> None:
        weights = sum(p.numel() * p.element_size() for p in block.parameters())
        moments = sum(t.numel() * t.element_size() for t in optimizer.state_tensors().values())
        self.state = max(self.state, 2 * weights + moments)

    @property
    def peak_bytes(self) -> int:
        if self.device.type == "cuda":
            return max(self.earlier_peak, int(torch.cuda.max_memory_allocated(self.device)))
        return max(self.earlier_peak, self.state + self.activations)
