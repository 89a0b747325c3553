"""The verbs of the front door: `gateway`, `serve`, `chat`, and `generate --url`."""

from __future__ import annotations

import json
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blocktrain.cli.terminal import for_stdout
from blocktrain.errors import UserError
from blocktrain.local.signals import stopping

if TYPE_CHECKING:
    from blocktrain.client.gateway import Delta, GatewayClient
    from blocktrain.serving.gateway.app import GatewayConfig

# The serving package is imported inside the verbs: a training machine need not have what it needs.

CheckpointArgument = Annotated[Path, typer.Argument(help="A checkpoint folder (with config.json).")]
HostOption = Annotated[str, typer.Option("--host", help="Address to listen on; 0.0.0.0 for every one.")]
PortOption = Annotated[int, typer.Option("--port", min=0, max=65535, help="0 takes a free one.")]
KeysOption = Annotated[
    Path | None,
    typer.Option("--keys", help="File of bearer keys, one per line, optionally `name = key`."),
]
LimitOption = Annotated[
    list[str], typer.Option("--limit", metavar="NAME=VALUE", help="Change one limit; repeatable.")
]
OverflowOption = Annotated[
    str, typer.Option("--overflow", help="Prompts longer than the context: refuse or slide.")
]
OriginOption = Annotated[
    list[str], typer.Option("--origin", help="A web page's origin that may call from a browser; repeatable.")
]
KeyOption = Annotated[
    str | None,
    typer.Option("--key", envvar="BLOCKTRAIN_API_KEY", help="Your key, where the gateway asks for one."),
]


NEEDS_A_SOURCE = (
    "give either a checkpoint folder or --url, for instance runs/demo/checkpoint (made by `blocktrain train "
    "demo --out runs/demo`) or --url http://127.0.0.1:8000 (served by `blocktrain serve`)"
)


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
    from blocktrain.cli.serving import read_token
    from blocktrain.serving.gateway.main import run_gateway

    configure_logs()
    run_gateway(
        checkpoint,
        [address for address in stages.split(",") if address.strip()],
        host=host,
        port=port,
        token=read_token(token_file) or "",
        config=gateway_config(keys, limit, overflow, origin),
        announce=lambda line: print(line, flush=True),
    )


def configure_logs() -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(levelname)s %(message)s")


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


