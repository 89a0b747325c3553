"""A block for the processor whose matrices lie as products of a few rows like them.

A traversal brings one to thirty tokens. With the matrices laid out once for oneDNN, products of 9 to 17 rows
take half the time of `F.linear` (d = 384, one core: docs/history). Results differ in the last bits, as
they do between processors; model/sampling.py says why that changes no text.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blocktrain.model.block import Block

ROWS = 16
"""The number of rows that matrices are laid out for; 2 to 128 gain."""
STEPS = ((8, 1), (64, 4), (512, 16), (1 << 62, 64))
"""Up to so many rows, products have a multiple of so many. oneDNN compiles each matrix again for every number
of rows that it has not seen: 0.3 to 0.5 ms, where a product of 40 rows takes 0.03 to 0.2."""
MAX_BYTES = 1 << 30
"""Matrices are there twice, so a larger block stays as it is."""


def is_packable(block: Block) -> bool:
    # oneDNN's layout is for fp32 on a CPU; on a GPU the library chooses its own kernels.
    weight = next(block.parameters())
    size = sum(p.numel() * p.element_size() for p in block.parameters())
    fits = weight.device.type == "cpu" and weight.dtype == torch.float32 and size <= MAX_BYTES
    return fits and bool(torch._C._has_mkldnn)


class PackedLinear(nn.Module):
    """A linear map without a bias; `weight` is the map's own."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        # Kept beside the packed copy: hashing and export still find the parameters.
        self.weight = linear.weight
        self.packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), ROWS)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.shape[-2]
        step = next(step for most, step in STEPS if rows <= most)
        padding = -rows % step
        if padding:
            x = F.pad(x, (0, 0, 0, padding))
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, None, "none", [], "")
        return y.narrow(-2, 0, rows) if padding else y


@torch.inference_mode()
def packed(block: Block) -> Block:
    """A block over the same parameters, without gradients."""
    assert is_packable(block)
    # deepcopy takes what this table names as copied already, so that the parameters are not there a third
    # time.
    shared = {id(tensor): tensor for tensor in (*block.parameters(), *block.buffers())}
    other = copy.deepcopy(block, shared)
    for module in list(other.modules()):
        for name, child in module.named_children():
            # The maps with a bias belong to the noise condition: one row per sequence, too little work to
            # gain anything.
            if isinstance(child, nn.Linear) and child.bias is None:
                setattr(module, name, PackedLinear(child))
    return other
