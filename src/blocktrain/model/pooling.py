"""How the blocks' distributions become one: a weighted product, whose weights may follow the text so far.

Independent blocks that learned different texts should not have the same say everywhere. The weight of a block
at a position follows how well it predicted the tokens before, older ones fading:

    w_b(t)  ~  prior_b * exp(sum over decays d of tau_d * sum over s < t of d^(t-s-1) * log p_b(y_s))     (10)

A block's part of that depends on the visible text and on the block alone, so any subset of blocks has weights
(those of the others are left out of the sum), and any machine can work them out again from the text. Numbers
in brackets are the equations of docs/objective.md.

Shapes as in block.py, plus D decays and N positions of any texts in a row; B counts blocks here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

DECAYS = (0.9, 0.98, 0.998)
"""One decay of 0.98 gave 0.5633 nats per byte where all three gave 0.5619, and none 0.5656: decision 0014."""
FIRST_TAU = 0.02
# A fitted weight may round to 0, and with a logarithm of minus infinity a subset of blocks has no weights.
LEAST_WEIGHT = 1e-30
# They are read from checkpoints, which strangers write, and each costs a sum for every position.
MAX_DECAYS = 16


@dataclass(frozen=True)
class Pooling:
    """The blocks' weights; the same everywhere where there are no decays."""

    weights: tuple[float, ...]
    """Positive, of sum one: the prior."""
    decays: tuple[float, ...] = ()
    taus: tuple[float, ...] = ()

    @classmethod
    def read(cls, weights: Iterable[Any], how_it_follows: Mapping[str, Any] | None = None) -> Pooling:
        """Weights as they were written down; ValueError where they are none."""
        follow = how_it_follows or {"decays": (), "taus": ()}
        prior, decays, taus = (tuple(map(float, one)) for one in (weights, follow["decays"], follow["taus"]))
        # NaN weights would pool to NaN text without an error anywhere.
        if not all(map(math.isfinite, (*prior, *taus))):
            raise ValueError(f"expected finite pooling weights, found {[*prior, *taus]}")
        if len(decays) != len(taus) or len(decays) > MAX_DECAYS or not all(0 < one < 1 for one in decays):
            raise ValueError(f"expected a tau for each decay between 0 and 1, found {taus} and {decays}")
        return cls(prior, decays, taus)

    @property
    def how_it_follows(self) -> dict[str, list[float]]:
        """What is written down beside the weights where `follows_text`."""
        return {"decays": list(self.decays), "taus": list(self.taus)}

    @property
    def follows_text(self) -> bool:
        return bool(self.decays)

    def log_weights(self, block: int, past_ND: NDArray[np.float64]) -> NDArray[np.float64]:
        """(10) before it is normalised, of one block at some positions."""
        logs: NDArray[np.float64] = past_ND @ np.array(self.taus)
        return logs + math.log(max(self.weights[block], LEAST_WEIGHT))

    def over(self, tokens_NT: Tensor, log_probs: Sequence[Tensor]) -> Sequence[float] | Tensor:
        """What `pool` takes for these texts: the fixed weights, or weights [B, N, T] from all that each
        position sees. `log_probs` are [N, T, V] per block."""
        if not self.follows_text:
            return self.weights
        past_DBNT = past_log_likelihood(tokens_NT, log_probs, self.decays)
        logs = torch.einsum("d,dbnt->bnt", torch.tensor(self.taus).to(past_DBNT), past_DBNT)
        prior = torch.tensor([max(weight, LEAST_WEIGHT) for weight in self.weights]).to(logs).log()
        return (logs + prior[:, None, None]).softmax(dim=0)


def past_log_likelihood(tokens_NT: Tensor, log_probs: Sequence[Tensor], decays: Sequence[float]) -> Tensor:
    """Decayed sums [D, B, N, T] of what each block gave the tokens that a position sees, but for the first,
    which nothing predicts."""
    rates_D11 = torch.tensor(decays, device=tokens_NT.device)[:, None, None]
    # What position s gave to token s + 1 counts from s + 1 on, where that token is visible: no weight sees
    # its own target.
    next_N1 = tokens_NT[:, 1:, None]
    seen_BNT = torch.stack([part[:, :-1].gather(-1, next_N1)[..., 0].float() for part in log_probs])
    sums = [torch.zeros(len(decays), *seen_BNT.shape[:2], device=tokens_NT.device)]
    # Step by step: as a cumulative sum scaled by d^-t, a decay of 0.9 leaves fp32 after 842 positions.
    for t in range(seen_BNT.shape[-1]):
        sums.append(rates_D11 * sums[-1] + seen_BNT[..., t])
    return torch.stack(sums, dim=-1)


