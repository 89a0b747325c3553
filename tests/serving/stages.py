"""Stages for tests: inside this process, or as real processes that can be killed."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from blocktrain.serving.stage.main import load_blocks
from blocktrain.serving.stage.stage import Stage, StageConfig
from blocktrain.serving.transport import Address, FrameStream, connect
from blocktrain.wire.frame_metadata import Hello, encode_metadata
from blocktrain.wire.frames import Frame, FrameLimits, FrameType, Header, encode_frame
from tests.forked import quick_python
from tests.waiting import PATIENCE_SECONDS


async def start_stage(path: Path, blocks: Sequence[int], **settings: object) -> Stage:
    graphs = settings.pop("graphs", False) is True
    held, shape = load_blocks(path, blocks, torch.device("cpu"), graphs)
    return await Stage.open(held, shape, StageConfig(**settings))  # type: ignore[arg-type]


def tokens_computed(stage: Stage) -> int:
    """Tokens that it has run through its blocks since its start, as its metrics say."""
    found = stage.metrics.registry.get_sample_value("blocktrain_stage_tokens_total")
    assert found is not None
    return int(found)


LIMITS = FrameLimits(payload_bytes=1 << 20)


async def greeted(stage: Stage, client: str = "test") -> FrameStream:
    """A connection that the stage has welcomed."""
    stream = await connect(stage.address, PATIENCE_SECONDS)
    hello = encode_metadata(Hello(client, stage.shape))
    await stream.write(encode_frame(Header(FrameType.HELLO), hello))
    assert (await stream.read(LIMITS)).type == FrameType.WELCOME
    return stream


async def reply(stream: FrameStream, raw: bytes) -> Frame:
    async with asyncio.timeout(PATIENCE_SECONDS):
        await stream.write(raw)
        return await stream.read(LIMITS)


@dataclass
class StageProcess:
    process: subprocess.Popen[str]
    address: Address
    line: str

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(PATIENCE_SECONDS)

    def terminate(self) -> int:
        os.kill(self.process.pid, signal.SIGTERM)
        return self.process.wait(PATIENCE_SECONDS)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()


def spawn(path: Path, blocks: str, *flags: str, listen: str = "127.0.0.1:0") -> subprocess.Popen[str]:
    command = [quick_python(), "-m", "blocktrain", "stage", str(path), "--blocks", blocks, "--listen", listen]
    return subprocess.Popen(
        [*command, "--threads", "1", *flags], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )


def wait_ready(process: subprocess.Popen[str]) -> StageProcess:
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.match(r"stage ready listen=(\S+) blocks=(\S+)", line)
    assert found, f"the stage did not start: {line!r}"
    return StageProcess(process, Address.parse(found[1]), line)
