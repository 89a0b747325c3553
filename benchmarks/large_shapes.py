"""Table T8: the litepaper's six serving shapes as serial models on our own stages, random weights.

    python benchmarks/serving.py --table T8 --graphs --json t8.json (one H200)
    python benchmarks/serving.py --table T8 --quick                 (tiny shapes on the CPU)
    python benchmarks/serving.py --table T8 --quick --only 0.040B   (a shape of the table on the CPU)

These are *timing* rows: the weights are random, so the text means nothing. Everything but the weights is what
ships: `Stage` in a process for each group of parts, which hand activations in bf16 on to one another, and
`RemoteEngine`, whose traversal has `rows` positions behind a cached context, as that of `verify` has a draft.
A traversal of CONTEXT rows is the whole text: nothing is cached before it, and it runs as a prompt,
uncaptured.
The wide-area network is a relay process (relay.py) in front of every stage, which holds what passes in either
direction for NETWORK_SECONDS / 4: with three stages a traversal has four hops.

Layers are those of the family `llama`, four to a block as in the litepaper, with a feed-forward width that
gives its number of parameters. What does not fit on the device is one more stage on the processor.
Each shape has --most-seconds for all it does, start-up included. Exits 1 when one cannot run or takes longer
than the litepaper says; the rows of the others are in the report all the same.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from provenance import check_claims, write_report
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
from blocktrain.config import Recipe, resolve_recipe
from blocktrain.data.tokenizer import ByteTokenizer
from blocktrain.ids import CorpusHash
from blocktrain.model.block import Block, num_parameters
from blocktrain.model.llama import LlamaBlock, llama_rotary
from blocktrain.model.objective import Objective
from blocktrain.model.pooling import Pooling
from blocktrain.serving.blocks import HeldBlocks, RowWork
from blocktrain.serving.engine.fanout import FanoutConfig
from blocktrain.serving.engine.link import LinkConfig
from blocktrain.serving.engine.remote import EngineConfig, RemoteEngine, StageSession
from blocktrain.serving.engine.requests import GenerationRequest, GenerationStats
from blocktrain.serving.engine.rows import BestRows, Rows, Traversal
from blocktrain.serving.fingerprint import fingerprint
from blocktrain.serving.stage.main import parse_blocks
from blocktrain.serving.stage.stage import Stage, StageConfig
from blocktrain.serving.transport import Address
from blocktrain.training.checkpoint import Checkpoint, load_checkpoint, write_checkpoint
from blocktrain.wire.frames import ActivationCodec

CONTEXT = 128
LAYERS_PER_BLOCK = 4
HEAD_WIDTH = 128
NETWORK_SECONDS = 0.24
NUM_HOPS = 4
PLAIN = 14
"""Traversals with one row; the first two are not counted."""
HOUR = 3600.0
CACHE_BYTES = 1 << 28
"""Of a stage's first caches. There is one text, and the largest shape leaves 4 GiB of the device free."""
VOCABULARY = ByteTokenizer().vocabulary


