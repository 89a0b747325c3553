"""Running a stage as a process: load the blocks, say where they are, serve until SIGTERM, drain."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from prometheus_client import start_http_server

from blocktrain.errors import UserError
from blocktrain.serving.blocks import HeldBlocks
from blocktrain.serving.fingerprint import fingerprint
from blocktrain.serving.stage.stage import Stage, StageConfig
from blocktrain.serving.versions import current_checkpoint, watch
from blocktrain.starting import keep_what_is_loaded
from blocktrain.training.checkpoint import Description, load_checkpoint, read_config
from blocktrain.wire.frame_metadata import ModelShape


def parse_blocks(text: str) -> list[int]:
    """`0,2` or `0-3` or `0,2-3`, each block once."""
    blocks: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise UserError(f"expected blocks such as 0,1 or 0-3, found {text!r}")
        blocks.update(range(int(first), int(last or first) + 1))
    return sorted(blocks)


def load_blocks(
    path: Path, blocks: Sequence[int], device: torch.device, graphs: bool = False
) -> tuple[HeldBlocks, ModelShape]:
    """What a stage serves, or UserError where the checkpoint does not have it."""
    described = Description.of(read_config(path), path)
    num_blocks = described.recipe.model.blocks
    unknown = [block for block in blocks if not 0 <= block < num_blocks]
    if unknown or not blocks:
        raise UserError(f"{path} has blocks 0 to {num_blocks - 1}, found {list(blocks)}; change --blocks")
    objective = described.setup().objective
    upstream = {one for block in blocks for one in objective.upstream(block)}
    lacking = sorted(upstream - set(blocks))
    if objective.is_serial and list(blocks) != list(range(blocks[0], blocks[-1] + 1)):
        raise UserError(
            f"{path} is a serial model, of which a stage holds neighbouring parts, found {list(blocks)}; "
            "change --blocks"
        )
    # Parts of a serial model get their features from the stage before, whichever that is.
    if lacking and not objective.is_serial:
        raise UserError(
            f"blocks {list(blocks)} need blocks {lacking} upstream (objective.kind is "
            f"{described.recipe.objective.kind}); give them to the same stage with --blocks"
        )
    checkpoint = load_checkpoint(path, device, only=blocks)
    return HeldBlocks(checkpoint, blocks, fixed_shapes=graphs), fingerprint(path, checkpoint)


async def follow(
    stage: Stage, folder: Path, served: Path, device: torch.device, graphs: bool = False
) -> None:
    """Without end: serve what the folder's `current` names too (`serving.versions`)."""

    async def take_over(checkpoint: Path) -> None:
        # In a thread: what is served goes on while the new blocks are loaded.
        held, shape = await asyncio.to_thread(load_blocks, checkpoint, stage.blocks, device, graphs)
        await stage.adopt(held, shape)

    await watch(lambda: current_checkpoint(folder), served, take_over)


def run_stage(
    path: Path,
    blocks: Sequence[int],
    config: StageConfig,
    *,
    device: torch.device,
    metrics_port: int | None = None,
    threads: int | None = None,
    graphs: bool = False,
    announce: Callable[[str], None] = print,
) -> None:
    """The verb `stage`: serves until SIGTERM or SIGINT and returns when the stage has drained; `announce`
    gets the readiness line. `graphs`: passes of fixed shapes, which a GPU captures and replays."""
    if threads is not None:
        torch.set_num_threads(threads)
    served = current_checkpoint(path)
    held, shape = load_blocks(served, blocks, device, graphs)

    async def serve() -> None:
        stopped = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)
        stage = await Stage.open(held, shape, config)
        numbers = ",".join(map(str, stage.blocks))
        line = f"stage ready listen={stage.address} blocks={numbers} model={shape.model_hash[:12]}"
        if config.identity is not None:
            line += f" pin={config.identity.worker_id}"
        # A port of its own for numbers: the serving port speaks frames, and may be closed to Prometheus.
        metrics = None
        if metrics_port is not None:
            metrics, _ = start_http_server(metrics_port, config.listen.host, stage.metrics.registry)
            line += f" metrics={metrics.server_port}"
        announce(line)
        following = asyncio.create_task(follow(stage, path, served, device, graphs))
        await stopped.wait()
        following.cancel()
        await stage.drain()
        if metrics is not None:
            metrics.shutdown()

    keep_what_is_loaded()
    asyncio.run(serve())
