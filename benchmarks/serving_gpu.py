"""Serving on one device: tokens a second of one stage and its gateway, beside transformers' `generate`.

    python benchmarks/serving_gpu.py --json serving-gpu.json            (one H200)
    python benchmarks/serving_gpu.py --quick                            (tiny shapes on the CPU)

    python benchmarks/serving_gpu.py --check                            (passes of the blocks alone)

Weights are random, so these are timings and the text means nothing. A stage with all blocks is a process of
its own, on the device; `RemoteEngine` with all its clients runs here, over loopback. Each client writes texts
of TOKENS behind prompts of PROMPT, and a segment is timed from when all have begun (clients.py). Two stages,
one that replays captured passes (`ours`) and one that does not, take turns and must write the same texts.
transformers writes as many texts as one batch with a LlamaForCausalLM of as many layers, of the same width
and vocabulary, in fp32 as our stages compute, and in bf16. Only `ar` is compared: random blocks agree on
nothing, so every draft is wrong. What fails is said, the other numbers are in the report, and the program
exits with 1.

`--check` has no stages and no clients: milliseconds of one pass with a new token of each text, captured and
not, those of the first one with its capture, the largest difference between their log-probs, and whether the
most likely tokens are the same.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from clients import segment
from numpy.typing import NDArray
from provenance import check_claims, write_report
from serving import running_stages

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
from blocktrain.config import Recipe, resolve_recipe
from blocktrain.ids import CorpusHash
from blocktrain.model.pooling import Pooling
from blocktrain.serving.blocks import HeldBlocks, RowWork
from blocktrain.serving.engine.remote import EngineConfig, RemoteEngine
from blocktrain.serving.transport import Address
from blocktrain.training.checkpoint import Checkpoint, load_checkpoint, write_checkpoint
from blocktrain.training.setup import Setup

PROMPT, TOKENS = 64, 64
CHECKED = 24
"""Passes that `--check` times."""
SEGMENT_SECONDS = 30
"""What a number of clients may take beside the time that is measured."""
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
        if recipe.model.family == "llama":
            # Drawn on the device: a billion numbers take ten seconds on one core.
            with torch.device("meta"):
                block = setup.initial(index)
            block = block.to_empty(device=device)
            for parameter in block.parameters():
                torch.nn.init.ones_(parameter)
        else:
            block = setup.initial(index).to(device)
        for parameter in block.parameters():
            # What begins at zero is drawn too: no kernel may be quick because of zeros.
            if parameter.ndim == 2 and (recipe.model.family == "llama" or not parameter.any()):
                torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5, generator=generator)
        blocks.append({name: tensor.detach().cpu() for name, tensor in block.state_dict().items()})
    pooling = Pooling((1 / recipe.model.blocks,) * recipe.model.blocks)
    write_checkpoint(folder, recipe, CorpusHash("0" * 64), blocks, setup.codebook().table, pooling)


def pass_times(loaded: Checkpoint, count: int, prompts: list[list[int]]) -> dict[str, Any]:
    blocks = tuple(range(len(loaded.blocks)))
    found: dict[bool, tuple[list[float], list[NDArray[Any]], list[list[int]]]] = {}
    for fixed in (False, True):
        held = HeldBlocks(loaded, blocks, fixed_shapes=fixed)
        texts = [list(prompts[i % len(prompts)]) for i in range(count)]
        caches = [held.new_caches(blocks) for _ in texts]
        # The whole prompts, then one token of each text; the first pass of that kind is not timed.
        starts, said, spent = [0] * count, [], []
        for _ in range(CHECKED + 2):
            works = [
                RowWork(text[start:], 1, blocks, cache, start)
                for text, start, cache in zip(texts, starts, caches, strict=True)
            ]
            began = time.monotonic()
            log_probs = np.concatenate([one.rows for one in held.rows(works)])
            spent.append(1000 * (time.monotonic() - began))
            said.append(log_probs)
            starts = [len(text) for text in texts]
            # What the passes in any shape chose, so that both see one text.
            chosen = (said if not fixed else found[False][1])[len(said) - 1].argmax(axis=1)
            texts = [[*text, int(token)] for text, token in zip(texts, chosen, strict=True)]
        own = [[int(token) for token in log_probs.argmax(axis=1)] for log_probs in said]
        found[fixed] = spent, said, own
    free, captured = found[False], found[True]
    return {
        "free_ms": statistics.median(free[0][2:]),
        "captured_ms": statistics.median(captured[0][2:]),
        "capture_ms": captured[0][1],
        "difference": max(float(abs(a - b).max()) for a, b in zip(free[1], captured[1], strict=True)),
        "same": free[2] == captured[2],
    }


class Table:
    """The rows so far, in the report after each number, and what failed."""

    def __init__(self, json_path: Path | None) -> None:
        self.json_path = json_path
        self.rows: list[dict[str, Any]] = []
        self.failed: list[str] = []
        self.began = time.monotonic()

    def add(self, shape: str, clients: int, **numbers: Any) -> None:
        row = next((r for r in self.rows if (r["shape"], r["clients"]) == (shape, clients)), None)
        if row is None:
            row = {"shape": shape, "clients": clients}
            self.rows.append(row)
        row |= numbers
        said = "  ".join(f"{name} {value:.6g}" for name, value in numbers.items())
        self._say(f"{shape:10s}  clients {clients:3d}  {said}")
        write_report(self.json_path, "serving-gpu", self.rows)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Whatever goes wrong inside is said, and the rest goes on: a lent machine is not lent again."""
        try:
            yield
        except Exception as error:
            self.failed.append(f"{name} failed: {type(error).__name__}: {error}")
            self._say(self.failed[-1])

    def _say(self, text: str) -> None:
        print(f"{time.monotonic() - self.began:6.1f} s  {text}", flush=True)


