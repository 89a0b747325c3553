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

from blocktrain.codec_spec import CodecSpec
from blocktrain.config import Recipe
from blocktrain.data.batches import Drawing
from blocktrain.data.corpora import read_text
from blocktrain.data.dataset import RunText, TokenArray, Windows
from blocktrain.data.tokenizer import Tokens
from blocktrain.errors import DataError
from blocktrain.ids import derive_seed
from blocktrain.model.block import Block
from blocktrain.training.frozen import upstream_features
from blocktrain.training.setup import Setup
from blocktrain.training.snapshot import load_into
from blocktrain.training.update import delta_of
from blocktrain.validation.evidence import (
    Budget,
    Evidence,
    Gain,
    evidence_budget,
    sequential_gain,
    window_losses,
    with_hints,
)
from blocktrain.wire.codec import Schema, Tensors
from blocktrain.wire.messages import JudgeTask


@dataclass(frozen=True)
class Work:
    """The batches an update was trained on."""

    shard: int
    first_step: int
    steps: int


FrozenBlocks = Mapping[int, Tensors]
"""Weights of the blocks that take part beside the judged one by index, in the order they run."""
NONE_FROZEN: FrozenBlocks = {}


@dataclass(frozen=True)
class HeldOut:
    """Windows of held-out text; of a specialised block those of its own cluster first."""

    windows: Windows
    num_own: int = 0

    def draw(self, seed: int, count: int, own_share: float) -> tuple[Tokens, list[bool]]:
        """Starts of windows, and which of them are of the own cluster: as many as in training, since a
        specialist is to get better at that mixture."""
        generator = np.random.default_rng(seed)
        if not self.num_own:
            return generator.integers(0, self.windows.choices, count), [False] * count
        own = generator.integers(0, self.num_own, count)
        rest = generator.integers(self.num_own, self.windows.choices, count)
        # Spread evenly: each part is judged for itself, and harm in one may show at the first look.
        is_own = np.diff(np.floor(np.arange(count + 1) * own_share)) > 0
        return np.where(is_own, own, rest), is_own.tolist()


def held_out_by_cluster(text: RunText, context: int) -> list[HeldOut]:
    """For each cluster its held-out text, and behind it that of the others."""
    found: list[list[TokenArray]] = [[] for _ in range(text.manifest.clusters)]
    for entry in text.manifest.held_out:
        found[entry.cluster].append(text.tokens(entry))
    parts = []
    for cluster, own in enumerate(found):
        others = [tokens for number, files in enumerate(found) if number != cluster for tokens in files]
        num_own = Windows(own, context).choices if own else 0
        if num_own < 1:
            raise DataError(
                f"judging specialised blocks needs held-out text of every cluster, and cluster {cluster} has "
                f"none longer than a window of {context} tokens; prepare the text with a larger --held-out"
            )
        parts.append(HeldOut(Windows([*own, *others], context), num_own))
    return parts


def applied(
    codec: CodecSpec, base: Tensors, own_base: Tensors, decoded: Tensors, step: float
) -> dict[str, NDArray[np.float32]]:
    """The block after one update alone, measured from `own_base` and applied to `base`."""
    # In fp64, rounded once: how that differs from the fp32 sum of a merge is far below what a judge can see.
    delta = delta_of(codec, decoded, own_base)
    return {
        name: np.asarray(base[name] - step * delta[name].astype(np.float64), dtype=np.float32)
        for name in base
    }


