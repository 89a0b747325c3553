"""The recipe `one-billion` from the first step to another program: trained, merged, scored, exported, read.

    blocktrain data tokenizer train TEXT --vocabulary 32768 --out tokenizer.json
    blocktrain data prepare TEXT --tokenizer tokenizer.json --out dataset
    python benchmarks/one_billion.py dataset --out one-billion.json        # an H200: 7 minutes
    python benchmarks/one_billion.py dataset --tiny --device cpu           # tries the script: a minute

`blocktrain swarm` starts a coordinator and two workers for each block, which speak HTTP; then the checkpoint
is exported, and transformers writes greedy text with the folder of one block. Model, codec and rates are the
recipe's. Other than there: a shorter run (STEPS), a smaller batch and a warm-up of a tenth, so that it ends
in minutes, and no judge, which on the coordinator's processor would take longer than the training. Exits 1
where a claim fails, 3 where the disk is too small. `--seconds` ends a run that takes too long; what it has
by then is still scored and exported.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from provenance import check_claims, write_report

from blocktrain.config import Recipe, find_recipe, load_recipe
from blocktrain.data.dataset import Dataset
from blocktrain.model.block import num_parameters
from blocktrain.model.generation import LocalModel, generate
from blocktrain.model.pooling import Pooling
from blocktrain.training.checkpoint import load_checkpoint
from blocktrain.training.setup import Setup

STEPS, TINY_STEPS = 300, 30
REPLICAS = 2
ENDING_SECONDS = 300
"""After `--seconds`: the merge under way, scoring, checkpoint."""
PROMPTS = ("The function returns", "## Installation\n\n", "To use this")
GREEDY_TOKENS = 48
TWO_SHARE = 0.8
"""Of the rounds that must have merged two updates: a worker that is late once is no failure."""
TINY = (
    "model.width=64",
    "model.heads=4",
    "model.kv_heads=2",
    "model.feedforward_width=160",
    "model.layers_per_block=2",
    "model.context=64",
    "evaluation.max_bytes=20000",
)


def settings(options: argparse.Namespace) -> list[str]:
    steps = TINY_STEPS if options.tiny else STEPS
    changed = {
        "data.dataset": options.dataset.absolute(),
        "model.blocks": options.blocks,
        "training.batch": options.batch,
        # Several workers share the device, and `auto` would give each what was free before the others came.
        "training.micro_batch": options.batch,
        "training.warmup_steps": steps // 10,
        "swarm.rounds": options.rounds,
        "swarm.steps_per_round": steps // options.rounds,
        "swarm.replicas": REPLICAS,
        "swarm.evaluate_every_seconds": 5.0 if options.tiny else 60.0,
        "trust.judge": "off",
    }
    return [f"{key}={value}" for key, value in changed.items()] + list(TINY if options.tiny else ())


def disk_bytes(recipe: Recipe, block_bytes: int) -> int:
    """What the run keeps: every snapshot of every block, checkpoint and export, and each worker's base, error
    feedback, optimizer state and a snapshot that it has just fetched."""
    blocks = recipe.model.blocks
    return block_bytes * blocks * (recipe.swarm.rounds + 1 + 2 + 4 * REPLICAS)


def blocktrain(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "blocktrain", *arguments]


def run_swarm(options: argparse.Namespace, folder: Path, changed: list[str]) -> dict[str, Any]:
    """The report of the run, ended early where its time is over."""
    flags = [part for one in changed for part in ("--set", one)]
    workers = ["--workers", str(REPLICAS * options.blocks), "--device", options.device]
    command = blocktrain("swarm", "one-billion", "--out", str(folder), *workers, *flags)
    # Every worker compiles the same layer; with as many compiling processes each as there are cores, they
    # would wait for one another.
    process = subprocess.Popen(command, env={**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "2"})
    try:
        try:
            process.wait(options.seconds)
        except subprocess.TimeoutExpired:
            print(f"{options.seconds:.0f} s are over: ending the run", flush=True)
            log = (folder / "logs" / "coordinator.log").read_text(errors="replace")
            [url] = re.findall(r"coordinator ready url=(\S+)", log)
            finish = blocktrain("finish", "--coordinator", url, "--data-dir", str(folder / "coordinator"))
            # Fails where the last round has closed by now; the swarm is then about to end by itself.
            subprocess.run(finish, check=False, timeout=60)
            process.wait(ENDING_SECONDS)
    finally:
        process.kill()
        process.wait()
    if process.returncode:
        for log_file in sorted((folder / "logs").glob("*.log")):
            print(f"--- {log_file.name}\n{log_file.read_text(errors='replace')[-1500:]}", flush=True)
        raise SystemExit(f"the swarm ended with exit code {process.returncode}")
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return report


def greedy(checkpoint_folder: Path, exported: Path) -> list[dict[str, Any]]:
    """What block 0 writes here, and what transformers writes with its folder; both in fp32 on the CPU."""
    import transformers

    checkpoint = load_checkpoint(checkpoint_folder, torch.device("cpu"))
    ours = LocalModel(checkpoint.objective, checkpoint.blocks[:1], checkpoint.codebook_VD, Pooling((1.0,)))
    # One block alone is exported as the folder itself, several as a folder each.
    place = exported if len(checkpoint.blocks) == 1 else exported / "block-00"
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(place)
    found = []
    for prompt in PROMPTS:
        tokens = tokenizer(prompt, return_tensors="pt")["input_ids"]
        # Without its end token, at which transformers would stop and ours would not.
        written = theirs.generate(tokens, max_new_tokens=GREEDY_TOKENS, do_sample=False, eos_token_id=None)
        start = checkpoint.tokenizer.encode(prompt.encode()).tolist()
        mine = list(generate(ours, start, max_tokens=GREEDY_TOKENS, seed=0, temperature=0))
        found.append(
            {
                "prompt": prompt,
                "ours": checkpoint.tokenizer.decode(mine).decode(errors="replace"),
                "transformers": tokenizer.decode(written[0, tokens.shape[1] :]),
                "same_tokens": mine == written[0, tokens.shape[1] :].tolist() and start == tokens[0].tolist(),
            }
        )
    return found


def losses_by_block(report: dict[str, Any], blocks: int) -> list[list[float]]:
    """Mean training loss of the updates of each round."""
    rounds = sorted(report["rounds"], key=lambda one: one["version"])
    return [
        [one["mean_loss"] for one in rounds if one["block"] == block and one["mean_loss"] is not None]
        for block in range(blocks)
    ]


def claims_of(found: dict[str, Any]) -> dict[str, bool]:
    falling = all(one[-1] < one[0] for one in found["training_loss"])
    untrained = math.log(found["vocabulary"])
    return {
        f"every block trained {found['steps']} steps": min(found["versions"]) == found["rounds"],
        f"{TWO_SHARE:.0%} of the merges had two updates": found["two_updates_share"] >= TWO_SHARE,
        "the training loss of every block fell": falling,
        "the held-out loss fell": found["final"]["consensus_ce"] < untrained,
        "transformers writes the same greedy text": all(one["same_tokens"] for one in found["greedy"]),
    }


def show(found: dict[str, Any]) -> None:
    gone = found["bytes_up"] / max(1, found["updates"])
    print(f"\n{found['parameters'] / 1e9:.3f} B parameters in {found['blocks']} blocks, {found['codec']}")
    print(f"  steps of a block     {found['steps']} in {found['rounds']} rounds, merged {found['versions']}")
    print(f"  tokens of a step     {found['tokens_per_step']:,}, of each of {found['workers']} workers")
    print(
        f"  swarm                {found['swarm_seconds']:.0f} s, {found['tokens_per_second']:,.0f} tokens/s"
    )
    print(f"  up for an update     {gone / 1e6:.1f} MB, the block is {found['block_bytes'] / 1e6:.0f} MB")
    print(f"  two updates merged   in {found['two_updates_share']:.0%} of the rounds")
    for block, losses in enumerate(found["training_loss"]):
        print(f"  training loss, {block}     " + " ".join(f"{one:.3f}" for one in losses))
    print(
        f"  held-out loss        {' '.join(f'{one:.3f}' for one in found['held_out_loss'])} (during the run)"
    )
    final = found["final"]
    print(
        f"  at the end           {final['consensus_ce']:.4f} nats per token over {final['scored_tokens']:,}, "
        f"each block alone {' '.join(f'{one:.4f}' for one in final['block_ce'])}"
    )
    print(f"  export               {found['export_bytes'] / 1e9:.2f} GB in {found['export_seconds']:.0f} s")
    for one in found["greedy"]:
        print(f"  greedy, {'same' if one['same_tokens'] else 'DIFFERENT'}: {one['prompt'] + one['ours']!r}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("dataset", type=Path, help="folder that `blocktrain data prepare` made")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--blocks", type=int, default=4, help="train so many of the four blocks")
    parser.add_argument("--batch", type=int, default=8, help="sequences of a worker's step")
    parser.add_argument("--rounds", type=int, default=4, help="each keeps a snapshot of every block")
    parser.add_argument("--seconds", type=float, default=420.0, help="end the training after so long")
    parser.add_argument("--work", type=Path, help="folder for the run; default: a temporary one")
    parser.add_argument("--tiny", action="store_true", help="a shape for trying the script")
    parser.add_argument("--out", type=Path, help="also write the numbers as JSON")
    options = parser.parse_args()
    changed = settings(options)
    recipe = load_recipe(find_recipe("one-billion"), changed, environment={})
    manifest = Dataset.open(options.dataset).manifest
    with torch.device("meta"):
        parameters = num_parameters(Setup.of(recipe, manifest.vocabulary).initial(0))
    with tempfile.TemporaryDirectory(prefix="one-billion-", dir=options.work) as name:
        folder, needed = Path(name), disk_bytes(recipe, 4 * parameters)
        free = shutil.disk_usage(folder).free
        print(f"disk: {needed / 1e9:.1f} GB wanted, {free / 1e9:.1f} GB free", flush=True)
        if needed > free:
            return 3
        started = time.monotonic()
        report = run_swarm(options, folder / "run", changed)
        print(f"the swarm ended after {time.monotonic() - started:.0f} s", flush=True)
        for state in [folder / "run" / "coordinator", *folder.glob("run/worker-*")]:
            shutil.rmtree(state)
        exporting = time.monotonic()
        checkpoint, exported = folder / "run" / "checkpoint", folder / "exported"
        subprocess.run(blocktrain("export", str(checkpoint), "--to", str(exported)), check=True, timeout=300)
        exporting = time.monotonic() - exporting
        merged, final = report["rounds"], report["final"]
        updates = sum(one["on_time"] + one["late"] for one in merged)
        tokens = recipe.training.batch * recipe.model.context
        found = {
            "settings": [one for one in changed if not one.startswith("data.dataset=")],
            "parameters": parameters * recipe.model.blocks,
            "block_bytes": 4 * parameters,
            "blocks": recipe.model.blocks,
            "workers": REPLICAS * recipe.model.blocks,
            "vocabulary": manifest.vocabulary,
            "codec": recipe.swarm.codec,
            "steps": recipe.swarm.total_steps,
            "rounds": recipe.swarm.rounds,
            "versions": final["versions"],
            "tokens_per_step": tokens,
            "swarm_seconds": report["wall_seconds"],
            "tokens_per_second": updates
            * recipe.swarm.steps_per_round
            * tokens
            / max(1e-9, report["wall_seconds"]),
            "updates": updates,
            "two_updates_share": sum(one["on_time"] + one["late"] >= REPLICAS for one in merged)
            / max(1, len(merged)),
            "bytes_up": sum(report["bytes_up"].values()),
            "bytes_down": sum(report["bytes_down"].values()),
            "worker_seconds": report["seconds"],
            "training_loss": losses_by_block(report, recipe.model.blocks),
            "held_out_loss": [one["consensus_ce"] for one in report["ce"]],
            "final": final,
            "export_bytes": sum(file.stat().st_size for file in exported.rglob("*") if file.is_file()),
            "export_seconds": exporting,
            "greedy": greedy(checkpoint, exported),
        }
    show(found)
    write_report(options.out, "one_billion", found, [recipe.seed])
    return check_claims(claims_of(found))


if __name__ == "__main__":
    sys.exit(main())
