"""`blocktrain status`: how a run is doing."""

from __future__ import annotations

from typing import Annotated

import typer

from blocktrain.cli.options import to_stderr

WATCH_SECONDS = 2.0


def status(
    url: Annotated[str, typer.Argument(help="Address of the coordinator.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the status as JSON.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Show it until the run is finished.")] = False,
) -> None:
    """Show how a run is doing."""
    from rich.console import Console
    from rich.live import Live

    from blocktrain.client.coordinator import public_client
    from blocktrain.local.processes import stop_on_signals
    from blocktrain.local.status_view import status_tables

    stop = stop_on_signals() if watch else None
    # Two tries: a person is waiting, and can ask again.
    with public_client(url, stop=stop, report=to_stderr, attempts=2) as client:
        answer = client.status()
        if stop is not None and not as_json:
            with Live(status_tables(answer), console=Console()) as live:
                while not answer.finished and not stop.wait(WATCH_SECONDS):
                    answer = client.status()
                    live.update(status_tables(answer))
            return
    if as_json:
        typer.echo(answer.model_dump_json())
    else:
        Console().print(status_tables(answer))
