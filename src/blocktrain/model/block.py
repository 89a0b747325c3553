"""A block: layers with their own embedding and output map, trained as one unit.

It knows nothing of the other blocks. It maps tokens, and optionally a noised target (the hint) and another
block's features (upstream), to a vector for each position and to logits over the vocabulary. What its layers
are is its family's (families.py); everything else uses only what stands here. Shapes as in layers.py, plus V
vocabulary and P hinted sequences, the first P of the batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from blocktrain.model.caches import Cache
from blocktrain.model.layers import AnyCache, LayerCache


def make_codebook(vocabulary: int, width: int, seed: int) -> Tensor:
    """Unit-norm target embeddings: orthonormal rows where they fit, random directions otherwise."""
    # On the CPU and in float64: every machine regenerates the table from the seed, and all must agree on it.
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(vocabulary, width, generator=generator, dtype=torch.float64)
    # Orthonormal rows: no pair of tokens is closer than another, so noise hides all of them alike.
    if vocabulary <= width:
        table = torch.linalg.qr(table.T)[0].T
    return F.normalize(table, dim=-1).float()


class Hint(NamedTuple):
    """Noised targets z = e_y + sigma * eps for the first P sequences of a batch, one sigma each.

    A tuple, so that torch.compile sees two tensors and no object of ours.
    """

    z_PTD: Tensor
    sigma_P: Tensor


@dataclass(frozen=True)
class BlockOutput:
    """The logits are `scale` times the products of `z_hat_BTD` with the rows of the output map, made when
    they are asked for: a batch's logits over 32,768 tokens take more memory than all its layers."""

    z_hat_BTD: Tensor
    """What is compared with the rows of the output map; of a denoising block, the denoised target."""
    map_VD: Tensor | None
    """None where a block is an inner part of a serial model: it finds every token alike."""
    scale: Tensor | None
    features_BTD: Tensor
    vocabulary: int

    @property
    def logits_BTV(self) -> Tensor:
        return self.logits_of(self.z_hat_BTD)

    def logits_of(self, z_hat: Tensor) -> Tensor:
        """The logits of some of the positions."""
        if self.map_VD is None:
            return z_hat.new_zeros(1).expand(*z_hat.shape[:-1], self.vocabulary)
        logits = F.linear(z_hat, self.map_VD.to(z_hat.dtype))
        return logits if self.scale is None else self.scale * logits


LayerCall = Callable[..., Tensor]
"""Runs a layer, its first argument, on the others."""


def call_layer(layer: nn.Module, *arguments: object) -> Tensor:
    y: Tensor = layer(*arguments)
    return y


class Block(nn.Module, ABC):
    """What every family's block can do."""

    context: int
    num_layers: int

    def __init__(self) -> None:
        super().__init__()
        self.recompute = False
        """In training, keep each layer's input only, and run the layer again in the backward pass."""
        self.call_layer: LayerCall = call_layer
        """How training runs a layer."""

    def compile_layers(self) -> None:
        """Compile what training runs: the layers have one shape, so one compilation serves them all."""
        self.call_layer = torch.compile(call_layer, dynamic=False)

    @property
    def is_compiled(self) -> bool:
        return self.call_layer is not call_layer

    def new_cache(self) -> Cache:
        return Cache([LayerCache() for _ in range(self.num_layers)])

    @abstractmethod
    def matrices(self) -> set[str]:
        """Names of the layers' matrices, which Muon trains; AdamW trains the rest."""

    @abstractmethod
    def forward(
        self,
        tokens_BT: Tensor,
        codebook_VD: Tensor,
        hint: Hint | None = None,
        upstream_BTD: Tensor | None = None,
        cache: AnyCache | None = None,
        both_ways: int = 0,
    ) -> BlockOutput:
        """`both_ways`: how many of the first sequences attend to later positions too (see sweep.py)."""

    def run_layer(self, layer: nn.Module, *arguments: object) -> Tensor:
        # Never compiled without gradients: a cache is longer with each token, and each new shape would be
        # compiled again.
        if not torch.is_grad_enabled():
            return call_layer(layer, *arguments)
        if self.recompute:
            # The reentrant form loses a layer's gradients where none of its inputs needs one: the first layer
            # behind frozen features.
            y: Tensor = checkpoint(self.call_layer, layer, *arguments, use_reentrant=False)
            return y
        return self.call_layer(layer, *arguments)


def num_parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
