"""Is `verify` the same text as `ar`? Many prompts, every draft length, two temperatures, stages killed.

    python benchmarks/serving.py CHECKPOINT --check-lossless --text valid.txt --prompts 200 --kills 20

`ar` writes first, over stages that nobody touches. Then `verify` writes the same prompts again, each with
several draft lengths between 0 and 32 or adapted ones, with several traversals under way, while the stages,
two for each half of the blocks, are killed with SIGKILL one after another and started again; again and again,
until as many were killed as asked for. Every text must be the same, byte by byte. Even prompts have
temperature 1, odd ones 0. Also prints bytes of text per traversal at the draft lengths that a gateway would
use, from the same run. A run in which no stage was killed, or none that was writing a text, shows nothing and
fails, and so does one whose killer ended (a stage that does not come back).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blocktrain.serving.engine.remote import EngineConfig, RemoteEngine
from blocktrain.serving.engine.requests import GenerationRequest, GenerationStats, Mode
from blocktrain.serving.transport import Address

DRAFTS_PER_PROMPT = 3
AT_ONCE = 8
KILL_SECONDS = 3.0


@dataclass
class StageProcess:
    checkpoint: Path
    blocks: str
    port: int
    process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        command = [sys.executable, str(Path(__file__).with_name("serving.py")), str(self.checkpoint)]
        command += ["--role", "stage", "--blocks", self.blocks, "--listen", f"127.0.0.1:{self.port}"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def await_ready(self) -> None:
        assert self.process is not None
        assert self.process.stdout is not None
        assert self.process.stdout.readline().startswith("stage ready"), "a stage did not start"

    def kill(self) -> None:
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@dataclass
class Tally:
    texts: int = 0
    bytes: int = 0
    kills: int = 0
    retries: int = 0
    exact_passes: int = 0
    by_draft: dict[int | None, list[int]] = field(default_factory=dict)
    """Draft length, None for adapted ones -> text bytes and traversals."""

    def add(self, draft: int | None, text: Sequence[int], stats: GenerationStats) -> None:
        self.texts += 1
        self.bytes += len(text)
        self.retries += stats.retries
        self.exact_passes += stats.exact_passes
        entry = self.by_draft.setdefault(draft, [0, 0])
        entry[0] += len(text)
        entry[1] += stats.traversals


class Check:
    def __init__(self, engine: RemoteEngine, prompts: list[list[int]], tokens: int) -> None:
        self.engine, self.prompts, self.tokens = engine, prompts, tokens
        self.gate = asyncio.Semaphore(AT_ONCE)
        self.tally = Tally()

    async def write(self, number: int, mode: Mode, draft: int | None) -> list[int]:
        request = GenerationRequest(
            self.prompts[number],
            self.tokens,
            seed=number,
            temperature=float((number + 1) % 2),
            mode=mode,
            draft_tokens=draft,
            deadline_seconds=600,
        )
        async with self.gate:
            generation = self.engine.generate(request)
            text = [token async for chunk in generation for token in chunk.tokens]
        if generation.stats.degraded_blocks:
            raise RuntimeError(f"prompt {number} lost blocks {generation.stats.degraded_blocks}; no spare?")
        if mode == "verify":
            self.tally.add(draft, text, generation.stats)
        return text

    async def all(self, mode: Mode, drafts: list[int | None]) -> list[list[int]]:
        writing = (self.write(i, mode, draft) for i, draft in enumerate(drafts))
        return list(await asyncio.gather(*writing))


def draft_lengths(num_prompts: int, turn: int) -> list[int | None]:
    """Every fourth adapted, the others every length from 0 to 32 about equally often, in another order each
    turn."""
    lengths: list[int | None] = [(i * 7 + turn * 11) % 33 if i % 4 else None for i in range(num_prompts)]
    random.Random(turn).shuffle(lengths)
    return lengths


async def keep_killing(stages: list[StageProcess], tally: Tally) -> None:
    """Kill one stage, start it again, then the next."""
    turn = 0
    while True:
        await asyncio.sleep(KILL_SECONDS)
        victim = stages[turn % len(stages)]
        victim.kill()
        tally.kills += 1
        turn += 1
        victim.start()
        await asyncio.to_thread(victim.await_ready)


async def check(
    checkpoint: Path, stages: list[StageProcess], prompts: list[list[int]], tokens: int, kills: int
) -> Tally:
    addresses = [Address("127.0.0.1", stage.port) for stage in stages]
    engine = RemoteEngine(checkpoint, EngineConfig(stages=addresses))
    await engine.start()
    run = Check(engine, prompts, tokens)
    began = time.monotonic()
    expected = await run.all("ar", [None] * len(prompts))
    print(f"ar: {len(prompts)} texts of {tokens} bytes in {time.monotonic() - began:.0f} s", flush=True)
    killing = asyncio.create_task(keep_killing(stages, run.tally))
    try:
        turn = 0
        while turn < DRAFTS_PER_PROMPT or run.tally.kills < kills:
            found = await run.all("verify", draft_lengths(len(prompts), turn))
            different = [i for i, text in enumerate(found) if text != expected[i]]
            assert not different, f"prompts {different[:10]} got another text from verify"
            print(f"verify, turn {turn}: the same {len(found)} texts; {run.tally.kills} kills", flush=True)
            if killing.done():
                killing.result()  # raises what ended it
            turn += 1
    finally:
        killing.cancel()
        await asyncio.gather(killing, return_exceptions=True)
        await engine.close()
    assert run.tally.kills > 0, "no stage was killed: more prompts or tokens are needed to show anything"
    assert run.tally.retries > 0, "no text was under way at any stage that was killed: that shows nothing"
    return run.tally


def report(tally: Tally) -> dict[str, Any]:
    groups = {
        f"K {low:2d} to {high:2d}": range(low, high + 1) for low, high in ((0, 0), (1, 8), (9, 16), (17, 32))
    }
    for name, lengths in {**groups, "adapted": [None]}.items():
        part = [entry for draft, entry in tally.by_draft.items() if draft in lengths]
        size, traversals = sum(entry[0] for entry in part), sum(entry[1] for entry in part)
        print(f"  {name}: {size / max(1, traversals):.2f} text bytes per traversal")
    print(
        f"lossless: {tally.texts} texts, {tally.bytes} bytes, {len(tally.by_draft)} draft lengths, "
        f"{tally.kills} kills, {tally.retries} retries, {tally.exact_passes} exact passes"
    )
    return {"texts": tally.texts, "bytes": tally.bytes, "kills": tally.kills, "retries": tally.retries}


def run_check(arguments: argparse.Namespace, prompts: list[list[int]], num_blocks: int) -> dict[str, Any]:
    half = max(1, num_blocks // 2)
    # Each part twice, and all are killed in turn. One spare that held all blocks got every text, since it is
    # as near as two stages together, and 20 kills of the others met none.
    parts = [f"0-{half - 1}", f"{half}-{num_blocks - 1}"] * 2
    stages = [StageProcess(arguments.checkpoint, blocks, free_port()) for blocks in parts]
    for stage in stages:
        stage.start()
    try:
        for stage in stages:
            stage.await_ready()
        running = check(arguments.checkpoint, stages, prompts, arguments.tokens, arguments.kills)
        tally = asyncio.run(running)
    finally:
        for stage in stages:
            stage.kill()
    return report(tally)
