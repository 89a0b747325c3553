"""Held-out cross entropy: of each block, of both compositions, of the reference and of a bigram model.

Rules: fixed bytes, every token scored once in non-overlapping windows of the training context, natural
logarithm; where noise is involved the mean and standard error over independent draws. Nothing here
ever feeds a target, noised or not, to a block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from blocktrain.config import EvaluationConfig
from blocktrain.data.dataset import TokenArray
from blocktrain.data.shards import scoring_windows
from blocktrain.data.tokenizer import Tokens
from blocktrain.ids import derive_seed
from blocktrain.model.block import Block
from blocktrain.model.composition import block_log_probs, euler_log_probs
from blocktrain.model.objective import Objective
from blocktrain.model.pooling import DECAYS, Pooling, fit_pooling, past_log_likelihood, pool
from blocktrain.training.device import autocast

BIGRAM_CHUNK = 1 << 20
"""Pairs counted at once: indexing widens every token to 8 bytes."""


@dataclass(frozen=True)
class Score:
    """Cross entropy in nats per token; `se` over noise draws where there are any."""

    ce: float
    se: float | None = None

    def to_dict(self, bytes_per_token: float = 1.0) -> dict[str, float | None]:
        """`ce`, `se` and `ppl` are per token, `bits_per_byte` compares runs of any tokenizers."""
        bits = self.ce / math.log(2) / bytes_per_token
        return {"ce": self.ce, "se": self.se, "ppl": math.exp(min(self.ce, 700)), "bits_per_byte": bits}


class CrossEntropy:
    """Running sum over scored positions."""

    def __init__(self) -> None:
        self.sum, self.count = 0.0, 0

    def add(self, log_probs_BTV: Tensor, targets_BT: Tensor, mask_BT: Tensor) -> None:
        # In float64: sums over a million bytes, compared to the fourth digit.
        picked = log_probs_BTV.gather(-1, targets_BT[..., None])[..., 0]
        self.sum -= float(picked[mask_BT].double().sum())
        self.count += int(mask_BT.sum())

    @property
    def mean(self) -> float:
        return self.sum / self.count


@dataclass(frozen=True)
class Evaluation:
    blocks: list[Score]
    consensus: Score
    euler: Score | None


class Evaluator:
    """Scores blocks on one text, the same windows for everything."""

    def __init__(
        self, objective: Objective, codebook_VD: Tensor, config: EvaluationConfig, *, seed: int
    ) -> None:
        self.objective, self.codebook, self.config, self.seed = objective, codebook_VD, config, seed
        self.device = codebook_VD.device

    def _windows(self, tokens: Tokens) -> list[tuple[Tensor, ...]]:
        context = self.objective.model.context
        return [
            tuple(part.to(self.device) for part in window)
            for window in scoring_windows(tokens, context=context, batch=self.config.batch)
        ]

    @torch.no_grad()
    def fit_pooling(self, blocks: Sequence[Block], tokens: Tokens, *, follow_text: bool = False) -> Pooling:
        """The blocks' weights, fitted on this text; `follow_text` for blocks that learned different texts."""
        if (fixed := self.objective.fixed_pooling()) is not None:
            return Pooling(tuple(fixed))
        rows: list[list[Tensor]] = [[] for _ in blocks]
        targets, past, decays = [], [], DECAYS if follow_text else ()
        for x, y, mask in self._windows(tokens):
            with autocast(self.device):
                log_probs = block_log_probs(self.objective, blocks, self.codebook, x)
            for row, log_prob in zip(rows, log_probs, strict=True):
                row.append(log_prob[mask])
            targets.append(y[mask])
            past += [past_log_likelihood(x, log_probs, decays)[:, :, mask]] if follow_text else []
        # Gradients for a handful of numbers only; the rows were made without.
        with torch.enable_grad():
            whole = torch.cat(past, dim=-1) if follow_text else None
            return fit_pooling([torch.cat(row) for row in rows], torch.cat(targets), whole, decays)

    @torch.no_grad()
    def weights_over(self, blocks: Sequence[Block], pooling: Pooling, tokens: Tokens) -> Tensor:
        """What each block counts for behind each token of a text of at most one context, [B, T]."""
        x_1T = torch.from_numpy(tokens).to(self.device)[None]
        with autocast(self.device):
            log_probs = block_log_probs(self.objective, blocks, self.codebook, x_1T)
        weights = pooling.over(x_1T, log_probs)
        if isinstance(weights, Tensor):
            return weights[:, 0]
        return torch.tensor(weights)[:, None].expand(-1, len(tokens))

    @torch.no_grad()
    def score(
        self, blocks: Sequence[Block], pooling: Pooling, tokens: Tokens, *, euler: bool = True
    ) -> Evaluation:
        per_block, pooled = [CrossEntropy() for _ in blocks], CrossEntropy()
        draws = [CrossEntropy() for _ in range(self.config.noise_draws)]
        for i, (x, y, mask) in enumerate(self._windows(tokens)):
            with autocast(self.device):
                log_probs = block_log_probs(self.objective, blocks, self.codebook, x)
            for sums, log_prob in zip(per_block, log_probs, strict=True):
                sums.add(log_prob, y, mask)
            pooled.add(pool(log_probs, pooling.over(x, log_probs)), y, mask)
            for draw, sums in enumerate(draws if euler else []):
                generator = torch.Generator(self.device)
                # By draw and window: the score does not depend on the size of a batch on another machine.
                generator.manual_seed(derive_seed("euler", self.seed, draw, i))
                with autocast(self.device):
                    log_prob = euler_log_probs(self.objective, blocks, self.codebook, x, generator)
                sums.add(log_prob, y, mask)
        return Evaluation(
            [Score(sums.mean) for sums in per_block],
            Score(pooled.mean),
            mean_score([sums.mean for sums in draws]) if euler else None,
        )

    @torch.no_grad()
    def score_one(self, block: Block, tokens: Tokens) -> Score:
        """A model that is a single block, such as the end-to-end reference."""
        sums = CrossEntropy()
        for x, y, mask in self._windows(tokens):
            with autocast(self.device):
                logits = block(x, self.codebook).logits_BTV
            sums.add(torch.log_softmax(logits.float(), dim=-1), y, mask)
        return Score(sums.mean)


