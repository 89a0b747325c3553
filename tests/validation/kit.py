"""Honest updates of a small block, really trained, for the tests of evidence and duplicates."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from blocktrain.codec_spec import CodecSpec
from blocktrain.config import DataConfig, EvaluationConfig, ModelConfig, Recipe, SwarmConfig, TrainingConfig
from blocktrain.data.corpora import Corpus, load_corpus
from blocktrain.data.shards import Shards
from blocktrain.data.tokenizer import ByteTokenizer
from blocktrain.ids import derive_seed
from blocktrain.model.objective import Objective
from blocktrain.training.inner import BlockTrainer, build_codebook
from blocktrain.training.snapshot import schema_of, tensors_of
from blocktrain.training.update import difference
from blocktrain.validation.scorer import Scorer, Work
from blocktrain.wire.codec import Schema, decode, encode

torch.set_num_threads(1)

Weights = dict[str, NDArray[np.float32]]

RECIPE = Recipe(
    model=ModelConfig(width=64, heads=2, blocks=1, layers_per_block=1, context=64, condition_width=8),
    data=DataConfig(corpus="builtin", max_bytes=400_000),
    training=TrainingConfig(batch=8, warmup_steps=5),
    evaluation=EvaluationConfig(batch=64),
    swarm=SwarmConfig(steps_per_round=20, rounds=8, codec="sparse:64"),
)


@functools.cache
def corpus() -> Corpus:
    return load_corpus(RECIPE.data, 1000)


@functools.cache
def scorer() -> Scorer:
    return Scorer(RECIPE, corpus())


@dataclass(frozen=True)
class Honest:
    base: Weights
    delta: Weights
    work: Work
    schema: Schema


@functools.cache
def honest(shard: int, round_: int = 0) -> Honest:
    """What a worker on `shard` does in its round, starting from shard 0's weights of the round before."""
    recipe = dataclasses.replace(
        RECIPE, training=dataclasses.replace(RECIPE.training, steps=RECIPE.swarm.total_steps)
    )
    tokenizer = ByteTokenizer()
    objective = Objective(recipe.model, recipe.objective, vocabulary=tokenizer.vocabulary)
    block = objective.build(0, derive_seed("init", recipe.seed, 0))
    shards = Shards.of(recipe, tokenizer.encode(corpus().train), corpus().sha256, torch.device("cpu"))
    trainer = BlockTrainer(recipe, objective, block, 0, shards, build_codebook(recipe, tokenizer.vocabulary))
    steps = recipe.swarm.steps_per_round
    for step in range(round_ * steps):
        trainer.step(step, 0)
    base = tensors_of(block)
    for step in range(round_ * steps, (round_ + 1) * steps):
        trainer.step(step, shard)
    delta = difference(base, tensors_of(block))
    return Honest(base, delta, Work(shard, round_ * steps, steps), schema_of(block))


def coded(one: Honest, codec: str = "sparse:64") -> Weights:
    """The update as it would be decoded."""
    spec = CodecSpec.parse(codec)
    return decode(spec, one.schema, encode(spec, one.schema, one.delta))


def applied(base: Weights, delta: Weights) -> Weights:
    return {name: np.asarray(base[name] - delta[name]) for name in base}
