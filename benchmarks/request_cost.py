"""Processor time of each kind of request in a coordinator, comparable on a busy machine.

    python benchmarks/request_cost.py --workers 32

Signed requests go straight into the application, one after another, with a real run on SQLite behind it and
no sockets. What is measured is the time of the whole process between request and answer. The least of each
kind is shown first: other programs on the machine only add.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
from fastapi import FastAPI
from fleet import TEXT, assignment_answer, recipe
from provenance import write_report
from pydantic import BaseModel

from blocktrain.config import load_recipe
from blocktrain.coordinator.http.app import create_app
from blocktrain.coordinator.service import Coordinator, opened
from blocktrain.data.corpora import open_text
from blocktrain.wire.codec import encode
from blocktrain.wire.hashing import content_hash
from blocktrain.wire.identity import Identity
from blocktrain.wire.messages import (
    Assignment,
    AssignmentRequest,
    BlockAnswer,
    CommitRequest,
    HeartbeatRequest,
    JoinRequest,
)
from blocktrain.wire.signing import body_digest, fresh_nonce, sign_request

BLOCKS = 16
ROUNDS = 3
"""The first is not counted: statements are made and caches filled in it."""

Send = Callable[..., Coroutine[Any, Any, bytes]]


def sender(app: FastAPI, run_id: str, seconds: dict[str, list[float]]) -> Send:
    async def send(
        kind: str, identity: Identity, method: str, path: str, message: BaseModel | bytes = b""
    ) -> bytes:
        body = message if isinstance(message, bytes) else message.model_dump_json().encode()
        headers = sign_request(
            identity,
            method,
            path,
            now=time.time(),
            nonce=fresh_nonce(),
            content_digest=body_digest(body),
            content_length=len(body),
            audience=run_id,
        )
        scope = {
            **{
                "type": "http",
                "method": method,
                "path": path,
                "raw_path": path.encode(),
                "query_string": b"",
            },
            **{"http_version": "1.1", "scheme": "http", "root_path": ""},
            **{"server": ("127.0.0.1", 1), "client": ("127.0.0.1", 1)},
            "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
        }
        bodies = asyncio.Queue[dict[str, Any]]()
        bodies.put_nowait({"type": "http.request", "body": body, "more_body": False})
        answer: list[Any] = []

        async def keep(part: Any) -> None:
            answer.append(part)

        started = time.process_time()
        await app(scope, bodies.get, keep)
        seconds[kind].append(time.process_time() - started)
        content = b"".join(part.get("body", b"") for part in answer[1:])
        assert answer[0]["status"] == 200, content
        return content

    return send


async def drive(coordinator: Coordinator, workers: int) -> dict[str, list[float]]:
    run, seconds = coordinator.resources.run, defaultdict[str, list[float]](list)
    app, generator = create_app(coordinator), np.random.default_rng(0)
    async with app.router.lifespan_context(app):
        send = sender(app, run.run_id, seconds)
        identities = [Identity.generate() for _ in range(workers)]
        for one in identities:
            await send("join", one, "POST", "/v1/join", JoinRequest(corpus_sha256=run.corpus_sha256))
        for round_ in range(ROUNDS):
            if round_ == 1:
                seconds.clear()
            for one in identities:
                content = await send("assignment", one, "POST", "/v1/assignments", AssignmentRequest())
                lent = assignment_answer.validate_json(content)
                assert isinstance(lent, Assignment)
                path = f"/v1/assignments/{lent.assignment_id}"
                beat = HeartbeatRequest(step=1, loss=2.5)
                await send("heartbeat", one, "POST", f"{path}/heartbeat", beat)
                content = await send("block", one, "GET", f"/v1/blocks/{lent.block}")
                head = BlockAnswer.model_validate_json(content).head_hash
                await send("snapshot", one, "GET", f"/v1/snapshots/{head}")
                schema = run.schemas[lent.block]
                tensors = {
                    name: np.asarray(np.float32(0.01) * generator.standard_normal(shape, np.float32))
                    for name, shape in schema.tensors
                }
                payload = encode(run.codec, schema, tensors)
                digest = content_hash(payload)
                commit = CommitRequest(payload_hash=digest, payload_bytes=len(payload), base_hash=head)
                await send("commit", one, "POST", f"{path}/commit", commit)
                await send("reveal", one, "PUT", f"/v1/updates/{digest}", payload)
            while coordinator.rounds.close_due():
                pass
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=32)
    parser.add_argument("--json", type=Path, help="also write the result here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "text.txt").write_text(TEXT)
        described = f'{recipe(options.workers, BLOCKS)}data = {{ corpus = "{folder / "text.txt"}" }}\n'
        (folder / "recipe.toml").write_text(described)
        loaded = load_recipe(folder / "recipe.toml")
        with opened(loaded, open_text(loaded), folder / "data", threads=False, scoring=False) as coordinator:
            seconds = asyncio.run(drive(coordinator, options.workers))
    found = {
        kind: {"least_ms": 1e3 * min(times), "median_ms": 1e3 * statistics.median(times)}
        for kind, times in seconds.items()
    }
    for kind, one in found.items():
        print(f"{kind:12} least {one['least_ms']:6.2f} ms, median {one['median_ms']:6.2f} ms")
    print(f"{'an update':12} least {sum(one['least_ms'] for one in found.values()):6.2f} ms")
    write_report(options.json, "request_cost", {"kinds": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