async def ours(
    name: str,
    label: str,
    checkpoint: Path,
    address: str,
    counts: list[int],
    seconds: float,
    prompts: list[list[int]],
    table: Table,
) -> dict[int, dict[int, list[int]]]:
    """Adds numbers under `label` and gives the texts for each number of clients."""
    engine = RemoteEngine(checkpoint, EngineConfig(stages=[Address.parse(address)], start_seconds=60))
    await engine.start()
    texts: dict[int, dict[int, list[int]]] = {}
    for count in counts:
        with table.part(f"{name}, {count} clients, {label}"):
            # A stage that fails is asked again and again; the other numbers are worth more.
            async with asyncio.timeout(SEGMENT_SECONDS + seconds):
                known: dict[int, list[int]] = {}
                await segment(engine, "ar", count, 0.3, prompts, TOKENS, known)
                speed = await segment(engine, "ar", count, seconds, prompts, TOKENS, known)
            table.add(name, count, **{label: speed})
            texts[count] = known
    await engine.close()
    return texts


def theirs(
    recipe: Recipe, device: torch.device, dtype: torch.dtype, counts: list[int], prompts: list[list[int]]
) -> Iterator[float]:
    """Tokens a second of transformers for each number of texts."""
    from transformers import LlamaConfig, LlamaForCausalLM

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
    # Typed in some versions of transformers and not in others.
    build: Any = LlamaForCausalLM
    with device:
        network = build(config).to(dtype).eval()
    for count in counts:
        ids = torch.tensor([prompts[i % len(prompts)] for i in range(count)], device=device)
        seconds = []
        for tokens in (TOKENS // 8, TOKENS, TOKENS):
            began = time.monotonic()
            # A byte model has no token that ends a text; without `eos_token_id` all texts are TOKENS long.
            network.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=True,
                pad_token_id=0,
            )
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.monotonic() - began)
        yield count * TOKENS / min(seconds[1:])


def run_shape(
    name: str, device: torch.device, counts: list[int], seconds: float, check: bool, table: Table
) -> None:
    recipe = resolve_recipe({"name": name, "model": {"context": 512, **SHAPES[name]}})
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(0, 256, (max(counts), PROMPT), generator=generator).tolist()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "checkpoint"
        write_random(recipe, checkpoint, device)
        if check:
            loaded = load_checkpoint(checkpoint, device)
            for count in counts:
                with table.part(f"{name}, {count} clients, one pass"):
                    table.add(name, count, **pass_times(loaded, count, prompts))
            return
        blocks = f"0-{recipe.model.blocks - 1}"
        texts = []
        with running_stages(None, checkpoint, [blocks] * 2, str(device), with_graphs=[1]) as addresses:
            for label, address in zip(("without_graphs", "ours"), addresses, strict=True):
                with table.part(f"{name}, {label}"):
                    asked = ours(name, label, checkpoint, address, counts, seconds, prompts, table)
                    texts.append(asyncio.run(asked))
        for count in counts if len(texts) == 2 else []:
            free, captured = (one.get(count, {}) for one in texts)
            pairs = [(free[seed], captured[seed]) for seed in free.keys() & captured.keys()]
            same = bool(pairs) and all(one[: len(two)] == two[: len(one)] for one, two in pairs)
            table.add(name, count, same_texts=same)
    for dtype in (torch.float32, torch.bfloat16):
        label = str(dtype).removeprefix("torch.")
        with table.part(f"{name}, transformers in {label}"):
            for count, speed in zip(counts, theirs(recipe, device, dtype, counts, prompts), strict=True):
                row = next(r for r in table.rows if (r["shape"], r["clients"]) == (name, count))
                ratio = {f"ratio_{label}": row["ours"] / speed} if "ours" in row else {}
                table.add(name, count, **{f"transformers_{label}": speed}, **ratio)
        if device.type == "cuda":
            torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shapes", default="wikitext-2,llama-1b")
    parser.add_argument("--clients", default="1,8,64")
    parser.add_argument("--seconds", type=float, default=4.0, help="of a segment")
    parser.add_argument("--quick", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--check", action="store_true", help="passes of the blocks alone")
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() and not arguments.quick else "cpu")
    counts = [int(part) for part in arguments.clients.split(",")]
    table = Table(arguments.json)
    print("milliseconds of one pass" if arguments.check else "tokens a second of all clients together")
    for name in QUICK if arguments.quick else arguments.shapes.split(","):
        with table.part(name):
            run_shape(name, device, counts, arguments.seconds, arguments.check, table)
    claims = {"captured passes write the same texts": bool(table.rows) and all(map(same_text, table.rows))}
    sys.exit("\n".join(table.failed) or check_claims(claims))


def same_text(row: dict[str, Any]) -> bool:
    return bool(row.get("same") or row.get("same_texts"))


if __name__ == "__main__":
    main()
