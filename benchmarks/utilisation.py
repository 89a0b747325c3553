"""Share of wall time a worker trains, on a slow and distant network.

A coordinator and a worker in two network namespaces, joined by a link of 100 Mbit/s and 100 ms round trip
(`links.py`); a block of 25 M parameters; about 60 s of compute per round. The share is what the worker's own
clock says: seconds in optimizer steps over all seconds since its first step. Needs root.

    python benchmarks/utilisation.py [--rounds 3] [--codec sparse:64]
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from pathlib import Path

import torch
from links import Wan, gateway_ip
from swarm_bench import block_parameters, ending, recipe_text, start, until

from blocktrain.config import resolve_recipe
from blocktrain.data.corpora import load_corpus
from blocktrain.data.shards import Shards
from blocktrain.data.tokenizer import ByteTokenizer
from blocktrain.model.objective import Objective
from blocktrain.training.inner import BlockTrainer, build_codebook

WIDTH, LAYERS, CONTEXT, BATCH = 512, 8, 64, 2
COMPUTE_SECONDS = 60.0
MEGABITS, ROUND_TRIP_MS = 100.0, 100.0
CALIBRATION_STEPS = 6
PORT = 8420
PASS_SHARE = 0.99


def seconds_per_step(text: str) -> float:
    """What one step takes here with nothing else running."""
    import tomllib

    recipe = resolve_recipe(tomllib.loads(text))
    tokenizer = ByteTokenizer()
    corpus = load_corpus(recipe.data, recipe.evaluation.pooling_bytes)
    objective = Objective(recipe.model, recipe.objective, vocabulary=tokenizer.vocabulary)
    shards = Shards(
        tokenizer.encode(corpus.train),
        corpus.sha256,
        seed=recipe.seed,
        batch=BATCH,
        context=CONTEXT,
        device=torch.device("cpu"),
    )
    codebook = build_codebook(recipe, tokenizer.vocabulary)
    trainer = BlockTrainer(recipe, objective, objective.build(0, seed=0), 0, shards, codebook)
    trainer.step(0, 0)
    started = time.monotonic()
    for step in range(1, 1 + CALIBRATION_STEPS):
        float(trainer.step(step, 0))
    return (time.monotonic() - started) / CALIBRATION_STEPS


def measure(options: argparse.Namespace, folder: Path) -> dict[str, object]:
    torch.set_num_threads(1)
    shape = {"width": WIDTH, "layers": LAYERS, "context": CONTEXT, "batch": BATCH, "codec": options.codec}
    step = seconds_per_step(recipe_text(**shape, steps_per_round=1, rounds=1))
    steps = max(1, round(COMPUTE_SECONDS / step))
    recipe = folder / "recipe.toml"
    recipe.write_text(recipe_text(**shape, steps_per_round=steps, rounds=1000))
    print(f"{step:.3f} s per step alone, so {steps} steps per round", flush=True)
    with Wan(1, rate_mbit=MEGABITS) as wan:
        wan.set_rtt(ROUND_TRIP_MS)
        data_dir = str(folder / "coordinator")
        coordinator = start(
            ["coordinator", str(recipe), "--data-dir", data_dir, "--host", "0.0.0.0", "--port", str(PORT)],
            folder / "coordinator.log",
            threads=1,
            prefix=wan.inside(wan.gateway, []),
        )
        with ending(coordinator):
            coordinator.line("coordinator ready")
            url = f"http://{gateway_ip(0)}:{PORT}"
            worker = start(
                ["worker", "--coordinator", url, "--data-dir", str(folder / "worker"), "--device", "cpu"],
                folder / "worker.log",
                threads=1,
                prefix=wan.inside(wan.hosts[0], []),
            )
            with ending(worker):
                limit = 4 * COMPUTE_SECONDS * (options.rounds + 2) + 120

                def merged() -> bool:
                    return len(re.findall("rebase block=0", worker.text())) >= int(options.rounds)

                until(f"{options.rounds} rounds are merged", merged, limit, worker)
                worker.stop()
    report = json.loads(next((folder / "worker").glob("*/report.json")).read_text())
    return {**report, "steps_per_round": steps, "seconds_per_step_alone": step}


def show(result: dict[str, object], options: argparse.Namespace) -> bool:
    steady = result["steady_seconds"]
    assert isinstance(steady, dict)
    share = steady["computing"] / (steady["computing"] + steady["waiting"])
    parameters = block_parameters(WIDTH, LAYERS, CONTEXT)
    print(f"block                  {parameters / 1e6:.1f} M parameters, codec {options.codec}")
    print(f"link                   {MEGABITS:g} Mbit/s, {ROUND_TRIP_MS:g} ms round trip")
    print(f"computing              {steady['computing']:.2f} s")
    print(f"waiting                {steady['waiting']:.2f} s (assignments, copies, rebasing)")
    print(f"transferring beside    {steady['transferring']:.2f} s")
    print(f"bytes up / down        {result['up']} / {result['down']}")
    print(f"share of time training {share:.2%} ({'pass' if share >= PASS_SHARE else 'FAIL'}: at least 99 %)")
    return bool(share >= PASS_SHARE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--codec", default="sparse:64")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        passed = show(measure(options, Path(folder)), options)
    raise SystemExit(0 if passed else 1)


if __name__ == "__main__":
    main()