def mean_score(draws: Sequence[float]) -> Score:
    """Mean and standard error of independent draws."""
    mean = sum(draws) / len(draws)
    # One draw says nothing about its own error.
    if len(draws) < 2:
        return Score(mean)
    variance = sum((draw - mean) ** 2 for draw in draws) / (len(draws) - 1)
    return Score(mean, math.sqrt(variance / len(draws)))


def bigram_cross_entropy(train: Tokens | TokenArray, valid: Tokens, vocabulary: int) -> float:
    """Add-one-smoothed bigram counts of the training text, scored on the same targets.

    Counts only pairs that are scored: a table of all pairs of 16,384 tokens would take 2 GB.
    """
    pairs, places = np.unique(valid[:-1] * vocabulary + valid[1:], return_inverse=True)
    # Add one: an unseen pair would otherwise cost infinite nats.
    counts, rows = np.ones(len(pairs)), np.full(vocabulary, float(vocabulary))
    for start in range(0, len(train) - 1, BIGRAM_CHUNK):
        part = train[start : start + BIGRAM_CHUNK + 1].astype(np.int64)
        rows += np.bincount(part[:-1], minlength=vocabulary)
        found = part[:-1] * vocabulary + part[1:]
        nearest = np.searchsorted(pairs, found).clip(max=len(pairs) - 1)
        counts += np.bincount(nearest[pairs[nearest] == found], minlength=len(pairs))
    return float(-np.log(counts / rows[pairs // vocabulary])[places].mean())
