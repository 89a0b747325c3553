"""A block's next row, quickly and roughly: one token at a time, weights in half precision.

For drafts, which may be wrong. A pass of one token is bound by reading the weights and by the number of
small operations: norms' gains are worked out beforehand, query, key and value share a matrix, and so do
output map and codebook. One core, d = 384, 3 layers, 300 positions: see docs/experiments.md. Shares its
cache with `Block.forward`, so that longer stretches go through that one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blocktrain.model.block import Block, BlockOutput, Cache
from blocktrain.model.layers import (
    AdaptiveNorm,
    CausalConvolution,
    Layer,
    LayerCache,
    Place,
)

EPSILON = torch.finfo(torch.float32).eps
"""What F.rms_norm adds to the mean square."""
KNOWN_PARTS = {"embedding", "hint", "upstream", "condition", "layers", "out_norm", "out"}


def is_quickenable(block: Block) -> bool:
    """Whether this module knows all the block does without a hint, and the block is on the processor."""
    parts = {name for name, _ in block.named_children()}
    return parts <= KNOWN_PARTS and block.upstream is None and block.embedding.weight.device.type == "cpu"


class _Norm:
    def __init__(self, norm: AdaptiveNorm, condition_C: Tensor) -> None:
        gain, shift = norm.gain_shift(condition_C).chunk(2)
        self.gain, self.shift = (1 + gain).contiguous(), shift.contiguous()

    def __call__(self, x_D: Tensor) -> Tensor:
        """RMS norm in two operations instead of seven."""
        scale = (float(torch.dot(x_D, x_D)) / len(x_D) + EPSILON) ** -0.5
        return torch.addcmul(self.shift, x_D, self.gain, value=scale)


class _Convolution:
    def __init__(self, convolution: CausalConvolution) -> None:
        self.weight = convolution.weight.detach().clone()
        self.weight[-1] += 1  # the position itself is added too

    def __call__(self, place: Place, y_D: Tensor, cache: LayerCache) -> Tensor:
        tail = cache.inputs_BSD[place].append(y_D[None, None])[0, -len(self.weight) :]
        return (tail * self.weight[-len(tail) :]).sum(0)


def _half(*linears: nn.Linear) -> Tensor:
    return torch.cat([linear.weight for linear in linears]).half()


class _QuickLayer:
    def __init__(self, layer: Layer, condition_C: Tensor) -> None:
        self.attention = layer.attention
        if layer.attention is not None:
            attention = layer.attention
            self.heads = attention.heads
            self.attention_norm = _Norm(layer.attention_norm, condition_C)
            self.qkv = _half(attention.q, attention.k, attention.v)
            self.attention_out = _half(attention.out)
        self.attention_convolution = _convolution(layer.attention_convolution)
        self.feedforward_convolution = _convolution(layer.feedforward_convolution)
        self.feedforward_norm = _Norm(layer.feedforward_norm, condition_C)
        self.up, self.down = _half(layer.feedforward.up), _half(layer.feedforward.down)

    def step(self, x_D: Tensor, rotary: tuple[Tensor, Tensor], cache: LayerCache) -> Tensor:
        if self.attention is not None:
            y_D = self.attention_norm(x_D)
            if self.attention_convolution is not None:
                y_D = self.attention_convolution("attention", y_D, cache)
            x_D = x_D + torch.mv(self.attention_out, self._attend(y_D, rotary, cache).half())
        y_D = self.feedforward_norm(x_D)
        if self.feedforward_convolution is not None:
            y_D = self.feedforward_convolution("feedforward", y_D, cache)
        hidden = torch.mv(self.up, y_D.half()).relu_().square_()
        return x_D + torch.mv(self.down, hidden)

    def _attend(self, y_D: Tensor, rotary: tuple[Tensor, Tensor], cache: LayerCache) -> Tensor:
        qkv = torch.mv(self.qkv, y_D.half()).float().view(3, self.heads, 1, -1)
        q_k = qkv[:2] / torch.linalg.vector_norm(qkv[:2], dim=-1, keepdim=True)
        swapped = q_k.view(2, self.heads, 2, -1).flip(2).view_as(q_k)
        q_k = torch.addcmul(q_k * rotary[0], swapped, rotary[1])
        k, v = cache.k_BHSK.append(q_k[1:]), cache.v_BHSK.append(qkv[2:])
        return F.scaled_dot_product_attention(q_k[:1], k, v).flatten()


def _convolution(convolution: CausalConvolution | None) -> _Convolution | None:
    return None if convolution is None else _Convolution(convolution)


def _rotary_rows(block: Block) -> tuple[Tensor, Tensor]:
    """For x of length 1, x * first + (halves of x swapped) * second is the rotation of its RMS norm."""
    cos, sin = block.rotary_cos, block.rotary_sin
    scale = (2 * cos.shape[1]) ** 0.5
    return scale * torch.cat([cos, cos], dim=1), scale * torch.cat([-sin, sin], dim=1)


class QuickBlock:
    @torch.inference_mode()
    def __init__(self, block: Block, codebook_VD: Tensor) -> None:
        assert is_quickenable(block)
        condition_C = block.condition.null
        self.embedding = block.embedding.weight.clone()
        self.rotary = _rotary_rows(block)
        self.layers = [_QuickLayer(layer, condition_C) for layer in block.layers]  # type: ignore[arg-type]
        self.out_norm = _Norm(block.out_norm, condition_C)
        scale = block.logit_scale * block.sigma_data
        self.logits = (scale * codebook_VD @ block.out.weight).half()

    @torch.inference_mode()
    def step(self, token: int, cache: Cache) -> Tensor:
        """Logits [V] of what follows `token`, which the cache then holds."""
        x_D = self.embedding[token]
        cos, sin = self.rotary
        rotary = cos[cache.length], sin[cache.length]
        for layer, layer_cache in zip(self.layers, cache.layers, strict=True):
            x_D = layer.step(x_D, rotary, layer_cache)
        cache.advance(1)
        return torch.mv(self.logits, self.out_norm(x_D).half()).float()


class PlainBlock:
    """The same through `Block.forward`, wherever the block is."""

    def __init__(self, block: Block, codebook_VD: Tensor) -> None:
        self.block, self.codebook = block, codebook_VD

    @torch.inference_mode()
    def step(self, token: int, cache: Cache) -> Tensor:
        tokens = torch.tensor([[token]], device=self.codebook.device)
        output: BlockOutput = self.block(tokens, self.codebook, cache=cache)
        return output.logits_BTV[0, -1].float().cpu()


def make_stepper(block: Block, codebook_VD: Tensor) -> QuickBlock | PlainBlock:
    return (QuickBlock if is_quickenable(block) else PlainBlock)(block, codebook_VD)