def serve(
    checkpoint: CheckpointArgument,
    stages: Annotated[int, typer.Option("--stages", min=1, max=64, help="Stage processes.")] = 3,
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

    configure_logs()
    gateway_config(keys, limit, overflow, origin)  # a mistake is told here, not in a child's log
    options = [*(part for one in limit for part in ("--limit", one)), "--overflow", overflow]
    options += [part for one in origin for part in ("--origin", one)]
    options += ["--keys", str(keys)] if keys is not None else []
    folder = logs or Path(tempfile.mkdtemp(prefix="blocktrain-serve-"))
    launcher = Launcher(
        LaunchConfig(
            checkpoint=checkpoint,
            num_stages=stages,
            logs=folder,
            host=host,
            port=port,
            gateway_options=tuple(options),
        )
    )
    with stopping() as stop:
        try:
            url = launcher.start(stop)
            print(serving_message(url, launcher.model, launcher.gateway_pid, keys is not None), flush=True)
            print(f"  logs are in {folder}", flush=True)
            launcher.watch(stop)
        finally:
            launcher.end()


def serving_message(url: str, model: str, pid: int | None, keyed: bool) -> str:
    header = " -H 'authorization: Bearer KEY'" if keyed else ""
    body = json.dumps({"model": model, "prompt": "The ", "max_tokens": 64})
    return (
        f"serving {model} at {url} (gateway pid {pid}; Ctrl-C ends everything)\n\n"
        f"  curl {url}/v1/completions{header} -H 'content-type: application/json' -d '{body}'\n"
        f"  blocktrain generate --url {url} --prompt 'The '\n"
        f"  blocktrain chat --url {url}\n"
    )


def generate_from_url(
    url: str,
    prompt: str,
    *,
    max_bytes: int,
    seed: int,
    temperature: float,
    top_p: float,
    key: str | None = None,
    mode: str | None = None,
    passes: int | None = None,
) -> None:
    """`generate --url`: the prompt and its continuation on stdout as they come, the cost on stderr."""
    from blocktrain.client.gateway import GatewayClient

    fields: dict[str, Any] = {
        "prompt": prompt,
        "max_tokens": max_bytes,
        "seed": seed,
        "temperature": temperature,
        "top_p": top_p,
        "overflow": "slide",
    }
    fields |= {"mode": mode} if mode is not None else {}
    fields |= {"passes": passes} if passes is not None else {}
    with GatewayClient(url, key) as client:
        model = client.model()
        write(prompt)
        begun = time.monotonic()
        usage = write_deltas(client.complete({"model": model, **fields}))
        write("\n")
    print(cost_line(usage, time.monotonic() - begun), file=sys.stderr)


def write(text: str) -> None:
    sys.stdout.write(for_stdout(text))
    sys.stdout.flush()


def write_deltas(
    deltas: Iterable[Delta], also: Callable[[str], None] = lambda text: None
) -> Mapping[str, Any]:
    usage: Mapping[str, Any] = {}
    for delta in deltas:
        write(delta.text)
        also(delta.text)
        usage = delta.usage or usage
    return usage


def cost_line(usage: Mapping[str, Any], seconds: float) -> str:
    cost = usage.get("blocktrain", {})
    text_bytes = cost.get("text_bytes", 0)
    return (
        f"mode={cost.get('mode')} bytes={text_bytes} traversals={cost.get('traversals')} "
        f"bytes_per_traversal={cost.get('bytes_per_traversal')} "
        f"bytes_per_second={text_bytes / max(seconds, 1e-9):.1f} "
        f"wire_bytes={cost.get('wire_bytes_sent', 0) + cost.get('wire_bytes_received', 0)}"
    )


def chat(
    checkpoint: Annotated[Path | None, typer.Argument(help="A checkpoint folder, without --url.")] = None,
    url: Annotated[str | None, typer.Option("--url", help="A gateway's address.")] = None,
    key: KeyOption = None,
    system: Annotated[str | None, typer.Option("--system", help="What to tell the model first.")] = None,
    max_bytes: Annotated[int, typer.Option("--max-bytes", min=1, help="Longest answer.")] = 400,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, max=2.0, help="0 is greedy.")] = 0.7,
    seed: Annotated[int | None, typer.Option("--seed", help="Makes the answers reproducible.")] = None,
) -> None:
    """Talk to a model: one line is one message, an empty line is ignored, /new forgets, Ctrl-D ends."""
    if (checkpoint is None) == (url is None):
        raise UserError(NEEDS_A_SOURCE)
    fields: dict[str, Any] = {"max_tokens": max_bytes, "temperature": temperature, "overflow": "slide"}
    if seed is not None:
        fields["seed"] = seed
    with some_gateway(checkpoint, url) as address:
        converse(address, key, system, fields)


@contextmanager
def some_gateway(checkpoint: Path | None, url: str | None) -> Iterator[str]:
    """The gateway at `url`, or one in this process for a checkpoint."""
    if url is not None:
        yield url
        return
    from blocktrain.serving.engine.local import LocalEngine
    from blocktrain.serving.gateway.main import background_gateway

    assert checkpoint is not None
    with background_gateway(LocalEngine(checkpoint)) as address:
        yield address


def converse(url: str, key: str | None, system: str | None, fields: Mapping[str, Any]) -> None:
    from blocktrain.client.gateway import GatewayClient

    opening = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    with GatewayClient(url, key) as client:
        model = client.model()
        print(f"talking to {model}; it continues text and was not taught to answer", file=sys.stderr)
        for line in user_lines():
            if line == "/new":
                messages = list(opening)
            elif line:
                messages.append({"role": "user", "content": line})
                messages.append(answer(client, messages, {"model": model, **fields}))


def user_lines() -> Iterator[str]:
    prompt = "you> " if sys.stdin.isatty() else ""
    while True:
        try:
            yield input(prompt).strip()
        except EOFError:
            return


def answer(
    client: GatewayClient, messages: list[dict[str, str]], fields: Mapping[str, Any]
) -> dict[str, str]:
    parts: list[str] = []
    write("model> ")
    write_deltas(client.chat(messages, fields), parts.append)
    write("\n")
    return {"role": "assistant", "content": "".join(parts)}
