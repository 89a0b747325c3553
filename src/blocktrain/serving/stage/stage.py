"""A stage: some blocks behind a TCP port, answering token ids with rows of log-probs.

A connection begins with HELLO, which binds both sides to one model, and then carries any number of
requests, answered in the order they finish. Caches belong to (client, session) and outlive connections. A
part of a serial model hands what it computed to the stage that the request names next; the last one answers
the client that asked the first, over that client's own connection.

Covered: a peer with another checkpoint, no token or no manners is refused with a sentence before anything
is allocated for it; a client past its credits is told BUSY; caches are bounded and evicted sessions are
asked to resend; late requests are not computed; a broken frame ends its connection and nothing else; a
drain finishes what was accepted. Not covered: fairness between clients that open many connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from blocktrain.errors import BlocktrainError
from blocktrain.model.sampling import Sampler, best_scores
from blocktrain.serving.batching import Batcher, CacheGapError, LateError, QueueFullError
from blocktrain.serving.blocks import HeldBlocks, Refinement, RowWork, WeighedRows
from blocktrain.serving.fingerprint import model_mismatch
from blocktrain.serving.stage.metrics import StageMetrics
from blocktrain.serving.stage.onward import Onward
from blocktrain.serving.stage.sessions import Asked, Session, SessionKey, SessionStore, Step, next_step
from blocktrain.serving.transport import (
    Address,
    ConnectionLostError,
    FrameStream,
    PinError,
    server_context,
)
from blocktrain.wire import frames
from blocktrain.wire.frame_metadata import (
    MAX_BEST_TOKENS,
    Ask,
    Failure,
    FailureCode,
    Handed,
    Hello,
    ModelShape,
    Refine,
    Welcome,
    decode_metadata,
    encode_metadata,
    sentence,
)
from blocktrain.wire.frames import (
    ActivationCodec,
    Codec,
    Frame,
    FrameLimits,
    FrameType,
    Header,
    ServingFrameError,
)
from blocktrain.wire.identity import Identity

log = logging.getLogger(__name__)

T = TypeVar("T")

LARGE_BYTES = 1 << 20
QUESTIONS = (FrameType.TRAVERSE, FrameType.SCORE, FrameType.EXACT)
"""What is answered with rows."""
REQUESTS = (*QUESTIONS, FrameType.REFINE, FrameType.HAND_ON)
"""What is answered when it is computed."""
MAX_BEST_ROWS = 64
"""Rows with codec BEST in one request, twice what an engine drafts: their noise is computed for each."""


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


class RequestRefusedError(BlocktrainError):
    """A request this stage cannot answer, with the code that goes into FAILED."""

    def __init__(self, code: FailureCode, text: str) -> None:
        super().__init__(text)
        self.code = code


FAILURE_CODES: dict[type[Exception], FailureCode] = {
    ServingFrameError: FailureCode.BAD_REQUEST,
    LateError: FailureCode.LATE,
    QueueFullError: FailureCode.BUSY,
}
"""What other errors are called in FAILED; what is not listed is INTERNAL, and logged."""


@dataclass(eq=False)
class ServedModel:
    """A checkpoint's blocks with their sessions. While a newer one takes over, both are here."""

    held: HeldBlocks
    shape: ModelShape
    sessions: SessionStore
    batcher: Batcher

    @property
    def limits(self) -> FrameLimits:
        """A context's ids; with sweep, also a row for each new token, and in a serial model activations."""
        position_bytes = frames.id_dtype(self.shape.vocabulary).itemsize
        if self.held.objective.trained_for_sweep:
            position_bytes += frames.row_bytes(Codec.F32, self.shape.vocabulary)
        if self.held.objective.is_serial:
            position_bytes += frames.activation_bytes(ActivationCodec.F64, self.shape.width)
        return FrameLimits(payload_bytes=self.shape.context * position_bytes)


@dataclass(eq=False)
class _Connection:
    stream: FrameStream
    model: ServedModel
    """What HELLO asked for; before it, the newest."""
    client: str = ""
    in_flight: int = 0
    number: int = field(default_factory=itertools.count().__next__)
    """The later, the greater."""


