"""Running a stage as a process: load the blocks, say where they are, serve until SIGTERM, drain."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from prometheus_client import start_http_server

from blocktrain.errors import UserError
from blocktrain.serving.blocks import HeldBlocks
from blocktrain.serving.engine.fingerprint import fingerprint
from blocktrain.serving.stage.stage import Stage, StageConfig
from blocktrain.training.checkpoint import Description, load_checkpoint, read_config

log = logging.getLogger(__name__)


def parse_blocks(text: str) -> list[int]:
    """`0,2` or `0-3` or `0,2-3`, each block once."""
    blocks: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise UserError(f"expected blocks such as 0,1 or 0-3, found {text!r}")
        blocks.update(range(int(first), int(last or first) + 1))
    return sorted(blocks)


def load_stage(path: Path, blocks: Sequence[int], device: torch.device, config: StageConfig) -> Stage:
    """A stage that has not opened its port yet."""
    described = Description.of(read_config(path), path)
    num_blocks = described.recipe.model.blocks
    unknown = [block for block in blocks if not 0 <= block < num_blocks]
    if unknown or not blocks:
        raise UserError(f"{path} has blocks 0 to {num_blocks - 1}, found {list(blocks)}; change --blocks")
    upstream = {one for block in blocks for one in described.setup().objective.upstream(block)}
    if lacking := sorted(upstream - set(blocks)):
        raise UserError(
            f"blocks {list(blocks)} need blocks {lacking} upstream (objective.kind is "
            f"{described.recipe.objective.kind}); give them to the same stage with --blocks"
        )
    checkpoint = load_checkpoint(path, device, only=blocks)
    return Stage(HeldBlocks(checkpoint, blocks), fingerprint(path, checkpoint), config)


async def serve_stage(stage: Stage, *, metrics_port: int | None, announce: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT; `announce` gets the readiness line."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    await stage.start()
    metrics = None
    if metrics_port is not None:
        metrics, _ = start_http_server(metrics_port, stage.config.listen.host, stage.metrics.registry)
    announce(ready_line(stage, None if metrics is None else metrics.server_port))
    await stopped.wait()
    await stage.drain()
    if metrics is not None:
        metrics.shutdown()


def ready_line(stage: Stage, metrics_port: int | None) -> str:
    blocks = ",".join(map(str, stage.blocks))
    line = f"stage ready listen={stage.address} blocks={blocks} model={stage.shape.model_hash[:12]}"
    if stage.config.identity is not None:
        line += f" pin={stage.config.identity.worker_id}"
    return line if metrics_port is None else f"{line} metrics={metrics_port}"


def run_stage(
    path: Path,
    blocks: Sequence[int],
    config: StageConfig,
    *,
    device: torch.device,
    metrics_port: int | None = None,
    threads: int | None = None,
    announce: Callable[[str], None] = print,
) -> None:
    """The verb `stage`: returns when the stage has drained."""
    if threads is not None:
        torch.set_num_threads(threads)
    stage = load_stage(path, blocks, device, config)
    asyncio.run(serve_stage(stage, metrics_port=metrics_port, announce=announce))
