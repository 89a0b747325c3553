"""Some of a checkpoint's blocks on one device, run for several sessions in one forward pass.

What comes out for a position is one row: the sum over the asked blocks of pooling weight times log-probs.
Rows of different holders add up to the consensus, which the engine normalises. Knows nothing of sockets,
sessions' names or time; not safe to call from two threads at once.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from blocktrain.model.block import Block, Cache, PackedCache
from blocktrain.model.composition import run_blocks
from blocktrain.model.packed import is_packable, packed
from blocktrain.model.quick import PlainBlocks, QuickBlocks, is_quickenable
from blocktrain.model.sweep import begin_sweep, refine, sweep_noise
from blocktrain.training.checkpoint import Checkpoint


class RoughBlocks(Protocol):
    """Rough rows for drafts: `model.quick`. A cache belongs to the steps that made it."""

    def new_cache(self) -> Any: ...

    def step(self, token: int, cache: Any) -> Tensor: ...

    def extend(self, tokens: Sequence[int], cache: Any) -> None: ...


@dataclass
class RowWork:
    """New tokens of one text, behind what its caches already hold, and the rows they ask for."""

    ids: Sequence[int]
    num_rows: int
    """Rows asked for: those of the last `num_rows` ids."""
    blocks: tuple[int, ...]
    caches: dict[int, Cache]
    """One per block that must run; see `HeldBlocks.new_caches`."""
    base: int = 0
    """Positions to keep in the caches; what they hold beyond is forgotten first."""
    exact: bool = False
    """One row in float64, from the ids alone."""

    @property
    def runnable(self) -> bool:
        """Whether the caches hold what the ids continue."""
        return all(cache.length >= self.base for cache in self.caches.values())


@dataclass(frozen=True, kw_only=True)
class Refinement:
    """New tokens to be written at once behind known ones."""

    known: Sequence[int]
    num_new: int
    seed: int
    position: int
    """Where in the whole text the first new token stands."""
    passes: int


class HeldBlocks:
    def __init__(self, checkpoint: Checkpoint, held: Sequence[int]) -> None:
        """`held` names the checkpoint's loaded blocks, in the same order."""
        self.blocks: dict[int, Block] = dict(zip(held, checkpoint.blocks, strict=True))
        self.objective = checkpoint.objective
        self.codebook = checkpoint.codebook_VD
        self.weights = checkpoint.pooling
        self.vocabulary = checkpoint.tokenizer.vocabulary
        self.context = checkpoint.recipe.model.context
        # Laid out for few rows: a pass of 17 tokens takes 12.6 instead of 15.2 ms (docs/experiments.md).
        self._running = {
            index: packed(block) if is_packable(block) else block for index, block in self.blocks.items()
        }
        self._exact_blocks: dict[int, Block] = {}
        self._steps: dict[tuple[int, ...], RoughBlocks] = {}

    def needed(self, blocks: Sequence[int]) -> list[int]:
        """The blocks that must run for these: themselves, and those whose features they take."""
        return sorted({*blocks, *(other for block in blocks for other in self.objective.upstream(block))})

    def new_caches(self, blocks: Sequence[int]) -> dict[int, Cache]:
        return {block: self.blocks[block].new_cache() for block in self.needed(blocks)}

    def steps(self, blocks: tuple[int, ...]) -> RoughBlocks:
        """These blocks' rough next rows, for drafts."""
        # Kept: all requests draft with the same rounded matrices.
        if blocks not in self._steps:
            chosen = [self._running[block] for block in blocks]
            quick = [block for block in chosen if is_quickenable(block)]
            all_quick = len(quick) == len(chosen)
            self._steps[blocks] = (
                QuickBlocks(quick, self.codebook) if all_quick else PlainBlocks(chosen, self.codebook)
            )
        return self._steps[blocks]

    @torch.inference_mode()
    def rows(self, works: Sequence[RowWork]) -> list[NDArray[Any]]:
        """Weighted log-probs [num_rows, V] of each work; its caches then hold its ids too."""
        if works[0].exact:
            return [self.exact_row(work.ids, work.blocks)[np.newaxis] for work in works]
        for work in works:
            assert work.runnable, "the caches lack positions before the new ids"
            for cache in work.caches.values():
                cache.truncate(work.base)
        device = self.codebook.device
        sums = [torch.zeros(work.num_rows, self.vocabulary, device=device) for work in works]
        features: list[Tensor | None] = [None] * len(works)
        # In order of blocks, because a block may take the features of the one before it.
        for index in sorted(self.blocks):
            chosen = [i for i, work in enumerate(works) if index in work.caches]
            if not chosen:
                continue
            # The new tokens of all chosen works in one row; attention keeps them apart by their caches.
            lengths = [len(works[i].ids) for i in chosen]
            caches = [works[i].caches[index] for i in chosen]
            # One work alone needs no packing, which would cost it a third more.
            packed_cache = PackedCache(caches, lengths) if len(caches) > 1 else caches[0]
            ids = torch.tensor([[token for i in chosen for token in works[i].ids]], device=device)
            parts = [part for i in chosen if (part := features[i]) is not None]
            upstream = torch.cat(parts, dim=1) if parts and self.objective.upstream(index) else None
            output = self._running[index](ids, self.codebook, upstream_BTD=upstream, cache=packed_cache)
            feature_parts = torch.split(output.features_BTD, lengths, dim=1)
            logit_parts = torch.split(output.logits_BTV[0], lengths)
            for i, part, logits in zip(chosen, feature_parts, logit_parts, strict=True):
                features[i] = part
                # A block may run only because another takes its output; then it is not in the sum.
                if index in works[i].blocks:
                    log_probs = F.log_softmax(logits[-works[i].num_rows :].float(), dim=-1)
                    sums[i] += self.weights[index] * log_probs
        return [total.cpu().numpy() for total in sums]

    @torch.inference_mode()
    def refine(
        self, task: Refinement, blocks: Sequence[int], rows: NDArray[np.float64] | None
    ) -> NDArray[np.float32]:
        """The rows [N, V] that these neighbouring blocks make of `rows`: log-probs behind the last block."""
        device = self.codebook.device
        length = len(task.known) + task.num_new - 1
        z0_TD = sweep_noise(task.seed, task.position, length, self.codebook.shape[1])
        known = torch.tensor([list(task.known)], device=device)
        sweep = begin_sweep(self.objective, known, task.num_new, z0_TD[None].to(device))
        if rows is not None:
            sweep = sweep.with_new_rows(torch.from_numpy(rows).to(device, torch.float32)[None])
        held = {index: self.blocks[index] for index in blocks}
        sweep, log_probs = refine(self.objective, held, self.codebook, sweep, task.passes)
        last = blocks[-1] == self.objective.model.blocks - 1
        refined: NDArray[np.float32] = (log_probs if last else sweep.new_rows)[0].cpu().numpy()
        return refined

    @torch.inference_mode()
    def exact_row(self, ids: Sequence[int], blocks: Sequence[int]) -> NDArray[np.float64]:
        """The row after `ids` in float64, from ids alone: what near ties are settled with."""
        tokens = torch.tensor([list(ids)], device=self.codebook.device)
        codebook = self.codebook.double()
        total = torch.zeros(self.vocabulary, dtype=torch.float64, device=codebook.device)
        needed = self.needed(blocks)
        # Kept: a near tie comes about once in 2,000 tokens, and its block is small beside its caches.
        for index in needed:
            if index not in self._exact_blocks:
                self._exact_blocks[index] = copy.deepcopy(self.blocks[index]).double()
        chosen = [self._exact_blocks[index] for index in needed]
        outputs = run_blocks(self.objective, chosen, codebook, tokens)
        for index, output in zip(needed, outputs, strict=True):
            if index in blocks:
                total += self.weights[index] * F.log_softmax(output.logits_BTV[0, -1], dim=-1)
        return total.cpu().numpy()
