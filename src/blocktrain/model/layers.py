"""Transformer layers: rotary attention with normalised queries and keys, and feed-forward, pre-norm.

Shapes: B sequences, T positions, D width, H heads, K head width, C condition width, S cached positions.
Every norm's gain and shift are linear maps of a condition vector c_BC, which carries the noise level. That
costs few parameters and lets the gains move quickly: one block of 3 layers ended at 1.074 nats per byte
instead of 1.105 with plain gains (1000 steps, WikiText-2).
"""

from __future__ import annotations

from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blocktrain.config import ModelConfig

# The usual one; the contexts of the recipes, 64 to 512, are too short for a larger base to matter.
ROPE_BASE = 10_000.0

Place = Literal["attention", "feedforward"]
"""The two sub-layers of a layer."""


def has_values() -> bool:
    """Whether what is built now gets values, and not shapes alone. For random numbers and ranges of shapes
    alone torch loads its compiler: 1.9 s in every program that opens a checkpoint."""
    return torch.get_default_device().type != "meta"


class TokenEmbedding(nn.Embedding):
    """A row for each token."""

    def reset_parameters(self) -> None:
        if has_values():
            super().reset_parameters()


class Growing:
    """A tensor that grows along one dimension in place: appending copies what is new, not what is there."""

    def __init__(self, dim: int) -> None:
        self.dim, self.length = dim, 0
        self.room: Tensor | None = None

    def append(self, x: Tensor) -> Tensor:
        """Everything so far, `x` last."""
        end = self.length + x.shape[self.dim]
        room = self.reserve(x, end)
        room.narrow(self.dim, self.length, x.shape[self.dim]).copy_(x)
        self.length = end
        return room.narrow(self.dim, 0, end)

    def reserve(self, like: Tensor, end: int) -> Tensor:
        """The memory, of the shape of `like` but for its length, which is `end` at least."""
        if self.room is None or self.room.shape[self.dim] < end:
            self.room = self._larger(like, end)
        return self.room

    def _larger(self, x: Tensor, needed: int) -> Tensor:
        # Twice the length, so that a text of n tokens copies its cache log n times and not n times.
        shape = list(x.shape)
        shape[self.dim] = max(64, needed, 2 * self.length)
        # Empty and not zero: places beyond `length` are never read.
        room = x.new_empty(shape)
        if self.room is not None:
            room.narrow(self.dim, 0, self.length).copy_(self.room.narrow(self.dim, 0, self.length))
        return room

    def held(self) -> Tensor | None:
        return None if self.room is None else self.room.narrow(self.dim, 0, self.length)


class LayerCache:
    """What one layer remembers of earlier positions: keys, values and the convolutions' inputs."""

    def __init__(self) -> None:
        self.k_BHSK, self.v_BHSK = Growing(2), Growing(2)
        # All inputs and not the last three: a rejected draft cuts the text back to any length, and the taps
        # must then see what stood before it.
        self.inputs_BSD: dict[Place, Growing] = {"attention": Growing(1), "feedforward": Growing(1)}
        self.parts = [self.k_BHSK, self.v_BHSK, *self.inputs_BSD.values()]
        """Keys, values, and the inputs of attention's convolution and of feed-forward's."""

    def attend(self, q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor) -> Tensor:
        """Attention of the new positions over all positions so far."""
        return causal_attention(q_BHTK, self.k_BHSK.append(k_BHTK), self.v_BHSK.append(v_BHTK))

    def convolve(self, place: Place, convolution: CausalConvolution, x_BTD: Tensor) -> Tensor:
        """The convolution in front of attention or feed-forward, continued from earlier positions."""
        y: Tensor = convolution(x_BTD, self.inputs_BSD[place].held())
        self.inputs_BSD[place].append(x_BTD)
        return y

    def truncate(self, length: int) -> None:
        """Forget every position from `length` on."""
        for part in self.parts:
            part.length = min(part.length, length)

    def settle(self, length: int) -> None:
        """So many positions are in the memory of the parts."""
        for part in self.parts:
            if part.room is not None:
                part.length = length

    def copy(self) -> LayerCache:
        """The same with memory of its own."""
        other = LayerCache()
        for part, own in zip(self.parts, other.parts, strict=True):
            held = part.held()
            own.room, own.length = None if held is None else held.clone(), part.length
        return other


class AnyLayerCache(Protocol):
    """What a layer asks of a cache, be it of one text or of several (`caches`)."""

    def attend(self, q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor) -> Tensor: ...

    def convolve(self, place: Place, convolution: CausalConvolution, x_BTD: Tensor) -> Tensor: ...


