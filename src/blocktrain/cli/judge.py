"""`blocktrain judge`: score updates for a coordinator."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated

import typer

from blocktrain.cli.options import CoordinatorOption, CorpusOption, DeviceOption
from blocktrain.local.processes import stop_on_signals


def judge(
    coordinator: CoordinatorOption,
    key: Annotated[Path, typer.Option(help="Key file; its id must be in the coordinator's judges.txt.")],
    device: DeviceOption = "auto",
    corpus: CorpusOption = None,
    held_out: Annotated[
        str | None, typer.Option(help="Private held-out text, where the run is judged on such.")
    ] = None,
) -> None:
    """Score updates for a coordinator, beside its own judge and others. May be killed at any time."""
    from blocktrain.client.coordinator import CoordinatorClient
    from blocktrain.client.traffic import Traffic
    from blocktrain.judge.judge import Judge
    from blocktrain.threads import Stopped
    from blocktrain.training.device import find_device
    from blocktrain.wire.identity import load_or_create

    stop = stop_on_signals()
    identity = load_or_create(key.expanduser())

    def say(line: str) -> None:
        typer.echo(line, err=True)

    # The operator needs this id for judges.txt, and without a line here nobody would find it.
    say(f"judge id={identity.worker_id}")
    # A stop while it waits for the coordinator is the usual end of a judge.
    with (
        contextlib.suppress(Stopped),
        CoordinatorClient(coordinator, identity, Traffic(), stop, say) as client,
    ):
        Judge(client, find_device(device), corpus, held_out, say).run(stop)
