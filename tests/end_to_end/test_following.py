"""From a swarm to a service: what a real worker trains reaches stages and a gateway that run. No stream
breaks, and each is the text of the one model whose versions it names."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path

import httpx2
import pytest
import torch

from blocktrain.listening import open_port, url_of
from blocktrain.local import following
from blocktrain.serving.engine.engine import TextEngine
from blocktrain.serving.engine.local import LocalEngine
from blocktrain.serving.engine.remote import EngineConfig, RemoteEngine
from blocktrain.serving.gateway.app import GatewayConfig
from blocktrain.serving.gateway.engines import Engines
from blocktrain.serving.gateway.main import ModelSource, new_server, serve_gateway
from blocktrain.serving.gateway.main import follow as gateway_follows
from blocktrain.serving.stage.main import follow as stage_follows
from blocktrain.serving.versions import current_checkpoint, kept_checkpoints, roll_back, versions_of
from tests.end_to_end.swarm_kit import Coordinator, Kit, tiny_recipe
from tests.serving.cluster import PATIENT, text_of
from tests.serving.stages import start_stage
from tests.waiting import PATIENCE_SECONDS, until_async

PROMPT = "If the argument is "
TOKENS, ROUNDS = 160, 3


async def version_served(client: httpx2.AsyncClient) -> int:
    (version,) = (await client.get("/v1/models/tiny")).json()["versions"]
    return int(version)


async def streamed(client: httpx2.AsyncClient, begun: asyncio.Event) -> tuple[str, int]:
    """The text of a stream and the version that its usage names, which is that of its header."""
    text, found = "", []
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": TOKENS, "seed": 1, "stream": True}
    body |= {"stream_options": {"include_usage": True}}
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            begun.set()
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event
            text += "".join(choice["text"] for choice in event["choices"])
            if event["usage"] is not None:
                found = event["usage"]["blocktrain"]["versions"]
        assert answer.headers["x-blocktrain-versions"] == ",".join(map(str, found))
    return text, found[0]


def test_streams_before_during_and_after_merges_are_each_of_one_model(
    kit: Kit, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "FOLLOW_SECONDS", 0.1)
    coordinator = Coordinator(kit, tiny_recipe(text, swarm={"rounds": ROUNDS})).start()
    folder, stop = kit.folder / "models", threading.Event()
    follower = following.Follower(coordinator.url, folder)
    follower.look()
    first = current_checkpoint(folder)
    looking = threading.Thread(target=follower.run, args=(stop,))

    async def scenario() -> list[tuple[str, int]]:
        stage = await start_stage(first, [0])
        beside = asyncio.create_task(stage_follows(stage, folder, first, torch.device("cpu")))

        def engine_of(source: ModelSource) -> TextEngine:
            return RemoteEngine(source.checkpoint, EngineConfig(stages=list(source.stages), **PATIENT))

        served = ModelSource.found(folder, str(stage.address))
        engines, opened, up = Engines(engine_of(served)), open_port("127.0.0.1", 0), asyncio.Event()
        server = new_server(engines, GatewayConfig())
        serving = asyncio.create_task(
            serve_gateway(
                engines,
                server,
                opened,
                lambda line: up.set(),
                [lambda: gateway_follows(engines, folder, str(stage.address), served, engine_of)],
            )
        )
        await up.wait()
        answers: list[tuple[str, int]] = []
        crossings: list[int] = []

        async def watch_crossings() -> None:
            while True:
                old = engines.newest["tiny"]
                await until_async(lambda: engines.newest["tiny"] is not old)  # noqa: B023
                assert isinstance(old, RemoteEngine)
                crossings.append(len(old.running))

        async with httpx2.AsyncClient(base_url=url_of(opened), timeout=PATIENCE_SECONDS) as client:

            async def write_on(begun: asyncio.Event) -> None:
                while await version_served(client) < ROUNDS:
                    answers.append(await streamed(client, begun))

            begun = [asyncio.Event() for _ in range(3)]
            watching = asyncio.create_task(watch_crossings())
            writing = [asyncio.create_task(write_on(one)) for one in begun]
            for one in begun:
                await one.wait()
            looking.start()
            kit.worker(coordinator.url)
            await asyncio.gather(*writing)
            watching.cancel()
            assert answers[0][1] == 0
            assert any(crossings), "some answer was being written by the old model when the new one came"
            after = await streamed(client, asyncio.Event())
            assert after[1] == ROUNDS
            # Back again: the stage still holds the first model, or loads it once more.
            stop.set()
            await asyncio.to_thread(looking.join)
            roll_back(folder, len(kept_checkpoints(folder)) - 1)
            while await version_served(client) != 0:
                await asyncio.sleep(0.05)
            answers += [after, await streamed(client, asyncio.Event())]
            assert answers[-1][1] == 0
        server.should_exit = True
        await serving
        beside.cancel()
        await stage.close()
        return answers

    async def expected(path: Path) -> str:
        engine = LocalEngine(path)
        tokens, _ = await text_of(engine, PROMPT.encode(), TOKENS, seed=1)
        await engine.close()
        return bytes(tokens).decode("utf-8", "replace")

    answers = asyncio.run(scenario())
    texts = {versions_of(path): asyncio.run(expected(path)) for path in kept_checkpoints(folder)}
    for found, version in answers:
        assert found == texts[version,]
    assert texts[0,] != texts[ROUNDS,]
