"""Serving on one device: tokens a second of one stage and its gateway, beside transformers' `generate`.

    python benchmarks/serving_gpu.py --json serving-gpu.json            (one H200)
    python benchmarks/serving_gpu.py --quick                            (tiny shapes on the CPU)

Weights are random, so these are timings and the text means nothing. A stage with all blocks is a process of
its own, on the device; `RemoteEngine` with all its clients runs here, over loopback. Each client writes texts
of TOKENS behind prompts of PROMPT, and a segment is timed from when all have begun (clients.py). transformers
writes as many texts as one batch with a LlamaForCausalLM of as many layers, of the same width and vocabulary,
in fp32 as our stages compute, and in bf16; without it its columns are empty. Only `ar` is compared: random
blocks agree on nothing, so every draft is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from clients import segment
from provenance import write_report
from serving import running_stages

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
from blocktrain.config import Recipe, resolve_recipe
from blocktrain.ids import CorpusHash
from blocktrain.model.pooling import Pooling
from blocktrain.serving.engine.remote import EngineConfig, RemoteEngine
from blocktrain.serving.transport import Address
from blocktrain.training.checkpoint import write_checkpoint
from blocktrain.training.setup import Setup

PROMPT, TOKENS = 64, 64
SHAPES: dict[str, dict[str, Any]] = {
    # As recipes/wikitext-2.toml.
    "wikitext-2": {"width": 384, "heads": 6, "blocks": 4, "layers_per_block": 3},
    # The layers of Llama 3.2 1B; tokens are bytes.
    "llama-1b": {
        "family": "llama",
        "width": 2048,
        "heads": 32,
        "kv_heads": 8,
        "blocks": 1,
        "layers_per_block": 16,
        "feedforward_width": 8192,
    },
    "tiny": {"width": 64, "heads": 2, "blocks": 2, "layers_per_block": 1},
    "tiny-llama": {"family": "llama", "width": 64, "heads": 2, "blocks": 1, "layers_per_block": 2},
}
QUICK = ("tiny", "tiny-llama")


def write_random(recipe: Recipe, folder: Path, device: torch.device) -> None:
    """A checkpoint of random blocks."""
    setup, blocks = Setup.of(recipe), []
    generator = torch.Generator(device).manual_seed(1)
    for index in range(recipe.model.blocks):
        block = setup.initial(index).to(device)
        for parameter in block.parameters():
            # What begins at zero is drawn too: no kernel may be quick because of zeros.
            if parameter.ndim == 2 and not parameter.any():
                torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5, generator=generator)
        blocks.append({name: tensor.detach().cpu() for name, tensor in block.state_dict().items()})
    pooling = Pooling((1 / recipe.model.blocks,) * recipe.model.blocks)
    write_checkpoint(folder, recipe, CorpusHash("0" * 64), blocks, setup.codebook().table, pooling)


async def ours(
    checkpoint: Path, address: str, counts: list[int], seconds: float, prompts: list[list[int]]
) -> list[float]:
    engine = RemoteEngine(checkpoint, EngineConfig(stages=[Address.parse(address)], start_seconds=60))
    await engine.start()
    found = []
    for count in counts:
        await segment(engine, "ar", count, 0.5, prompts, TOKENS, {})
        found.append(await segment(engine, "ar", count, seconds, prompts, TOKENS, {}))
    await engine.close()
    return found


def theirs(
    recipe: Recipe, device: torch.device, dtype: torch.dtype, counts: list[int], prompts: list[list[int]]
) -> list[float] | None:
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        return None
    model = recipe.model
    heads, inner = model.kv_heads or model.heads, model.feedforward_width or model.feedforward * model.width
    config = LlamaConfig(
        vocab_size=Setup.of(recipe).vocabulary,
        hidden_size=model.width,
        num_attention_heads=model.heads,
        num_key_value_heads=heads,
        num_hidden_layers=model.blocks * model.layers_per_block,
        intermediate_size=inner,
        max_position_embeddings=model.context,
    )
    torch.manual_seed(1)
    with device:
        network: Any = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    network = network.to(dtype).eval()
    found = []
    for count in counts:
        ids = torch.tensor([prompts[i % len(prompts)] for i in range(count)], device=device)
        seconds = []
        for _ in range(3):
            began = time.monotonic()
            # A byte model has no token that ends a text; without `eos_token_id` all texts are TOKENS long.
            network.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=TOKENS,
                min_new_tokens=TOKENS,
                do_sample=True,
                pad_token_id=0,
            )
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.monotonic() - began)
        found.append(count * TOKENS / min(seconds))
    return found


def run_shape(name: str, device: torch.device, counts: list[int], seconds: float) -> list[dict[str, Any]]:
    recipe = resolve_recipe({"name": name, "model": {"context": 512, **SHAPES[name]}})
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(0, 256, (max(counts), PROMPT), generator=generator).tolist()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "checkpoint"
        write_random(recipe, checkpoint, device)
        blocks = f"0-{recipe.model.blocks - 1}"
        with running_stages(None, checkpoint, [blocks], str(device)) as addresses:
            mine = asyncio.run(ours(checkpoint, addresses[0], counts, seconds, prompts))
    rows: list[dict[str, Any]] = [
        {"shape": name, "clients": n, "ours": speed} for n, speed in zip(counts, mine, strict=True)
    ]
    for dtype in (torch.float32, torch.bfloat16):
        label = str(dtype).removeprefix("torch.")
        for row, speed in zip(rows, theirs(recipe, device, dtype, counts, prompts) or [], strict=False):
            row |= {f"transformers_{label}": speed, f"ratio_{label}": row["ours"] / speed}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shapes", default="wikitext-2,llama-1b")
    parser.add_argument("--clients", default="1,8,64")
    parser.add_argument("--seconds", type=float, default=4.0, help="of a segment")
    parser.add_argument("--quick", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() and not arguments.quick else "cpu")
    counts = [int(part) for part in arguments.clients.split(",")]
    rows: list[dict[str, Any]] = []
    print("random weights: timings only.  tokens/s:  ours  transformers fp32 (ratio)  bf16 (ratio)")
    for name in QUICK if arguments.quick else arguments.shapes.split(","):
        for row in run_shape(name, device, counts, arguments.seconds):
            rows.append(row)
            beside = [
                f"{row[f'transformers_{one}']:9.1f} ({row[f'ratio_{one}']:.2f})"
                for one in ("float32", "bfloat16")
                if f"ratio_{one}" in row
            ]
            print(
                f"{name:10s}  clients {row['clients']:3d}  {row['ours']:9.1f}  {'  '.join(beside)}",
                flush=True,
            )
        write_report(arguments.json, "serving-gpu", rows)


if __name__ == "__main__":
    main()
