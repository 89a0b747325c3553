"""A block for the processor, without a hint, whose matrices lie as products of a few rows like them.

A traversal brings one to thirty tokens. With the matrices laid out once for oneDNN, products of 9 to 17 rows
take half the time of `F.linear` (d = 384, one core: docs/history). Results differ in the last bits, as
they do between processors; model/sampling.py says why that changes no text. Of few rows the number of
operations counts as much: so query, key and value share a product, and what the norms make of their condition
is worked out beforehand.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blocktrain.model.adaptive import AdaptiveBlock
from blocktrain.model.block import Block
from blocktrain.model.layers import AdaptiveNorm, AnyLayerCache, Attention, causal_attention, rotate

ROWS = 16
"""The number of rows that matrices are laid out for; 2 to 128 gain."""
STEPS = ((8, 1), (64, 4), (512, 16), (1 << 62, 64))
"""Up to so many rows, products have a multiple of so many. oneDNN compiles each matrix again for every number
of rows that it has not seen: 0.3 to 0.5 ms, where a product of 40 rows takes 0.03 to 0.2."""
FEW_PRODUCTS = 1 << 17
"""Multiplications below which a product is faster without oneDNN, whose call takes 10 us: of 8 rows with 64 x
256 numbers 5 us instead of 11."""
MAX_BYTES = 1 << 30
"""Matrices are there twice, so a larger block stays as it is."""


def is_packable(block: Block) -> bool:
    # oneDNN's layout is for fp32 on a CPU; on a GPU the library chooses its own kernels.
    weight = next(block.parameters())
    size = sum(p.numel() * p.element_size() for p in block.parameters())
    fits = weight.device.type == "cpu" and weight.dtype == torch.float32 and size <= MAX_BYTES
    return fits and bool(torch._C._has_mkldnn)


class PackedProduct(nn.Module):
    """The product with a matrix that is kept elsewhere."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.plain = weight.detach() if weight.numel() < FEW_PRODUCTS else None
        self.packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.shape[-2]
        if self.plain is not None and rows * self.plain.numel() < FEW_PRODUCTS:
            return F.linear(x, self.plain)
        step = next(step for most, step in STEPS if rows <= most)
        padding = -rows % step
        if padding:
            x = F.pad(x, (0, 0, 0, padding))
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, None, "none", [], "")
        return y.narrow(-2, 0, rows) if padding else y


class PackedLinear(PackedProduct):
    """A linear map without a bias; `weight` is the map's own."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.weight)
        # Kept beside the packed copy: drafts round it in their own way.
        self.weight = linear.weight


class ConstantNorm(nn.Module):
    """An adaptive norm for one condition."""

    def __init__(self, norm: AdaptiveNorm, c_C: Tensor) -> None:
        super().__init__()
        # For drafts, which work out gains of their own.
        self.gain_shift = norm.gain_shift
        gain, self.shift = norm.gain_shift(c_C).chunk(2)
        # RMS norm is sqrt(D) times the vector of length 1; the root goes into the gain.
        root = gain.shape[-1] ** 0.5
        self.gain, self.least = root * (1 + gain), _least_length(gain, root)

    def forward(self, x_BTD: Tensor, c_BC: Tensor) -> Tensor:
        # 4 operations of 1 us for 8 rows of 384, where `rms_norm` and the map of the condition took 15.
        length_BT1 = torch.linalg.vector_norm(x_BTD, dim=-1, keepdim=True).hypot(self.least)
        return torch.addcmul(self.shift, x_BTD / length_BT1, self.gain)


class PackedAttention(nn.Module):
    """Query, key and value as one product, 43 instead of 63 us for 8 rows of 384; queries and keys normed and
    rotated as one."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.heads = attention.heads
        self.q, self.k, self.v = attention.q, attention.k, attention.v
        self.qkv = PackedProduct(torch.cat([self.q.weight, self.k.weight, self.v.weight]))
        self.out = PackedLinear(attention.out)
        self.root = (self.q.weight.shape[0] // self.heads) ** 0.5
        self.least = _least_length(self.q.weight, self.root)

    def forward(
        self,
        x_BTD: Tensor,
        rotary: tuple[Tensor, Tensor],
        cache: AnyLayerCache | None,
        both_ways: int = 0,
    ) -> Tensor:
        assert not both_ways, "sweeps have a hint"
        batch, length, width = x_BTD.shape
        parts = self.qkv(x_BTD).view(batch, length, 3 * self.heads, -1).transpose(1, 2)
        q_k, v = parts[:, : 2 * self.heads], parts[:, 2 * self.heads :]
        lengths = torch.linalg.vector_norm(q_k, dim=-1, keepdim=True).hypot(self.least)
        q, k = rotate(q_k * (self.root / lengths), *rotary).chunk(2, dim=1)
        y = causal_attention(q, k, v) if cache is None else cache.attend(q, k, v)
        merged: Tensor = self.out(y.transpose(1, 2).reshape(batch, length, width))
        return merged


def _least_length(like: Tensor, root: float) -> Tensor:
    """RMS norm adds an epsilon to the mean square; as a length beside the vector's own."""
    return torch.tensor(root * torch.finfo(like.dtype).eps ** 0.5)


@torch.inference_mode()
def packed(block: Block) -> Block:
    """A block over the same parameters, without gradients."""
    assert is_packable(block)
    # deepcopy takes what this table names as copied already, so that the parameters are not there a third
    # time.
    shared = {id(tensor): tensor for tensor in (*block.parameters(), *block.buffers())}
    other = copy.deepcopy(block, shared)
    if isinstance(other, AdaptiveBlock):
        # No condition but that of the null hint.
        other.hint = None
    for module in list(other.modules()):
        for name, child in module.named_children():
            if isinstance(child, AdaptiveNorm) and isinstance(other, AdaptiveBlock):
                setattr(module, name, ConstantNorm(child, other.condition.null))
            elif isinstance(child, Attention):
                setattr(module, name, PackedAttention(child))
            # The maps with a bias belong to the noise condition: one row per sequence, too little work to
            # gain anything.
            elif isinstance(child, nn.Linear) and child.bias is None and not isinstance(module, Attention):
                setattr(module, name, PackedLinear(child))
    return other
