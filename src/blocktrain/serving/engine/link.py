"""One stage as the engine sees it: a connection that is kept up, requests matched to replies, and health.

Reconnects without end, with a growing pause. A request either gets its reply or LinkError, at the latest
when the connection is given up. Covered: replies to nobody, twice or late are dropped; bytes that are no
frames end the connection; a silent peer is *suspect* after `suspect_seconds` and cut off after
`dead_seconds`. Not covered: a stage that answers with well-formed lies.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from blocktrain.errors import WireError
from blocktrain.serving.fingerprint import model_mismatch
from blocktrain.serving.transport import Address, ConnectionLostError, FrameStream, connect
from blocktrain.wire import frames
from blocktrain.wire.frame_metadata import (
    Failure,
    FailureCode,
    Hello,
    Welcome,
    decode_metadata,
    encode_metadata,
)
from blocktrain.wire.frames import Codec, Frame, FrameLimits, FrameType, Header, ServingFrameError

log = logging.getLogger(__name__)

REMEMBERED_RELEASES = 512
"""What a stage could not be told beyond these it forgets by itself, after its idle time."""

ReplyKey = tuple[int, int, int]
"""Session, epoch and traversal of a request."""


class LinkError(WireError):
    """This stage did not answer this request; another may."""

    def __init__(self, sentence: str, code: FailureCode | None = None) -> None:
        super().__init__(sentence)
        self.code = code
        """What the stage itself called it, if it said anything."""
        self.link: int | None = None
        """The number of the link that failed, where a question goes through several stages."""


class RefusedError(WireError):
    """The stage does not serve this model, or not us; the operator must act."""


@dataclass(frozen=True, kw_only=True)
class LinkConfig:
    connect_seconds: float = 5.0
    ping_seconds: float = 0.5
    suspect_seconds: float = 2.0
    """Silence after a ping that makes a link suspect: others are asked instead."""
    dead_seconds: float = 10.0
    """Silence after which the connection is dropped and another one made."""
    first_pause_seconds: float = 0.05
    longest_pause_seconds: float = 2.0


class StageLink:
    def __init__(self, number: int, address: Address, hello: Hello, config: LinkConfig) -> None:
        self.number, self.address, self.hello, self.config = number, address, hello, config
        self.blocks: frozenset[int] = frozenset()
        """What the stage said it holds, kept while it is away."""
        self.problem: str | None = "not connected yet"
        self.refused = False
        self.draining = False
        self.best_tokens = 0
        """Tokens of a row that the stage sends at most where only the best are asked for; 0 if it cannot."""
        self.knows_like = self.knows_running = False
        """Whether a session may begin with what another has cached there, and with one that is under way."""
        self.slow_until = 0.0
        self.latency_seconds: float | None = None
        """Of a traversal, computing included, as a mean of recent ones."""
        self.round_trip_seconds: float | None = None
        """Of a ping, as a mean of recent ones."""
        self.changed: Callable[[], None] = lambda: None
        self._stream: FrameStream | None = None
        self._pending: dict[ReplyKey, asyncio.Future[Frame]] = {}
        self._credits = asyncio.Semaphore(1)
        self._limits = frames.GREETING_LIMITS
        self._released: deque[int] = deque(maxlen=REMEMBERED_RELEASES)
        self._asked: float | None = None
        self._lost: float | None = 0.0
        self._task: asyncio.Task[None] | None = None

    # ---- health ----

    def usable(self, now: float) -> bool:
        return self.lost_at(now) is None and not self.draining

    def lost_at(self, now: float) -> float | None:
        """Since when the stage has been out of reach; None while it is within reach."""
        if self._stream is None:
            return self._lost
        if self._asked is not None and now - self._asked > self.config.suspect_seconds:
            return self._asked
        return None

    # ---- life ----

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._lost = loop.time()
        self._task = loop.create_task(self._keep_connected(), name=f"link {self.address}")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _keep_connected(self) -> None:
        pause = self.config.first_pause_seconds
        while True:
            try:
                stream = await self._open()
                pause = self.config.first_pause_seconds
                await self._hold(stream)
            except (WireError, OSError) as error:
                # Log what is news, not every attempt at a stage that stays away.
                if str(error) != self.problem:
                    log.warning("lost stage address=%s reason=%s", self.address, error)
                self.problem = str(error)
                self.refused = isinstance(error, RefusedError)
                self.changed()
            await asyncio.sleep(pause)
            pause = min(2 * pause, self.config.longest_pause_seconds)

    async def _open(self) -> FrameStream:
        """A connection on which HELLO and WELCOME have bound both sides to one model."""
        model = self.hello.model
        stream = await connect(self.address, self.config.connect_seconds)
        try:
            async with asyncio.timeout(self.config.connect_seconds):
                await stream.write(frames.encode_frame(Header(FrameType.HELLO), encode_metadata(self.hello)))
                frame = await stream.read(frames.GREETING_LIMITS)
            if frame.type == FrameType.REFUSED:
                sentence = decode_metadata(frame, Failure).sentence
                raise RefusedError(f"stage {self.address} refused: {sentence}")
            if frame.type != FrameType.WELCOME:
                raise ConnectionLostError(f"{self.address} answered HELLO with {frame.type.name}")
            welcome = decode_metadata(frame, Welcome)
            mismatch = model_mismatch(expected=welcome.model, found=model)
            if mismatch is not None:
                raise RefusedError(f"stage {self.address}: {mismatch}")
        except TimeoutError:
            stream.abort()
            raise ConnectionLostError(f"{self.address} does not answer HELLO") from None
        except BaseException:
            stream.abort()
            raise
        rows_bytes = model.context * frames.row_bytes(Codec.F32, model.vocabulary)
        rows_bytes += model.context * frames.log_weight_bytes(len(welcome.blocks))
        self._limits = FrameLimits(payload_bytes=max(rows_bytes, 1 << 16))
        # A new connection starts with all its credits.
        self._credits = asyncio.Semaphore(welcome.credits)
        self.blocks, self.best_tokens = frozenset(welcome.blocks), frame.header.rows
        self.knows_like, self.knows_running = frame.header.base > 0, frame.header.base > 1
        self._stream, self._asked, self.problem = stream, None, None
        self.refused = self.draining = False
        # RELEASE is not answered, so one that was under way when the connection broke may be lost.
        stream.post(b"".join(map(_release_frame, self._released)))
        self._released.clear()
        log.info("joined stage address=%s blocks=%s", self.address, sorted(self.blocks))
        self.changed()
        return stream

    async def _hold(self, stream: FrameStream) -> None:
        """Read replies and keep the peer awake until the connection ends."""
        pinging = asyncio.get_running_loop().create_task(self._ping(stream))
        try:
            while True:
                frame = await stream.read(self._limits)
                if frame.type == FrameType.PONG and self._asked is not None:
                    took = asyncio.get_running_loop().time() - self._asked
                    usual = self.round_trip_seconds
                    self.round_trip_seconds = took if usual is None else usual + 0.2 * (took - usual)
                # Any frame is a sign of life; those who wait for a suspect link may go on.
                was_silent, self._asked = self._asked is not None, None
                self.draining = self.draining or frame.type == FrameType.GOODBYE
                if was_silent or frame.type == FrameType.GOODBYE:
                    self.changed()
                header = frame.header
                future = self._pending.pop((header.session, header.epoch, header.traversal), None)
                if future is not None and not future.done():
                    future.set_result(frame)
        finally:
            # First of all, so that no question is sent to a stream that is being closed.
            self._stream = None
            self._lost = asyncio.get_running_loop().time()
            pinging.cancel()
            stream.abort()
            await asyncio.gather(pinging, return_exceptions=True)
            pending, self._pending = self._pending, {}
            for waiting in pending.values():
                if not waiting.done():
                    waiting.set_exception(LinkError(f"the connection to stage {self.address} was lost"))
            self.changed()

    async def _ping(self, stream: FrameStream) -> None:
        """Ask for a sign of life now and then; silence for too long ends the connection."""
        loop = asyncio.get_running_loop()
        ping = frames.encode_frame(Header(FrameType.PING))
        while True:
            await asyncio.sleep(self.config.ping_seconds)
            now = loop.time()
            # One ping under way at a time; the time of the unanswered one says how long the peer is silent.
            if self._asked is None:
                self._asked = now
                with contextlib.suppress(ConnectionLostError):
                    await stream.write(ping)
            elif now - self._asked > self.config.dead_seconds:
                stream.abort()

    # ---- requests ----

    async def request(
        self, header: Header, metadata: bytes, payload: bytes, behind: Sequence[StageLink] = ()
    ) -> tuple[Frame, int]:
        """The reply, and the bytes it took to ask; LinkError when there will be none.

        A question may be handed on from here to the stages `behind`: then the last of them answers, and any
        may say that it cannot.
        """
        through = (self, *behind)
        async with self._credits:
            key = (header.session, header.epoch, header.traversal)
            raw = frames.encode_frame(header, metadata, payload)
            replies: list[asyncio.Future[Frame]] = []
            link = self
            try:
                for link in through:
                    # After the credit and not before: the connection may be lost while we wait for one.
                    replies.append(link._expect(key))
                link = self
                assert self._stream is not None, "it was there a moment ago"
                await self._stream.write(raw)
                if behind:
                    await asyncio.wait(replies, return_when=asyncio.FIRST_COMPLETED)
                    link, reply = next(pair for pair in zip(through, replies, strict=True) if pair[1].done())
                else:
                    reply = replies[0]
                frame = link._checked(await reply)
                if frame.type != FrameType.RESEND and link is not through[-1]:
                    raise LinkError(f"stage {link.address} answered in place of {through[-1].address}")
            except ConnectionLostError as error:
                raise LinkError(str(error)) from None
            except LinkError as error:
                error.link = link.number
                raise
            finally:
                for link, reply in zip(through, replies, strict=False):
                    link._expect_no_more(key, reply)
        return frame, len(raw)

    def _expect(self, key: ReplyKey) -> asyncio.Future[Frame]:
        """The reply to a question of this name, whichever stage it was put to."""
        if self._stream is None:
            raise LinkError(self.problem or f"stage {self.address} is not connected")
        future: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self._pending[key] = future
        return future

    def _expect_no_more(self, key: ReplyKey, future: asyncio.Future[Frame]) -> None:
        # A question that is asked again has the same key, and its own future.
        if self._pending.get(key) is future:
            del self._pending[key]
        # One that nobody waits for any more: asyncio would report its error as never seen.
        if future.done() and not future.cancelled():
            future.exception()

    def _checked(self, frame: Frame) -> Frame:
        """A reply that holds an answer; LinkError for one that says why there is none."""
        if frame.type == FrameType.FAILED:
            try:
                failure = decode_metadata(frame, Failure)
            except ServingFrameError as error:
                raise LinkError(f"stage {self.address}: {error}") from None
            sentence = f"stage {self.address} failed ({failure.code.value}): {failure.sentence}"
            raise LinkError(sentence, failure.code)
        if frame.type not in (FrameType.LOG_PROBS, FrameType.REFINED, FrameType.RESEND):
            raise LinkError(f"stage {self.address} answered with {frame.type.name}")
        return frame

    def distrust(self) -> None:
        """The peer sent something no sound stage sends: start over with a new connection."""
        if self._stream is not None:
            self._stream.abort()

    def release(self, session: int) -> None:
        """Have the stage free a session; said again after a lost connection, which may have lost it too."""
        self._released.append(session)
        if self._stream is not None:
            self._stream.post(_release_frame(session))


def _release_frame(session: int) -> bytes:
    return frames.encode_frame(Header(FrameType.RELEASE, session=session))
