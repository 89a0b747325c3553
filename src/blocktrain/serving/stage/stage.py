"""A stage: some blocks behind a TCP port, answering token ids with rows of log-probs.

A connection begins with HELLO, which binds both sides to one model, and then carries any number of
requests, answered in the order they finish. Caches belong to (client, session) and outlive connections.

Covered: a peer with another checkpoint, no token or no manners is refused with a sentence before anything
is allocated for it; a client past its credits is told BUSY; caches are bounded and evicted sessions are
asked to resend; late requests are not computed; a broken frame ends its connection and nothing else; a
drain finishes what was accepted. Not covered: fairness between clients that open many connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from blocktrain.errors import BlocktrainError
from blocktrain.serving.batching import Batcher, CacheGapError, LateError, Outcome, QueueFullError
from blocktrain.serving.blocks import HeldBlocks, Refinement, Work
from blocktrain.serving.engine.fingerprint import model_mismatch
from blocktrain.serving.stage.metrics import StageMetrics
from blocktrain.serving.stage.sessions import Asked, Session, SessionStore, Step, next_step
from blocktrain.serving.transport import Address, ConnectionLostError, FrameStream, server_context
from blocktrain.wire.frame_metadata import (
    Answer,
    Ask,
    Failure,
    FailureCode,
    Hello,
    ModelShape,
    Refine,
    Welcome,
    decode_metadata,
    encode_metadata,
    sentence,
)
from blocktrain.wire.frames import (
    GREETING_LIMITS,
    NO_DEADLINE,
    Codec,
    Frame,
    FrameType,
    Header,
    Limits,
    ServingFrameError,
    decode_ids,
    decode_rows,
    encode_frame,
    encode_rows,
    id_dtype,
    row_bytes,
)
from blocktrain.wire.identity import Identity

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class StageConfig:
    listen: Address = Address("127.0.0.1", 0)
    max_sessions: int = 512
    """Sessions with caches; the least recently used makes room."""
    max_positions: int = 131_072
    """Cached positions over all sessions; a position takes 16 * width bytes per layer in fp32."""
    idle_seconds: float = 120.0
    """A session unused for this long is freed."""
    credits: int = 256
    """Requests one connection may have in flight."""
    max_connections: int = 64
    max_waiting: int = 1024
    """Requests waiting for the blocks, over all connections."""
    hello_seconds: float = 5.0
    """A connection that has not said HELLO by then is closed."""
    drain_seconds: float = 10.0
    token: str | None = None
    """A secret that HELLO must carry."""
    identity: Identity | None = None
    """The key to speak TLS with; None for plain TCP."""


def max_payload_bytes(shape: ModelShape, swept: bool) -> int:
    """A context's ids; with sweep, also a row for each new token."""
    rows = shape.context * row_bytes(Codec.F32, shape.vocabulary) if swept else 0
    return shape.context * id_dtype(shape.vocabulary).itemsize + rows


class RequestRefusedError(BlocktrainError):
    """A request this stage cannot answer, with the code that goes into FAILED."""

    def __init__(self, code: FailureCode, text: str) -> None:
        super().__init__(text)
        self.code = code


@dataclass(eq=False)
class _Connection:
    stream: FrameStream
    client: str = ""
    in_flight: int = 0