class Scorer:
    """Not for two threads at once."""

    def __init__(self, recipe: Recipe, text: RunText, device: torch.device | None = None) -> None:
        self.recipe, self.device, self._text = recipe, device or torch.device("cpu"), text
        setup = Setup.of(recipe, text.manifest.vocabulary)
        self._objective, self._drawing = setup.objective, Drawing.of(recipe)
        self._codebook: Tensor = setup.codebook().to(self.device)()
        private, context = recipe.trust.private_text, recipe.model.context
        if private is None:
            held_out = text.first_tokens("held_out")
        else:
            held_out = text.tokenizer().encode(read_text(Path(private).expanduser()))
        # As narrow as in a shard: up to 64 MB of text, which as int64 would take eight times that.
        narrow: TokenArray = held_out.astype(text.manifest.dtype)
        self._everything = HeldOut(Windows([narrow], context))
        if self._everything.windows.choices < 1:
            raise DataError(
                f"judging needs more held-out text than one window of {context} tokens, found "
                f"{len(held_out)}; use more text, a larger data.valid_fraction or trust.private_text"
            )
        # Private text has no clusters, so specialists are then judged on it as a whole.
        specialised = recipe.data.own_share > 0 and private is None
        self._by_cluster = held_out_by_cluster(text, context) if specialised else []
        # Built once, as building costs as much as some windows, and loaded with each update's weights.
        self._pairs: dict[tuple[Schema, int], tuple[Block, Block]] = {}
        self._others: dict[int, Block] = {}

    def budget(self, block: int) -> Budget:
        """Evidence budget for a block, beside the frozen ones that it takes."""
        before, behind = self._objective.upstream(block), self._objective.downstream(block)
        return evidence_budget(self.recipe, len(before), len(behind))

    def judge(
        self,
        task: JudgeTask,
        codec: CodecSpec,
        base: Tensors,
        own_base: Tensors,
        decoded: Tensors,
        frozen: FrozenBlocks,
    ) -> Evidence:
        """The evidence on a task's update. It is applied to the head `base`, where it would be merged; its
        own base tells what it changed, which a late update did from an older snapshot."""
        after = applied(codec, base, own_base, decoded, task.step)
        work = Work(task.shard, task.first_step, task.steps)
        return self.evidence(task.block, base, after, work, task.seed, frozen)

    def evidence(
        self,
        block: int,
        base: Tensors,
        after: Tensors,
        work: Work,
        seed: int,
        frozen: FrozenBlocks = NONE_FROZEN,
    ) -> Evidence:
        """The gains of moving `block` from `base` to `after` beside these frozen blocks."""
        budget, blocks = self.budget(block), self._loaded(block, base, after)
        others = self._beside(frozen)

        def differences(text: Windows, starts: Tokens, seed: int) -> list[float]:
            """Loss before less loss after, window by window; not finite where the update broke the block."""
            old, new = self._losses(block, blocks, others, text, starts, seed)
            return [was - became for was, became in zip(old, new, strict=True)]

        # In steps: harm is sure after few windows.
        text = self._held_out_of(block)
        starts, is_own = text.draw(seed, budget.held_out, self.recipe.data.own_share)
        scored: list[float] = []

        def look(first: int, end: int) -> list[float]:
            found = differences(text.windows, starts[first:end], derive_seed("look", seed, first))
            scored.extend(found)
            return found

        held_out = sequential_gain(look, len(starts))
        parts = [
            [one for one, own in zip(scored, is_own, strict=False) if own == kind] for kind in (True, False)
        ]
        # One window has no error that could be estimated.
        own, rest = (Gain.of(part) if text.num_own and len(part) > 1 else None for part in parts)
        if own is not None and rest is not None:
            # How many windows are of each kind is no chance, so the difference of kinds is no error.
            share = own.windows / held_out.windows
            held_out = own.times(share).plus(rest.times(1 - share))

        # The worker's own batches, from as many of its steps as possible, against any other training text.
        generator, count = np.random.default_rng(seed), budget.assigned
        place = work.shard, work.first_step, block
        own_text = self._drawing.windows(self._text, *place)
        offsets = generator.permutation(np.arange(max(count, work.steps)) % work.steps)[:count]
        rows = generator.integers(0, self._drawing.batch, count)
        assigned = [
            own_text.starts(work.first_step + int(offset))[row]
            for offset, row in zip(offsets, rows, strict=True)
        ]
        own_gain = Gain.of(differences(own_text, np.array(assigned), seed + 1))
        other_gain = Gain.of(differences(*self._other_text(place, seed, budget.other), seed + 2))

        windows = held_out.windows + own_gain.windows + other_gain.windows
        tokens = budget.forwards * budget.length * windows
        return Evidence(held_out, own_gain, other_gain, tokens, own, rest)

    def guard(
        self,
        block: int,
        base: Tensors,
        candidates: Iterable[Tensors],
        windows: int,
        seed: int,
        frozen: FrozenBlocks = NONE_FROZEN,
    ) -> list[list[float]]:
        """What each candidate gains over `base`, window by window of the same text: one half of the windows
        is held-out text and one half training text, as updates are judged."""
        held_out, others, half = self._held_out_of(block), self._beside(frozen), windows // 2
        starts, _ = held_out.draw(seed, windows - half, self.recipe.data.own_share)
        texts = ((held_out.windows, starts), self._other_text((0, 0, block), seed, half))
        before, after = self._loaded(block, base, base)

        def losses(module: Block) -> list[float]:
            found = (self._losses(block, (module,), others, *text, seed) for text in texts)
            return [loss for [one] in found for loss in one]

        old, gains = losses(before), []
        # One at a time: a candidate is a whole block, and there are up to seven.
        for candidate in candidates:
            load_into(after, candidate)
            gains.append([was - became for was, became in zip(old, losses(after), strict=True)])
        return gains

    def _other_text(self, place: tuple[int, int, int], seed: int, count: int) -> tuple[Windows, Tokens]:
        """Training text that the seed chooses, and starts of windows in it; `place` is shard, step, block."""
        # From two files alone: a judge elsewhere must not fetch a whole dataset for one update.
        seed = derive_seed("other", seed)
        text = dataclasses.replace(self._drawing, seed=seed).windows(self._text, *place)
        return text, text.anywhere(np.random.default_rng(seed), count)

    def _loaded(self, block: int, base: Tensors, after: Tensors) -> tuple[Block, Block]:
        """The block before and after an update; blocks may differ in shape."""
        # Tensors of one shape may belong to other heads.
        shape = Schema.of(base), self._objective.model.of_block(block).heads
        if shape not in self._pairs:
            first, second = (self._objective.build(block, 0).to(self.device).eval() for _ in range(2))
            self._pairs[shape] = first, second
        for module, weights in zip(self._pairs[shape], (base, after), strict=True):
            load_into(module, weights)
        return self._pairs[shape]

    def _beside(self, frozen: FrozenBlocks) -> list[Block]:
        """In host memory: each visits the device for its turn."""
        for index, weights in frozen.items():
            if index not in self._others:
                self._others[index] = self._objective.build(index, 0).eval()
            load_into(self._others[index], weights)
        return [self._others[index] for index in frozen]

    def _held_out_of(self, block: int) -> HeldOut:
        """The held-out text that a block is judged on."""
        return self._by_cluster[block % len(self._by_cluster)] if self._by_cluster else self._everything

    def _losses(
        self,
        block: int,
        modules: Sequence[Block],
        others: Sequence[Block],
        text: Windows,
        starts: Tokens,
        seed: int,
    ) -> list[list[float]]:
        """Losses of each module on the same windows with the same hints: the noise that they share cancels
        in their difference."""
        found: list[list[float]] = [[] for _ in modules]
        size, length = self.recipe.evaluation.batch, self.budget(block).length + 1
        before = len(self._objective.upstream(block))
        for first in range(0, len(starts), size):
            windows = torch.from_numpy(text.cut(starts[first : first + size], length)).to(self.device).long()
            tokens, targets = windows[:, :-1], windows[:, 1:]
            # Seeded by the place in the draw, so that a batch's hints do not depend on what came before it.
            generator = torch.Generator(self.device).manual_seed(derive_seed("hint", seed, first))
            drawn = with_hints(self._objective, block, tokens, targets, self._codebook, generator)
            features = upstream_features(others[:before], tokens, self._codebook)
            # In fp32, as the judged block computes; a frozen one on CUDA gives bf16.
            features = None if features is None else features.float()
            drawn = dataclasses.replace(drawn, upstream_BTD=features)
            for losses, module in zip(found, modules, strict=True):
                losses += window_losses(module, self._codebook, drawn, others[before:])
        return found
