"""The end of a swarm run: the blocks' last snapshots, assembled, scored and saved as a checkpoint."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from blocktrain.client.cache import BlobCache
from blocktrain.client.coordinator import CoordinatorClient
from blocktrain.client.run import Layout, run_setup
from blocktrain.client.snapshots import Snapshots
from blocktrain.data.corpora import open_text
from blocktrain.training.checkpoint import save_checkpoint
from blocktrain.training.evaluation import Evaluator
from blocktrain.training.setup import with_swarm_schedule
from blocktrain.training.snapshot import load_into
from blocktrain.wire.messages import StatusAnswer


def save_final_checkpoint(client: CoordinatorClient, status: StatusAnswer, out: Path) -> dict[str, Any]:
    """Write the checkpoint of a finished run; returns its scores on the whole held-out text."""
    run = client.run()
    setup = run_setup(run)
    recipe, text = setup.recipe, open_text(setup.recipe)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    blocks = [setup.initial(state.block) for state in status.blocks]
    with tempfile.TemporaryDirectory() as folder:
        # Nothing is kept: each snapshot is needed once.
        cache = BlobCache(Path(folder), max_bytes=0)
        layouts = [Layout.of(layout) for layout in run.blocks]
        snapshots = Snapshots(client, cache, setup, layouts, lambda _: None)
        for block, state in zip(blocks, status.blocks, strict=True):
            load_into(block, snapshots.whole(state.block, state.head_hash))
            block.to(device).eval()
    table = setup.codebook()().detach().to(device)
    evaluator = Evaluator(setup.objective, table, recipe.evaluation, seed=recipe.seed)
    # On the pooling text, as in a local run: the scores of both compare.
    pooling = evaluator.fit_weights(blocks, text.first_tokens("pooling", recipe.evaluation.pooling_bytes))
    valid = text.first_tokens("held_out", recipe.evaluation.max_bytes)
    scores = evaluator.score(blocks, pooling, valid, euler=setup.objective.composes_by_euler)
    recipe, cpu = with_swarm_schedule(recipe), [block.cpu() for block in blocks]
    save_checkpoint(out, recipe, text.sha256, cpu, table.cpu(), pooling, text.tokenizer())
    return {
        "versions": [block.head_version for block in status.blocks],
        "consensus_ce": scores.consensus.ce,
        "euler_ce": None if scores.euler is None else scores.euler.ce,
        "block_ce": [score.ce for score in scores.blocks],
        "weights": pooling,
        "scored_tokens": len(valid) - 1,
        "bytes_per_token": text.manifest.bytes_per_token("held_out"),
    }
