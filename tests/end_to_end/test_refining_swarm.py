"""A Llama is imported in parts, and a swarm fine-tunes them on a new text as well as end to end would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from blocktrain.config import Recipe, resolve_recipe
from blocktrain.data.corpora import open_text
from blocktrain.local.assembly import save_model
from blocktrain.training.checkpoint import load_checkpoint
from blocktrain.training.evaluation import Evaluator
from blocktrain.training.hugging_face import export_folder, import_folder
from blocktrain.training.local import LocalRun, Silent
from tests.end_to_end.swarm_kit import Coordinator, Kit
from tests.tiny import prose

CPU = torch.device("cpu")
STEPS, PER_ROUND = 30, 5


def recipe_of(corpus: Path, blocks: int, steps: int, rate: float) -> Recipe:
    sections: dict[str, Any] = {
        "name": "refined",
        "model": {"family": "llama", "width": 32, "heads": 4, "blocks": blocks, "context": 32},
        "objective": {"kind": "serial" if blocks > 1 else "denoise"},
        "data": {"corpus": str(corpus)},
        "training": {
            "steps": steps, "batch": 8, "warmup_steps": 5, "matrix_lr": rate, "other_lr": rate,
            "reference": False,
        },
        "evaluation": {"max_bytes": 1500, "pooling_bytes": 500, "sample_bytes": 0},
        "swarm": {
            "steps_per_round": PER_ROUND, "rounds": steps // PER_ROUND, "replicas": 1, "codec": "dense",
            "run_ahead": 0.0,
        },
        "trust": {"stamp_bits": 0, "probation_verdicts": 0},
    }  # fmt: skip
    sections["model"]["layers_per_block"] = 4 // blocks
    return resolve_recipe(sections)


def held_out_ce(folder: Path, recipe: Recipe) -> float:
    loaded = load_checkpoint(folder, CPU)
    evaluator = Evaluator(loaded.objective, loaded.codebook_VD, recipe.evaluation, seed=0)
    tokens = open_text(recipe).first_tokens("held_out", 1500)
    return evaluator.score(loaded.blocks, loaded.pooling, tokens, euler=False).consensus.ce


def test_a_swarm_refines_the_parts_of_a_llama_as_end_to_end_does(kit: Kit, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    old, new = tmp_path / "old.txt", tmp_path / "new.txt"
    old.write_bytes(prose(30_000))
    new.write_bytes(b" ".join(word[::-1] for word in prose(30_000, seed=1).split()))
    first = LocalRun(recipe_of(old, 1, 60, 1e-2), tmp_path / "first", CPU, Silent())
    first.train(resume=False)
    first.finish()
    export_folder(tmp_path / "first" / "checkpoint", tmp_path / "llama", "card")
    import_folder(tmp_path / "llama", tmp_path / "whole")
    import_folder(tmp_path / "llama", tmp_path / "parts", 2)

    alone = recipe_of(new, 1, STEPS, 3e-4)
    run = LocalRun(alone, tmp_path / "alone", CPU, Silent(), start=tmp_path / "whole")
    run.train(resume=False)
    run.finish()

    recipe = recipe_of(new, 2, STEPS, 3e-4)
    coordinator = Coordinator(kit, recipe, options=["--from", str(tmp_path / "parts")]).start()
    workers = [kit.worker(coordinator.url, f"worker-{number}") for number in range(2)]
    coordinator.finished()
    assert [worker.wait(60) for worker in workers] == [0, 0]
    frozen = [entry.body["frozen"] for entry in coordinator.ledger() if entry.kind == "assign"]
    assert {one["block"] for named in frozen for one in named} == {0, 1}, "each beside the other"
    save_model(coordinator.url, tmp_path / "refined")

    before = held_out_ce(tmp_path / "whole", recipe)
    end_to_end = held_out_ce(tmp_path / "alone" / "checkpoint", recipe)
    refined = held_out_ce(tmp_path / "refined", recipe)
    assert end_to_end < before - 0.15
    assert abs(refined - end_to_end) < 0.02
    export_folder(tmp_path / "refined", tmp_path / "out", "card")
    assert import_folder(tmp_path / "out", tmp_path / "back", 2).model.blocks == 2
