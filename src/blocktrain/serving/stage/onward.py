"""Connections from a stage to those that go on where it ends, in a serial model.

They are made when something is first handed on, and kept. Nothing of use comes back on them: a stage that
fails or answers tells the gateway, over the gateway's own connection. Covered: a stage without a token
connects to its own machine alone, so a stranger cannot have it reach into a network; the number of
connections is bounded; a peer that does not welcome this model gets no activations. Not covered: clients that
know the token choose where to connect.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import secrets

from blocktrain.errors import UserError
from blocktrain.serving.transport import Address, ConnectionLostError, FrameStream, connect
from blocktrain.wire import frames
from blocktrain.wire.frame_metadata import Hello, ModelShape, encode_metadata
from blocktrain.wire.frames import FrameType, Header, ServingFrameError

CONNECT_SECONDS = 5.0
MAX_PEERS = 64
"""Next stages at once; the one that was used longest ago makes room."""

_Key = tuple[Address, str]
"""Where, and the hash of the model that both sides serve."""


def is_this_machine(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        # A name may mean any machine, and another one tomorrow.
        return False


class Onward:
    def __init__(self, token: str | None) -> None:
        self.token = token
        self._name = secrets.token_hex(16)
        self._peers: dict[_Key, asyncio.Task[FrameStream]] = {}
        """Open connections and those under way, the most recently used last."""
        self._readers: set[asyncio.Task[None]] = set()

    def refusal(self, text: str) -> str | None:
        """Why nothing is handed on to this address."""
        try:
            address = Address.parse(text)
        except UserError as error:
            return str(error)
        if self.token is None and not is_this_machine(address.host):
            return (
                f"a stage without a token hands on within its own machine alone, found {address}; start all "
                "stages with --token-file"
            )
        return None

    async def send(self, address: Address, model: ModelShape, raw: bytes) -> int:
        """Hand a frame on and give its length, or ConnectionLostError or PinError."""
        key = (address, model.model_hash)
        task = self._peers.pop(key, None)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = asyncio.get_running_loop().create_task(self._open(key, model))
        self._peers[key] = task
        while len(self._peers) > MAX_PEERS:
            oldest = next(iter(self._peers))
            self._drop(oldest, self._peers[oldest])
        # Shielded: several requests may wait for one connection, and one of them may be given up.
        stream = await asyncio.shield(task)
        await stream.write(raw)
        return len(raw)

    async def _open(self, key: _Key, model: ModelShape) -> FrameStream:
        address, _ = key
        stream = await connect(address, CONNECT_SECONDS)
        try:
            hello = encode_metadata(Hello(self._name, model, self.token or ""))
            async with asyncio.timeout(CONNECT_SECONDS):
                await stream.write(frames.encode_frame(Header(FrameType.HELLO), hello))
                frame = await stream.read(frames.GREETING_LIMITS)
            if frame.type != FrameType.WELCOME:
                raise ConnectionLostError(f"{address} answered HELLO with {frame.type.name}")
        except TimeoutError:
            stream.abort()
            raise ConnectionLostError(f"{address} does not answer HELLO") from None
        except ServingFrameError as error:
            stream.abort()
            raise ConnectionLostError(f"{address}: {error}") from None
        except BaseException:
            stream.abort()
            raise
        task = asyncio.current_task()
        assert task is not None
        reader = asyncio.get_running_loop().create_task(self._watch(key, stream, task))
        self._readers.add(reader)
        reader.add_done_callback(self._readers.discard)
        return stream

    async def _watch(self, key: _Key, stream: FrameStream, opened: asyncio.Task[FrameStream]) -> None:
        """Read to the end, so that a peer which goes away is connected to again and not written to."""
        with contextlib.suppress(ConnectionLostError, ServingFrameError):
            while True:
                await stream.read(frames.GREETING_LIMITS)
        self._drop(key, opened)
        stream.abort()

    def _drop(self, key: _Key, task: asyncio.Task[FrameStream]) -> None:
        # Another connection may have taken its place.
        if self._peers.get(key) is task:
            del self._peers[key]
        if not task.done():
            task.cancel()
        elif not task.cancelled() and task.exception() is None:
            task.result().abort()

    async def close(self) -> None:
        tasks = list(self._peers.items())
        for key, task in tasks:
            self._drop(key, task)
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*(task for _, task in tasks), *self._readers, return_exceptions=True)
