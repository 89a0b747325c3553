"""How trained blocks become one model: `euler`, the published chain, and `consensus`, parallel pooling.

Works on log-probabilities over the vocabulary and never sees a target.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from blocktrain.model.block import Block, Cache, Hint
from blocktrain.model.noise import levels, owner
from blocktrain.model.objective import Objective


def euler_log_probs(
    objective: Objective,
    blocks: Sequence[Block],
    codebook_VD: Tensor,
    tokens_BT: Tensor,
    generator: torch.Generator,
    num_steps: int | None = None,
) -> Tensor:
    """Denoise from pure noise through the blocks; the output is the last step's log-probs."""
    sigmas = levels(objective.config, num_steps or len(blocks))
    shape = (*tokens_BT.shape, codebook_VD.shape[1])
    noise = torch.randn(shape, generator=generator, device=tokens_BT.device)
    z_BTD = noise * (1 + sigmas[0] ** 2) ** 0.5
    upstream = _upstream_features(objective, blocks, codebook_VD, tokens_BT)
    log_probs_BTV = torch.empty(0)
    for i, sigma in enumerate(sigmas):
        index = owner(objective.config, len(blocks), sigma)
        sigma_B = torch.full((tokens_BT.shape[0],), sigma, device=tokens_BT.device)
        output = blocks[index](tokens_BT, codebook_VD, Hint(z_BTD, sigma_B), upstream[index])
        log_probs_BTV = F.log_softmax(output.logits_BTV.float(), dim=-1)
        if i + 1 < len(sigmas):
            denoised_BTD = log_probs_BTV.exp() @ codebook_VD
            z_BTD = z_BTD + (sigmas[i + 1] - sigma) * (z_BTD - denoised_BTD) / sigma
    return log_probs_BTV


def hand_on(
    objective: Objective,
    index: int,
    block: Block,
    tokens_BT: Tensor,
    codebook_VD: Tensor,
    heard: Tensor | None,
) -> Tensor:
    """What block `index` hands on, given what was handed to it. It sees no hint."""
    upstream = heard if objective.heard(index) else None
    return objective.relay(block(tokens_BT, codebook_VD, upstream_BTD=upstream), heard)


def _upstream_features(
    objective: Objective, blocks: Sequence[Block], codebook_VD: Tensor, tokens_BT: Tensor
) -> list[Tensor | None]:
    """What each block hears from the ones before it, which in training see no hint either."""
    upstream: list[Tensor | None] = [None]
    for i in range(1, len(blocks)):
        if not objective.heard(i):
            upstream.append(None)
            continue
        upstream.append(hand_on(objective, i - 1, blocks[i - 1], tokens_BT, codebook_VD, upstream[-1]))
    return upstream


def block_log_probs(
    objective: Objective,
    blocks: Sequence[Block],
    codebook_VD: Tensor,
    tokens_BT: Tensor,
    caches: Sequence[Cache] | None = None,
) -> list[Tensor]:
    """Every block's log-probs with the null hint; what it hears is handed on where the objective asks."""
    log_probs: list[Tensor] = []
    heard: Tensor | None = None
    for i, block in enumerate(blocks):
        upstream = heard if objective.heard(i) else None
        cache = caches[i] if caches is not None else None
        output = block(tokens_BT, codebook_VD, upstream_BTD=upstream, cache=cache)
        heard = objective.relay(output, upstream) if objective.heard(i + 1) else None
        log_probs.append(F.log_softmax(output.logits_BTV.float(), dim=-1))
    return log_probs


def pool(log_probs: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Normalised weighted product of the blocks' distributions. One block at weight 1 is that block."""
    mixed = torch.zeros_like(log_probs[0])
    for weight, log_prob in zip(weights, log_probs, strict=True):
        mixed = mixed + weight * log_prob
    return F.log_softmax(mixed, dim=-1)


def fit_pooling(log_probs: Sequence[Tensor], targets: Tensor, iterations: int = 40) -> list[float]:
    """Weights, positive and of sum one, that minimise the pooled cross entropy on text kept for that.

    `log_probs` are [N, V] per block, `targets` [N]. The sum is fixed because a free one fits the pooling
    text's difficulty and carries over badly: docs/decisions/0003-pooling-weights.md.
    """
    logits = torch.zeros(len(log_probs), dtype=torch.float64, requires_grad=True)
    stacked = torch.stack([part.float() for part in log_probs])
    search = torch.optim.LBFGS([logits], max_iter=iterations, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        search.zero_grad()
        mixed = torch.einsum("b,bnv->nv", logits.softmax(0).to(stacked), stacked)
        loss = F.cross_entropy(mixed, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    search.step(closure)  # type: ignore[no-untyped-call]
    return [float(weight) for weight in logits.detach().softmax(0)]
