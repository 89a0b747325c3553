"""The family `llama`: a plain causal model with the arithmetic and the tensor names of LlamaForCausalLM.

RMS norms with a weight, rotary positions, grouped-query attention, SwiGLU, an output map of its own or tied
to the embedding. Logits equal those of transformers (tests/model/test_llama.py). It takes no hints and looks
at no later position. Shapes as in layers.py; H query heads, G heads of keys and values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blocktrain.config import ModelConfig, RopeScaling
from blocktrain.model.block import Block, BlockOutput, Hint
from blocktrain.model.layers import (
    AnyCache,
    AnyLayerCache,
    TokenEmbedding,
    causal_attention,
    has_values,
    rotate,
)

INITIAL_STD = 0.02
"""Of embeddings and matrices, as in transformers."""


def llama_rotary(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """cos and sin of shape [context, head width / 2]."""
    # In fp32, as transformers and vLLM compute them: at position 2,000 an angle in float64 differs by 1e-4,
    # and the models were trained with the rounded ones.
    width = config.channels_per_head
    if not has_values():
        return torch.empty(config.context, width // 2), torch.empty(config.context, width // 2)
    frequency = 1.0 / (config.rope_theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width))
    if config.rope_scaling is not None:
        frequency = stretched(frequency, RopeScaling.parse(config.rope_scaling))
    angle = torch.outer(torch.arange(config.context, dtype=torch.float32), frequency)
    return angle.cos(), angle.sin()


def stretched(frequency: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1's frequencies: a wave longer than the old context is slowed by `factor`, a short one kept."""
    # In Llama 3.1's numbers: a wave that turns less than once in the context of pretraining was never seen
    # whole, so beyond it the model must meet angles that it knows. One that turns four times or more tells
    # neighbours apart, and repeats anyway. A ramp between them: waves almost alike stay almost alike.
    turns = scaling.original_context * frequency / (2 * math.pi)
    kept = (turns - scaling.low_frequency) / (scaling.high_frequency - scaling.low_frequency)
    kept = kept.clamp(0, 1)
    return kept * frequency + (1 - kept) * frequency / scaling.factor


class WeightedNorm(nn.Module):
    """RMS norm with a weight for each channel."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        # Squares in fp32 at least: in bf16 their mean has three digits.
        wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        y: Tensor = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (self.weight * y).to(x.dtype)


class LlamaAttention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_width = config.channels_per_head
        queries = config.heads * self.head_width
        # Fewer heads of keys than of queries: the cache of a served text shrinks by the same factor.
        keys = (config.kv_heads or config.heads) * self.head_width
        self.q_proj = nn.Linear(config.width, queries, bias=False)
        self.k_proj = nn.Linear(config.width, keys, bias=False)
        self.v_proj = nn.Linear(config.width, keys, bias=False)
        self.o_proj = nn.Linear(queries, config.width, bias=False)

    def forward(self, x_BTD: Tensor, rotary: tuple[Tensor, Tensor], cache: AnyLayerCache | None) -> Tensor:
        batch, length, _ = x_BTD.shape
        shape = (batch, length, -1, self.head_width)
        q_BHTK, k_BGTK = self.queries_and_keys(self.q_proj(x_BTD).view(shape), self.k_proj(x_BTD).view(shape))
        v_BGTK = self.v_proj(x_BTD).view(shape).transpose(1, 2)
        # Rotated in fp32, as the tables are, then back: the kernel wants all three in one dtype.
        q_BHTK, k_BGTK = (rotate(part, *rotary).to(v_BGTK.dtype) for part in (q_BHTK, k_BGTK))
        attend = causal_attention if cache is None else cache.attend
        y_BHTK = attend(q_BHTK, k_BGTK, v_BGTK)
        merged: Tensor = self.o_proj(y_BHTK.transpose(1, 2).reshape(batch, length, -1))
        return merged

    def queries_and_keys(self, q_BTHK: Tensor, k_BTGK: Tensor) -> tuple[Tensor, Tensor]:
        """Heads before positions; a family that norms them does it here."""
        return q_BTHK.transpose(1, 2), k_BTGK.transpose(1, 2)


class GatedFeedForward(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        # Published models round this width as their makers liked (Llama 2 7B: 11,008 for a width of 4,096),
        # so a factor alone cannot name it.
        inner = config.feedforward_width or config.feedforward * config.width
        self.gate_proj = nn.Linear(config.width, inner, bias=False)
        self.up_proj = nn.Linear(config.width, inner, bias=False)
        self.down_proj = nn.Linear(inner, config.width, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        y: Tensor = self.down_proj(F.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))
        return y


class LlamaLayer(nn.Module):
    def __init__(self, config: ModelConfig, attention: Callable[[ModelConfig], LlamaAttention]) -> None:
        super().__init__()
        self.input_layernorm = WeightedNorm(config.width, config.norm_eps)
        self.self_attn = attention(config)
        self.post_attention_layernorm = WeightedNorm(config.width, config.norm_eps)
        self.mlp = GatedFeedForward(config)

    def forward(self, x_BTD: Tensor, rotary: tuple[Tensor, Tensor], cache: AnyLayerCache | None) -> Tensor:
        x_BTD = x_BTD + self.self_attn(self.input_layernorm(x_BTD), rotary, cache)
        y_BTD: Tensor = x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))
        return y_BTD


class OutputMap(nn.Module):
    """The rows that the last features are compared with."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        # Rows and no nn.Linear: the product is the caller's, who needs it for some positions only, or chunk
        # by chunk (cross_entropy.py).
        # Zero: a block starts at the uniform distribution.
        self.weight = nn.Parameter(torch.zeros(rows, width))