class TrackRecord:
    """How well one block predicted one text so far, position by position; it goes with a cache."""

    def __init__(self, decays: Sequence[float]) -> None:
        self._decays = np.array(decays)
        self._past_TD: list[NDArray[np.float64]] = []
        self._rows_TV = torch.empty(0)
        """Log-probs of the last positions: what they gave the next token is known when it comes."""
        self._first_row = 0

    def continues(self, base: int) -> bool:
        """True if it can go on behind the first `base` positions."""
        return base == 0 or self._first_row < base <= self._first_row + len(self._rows_TV)

    def extend(self, base: int, ids: Sequence[int], log_probs_TV: Tensor, keep: int) -> NDArray[np.float64]:
        """The decayed sums [T, D] at the positions of `ids`, which stand behind the first `base`; another
        `extend` may go on behind any of the last `keep` positions."""
        assert self.continues(base), "the log-probs before the new tokens are gone"
        at = base - self._first_row
        before_TV = self._rows_TV[at - 1 : at] if base else log_probs_TV[:0]
        # The first token of a text has nothing before it that could predict it.
        told = torch.tensor(ids if base else ids[1:], dtype=torch.int64, device=log_probs_TV.device)
        rows_TV = torch.cat([before_TV, log_probs_TV[:-1]])
        # What stands beyond `base` belongs to a draft that was rejected.
        past = self._past_TD[:base] or [np.zeros(len(self._decays))]
        for one in rows_TV.gather(-1, told[:, None])[:, 0].double().cpu().numpy():
            past.append(self._decays * past[-1] + one)
        self._past_TD = past
        # Copies: a view would hold the log-probs of the whole pass, 262 MB for 2,000 tokens over 32,768.
        earlier = max(0, keep - len(ids))
        kept = [self._rows_TV[max(0, at - earlier) : at]] if base and earlier else []
        self._rows_TV = torch.cat([*kept, log_probs_TV[-keep:]]) if kept else log_probs_TV[-keep:].clone()
        self._first_row = base + len(ids) - len(self._rows_TV)
        return np.array(past[base:])


def pool(log_probs: Sequence[Tensor], weights: Sequence[float] | Tensor) -> Tensor:
    """Normalised weighted product of the blocks' distributions. One block at weight 1 is that block.

    A weight is one number, or one for each of a block's rows (`Pooling.over`).
    """
    # (9). A product and not a mean of distributions: what one block excludes is excluded. In the order of the
    # blocks, so that the sum has the same last bits wherever it is made.
    mixed = torch.zeros_like(log_probs[0])
    for weight, log_prob in zip(weights, log_probs, strict=True):
        mixed = mixed + (weight[..., None] if isinstance(weight, Tensor) else weight) * log_prob
    return F.log_softmax(mixed, dim=-1)


def fit_pooling(
    log_probs: Sequence[Tensor],
    targets: Tensor,
    past_DBN: Tensor | None = None,
    decays: Sequence[float] = (),
    iterations: int = 40,
) -> Pooling:
    """Weights, positive and of sum one, that minimise the pooled cross entropy on text kept for that; with
    the `past_log_likelihood` of each position, also how much they follow it.

    `log_probs` are [N, V] per block, `targets` [N]. The sum is fixed because a free one fits the pooling
    text's difficulty and carries over badly: docs/decisions/0003-pooling-weights.md.
    """
    # Softmax weights. On the demo model: free 1.9135, equal 1.9111, of sum one 1.9106 nats per byte.
    logits = torch.zeros(len(log_probs), dtype=torch.float64, requires_grad=True)
    # As logarithms: a negative tau would trust the block that predicted worst.
    log_taus = torch.full((len(decays),), math.log(FIRST_TAU), dtype=torch.float64, requires_grad=True)
    stacked = torch.stack([part.float() for part in log_probs])
    # A handful of numbers and a smooth loss: L-BFGS needs no learning rate.
    fitted = [logits, log_taus] if len(decays) else [logits]
    search = torch.optim.LBFGS(fitted, max_iter=iterations, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        search.zero_grad()
        if past_DBN is None:
            mixed = torch.einsum("b,bnv->nv", logits.softmax(0).to(stacked), stacked)
        else:
            follow = torch.einsum("d,dbn->bn", log_taus.exp().to(stacked), past_DBN)
            weights_BN = (logits.to(stacked)[:, None] + follow).softmax(0)
            mixed = torch.einsum("bn,bnv->nv", weights_BN, stacked)
        loss = F.cross_entropy(mixed, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    search.step(closure)  # type: ignore[no-untyped-call]
    prior = tuple(float(weight) for weight in logits.detach().softmax(0))
    return Pooling(prior, tuple(decays), tuple(float(tau) for tau in log_taus.detach().exp()))
