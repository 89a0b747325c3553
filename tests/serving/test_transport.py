"""Frames that are written in one turn or the next leave together, and what is in no hurry goes with them."""

from __future__ import annotations

import asyncio

import pytest

from blocktrain.serving.transport import Address, FrameStream, connect
from blocktrain.wire.frames import FrameType, Header, encode_frame
from tests.serving.stages import LIMITS
from tests.waiting import until_async


def ping(number: int) -> bytes:
    return encode_frame(Header(FrameType.PING, session=number))


async def both_ends() -> tuple[FrameStream, FrameStream, asyncio.Server]:
    """Of a connection, and what accepted it."""
    streams: asyncio.Queue[FrameStream] = asyncio.Queue()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        streams.put_nowait(FrameStream(reader, writer))

    server = await asyncio.start_server(take, "127.0.0.1", 0)
    ours = await connect(Address("127.0.0.1", server.sockets[0].getsockname()[1]), 5)
    return ours, await streams.get(), server


def test_what_is_posted_leaves_with_what_is_written_next_or_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def served() -> None:
        stream, theirs, server = await both_ends()
        sent: list[bytes] = []
        write = asyncio.StreamWriter.write

        def noted(writer: asyncio.StreamWriter, raw: bytes) -> None:
            sent.append(bytes(raw))
            write(writer, raw)

        monkeypatch.setattr(asyncio.StreamWriter, "write", noted)
        # In several turns of the event loop, as where some requests are a turn behind others.
        stream.post(ping(1))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert sent == []
        await stream.write(ping(2))
        await asyncio.sleep(0)
        await stream.write(ping(3))
        await asyncio.sleep(0)
        assert sent == [ping(1) + ping(2) + ping(3)]
        # With nothing to go with it goes alone, and what is written after it does not wait for it.
        stream.post(ping(4))
        await until_async(lambda: len(sent) == 2)
        await stream.write(ping(5))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        # What nobody had time to send goes before the end.
        stream.post(ping(6))
        await stream.close()
        assert sent[1:] == [ping(4), ping(5), ping(6)]
        assert [(await theirs.read(LIMITS)).header.session for _ in range(6)] == [1, 2, 3, 4, 5, 6]
        await theirs.close()
        server.close()

    asyncio.run(served())


def test_a_frame_read_is_the_frame_written() -> None:
    async def served() -> None:
        ours, theirs, server = await both_ends()
        ours.post(ping(1))
        await ours.write(ping(2))
        assert [(await theirs.read(LIMITS)).header.session for _ in range(2)] == [1, 2]
        assert ours.bytes_sent == theirs.bytes_received
        await ours.close()
        await theirs.close()
        server.close()

    asyncio.run(served())
