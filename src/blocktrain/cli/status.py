"""`blocktrain status`: how a run is doing."""

from __future__ import annotations

from typing import Annotated

import typer


def status(
    url: Annotated[str, typer.Argument(help="Address of the coordinator.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the status as JSON.")] = False,
) -> None:
    """Show how a run is doing."""
    from rich.console import Console

    from blocktrain.client.coordinator import public_client
    from blocktrain.local.status_view import status_tables

    # Two tries: a person is waiting, and can ask again.
    with public_client(url, report=lambda line: typer.echo(line, err=True), attempts=2) as client:
        answer = client.status()
    if as_json:
        typer.echo(answer.model_dump_json())
    else:
        Console().print(status_tables(answer))
