"""Running a gateway as a process: start the engine, open the port, say where, serve until SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import uvicorn

from blocktrain.connections import limited_protocol, max_connections, tls_context
from blocktrain.errors import UserError
from blocktrain.listening import open_port, url_of
from blocktrain.serving.engine.engine import TextEngine
from blocktrain.serving.engine.fanout import when_blocks_are_lost
from blocktrain.serving.engine.local import LocalEngine
from blocktrain.serving.engine.remote import EngineConfig, RemoteEngine
from blocktrain.serving.gateway.api_errors import ApiError
from blocktrain.serving.gateway.app import GatewayConfig, create_app
from blocktrain.serving.gateway.engines import Engines
from blocktrain.serving.gateway.limits import load_keys, parse_limits
from blocktrain.serving.transport import Address
from blocktrain.serving.versions import current_checkpoint, watch
from blocktrain.starting import keep_what_is_loaded
from blocktrain.wire.frames import ActivationCodec

log = logging.getLogger(__name__)

SHUTDOWN_SECONDS = 10
"""How long answers under way may take after SIGTERM."""
CUT_OFF_SECONDS = 2
"""How long those may take to say so that were not complete by then."""
BACKLOG = 2048
MAX_PER_ADDRESS = 1024
"""Connections from one network, of 2,000: a proxy or a program in front of the gateway has many."""
CONNECTION_CODES = {400: "invalid_request", 408: "request_timeout"}
Announce = Callable[[str], None]


class GatewayServer(uvicorn.Server):
    """uvicorn without its signal handlers, which raise the signal again before we can close the engine."""

    scheme = "http"

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, self.handle_exit, number, None)
        yield


def new_server(engines: Engines, config: GatewayConfig) -> GatewayServer:
    connections = max_connections()
    server = GatewayServer(
        uvicorn.Config(
            create_app(engines, config),
            http=limited_protocol(
                connections,
                lambda status, message: ApiError(status, message, code=CONNECTION_CODES[status]).json(),
                per_network=max(1, min(MAX_PER_ADDRESS, connections * 3 // 4)),
                tls=config.tls,
                stall_seconds=config.limits.reader_seconds,
            ),
            log_config=None,
            log_level="warning",
            access_log=False,
            backlog=BACKLOG,
            # By itself uvicorn lets every program on this machine say in X-Forwarded-For who is calling.
            proxy_headers="FORWARDED_ALLOW_IPS" in os.environ,
            timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        )
    )
    server.scheme = "http" if config.tls is None else "https"
    return server


async def serve_gateway(
    engines: Engines,
    server: GatewayServer,
    opened: socket.socket,
    announce: Announce,
    following: Iterable[Callable[[], Coroutine[None, None, None]]] = (),
) -> None:
    """Serve until the server is told to exit; `announce` gets the readiness line. What is `following` runs
    beside it and replaces engines (`follow`)."""
    served, url = dict(engines.newest), url_of(opened, server.scheme)
    await asyncio.gather(*(engine.start() for engine in served.values()))
    beside = [asyncio.create_task(one()) for one in following]
    try:
        opened.listen(BACKLOG)  # before the announcement, so that who reads it can connect
        for name, engine in served.items():
            ready, reason = engine.ready
            log.info("opened gateway url=%s model=%s ready=%s reason=%r", url, name, ready, reason)
        announce(f"gateway ready url={url} model={','.join(served)}")
        await server.serve(sockets=[opened])
        # uvicorn does not wait for the answers that it cut off, and each still owes its client an error.
        if cut_off := server.server_state.tasks:
            await asyncio.wait(cut_off, timeout=CUT_OFF_SECONDS)
    finally:
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
        await engines.close()
        opened.close()


class ModelSource(NamedTuple):
    """Where a model comes from."""

    checkpoint: Path
    stages: tuple[Address, ...]
    """Empty: every block is held in this process."""

    @classmethod
    def found(cls, checkpoint: Path, stages: str) -> ModelSource:
        """As files say now. `stages` is `HOST:PORT,…`, or `@FILE` with one address on each line."""
        if stages.startswith("@"):
            try:
                lines = Path(stages[1:]).read_text(encoding="utf-8").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise UserError(f"cannot read the file of stages {stages[1:]}: {error}") from None
            # A pin follows its address after `#`, so a comment has a line of its own.
            texts = [line for line in lines if line.strip() and not line.startswith("#")]
            if not texts:
                raise UserError(f"{stages[1:]} holds no stages; write one HOST:PORT per line")
        else:
            texts = [text for text in stages.split(",") if text.strip()]
        return cls(current_checkpoint(checkpoint), tuple(map(Address.parse, texts)))

    def __str__(self) -> str:
        return f"{self.checkpoint.name}@{','.join(map(str, self.stages)) or 'this process'}"


async def follow(
    engines: Engines,
    folder: Path,
    stages: str,
    served: ModelSource,
    engine_of: Callable[[ModelSource], TextEngine],
) -> None:
    """Without end: give new requests what the folder's `current` names (`serving.versions`), from the stages
    that their file names."""

    async def take_over(source: ModelSource) -> None:
        # In a thread: answers go on while the new blocks are loaded.
        await engines.replace(await asyncio.to_thread(engine_of, source))

    await watch(lambda: ModelSource.found(folder, stages), served, take_over)


def gateway_config(
    keys: Path | None,
    limits: Iterable[str],
    overflow: str,
    origins: Iterable[str],
    *,
    tls_cert: Path | None = None,
    tls_key: Path | None = None,
) -> GatewayConfig:
    """From what a person typed; a mistake is told in words."""
    if overflow not in ("refuse", "slide"):
        raise UserError(f"--overflow must be refuse or slide, found {overflow!r}")
    if (tls_cert is None) != (tls_key is None):
        raise UserError("--tls-cert and --tls-key go together; give both or neither")
    return GatewayConfig(
        limits=parse_limits(limits),
        keys=load_keys(keys) if keys is not None else None,
        overflow="slide" if overflow == "slide" else "refuse",
        origins=tuple(origins),
        tls=None if tls_cert is None or tls_key is None else tls_context(tls_cert, tls_key),
    )


def activation_codec(text: str) -> ActivationCodec:
    offered = [one.value for one in ActivationCodec if one is not ActivationCodec.F64]
    if text not in offered:
        raise UserError(f"--activations must be one of {', '.join(offered)}, found {text!r}")
    return ActivationCodec(text)


def run_gateway(
    models: Sequence[tuple[Path, str]],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    token: str = "",
    activations: str = "f32",
    lost_blocks: str = "degrade",
    config: GatewayConfig | None = None,
    announce: Announce = print,
) -> None:
    """The verb `gateway`: returns when the last answer is given after SIGTERM. Each model is a checkpoint and
    its stages, as `ModelSource.found` reads them."""
    # The port first: loading takes seconds, and a port that is taken should be said before them.
    with open_port(host, port) as opened:
        codec, fanout = activation_codec(activations), when_blocks_are_lost(lost_blocks)

        def engine_of(source: ModelSource) -> TextEngine:
            if not source.stages:
                return LocalEngine(source.checkpoint)
            chosen = EngineConfig(stages=list(source.stages), token=token, activations=codec, fanout=fanout)
            return RemoteEngine(source.checkpoint, chosen)

        sources = [ModelSource.found(*model) for model in models]
        engines = Engines(*map(engine_of, sources))
        server = new_server(engines, config or GatewayConfig())
        following = [
            partial(follow, engines, *model, source, engine_of)
            for model, source in zip(models, sources, strict=True)
        ]
        keep_what_is_loaded()
        asyncio.run(serve_gateway(engines, server, opened, announce, following))


@contextmanager
def background_gateway(engine: TextEngine, config: GatewayConfig | None = None) -> Iterator[str]:
    """A gateway in a thread of this process, on a free port; gives its address."""
    opened = open_port("127.0.0.1", 0)
    engines = Engines(engine)
    server = new_server(engines, config or GatewayConfig())
    opened_up = threading.Event()
    failures: list[BaseException] = []

    def serve() -> None:
        try:
            asyncio.run(serve_gateway(engines, server, opened, lambda line: opened_up.set()))
        except BaseException as error:
            failures.append(error)
            opened_up.set()

    # A daemon: a test or a chat that dies must not wait for answers under way.
    thread = threading.Thread(target=serve, name="gateway", daemon=True)
    thread.start()
    opened_up.wait()
    if failures:
        opened.close()
        raise failures[0]
    try:
        yield url_of(opened, server.scheme)
    finally:
        server.should_exit = True
        thread.join(SHUTDOWN_SECONDS + CUT_OFF_SECONDS)
