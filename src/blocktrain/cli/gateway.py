"""`blocktrain gateway`: an OpenAI-compatible API in front of stages."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blocktrain.cli.options import (
    CheckpointArgument,
    HostOption,
    KeysOption,
    LimitOption,
    OriginOption,
    OverflowOption,
    PortOption,
    log_to_stderr,
    read_token,
)
from blocktrain.errors import UserError

if TYPE_CHECKING:
    from blocktrain.serving.gateway.app import GatewayConfig

# The serving package is imported inside the verbs: a training machine need not have what it needs.


def gateway(
    checkpoint: CheckpointArgument,
    stages: Annotated[
        str, typer.Option("--stages", metavar="HOST:PORT,…", help="Empty holds every block in this process.")
    ] = "",
    host: HostOption = "127.0.0.1",
    port: PortOption = 8000,
    keys: KeysOption = None,
    limit: LimitOption = [],  # noqa: B006
    overflow: OverflowOption = "refuse",
    origin: OriginOption = [],  # noqa: B006
    token_file: Annotated[
        Path | None, typer.Option("--token-file", help="A file with the secret that the stages ask for.")
    ] = None,
) -> None:
    """Serve an OpenAI-compatible API in front of stages, until SIGTERM."""
    from blocktrain.serving.gateway.main import run_gateway

    log_to_stderr()
    run_gateway(
        checkpoint,
        [address for address in stages.split(",") if address.strip()],
        host=host,
        port=port,
        token=read_token(token_file) or "",
        config=gateway_config(keys, limit, overflow, origin),
        # Flushed: whoever started this process reads the address from a pipe.
        announce=lambda line: print(line, flush=True),
    )


def gateway_config(
    keys: Path | None, limits: Iterable[str], overflow: str, origins: Iterable[str]
) -> GatewayConfig:
    from blocktrain.serving.gateway.app import GatewayConfig
    from blocktrain.serving.gateway.limits import load_keys, parse_limits

    if overflow not in ("refuse", "slide"):
        raise UserError(f"--overflow must be refuse or slide, found {overflow!r}")
    return GatewayConfig(
        limits=parse_limits(limits),
        keys=load_keys(keys) if keys is not None else None,
        overflow="slide" if overflow == "slide" else "refuse",
        origins=tuple(origins),
    )