class _Asked(NamedTuple):
    """A TRAVERSE, SCORE or EXACT, as the client sent it or as the stage before this one handed it on."""

    kind: FrameType
    connection: _Connection
    """The client's, for the answer."""
    ask: Ask
    ids: list[int]
    deadline: float
    """On the event loop's clock."""
    upstream_TD: NDArray[Any] | None = None


class Stage:
    """A running stage, made by `Stage.open`."""

    _server: asyncio.Server
    _expiry: asyncio.Task[None]

    def __init__(self, held: HeldBlocks, shape: ModelShape, config: StageConfig) -> None:
        self.config = config
        self.blocks = sorted(held.blocks)
        self.metrics = StageMetrics()
        self.newest = self._model(held, shape)
        self._models = [self.newest]
        self._connections: set[_Connection] = set()
        self._talks: set[asyncio.Task[None]] = set()
        self._requests: set[asyncio.Task[None]] = set()
        self._onward = Onward(config.token)
        self._draining = False
        self.metrics.sessions.set_function(lambda: sum(len(one.sessions) for one in self._models))
        self.metrics.positions.set_function(lambda: sum(one.sessions.num_positions for one in self._models))
        self.metrics.evicted.set_function(lambda: self.newest.sessions.num_evicted)
        self.metrics.connections.set_function(lambda: len(self._connections))
        self.metrics.waiting.set_function(lambda: sum(one.batcher.num_waiting for one in self._models))

    def _model(self, held: HeldBlocks, shape: ModelShape) -> ServedModel:
        config = self.config
        sessions = SessionStore(
            max_sessions=config.max_sessions,
            max_positions=config.max_positions,
            idle_seconds=config.idle_seconds,
        )
        batcher = Batcher(held, max_waiting=config.max_waiting, observe=self.metrics.observe_forward)
        return ServedModel(held, shape, sessions, batcher)

    @property
    def shape(self) -> ModelShape:
        return self.newest.shape

    @property
    def sessions(self) -> SessionStore:
        return self.newest.sessions

    async def adopt(self, held: HeldBlocks, shape: ModelShape) -> None:
        """Serve newer weights of the same blocks too. Connections stay with the model they asked for, and one
        that nobody is connected to any more is dropped when the next is adopted."""
        # A roll back names a model that may still be here.
        known = [one for one in self._models if one.shape == shape]
        self.newest = known[0] if known else self._model(held, shape)
        used = {id(connection.model) for connection in self._connections} | {id(self.newest)}
        unused = [one for one in self._models if id(one) not in used]
        self._models = [one for one in self._models if id(one) in used and one is not self.newest]
        self._models.append(self.newest)
        for one in unused:
            await one.batcher.close()

    @classmethod
    async def open(cls, held: HeldBlocks, shape: ModelShape, config: StageConfig) -> Stage:
        """A stage that listens."""
        stage = cls(held, shape, config)
        context = server_context(config.identity) if config.identity is not None else None
        stage._server = await asyncio.start_server(
            stage._accept, config.listen.host, config.listen.port, ssl=context
        )
        stage._expiry = asyncio.get_running_loop().create_task(stage._expire_sessions())
        return stage

    @property
    def address(self) -> Address:
        host, port = self._server.sockets[0].getsockname()[:2]
        return Address(host, port)

    async def close(self) -> None:
        """Stop at once."""
        self._server.close()
        self._expiry.cancel()
        # Before the tasks: what they would still write goes nowhere.
        for connection in list(self._connections):
            connection.stream.abort()
        for task in (*self._requests, *self._talks):
            task.cancel()
        await asyncio.gather(*self._requests, *self._talks, self._expiry, return_exceptions=True)
        await self._onward.close()
        for one in self._models:
            await one.batcher.close()

    async def drain(self) -> None:
        """Take nothing new, finish what was accepted, then stop."""
        self._draining = True
        self._server.close()
        log.info("draining connections=%d", len(self._connections))
        # Engines that read GOODBYE ask a spare from now on, so nothing is lost by closing after this.
        goodbye = frames.encode_frame(Header(FrameType.GOODBYE))
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
            # A client that died sent no RELEASE; its caches would stay until others push them out.
            for one in self._models:
                one.sessions.expire(loop.time())

    # ---- connections ----

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A task of our own: asyncio's (before 3.12) reports one that was cancelled as an error.
        connection = _Connection(FrameStream(reader, writer), self.newest)
        talk = asyncio.get_running_loop().create_task(self._talk(connection))
        self._talks.add(talk)
        talk.add_done_callback(self._talks.discard)

    async def _talk(self, connection: _Connection) -> None:
        """One connection from HELLO to its end; a broken frame ends it and nothing else."""
        self._connections.add(connection)
        try:
            if await self._greet(connection):
                while True:
                    await self._take(connection, await connection.stream.read(connection.model.limits))
                    # Not for each of 64 questions that come at once: a counter takes a lock.
                    if not connection.stream.has_more:
                        self._count_bytes(connection.stream)
        except ConnectionLostError:
            pass
        except ServingFrameError as error:
            self.metrics.refused.labels(reason=error.reason.name.lower()).inc()
            log.warning("dropped connection peer=%s reason=%s", connection.stream.peer, error)
        finally:
            self._connections.discard(connection)
            self._count_bytes(connection.stream)
            await connection.stream.close()

    def _count_bytes(self, stream: FrameStream) -> None:
        self.metrics.bytes_received.inc(stream.bytes_received)
        self.metrics.bytes_sent.inc(stream.bytes_sent)
        stream.bytes_received = stream.bytes_sent = 0

    async def _greet(self, connection: _Connection) -> bool:
        """Whether the peer said a HELLO that fits; otherwise it has been told why not."""
        config, stream = self.config, connection.stream
        try:
            async with asyncio.timeout(config.hello_seconds):
                frame = await stream.read(frames.GREETING_LIMITS)
        except TimeoutError:
            return False
        # Nothing has been allocated for this peer but 4 KiB of metadata.
        hello = decode_metadata(frame, Hello) if frame.type == FrameType.HELLO else None
        refusal: str | None
        if hello is None:
            refusal = "expected HELLO as the first frame"
        elif config.token is not None and not hmac.compare_digest(
            hello.token.encode(), config.token.encode()
        ):
            refusal = "this stage asks for a token, and HELLO carried none or another"
        elif len(self._connections) > config.max_connections:
            refusal = f"this stage already has {config.max_connections} connections"
        elif self._draining:
            refusal = "this stage is shutting down"
        else:
            known = [one for one in self._models if one.shape == hello.model]
            connection.model = known[0] if known else self.newest
            refusal = model_mismatch(expected=connection.model.shape, found=hello.model)
        if refusal is not None or hello is None:
            self.metrics.refused.labels(reason="hello").inc()
            log.warning("refused connection peer=%s reason=%r", stream.peer, refusal)
            failure = encode_metadata(Failure(FailureCode.BAD_REQUEST, sentence(refusal or "")))
            await stream.write(frames.encode_frame(Header(FrameType.REFUSED), failure))
            return False
        connection.client = hello.client
        # `max_rows` is read by no engine; it stays so that older engines can read WELCOME.
        shape = connection.model.shape
        welcome = Welcome(shape, self.blocks, config.credits, shape.context)
        # In the header and not in WELCOME, whose fields older engines know by heart. `base` says that a
        # session may begin with what another has cached, 2 that the other one may be under way.
        header = Header(FrameType.WELCOME, rows=MAX_BEST_TOKENS, base=2)
        await stream.write(frames.encode_frame(header, encode_metadata(welcome)))
        return True

    # ---- requests ----

    async def _take(self, connection: _Connection, frame: Frame) -> None:
        """Answer what takes no computing at once; the rest gets a task each, as many as there are credits."""
        if frame.type == FrameType.PING:
            await connection.stream.write(frames.encode_frame(frame.header._replace(type=FrameType.PONG)))
        elif frame.type == FrameType.RELEASE:
            # After the tasks of earlier requests have begun, one of which may be the session's first.
            asyncio.get_running_loop().call_soon(
                self._release, connection.model.sessions, (connection.client, frame.header.session)
            )
        elif frame.type not in REQUESTS:
            text = f"{frame.type.name} is not a request"
            await self._fail(connection, frame, FailureCode.BAD_REQUEST, text)
        # A well-behaved client waits for a credit; this bounds the tasks of one that does not.
        elif connection.in_flight >= self.config.credits:
            await self._fail(connection, frame, FailureCode.BUSY, "more requests in flight than credits")
        else:
            connection.in_flight += 1
            self._requests.add(asyncio.get_running_loop().create_task(self._answer(connection, frame)))

    def _release(self, sessions: SessionStore, key: SessionKey) -> None:
        released = sessions.release(key)
        if released is not None:
            released.supersede(0)

    async def _answer(self, carrier: _Connection, frame: Frame) -> None:
        """Compute and reply, or hand on; whatever goes wrong becomes a frame that says so. `carrier` brought
        the frame; where that is another stage, the answer goes to the client all the same."""
        connection = carrier
        try:
            kind, codec = FrameType.LOG_PROBS, frame.header.codec
            logs = np.empty((0, 0))
            asked = found = None
            if frame.type == FrameType.REFINE:
                kind, rows = await self._refined(connection.model, frame)
            else:
                if frame.type == FrameType.HAND_ON:
                    connection = self._client_of(carrier, frame)
                asked = await self._read(connection, frame)
                found = await self._rows(asked, frame.header)
                if found is None:
                    await self._reply(connection, frame, Header(FrameType.RESEND), "resend")
                    return
                if found.features_TD is not None:
                    await self._hand_on(asked, frame.header, found.features_TD)
                    self.metrics.count_request(frame.type, "handed_on")
                    return
                rows, logs = found.rows, found.log_weights
                codec = Codec.F64 if asked.kind == FrameType.EXACT else codec
            self.metrics.rows.inc(len(rows))
            header = Header(kind, codec, rows=len(rows))
            draw = asked.ask.draw if asked is not None and codec == Codec.BEST else None
            # The same traversal may be asked again for other rows than before.
            if (
                found is not None
                and found.encoded is not None
                and (codec, draw) == (found.encoded[0], found.draw)
            ):
                await self._reply(connection, frame, header, "ok", payload=found.encoded[1])
                return
            # Said here with a sentence; the engine would take such a row for a broken stage.
            if not (np.isfinite(rows).all() and np.isfinite(logs).all()):
                raise RequestRefusedError(FailureCode.INTERNAL, "the blocks gave NaN or infinite log-probs")
            if codec == Codec.BEST and asked is not None:
                # In a thread: the noise of a row over 32,768 tokens takes a millisecond.
                encoded = await asyncio.to_thread(_best, connection.model, asked.ask, rows)
            else:
                encoded = frames.encode_rows(rows, codec)
            payload = encoded + frames.encode_log_weights(logs)
            await self._reply(connection, frame, header, "ok", payload=payload)
        except ConnectionLostError:
            pass
        except asyncio.CancelledError:
            # Either close() cancelled this task, or its session was released while it waited, or a traversal
            # came that begins before it.
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            text = "the session was released, or another traversal of it begins before this one"
            await self._fail(connection, frame, FailureCode.STALE, text)
        except RequestRefusedError as error:
            await self._fail(connection, frame, error.code, str(error))
        except tuple(FAILURE_CODES) as error:
            await self._fail(connection, frame, FAILURE_CODES[type(error)], str(error))
        except Exception as error:
            log.exception("failed request type=%s", frame.type.name)
            await self._fail(connection, frame, FailureCode.INTERNAL, f"{type(error).__name__}: {error}")
        finally:
            carrier.in_flight -= 1
            task = asyncio.current_task()
            assert task is not None
            self._requests.discard(task)

    def _client_of(self, carrier: _Connection, frame: Frame) -> _Connection:
        """The connection of the client that a HAND_ON names."""
        name = decode_metadata(frame, Handed).client
        known = (one for one in self._connections if one.client == name and one.model is carrier.model)
        # The newest: an older one may be dead and not know it yet.
        client = max(known, key=lambda one: one.number, default=None)
        if client is None:
            # The client sees that it lost its connection to this stage, and asks again when it has one.
            raise ConnectionLostError("the client of what was handed on is not connected here")
        return client

    def _deadline(self, header: Header) -> float:
        if header.deadline_ms == frames.NO_DEADLINE:
            return float("inf")
        return asyncio.get_running_loop().time() + header.deadline_ms / 1000

    async def _read(self, connection: _Connection, frame: Frame) -> _Asked:
        """A question to this stage whose blocks, rows and payload fit its model and one another."""
        model, header, kind = connection.model, frame.header, frame.type
        upstream_TD = None
        if frame.type == FrameType.HAND_ON:
            handed = decode_metadata(frame, Handed)
            kind, ask = handed.kind, handed.ask
            id_bytes = frames.id_dtype(model.shape.vocabulary).itemsize
            codec = ActivationCodec.F64 if kind == FrameType.EXACT else ask.activations
            count = len(frame.payload) // (id_bytes + frames.activation_bytes(codec, model.shape.width))
            end = count * id_bytes
            ids = frames.decode_ids(frame.payload[:end], model.shape.vocabulary)
            upstream_TD = await in_thread_if_large(
                len(frame.payload),
                lambda: frames.decode_activations(frame.payload[end:], codec, count, model.shape.width),
            )
        else:
            ask = decode_metadata(frame, Ask)
            ids = frames.decode_ids(frame.payload, model.shape.vocabulary)
        problem = None
        blocks, last = tuple(ask.blocks), model.shape.num_blocks - 1
        if not blocks or not model.held.blocks.keys() >= set(blocks):
            problem = (
                f"expected blocks among {self.blocks}, found {ask.blocks}; route by the blocks of WELCOME"
            )
        elif not 1 <= header.rows <= len(ids) or header.base + len(ids) > model.shape.context:
            problem = (
                f"expected 1 to {len(ids)} rows and positions up to {model.shape.context}, found "
                f"{header.rows} rows and {header.base} + {len(ids)} positions"
            )
        elif header.codec == Codec.NONE:
            problem = "expected a codec for the rows, found none"
        elif header.codec == Codec.BEST and (ask.draw is None or header.rows > MAX_BEST_ROWS):
            problem = f"expected up to {MAX_BEST_ROWS} rows and how to draw with the codec BEST"
        elif kind not in QUESTIONS:
            problem = f"expected what TRAVERSE, SCORE or EXACT asked to be handed on, found {kind.name}"
        elif not model.held.objective.is_serial:
            if ask.onward or upstream_TD is not None:
                problem = (
                    "expected a serial model where stages hand on; the blocks of this one are independent"
                )
        elif blocks != tuple(range(blocks[0], blocks[-1] + 1)) or (blocks[-1] == last) == bool(ask.onward):
            problem = (
                f"expected neighbours of a serial model, and the next stage unless the last of {last + 1} is "
                f"among them, found {ask.blocks} and {len(ask.onward)} stages behind"
            )
        elif blocks[0] == 0 and upstream_TD is not None:
            problem = "expected nothing before the first part of a serial model"
        elif ask.onward:
            problem = self._onward.refusal(ask.onward[0].address)
        if problem is not None:
            raise RequestRefusedError(FailureCode.BAD_REQUEST, problem)
        return _Asked(
            kind=kind,
            connection=connection,
            ask=ask,
            ids=ids,
            deadline=self._deadline(header),
            upstream_TD=upstream_TD,
        )

    async def _rows(self, asked: _Asked, header: Header) -> WeighedRows | None:
        """What the asked blocks give; None asks the client to resend its ids."""
        connection, ids, ask = asked.connection, asked.ids, asked.ask
        model, blocks = connection.model, tuple(ask.blocks)
        serial = model.held.objective.is_serial
        # Of a serial model the last part alone has rows; the others hand on.
        rows_of = (() if ask.onward else blocks[-1:]) if serial else blocks
        # Without what the parts before made of the ids, only what is in memory can be answered.
        lacks_upstream = serial and blocks[0] > 0 and asked.upstream_TD is None
        if asked.kind != FrameType.TRAVERSE:
            if lacks_upstream:
                return None
            caches = model.held.new_caches(blocks, alone=serial)
            work = RowWork(ids, header.rows, rows_of, caches, upstream_TD=asked.upstream_TD)
            work.exact = asked.kind == FrameType.EXACT
            return await model.batcher.submit(work, asked.deadline)

        key = (connection.client, header.session)
        session = model.sessions.get(key)
        wanted = Asked(header.epoch, header.traversal, header.base, blocks, ask.prefix)
        step = next_step(session, wanted)
        other = model.sessions.get((connection.client, ask.like)) if ask.like is not None else None
        if session is None and other is not None and other.may_be_copied:
            step = next_step(other, wanted._replace(epoch=other.epoch, traversal=other.traversal + 1))
        else:
            other = None
        if step is Step.STALE:
            raise RequestRefusedError(FailureCode.STALE, "a newer traversal of this session was asked")
        if step is Step.RESEND or (step is Step.RUN and lacks_upstream):
            return None
        # The caches of an older epoch are dropped here: the client counts on nothing in them.
        if step is Step.RUN:
            known = other.ids[: header.base] if other is not None else []
            if session is None or header.epoch > session.epoch:
                session = Session(header.epoch, blocks, model.held.new_caches(blocks, alone=serial), known)
            work = RowWork(ids, header.rows, rows_of, session.caches, header.base)
            work.upstream_TD = asked.upstream_TD
            if other is not None:
                work.like, work.known = other.caches, known
            work.codec = header.codec if rows_of else None
            work.draw = ask.draw if header.codec == Codec.BEST else None
            session.supersede(header.base)
            session.outcome = model.batcher.submit(work, asked.deadline)
            session.waiting.append((header.base, session.outcome))
            session.ids = [*session.ids[: header.base], *ids]
            session.checksum = frames.prefix_checksum(ids, ask.prefix if header.base else 0)
            session.traversal = header.traversal
            model.sessions.put(key, session, asyncio.get_running_loop().time())
        assert session is not None
        assert session.outcome is not None
        try:
            # Not shielded: the same traversal may be asked again, but no asker is cancelled before the stage
            # closes.
            found = await session.outcome
        except CacheGapError:
            return None
        except Exception:
            # Its caches may be half way through a forward pass: nothing may continue from them.
            if model.sessions.get(key) is session:
                model.sessions.release(key)
            raise
        # Asked again with other stages behind it than before.
        if (found.features_TD is None) == bool(ask.onward):
            return None
        if found.features_TD is None or len(found.features_TD) == len(ids):
            return found
        # Asked again, a traversal may begin later than the first time: the positions before are known behind.
        if len(found.features_TD) < len(ids):
            return None
        return found._replace(features_TD=found.features_TD[-len(ids) :])

    async def _hand_on(self, asked: _Asked, header: Header, features_TD: NDArray[Any]) -> None:
        """Send what this stage's parts made of the ids to the next stage."""
        hop, *rest = asked.ask.onward
        address, model = Address.parse(hop.address), asked.connection.model
        if not np.isfinite(features_TD).all():
            raise RequestRefusedError(FailureCode.INTERNAL, "the blocks gave NaN or infinite activations")
        codec = ActivationCodec.F64 if asked.kind == FrameType.EXACT else asked.ask.activations
        values = await in_thread_if_large(
            features_TD.nbytes, lambda: frames.encode_activations(features_TD, codec)
        )
        left = asked.deadline - asyncio.get_running_loop().time()
        deadline_ms = frames.NO_DEADLINE if left == float("inf") else max(0, int(1000 * left))
        ask = msgspec.structs.replace(asked.ask, blocks=hop.blocks, onward=rest)
        raw = frames.encode_frame(
            header._replace(type=FrameType.HAND_ON, deadline_ms=deadline_ms),
            encode_metadata(Handed(asked.connection.client, asked.kind, ask)),
            frames.encode_ids(asked.ids, model.shape.vocabulary) + values,
        )
        try:
            self.metrics.bytes_sent.inc(await self._onward.send(address, model.shape, raw))
        except (ConnectionLostError, PinError) as error:
            raise RequestRefusedError(FailureCode.ONWARD, f"cannot hand on: {error}") from None

    async def _refined(self, model: ServedModel, frame: Frame) -> tuple[FrameType, NDArray[Any]]:
        """Rows of a sweep through this stage's blocks; nothing is kept."""
        header, shape = frame.header, model.shape
        if not model.held.objective.trained_for_sweep:
            raise RequestRefusedError(FailureCode.BAD_REQUEST, "this model was not trained for sweep")
        ask = decode_metadata(frame, Refine)
        blocks = tuple(ask.blocks)
        run = tuple(range(blocks[0], blocks[-1] + 1)) if blocks else ()
        if blocks != run or not run or not set(run) <= set(self.blocks):
            raise RequestRefusedError(
                FailureCode.BAD_REQUEST, f"expected neighbours among blocks {self.blocks}, found {ask.blocks}"
            )
        fits = ask.num_known >= 1 and header.rows >= 1 and header.codec == Codec.F32
        if not fits or ask.num_known + header.rows - 1 > shape.context:
            raise RequestRefusedError(
                FailureCode.BAD_REQUEST,
                f"expected known and new tokens of at most {shape.context + 1} in all and rows as F32, "
                f"found {ask.num_known} and {header.rows} as {header.codec.name}",
            )
        end = ask.num_known * frames.id_dtype(shape.vocabulary).itemsize
        known, rest = frames.decode_ids(frame.payload[:end], shape.vocabulary), frame.payload[end:]
        rows = frames.decode_rows(rest, Codec.F32, header.rows, shape.vocabulary) if ask.begun else None
        if len(known) != ask.num_known or (rest and not ask.begun):
            raise RequestRefusedError(FailureCode.BAD_REQUEST, "the payload does not fit its metadata")
        task = Refinement(
            known=known, num_new=header.rows, seed=ask.seed, position=ask.position, passes=ask.passes
        )
        refined = await model.batcher.call(
            lambda: model.held.refine(task, blocks, rows), self._deadline(header)
        )
        is_last = blocks[-1] == shape.num_blocks - 1
        return FrameType.LOG_PROBS if is_last else FrameType.REFINED, refined

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
        named = Header(
            header.type,
            header.codec,
            session=asked.session,
            epoch=asked.epoch,
            traversal=asked.traversal,
            base=asked.base,
            rows=header.rows,
        )
        self.metrics.count_request(frame.type, outcome)
        await connection.stream.write(frames.encode_frame(named, metadata, payload))


async def in_thread_if_large(num_bytes: int, function: Callable[[], T]) -> T:
    """2,000 positions of width 4,096 are 32 MB, which would hold up the event loop. Small ones stay in it, so
    that traversals of one session reach the next stage in their order."""
    return await asyncio.to_thread(function) if num_bytes > LARGE_BYTES else function()


def _best(model: ServedModel, ask: Ask, rows: NDArray[Any]) -> bytes:
    """The best tokens of each row and their scores."""
    draw = ask.draw
    assert draw is not None, "checked when the rows were asked for"
    sampler = Sampler(seed=draw.seed, temperature=draw.temperature)
    places = [(sampler, draw.position + i) for i in range(len(rows))]
    ids, scores = best_scores(rows, places, model.held.share_of(ask.blocks), draw.tokens)
    if not np.isfinite(scores).all():
        raise RequestRefusedError(
            FailureCode.BAD_REQUEST, f"no finite scores at temperature {draw.temperature}; expected more"
        )
    return frames.encode_best(ids, scores, model.shape.vocabulary, [len(rows)])[0]
