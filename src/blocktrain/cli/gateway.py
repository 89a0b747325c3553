"""`blocktrain gateway`: an OpenAI-compatible API in front of stages."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from blocktrain.cli.options import (
    CheckpointArgument,
    HostOption,
    KeysOption,
    LimitOption,
    LostBlocksOption,
    OriginOption,
    OverflowOption,
    PortOption,
    log_to_stderr,
)
from blocktrain.errors import UserError
from blocktrain.starting import prepare_to_serve

# The serving package is imported inside the verbs: a training machine need not have what it needs.


def gateway(
    checkpoint: CheckpointArgument,
    stages: Annotated[
        str,
        typer.Option(
            "--stages",
            metavar="HOST:PORT,…",
            help="Or @FILE with one on each line, read again when it changes. Empty holds every block "
            "in this process.",
        ),
    ] = "",
    also: Annotated[
        list[str],
        typer.Option(
            "--also", metavar="CHECKPOINT=STAGES", help="One more model, with stages of its own; repeatable."
        ),
    ] = [],  # noqa: B006
    host: HostOption = "127.0.0.1",
    port: PortOption = 8000,
    keys: KeysOption = None,
    limit: LimitOption = [],  # noqa: B006
    overflow: OverflowOption = "refuse",
    origin: OriginOption = [],  # noqa: B006
    token_file: Annotated[
        Path | None, typer.Option("--token-file", help="A file with the secret that the stages ask for.")
    ] = None,
    activations: Annotated[
        str,
        typer.Option(
            "--activations", help="Between stages of a serial model: f32, or fewer bytes as bf16 or q8."
        ),
    ] = "f32",
    lost_blocks: LostBlocksOption = "degrade",
    tls_cert: Annotated[
        Path | None, typer.Option("--tls-cert", help="Speak HTTPS with this PEM certificate (and its chain).")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option("--tls-key", help="The certificate's PEM key.")] = None,
) -> None:
    """Serve an OpenAI-compatible API in front of stages, until SIGTERM."""
    prepare_to_serve()
    from blocktrain.serving.gateway.main import gateway_config, run_gateway
    from blocktrain.serving.transport import read_token

    log_to_stderr()
    others = [(Path(path), named) for path, _, named in (one.rpartition("=") for one in also)]
    if any(path == Path() for path, _ in others):
        raise UserError(
            "--also expects CHECKPOINT=HOST:PORT,… (nothing behind the = holds it in this process)"
        )
    run_gateway(
        [(checkpoint, stages), *others],
        host=host,
        port=port,
        token=read_token(token_file) or "",
        activations=activations,
        lost_blocks=lost_blocks,
        config=gateway_config(keys, limit, overflow, origin, tls_cert=tls_cert, tls_key=tls_key),
        # Flushed: the program that started this one reads the address from a pipe.
        announce=lambda line: print(line, flush=True),
    )
