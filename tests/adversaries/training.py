"""What honest workers do and everybody measures: deltas trained from a snapshot, and held-out loss.

A delta follows from the recipe, the snapshot, the shard and the steps alone (the optimizer begins afresh each
round, as a newcomer's does), so equal runs give equal bytes and no process trains anything twice.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from blocktrain.config import Recipe
from blocktrain.data.corpora import Corpus
from blocktrain.data.shards import Shards
from blocktrain.data.tokenizer import ByteTokenizer
from blocktrain.model.block import Block
from blocktrain.model.objective import Objective
from blocktrain.training.evaluation import Evaluator
from blocktrain.training.inner import BlockTrainer, build_codebook
from blocktrain.training.snapshot import load_into, tensors_of
from blocktrain.training.update import Weights, difference
from blocktrain.wire.codec import Tensors
from blocktrain.wire.hashing import content_hash, snapshot_hash

_known: dict[tuple[object, ...], Weights] = {}
KNOWN_VALUES = 1 << 26
"""As many values of deltas are kept, the newest ones: a long run of a larger block would fill the memory."""


class Training:
    def __init__(self, recipe: Recipe, corpus: Corpus) -> None:
        steps = recipe.swarm.total_steps
        self.recipe = dataclasses.replace(recipe, training=dataclasses.replace(recipe.training, steps=steps))
        self.corpus, self._tokenizer = corpus, ByteTokenizer()
        self._objective = Objective(recipe.model, recipe.objective, vocabulary=self._tokenizer.vocabulary)
        self._codebook = build_codebook(recipe, self._tokenizer.vocabulary)
        self._shards = self._shards_of(corpus.train)
        # What a run does with updates changes nothing here: tests with other rules find each other's work.
        how = (self.recipe.model, self.recipe.objective, self.recipe.training)
        self._place = (repr(how), recipe.seed, recipe.data.own_share, corpus.sha256)

    def _shards_of(self, text: bytes) -> Shards:
        return Shards.of(self.recipe, self._tokenizer.encode(text), self.corpus.sha256, torch.device("cpu"))

    def delta(
        self,
        block: int,
        base: Tensors,
        shard: int,
        first_step: int,
        steps: int,
        text: bytes | None = None,
        frozen: Mapping[int, Tensors] = MappingProxyType({}),
    ) -> Weights:
        """What training on the shard takes away from `base`; on another text where one is given."""
        beside = "".join(snapshot_hash(one) for one in frozen.values())
        on = None if text is None else content_hash(text)
        key = (*self._place, block, snapshot_hash(base), shard, first_step, steps, on, beside)
        if key not in _known:
            module = self._objective.build(block, 0)
            load_into(module, base)
            shards = self._shards if text is None else self._shards_of(text)
            trainer = BlockTrainer(self.recipe, self._objective, module, block, shards, self._codebook)
            trainer.freeze([self._module(index, weights) for index, weights in frozen.items()])
            for step in range(first_step, first_step + steps):
                trainer.step(step, shard)
            _known[key] = difference(base, tensors_of(module))
            while len(_known) > 1 and len(_known) * sum(one.size for one in base.values()) > KNOWN_VALUES:
                del _known[next(iter(_known))]
        return _known[key]

    def _module(self, block: int, weights: Tensors) -> Block:
        module = self._objective.build(block, 0).eval()
        load_into(module, weights)
        return module

    def held_out_loss(self, weights: Tensors) -> float:
        """Loss of a run of one block over the whole held-out text, in nats per byte."""
        return self.loss_on(weights, self.corpus.valid)

    def loss_on(self, weights: Tensors, text: bytes) -> float:
        module = self._objective.build(0, 0).eval()
        load_into(module, weights)
        evaluator = Evaluator(self._objective, self._codebook(), self.recipe.evaluation, seed=0)
        return evaluator.score_one(module, self._tokenizer.encode(text)).ce

    @torch.no_grad()
    def loss_after(self, weights: Tensors, context: bytes, continuation: bytes) -> float:
        """Nats per byte of `continuation` where `context` comes before it."""
        module = self._objective.build(0, 0).eval()
        load_into(module, weights)
        tokens = torch.tensor(list(context + continuation))[None]
        logits: Tensor = module(tokens[:, :-1], self._codebook()).logits_BTV
        log_probs = torch.log_softmax(logits[0, -len(continuation) :].float(), dim=-1)
        return -float(log_probs.gather(1, tokens[0, -len(continuation) :, None]).mean())


def scaled(delta: Tensors, factor: float) -> Weights:
    return {name: np.asarray(np.float32(factor) * value) for name, value in delta.items()}


def mean_of(deltas: Iterable[Tensors]) -> Weights:
    listed = list(deltas)
    total = functools.reduce(lambda left, right: {name: left[name] + right[name] for name in left}, listed)
    return scaled(total, 1 / len(listed))


def norm_of(delta: Tensors) -> float:
    return float(np.sqrt(sum(float((value.astype(np.float64) ** 2).sum()) for value in delta.values())))


def noise_like(delta: Tensors, seed: int) -> Weights:
    """Gaussian noise of the same norm."""
    generator = np.random.default_rng(seed)
    noise = {name: generator.standard_normal(value.shape).astype(np.float32) for name, value in delta.items()}
    return scaled(noise, norm_of(delta) / norm_of(noise))


def blended(delta: Tensors, other: Tensors, share: float) -> Weights:
    return {name: np.asarray(delta[name] + np.float32(share) * other[name]) for name in delta}


def partly_moved(delta: Tensors, share: float, seed: int) -> Weights:
    """A sparse update in which `share` of the indices of every tensor moved elsewhere."""
    generator = np.random.default_rng(seed)
    changed: Weights = {}
    for name, value in delta.items():
        flat = value.reshape(-1).copy()
        used = np.flatnonzero(flat)
        moved = generator.choice(used, round(share * len(used)), replace=False)
        values, flat[moved] = flat[moved].copy(), 0
        free = np.flatnonzero(flat == 0)
        flat[generator.choice(free, len(moved), replace=False)] = values
        changed[name] = flat.reshape(value.shape)
    return changed
