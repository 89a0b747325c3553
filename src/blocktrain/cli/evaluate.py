"""`evaluate` and `generate`: use a checkpoint on this machine."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from blocktrain.cli.gateway import NEEDS_A_SOURCE, KeyOption, generate_from_url
from blocktrain.cli.options import DeviceOption, find_device
from blocktrain.cli.terminal import bytes_for_stdout
from blocktrain.data.corpora import read_text
from blocktrain.errors import DataError, UserError
from blocktrain.model.generation import LocalModel
from blocktrain.model.generation import generate as generate_tokens
from blocktrain.training.checkpoint import Checkpoint, load_checkpoint
from blocktrain.training.evaluation import Evaluator

CheckpointArgument = Annotated[Path, typer.Argument(help="A checkpoint folder (with config.json).")]


def evaluate(
    checkpoint: CheckpointArgument,
    text: Annotated[Path, typer.Option("--text", help="UTF-8 text to score.")],
    json_: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
    device: DeviceOption = "auto",
    draws: Annotated[int | None, typer.Option("--draws", min=1, help="Noise draws for euler.")] = None,
) -> None:
    """Score a text: cross entropy of each block and of both compositions."""
    content = read_text(text)
    if len(content) < 2:
        raise DataError(f"{text} has {len(content)} byte; scoring needs at least two")
    loaded = load_checkpoint(checkpoint, find_device(device))
    result = score_text(loaded, content, draws)
    if json_:
        print(json.dumps(result, indent=2))
    else:
        Console().print(_table(result, text))


def score_text(checkpoint: Checkpoint, content: bytes, draws: int | None) -> dict[str, Any]:
    config = checkpoint.recipe.evaluation
    config = dataclasses.replace(config, noise_draws=draws or config.noise_draws)
    evaluator = Evaluator(checkpoint.objective, checkpoint.codebook_VD, config, seed=checkpoint.recipe.seed)
    tokens = checkpoint.tokenizer.encode(content)
    euler = checkpoint.objective.composes_by_euler
    scores = evaluator.score(checkpoint.blocks, checkpoint.pooling, tokens, euler=euler)
    per_token = len(content) / len(tokens)
    composed = {"consensus": scores.consensus.to_dict(per_token)}
    if scores.euler is not None:
        composed["euler"] = scores.euler.to_dict(per_token)
    return {
        "composed": composed,
        "blocks": [score.to_dict(per_token) for score in scores.blocks],
        "bytes": len(content),
        "scored_tokens": len(tokens) - 1,
        "stride": checkpoint.recipe.model.context,
    }


def _table(result: dict[str, Any], text: Path) -> Table:
    table = Table(title=f"cross entropy on {text} ({result['scored_tokens']:,} tokens scored)")
    table.add_column("model")
    for column in ("nats/byte", "perplexity", "bits/byte"):
        table.add_column(column, justify="right")
    rows = [(f"composed: {name}", score) for name, score in result["composed"].items()]
    rows += [(f"block {i} alone", score) for i, score in enumerate(result["blocks"])]
    for name, score in rows:
        bits = score["bits_per_byte"]
        table.add_row(name, f"{bits * math.log(2):.4f}", f"{score['ppl']:.2f}", f"{bits:.3f}")
    return table


def generate(
    checkpoint: Annotated[Path | None, typer.Argument(help="A checkpoint folder, without --url.")] = None,
    prompt: Annotated[str, typer.Option("--prompt", help="Text to continue.")] = "",
    url: Annotated[str | None, typer.Option("--url", help="A gateway that serves the model.")] = None,
    key: KeyOption = None,
    mode: Annotated[str | None, typer.Option("--mode", help="With --url: ar, verify or sweep.")] = None,
    passes: Annotated[
        int | None,
        typer.Option("--passes", min=1, help="With --mode sweep: refining steps of each block."),
    ] = None,
    max_bytes: Annotated[int, typer.Option("--max-bytes", min=1, help="Bytes to generate.")] = 256,
    seed: Annotated[int, typer.Option("--seed", min=0, help="The same seed gives the same text.")] = 0,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="0 is greedy.")] = 0.8,
    top_p: Annotated[
        float, typer.Option("--top-p", min=0.01, max=1.0, help="Keep the likeliest tokens of this share.")
    ] = 1.0,
    device: DeviceOption = "auto",
) -> None:
    """Continue a prompt with the composed model."""
    if (checkpoint is None) == (url is None):
        raise UserError(NEEDS_A_SOURCE)
    if not prompt:
        raise UserError("--prompt is empty; give at least one character, for instance --prompt 'The '")
    if url is not None:
        generate_from_url(
            url,
            prompt,
            max_bytes=max_bytes,
            seed=seed,
            temperature=temperature,
            top_p=top_p,
            key=key,
            mode=mode,
            passes=passes,
        )
        return
    if mode is not None or passes is not None:
        raise UserError(
            "--mode and --passes say how a gateway writes, and there is none: leave them out, or start "
            "`blocktrain serve CHECKPOINT` and give its --url"
        )
    assert checkpoint is not None
    loaded = load_checkpoint(checkpoint, find_device(device))
    model = LocalModel(loaded.objective, loaded.blocks, loaded.codebook_VD, loaded.pooling)
    # Bytes all the way: a prompt may hold bytes of another encoding, and a sample half a character.
    text = os.fsencode(prompt)
    tokens = loaded.tokenizer.encode(text).tolist()
    write_now(text)
    for token in generate_tokens(
        model, tokens, max_tokens=max_bytes, seed=seed, temperature=temperature, top_p=top_p
    ):
        write_now(loaded.tokenizer.decode([token]))
    write_now(b"\n")


def write_now(text: bytes) -> None:
    sys.stdout.buffer.write(bytes_for_stdout(text))
    sys.stdout.buffer.flush()
