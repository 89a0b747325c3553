"""Several models in one gateway, and stages that come and go while it runs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest

from blocktrain.errors import UserError
from blocktrain.listening import open_port, url_of
from blocktrain.serving import versions
from blocktrain.serving.engine.local import LocalEngine
from blocktrain.serving.engine.remote import EngineConfig, RemoteEngine
from blocktrain.serving.gateway.app import GatewayConfig
from blocktrain.serving.gateway.engines import Engines
from blocktrain.serving.gateway.main import ModelSource, follow, new_server, serve_gateway
from tests.serving.cluster import PATIENT, text_of
from tests.serving.stages import start_stage
from tests.waiting import PATIENCE_SECONDS, until_async

PROMPT = "The value "


@asynccontextmanager
async def gateway(
    engines: Engines, following: Sequence[Callable[[], Coroutine[None, None, None]]] = ()
) -> AsyncIterator[httpx2.AsyncClient]:
    opened, up = open_port("127.0.0.1", 0), asyncio.Event()
    server = new_server(engines, GatewayConfig())
    serving = asyncio.create_task(serve_gateway(engines, server, opened, lambda line: up.set(), following))
    await up.wait()
    async with httpx2.AsyncClient(base_url=url_of(opened), timeout=PATIENCE_SECONDS) as client:
        yield client
    server.should_exit = True
    await serving


async def written(client: httpx2.AsyncClient, model: str, **fields: Any) -> str:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 24, "seed": 3, **fields}
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def test_each_model_of_a_gateway_writes_its_own_text(checkpoint: Path, other_checkpoint: Path) -> None:
    paths = {"tiny": checkpoint, "other": other_checkpoint}

    async def scenario() -> None:
        expected = {}
        for name, path in paths.items():
            engine = LocalEngine(path)
            tokens, _ = await text_of(engine, PROMPT.encode(), 24, seed=3)
            expected[name] = bytes(tokens).decode("utf-8", "replace")
            await engine.close()
        assert expected["tiny"] != expected["other"]
        async with gateway(Engines(*map(LocalEngine, paths.values()))) as client:
            found = await asyncio.gather(*(written(client, name) for name in paths))
            assert dict(zip(paths, found, strict=True)) == expected
            listed = (await client.get("/v1/models")).json()["data"]
            assert [card["id"] for card in listed] == ["tiny", "other"]
            unknown = await client.get("/v1/models/gpt")
            assert "this gateway serves 'tiny', 'other'" in unknown.json()["error"]["message"]
            assert (await client.get("/readyz")).json() == {"ready": True, "reason": "ready"}

    asyncio.run(scenario())


def test_two_models_of_one_name_are_refused(checkpoint: Path) -> None:
    with pytest.raises(UserError, match="two of these have one name: tiny, tiny"):
        Engines(LocalEngine(checkpoint), LocalEngine(checkpoint))


def test_stages_come_and_go_by_their_file_and_no_stream_ends(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "LOOK_SECONDS", 0.02)
    file = tmp_path / "stages"

    def engine_of(source: ModelSource) -> RemoteEngine:
        return RemoteEngine(source.checkpoint, EngineConfig(stages=list(source.stages), **PATIENT))

    async def scenario() -> None:
        old, new = await start_stage(checkpoint, [0, 1, 2]), await start_stage(checkpoint, [0, 1, 2])
        file.write_text(f"# the first\n{old.address}\n")
        source = ModelSource.found(checkpoint, f"@{file}")
        first = engine_of(source)
        engines = Engines(first)
        following = partial(follow, engines, checkpoint, f"@{file}", source, engine_of)
        async with gateway(engines, [following]) as client:
            short = await written(client, "tiny")
            alone = await written(client, "tiny", max_tokens=96, mode="ar")
            body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 96, "seed": 3, "mode": "ar"}
            async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as stream:
                lines = (line async for line in stream.aiter_lines() if line.startswith("data: {"))
                text = json.loads((await anext(lines))[6:])["choices"][0]["text"]
                # Drained by taking it out of the file: the answer under way stays where it is.
                file.write_text(f"{new.address}\n")
                await until_async(lambda: engines.newest["tiny"] is not first)
                assert first.running
                assert await written(client, "tiny") == short
                async for line in lines:
                    text += json.loads(line[6:])["choices"][0]["text"]
            assert text == alone
            await old.close()
            assert await written(client, "tiny") == short
            # A file that says nothing useful changes nothing.
            file.write_text("nowhere\n")
            with pytest.raises(UserError, match="expected an address"):
                ModelSource.found(checkpoint, f"@{file}")
            assert await written(client, "tiny") == short
        await new.close()

    asyncio.run(scenario())