class AnyCache(Protocol):
    """What a block asks of a cache."""

    def layer(self, index: int) -> AnyLayerCache: ...

    def positions(self, length: int) -> slice | Tensor:
        """Where the next `length` tokens lie in the context."""

    def advance(self, length: int) -> None: ...


def causal_attention(q_BHTK: Tensor, k_BHSK: Tensor, v_BHSK: Tensor) -> Tensor:
    """The last T of S positions attend to themselves and what came before."""
    length = q_BHTK.shape[2]
    past = k_BHSK.shape[2] - length
    # Without a past, or with one new position, the kernel needs no mask, which keeps its fastest form.
    mask = None
    if past and length > 1:
        mask = torch.ones(length, past + length, dtype=torch.bool, device=q_BHTK.device).tril(past)
    # Several query heads may share a head of keys. The kernel then reads it once; repeated in memory, a step
    # over 512 positions took 17 times as long.
    shared = q_BHTK.shape[1] != k_BHSK.shape[1]
    return F.scaled_dot_product_attention(
        q_BHTK, k_BHSK, v_BHSK, attn_mask=mask, is_causal=not past, enable_gqa=shared
    )


def attention(q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, both_ways: int) -> Tensor:
    """Causal, but for the first `both_ways` sequences, whose positions attend to all."""
    if not both_ways:
        return causal_attention(q_BHTK, k_BHTK, v_BHTK)
    full, rest = slice(None, both_ways), slice(both_ways, None)
    # Two calls and no mask: both forms then keep the kernel's fast path.
    y_BHTK = F.scaled_dot_product_attention(q_BHTK[full], k_BHTK[full], v_BHTK[full])
    if both_ways == len(q_BHTK):
        return y_BHTK
    return torch.cat([y_BHTK, causal_attention(q_BHTK[rest], k_BHTK[rest], v_BHTK[rest])])


def rms_norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],))


class AdaptiveNorm(nn.Module):
    """RMS norm with gain 1 + g(c) and shift s(c)."""

    def __init__(self, width: int, condition_width: int) -> None:
        super().__init__()
        self.gain_shift = nn.Linear(condition_width, 2 * width)
        # At first a plain RMS norm, whatever the noise level.
        nn.init.zeros_(self.gain_shift.weight)
        nn.init.zeros_(self.gain_shift.bias)

    def forward(self, x_BTD: Tensor, c_BC: Tensor) -> Tensor:
        gain, shift = self.gain_shift(c_BC)[:, None, :].chunk(2, dim=-1)
        # Under autocast the matrix products that follow are bf16; casting here halves the bytes between.
        dtype = x_BTD.dtype
        if torch.is_autocast_enabled(x_BTD.device.type):
            dtype = torch.get_autocast_dtype(x_BTD.device.type)
        y: Tensor = (rms_norm(x_BTD) * (1 + gain) + shift).to(dtype)
        return y


class CausalConvolution(nn.Module):
    """Adds a weighted sum of the last `taps` positions, channel by channel, to each position.

    Four taps cost 0.2 % of the parameters and bring four shallow blocks from 1.034 to 0.996 nats per byte,
    the deep reference from 0.995 to 0.988: that one has layers to spend on local mixing (decision 0001).
    """

    def __init__(self, width: int, taps: int) -> None:
        super().__init__()
        self.taps = taps
        # Zero: it starts as the identity, and short contexts are learned only where they help.
        self.weight = nn.Parameter(torch.zeros(taps, width))

    def forward(self, x_BTD: Tensor, earlier_BSD: Tensor | None) -> Tensor:
        length = x_BTD.shape[1]
        if earlier_BSD is not None:
            # The taps reach back taps - 1 positions and never forward: a target must not leak into its own
            # prediction.
            x_BTD = torch.cat([earlier_BSD[:, -(self.taps - 1) :], x_BTD], dim=1)
        # Zeros where the text has not begun, in training and with a cache alike.
        missing = length + self.taps - 1 - x_BTD.shape[1]
        padded_BTD = F.pad(x_BTD, (0, 0, missing, 0))
        weight = self.weight.to(x_BTD.dtype)
        # A sum of shifted copies: the taps are few, and torch.compile fuses them.
        mixed = padded_BTD[:, self.taps - 1 :]
        for i in range(self.taps):
            mixed = mixed + weight[i] * padded_BTD[:, i : i + length]
        return mixed


