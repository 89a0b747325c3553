"""Many clients at once: bytes of text a second in `verify` against `ar`, and one client after a burst.

    python benchmarks/serving.py CHECKPOINT --clients 1,8,32,64 --rtt 0,100
    python benchmarks/serving.py --cost --clients 1,8,64

One engine for each round-trip time, in a process of its own, with all its clients; stages are processes too,
behind emulated links (none at RTT 0: the relay would take part of a core). Modes take turns, segment by
segment, so that what else the machine does meets both alike, and the number that counts is their ratio.
Each client writes one text after another with a seed of its own; texts of the two modes are compared byte by
byte. The last rows are one client in `verify` before and after bursts of as many as the largest number.

`--cost` counts processor time and no speed, so other programs matter less: milliseconds of gateway and stage,
each a process, for a token that is streamed over HTTP. The model is random and so small that its arithmetic
is nothing; what is left is what a gateway and a stage do for every token of any model. A text of PROMPT and
TOKENS for each client goes first and is not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, cast

from blocktrain.starting import keep_what_is_loaded

MODES = ("ar", "verify")
LEAST_RATIO = 1.0
"""`verify` is never slower, whatever the number of clients."""
LEAST_RATIO_AT = {8: 2.0}
LEAST_AFTER_BURST = 0.9
MOST_COST = 0.9
"""Of the processor time of a token, with the most clients against the fewest but one."""
PROMPT, TOKENS = 32, 48
BURSTS = 3
WARM_TOKENS = 8
"""A segment is timed from when every client has so many: before, prompts are read, here and by the stages."""


async def write_on(
    engine: Any,
    mode: str,
    client: int,
    prompts: list[list[int]],
    tokens: int,
    texts: dict[int, list[int]],
    written: list[int],
) -> None:
    """One client: a text after another until cancelled; `written` has the bytes of each client."""
    from blocktrain.serving.engine.requests import GenerationRequest, Mode

    number = 0
    try:
        while True:
            # The texts of a client are the same in every segment, so that modes can be compared.
            seed = 1000 * client + number
            prompt = prompts[seed % len(prompts)]
            number += 1
            request = GenerationRequest(
                prompt, tokens, seed=seed, mode=cast(Mode, mode), deadline_seconds=600
            )
            generation, text = engine.generate(request), []
            try:
                async for chunk in generation:
                    written[client] += len(chunk.tokens)
                    text += chunk.tokens
            finally:
                await generation.aclose()
                known = texts.setdefault(seed, [])
                shared = min(len(known), len(text))
                assert known[:shared] == text[:shared], "modes wrote different texts"
                texts[seed] = max(known, text, key=len)
    except asyncio.CancelledError:
        return


async def segment(
    engine: Any,
    mode: str,
    clients: int,
    seconds: float,
    prompts: list[list[int]],
    tokens: int,
    texts: dict[int, list[int]],
) -> float:
    """Bytes a second of all clients together; a token is a byte here."""
    written = [0] * clients
    writing = [
        asyncio.create_task(write_on(engine, mode, client, prompts, tokens, texts, written))
        for client in range(clients)
    ]
    while min(written) < WARM_TOKENS and not any(task.done() for task in writing):
        await asyncio.sleep(0.02)
    began, before = time.monotonic(), sum(written)
    await asyncio.wait(writing, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    speed = (sum(written) - before) / (time.monotonic() - began)
    for task in writing:
        task.cancel()
    await asyncio.gather(*writing)
    return speed


async def load_role(arguments: argparse.Namespace, prompts: list[list[int]]) -> None:
    """Rows of one round-trip time, as JSON on the last line."""
    import torch

    from blocktrain.serving.engine.remote import EngineConfig, RemoteEngine
    from blocktrain.serving.transport import Address

    torch.set_num_threads(1)
    addresses = [Address.parse(text) for text in arguments.addresses.split(",")]
    engine = RemoteEngine(arguments.checkpoint, EngineConfig(stages=addresses))
    await engine.start()
    keep_what_is_loaded()  # as a gateway does
    texts: dict[int, list[int]] = {}
    counts = [int(part) for part in arguments.clients.split(",")]

    async def one(mode: str, clients: int, seconds: float = arguments.seconds) -> float:
        return await segment(engine, mode, clients, seconds, prompts, arguments.tokens, texts)

    rows: list[dict[str, Any]] = []
    for clients in counts:
        for mode in MODES:
            await one(mode, clients, 1.0)
        speeds: dict[str, list[float]] = {mode: [] for mode in MODES}
        for i in range(arguments.segments):
            for mode in MODES if i % 2 == 0 else MODES[::-1]:
                speeds[mode].append(await one(mode, clients))
        means = {mode: statistics.mean(found) for mode, found in speeds.items()}
        rows.append({"clients": clients, **means, "ratio": means["verify"] / means["ar"], "segments": speeds})
    before, after = [], []
    for _ in range(BURSTS):
        before.append(await one("verify", 1))
        await one("verify", max(counts))
        after.append(await one("verify", 1))
    ratio = statistics.mean(after) / statistics.mean(before)
    rows.append({"burst": max(counts), "before": before, "after": after, "ratio": ratio})
    await engine.close()
    print(json.dumps(rows))


def line(row: dict[str, Any]) -> str:
    if "burst" in row:
        before, after = (statistics.mean(row[name]) for name in ("before", "after"))
        burst = f"one client, before and after {BURSTS} bursts of {row['burst']}"
        return f"{row['rtt_ms']:6d}  {burst}: {before:.1f} {after:.1f} bytes/s, {row['ratio']:.2f}"
    speeds = f"{row['ar']:11.1f}  {row['verify']:15.1f}  {row['ratio']:5.2f}"
    return f"{row['rtt_ms']:6d}  {row['clients']:7d}  {speeds}"


async def stream_texts(url: str, mode: str, clients: int, texts: int) -> None:
    """So many clients at once, each with one text after another."""
    host, port = url.removeprefix("http://").split(":")

    async def one(client: int) -> None:
        for number in range(texts):
            prompt = [(7 * client + 13 * number + 3 * i) % 256 for i in range(PROMPT)]
            asked = {"model": "cost", "prompt": prompt, "max_tokens": TOKENS, "stream": True, "mode": mode}
            body = json.dumps({**asked, "seed": 100 * client + number}).encode()
            reader, writer = await asyncio.open_connection(host, int(port))
            head = "POST /v1/completions HTTP/1.1\r\nhost: gateway\r\nconnection: close\r\n"
            head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            answer = await reader.read()
            assert b"data: [DONE]" in answer, answer[:400]
            writer.close()

    await asyncio.gather(*(one(client) for client in range(clients)))


def processor_seconds(process: subprocess.Popen[str]) -> float:
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run_cost(counts: list[int], texts: int) -> list[dict[str, Any]]:
    import torch
    from serving_gpu import write_random

    from blocktrain.config import resolve_recipe

    shape = {"context": 256, "width": 32, "heads": 2, "blocks": 4, "layers_per_block": 1}
    running: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> str:
        """A program of ours; gives its address."""
        command = [sys.executable, "-m", "blocktrain", *arguments]
        # One thread: more would spin for the little arithmetic there is.
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        running.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment))
        said = running[-1].stdout
        assert said is not None
        ready = re.search(r"(?:listen|url)=(\S+)", said.readline())
        assert ready is not None, f"{arguments[0]} did not start"
        return ready[1]

    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = f"{folder}/cost"
        recipe = resolve_recipe({"name": "cost", "model": shape})
        write_random(recipe, Path(checkpoint), torch.device("cpu"))
        try:
            address = start("stage", checkpoint, "--blocks", "0-3", "--listen", "127.0.0.1:0")
            url = start("gateway", checkpoint, "--stages", address, "--port", "0")
            print(COST_HEADER)
            for mode in MODES:
                for clients in counts:
                    asyncio.run(stream_texts(url, mode, clients, 1))
                    before = [processor_seconds(one) for one in running]
                    asyncio.run(stream_texts(url, mode, clients, texts))
                    spent = [processor_seconds(one) - was for one, was in zip(running, before, strict=True)]
                    stage, gateway = (1000 * one / (clients * texts * TOKENS) for one in spent)
                    row = {"mode": mode, "clients": clients, "gateway_ms": gateway, "stage_ms": stage}
                    rows.append({**row, "total_ms": gateway + stage})
                    print(cost_line(rows[-1]), flush=True)
        finally:
            for process in running:
                process.terminate()
            for process in running:
                process.wait()
    return rows


COST_HEADER = "mode    clients  gateway, ms/token  stage, ms/token  both"


def cost_line(row: dict[str, Any]) -> str:
    parts = f"{row['gateway_ms']:17.3f}  {row['stage_ms']:15.3f}  {row['total_ms']:5.3f}"
    return f"{row['mode']:6s}  {row['clients']:7d}  {parts}"


def cost_claims_of(rows: list[dict[str, Any]]) -> dict[str, bool]:
    """With many clients a token costs less than with some; one client alone has no batch to share."""
    claims = {}
    for mode in MODES:
        by_clients = {row["clients"]: row["total_ms"] for row in rows if row["mode"] == mode}
        some, many = min((n for n in by_clients if n > 1), default=0), max(by_clients, default=0)
        if some < many:
            claim = (
                f"a token takes at most {MOST_COST} of the processor time ({mode}, {many} for {some} clients)"
            )
            claims[claim] = by_clients[many] <= MOST_COST * by_clients[some]
    return claims


HEADER = "RTT ms  clients  ar, bytes/s  verify, bytes/s  ratio"


def claims_of(rows: list[dict[str, Any]]) -> dict[str, bool]:
    claims = {}
    for row in rows:
        if "burst" in row:
            claim = (
                f"one client keeps {LEAST_AFTER_BURST} of its speed after a burst (RTT {row['rtt_ms']} ms)"
            )
            claims[claim] = row["ratio"] >= LEAST_AFTER_BURST
        else:
            least = LEAST_RATIO_AT.get(row["clients"], LEAST_RATIO)
            claim = f"verify is at least {least} of ar ({row['clients']} clients, RTT {row['rtt_ms']} ms)"
            claims[claim] = row["ratio"] >= least
    return claims
