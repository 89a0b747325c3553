"""`blocktrain pause` and `blocktrain resume`: a worker of this machine gives the machine back for a while."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from blocktrain.cli.options import WORKER_DATA_DIR
from blocktrain.errors import UserError

FolderOption = Annotated[Path, typer.Option("--data-dir", help="The worker's data folder.")]


def pause(data_dir: FolderOption = WORKER_DATA_DIR) -> None:
    """Pause the worker of a data folder, or all of its `--devices`: until `resume`, also over restarts."""
    pause_file(data_dir).touch()
    typer.echo(
        f"paused: the worker in {data_dir} hands its assignment back; `blocktrain resume` lets it go on"
    )


def resume(data_dir: FolderOption = WORKER_DATA_DIR) -> None:
    """Let a paused worker go on."""
    file = pause_file(data_dir)
    was_paused = file.exists()
    file.unlink(missing_ok=True)
    typer.echo(f"resumed: the worker in {data_dir}" if was_paused else f"{data_dir} was not paused")


def pause_file(data_dir: Path) -> Path:
    from blocktrain.worker.shifts import PAUSE_FILE

    folder = data_dir.expanduser()
    if not folder.is_dir():
        raise UserError(f"no worker has used {data_dir}; name the folder of the worker with --data-dir")
    return folder / PAUSE_FILE