def rotary_table(context: int, head_width: int) -> tuple[Tensor, Tensor]:
    """cos and sin of shape [context, head_width / 2]."""
    if not has_values():
        return torch.empty(context, head_width // 2), torch.empty(context, head_width // 2)
    # In float64: at position 2^20 an angle in fp32 is wrong by 0.06.
    frequency = ROPE_BASE ** (-torch.arange(0, head_width, 2, dtype=torch.float64) / head_width)
    angle = torch.outer(torch.arange(context, dtype=torch.float64), frequency)
    return angle.cos().float(), angle.sin().float()


def rotate(x_BHTK: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
    # Halves and not neighbours as pairs: a pair is then two contiguous slices.
    first, second = x_BHTK.chunk(2, dim=-1)
    return torch.cat([first * cos_TK - second * sin_TK, first * sin_TK + second * cos_TK], dim=-1)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        # Three matrices and not one: Muon orthogonalises each by itself, and a stack of three would be one
        # matrix to it.
        self.q = nn.Linear(config.width, config.width, bias=False)
        self.k = nn.Linear(config.width, config.width, bias=False)
        self.v = nn.Linear(config.width, config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)
        # Each sub-layer starts by adding nothing, so depth does not change the scale of the first steps.
        nn.init.zeros_(self.out.weight)

    def forward(
        self,
        x_BTD: Tensor,
        rotary: tuple[Tensor, Tensor],
        cache: AnyLayerCache | None,
        both_ways: int = 0,
    ) -> Tensor:
        batch, length, width = x_BTD.shape
        shape = (batch, length, self.heads, width // self.heads)
        q, k, v = (linear(x_BTD).view(shape).transpose(1, 2) for linear in (self.q, self.k, self.v))
        # Normalised queries and keys bound the attention logits, however large the matrices grow.
        q, k = (rotate(rms_norm(part), *rotary).to(v.dtype) for part in (q, k))
        if cache is not None:
            y = cache.attend(q, k, v)
        else:
            y = attention(q, k, v, both_ways)
        merged: Tensor = self.out(y.transpose(1, 2).reshape(batch, length, width))
        return merged


class FeedForward(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, config.feedforward * config.width, bias=False)
        self.down = nn.Linear(config.feedforward * config.width, config.width, bias=False)
        nn.init.zeros_(self.down.weight)

    def forward(self, x_BTD: Tensor) -> Tensor:
        # relu^2 needs no third matrix, unlike a gated unit.
        y: Tensor = self.down(F.relu(self.up(x_BTD)).square())
        return y


class Layer(nn.Module):
    """Attention and feed-forward, each behind an adaptive norm and an optional short convolution."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        # `mixer = "none"` leaves the feed-forward part: the MLP block of the litepaper.
        self.attention: Attention | None = None
        self.attention_convolution: CausalConvolution | None = None
        self.feedforward_convolution: CausalConvolution | None = None
        if config.mixer == "attention":
            self.attention_norm = AdaptiveNorm(config.width, config.condition_width)
            self.attention = Attention(config)
            if config.convolution:
                self.attention_convolution = CausalConvolution(config.width, config.convolution)
                self.feedforward_convolution = CausalConvolution(config.width, config.convolution)
        self.feedforward_norm = AdaptiveNorm(config.width, config.condition_width)
        self.feedforward = FeedForward(config)

    def forward(
        self,
        x_BTD: Tensor,
        c_BC: Tensor,
        rotary: tuple[Tensor, Tensor],
        cache: AnyLayerCache | None,
        both_ways: int = 0,
    ) -> Tensor:
        if self.attention is not None:
            y = self.attention_norm(x_BTD, c_BC)
            if self.attention_convolution is not None:
                y = _convolve("attention", self.attention_convolution, y, cache)
            x_BTD = x_BTD + self.attention(y, rotary, cache, both_ways)
        y = self.feedforward_norm(x_BTD, c_BC)
        if self.feedforward_convolution is not None:
            y = _convolve("feedforward", self.feedforward_convolution, y, cache)
        mixed: Tensor = x_BTD + self.feedforward(y)
        return mixed


def _convolve(
    place: Place, convolution: CausalConvolution, x_BTD: Tensor, cache: AnyLayerCache | None
) -> Tensor:
    if cache is not None:
        return cache.convolve(place, convolution, x_BTD)
    y: Tensor = convolution(x_BTD, None)
    return y
