"""Arguments and flags that several verbs share."""

from __future__ import annotations

import logging
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated

import typer

from blocktrain.errors import UserError
from blocktrain.tracking.trackers import TrackerName

RecipeArgument = Annotated[
    str, typer.Argument(help="A recipe file, or the name of one in recipes/, such as demo.")
]
CheckpointArgument = Annotated[Path, typer.Argument(help="A checkpoint folder (with config.json).")]
ModelArgument = Annotated[
    str, typer.Argument(help="A checkpoint folder, or a coordinator's address or data folder.")
]
RunArgument = Annotated[str, typer.Argument(help="A coordinator's address or data folder.")]
UrlArgument = Annotated[str, typer.Argument(help="Address of the run.")]

SetOption = Annotated[
    list[str], typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change one recipe value; repeatable.")
]
FromOption = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="MODEL",
        help="Begin with these weights: a checkpoint folder, or a coordinator's address or data folder.",
    ),
]
DeviceOption = Annotated[
    str, typer.Option("--device", help="cpu, cuda, cuda:1, mps, or auto for the best one here.")
]
TrackOption = Annotated[
    list[TrackerName],
    typer.Option("--track", help="Also send metrics.jsonl's numbers there; needs its package; repeatable."),
]

ThreadsOption = Annotated[
    int | None,
    typer.Option("--threads", min=1, help="Processor threads for the arithmetic; default: one per core."),
]
NiceOption = Annotated[
    int,
    typer.Option("--nice", min=0, max=19, help="Let other programs go first: 0 not at all, 19 always."),
]

# Shared by the verbs of workers, judges and the operator.
CoordinatorOption = Annotated[
    str, typer.Option("--coordinator", help="Address of the run, http(s)://HOST[:PORT].")
]
CorpusOption = Annotated[
    str | None, typer.Option("--corpus", help="The run's text or dataset on this machine; default: fetch it.")
]
DataDirOption = Annotated[
    Path, typer.Option("--data-dir", help="The coordinator's data folder, with its key.")
]
WORKER_DATA_DIR = Path("~/.blocktrain/worker")

# Shared by `gateway` and by `serve`, which starts one.
HostOption = Annotated[str, typer.Option("--host", help="Address to listen on; 0.0.0.0 for every one.")]
PortOption = Annotated[int, typer.Option("--port", min=0, max=65535, help="0 takes a free one.")]
KeysOption = Annotated[
    Path | None,
    typer.Option("--keys", help="File of bearer keys, one per line: `[name =] key [tokens_per_day=N]`."),
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

LostBlocksOption = Annotated[
    str,
    typer.Option(
        "--lost-blocks",
        help="Where no stage serves a block any more: degrade (answer without it and say so), fail, or wait "
        "for one until the answer's deadline.",
    ),
]

# Shared by `generate` and `chat`, which take a checkpoint or a gateway.
SourceArgument = Annotated[
    str | None,
    typer.Argument(help="A checkpoint folder, or a coordinator's address or data folder; without --url."),
]
KeyOption = Annotated[
    str | None,
    typer.Option("--key", envvar="BLOCKTRAIN_API_KEY", help="Your key, where the gateway asks for one."),
]


def check_source(checkpoint: str | None, url: str | None) -> None:
    if (checkpoint is None) == (url is None):
        raise UserError(
            "give either a checkpoint folder or --url, for instance runs/demo/checkpoint (made by "
            "`blocktrain train demo --out runs/demo`) or --url http://127.0.0.1:8000 (served by "
            "`blocktrain serve`)"
        )


def opened_model(place: str) -> AbstractContextManager[Path]:
    """The checkpoint folder at a place, or the newest model of the run there, with a line about it."""
    from blocktrain.api import model_folder

    return model_folder(place, to_stderr)


def to_stderr(line: str) -> None:
    typer.echo(line, err=True)


def log_to_stderr(form: str = "%(levelname)s %(message)s") -> None:
    from blocktrain.connections import LogRate

    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(LogRate(logging.ERROR))
    logging.basicConfig(level=logging.INFO, handlers=[handler], format=form)
