"""A real TCP proxy in front of a stage that does to frames what networks do: delay, stall, damage, repeat.

It understands frames well enough to cut the stream at their borders. `trouble` is called with every frame
that passes and returns the pieces to send instead; None closes the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from blocktrain.serving.transport import Address
from blocktrain.wire.frames import HEADER_BYTES, FrameLimits, FrameType, decode_header

Trouble = Callable[[FrameType, bytes], list[bytes] | None]


def no_trouble(kind: FrameType, raw: bytes) -> list[bytes]:
    return [raw]


class Proxy:
    def __init__(self, target: Address) -> None:
        self.target = target
        self.to_stage: Trouble = no_trouble
        self.to_engine: Trouble = no_trouble
        self.delay_seconds = 0.0
        """One way."""
        self.flowing = asyncio.Event()
        self.flowing.set()
        self.accepting = True
        self._closing = asyncio.Event()
        self.num_troubled = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self) -> Proxy:
        self._server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self.address = Address("127.0.0.1", self._server.sockets[0].getsockname()[1])
        return self

    async def close(self) -> None:
        self._server.close()
        self._closing.set()
        self.cut()
        self.heal()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def stall(self) -> None:
        """A partition: nothing passes in either direction, connections stay open."""
        self.flowing.clear()

    def heal(self) -> None:
        self.flowing.set()

    def cut(self) -> None:
        """Reset every connection."""
        for writer in list(self._writers):
            writer.transport.abort()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            if not self.accepting:
                return
            up_reader, up_writer = await asyncio.open_connection(self.target.host, self.target.port)
            self._writers.add(up_writer)
            pumps = [
                asyncio.create_task(self._pump(reader, up_writer, lambda: self.to_stage)),
                asyncio.create_task(self._pump(up_reader, writer, lambda: self.to_engine)),
            ]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
                up_writer.transport.abort()
                self._writers.discard(up_writer)
        except OSError:
            pass
        finally:
            writer.transport.abort()
            self._writers.discard(writer)
            self._tasks.discard(task)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, trouble: Callable[[], Trouble]
    ) -> None:
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[tuple[float, bytes] | None] = asyncio.Queue()
        sender = asyncio.create_task(self._send(queue, writer))
        try:
            while True:
                kind, raw = await _read_frame(reader)
                pieces = trouble()(kind, raw)
                if pieces != [raw]:
                    self.num_troubled += 1
                for piece in pieces or []:
                    queue.put_nowait((loop.time() + self.delay_seconds, piece))
                if pieces is None:
                    break
        except (asyncio.IncompleteReadError, OSError):
            pass
        except asyncio.CancelledError:
            sender.cancel()
            raise
        queue.put_nowait(None)
        await sender

    async def _send(
        self, queue: asyncio.Queue[tuple[float, bytes] | None], writer: asyncio.StreamWriter
    ) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            while (item := await queue.get()) is not None:
                due, piece = item
                # What is delayed when the proxy is closed is lost.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(0.0, due - loop.time())):
                        await self._closing.wait()
                        return
                await self.flowing.wait()
                writer.write(piece)
                await writer.drain()


async def _read_frame(reader: asyncio.StreamReader) -> tuple[FrameType, bytes]:
    head = await reader.readexactly(HEADER_BYTES)
    header = decode_header(head, FrameLimits(payload_bytes=1 << 24))
    return header.type, head + await reader.readexactly(header.body_bytes)


# ---- troubles ----


def once_in(every: int, kind: FrameType, trouble: Trouble) -> Trouble:
    """`trouble` for each `every`-th frame of that kind."""
    seen = 0

    def apply(found: FrameType, raw: bytes) -> list[bytes] | None:
        nonlocal seen
        if found != kind:
            return [raw]
        seen += 1
        return trouble(found, raw) if seen % every == 0 else [raw]

    return apply


def flip_a_byte(kind: FrameType, raw: bytes) -> list[bytes]:
    damaged = bytearray(raw)
    damaged[len(raw) * 2 // 3] ^= 0x10
    return [bytes(damaged)]


def twice(kind: FrameType, raw: bytes) -> list[bytes]:
    return [raw, raw]


def lose(kind: FrameType, raw: bytes) -> list[bytes]:
    return []


def half_then_close(kind: FrameType, raw: bytes) -> list[bytes] | None:
    return None


class Reorder:
    """Holds a frame back until the next one has passed."""

    def __init__(self, kind: FrameType) -> None:
        self.kind = kind
        self.held: bytes | None = None

    def __call__(self, kind: FrameType, raw: bytes) -> list[bytes]:
        if kind == self.kind and self.held is None:
            self.held = raw
            return []
        if self.held is not None:
            held, self.held = self.held, None
            return [raw, held]
        return [raw]