class Trunk(nn.Module):
    """All of the block but the output map. The parts of a serial model have the embedding in the first and
    the last norm in the last."""

    def __init__(
        self, config: ModelConfig, rows: int, layers: Sequence[LlamaLayer], first: bool, last: bool
    ) -> None:
        super().__init__()
        self.embed_tokens = TokenEmbedding(rows, config.width) if first else None
        self.layers = nn.ModuleList(layers)
        self.norm = WeightedNorm(config.width, config.norm_eps) if last else None


class LlamaBlock(Block):
    rotary_cos: Tensor
    rotary_sin: Tensor

    def __init__(
        self,
        config: ModelConfig,
        *,
        vocabulary: int,
        num_layers: int | None = None,
        attention: Callable[[ModelConfig], LlamaAttention] = LlamaAttention,
        first: bool = True,
        last: bool = True,
    ) -> None:
        """`first` and `last`: which end of a serial model the block is; a whole model is both."""
        super().__init__()
        self.context, self.vocabulary = config.context, vocabulary
        self.num_layers = num_layers or config.layers_per_block
        # Published tables are padded (Qwen3's to 151,936 rows). Kept, so that an exported folder has the
        # shapes of the imported one.
        rows = config.padded_vocabulary or vocabulary
        assert rows >= vocabulary, "the rows beyond the tokens are padding"
        # `model` and `lm_head` are the names in the files that others load.
        layers = [LlamaLayer(config, attention) for _ in range(self.num_layers)]
        self.model = Trunk(config, rows, layers, first, last)
        self.lm_head = OutputMap(rows, config.width) if last and not config.tied else None
        for name, parameter in self.model.named_parameters():
            if parameter.ndim == 2 and has_values():
                # Each sub-layer starts by adding nothing, so depth does not change the scale of the first
                # steps.
                adds = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.zeros_(parameter) if adds else nn.init.normal_(parameter, std=INITIAL_STD)
        cos, sin = llama_rotary(config)
        self.register_buffer("rotary_cos", cos, persistent=False)
        self.register_buffer("rotary_sin", sin, persistent=False)

    def matrices(self) -> set[str]:
        return {
            name
            for name, parameter in self.named_parameters()
            # Not the embedding or the output map: a step sees few of their rows, and Muon would move all of
            # them.
            if name.startswith("model.layers.") and parameter.ndim == 2
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
        assert hint is None, "a plain causal model knows no hints"
        assert not both_ways, "it looks at no later position"
        embedding = self.model.embed_tokens
        assert (embedding is None) == (upstream_BTD is not None), "tokens or the features of the part before"
        x_BTD = upstream_BTD if embedding is None else embedding(tokens_BT)
        assert x_BTD is not None
        if torch.is_autocast_enabled(x_BTD.device.type):
            # The products are bf16 anyway; a residual stream in fp32 would double the bytes between them.
            x_BTD = x_BTD.to(torch.get_autocast_dtype(x_BTD.device.type))
        length = tokens_BT.shape[1]
        positions = cache.positions(length) if cache is not None else slice(0, length)
        rotary = self.rotary_cos[positions], self.rotary_sin[positions]
        for i, layer in enumerate(self.model.layers):
            x_BTD = self.run_layer(layer, x_BTD, rotary, cache.layer(i) if cache is not None else None)
        if cache is not None:
            cache.advance(length)
        # An inner part hands on the residual stream as it is, so that the parts in a row are the whole model,
        # bit by bit.
        if self.model.norm is None:
            return BlockOutput(x_BTD, None, None, x_BTD, self.vocabulary)
        output_map = self.lm_head if self.lm_head is not None else embedding
        assert output_map is not None
        # Padding was never trained to be unlikely: it would take probability from tokens that exist.
        rows_VD = output_map.weight[: self.vocabulary]
        return BlockOutput(self.model.norm(x_BTD), rows_VD, None, x_BTD, self.vocabulary)
