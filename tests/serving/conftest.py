"""Tiny checkpoints that the serving tests share."""

from __future__ import annotations

import dataclasses
import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from blocktrain.config import (
    DataConfig,
    EvaluationConfig,
    ModelConfig,
    ObjectiveConfig,
    Recipe,
    TrainingConfig,
    resolve_recipe,
)
from blocktrain.ids import CorpusHash
from blocktrain.model.pooling import DECAYS, Pooling
from blocktrain.training.checkpoint import save_checkpoint
from blocktrain.training.local import LocalRun, Silent
from blocktrain.training.setup import Setup
from tests.conftest import MadeOnce
from tests.tiny import shaken

TINY = Recipe(
    name="tiny",
    model=ModelConfig(width=64, heads=4, blocks=3, layers_per_block=1, context=96),
    data=DataConfig(max_bytes=200_000),
    training=TrainingConfig(steps=40, batch=12, warmup_steps=5, reference=False),
    evaluation=EvaluationConfig(max_bytes=5_000, noise_draws=1, pooling_bytes=10_000, sample_bytes=0),
)


def train_tiny(
    folder: Path,
    *,
    name: str = "tiny",
    seed: int = 0,
    steps: int = 40,
    objective: ObjectiveConfig | None = None,
    data: DataConfig = TINY.data,
) -> Path:
    training = dataclasses.replace(TINY.training, steps=steps)
    objective = objective or TINY.objective
    run = LocalRun(
        dataclasses.replace(TINY, name=name, seed=seed, training=training, objective=objective, data=data),
        folder,
        torch.device("cpu"),
        Silent(),
    )
    run.train(resume=False)
    run.finish()
    return folder / "checkpoint"


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoint(made_once: MadeOnce) -> Path:
    return made_once("tiny", train_tiny) / "checkpoint"


@pytest.fixture(scope="session")
def following_checkpoint(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same blocks, with weights that follow the text more than any that were fitted."""
    folder = tmp_path_factory.mktemp("following") / "checkpoint"
    shutil.copytree(checkpoint, folder)
    config = json.loads((folder / "config.json").read_text())
    config["pooling_follows_text"] = Pooling((), DECAYS, (0.4, 0.2, 0.1)).how_it_follows
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def sweep_checkpoint(made_once: MadeOnce) -> Path:
    """Trained for mode `sweep` too."""
    objective = ObjectiveConfig(hint_probability=0.6, sweep_probability=0.5, sigma_min=0.15)
    make = partial(train_tiny, name="swept", objective=objective)
    return made_once("sweep", make) / "checkpoint"


SERIAL: dict[str, Any] = {
    "model": {
        "family": "llama",
        "width": 32,
        "heads": 4,
        "kv_heads": 2,
        "layers_per_block": 1,
        "blocks": 3,
        "context": 48,
    },
    "objective": {"kind": "serial"},
}


@pytest.fixture(scope="session")
def serial(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three parts in series with random weights that say something."""
    recipe = resolve_recipe(SERIAL)
    setup = Setup.of(recipe)
    parts = [shaken(setup.initial(index), seed=index) for index in range(3)]
    folder = tmp_path_factory.mktemp("serial")
    save_checkpoint(
        folder, recipe, CorpusHash("ab" * 32), parts, setup.codebook()(), Pooling((0.0, 0.0, 1.0))
    )
    return folder


@pytest.fixture(scope="session")
def other_checkpoint(made_once: MadeOnce) -> Path:
    """The same shapes, other weights."""
    return made_once("other", partial(train_tiny, name="other", seed=1, steps=1)) / "checkpoint"
