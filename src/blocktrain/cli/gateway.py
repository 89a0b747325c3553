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
    OriginOption,
    OverflowOption,
    PortOption,
    log_to_stderr,
)
from blocktrain.starting import few_kernels

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
    activations: Annotated[
        str,
        typer.Option(
            "--activations", help="Between stages of a serial model: f32, or fewer bytes as bf16 or q8."
        ),
    ] = "f32",
    lost_blocks: Annotated[
        str,
        typer.Option(
            "--lost-blocks",
            help="Where no stage serves a block any more: degrade (answer without it and say so), fail, or "
            "wait for one until the answer's deadline.",
        ),
    ] = "degrade",
) -> None:
    """Serve an OpenAI-compatible API in front of stages, until SIGTERM."""
    few_kernels()
    from blocktrain.serving.gateway.main import gateway_config, run_gateway
    from blocktrain.serving.transport import read_token

    log_to_stderr()
    run_gateway(
        checkpoint,
        [address for address in stages.split(",") if address.strip()],
        host=host,
        port=port,
        token=read_token(token_file) or "",
        activations=activations,
        lost_blocks=lost_blocks,
        config=gateway_config(keys, limit, overflow, origin),
        # Flushed: the program that started this one reads the address from a pipe.
        announce=lambda line: print(line, flush=True),
    )
