"""Registers the verbs and turns expected errors into one sentence and an exit code.

Machine-readable results go to stdout, progress and errors to stderr. Exit 2 means misuse (a bad recipe,
path, flag or input), 1 a failure of something else.

Verbs import what they need inside their functions: `--help`, `--version` and shell completion would wait 2 s
for torch otherwise, 5 to 12 s on a busy machine.
"""

from __future__ import annotations

import inspect
import sys
from typing import Annotated

import typer

import blocktrain
from blocktrain.cli.chat import chat
from blocktrain.cli.checkpoint import checkpoint
from blocktrain.cli.contributions import contributions
from blocktrain.cli.coordinator import coordinator
from blocktrain.cli.data import data_verbs
from blocktrain.cli.demo import demo
from blocktrain.cli.doctor import doctor
from blocktrain.cli.evaluate import evaluate
from blocktrain.cli.export import export
from blocktrain.cli.finish import finish
from blocktrain.cli.fleet import fleet_verbs
from blocktrain.cli.gateway import gateway
from blocktrain.cli.generate import generate
from blocktrain.cli.import_ import import_
from blocktrain.cli.invite import invite
from blocktrain.cli.join import join
from blocktrain.cli.judge import judge
from blocktrain.cli.ledger import ledger_verbs
from blocktrain.cli.pause import pause, resume
from blocktrain.cli.plan import plan
from blocktrain.cli.recipe import recipe_verbs
from blocktrain.cli.serve import serve
from blocktrain.cli.simulate import simulate
from blocktrain.cli.stage import stage
from blocktrain.cli.status import status
from blocktrain.cli.swarm import swarm
from blocktrain.cli.train import train
from blocktrain.cli.worker import worker
from blocktrain.cli.workers import worker_verbs
from blocktrain.errors import BlocktrainError
from blocktrain.local.processes import end_with_parent
from blocktrain.starting import INTERRUPTED_CODE

app = typer.Typer(
    name="blocktrain",
    help="Train and serve one model, block by block, on machines of different owners.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # Typer's boxes cost half of the time of `--help`, and break words in pipes
)
app.command()(train)
app.command()(evaluate)
app.command()(generate)
app.command()(demo)
app.command()(export)
app.command("import")(import_)
app.command()(serve)
app.command()(chat)
app.command()(stage)
app.command()(gateway)
app.command()(coordinator)
app.command()(join)
app.command()(worker)
app.command()(pause)
app.command()(resume)
app.command()(checkpoint)
app.command()(finish)
app.command()(swarm)
app.command()(status)
app.command()(judge)
app.command()(invite)
app.command()(contributions)
app.add_typer(recipe_verbs, name="recipe")
app.add_typer(data_verbs, name="data")
app.add_typer(worker_verbs, name="workers")
app.add_typer(ledger_verbs, name="ledger")
app.add_typer(fleet_verbs, name="fleet")
app.command()(plan)
app.command()(simulate)
app.command()(doctor)


def print_version(asked: bool) -> None:
    if asked:
        print(blocktrain.__version__)
        raise typer.Exit


@app.callback()
def program(
    version: Annotated[
        bool,
        typer.Option("--version", callback=print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Train and serve one model, block by block, on machines of different owners."""


@app.command()
def version() -> None:
    """Print the version."""
    print(blocktrain.__version__)


def list_whole_sentences(verbs: typer.Typer) -> None:
    """The list of verbs has the first sentence of each; Typer would cut it at the end of its line."""
    for verb in verbs.registered_commands:
        if verb.callback is not None and verb.short_help is None:
            told = " ".join((inspect.getdoc(verb.callback) or "").split())
            verb.short_help = told.partition(". ")[0].removesuffix(".") + "."
    for group in verbs.registered_groups:
        if group.typer_instance is not None:
            list_whole_sentences(group.typer_instance)


list_whole_sentences(app)


def main() -> None:
    # First of all: a child whose parent dies while it imports torch must end too.
    end_with_parent()
    try:
        app()
    except BlocktrainError as error:
        print(f"blocktrain: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except SystemExit as ended:
        if ended.code == INTERRUPTED_CODE:  # Typer's 128 + SIGINT, for Ctrl-C inside a verb
            print("blocktrain: interrupted", file=sys.stderr)
        raise
