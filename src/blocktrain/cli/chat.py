"""`blocktrain chat`: a conversation with a gateway, or with a checkpoint behind a gateway in this process."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from blocktrain.cli.options import DeviceOption, KeyOption, SourceArgument, check_source, opened_model


def chat(
    checkpoint: SourceArgument = None,
    url: Annotated[str | None, typer.Option("--url", help="A gateway's address.")] = None,
    key: KeyOption = None,
    system: Annotated[str | None, typer.Option("--system", help="What to tell the model first.")] = None,
    max_bytes: Annotated[int, typer.Option("--max-bytes", min=1, help="Longest answer.")] = 400,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, max=2.0, help="0 is greedy.")] = 0.7,
    seed: Annotated[int | None, typer.Option("--seed", help="Makes the answers reproducible.")] = None,
    device: DeviceOption = "cpu",
) -> None:
    """Talk to a model: one line is one message, /new forgets, /help tells what else, Ctrl-D ends."""
    from blocktrain.client.gateway import GatewayClient
    from blocktrain.local.terminal import write

    check_source(checkpoint, url)
    # A chat outgrows any context, so the oldest text slides out; a refusal in the middle of it would help
    # nobody.
    fields: dict[str, Any] = {"max_tokens": max_bytes, "temperature": temperature, "overflow": "slide"}
    fields |= {} if seed is None else {"seed": seed}
    opening = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    with some_gateway(checkpoint, url, device) as address, GatewayClient(address, key) as client:
        model = client.model()
        # Said at once: a model of this size continues text, and people should not think it is broken.
        print(f"talking to {model}; it continues text and was not taught to answer", file=sys.stderr)
        for line in user_lines():
            if line == "/new":
                messages = list(opening)
            elif line == "/help":
                print(
                    "one line is one message, empty ones are ignored; /new forgets; Ctrl-D ends",
                    file=sys.stderr,
                )
            elif line:
                messages.append({"role": "user", "content": line})
                write("model> ")
                answer = ""
                for delta in client.chat(messages, {"model": model, **fields}):
                    write(delta.text)
                    answer += delta.text
                write("\n")
                messages.append({"role": "assistant", "content": answer})


@contextmanager
def some_gateway(checkpoint: str | None, url: str | None, device: str) -> Iterator[str]:
    """The gateway at `url`, or one in this process for a checkpoint."""
    if url is not None:
        yield url
        return
    # The same gateway as over the network, on a free port: one path to keep right, and the template is
    # applied in one place.
    from blocktrain.serving.engine.local import LocalEngine
    from blocktrain.serving.gateway.main import background_gateway
    from blocktrain.training.device import find_device

    assert checkpoint is not None
    with (
        opened_model(checkpoint) as folder,
        background_gateway(LocalEngine(folder, find_device(device))) as address,
    ):
        yield address


def user_lines() -> Iterator[str]:
    prompt = "you> " if sys.stdin.isatty() else ""
    # Importing it is what makes input() know arrow keys and earlier lines; Windows has its own way.
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401
    while True:
        try:
            yield input(prompt).strip()
        # Ctrl-D, or the end of a file that was piped in.
        except EOFError:
            return
