"""How trained blocks run as one model: side by side for `consensus`, which `pooling` weighs, or one after
another as `euler`, the published chain.

Works on log-probabilities over the vocabulary and never sees a target. Numbers in brackets are the equations
of docs/objective.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from blocktrain.model.block import Block, BlockOutput, Hint
from blocktrain.model.caches import Cache
from blocktrain.model.noise import levels, owner
from blocktrain.model.objective import Objective


def run_blocks(
    objective: Objective,
    blocks: Sequence[Block],
    codebook_VD: Tensor,
    tokens_BT: Tensor,
    caches: Sequence[Cache] | None = None,
) -> Iterator[BlockOutput]:
    """Every block's output with the null hint, one after another: the first blocks of a model in order, or
    any that are independent. A block that has others upstream takes the features of the one before it, as it
    did in training."""
    features_BTD: Tensor | None = None
    for index, block in enumerate(blocks):
        upstream_BTD = features_BTD if objective.upstream(index) else None
        cache = caches[index] if caches is not None else None
        output: BlockOutput = block(tokens_BT, codebook_VD, upstream_BTD=upstream_BTD, cache=cache)
        # Yielded, so that the features and z_hat of a block can go as soon as the next block has run.
        features_BTD = output.features_BTD
        yield output


def block_log_probs(
    objective: Objective,
    blocks: Sequence[Block],
    codebook_VD: Tensor,
    tokens_BT: Tensor,
    caches: Sequence[Cache] | None = None,
) -> list[Tensor]:
    """Every block's log-probs with the null hint, for `pool`."""
    outputs = run_blocks(objective, blocks, codebook_VD, tokens_BT, caches)
    # In fp32 from here on: pooling adds B rows, and bf16 would round each to 2 or 3 digits first.
    return [F.log_softmax(output.logits_BTV.float(), dim=-1) for output in outputs]


def euler_log_probs(
    objective: Objective,
    blocks: Sequence[Block],
    codebook_VD: Tensor,
    tokens_BT: Tensor,
    generator: torch.Generator,
    num_steps: int | None = None,
) -> Tensor:
    """Denoise from pure noise through the blocks; the output is the last step's log-probs.

    A sampler and no likelihood: even ideal blocks lose 0.22 nats at noise 1 to 10, so `consensus` is the
    headline (1.00 against 1.42 on WikiText-2 with 15 % hints: docs/decisions/0001).
    """
    assert objective.composes_by_euler, "blocks that need features or know no hints have no Euler chain"
    # One step per block unless asked: the litepaper's chain, so the numbers compare (1.2341 against its
    # 1.359).
    sigmas = levels(objective.config, num_steps or len(blocks))
    # (7): e_y has norm 1 and noise sigma, so z starts with the variance of both.
    shape = (*tokens_BT.shape, codebook_VD.shape[1])
    noise = torch.randn(shape, generator=generator, device=tokens_BT.device)
    z_BTD = noise * (1 + sigmas[0] ** 2) ** 0.5
    # The last step goes no further in z: its log-probs are the answer.
    log_probs_BTV = torch.empty(0)
    for i, sigma in enumerate(sigmas):
        index = owner(objective.config, len(blocks), sigma)
        sigma_B = torch.full((tokens_BT.shape[0],), sigma, device=tokens_BT.device)
        output = blocks[index](tokens_BT, codebook_VD, Hint(z_BTD, sigma_B))
        log_probs_BTV = F.log_softmax(output.logits_BTV.float(), dim=-1)
        if i + 1 < len(sigmas):
            # (8): D = p E and not z_hat: a mean of unit-norm rows cannot run away.
            denoised_BTD = log_probs_BTV.exp() @ codebook_VD
            z_BTD = z_BTD + (sigmas[i + 1] - sigma) * (z_BTD - denoised_BTD) / sigma
    return log_probs_BTV
