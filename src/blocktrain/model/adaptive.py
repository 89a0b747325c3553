"""The family `blocktrain`: adaptive norms and short convolutions, trained to denoise its target's embedding.

Its output map is the codebook, which all blocks share, or its own. Shapes as in block.py and layers.py.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blocktrain.config import ModelConfig, ObjectiveConfig
from blocktrain.model.block import Block, BlockOutput, Hint
from blocktrain.model.layers import AdaptiveNorm, AnyCache, Layer, TokenEmbedding, rms_norm, rotary_table
from blocktrain.model.noise import precondition


def expected_target(hint: Hint, codebook_VD: Tensor) -> Tensor:
    """E[e_y | z] where every token is as likely as another, scaled to the length of an embedding.

    z itself has a norm of sigma sqrt(d) and hides e_y from whatever is not its own logit.
    """
    # Bayes with a flat prior: log p(y | z) = z e_y / sigma^2 + constant, as all rows have norm 1. It is worth
    # 1.2 nats to text written in one traversal (docs/experiments.md, sweep).
    table_VD = codebook_VD.to(hint.z_PTD.dtype)
    likelihood_PTV = hint.z_PTD @ table_VD.T / hint.sigma_P.square()[:, None, None]
    expected_PTD: Tensor = table_VD.shape[1] ** 0.5 * likelihood_PTV.softmax(dim=-1) @ table_VD
    return expected_PTD


class NoiseCondition(nn.Module):
    """The condition vector of a noise level, and a learned one for the null hint."""

    def __init__(self, condition_width: int) -> None:
        super().__init__()
        self.frequencies = condition_width // 2
        self.hidden = nn.Linear(2 * self.frequencies, condition_width)
        # Random and not zero: at c = 0 the maps of the norms would get no gradient, and only their biases
        # would learn.
        self.null = nn.Parameter(torch.randn(condition_width))

    def forward(self, c_noise_P: Tensor) -> Tensor:
        # c_noise = ln(sigma) / 4 spans 0.6 over [1, 10]: frequencies of 1 to 32 tell its levels apart.
        frequency = torch.exp(torch.linspace(0, math.log(32), self.frequencies, device=c_noise_P.device))
        angle = 2 * math.pi * c_noise_P[:, None] * frequency
        y: Tensor = F.silu(self.hidden(torch.cat([angle.cos(), angle.sin()], dim=-1)))
        return y


class AdaptiveBlock(Block):
    rotary_cos: Tensor
    rotary_sin: Tensor

    def __init__(
        self,
        model: ModelConfig,
        objective: ObjectiveConfig,
        *,
        vocabulary: int,
        num_layers: int | None = None,
        hints: bool = True,
        upstream: bool = False,
    ) -> None:
        super().__init__()
        width = model.width
        self.sigma_data = objective.sigma_data
        self.bayes = objective.hint == "bayes"
        self.context = model.context
        # Not tied to the codebook: that one is fixed, while a block's view of its context is its own to
        # learn.
        self.embedding = TokenEmbedding(vocabulary, width)
        self.hint = nn.Linear(width, width, bias=False) if hints else None
        self.upstream = nn.Linear(width, width, bias=False) if upstream else None
        self.condition = NoiseCondition(model.condition_width)
        self.num_layers = num_layers or model.layers_per_block
        self.layers = nn.ModuleList(Layer(model) for _ in range(self.num_layers))
        self.out_norm = AdaptiveNorm(width, model.condition_width)
        self.out = nn.Linear(width, width, bias=False)
        # Zero: every block starts at the uniform distribution (with a hint: at what the hint says).
        nn.init.zeros_(self.out.weight)
        self.output_VD: nn.Parameter | None = None
        if objective.codebook == "own":
            self.output_VD = nn.Parameter(F.normalize(torch.randn(vocabulary, width), dim=-1))
        # Against unit-norm rows logits without a scale are small, and a block cannot become confident.
        self.logit_scale = nn.Parameter(torch.tensor(objective.logit_scale))
        # Computed, so they are no part of a snapshot: nothing to hash, send or average.
        cos, sin = rotary_table(model.context, width // model.heads)
        self.register_buffer("rotary_cos", cos, persistent=False)
        self.register_buffer("rotary_sin", sin, persistent=False)

    def matrices(self) -> set[str]:
        return {
            name
            for name, parameter in self.named_parameters()
            if parameter.ndim == 2 and (".attention." in name or ".feedforward." in name)
        }

    def forward(
        self,
        tokens_BT: Tensor,
        codebook_VD: Tensor,
        hint: Hint | None = None,
        upstream_BTD: Tensor | None = None,
        cache: AnyCache | None = None,
        both_ways: int = 0,
    ) -> BlockOutput:
        expected = expected_target(hint, codebook_VD) if self.bayes and hint is not None else None
        x_BTD, c_BC = self._inputs(tokens_BT, hint, upstream_BTD, expected)
        length = tokens_BT.shape[1]
        positions = cache.positions(length) if cache is not None else slice(0, length)
        rotary = self.rotary_cos[positions], self.rotary_sin[positions]
        for i, layer in enumerate(self.layers):
            layer_cache = cache.layer(i) if cache is not None else None
            x_BTD = self.run_layer(layer, x_BTD, c_BC, rotary, layer_cache, both_ways)
        if cache is not None:
            cache.advance(length)
        # (4): F, then z_hat; (5): the logits.
        f_BTD = self.out(self.out_norm(x_BTD, c_BC))
        z_hat_BTD = self._denoised(f_BTD, hint)
        map_VD = self.output_map(codebook_VD)
        return BlockOutput(z_hat_BTD, map_VD, self.logit_scale, x_BTD, len(map_VD))

    def output_map(self, codebook_VD: Tensor) -> Tensor:
        """The codebook, which a noised target needs to be the same for all; or the block's own rows."""
        # Of length 1 either way: one scale g in front of the logits then means the same to both.
        return codebook_VD if self.output_VD is None else F.normalize(self.output_VD, dim=-1)

    def _inputs(
        self,
        tokens_BT: Tensor,
        hint: Hint | None,
        upstream_BTD: Tensor | None,
        expected_PTD: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        # Context, upstream and hint enter by sum, at comparable norms: a block ignores an input much smaller
        # than another. c_in z has a norm of about sqrt(d), as the embeddings have.
        x_BTD = self.embedding(tokens_BT)
        if self.upstream is not None and upstream_BTD is not None:
            # Normalised: features grow while their block trains, and this block reads them a round later.
            x_BTD = x_BTD + self.upstream(rms_norm(upstream_BTD))
        # The null hint has a vector of its own: ln(sigma) at infinity is no number to compute with.
        c_BC = self.condition.null.expand(tokens_BT.shape[0], -1)
        if hint is None:
            return x_BTD, c_BC
        assert self.hint is not None, "this block was built without hints"
        hinted = hint.z_PTD.shape[0]
        c = precondition(hint.sigma_P, self.sigma_data)
        injected_PTD = self.hint(c.c_in[:, None, None] * hint.z_PTD if expected_PTD is None else expected_PTD)
        # Hinted sequences come first, so one slice serves in place of a mask, and both kinds share every
        # product.
        x_BTD = torch.cat([x_BTD[:hinted] + injected_PTD, x_BTD[hinted:]])
        return x_BTD, torch.cat([self.condition(c.c_noise).to(c_BC.dtype), c_BC[hinted:]])

    def _denoised(self, f_BTD: Tensor, hint: Hint | None) -> Tensor:
        """z_hat = c_out F + c_skip z; for the null hint its limit, sigma_data * F."""
        if hint is None:
            return self.sigma_data * f_BTD
        hinted = hint.z_PTD.shape[0]
        c = precondition(hint.sigma_P, self.sigma_data)
        # `bayes`: after the scale g the skip adds z E / sigma^2, the hint's own likelihood, to the logits.
        c_skip_P = 1 / (self.logit_scale * hint.sigma_P.square()) if self.bayes else c.c_skip
        skip_PTD = c_skip_P[:, None, None] * hint.z_PTD
        with_hint = c.c_out[:, None, None] * f_BTD[:hinted] + skip_PTD
        return torch.cat([with_hint.to(f_BTD.dtype), self.sigma_data * f_BTD[hinted:]])
