"""`blocktrain generate`: continue a prompt, with a checkpoint on this machine or through a gateway."""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from blocktrain.cli.options import DeviceOption, KeyOption, SourceArgument, check_source, to_stderr
from blocktrain.errors import UserError


def generate(
    checkpoint: SourceArgument = None,
    prompt: Annotated[str, typer.Option("--prompt", help="Text to continue.")] = "",
    url: Annotated[str | None, typer.Option("--url", help="A gateway that serves the model.")] = None,
    key: KeyOption = None,
    mode: Annotated[str | None, typer.Option("--mode", help="With --url: ar, verify or sweep.")] = None,
    passes: Annotated[
        int | None,
        typer.Option("--passes", min=1, help="With --mode sweep: refining steps of each block."),
    ] = None,
    max_tokens: Annotated[
        int,
        typer.Option(
            "--max-bytes", "--max-tokens", min=1, help="Tokens to generate; of a byte model, bytes."
        ),
    ] = 256,
    seed: Annotated[int, typer.Option("--seed", min=0, help="The same seed gives the same text.")] = 0,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="0 is greedy.")] = 0.8,
    top_p: Annotated[
        float, typer.Option("--top-p", min=0.01, max=1.0, help="Keep the likeliest tokens of this share.")
    ] = 1.0,
    device: DeviceOption = "auto",
) -> None:
    """Continue a prompt with the composed model."""
    check_source(checkpoint, url)
    if not prompt:
        raise UserError("--prompt is empty; give at least one character, for instance --prompt 'The '")
    sampling = {"seed": seed, "temperature": temperature, "top_p": top_p}
    if url is not None:
        fields = {"prompt": prompt, "max_tokens": max_tokens, **sampling, "mode": mode, "passes": passes}
        generate_from_url(url, key, {name: value for name, value in fields.items() if value is not None})
        return
    if mode is not None or passes is not None:
        raise UserError(
            "--mode and --passes are for a gateway, and this command uses none: leave them out, or start "
            "`blocktrain serve CHECKPOINT` and give its --url"
        )
    assert checkpoint is not None
    from blocktrain.api import load
    from blocktrain.local.terminal import write_bytes
    from blocktrain.model.generation import LocalModel
    from blocktrain.model.generation import generate as generate_tokens

    loaded = load(checkpoint, device=device, tell=to_stderr)
    model = LocalModel(loaded.objective, loaded.blocks, loaded.codebook_VD, loaded.pooling)
    # A shell passes bytes; Python hides those that are no UTF-8 in surrogates, and this gets them back.
    text = os.fsencode(prompt)
    tokens = loaded.tokenizer.encode(text).tolist()
    write_bytes(text)
    for token in generate_tokens(
        model, tokens, max_tokens=max_tokens, seed=seed, temperature=temperature, top_p=top_p
    ):
        # Behind the end of a document another one would begin; a gateway stops there too.
        if token == loaded.tokenizer.end:
            break
        write_bytes(loaded.tokenizer.decode([token]))
    write_bytes(b"\n")


def generate_from_url(url: str, key: str | None, fields: Mapping[str, Any]) -> None:
    """The prompt and its continuation on stdout as they come, the cost on stderr."""
    from blocktrain.client.gateway import GatewayClient
    from blocktrain.local.terminal import write

    usage: Mapping[str, Any] = {}
    with GatewayClient(url, key) as client:
        model = client.model()
        begun = time.monotonic()
        deltas = iter(client.complete({"model": model, "overflow": "slide", **fields}))
        # A refusal comes in the place of the first piece: behind the prompt it would look like its answer.
        first = list(itertools.islice(deltas, 1))
        write(str(fields["prompt"]))
        for delta in itertools.chain(first, deltas):
            write(delta.text)
            # The usage comes once, with the last chunk.
            usage = delta.usage or usage
        write("\n")
    cost, seconds = usage.get("blocktrain", {}), time.monotonic() - begun
    text_bytes = cost.get("text_bytes", 0)
    line = (
        f"mode={cost.get('mode')} bytes={text_bytes} traversals={cost.get('traversals')} "
        f"bytes_per_traversal={cost.get('bytes_per_traversal')} "
        f"bytes_per_second={text_bytes / max(seconds, 1e-9):.1f} "
        f"wire_bytes={cost.get('wire_bytes_sent', 0) + cost.get('wire_bytes_received', 0)}"
    )
    print(line, file=sys.stderr)
