"""Status and reports of runs as tables for a terminal, and the numbers of a swarm's report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from blocktrain.wire.messages import StatusAnswer, WorkerState, WorkerSummary
from blocktrain.wording import duration

if TYPE_CHECKING:  # it loads torch, two seconds that `status` does not need
    from blocktrain.training.report import TrainingReport

SHORT_ID = 8


def status_tables(status: StatusAnswer) -> Group:
    working = any(worker.live for worker in status.workers)
    state = "finished" if status.finished else "training" if working else "waiting for workers"
    newest = status.evaluations[-1] if status.evaluations else None
    score = ""
    if newest is not None:
        score = f", held-out CE {per_byte(newest.consensus_ce, newest.bytes_per_token)}"
        # Scoring takes its time: 5.5452, that of a block at its start, stood beside the last round.
        if list(newest.versions) != [block.head_version for block in status.blocks]:
            score += f" (at rounds {', '.join(map(str, newest.versions))}, not the newest)"
    share = f", participation {status.participation:.0%}" if status.participation is not None else ""
    left = ""
    if status.seconds_left and not status.finished:
        left = f", about {duration(status.seconds_left)} left"
    heading = f"{status.name}: {state}{left}{score}{share}"

    blocks = Table("block", "round", "arrived", "workers", "closes in", "CE", box=None, pad_edge=False)
    block_ce: Sequence[float] = () if newest is None else newest.block_ce
    per_token = 1.0 if newest is None else newest.bytes_per_token
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
            f"{block_ce[block.block] / per_token:.4f}" if block.block < len(block_ce) else "-",
        )
        if not block.finished and now.deadline_reason:
            sharing.setdefault(now.deadline_reason, []).append(str(block.block))
    deadlines = [Text(f"block {', '.join(names)}: {why}", style="dim") for why, names in sharing.items()]

    workers = Table(
        "worker", "on", "block", "step", "loss", "verdicts", "up", "down", box=None, pad_edge=False
    )
    # The coordinator lists who was seen last first, which changes at every look.
    for worker in sorted(status.workers, key=lambda one: (one.label, one.worker_id)):
        # As on the page: what it did last is no work.
        at_work = worker.live and worker.block is not None and not status.finished
        workers.add_row(
            # Escaped: a label is a stranger's text, and rich would read [red] in it as a style.
            f"{worker.worker_id[:SHORT_ID]} {escape(worker.label)}".rstrip(),
            # Without the machine's name, which the page shows: this table has to fit 80 columns.
            worker.device.split(" ")[0] + ("" if worker.live else ", gone"),
            str(worker.block) if at_work else "-",
            str(worker.step) if at_work and worker.step is not None else "-",
            f"{worker.loss:.4f}" if at_work and worker.loss is not None else "-",
            verdict_counts(worker),
            megabytes(sum(worker.up.model_dump().values())),
            megabytes(sum(worker.down.model_dump().values())),
        )
    return Group(heading, blocks, *deadlines, *([workers] if status.workers else []))


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


def results_table(report: TrainingReport) -> Table:
    """Everything scored on the same held-out text, best composed model last but one."""
    scores = report.scores
    table = Table(title=f"{report.name}: cross entropy on {scores.scored_tokens:,} held-out tokens")
    table.add_column("model")
    for column in ("nats/byte", "perplexity", "bits/byte"):
        table.add_column(column, justify="right")
    # The bigram first, as the floor: a model that is not below it has learned nothing.
    rows = [("bigram counts", scores.bigram_ce)]
    rows += [(f"block {i} alone", score.ce) for i, score in enumerate(scores.blocks)]
    if scores.euler is not None:
        rows.append(("composed: euler (from noise)", scores.euler.ce))
    rows.append(("composed: consensus", scores.consensus.ce))
    if scores.reference is not None:
        rows.append(("end-to-end reference", scores.reference.ce))
    # Losses are per token; by bytes they compare between tokenizers.
    per_token = scores.bytes_per_token
    for name, ce in rows:
        style, nats = "bold" if "consensus" in name else None, ce / per_token
        table.add_row(name, f"{nats:.4f}", f"{math.exp(ce):.2f}", f"{nats / math.log(2):.3f}", style=style)
    if scores.gap is not None:
        gap = scores.gap / per_token
        table.caption = f"gap of the best composed model to end-to-end: {gap:+.4f} nats/byte"
    return table


def simulation_table(report: dict[str, Any]) -> Table:
    table = Table("", "", show_header=False, box=None, pad_edge=False)
    blocks = ", ".join(f"{ce:.4f}" for ce in report["ce"][-1]["block_ce"])
    rows = {
        "final CE (consensus)": f"{report['final_ce']:.4f}",
        "final CE of each block": blocks,
        "participation (on time)": f"{report['participation']:.1%}",
        "merged at any age": f"{report['merged_share']:.1%}",
        "merged updates by age": ", ".join(f"{age}: {n}" for age, n in report["ages"].items()),
        "refused updates": ", ".join(f"{why}: {n}" for why, n in report["refused_for"].items()) or "none",
        "rounds without an update": str(report["empty_rounds"]),
        "virtual wall time": f"{report['wall_seconds']:.0f} s",
        "time spent computing": f"{report['computing_share']:.1%}",
        "bytes up, down": f"{report['bytes_up'] / 1e9:.2f} GB, {report['bytes_down'] / 1e9:.2f} GB "
        f"(blocks standing for {report['stands_for_parameters'] / 1e6:.0f} M parameters)",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table