@dataclass(frozen=True)
class Shape:
    name: str
    blocks: int
    width: int
    rows: int
    """Tokens of one traversal."""
    litepaper_seconds: float | None
    traversals: int = 12
    on_processor: int = 0
    """Layers, the last ones, that the device has no room for. Then every layer is a part of its own."""

    @property
    def recipe(self) -> Recipe:
        layers = self.blocks * LAYERS_PER_BLOCK
        model = {
            "family": "llama",
            "width": self.width,
            "heads": max(1, self.width // HEAD_WIDTH),
            "blocks": layers if self.on_processor else self.blocks,
            "layers_per_block": 1 if self.on_processor else LAYERS_PER_BLOCK,
            "context": CONTEXT,
            # The published counts fit 50 d^2 for a block of four layers; attention has 4 d^2 of each 12.5.
            "feedforward_width": round(8.5 * self.width / 3 / 64) * 64,
        }
        return resolve_recipe({"name": self.name, "model": model, "objective": {"kind": "serial"}})

    @property
    def groups(self) -> list[tuple[str, str]]:
        """Parts of each stage, and where they are: three on the device, one more on the processor."""
        parts = self.recipe.model.blocks - self.on_processor
        edges = [round(i * parts / 3) for i in range(4)]
        groups = [(f"{a}-{b - 1}", "device") for a, b in zip(edges, edges[1:], strict=False)]
        return groups + [(str(parts + i), "cpu") for i in range(self.on_processor)]


TABLE = (
    Shape("0.040B", 3, 512, 64, 0.245, 40),
    Shape("0.632B", 3, 2048, 128, 0.340, 20),
    Shape("10.08B", 3, 8192, 128, 0.382, 20),
    Shape("50.98B", 3, 18432, 32, 1.314),
    Shape("67.98B", 4, 18432, 16, 1.939),
    Shape("75.80B", 5, 17408, 8, 1.799, on_processor=1),
)
QUICK = (Shape("tiny", 3, 128, 16, None, 3), Shape("tiny5", 5, 256, 8, None, 3, on_processor=1))


# ---- random weights --------------------------------------------------------------------------------------


def write_shape(shape: Shape, folder: Path) -> None:
    """A checkpoint without its blocks, which a gateway of a serial model does not open."""
    parts = shape.recipe.model.blocks
    pooling = Pooling((0.0,) * (parts - 1) + (1.0,))
    write_checkpoint(folder, shape.recipe, CorpusHash("0" * 64), [], torch.empty(0, shape.width), pooling)


def dtype_on(device: torch.device) -> torch.dtype:
    # A processor that multiplies bf16 reads half as much: 8 rows of width 8192 took a sixth of the time.
    own = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if device.type == "cuda" or own else torch.float32


def draw(parameter: Tensor, seed: int) -> None:
    """Small normal numbers. On the processor many threads draw: one takes half a minute for 4 billion."""
    std = parameter.shape[1] ** -0.5

    def fill(numbered: tuple[int, Tensor]) -> None:
        number, piece = numbered
        piece.normal_(0, std, generator=torch.Generator(piece.device).manual_seed(seed + number))

    size = 1 << 24 if parameter.device.type == "cpu" else parameter.numel()
    pieces = torch.split(parameter.detach().view(-1), size)
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        list(threads.map(fill, enumerate(pieces)))


@torch.no_grad()
def random_part(objective: Objective, index: int, device: torch.device) -> Block:
    # Shapes alone at first, then in its place and type: the largest shape is there once, and drawn once.
    torch.set_default_dtype(dtype_on(device))
    with torch.device("meta"):
        shapes = objective.build(index, seed=index + 1)
    torch.set_default_dtype(torch.float32)
    part = shapes.to_empty(device=device)
    assert isinstance(part, LlamaBlock), "the table has no other family"
    # No snapshot has these, so they are computed.
    for own, table in zip((part.rotary_cos, part.rotary_sin), llama_rotary(objective.model), strict=True):
        own.copy_(table)
    for number, parameter in enumerate(part.parameters()):
        # Matrices that begin at zero are drawn too: no kernel may be quick because of zeros.
        if parameter.ndim == 2:
            draw(parameter, ((index + 1) << 32) + (number << 16))
        else:
            parameter.fill_(1.0)
    return part.eval()


def held_parts(
    folder: Path, parts: Sequence[int], device: torch.device, graphs: bool = False
) -> tuple[HeldBlocks, Checkpoint]:
    empty = load_checkpoint(folder, device, only=[])
    blocks = [random_part(empty.objective, index, device) for index in parts]
    checkpoint = Checkpoint(
        empty.recipe,
        empty.corpus_sha256,
        empty.objective,
        blocks,
        empty.codebook_VD,
        empty.pooling,
        empty.tokenizer,
    )
    return HeldBlocks(checkpoint, parts, fixed_shapes=graphs, first_bytes=CACHE_BYTES), checkpoint


# ---- processes ---------------------------------------------------------------------------------------------


async def stage_role(folder: Path, parts: str, device: str, graphs: bool) -> None:
    held, checkpoint = held_parts(folder, parse_blocks(parts), torch.device(device), graphs)
    stage = await Stage.open(held, fingerprint(folder, checkpoint), StageConfig())
    count = sum(num_parameters(block) for block in checkpoint.blocks)
    print(f"ready {stage.address} parameters={count}", flush=True)
    await asyncio.Event().wait()


@contextlib.contextmanager
def started(program: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(Path(__file__).with_name(program)), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def ready_line(process: subprocess.Popen[str], seconds: float) -> tuple[Address, int]:
    """Where the process listens and how many parameters it has, once it says so."""
    assert process.stdout is not None
    # Ended when it is late, so that the line comes or the output is over.
    late = threading.Timer(max(0.0, seconds), process.kill)
    late.start()
    line = process.stdout.readline()
    late.cancel()
    found = re.match(r"ready (\S+)(?: parameters=(\d+))?", line)
    if found is None:
        raise RuntimeError(f"a process did not start: {line!r}, status {process.wait()}")
    return Address.parse(found[1]), int(found[2] or 0)


# ---- measuring ---------------------------------------------------------------------------------------------


async def traverse(session: StageSession, tokens: list[int], num_rows: int) -> tuple[Rows | BestRows, float]:
    began = time.monotonic()
    # More rows than a stage sends the best tokens of travel whole.
    rows = await session.rows(Traversal(tokens, num_rows, whole=num_rows > 1, leads=True))
    return rows, time.monotonic() - began


async def measure(
    folder: Path, shape: Shape, stages: list[Address], said: Callable[[str], None]
) -> dict[str, Any]:
    """Latencies of traversals with all rows and with one, through the same stages."""
    engine = RemoteEngine(
        folder,
        EngineConfig(
            stages=stages,
            activations=ActivationCodec.BF16,
            start_seconds=HOUR,
            # The first traversal loads kernels and may be slow; asked again it would count twice.
            fanout=FanoutConfig(degrade_seconds=HOUR, hedge_seconds=HOUR),
            link=LinkConfig(connect_seconds=HOUR, suspect_seconds=HOUR, dead_seconds=HOUR),
        ),
    )
    await engine.start()
    said("joined")
    text: list[int] = np.random.default_rng(1).integers(0, VOCABULARY, CONTEXT).tolist()
    stats = GenerationStats()
    session = engine.row_source(GenerationRequest(text, 1, deadline_seconds=HOUR), stats)
    try:
        first, _ = await traverse(session, text, shape.rows)
        assert isinstance(first, Rows), "asked for as a whole"
        await traverse(session, text, shape.rows)
        said("warm")
        before = stats.wire_bytes_sent + stats.wire_bytes_received
        many = [(await traverse(session, text, shape.rows))[1] for _ in range(shape.traversals)]
        wire = (stats.wire_bytes_sent + stats.wire_bytes_received - before) // shape.traversals
        said("measured with all rows")
        start = CONTEXT - PLAIN
        plain = [(await traverse(session, text[:end], 1))[1] for end in range(start, CONTEXT)]
    finally:
        await session.close()
        await engine.close()
    assert stats.retries == 0, "a stage was asked twice"
    return {"first_rows": first.log_probs, "many": many, "plain": plain[2:], "wire": wire}


def check_against_one_process(folder: Path, shape: Shape, served: NDArray[np.float64]) -> float:
    """The largest difference of likely log-probs between the stages and one process without a wire."""
    parts = range(shape.recipe.model.blocks)
    held, _ = held_parts(folder, parts, torch.device("cpu"))
    text: list[int] = np.random.default_rng(1).integers(0, VOCABULARY, CONTEXT).tolist()
    work = RowWork(text, shape.rows, (parts[-1],), held.new_caches(parts))
    expected = held.rows([work])[0].rows
    likely = expected > expected.max(axis=-1, keepdims=True) - 3
    difference = float(np.abs(expected - served)[likely].max())
    assert difference < 0.2, f"the served model differs from the local one by {difference:.3f} nats"
    return difference


def run_shape(shape: Shape, device: str, most_seconds: float, graphs: bool) -> dict[str, Any]:
    """Any error, and TimeoutError after `most_seconds`, leaves no process behind."""
    began, hop_seconds = time.monotonic(), NETWORK_SECONDS / NUM_HOPS

    def spent() -> float:
        return time.monotonic() - began

    def said(what: str) -> None:
        print(f"  {shape.name}: {what} after {spent():.1f} s", flush=True)

    async def limited(stages: list[Address]) -> dict[str, Any]:
        async with asyncio.timeout(most_seconds - spent()):
            return await measure(folder, shape, stages, said)

    with contextlib.ExitStack() as running:
        folder = Path(running.enter_context(tempfile.TemporaryDirectory())) / "checkpoint"
        write_shape(shape, folder)
        processes = [
            running.enter_context(
                started(
                    *(Path(__file__).name, "--folder", str(folder), "--parts", parts),
                    *("--device", device if where == "device" else "cpu"),
                    *(["--graphs"] if graphs and where == "device" else []),
                )
            )
            for parts, where in shape.groups
        ]
        told = []
        for process, (parts, where) in zip(processes, shape.groups, strict=True):
            told.append(ready_line(process, most_seconds - spent()))
            said(f"parts {parts} ready on the {where}")
        relays = [
            running.enter_context(started("relay.py", str(address), str(hop_seconds))) for address, _ in told
        ]
        addresses = [ready_line(one, most_seconds - spent())[0] for one in relays]
        build_seconds = spent()
        measured = asyncio.run(limited(addresses))
        if device == "cpu":
            difference = check_against_one_process(folder, shape, measured["first_rows"])
            print(f"  (differs by at most {difference:.4f} nats from the same parts in one process)")
    many, plain = measured["many"], measured["plain"]
    return {
        "shape": shape.name,
        "blocks": shape.blocks,
        "width": shape.width,
        "parameters": sum(count for _, count in told),
        "weights": "random; the text means nothing",
        "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "stages": [f"parts {parts} on the {where}" for parts, where in shape.groups],
        "network_seconds": hop_seconds * (len(shape.groups) + 1),
        "activations": "bf16",
        "graphs": graphs,
        "rows": shape.rows,
        "traversals": len(many),
        "p50_seconds": statistics.median(many),
        "p99_seconds": float(np.percentile(many, 99)),
        "tokens_per_second": shape.rows / statistics.median(many),
        "gateway_bytes_per_traversal": measured["wire"],
        "hop_bytes": 2 * shape.width * shape.rows,
        "ar_p50_seconds": statistics.median(plain),
        "ar_tokens_per_second": 1 / statistics.median(plain),
        "build_seconds": build_seconds,
        "litepaper_seconds": shape.litepaper_seconds,
    }


HEADING = (
    "shape       parameters  width  stages  rows  p50 s   p99 s   paper s  network s  ar p50 s  ar tok/s"
)


def line(row: dict[str, Any]) -> str:
    paper = f"{row['litepaper_seconds']:7.3f}" if row["litepaper_seconds"] else "      -"
    return (
        f"{row['shape']:8s} {row['parameters']:13d}  {row['width']:5d}  {len(row['stages']):6d}  "
        f"{row['rows']:4d}  {row['p50_seconds']:.4f}  {row['p99_seconds']:.4f}  {paper}  "
        f"{row['network_seconds']:9.3f}  {row['ar_p50_seconds']:8.4f}  {row['ar_tokens_per_second']:8.2f}"
    )


def claims_of(rows: Sequence[dict[str, Any]]) -> dict[str, bool]:
    """No row may take longer than the litepaper says; the tiny shapes claim nothing."""
    return {
        f"{row['shape']} takes at most the litepaper's {row['litepaper_seconds']} s": row["p50_seconds"]
        <= row["litepaper_seconds"]
        for row in rows
        if row["litepaper_seconds"] is not None
    }


def run_table(
    *,
    quick: bool,
    json_path: Path | None,
    only: str | None,
    most_seconds: float,
    graphs: bool,
) -> None:
    names = only.split(",") if only is not None else []
    offered = (*TABLE, *QUICK) if names else QUICK if quick else TABLE
    shapes = [shape for shape in offered if not names or shape.name in names]
    if not shapes:
        sys.exit(f"no shape is called {only}; there are {', '.join(one.name for one in (*TABLE, *QUICK))}")
    if not quick and not torch.cuda.is_available():
        sys.exit("the table needs a GPU, and none is here; --quick has small shapes for the processor")
    rows: list[dict[str, Any]] = []
    failed: list[str] = []
    print("random weights: timings only, the text means nothing")
    print(HEADING, flush=True)
    for shape in shapes:
        try:
            rows.append(run_shape(shape, "cpu" if quick else "cuda", most_seconds, graphs))
        except Exception as error:
            # The other shapes still count: a run on a lent machine is not repeated lightly.
            failed.append(f"{shape.name} failed: {type(error).__name__}: {error}")
            print(failed[-1], flush=True)
            continue
        print(line(rows[-1]), flush=True)
        write_report(json_path, "t8", rows)
    # A processor is no device to hold against the litepaper's.
    status = 0 if quick else check_claims(claims_of(rows))
    sys.exit("\n".join(failed) or status)


def main() -> None:
    """A stage of a shape, as `run_shape` starts it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--parts", required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--graphs", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(max(1, torch.get_num_threads() // 2))
    asyncio.run(stage_role(arguments.folder, arguments.parts, arguments.device, arguments.graphs))


if __name__ == "__main__":
    main()
