"""`blocktrain serve`: stages and a gateway on this machine."""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from blocktrain.cli.options import (
    DeviceOption,
    HostOption,
    KeysOption,
    LimitOption,
    LostBlocksOption,
    ModelArgument,
    OriginOption,
    OverflowOption,
    PortOption,
    log_to_stderr,
    opened_model,
    to_stderr,
)
from blocktrain.errors import UserError
from blocktrain.listening import lan_address, open_port
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
    # A stage that ends is started again here, within seconds: an answer that waits for it keeps its text.
    lost_blocks: LostBlocksOption = "wait",
    follow: Annotated[
        bool,
        typer.Option("--follow", help="Pick up the new heads of a coordinator's run as they are merged."),
    ] = False,
    versions: Annotated[
        Path | None,
        typer.Option(
            "--versions", help="Folder for the models that --follow takes; default: a temporary one."
        ),
    ] = None,
    roll_back: Annotated[
        int | None,
        typer.Option(
            "--roll-back", min=0, help="Serve the model that came this many before the newest in --versions."
        ),
    ] = None,
    logs: Annotated[
        Path | None, typer.Option("--logs", help="Folder for the programs' logs; default: a temporary one.")
    ] = None,
) -> None:
    """Serve a checkpoint from this machine: stages and a gateway as processes, until Ctrl-C."""
    from blocktrain.local.following import Follower
    from blocktrain.local.launcher import LaunchConfig, Launcher
    from blocktrain.local.processes import ChildError
    from blocktrain.serving import versions as kept_versions
    from blocktrain.serving.engine.fanout import when_blocks_are_lost
    from blocktrain.serving.gateway.main import gateway_config
    from blocktrain.training.device import find_device

    log_to_stderr()
    # A mistake is told here, not in a child's log.
    gateway_config(keys, limit, overflow, origin)
    when_blocks_are_lost(lost_blocks)
    find_device(device)
    # Before the stages: they take seconds, and the gateway would find the port taken behind them.
    open_port(host, port).close()
    if roll_back is not None and versions is None:
        raise UserError("--roll-back needs --versions, the folder that an earlier `serve --follow` kept")
    if follow and "://" not in checkpoint:
        raise UserError(f"--follow needs a coordinator's address http(s)://HOST[:PORT], found {checkpoint!r}")
    options = [*(part for one in limit for part in ("--limit", one)), "--overflow", overflow]
    options += ["--lost-blocks", lost_blocks]
    options += [part for one in origin for part in ("--origin", one)]
    options += ["--keys", str(keys)] if keys is not None else []
    folder = logs or Path(tempfile.mkdtemp(prefix="blocktrain-serve-"))
    kept = versions.expanduser() if versions is not None else folder / "versions"
    follower = Follower(checkpoint, kept) if follow and roll_back is None else None
    try:
        if roll_back is not None:
            to_stderr(f"rolled back to {kept_versions.roll_back(kept, roll_back)}")
        elif follower is not None:
            to_stderr(f"took {follower.look()}")
        served = nullcontext(kept) if roll_back is not None or follow else opened_model(checkpoint)
        with served as model_folder, stopping() as stop:
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
                if follower is not None:
                    threading.Thread(target=follower.run, args=(stop,), name="follower", daemon=True).start()
                launcher.watch(stop)
            finally:
                launcher.end()
    except ChildError as error:
        if error.exit_code != UserError.exit_code:  # else the sentence says all, and points to no log
            logs = folder
        raise
    finally:
        if logs is None:
            shutil.rmtree(folder, ignore_errors=True)
