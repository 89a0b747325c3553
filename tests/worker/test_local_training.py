"""Training an assignment that has steps for another: what is trained is what the assignment says."""

from __future__ import annotations

import dataclasses

import torch

from blocktrain.client.run import Layout
from blocktrain.client.snapshots import Base
from blocktrain.codec_spec import CodecSpec
from blocktrain.config import Recipe
from blocktrain.data.shards import Shards
from blocktrain.data.tokenizer import ByteTokenizer
from blocktrain.training.inner import BlockTrainer
from blocktrain.training.setup import Setup
from blocktrain.training.snapshot import schema_of, tensors_of
from blocktrain.wire.codec import frame_length
from blocktrain.wire.hashing import snapshot_hash
from blocktrain.wire.messages import StandIn
from blocktrain.worker.block_progress import BlockProgress, PendingUpdate
from blocktrain.worker.training import LocalTraining
from tests.coordinator.conftest import CORPUS, tiny_recipe
from tests.coordinator.peer import an_assignment

RECIPE: Recipe = tiny_recipe(steps_per_round=3)
ASSIGNMENT = an_assignment(steps=5, total_steps=30, stand_in=StandIn(shard=2, steps=2))


def test_a_worker_trains_its_own_steps_and_then_those_of_the_other() -> None:
    setup = Setup.of(RECIPE)
    text = ByteTokenizer().encode(CORPUS.train)
    shards = Shards.of(RECIPE, text, CORPUS.sha256, device=torch.device("cpu"))
    codebook, block = setup.codebook(), setup.initial(0)
    weights = tensors_of(block)
    training = LocalTraining(setup, shards, codebook, torch.device("cpu"))
    codec, schema = CodecSpec.parse("dense"), schema_of(block)
    base = Base(0, snapshot_hash(weights), weights)
    layout = Layout(0, codec, schema, frame_length(codec, schema), base.hash)
    training.begin(BlockProgress(layout, base, None, RECIPE.swarm), 30)
    update = PendingUpdate.of(ASSIGNMENT)
    training.start(update, {})
    while update.step < ASSIGNMENT.steps:
        training.step(update)
    long = dataclasses.replace(RECIPE, training=dataclasses.replace(RECIPE.training, steps=30))
    trainer = BlockTrainer(long, setup.objective, block, 0, shards, codebook)
    for step, shard in ((0, 0), (1, 0), (2, 0), (0, 2), (1, 2)):
        trainer.step(step, shard)
    assert snapshot_hash(training.weights()) == snapshot_hash(tensors_of(trainer.block))
