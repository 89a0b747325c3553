"""The end of a swarm run: the blocks' last snapshots, assembled, scored and saved as a checkpoint."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from blocktrain.data.corpora import load_corpus
from blocktrain.data.tokenizer import load_tokenizer
from blocktrain.ids import derive_seed
from blocktrain.model.block import Block
from blocktrain.model.objective import Objective
from blocktrain.training.evaluation import Evaluator
from blocktrain.training.inner import build_codebook
from blocktrain.training.snapshot import load_into
from blocktrain.wire.messages import EvaluationState, RunAnswer, StatusAnswer
from blocktrain.worker.cache import BlobCache
from blocktrain.worker.client import CoordinatorClient
from blocktrain.worker.program import swarm_recipe
from blocktrain.worker.snapshots import Layout, Snapshots


def save_final_checkpoint(client: CoordinatorClient, status: StatusAnswer, out: Path) -> dict[str, Any]:
    """Write the checkpoint of a finished run; returns its scores."""
    raise NotImplementedError


def assembled_blocks(client: CoordinatorClient, run: RunAnswer, status: StatusAnswer) -> list[Block]:
    recipe = swarm_recipe(run)
    objective = Objective(
        recipe.model, recipe.objective, vocabulary=load_tokenizer(recipe.data.tokenizer).vocabulary
    )
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


def final_scores(status: StatusAnswer, evaluation: EvaluationState) -> dict[str, Any]:
    return {"versions": evaluation.versions, **evaluation.model_dump(mode="json")}
