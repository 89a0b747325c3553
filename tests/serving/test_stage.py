"""What a stage says to strangers, clumsy clients and operators."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest
import torch

from blocktrain.errors import CheckpointError, UserError
from blocktrain.serving.engine.remote import EngineConfig, RemoteEngine
from blocktrain.serving.stage.main import load_blocks
from blocktrain.serving.stage.stage import Stage
from blocktrain.serving.transport import ConnectionLostError, connect
from blocktrain.wire.frame_metadata import (
    Ask,
    Failure,
    FailureCode,
    decode_metadata,
    encode_metadata,
)
from blocktrain.wire.frames import (
    Codec,
    Frame,
    FrameType,
    Header,
    decode_rows,
    encode_frame,
    encode_ids,
    prefix_checksum,
)
from tests.serving.cluster import PROMPTS, text_of
from tests.serving.stages import LIMITS, greeted, reply, spawn, start_stage, wait_ready
from tests.waiting import until_async


@asynccontextmanager
async def running(path: Path, **settings: object) -> AsyncIterator[Stage]:
    stage = await start_stage(path, [0, 1, 2], **settings)
    try:
        yield stage
    finally:
        await stage.close()


TRAVERSE = Header(FrameType.TRAVERSE, Codec.F32, session=1, epoch=0, traversal=1, base=0, rows=1)


def ask(
    header: Header, ids: list[int], blocks: list[int] | None = None, prefix: list[int] | None = None
) -> bytes:
    metadata = encode_metadata(Ask([0, 1, 2] if blocks is None else blocks, prefix_checksum(prefix or [])))
    return encode_frame(header, metadata, encode_ids(ids, 256))


def failure(frame: Frame) -> Failure:
    assert frame.type in (FrameType.FAILED, FrameType.REFUSED), frame.type
    return decode_metadata(frame, Failure)


def test_strangers_are_turned_away_and_do_not_disturb(checkpoint: Path) -> None:
    huge = bytearray(encode_frame(Header(FrameType.HELLO)))
    strangers = [b"GET / HTTP/1.1\r\n\r\n" * 10, os.urandom(500), bytes(huge[:20]), b"\0" * 100]

    async def served() -> None:
        async with running(checkpoint, hello_seconds=0.2) as stage:
            for raw in strangers:
                stream = await connect(stage.address, 5)
                await stream.write(raw)
                with pytest.raises(ConnectionLostError):
                    await stream.read(LIMITS)
                await stream.close()
            not_hello = await connect(stage.address, 5)
            refused = await reply(not_hello, encode_frame(Header(FrameType.PING)))
            assert "HELLO" in failure(refused).sentence
            await not_hello.close()
            fine = await greeted(stage)
            assert (await reply(fine, ask(TRAVERSE, [1, 2]))).type == FrameType.LOG_PROBS
            await fine.close()
            await until_async(lambda: not stage._connections)

    asyncio.run(served())


def test_a_stage_that_closes_reports_no_errors_of_its_own(checkpoint: Path) -> None:
    """Python 3.11 reports a cancelled connection as an unhandled exception unless the task is ours."""

    async def served() -> list[object]:
        reported: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context))
        async with running(checkpoint) as stage:
            streams = [await greeted(stage, f"client {i}") for i in range(3)]
            await streams[0].write(ask(TRAVERSE, [1, 2]))
            talks = list(stage._talks)
            talks[0].cancel()
        await asyncio.gather(*talks, return_exceptions=True)
        await until_async(lambda: not stage._talks and not stage._requests)
        for stream in streams:
            await stream.close()
        return reported

    assert asyncio.run(served()) == []


BAD: dict[str, Callable[[], Any]] = {
    "unknown block": lambda: ask(TRAVERSE, [1], blocks=[7]),
    "no block": lambda: ask(TRAVERSE, [1], blocks=[]),
    "no ids": lambda: ask(TRAVERSE, []),
    "more rows than ids": lambda: ask(TRAVERSE._replace(rows=3), [1, 2]),
    "no rows": lambda: ask(TRAVERSE._replace(rows=0), [1, 2]),
    "past the context": lambda: ask(TRAVERSE._replace(base=90), [1] * 20),
    "no codec": lambda: ask(TRAVERSE._replace(codec=Codec.NONE), [1]),
    "metadata of another type": lambda: encode_frame(
        TRAVERSE, encode_metadata(Failure(FailureCode.BUSY, ""))
    ),
    "not a request": lambda: encode_frame(Header(FrameType.WELCOME)),
}


def test_requests_that_make_no_sense_get_a_sentence(checkpoint: Path) -> None:
    async def served() -> None:
        async with running(checkpoint) as stage:
            stream = await greeted(stage)
            for name, make in BAD.items():
                found = failure(await reply(stream, make()))
                assert found.code is FailureCode.BAD_REQUEST, name
                assert found.sentence
            assert (await reply(stream, encode_frame(Header(FrameType.PING)))).type == FrameType.PONG
            await stream.close()

    asyncio.run(served())


def test_the_same_traversal_again_is_answered_from_memory(checkpoint: Path) -> None:
    async def served() -> None:
        async with running(checkpoint) as stage:
            stream = await greeted(stage)
            raw = ask(TRAVERSE, [5, 6, 7])
            first, again = await reply(stream, raw), await reply(stream, raw)
            assert first.payload == again.payload
            other_connection = await greeted(stage)
            assert (await reply(other_connection, raw)).payload == first.payload
            assert stage.metrics.tokens._value.get() == 3, "computed once"
            newer = await reply(stream, ask(TRAVERSE._replace(traversal=2, base=3), [8], prefix=[5, 6, 7]))
            assert newer.type == FrameType.LOG_PROBS
            assert failure(await reply(stream, raw)).code is FailureCode.STALE
            for open_stream in (stream, other_connection):
                await open_stream.close()

    asyncio.run(served())


def test_what_was_sent_on_a_wrong_draft_is_not_computed(checkpoint: Path) -> None:
    async def served() -> None:
        async with running(checkpoint) as stage:
            stream, computing = await greeted(stage), threading.Event()
            stage.newest.batcher.executor.submit(computing.wait)  # so that all of these wait
            await stream.write(ask(TRAVERSE, [5, 6, 7]))
            for number, base, ids, before in (
                (2, 3, [8], [5, 6, 7]),
                (3, 4, [9], [5, 6, 7, 8]),
                (4, 3, [1, 2], [5, 6, 7]),  # 8 was wrong
            ):
                header = TRAVERSE._replace(traversal=number, base=base)
                await stream.write(ask(header, ids, prefix=before))
            void = [await stream.read(LIMITS) for _ in range(2)]
            assert [failure(frame).code for frame in void] == [FailureCode.STALE] * 2
            computing.set()
            found = {frame.header.traversal: frame for frame in [await stream.read(LIMITS) for _ in range(2)]}
            assert found.keys() == {1, 4}
            assert stage.metrics.tokens._value.get() == 5
            other = await reply(stream, ask(TRAVERSE._replace(session=2), [5, 6, 7, 1, 2]))
            rows, expected = (decode_rows(one.payload, Codec.F32, 1, 256) for one in (found[4], other))
            assert np.allclose(rows, expected, atol=1e-4)
            await stream.close()

    asyncio.run(served())


def test_another_client_cannot_touch_a_session(checkpoint: Path) -> None:
    async def served() -> None:
        async with running(checkpoint) as stage:
            mine, theirs = await greeted(stage, "mine"), await greeted(stage, "theirs")
            await reply(mine, ask(TRAVERSE, [5, 6, 7]))
            next_one = ask(TRAVERSE._replace(traversal=2, base=3), [8], prefix=[5, 6, 7])
            assert (await reply(theirs, next_one)).type == FrameType.RESEND
            await theirs.write(encode_frame(Header(FrameType.RELEASE, session=1)))
            assert (await reply(mine, next_one)).type == FrameType.LOG_PROBS
            for stream in (mine, theirs):
                await stream.close()

    asyncio.run(served())


def test_a_cache_that_differs_asks_for_all_ids(checkpoint: Path) -> None:
    async def served() -> None:
        async with running(checkpoint) as stage:
            stream = await greeted(stage)
            await reply(stream, ask(TRAVERSE, [5, 6, 7]))
            differs = ask(TRAVERSE._replace(traversal=2, base=3), [8], prefix=[9, 9, 9])
            assert (await reply(stream, differs)).type == FrameType.RESEND
            fresh = TRAVERSE._replace(epoch=1, rows=2)
            rows = await reply(stream, ask(fresh, [9, 9, 9, 8]))
            assert decode_rows(rows.payload, Codec.F32, 2, 256).shape == (2, 256)
            await stream.close()

    asyncio.run(served())


def test_late_requests_are_not_computed(checkpoint: Path) -> None:
    async def served() -> None:
        async with running(checkpoint) as stage:
            stream = await greeted(stage)
            late = await reply(stream, ask(TRAVERSE._replace(deadline_ms=0), [1, 2]))
            assert failure(late).code is FailureCode.LATE
            assert stage.metrics.tokens._value.get() == 0
            assert len(stage.sessions) == 0
            await stream.close()

    asyncio.run(served())


def test_requests_past_the_credits_are_told_so(checkpoint: Path) -> None:
    async def served() -> None:
        async with running(checkpoint, credits=2) as stage:
            stream = await greeted(stage)
            score = TRAVERSE._replace(type=FrameType.SCORE, rows=1)
            await stream.write(b"".join(ask(score._replace(session=i), [1] * 90) for i in range(20)))
            replies = [await stream.read(LIMITS) for _ in range(20)]
            busy = [frame for frame in replies if frame.type == FrameType.FAILED]
            assert busy
            assert all(failure(frame).code is FailureCode.BUSY for frame in busy)
            assert len(busy) < 20
            await stream.close()

    asyncio.run(served())


def test_exact_rows_come_in_float64(checkpoint: Path) -> None:
    async def served() -> None:
        async with running(checkpoint) as stage:
            stream = await greeted(stage)
            rows = await reply(stream, ask(TRAVERSE, [5, 6, 7]))
            exact = await reply(stream, ask(TRAVERSE._replace(type=FrameType.EXACT, session=2), [5, 6, 7]))
            close = decode_rows(rows.payload, Codec.F32, 1, 256)
            np.testing.assert_allclose(close, decode_rows(exact.payload, Codec.F64, 1, 256), atol=2e-5)
            await stream.close()

    asyncio.run(served())


def test_a_damaged_block_file_is_refused_at_start(checkpoint: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in checkpoint.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    raw = bytearray((copy / "block-01.safetensors").read_bytes())
    raw[-5] ^= 1
    (copy / "block-01.safetensors").write_bytes(raw)
    with pytest.raises(CheckpointError, match="sha256"):
        load_blocks(copy, [1], torch.device("cpu"))
    with pytest.raises(UserError, match="blocks 0 to 2"):
        load_blocks(checkpoint, [3], torch.device("cpu"))


def test_the_verb_serves_metrics_tls_and_drains(checkpoint: Path, tmp_path: Path) -> None:
    key = tmp_path / "stage.key"
    stage = wait_ready(spawn(checkpoint, "0-2", "--metrics-port", "0", "--identity", str(key)))
    try:
        words = dict(word.split("=") for word in stage.line.split()[2:])
        assert words["blocks"] == "0,1,2"

        async def served() -> None:
            address = replace(stage.address, pin=words["pin"])
            engine = RemoteEngine(checkpoint, EngineConfig(stages=[address]))
            await engine.start()
            tokens, _ = await text_of(engine, PROMPTS[0], 5)
            assert len(tokens) == 5
            await engine.close()

        asyncio.run(served())
        with urlopen(f"http://127.0.0.1:{words['metrics']}/metrics", timeout=5) as page:
            text = page.read().decode()
        assert 'blocktrain_stage_requests_total{outcome="ok",type="traverse"}' in text
        assert stage.terminate() == 0
    finally:
        stage.stop()
