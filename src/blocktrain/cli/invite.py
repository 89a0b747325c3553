"""`blocktrain invite`: the lines that let friends join a run."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from blocktrain.cli.options import DataDirOption, to_stderr
from blocktrain.cli.workers import operator_key


def invite(
    data_dir: DataDirOption,
    hours: Annotated[float, typer.Option(help="How long it may be used.", min=0.01)] = 168.0,
    count: Annotated[int, typer.Option(help="How many to print, one a line.", min=1, max=1000)] = 1,
    devices: Annotated[
        int, typer.Option(help="How many workers each line is for: `join --devices`.", min=1, max=64)
    ] = 1,
    address: Annotated[
        str | None,
        typer.Option(help="Where friends reach the coordinator; default: where it was started last."),
    ] = None,
    token: Annotated[bool, typer.Option("--token", help="Only tokens, for `worker --invite`.")] = False,
) -> None:
    """Print `blocktrain join LINK`, each for one friend: it carries address, invitation and certificate."""
    from blocktrain.client.address import RunLink
    from blocktrain.coordinator.operator_notes import OTHERS_CANNOT, kept_address, only_from_here
    from blocktrain.wire.tokens import make_invite

    # No request: the signature is the invitation, and the coordinator learns of it when it is used.
    identity, folder = operator_key(data_dir), data_dir.expanduser()
    until = time.time() + 3600 * hours
    tokens = ["+".join(make_invite(identity, until) for _ in range(devices)) for _ in range(count)]
    if token:
        typer.echo("\n".join(tokens))
        return
    if address is not None:
        place = RunLink.parse(address)
    else:
        url, pin = kept_address(folder)
        place = RunLink(url, pin=pin)
    if only_from_here(place.url):
        to_stderr(f"{place.url} {OTHERS_CANNOT}, and name its --address here")
    for one in tokens:
        typer.echo(f"blocktrain join {RunLink(place.url, one, place.pin)}")
