"""The scorer: a judge's text, block and codebook in memory, and evidence on demand.

Built from a recipe and its corpus, on a coordinator or on another machine alike; the same task gives the same
evidence up to the arithmetic of the device. Knows no queue and no network.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blocktrain.config import Recipe
from blocktrain.data.corpora import Corpus, read_text
from blocktrain.data.shards import window_offsets
from blocktrain.data.tokenizer import Tokens
from blocktrain.errors import DataError
from blocktrain.ids import derive_seed
from blocktrain.model.block import Block
from blocktrain.training.frozen import upstream_features
from blocktrain.training.setup import Setup
from blocktrain.training.snapshot import Tensors, load_into
from blocktrain.validation.evidence import (
    Budget,
    Evidence,
    Gain,
    Windows,
    evidence_budget,
    paired_differences,
    sequential_gain,
    window_losses,
    with_hints,
)
from blocktrain.wire.codec import Schema


@dataclass(frozen=True)
class Work:
    """The batches an update was trained on."""

    shard: int
    first_step: int
    steps: int


CompactTokens = NDArray[np.uint16]
Others = Mapping[int, Tensors]
"""Frozen blocks by index, in the order they run."""
NO_OTHERS: Others = {}


def _compact(tokens: Tokens) -> CompactTokens:
    """A quarter of the memory; vocabularies have fewer than 65,536 tokens here."""
    assert tokens.max(initial=0) < 1 << 16
    return tokens.astype(np.uint16)


class Scorer:
    """Not for two threads at once."""

    def __init__(self, recipe: Recipe, corpus: Corpus, device: torch.device | None = None) -> None:
        self.recipe, self.device = recipe, device or torch.device("cpu")
        setup = Setup.of(recipe)
        tokenizer, self._objective = setup.tokenizer, setup.objective
        self._codebook: Tensor = setup.codebook().to(self.device)()
        self._corpus_hash = corpus.sha256
        self._train = _compact(tokenizer.encode(corpus.train))
        private = recipe.trust.private_text
        held_out = read_text(Path(private).expanduser()) if private else corpus.valid
        self._held_out = _compact(tokenizer.encode(held_out))
        if len(self._held_out) <= recipe.model.context:
            raise DataError(
                f"judging needs more held-out text than one window of {recipe.model.context} tokens, found "
                f"{len(self._held_out)}; use more text, a larger data.valid_fraction or trust.private_text"
            )
        self._pairs: dict[Schema, tuple[Block, Block]] = {}
        self._others: dict[int, Block] = {}
        self._frozen: Sequence[Block] = ()

    def budget(self, frozen: int = 0) -> Budget:
        """Of a block beside which so many run frozen."""
        return evidence_budget(self.recipe, frozen)

    def evidence(
        self,
        block: int,
        base: Tensors,
        after: Tensors,
        work: Work,
        seed: int,
        frozen: Others = NO_OTHERS,
    ) -> Evidence:
        """The gains of moving `block` from `base` to `after` beside these frozen blocks."""
        budget = self._load(block, base, frozen)
        load_into(self._after, after)
        held_out = self._gain(block, self._held_out_starts(seed, budget.held_out), self._held_out, seed)
        assigned = self._fixed(block, self._assigned_starts(work, seed, budget.assigned), seed + 1)
        other = self._fixed(block, self._other_starts(seed, budget.other), seed + 2)
        windows = held_out.windows + assigned.windows + other.windows
        return Evidence(held_out, assigned, other, budget.forwards * budget.length * windows)

    def guard(
        self,
        block: int,
        base: Tensors,
        candidates: Iterable[Tensors],
        windows: int,
        seed: int,
        frozen: Others = NO_OTHERS,
    ) -> list[list[float]]:
        """What each candidate gains over `base`, window by window of the same held-out text."""
        starts = self._held_out_starts(seed, windows)
        self._load(block, base, frozen)
        before = self._losses(self._before, block, starts, seed)
        found = []
        for candidate in candidates:
            load_into(self._after, candidate)
            after = self._losses(self._after, block, starts, seed)
            found.append([old - new for old, new in zip(before, after, strict=True)])
        return found

    def _load(self, block: int, base: Tensors, frozen: Others) -> Budget:
        """The block before an update, and the blocks it is judged beside; blocks may differ in shape."""
        schema = Schema.of(base)
        if schema not in self._pairs:
            first, second = (self._objective.build(block, 0).to(self.device).eval() for _ in range(2))
            self._pairs[schema] = first, second
        self._before, self._after = self._pairs[schema]
        load_into(self._before, base)
        self._frozen = [self._other(index, weights) for index, weights in frozen.items()]
        return self.budget(len(frozen))

    def _other(self, index: int, weights: Tensors) -> Block:
        """In host memory: it visits the device for its features."""
        if index not in self._others:
            self._others[index] = self._objective.build(index, 0).eval()
        load_into(self._others[index], weights)
        return self._others[index]

    # --- windows ---

    def _held_out_starts(self, seed: int, count: int) -> Tokens:
        choices = len(self._held_out) - self.recipe.model.context
        return np.random.default_rng(seed).integers(0, choices, count)

    def _assigned_starts(self, work: Work, seed: int, count: int) -> Tokens:
        """Starts of windows the worker was to train on, from as many of its steps as possible."""
        generator = np.random.default_rng(seed)
        batch, choices = self.recipe.training.batch, len(self._train) - self.recipe.model.context
        steps = (
            work.first_step + generator.permutation(np.arange(max(count, work.steps)) % work.steps)[:count]
        )
        rows = generator.integers(0, batch, count)
        return np.array(
            [
                window_offsets(
                    self._corpus_hash, self.recipe.seed, work.shard, int(step), count=batch, choices=choices
                )[row]
                for step, row in zip(steps, rows, strict=True)
            ]
        )

    def _other_starts(self, seed: int, count: int) -> Tokens:
        choices = len(self._train) - self.recipe.model.context
        return np.random.default_rng(derive_seed("other", seed)).integers(0, choices, count)

    def _cut(self, text: CompactTokens, starts: Tokens, block: int, seed: int) -> Windows:
        reach = np.arange(self.budget().length + 1)
        windows = torch.from_numpy(text[starts[:, None] + reach].astype(np.int64)).to(self.device)
        generator = torch.Generator(self.device).manual_seed(seed)
        tokens, targets, objective = windows[:, :-1], windows[:, 1:], self._objective
        drawn = with_hints(objective, block, tokens, targets, self._codebook, generator)
        features = upstream_features(self._frozen, tokens, self._codebook)
        return dataclasses.replace(drawn, upstream_BTD=features)

    # --- gains ---

    def _differences(self, block: int, text: CompactTokens, starts: Tokens, seed: int) -> list[float]:
        found: list[float] = []
        size = self.recipe.evaluation.batch
        for first in range(0, len(starts), size):
            windows = self._cut(text, starts[first : first + size], block, derive_seed("hint", seed, first))
            found += paired_differences(self._objective, self._before, self._after, self._codebook, windows)
        return found

    def _losses(self, module: Block, block: int, starts: Tokens, seed: int) -> list[float]:
        """Of held-out windows."""
        found: list[float] = []
        size = self.recipe.evaluation.batch
        for first in range(0, len(starts), size):
            part = starts[first : first + size]
            windows = self._cut(self._held_out, part, block, derive_seed("hint", seed, first))
            found += window_losses(self._objective, module, self._codebook, windows)
        return found

    def _gain(self, block: int, starts: Tokens, text: CompactTokens, seed: int) -> Gain:
        def score(first: int, end: int) -> list[float]:
            return self._differences(block, text, starts[first:end], derive_seed("look", seed, first))

        return sequential_gain(score, len(starts))

    def _fixed(self, block: int, starts: Tokens, seed: int) -> Gain:
        return Gain.of(self._differences(block, self._train, starts, seed))
