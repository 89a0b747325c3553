"""A run's status as tables for a terminal, and as the numbers of a report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from blocktrain.client.durations import duration
from blocktrain.wire.messages import StatusAnswer, WorkerState, WorkerSummary

SHORT_ID = 8


def status_tables(status: StatusAnswer) -> Group:
    state = "finished" if status.finished else "running"
    newest = status.evaluations[-1] if status.evaluations else None
    score = ""
    if newest is not None:
        score = f", held-out CE {per_byte(newest.consensus_ce, newest.bytes_per_token)}"
    share = f", participation {status.participation:.0%}" if status.participation is not None else ""
    left = ""
    if status.seconds_left and not status.finished:
        left = f", about {duration(status.seconds_left)} left"
    heading = f"{status.name}: {state}{left}{score}{share}"

    blocks = Table("block", "round", "arrived", "workers", "closes in", "CE", box=None, pad_edge=False)
    block_ce: Sequence[float] = () if newest is None else newest.block_ce
    # Most blocks share a reason for their deadline; a line for each would push the workers off the screen.
    sharing: dict[str, list[str]] = {}
    for block in status.blocks:
        now = block.round
        left = "-" if now.deadline is None else f"{max(0.0, now.deadline - status.server_time):.0f} s"
        blocks.add_row(
            str(block.block),
            f"{block.head_version}/{status.rounds}",
            f"{now.accepted + now.late}/{now.wanted}",
            str(now.workers),
            left,
            f"{block_ce[block.block]:.4f}" if block.block < len(block_ce) else "-",
        )
        if not block.finished and now.deadline_reason:
            sharing.setdefault(now.deadline_reason, []).append(str(block.block))
    deadlines = [Text(f"block {', '.join(names)}: {why}", style="dim") for why, names in sharing.items()]

    workers = Table(
        "worker", "on", "block", "step", "loss", "verdicts", "up", "down", box=None, pad_edge=False
    )
    # The coordinator lists who was seen last first, which changes at every look.
    for worker in sorted(status.workers, key=lambda one: (one.label, one.worker_id)):
        workers.add_row(
            # Escaped: a label is a stranger's text, and rich would read [red] in it as a style.
            f"{worker.worker_id[:SHORT_ID]} {escape(worker.label)}".rstrip(),
            # Without the machine's name, which the page shows: this table has to fit 80 columns.
            worker.device.split(" ")[0] + ("" if worker.live else ", gone"),
            "-" if worker.block is None else str(worker.block),
            "-" if worker.step is None else str(worker.step),
            "-" if worker.loss is None else f"{worker.loss:.4f}",
            verdict_counts(worker),
            megabytes(sum(worker.up.model_dump().values())),
            megabytes(sum(worker.down.model_dump().values())),
        )
    return Group(heading, blocks, *deadlines, workers)


def verdict_counts(worker: WorkerState | WorkerSummary) -> str:
    """What became of a worker's updates: the words and numbers that the page shows too."""
    told = [f"{worker.accepted} on time"]
    told += [f"{count} {word}" for word in ("late", "unused", "refused") if (count := getattr(worker, word))]
    return ", ".join(told)


def megabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:.2f} MB"


def swarm_report(
    status: StatusAnswer, workers: Sequence[dict[str, Any]], seconds: float, final: dict[str, Any] | None
) -> dict[str, Any]:
    """What a run cost and gave. Bytes and seconds of `workers` are counted on their own sockets."""
    return {
        "name": status.name,
        "run_id": status.run_id,
        "finished": status.finished,
        "wall_seconds": seconds,
        "final": final,
        "ce": [evaluation.model_dump(mode="json") for evaluation in status.evaluations],
        "rounds": [report.model_dump(mode="json") for report in status.reports],
        "participation": status.participation,
        "ages": status.ages,
        "bytes_up": _sum(workers, "up"),
        "bytes_down": _sum(workers, "down"),
        "bytes_total": sum(_sum(workers, "up").values()) + sum(_sum(workers, "down").values()),
        "seconds": _sum(workers, "seconds"),
        "workers": list(workers),
        "coordinator": {
            "received": status.up.model_dump(),
            "sent": status.down.model_dump(),
            "ledger_length": status.ledger_length,
        },
    }


def _sum(workers: Sequence[dict[str, Any]], key: str) -> dict[str, float]:
    totals: dict[str, float] = {}
    for worker in workers:
        for kind, amount in worker[key].items():
            totals[kind] = totals.get(kind, 0) + amount
    return totals


def scored(score: dict[str, Any]) -> str:
    """The coordinator scores a slice of the text while it works, so its numbers differ from the final one."""
    loss = per_byte(score["consensus_ce"], score["bytes_per_token"])
    return f"{loss} on the first {score['scored_bytes']:,} held-out bytes (during the run)"


def per_byte(ce: float, bytes_per_token: float) -> str:
    """A loss in the unit that compares with any other run's, and in its own where that is another."""
    told = f"{ce / bytes_per_token:.4f} nats per byte"
    return told if bytes_per_token == 1 else f"{told} ({ce:.4f} per token)"


def report_table(report: dict[str, Any]) -> Table:
    table = Table("", "", show_header=False, box=None, pad_edge=False)
    for score in report["ce"]:
        versions = ", ".join(map(str, score["versions"]))
        table.add_row(f"CE of versions {versions}", scored(score))
    if report["final"] is not None:
        final = report["final"]
        told = f"{per_byte(final['consensus_ce'], final['bytes_per_token'])} on "
        told += f"{final['scored_tokens'] + 1:,} held-out tokens (composed by consensus)"
        table.add_row("final CE", told)
    if report["participation"] is not None:
        table.add_row("participation", f"{report['participation']:.1%}")
    table.add_row("merged updates by age", ", ".join(f"{age}: {n}" for age, n in report["ages"].items()))
    for direction in ("up", "down"):
        kinds = ", ".join(f"{megabytes(n)} {kind}" for kind, n in report[f"bytes_{direction}"].items())
        table.add_row(f"workers' bytes {direction}", kinds)
    table.add_row("seconds", ", ".join(f"{n:.1f} {what}" for what, n in report["seconds"].items()))
    table.add_row("wall time", f"{report['wall_seconds']:.1f} s")
    return table
