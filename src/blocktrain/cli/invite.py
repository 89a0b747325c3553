"""`blocktrain invite`: tokens that let workers join a closed run."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from blocktrain.cli.options import DataDirOption
from blocktrain.cli.workers import operator_key


def invite(
    data_dir: DataDirOption,
    hours: Annotated[float, typer.Option(help="How long it may be used.", min=0.01)] = 168.0,
    count: Annotated[int, typer.Option(help="How many to print, one a line.", min=1, max=1000)] = 1,
) -> None:
    """Print invitations, each good for one worker; pass it on as `blocktrain worker --invite`."""
    from blocktrain.wire.tokens import make_invite

    # No request: the signature is the invitation, and the coordinator learns of it when it is used.
    identity = operator_key(data_dir)
    for _ in range(count):
        typer.echo(make_invite(identity, time.time() + 3600 * hours))
