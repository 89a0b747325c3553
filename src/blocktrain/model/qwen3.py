"""The family `qwen3`: as `llama`, with norms on queries and keys before they are rotated."""

from __future__ import annotations

from torch import Tensor

from blocktrain.config import ModelConfig
from blocktrain.model.llama import LlamaAttention, WeightedNorm


class Qwen3Attention(LlamaAttention):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.q_norm = WeightedNorm(self.head_width, config.norm_eps)
        self.k_norm = WeightedNorm(self.head_width, config.norm_eps)

    def queries_and_keys(self, q_BTHK: Tensor, k_BTGK: Tensor) -> tuple[Tensor, Tensor]:
        return super().queries_and_keys(self.q_norm(q_BTHK), self.k_norm(k_BTGK))
