"""`blocktrain swarm`: the coordinator and worker programs as processes of one machine.

Nothing here trains, merges or knows the protocol beyond its public reads: it starts the same programs
that strangers run, watches `/v1/status`, and writes the checkpoint and the report at the end. Starting
it again on the same folder goes on where it stopped.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.live import Live

from blocktrain.client.coordinator import CoordinatorClient, public_client
from blocktrain.config import Recipe, changed_settings, load_recipe
from blocktrain.errors import StoppedError, UserError
from blocktrain.files import locked_file
from blocktrain.judge.ledger_check import open_source
from blocktrain.local.assembly import save_final_checkpoint
from blocktrain.local.processes import Child, await_line, end_children, start_child
from blocktrain.local.status_view import report_table, status_tables, swarm_report
from blocktrain.training.storage import stored_run, write_json
from blocktrain.wire.messages import StatusAnswer

OWN_WORKERS = "trust.stamp_bits=0"
"""Nobody else can reach this coordinator, so its workers need no proof of work."""
READY_LINE = r"coordinator ready url=(\S+)"
# Importing torch and preparing the text come before the line, and on a loaded machine both are slow.
READY_SECONDS = 120.0
ENDING_SECONDS = 60.0
STATUS_SECONDS = 0.5
LINE_SECONDS = 5.0
STATUS_ATTEMPTS = 20


@dataclass(frozen=True)
class SwarmOptions:
    recipe: Path
    workers: int
    out: Path
    overrides: Sequence[str] = ()
    device: str = "auto"
    resolved: Recipe | None = None
    """The recipe with all overrides, to tell another run's folder apart; None takes any."""
    coordinator_options: tuple[str, ...] = ()
    """More flags for `blocktrain coordinator`."""


@dataclass
class LocalSwarm:
    options: SwarmOptions
    console: Console
    stop: threading.Event
    coordinator: Child | None = None
    workers: list[Child] = field(default_factory=list)
    url: str = ""
    clients: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def start(self) -> None:
        data_dir = self.options.out / "coordinator"
        changes = (OWN_WORKERS, *self.options.overrides)
        settings = [flag for one in changes for flag in ("--set", one)]
        verb = [
            "coordinator",
            str(self.options.recipe),
            "--data-dir",
            str(data_dir),
            "--port",
            "0",
            *settings,
            *self.options.coordinator_options,
        ]
        # Port 0, and the address from the line it prints: two swarms on one machine never meet.
        self.coordinator = start_child("coordinator", verb, self._log("coordinator"))
        self.url = await_line(self.coordinator, READY_LINE, READY_SECONDS, self.stop)
        # Torch takes all cores in every process: four workers would then fight over each of them.
        threads = max(1, (os.cpu_count() or 1) // self.options.workers)
        environment = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(threads)}
        # A worker opens only text that its own user names, and here that is the operator.
        data = load_recipe(self.options.recipe, self.options.overrides).data
        text = data.dataset or data.corpus
        corpus_flag = [] if text == "builtin" else ["--corpus", text]
        # Workers of one machine take its GPUs in turn, unless a device was named.
        num_gpus = torch.cuda.device_count() if self.options.device == "auto" else 0
        for index in range(self.options.workers):
            name = f"worker-{index}"
            verb = ["worker", "--coordinator", self.url, "--data-dir", str(self.options.out / name)]
            device = f"cuda:{index % num_gpus}" if num_gpus else self.options.device
            verb += ["--device", device, *corpus_flag]
            self.workers.append(start_child(name, verb, self._log(name), environment))

    def _log(self, name: str) -> Path:
        return self.options.out / "logs" / f"{name}.log"

    def client(self) -> CoordinatorClient:
        """Open until the swarm is closed."""
        client = public_client(
            self.url,
            stop=self.stop,
            report=lambda line: self.console.print(line, style="dim"),
            attempts=STATUS_ATTEMPTS,
        )
        return self.clients.enter_context(client)

    def watch(self, client: CoordinatorClient, *show: Callable[[StatusAnswer], None]) -> None:
        """Until the run is finished; a worker that dies is reported, and the run goes on without it."""
        while not self.stop.is_set():
            status = client.status()
            for one in show:
                one(status)
            if status.finished:
                return
            self._check_children()
            self.stop.wait(STATUS_SECONDS)
        raise StoppedError("stopped before the run was finished; the same command goes on from here")

    def _check_children(self) -> None:
        assert self.coordinator is not None
        if not self.coordinator.running:
            raise self.coordinator.failure()
        # A run goes on as long as one worker lives, as it would with strangers; with none it would wait
        # without end.
        for child in [child for child in self.workers if not child.running]:
            self.workers.remove(child)
            child.kill()
            self.console.print(str(child.failure()), style="red", markup=False)
            if not self.workers:
                raise child.failure()

    def end_workers(self) -> None:
        """After the run: every worker is told so and ends by itself."""
        # One deadline for all and not one each: four stuck workers cost a minute and not four.
        deadline = time.monotonic() + ENDING_SECONDS
        for child in self.workers:
            child.wait(max(0.0, deadline - time.monotonic()))
        end_children(self.workers, ENDING_SECONDS)

    def worker_reports(self) -> list[dict[str, Any]]:
        paths = sorted(self.options.out.glob("worker-*/*/report.json"))
        return [json.loads(path.read_text()) for path in paths]

    def close(self) -> None:
        self.clients.close()
        end_children(self.workers, ENDING_SECONDS / 4)
        if self.coordinator is not None:
            end_children([self.coordinator], ENDING_SECONDS / 4)


