"""`blocktrain finish`: end a run before its last round."""

from __future__ import annotations

import typer

from blocktrain.cli.options import CoordinatorOption, DataDirOption
from blocktrain.cli.workers import operator_client
from blocktrain.wording import counted


def finish(coordinator: CoordinatorOption, data_dir: DataDirOption) -> None:
    """End a run now: no round begins any more, and workers are told that it is finished.

    The run stays finished when its coordinator is started again; --set swarm.rounds=N goes on with it.
    """
    with operator_client(coordinator, data_dir) as client:
        receipt = client.finish().receipt
        rounds = client.status().rounds
    typer.echo(
        f"finished after {counted(rounds, 'round')} (ledger entry {receipt.sequence}); the model: "
        f"`blocktrain checkpoint {coordinator} --to model`"
    )
