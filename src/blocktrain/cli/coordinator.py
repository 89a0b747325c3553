"""`blocktrain coordinator`: serve one run until it is asked to stop."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from blocktrain.cli.options import (
    FromOption,
    RecipeArgument,
    SetOption,
    TrackOption,
    log_to_stderr,
    opened_model,
)
from blocktrain.config import find_recipe, load_recipe
from blocktrain.errors import UserError


def coordinator(
    recipe: RecipeArgument,
    data_dir: Annotated[Path, typer.Option(help="State, blobs and key of the run; made on first use.")],
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for everybody.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Port to listen on; 0 takes a free one.", min=0, max=65535)
    ] = 8420,
    database: Annotated[
        str | None, typer.Option(help="PostgreSQL by URL; default: SQLite in the data folder.")
    ] = None,
    blobs: Annotated[
        str | None, typer.Option(help="Object storage by URL (s3://…); default: a folder.")
    ] = None,
    gateway: Annotated[
        str | None, typer.Option(help="Address of a gateway to chat with from the dashboard.")
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(help="End-to-end cross entropy, or report.json of `train`, to show beside the run."),
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(help="Speak HTTPS with this PEM certificate (and its chain).")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="The certificate's PEM key.")] = None,
    webhook: Annotated[
        str | None,
        typer.Option(help="Address to POST a notice to when a worker is banned, the run stalls or finishes."),
    ] = None,
    from_: FromOption = None,
    track: TrackOption = [],  # noqa: B006
    set_: SetOption = [],  # noqa: B006
) -> None:
    """Assign blocks to workers, merge their updates, keep the ledger. Goes on where it stopped."""
    from blocktrain.coordinator.main import Tls, run_coordinator
    from blocktrain.tracking.trackers import recording

    log_to_stderr("%(asctime)s %(levelname)s %(message)s")
    # Alembic reports every look at the schema, uvicorn its own birth, at each start.
    for chatter in ("alembic", "uvicorn.error"):
        logging.getLogger(chatter).setLevel(logging.WARNING)
    if (tls_cert is None) != (tls_key is None):
        raise UserError("--tls-cert and --tls-key go together; give both or neither")
    folder, file = data_dir.expanduser(), find_recipe(recipe)
    resolved = load_recipe(file, set_)
    # The trackers before the run: a missing package is told before one is created.
    with (
        opened_model(from_) if from_ is not None else nullcontext() as start,
        recording(folder, track, resolved.name, resolved.to_dict()) as recorder,
    ):
        run_coordinator(
            file,
            set_,
            data_dir=folder,
            host=host,
            port=port,
            database_url=database,
            blobs_url=blobs,
            gateway=gateway,
            reference=reference,
            tls=Tls(tls_cert, tls_key) if tls_cert is not None and tls_key is not None else None,
            watch=recorder.status,
            start=start,
            webhook=webhook,
        )
