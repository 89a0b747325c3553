"""New weights reach stages and a gateway that run: no stream breaks, and every answer names its versions."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import httpx2
import pytest
import torch

from blocktrain.errors import CheckpointError, UserError
from blocktrain.listening import open_port, url_of
from blocktrain.local.following import KEPT_CHECKPOINTS, Follower
from blocktrain.serving.engine.engine import TextEngine
from blocktrain.serving.engine.local import LocalEngine
from blocktrain.serving.engine.remote import EngineConfig, RemoteEngine
from blocktrain.serving.gateway.app import GatewayConfig
from blocktrain.serving.gateway.engines import Engines
from blocktrain.serving.gateway.main import follow as gateway_follows
from blocktrain.serving.gateway.main import new_server, serve_gateway
from blocktrain.serving.stage.main import follow as stage_follows
from blocktrain.serving.versions import (
    VERSIONS,
    current_checkpoint,
    kept_checkpoints,
    publish,
    roll_back,
    versions_of,
)
from tests.coordinator.conftest import served, tiny_recipe
from tests.coordinator.test_changing_a_run import train
from tests.serving.cluster import PATIENT, text_of
from tests.serving.stages import start_stage
from tests.waiting import PATIENCE_SECONDS

PROMPT = "If the argument is "
TOKENS = 160


def version(folder: Path, checkpoint: Path, number: int, merges: list[int]) -> Path:
    """A copy of a checkpoint as one of a folder's versions, all of one name."""
    out = folder / f"{number:06d}"
    shutil.copytree(checkpoint, out)
    config = json.loads((out / "config.json").read_text())
    config["recipe"]["name"] = "followed"
    (out / "config.json").write_text(json.dumps(config))
    (out / VERSIONS).write_text(json.dumps(merges))
    return out


async def streamed(client: httpx2.AsyncClient, begun: asyncio.Event, seed: int) -> tuple[str, list[int]]:
    """The text of a stream and the versions that its usage names; they are those of its header."""
    text, found = "", []
    body = {"model": "followed", "prompt": PROMPT, "max_tokens": TOKENS, "seed": seed, "stream": True}
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
    return text, found


def test_streams_before_during_and_after_a_merge_are_each_of_one_model(
    checkpoint: Path, other_checkpoint: Path, tmp_path: Path
) -> None:
    first = version(tmp_path, checkpoint, 1, [3, 3, 2])
    second = version(tmp_path, other_checkpoint, 2, [4, 3, 3])
    publish(first)

    async def expected(path: Path) -> str:
        engine = LocalEngine(path)
        tokens, _ = await text_of(engine, PROMPT.encode(), TOKENS, seed=1)
        await engine.close()
        return bytes(tokens).decode("utf-8", "replace")

    async def scenario() -> None:
        texts = {(3, 3, 2): await expected(first), (4, 3, 3): await expected(second)}
        cpu = torch.device("cpu")
        stages = [await start_stage(first, blocks) for blocks in ([0, 1], [2])]
        following = [asyncio.create_task(stage_follows(stage, tmp_path, first, cpu)) for stage in stages]

        def engine_of(path: Path) -> TextEngine:
            return RemoteEngine(path, EngineConfig(stages=[stage.address for stage in stages], **PATIENT))

        engines = Engines(engine_of(first))
        server = new_server(engines, GatewayConfig())
        opened, up = open_port("127.0.0.1", 0), asyncio.Event()
        serving = asyncio.create_task(
            serve_gateway(
                engines,
                server,
                opened,
                lambda line: up.set(),
                lambda: gateway_follows(engines, tmp_path, first, engine_of),
            )
        )
        await up.wait()
        async with httpx2.AsyncClient(base_url=url_of(opened), timeout=PATIENCE_SECONDS) as client:
            begun = asyncio.Event()
            before = asyncio.create_task(streamed(client, begun, 1))
            await begun.wait()
            publish(second)
            during = []
            while (await client.get("/v1/models/followed")).json()["versions"] != [4, 3, 3]:
                during.append(await streamed(client, asyncio.Event(), 1))
            after = await streamed(client, asyncio.Event(), 1)
            answers = [await before, *during, after]
            assert answers[0][1] == [3, 3, 2]
            assert after[1] == [4, 3, 3]
            for text, found in answers:
                assert text == texts[found[0], found[1], found[2]]
            assert texts[3, 3, 2] != texts[4, 3, 3]
            # Back again: the stages still hold the first model, or load it once more.
            roll_back(tmp_path, 1)
            while (await client.get("/v1/models/followed")).json()["versions"] != [3, 3, 2]:
                await asyncio.sleep(0.05)
            assert await streamed(client, asyncio.Event(), 1) == (texts[3, 3, 2], [3, 3, 2])
        server.should_exit = True
        await serving
        for task in following:
            task.cancel()
        for stage in stages:
            await stage.close()

    asyncio.run(scenario())


def test_a_follower_takes_each_merge_of_a_run_once(tmp_path: Path) -> None:
    with served(tmp_path / "run", tiny_recipe(blocks=1, rounds=KEPT_CHECKPOINTS + 3)) as running:
        follower = Follower(running.url, tmp_path / "models")
        for merges in range(KEPT_CHECKPOINTS + 2):
            found = follower.look()
            assert found is not None
            assert found.versions == versions_of(current_checkpoint(tmp_path / "models")) == (merges,)
            assert follower.look() is None
            train(running, merges + 1)
    kept = [versions_of(path) for path in kept_checkpoints(tmp_path / "models")]
    assert kept == [(merges,) for merges in range(2, KEPT_CHECKPOINTS + 2)]
    assert versions_of(roll_back(tmp_path / "models", 2)) == (KEPT_CHECKPOINTS - 1,)
    with pytest.raises(UserError, match="keeps 5 checkpoints"):
        roll_back(tmp_path / "models", 5)


def test_a_folder_that_names_something_else_is_refused(tmp_path: Path) -> None:
    assert current_checkpoint(tmp_path) == tmp_path
    (tmp_path / "current").write_text("../elsewhere")
    with pytest.raises(CheckpointError, match="damaged"):
        current_checkpoint(tmp_path)
    (tmp_path / VERSIONS).write_text("{")
    with pytest.raises(CheckpointError, match="damaged"):
        versions_of(tmp_path)
