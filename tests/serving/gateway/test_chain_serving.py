"""Blocks of a chain are served by stages that hold all blocks upstream, and write the same text."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
import torch

from blocktrain.data.tokenizer import ByteTokenizer
from blocktrain.errors import UserError
from blocktrain.ids import CorpusHash
from blocktrain.local.launcher import LaunchConfig, stage_programs
from blocktrain.model.block import make_codebook
from blocktrain.model.objective import Objective
from blocktrain.model.pooling import Pooling
from blocktrain.serving.engine.local import LocalEngine
from blocktrain.serving.stage.main import load_blocks
from blocktrain.training.checkpoint import save_checkpoint
from tests.tiny import shaken_blocks, tiny_recipe

from .conftest import serve_engine, served_by, stages
from .test_launcher import output, verb

FIELDS = {"model": "chain", "prompt": "The value ", "max_tokens": 24}
CPU = torch.device("cpu")


def made(folder: Path, kind: str, blocks: int) -> Path:
    """A checkpoint of blocks that say something, and have learned nothing."""
    recipe = tiny_recipe(f"objective.kind={kind}", f"model.blocks={blocks}", f"name={kind}")
    vocabulary = ByteTokenizer().vocabulary
    objective = Objective(recipe.model, recipe.objective, vocabulary=vocabulary)
    codebook = make_codebook(vocabulary, recipe.model.width, seed=7)
    pooling = Pooling((1 / blocks,) * blocks)
    save_checkpoint(folder, recipe, CorpusHash("ab" * 32), shaken_blocks(objective), codebook, pooling)
    return folder


@pytest.fixture(scope="module")
def chained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("chained"), "chain", 3)


def test_a_stage_must_hold_the_blocks_upstream_of_its_own(chained: Path) -> None:
    with pytest.raises(UserError, match=r"blocks \[2\] need blocks \[0, 1\] upstream \(objective.kind is"):
        load_blocks(chained, [2], CPU)
    assert sorted(load_blocks(chained, [0, 1], CPU)[0].blocks) == [0, 1]


def test_stages_of_a_chain_write_the_text_of_one_process(chained: Path) -> None:
    with serve_engine(LocalEngine(chained)) as local, local.openai() as client:
        expected = [text(client, seed) for seed in (1, 2)]
    with (
        stages(chained, [0, 1, 2], [0, 1]) as running,
        served_by(chained, [stage.address for stage in running]) as remote,
        remote.openai() as client,
    ):
        assert [text(client, seed) for seed in (1, 2)] == expected


def text(client: object, seed: int) -> str:
    return str(client.completions.create(**FIELDS, seed=seed).choices[0].text)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("kind", "groups"),
    [("denoise", ["0,1", "2,3"]), ("chain", ["0,1,2,3", "0,1,2,3"])],
)
def test_serve_groups_blocks_by_what_is_upstream(tmp_path: Path, kind: str, groups: list[str]) -> None:
    checkpoint = made(tmp_path / kind, kind, 4)
    config = LaunchConfig(checkpoint=checkpoint, num_stages=2, logs=tmp_path)
    named = [program.arguments("x")[3] for program in stage_programs(config)]
    assert named == groups


@pytest.mark.slow
def test_the_verb_serves_a_chain(chained: Path) -> None:
    with verb("serve", str(chained), "--stages", "2", "--port", "0") as process:
        assert process.stdout is not None
        url = re.search(r"http://\S+", process.stdout.readline()).group()  # type: ignore[union-attr]
        arguments = ("--prompt", "The value ", "--max-bytes", "20")
        assert output("generate", "--url", url, *arguments) == output("generate", str(chained), *arguments)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
