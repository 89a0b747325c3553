"""The end of a swarm run: the blocks' last snapshots, assembled, scored and saved as a checkpoint."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import torch

from blocktrain.client.coordinator import CoordinatorClient
from blocktrain.config import Recipe
from blocktrain.data.corpora import load_corpus
from blocktrain.data.tokenizer import load_tokenizer
from blocktrain.ids import derive_seed
from blocktrain.model.block import Block
from blocktrain.model.objective import Objective
from blocktrain.training.checkpoint import save_checkpoint
from blocktrain.training.evaluation import Evaluator
from blocktrain.training.inner import build_codebook
from blocktrain.training.snapshot import load_into
from blocktrain.wire.messages import RunAnswer, StatusAnswer
from blocktrain.worker.cache import BlobCache
from blocktrain.worker.program import swarm_recipe
from blocktrain.worker.snapshots import Layout, Snapshots


def save_final_checkpoint(client: CoordinatorClient, status: StatusAnswer, out: Path) -> dict[str, Any]:
    """Write the checkpoint of a finished run; returns its scores on the whole held-out text."""
    run = client.run()
    recipe = swarm_recipe(run)
    tokenizer = load_tokenizer(recipe.data.tokenizer)
    objective = Objective(recipe.model, recipe.objective, vocabulary=tokenizer.vocabulary)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    blocks = [block.to(device).eval() for block in assembled_blocks(client, run, status, recipe, objective)]
    table = build_codebook(recipe, tokenizer.vocabulary)().detach().to(device)
    corpus = load_corpus(recipe.data, recipe.evaluation.pooling_bytes)
    evaluator = Evaluator(objective, table, recipe.evaluation, seed=recipe.seed)
    pooling = evaluator.fit_weights(blocks, tokenizer.encode(corpus.pool))
    valid = tokenizer.encode(corpus.valid[: recipe.evaluation.max_bytes])
    scores = evaluator.score(blocks, pooling, valid, euler=objective.composes_by_euler)
    trained = dataclasses.replace(recipe.training, steps=recipe.swarm.total_steps)
    recipe = dataclasses.replace(recipe, training=trained)
    save_checkpoint(out, recipe, corpus.sha256, [block.cpu() for block in blocks], table.cpu(), pooling)
    return {
        "versions": [block.head_version for block in status.blocks],
        "consensus_ce": scores.consensus.ce,
        "euler_ce": None if scores.euler is None else scores.euler.ce,
        "block_ce": [score.ce for score in scores.blocks],
        "weights": pooling,
        "scored_tokens": len(valid) - 1,
    }


def assembled_blocks(
    client: CoordinatorClient, run: RunAnswer, status: StatusAnswer, recipe: Recipe, objective: Objective
) -> list[Block]:
    layouts = [Layout.of(layout) for layout in run.blocks]
    blocks = []
    with tempfile.TemporaryDirectory() as folder:
        cache = BlobCache(Path(folder), max_bytes=0)
        snapshots = Snapshots(client, cache, recipe, objective, layouts, lambda _: None)
        for state in status.blocks:
            block = objective.build(state.block, derive_seed("init", recipe.seed, state.block))
            load_into(block, snapshots.whole(state.block, state.head_hash))
            blocks.append(block)
    return blocks
