"""`blocktrain stage`: blocks of a checkpoint behind a TCP port."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from blocktrain.cli.options import DeviceOption, log_to_stderr
from blocktrain.starting import prepare_to_serve


def stage(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint folder.")],
    blocks: Annotated[str, typer.Option(help="Blocks to serve: 0,1 or 0-3.")],
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Port 0 takes a free one.")
    ] = "127.0.0.1:0",
    device: DeviceOption = "cpu",
    threads: Annotated[int | None, typer.Option(help="Processor threads; default as torch does.")] = None,
    metrics_port: Annotated[int | None, typer.Option(help="Prometheus metrics; 0 takes a free port.")] = None,
    identity: Annotated[
        Path | None, typer.Option(help="Key file (made when missing): speak TLS and print the pin.")
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="A file with the secret that clients must send.")
    ] = None,
    max_sessions: Annotated[int, typer.Option(help="Sessions with caches at once.")] = 512,
    no_graphs: Annotated[
        bool,
        typer.Option("--no-graphs", help="On a GPU, do not capture passes of few tokens to replay them."),
    ] = False,
) -> None:
    """Serve blocks to a gateway until SIGTERM."""
    prepare_to_serve()
    # Here: a training machine need not have what serving needs.
    from blocktrain.serving.stage.main import parse_blocks, run_stage
    from blocktrain.serving.stage.stage import StageConfig
    from blocktrain.serving.transport import Address, read_token
    from blocktrain.training.device import find_device
    from blocktrain.wire.identity import load_or_create

    # On stderr: stdout carries the one line with the address.
    log_to_stderr()
    config = StageConfig(
        listen=Address.parse(listen),
        max_sessions=max_sessions,
        token=read_token(token_file),
        identity=load_or_create(identity) if identity is not None else None,
    )
    found = find_device(device)
    run_stage(
        checkpoint,
        parse_blocks(blocks),
        config,
        device=found,
        metrics_port=metrics_port,
        threads=threads,
        graphs=found.type == "cuda" and not no_graphs,
        announce=lambda line: print(line, flush=True),
    )