class Stage:
    def __init__(self, held: HeldBlocks, shape: ModelShape, config: StageConfig) -> None:
        self.held, self.shape, self.config = held, shape, config
        self.blocks = sorted(held.blocks)
        self.metrics = StageMetrics()
        self.sessions = SessionStore(
            max_sessions=config.max_sessions,
            max_positions=config.max_positions,
            idle_seconds=config.idle_seconds,
        )
        self._limits = Limits(payload_bytes=max_payload_bytes(shape, held.objective.trained_for_sweep))
        self._connections: set[_Connection] = set()
        self._talks: set[asyncio.Task[None]] = set()
        self._requests: set[asyncio.Task[None]] = set()
        self._draining = False
        self._watch_gauges()

    def _watch_gauges(self) -> None:
        self.metrics.sessions.set_function(lambda: len(self.sessions))
        self.metrics.positions.set_function(lambda: self.sessions.num_positions)
        self.metrics.evicted.set_function(lambda: self.sessions.num_evicted)
        self.metrics.connections.set_function(lambda: len(self._connections))

    async def start(self) -> None:
        self._batcher = Batcher(
            self.held, max_waiting=self.config.max_waiting, observe=self.metrics.observe_forward
        )
        self.metrics.waiting.set_function(lambda: self._batcher.num_waiting)
        self._batcher.start()
        context = server_context(self.config.identity) if self.config.identity is not None else None
        listen = self.config.listen
        self._server = await asyncio.start_server(self._accept, listen.host, listen.port, ssl=context)
        self._expiry = asyncio.get_running_loop().create_task(self._expire_sessions())

    @property
    def address(self) -> Address:
        host, port = self._server.sockets[0].getsockname()[:2]
        return Address(host, port)

    async def close(self) -> None:
        """Stop at once."""
        self._server.close()
        self._expiry.cancel()
        for connection in list(self._connections):
            connection.stream.abort()
        for task in (*self._requests, *self._talks):
            task.cancel()
        await asyncio.gather(*self._requests, *self._talks, self._expiry, return_exceptions=True)
        await self._batcher.close()

    async def drain(self) -> None:
        """Take nothing new, finish what was accepted, then stop."""
        self._draining = True
        self._server.close()
        log.info("draining connections=%d", len(self._connections))
        goodbye = encode_frame(Header(FrameType.GOODBYE))
        for connection in list(self._connections):
            with contextlib.suppress(ConnectionLostError):
                await connection.stream.write(goodbye)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.config.drain_seconds):
                while any(connection.in_flight for connection in self._connections):
                    await asyncio.sleep(0.01)
        await self.close()

    async def _expire_sessions(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self.config.idle_seconds / 4)
            self.sessions.expire(loop.time())

    # ---- connections ----

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A task of our own: asyncio's (before 3.12) reports one that was cancelled as an error."""
        talk = asyncio.get_running_loop().create_task(self._serve(_Connection(FrameStream(reader, writer))))
        self._talks.add(talk)
        talk.add_done_callback(self._talks.discard)

    async def _serve(self, connection: _Connection) -> None:
        self._connections.add(connection)
        try:
            await self._converse(connection)
        except ConnectionLostError:
            pass
        except ServingFrameError as error:
            self.metrics.refused.labels(reason=error.reason.name.lower()).inc()
            log.warning("dropped connection peer=%s reason=%s", connection.stream.peer, error)
        finally:
            self._connections.discard(connection)
            self._count_bytes(connection)
            await connection.stream.close()

    async def _converse(self, connection: _Connection) -> None:
        if not await self._greet(connection):
            return
        while True:
            frame = await connection.stream.read(self._limits)
            await self._take(connection, frame)
            self._count_bytes(connection)

    async def _greet(self, connection: _Connection) -> bool:
        """Whether the peer said a HELLO that fits; otherwise it has been told why not."""
        try:
            async with asyncio.timeout(self.config.hello_seconds):
                frame = await connection.stream.read(GREETING_LIMITS)
        except TimeoutError:
            return False
        hello = decode_metadata(frame, Hello) if frame.type == FrameType.HELLO else None
        refusal = self._refusal(hello)
        if refusal is not None or hello is None:
            self.metrics.refused.labels(reason="hello").inc()
            log.warning("refused connection peer=%s reason=%r", connection.stream.peer, refusal)
            failure = encode_metadata(Failure(FailureCode.BAD_REQUEST, sentence(refusal or "")))
            await connection.stream.write(encode_frame(Header(FrameType.REFUSED), failure))
            return False
        connection.client = hello.client
        welcome = Welcome(self.shape, self.blocks, self.config.credits, self.shape.context)
        await connection.stream.write(encode_frame(Header(FrameType.WELCOME), encode_metadata(welcome)))
        return True

    def _refusal(self, hello: Hello | None) -> str | None:
        """Why this peer is of no use, or None."""
        if hello is None:
            return "expected HELLO as the first frame"
        if self.config.token is not None and not hmac.compare_digest(
            hello.token.encode(), self.config.token.encode()
        ):
            return "this stage asks for a token, and HELLO carried none or another"
        if len(self._connections) > self.config.max_connections:
            return f"this stage already has {self.config.max_connections} connections"
        if self._draining:
            return "this stage is shutting down"
        return model_mismatch(expected=self.shape, found=hello.model)

    def _count_bytes(self, connection: _Connection) -> None:
        stream = connection.stream
        self.metrics.bytes_received.inc(stream.bytes_received)
        self.metrics.bytes_sent.inc(stream.bytes_sent)
        stream.bytes_received = stream.bytes_sent = 0

    # ---- requests ----

    async def _take(self, connection: _Connection, frame: Frame) -> None:
        if frame.type == FrameType.PING:
            await connection.stream.write(encode_frame(replace(frame.header, type=FrameType.PONG)))
        elif frame.type == FrameType.RELEASE:
            # After the tasks of earlier requests have begun, one of which may be the session's first.
            asyncio.get_running_loop().call_soon(self._release, connection, frame.header.session)
        elif frame.type in (FrameType.TRAVERSE, FrameType.SCORE, FrameType.EXACT, FrameType.REFINE):
            await self._admit(connection, frame)
        else:
            text = f"{frame.type.name} is not a request"
            await self._fail(connection, frame, FailureCode.BAD_REQUEST, text)

    def _release(self, connection: _Connection, session: int) -> None:
        released = self.sessions.release((connection.client, session))
        if released is not None and released.outcome is not None:
            released.outcome.cancel()

    async def _admit(self, connection: _Connection, frame: Frame) -> None:
        """One task per request, as many as the connection has credits."""
        if connection.in_flight >= self.config.credits:
            await self._fail(connection, frame, FailureCode.BUSY, "more requests in flight than credits")
            return
        connection.in_flight += 1
        task = asyncio.get_running_loop().create_task(self._answer(connection, frame))
        self._requests.add(task)
        task.add_done_callback(self._requests.discard)

    async def _answer(self, connection: _Connection, frame: Frame) -> None:
        """Compute and reply; whatever goes wrong becomes a frame that says so."""
        try:
            if frame.type == FrameType.REFINE:
                await self._refine(connection, frame)
                return
            outcome = await self._ask(connection, frame)
            if outcome is None:
                await self._reply(connection, frame, Header(FrameType.RESEND), "resend")
            else:
                await self._reply_rows(connection, frame, outcome)
        except ConnectionLostError:
            pass
        except ServingFrameError as error:
            await self._fail(connection, frame, FailureCode.BAD_REQUEST, str(error))
        except RequestRefusedError as error:
            await self._fail(connection, frame, error.code, str(error))
        except LateError as error:
            await self._fail(connection, frame, FailureCode.LATE, str(error))
        except QueueFullError as error:
            await self._fail(connection, frame, FailureCode.BUSY, str(error))
        except asyncio.CancelledError:
            await self._cancelled(connection, frame)
        except Exception as error:
            log.exception("failed request type=%s", frame.type.name)
            await self._fail(connection, frame, FailureCode.INTERNAL, f"{type(error).__name__}: {error}")
        finally:
            connection.in_flight -= 1

    async def _ask(self, connection: _Connection, frame: Frame) -> Outcome | None:
        handlers: dict[FrameType, Callable[[_Connection, Frame, Ask, list[int]], Awaitable[Outcome | None]]]
        handlers = {
            FrameType.TRAVERSE: self._traverse,
            FrameType.SCORE: self._score,
            FrameType.EXACT: self._exact,
        }
        ask = decode_metadata(frame, Ask)
        ids = decode_ids(frame.payload, self.shape.vocabulary)
        self._check(frame.header, ask, ids)
        return await handlers[frame.type](connection, frame, ask, ids)

    async def _cancelled(self, connection: _Connection, frame: Frame) -> None:
        """Either this task was cancelled by close(), or its session was released while it waited."""
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise asyncio.CancelledError
        await self._fail(connection, frame, FailureCode.STALE, "the session was released")

    def _check(self, header: Header, ask: Ask, ids: list[int]) -> None:
        unknown = [block for block in ask.blocks if block not in self.held.blocks]
        if unknown or not ask.blocks:
            raise RequestRefusedError(
                FailureCode.BAD_REQUEST,
                f"expected blocks among {self.blocks}, found {ask.blocks}; route by the blocks of WELCOME",
            )
        fits = 1 <= header.rows <= len(ids) and header.base + len(ids) <= self.shape.context
        if not fits:
            raise RequestRefusedError(
                FailureCode.BAD_REQUEST,
                f"expected 1 to {len(ids)} rows and positions up to {self.shape.context}, found "
                f"{header.rows} rows and {header.base} + {len(ids)} positions",
            )
        if header.codec == Codec.NONE:
            raise RequestRefusedError(FailureCode.BAD_REQUEST, "expected a codec for the rows, found none")

    def _deadline(self, header: Header) -> float:
        if header.deadline_ms == NO_DEADLINE:
            return float("inf")
        return asyncio.get_running_loop().time() + header.deadline_ms / 1000

    async def _traverse(
        self, connection: _Connection, frame: Frame, ask: Ask, ids: list[int]
    ) -> Outcome | None:
        """The outcome of a session's traversal; None asks the client to resend."""
        header, key = frame.header, (connection.client, frame.header.session)
        session = self.sessions.get(key)
        asked = Asked(header.epoch, header.traversal, header.base, tuple(ask.blocks), ask.prefix)
        step = next_step(session, asked)
        if step is Step.STALE:
            raise RequestRefusedError(FailureCode.STALE, "a newer traversal of this session was asked")
        if step is Step.RESEND:
            return None
        if step is Step.RUN:
            if session is None or header.epoch > session.epoch:
                session = Session(header.epoch, asked.blocks, self.held.new_caches(asked.blocks))
            self._begin(session, header, ids)
            self.sessions.put(key, session, asyncio.get_running_loop().time())
        assert session is not None
        assert session.outcome is not None
        try:
            return await asyncio.shield(session.outcome)
        except CacheGapError:
            return None
        except Exception:
            # Its caches may be half way through a forward pass: nothing may continue from them.
            if self.sessions.get(key) is session:
                self.sessions.release(key)
            raise

    def _begin(self, session: Session, header: Header, ids: list[int]) -> None:
        work = Work(ids, header.rows, session.blocks, session.caches, header.base)
        session.outcome = self._batcher.submit(work, exact=False, deadline=self._deadline(header))
        session.ids = [*session.ids[: header.base], *ids]
        session.traversal = header.traversal

    async def _score(self, connection: _Connection, frame: Frame, ask: Ask, ids: list[int]) -> Outcome:
        blocks = tuple(ask.blocks)
        work = Work(ids, frame.header.rows, blocks, self.held.new_caches(blocks))
        return await self._batcher.rows(work, self._deadline(frame.header))

    async def _exact(self, connection: _Connection, frame: Frame, ask: Ask, ids: list[int]) -> Outcome:
        return await self._batcher.exact_row(ids, tuple(ask.blocks), self._deadline(frame.header))

    async def _refine(self, connection: _Connection, frame: Frame) -> None:
        """Rows of a sweep through this stage's blocks; nothing is kept."""
        if not self.held.objective.trained_for_sweep:
            raise RequestRefusedError(FailureCode.BAD_REQUEST, "this model was not trained for sweep")
        ask = decode_metadata(frame, Refine)
        task, rows = self._read_refinement(frame, ask)
        blocks, began = tuple(ask.blocks), asyncio.get_running_loop().time()
        refined = await self._batcher.call(
            lambda: self.held.refine(task, blocks, rows), self._deadline(frame.header)
        )
        seconds = asyncio.get_running_loop().time() - began
        last = blocks[-1] == self.shape.num_blocks - 1
        kind = FrameType.LOG_PROBS if last else FrameType.REFINED
        await self._reply_rows(connection, frame, Outcome(refined, 0.0, seconds), kind)

    def _read_refinement(self, frame: Frame, ask: Refine) -> tuple[Refinement, NDArray[np.float64] | None]:
        header, vocabulary = frame.header, self.shape.vocabulary
        run = list(range(ask.blocks[0], ask.blocks[-1] + 1)) if ask.blocks else []
        fits = ask.num_known >= 1 and header.rows >= 1 and header.codec == Codec.F32
        if ask.blocks != run or not set(run) <= set(self.blocks) or not run:
            raise RequestRefusedError(
                FailureCode.BAD_REQUEST, f"expected neighbours among blocks {self.blocks}, found {ask.blocks}"
            )
        if not fits or ask.num_known + header.rows - 1 > self.shape.context:
            raise RequestRefusedError(
                FailureCode.BAD_REQUEST,
                f"expected known and new tokens of at most {self.shape.context + 1} in all and rows as F32, "
                f"found {ask.num_known} and {header.rows} as {header.codec.name}",
            )
        end = ask.num_known * id_dtype(vocabulary).itemsize
        known, rest = decode_ids(frame.payload[:end], vocabulary), frame.payload[end:]
        rows = decode_rows(rest, Codec.F32, header.rows, vocabulary) if ask.begun else None
        if len(known) != ask.num_known or (rest and not ask.begun):
            raise RequestRefusedError(FailureCode.BAD_REQUEST, "the payload does not fit its metadata")
        task = Refinement(
            known=known, num_new=header.rows, seed=ask.seed, position=ask.position, passes=ask.passes
        )
        return task, rows

    async def _reply_rows(
        self,
        connection: _Connection,
        frame: Frame,
        outcome: Outcome,
        kind: FrameType = FrameType.LOG_PROBS,
    ) -> None:
        if not np.isfinite(outcome.rows).all():
            raise RequestRefusedError(FailureCode.INTERNAL, "the blocks gave NaN or infinite log-probs")
        codec = Codec.F64 if frame.type == FrameType.EXACT else frame.header.codec
        header = Header(kind, codec, rows=len(outcome.rows))
        answer = Answer(outcome.queue_seconds * 1000, outcome.compute_seconds * 1000)
        self.metrics.rows.inc(len(outcome.rows))
        payload = encode_rows(outcome.rows, codec)
        await self._reply(connection, frame, header, "ok", encode_metadata(answer), payload)

    async def _fail(self, connection: _Connection, frame: Frame, code: FailureCode, text: str) -> None:
        metadata = encode_metadata(Failure(code, sentence(text)))
        with contextlib.suppress(ConnectionLostError):
            await self._reply(connection, frame, Header(FrameType.FAILED), code.value, metadata)

    async def _reply(
        self,
        connection: _Connection,
        frame: Frame,
        header: Header,
        outcome: str,
        metadata: bytes = b"",
        payload: bytes = b"",
    ) -> None:
        """A frame that names the request it answers."""
        asked = frame.header
        named = replace(
            header, session=asked.session, epoch=asked.epoch, traversal=asked.traversal, base=asked.base
        )
        self.metrics.requests.labels(type=frame.type.name.lower(), outcome=outcome).inc()
        await connection.stream.write(encode_frame(named, metadata, payload))
