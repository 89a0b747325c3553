"""Registers the verbs and turns expected errors into one sentence and an exit code.

Machine-readable results go to stdout, progress and errors to stderr. Exit 2 means misuse (a bad recipe,
path, flag or input), 1 a failure of something else.
"""

from __future__ import annotations

import sys

import typer

import blocktrain
from blocktrain.cli.coordinator import coordinator
from blocktrain.cli.data import data_verbs
from blocktrain.cli.demo import demo
from blocktrain.cli.doctor import doctor
from blocktrain.cli.evaluate import evaluate, generate
from blocktrain.cli.exchange import export, import_
from blocktrain.cli.gateway import chat, gateway, serve
from blocktrain.cli.serving import stage
from blocktrain.cli.simulate import simulate
from blocktrain.cli.swarm import status, swarm, worker
from blocktrain.cli.train import train
from blocktrain.cli.trust import contributions, invite, judge, ledger_verbs, worker_verbs
from blocktrain.errors import BlocktrainError
from blocktrain.local.parent_watch import end_with_parent

app = typer.Typer(
    name="blocktrain",
    help="Train and serve one model, block by block, on machines of different owners.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
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
app.command()(worker)
app.command()(swarm)
app.command()(status)
app.command()(judge)
app.command()(invite)
app.command()(contributions)
app.add_typer(data_verbs, name="data")
app.add_typer(worker_verbs, name="workers")
app.add_typer(ledger_verbs, name="ledger")
app.command()(simulate)
app.command()(doctor)


@app.command()
def version() -> None:
    """Print the version."""
    print(blocktrain.__version__)


def main() -> None:
    end_with_parent()
    try:
        app()
    except BlocktrainError as error:
        print(f"blocktrain: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("blocktrain: interrupted", file=sys.stderr)
        sys.exit(130)
