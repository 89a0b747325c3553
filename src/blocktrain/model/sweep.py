"""Writing many tokens at once: all new positions start from noise and every block refines them in turn.

The state between blocks is small: z = a z0 + p_bar E (see `noise_share`), with z0 drawn again from a seed
and p_bar one row over the vocabulary for each position, so blocks may be on different machines. Each block
makes `passes` Euler steps inside its own noise range. Attention goes both ways: seen from the left alone,
neighbours would be decided before they are known to each other. Needs blocks trained with
`objective.sweep_probability`; knows nothing of where they are.

Shapes as in block.py; L known tokens, N new ones, T = L + N - 1 positions, of which the last N predict the
new tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from blocktrain.model.block import Block, BlockOutput, Hint
from blocktrain.model.noise import levels, noise_share, owner
from blocktrain.model.objective import Objective


def sweep_noise(seed: int, position: int, length: int, width: int) -> Tensor:
    """z0 of `length` positions, the same on every machine; `position` is that of the first new token."""
    # Philox keyed by a hash and not the generator of torch, whose stream is another on CUDA: every stage
    # draws the same z0 from the seed, and d numbers per position need not travel.
    digest = hashlib.sha256(f"blocktrain-sweep/{seed}/{position}".encode()).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))
    return torch.from_numpy(generator.standard_normal((length, width), dtype=np.float32))


@dataclass(frozen=True)
class Sweep:
    """New positions on their way from noise to text."""

    tokens_BT: Tensor
    """Known tokens, then unknown ones."""
    z0_BTD: Tensor
    p_bar_BTV: Tensor
    """What the Euler steps have mixed so far; a known next token is certain."""
    num_new: int

    @property
    def new_rows(self) -> Tensor:
        """p_bar of the positions that predict new tokens: what travels between blocks."""
        return self.p_bar_BTV[:, -self.num_new :]

    def with_new_rows(self, rows_BNV: Tensor) -> Sweep:
        return replace(self, p_bar_BTV=torch.cat([self.p_bar_BTV[:, : -self.num_new], rows_BNV], dim=1))


def begin_sweep(objective: Objective, known_BL: Tensor, num_new: int, z0_BTD: Tensor) -> Sweep:
    """Nothing known of the new tokens: z is pure noise there."""
    batch, length = known_BL.shape
    unknown = known_BL.new_full((batch, num_new - 1), objective.unknown_token)
    # A known next token enters as e_y plus the noise of the chain: what a hint is in training, at every
    # position.
    certain = F.one_hot(known_BL[:, 1:], objective.vocabulary).float()
    nothing = torch.zeros(batch, num_new, objective.vocabulary, device=known_BL.device)
    p_bar = torch.cat([certain, nothing], dim=1)
    assert z0_BTD.shape[1] == length + num_new - 1 == p_bar.shape[1]
    return Sweep(torch.cat([known_BL, unknown], dim=1), z0_BTD, p_bar, num_new)


def refine(
    objective: Objective,
    blocks: Mapping[int, Block],
    codebook_VD: Tensor,
    sweep: Sweep,
    passes: int,
    sharpness: float = 1.0,
) -> tuple[Sweep, Tensor]:
    """The Euler steps that these blocks own, in order; also their last log-probs of the new tokens, [B, N,
    V].

    Steps move towards softmax(sharpness * log p): above 1, what is likely is preferred early.
    """
    num_blocks = objective.model.blocks
    # All levels, not those of these blocks only: the step after a block's last one leads into the next
    # block's range.
    sigmas = levels(objective.config, num_blocks * passes)
    log_probs_BNV = torch.empty(0)
    for i, sigma in enumerate(sigmas):
        # Noise falls from step to step, and block 0 owns the highest: the steps of one block are neighbours.
        block = blocks.get(owner(objective.config, num_blocks, sigma))
        if block is None:
            continue
        # z = a z0 + p_bar E stands for the whole history of steps: only p_bar, one row per token, is carried.
        z_BTD = noise_share(sigmas[0], sigma) * sweep.z0_BTD + sweep.p_bar_BTV @ codebook_VD
        sigma_B = torch.full((len(z_BTD),), sigma, device=z_BTD.device)
        output: BlockOutput = block(sweep.tokens_BT, codebook_VD, Hint(z_BTD, sigma_B), both_ways=len(z_BTD))
        log_probs_BNV = F.log_softmax(output.logits_BTV[:, -sweep.num_new :].float(), dim=-1)
        if i + 1 < len(sigmas):
            # Euler's step z += (s' - s) (z - D) / s keeps s' / s of z and takes the rest from the
            # prediction D.
            kept = sigmas[i + 1] / sigma
            towards = (sharpness * log_probs_BNV).softmax(dim=-1)
            sweep = sweep.with_new_rows(kept * sweep.new_rows + (1 - kept) * towards)
    return sweep, log_probs_BNV
