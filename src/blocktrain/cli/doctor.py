"""The verb `doctor`: reads, judges, prints. Exit 1 if anything is an error, 2 for misuse, else 0."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blocktrain.cli.options import WORKER_DATA_DIR, DeviceOption

if TYPE_CHECKING:
    from blocktrain.doctor.findings import Finding

STYLES = {"ok": "green", "warning": "yellow", "error": "red"}


def doctor(
    coordinator: Annotated[
        str | None, typer.Option(metavar="LINK", help="A run you want to join: its link or address.")
    ] = None,
    stage: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="A stage that a gateway should reach.")
    ] = None,
    device: DeviceOption = "auto",
    data_dir: Annotated[Path, typer.Option(help="Where a worker would keep its data.")] = WORKER_DATA_DIR,
    corpus: Annotated[str | None, typer.Option(help="Where the run's text lies on this machine.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Say whether this machine is fit to train, join and serve, and what to do where it is not.

    Exit code 0: fit (perhaps with warnings); 1: something must be mended; 2: misuse.
    """
    from blocktrain.client.address import RunLink
    from blocktrain.doctor import findings
    from blocktrain.doctor.checkup import about_machine, about_run

    link = None if coordinator is None else RunLink.parse(coordinator)
    found = about_machine(device, data_dir.expanduser(), None if link is None else link.url)
    if link is not None:
        found += about_run(link, device, corpus)
    if stage is not None:
        from blocktrain.doctor.network import read_stage

        found.append(findings.about_stage(read_stage(stage)))
    show(found, as_json=as_json)
    if findings.worst(found) is findings.Severity.ERROR:
        # Warnings do not count: scripts stop only for what must be mended.
        raise typer.Exit(1)


def show(found: list[Finding], *, as_json: bool) -> None:
    from rich.console import Console
    from rich.text import Text

    from blocktrain.doctor.findings import Severity, worst

    summary = worst(found)
    if as_json:
        listed = [finding.to_dict() for finding in found]
        typer.echo(json.dumps({"severity": summary.name.lower(), "findings": listed}, indent=1))
        return
    console = Console(highlight=False, soft_wrap=True)
    for finding in found:
        word = finding.severity.name.lower()
        line = Text.assemble((f"{word:<8}", STYLES[word]), f"{finding.topic}: {finding.found}")
        console.print(line)
        if finding.cause is not None:
            console.print(Text(f"        cause:  {finding.cause}"))
        if finding.remedy is not None:
            console.print(Text(f"        remedy: {finding.remedy}"))
    count = sum(finding.severity is not Severity.OK for finding in found)
    console.print("nothing to mend" if not count else f"{count} to look at, worst: {summary.name.lower()}")
