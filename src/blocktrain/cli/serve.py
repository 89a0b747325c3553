"""`blocktrain serve`: stages and a gateway on this machine."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from blocktrain.cli.options import (
    DeviceOption,
    HostOption,
    KeysOption,
    LimitOption,
    ModelArgument,
    OriginOption,
    OverflowOption,
    PortOption,
    log_to_stderr,
    opened_model,
)
from blocktrain.listening import lan_address
from blocktrain.local.processes import stopping


def lines_to_try(url: str, model: str, with_key: bool) -> list[str]:
    """Commands for a reader to copy, in lines that an ordinary terminal does not break."""
    body = json.dumps({"model": model, "prompt": "The ", "max_tokens": 64})
    header = ["    -H 'authorization: Bearer KEY' \\"] if with_key else []
    return [
        f"  curl {url}/v1/completions \\",
        "    -H 'content-type: application/json' \\",
        *header,
        f"    -d '{body}'",
        f"  blocktrain generate --url {url} --prompt 'The '",
        f"  blocktrain chat --url {url}",
    ]


def serve(
    checkpoint: ModelArgument,
    stages: Annotated[int, typer.Option("--stages", min=1, max=64, help="Stage processes.")] = 3,
    device: DeviceOption = "cpu",
    host: HostOption = "127.0.0.1",
    port: PortOption = 8000,
    keys: KeysOption = None,
    limit: LimitOption = [],  # noqa: B006
    overflow: OverflowOption = "refuse",
    origin: OriginOption = [],  # noqa: B006
    logs: Annotated[
        Path | None, typer.Option("--logs", help="Folder for the programs' logs; default: a temporary one.")
    ] = None,
) -> None:
    """Serve a checkpoint from this machine: stages and a gateway as processes, until Ctrl-C."""
    from blocktrain.local.launcher import LaunchConfig, Launcher
    from blocktrain.local.processes import ChildError
    from blocktrain.serving.gateway.main import gateway_config
    from blocktrain.training.device import find_device

    log_to_stderr()
    # A mistake is told here, not in a child's log.
    gateway_config(keys, limit, overflow, origin)
    find_device(device)
    options = [*(part for one in limit for part in ("--limit", one)), "--overflow", overflow]
    options += [part for one in origin for part in ("--origin", one)]
    options += ["--keys", str(keys)] if keys is not None else []
    folder = logs or Path(tempfile.mkdtemp(prefix="blocktrain-serve-"))
    try:
        with opened_model(checkpoint) as model_folder, stopping() as stop:
            config = LaunchConfig(
                checkpoint=model_folder,
                num_stages=stages,
                logs=folder,
                host=host,
                port=port,
                gateway_options=tuple(options),
                stage_options=("--device", device),
            )
            launcher = Launcher(config)
            try:
                url, model = launcher.start(stop), launcher.model
                if host in ("0.0.0.0", "::"):  # the address that others can use too
                    url = url.replace("127.0.0.1", lan_address() or "127.0.0.1")
                pid = launcher.gateway_pid
                told = f"serving {model} at {url} (gateway pid {pid}; Ctrl-C ends everything)"
                print("\n".join((told, "", *lines_to_try(url, model, keys is not None))))
                print(f"\n  logs are in {folder}", flush=True)
                launcher.watch(stop)
            finally:
                launcher.end()
    except ChildError:
        logs = folder  # its message points there, so they stay
        raise
    finally:
        if logs is None:
            shutil.rmtree(folder, ignore_errors=True)