def run_swarm(
    options: SwarmOptions,
    console: Console,
    stop: threading.Event,
    record: Callable[[StatusAnswer], None] = lambda _: None,
) -> dict[str, Any]:
    """The report of a whole run, whose checkpoint is written too."""
    taken = f"another swarm is using {options.out}; wait for it, stop it, or choose another --out"
    # The kernel drops the lock with the process, so a killed swarm leaves nothing to clean up.
    with locked_file(options.out / "swarm.lock", taken):
        check_same_run(options.out, options.resolved)
        earlier = finished_report(options.out)
        if earlier is not None:
            told = f"the run in {options.out} is finished; choose another --out to train again"
            console.print(told, highlight=False, soft_wrap=True)
            report = earlier
        else:
            report = _run(LocalSwarm(options, console, stop), record)
    show_report(report, options.out, console)
    return report


def check_same_run(out: Path, recipe: Recipe | None) -> None:
    """Refuse a folder that was begun with other settings."""
    path = out / "run.json"
    if recipe is None or not path.exists():
        return
    before = stored_run(path)
    changed = changed_settings(before["recipe"], recipe)
    if changed:
        raise UserError(
            f"{out} holds a run with other settings ({', '.join(changed)}); choose another --out, or the "
            "same settings to go on"
        )


def finished_report(out: Path) -> dict[str, Any] | None:
    """The report of a run that came to its end here."""
    path = out / "report.json"
    if not path.exists() or not (out / "checkpoint" / "config.json").exists():
        return None
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}); choose another --out") from None
    return report if isinstance(report, dict) and report.get("finished") else None


def show_report(report: dict[str, Any], out: Path, console: Console) -> None:
    console.print(report_table(report))
    for name, file in (("report", "report.json"), ("checkpoint", "checkpoint"), ("metrics", "metrics.jsonl")):
        console.print(f"{name:<11} {out / file}", highlight=False, soft_wrap=True)


def _run(swarm: LocalSwarm, record: Callable[[StatusAnswer], None]) -> dict[str, Any]:
    options, console = swarm.options, swarm.console
    started = time.monotonic()
    try:
        swarm.start()
        if options.resolved is not None:
            # After the start: a recipe that the coordinator refuses leaves no folder that claims to be a run.
            write_json(options.out / "run.json", {"recipe": options.resolved.to_dict()})
        console.print(
            f"coordinator at {swarm.url}, {options.workers} workers, logs in {options.out / 'logs'}"
        )
        client = swarm.client()
        with shown(console) as show:
            swarm.watch(client, show, record)
        # Taken before the workers end: the time to the result, not the time to put everything away.
        seconds = time.monotonic() - started
        swarm.end_workers()
        console.print("all rounds are done; scoring the final model on held-out text", highlight=False)
        with open_source(swarm.url) as source:
            final = save_final_checkpoint(source, options.out / "checkpoint")
        # Once more: the last verdicts and byte counts come in while workers end.
        ended = client.status()
        record(ended)
        report = swarm_report(ended, swarm.worker_reports(), seconds, final)
    finally:
        swarm.close()
    write_json(options.out / "report.json", report)
    return report


class shown:
    """Shows each status: redrawn on a terminal, elsewhere a line now and then where it says something new."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.live = Live(console=console, refresh_per_second=2) if console.is_terminal else None
        self.shown_at = 0.0
        self.line = ""

    def __enter__(self) -> Callable[[StatusAnswer], None]:
        if self.live is not None:
            self.live.start()
        return self.show

    def __exit__(self, *_: object) -> None:
        if self.live is not None:
            self.live.stop()

    def show(self, status: StatusAnswer) -> None:
        if self.live is not None:
            self.live.update(status_tables(status))
        elif time.monotonic() - self.shown_at >= LINE_SECONDS:
            self.shown_at = time.monotonic()
            versions = ",".join(str(block.head_version) for block in status.blocks)
            score = f" ce={status.evaluations[-1].consensus_ce:.4f}" if status.evaluations else ""
            live = sum(worker.live for worker in status.workers)
            line = f"rounds={versions}/{status.rounds} workers={live}{score}"
            if line != self.line:
                self.console.print(line, highlight=False)
                self.line = line
