"""Workers as Ray actors: `blocktrain fleet ray`, for clusters where Ray already places programs.

An actor is one worker, in Ray's own process, so that both end together. Ray starts an actor again whose
process or machine died; on the same machine it finds its folder and is the same worker again. Everybody who
can reach a Ray cluster can run code on it: this trusts the cluster, and a run trusts its workers no more than
any others.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blocktrain.errors import BlocktrainError, StoppedError, UserError
from blocktrain.local.processes import stop_on_signals

LEAVING_SECONDS = 30.0
LOOK_SECONDS = 1.0


@dataclass(frozen=True)
class RayFleet:
    coordinator: str
    workers: int
    folder: Path
    """On each machine of the cluster; every worker has a folder in it."""
    corpus: str | None = None
    label: str = ""
    invites: Sequence[str] = ()
    cache_bytes: int = 4_000_000_000
    cpus: float = 1.0
    gpus: float | None = None
    """GPUs of one worker; None: one where the cluster has any."""


class RayWorker:
    """The actor. Not imported with torch: the machine that places actors needs none."""

    def __init__(self) -> None:
        self.stop = threading.Event()

    def work(self, fleet: RayFleet, number: int) -> str:
        """Until the run is finished or the fleet leaves; what was given, in a sentence."""
        from blocktrain.training.device import find_device
        from blocktrain.worker.program import WorkerOptions, run_worker
        from blocktrain.worker.shifts import Contribution

        given = Contribution()
        options = WorkerOptions(
            coordinator=fleet.coordinator,
            data_dir=fleet.folder.expanduser() / f"ray-{number}",
            device=find_device("auto"),  # Ray shows an actor its own GPUs only
            cache_bytes=fleet.cache_bytes,
            corpus=fleet.corpus,
            invite=fleet.invites[number] if number < len(fleet.invites) else None,
            label=f"{fleet.label} {number}".strip() if fleet.label else "",
        )
        run_worker(options, self.stop, given)
        return given.sentence()

    def leave(self) -> None:
        self.stop.set()


def run_fleet(fleet: RayFleet, address: str | None, say: Callable[[str], None]) -> None:
    """Until every worker has ended by itself, or a signal comes. Without an address of a cluster a new one is
    started on this machine."""
    # Ray reports its use to its makers unless it is told not to.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        ray: Any = importlib.import_module("ray")  # half of it has no types
    except ImportError:
        raise UserError("`fleet ray` needs Ray: pip install 'blocktrain[ray]'") from None

    address = address or os.environ.get("RAY_ADDRESS") or "local"
    # Workers exchange nothing by Ray's object store, for which it would take 30 % of the memory.
    new = {"include_dashboard": False, "object_store_memory": 100_000_000} if address == "local" else {}
    ray.init(address=address, **new)
    stop = stop_on_signals()  # not before: Ray sets handlers of its own
    try:
        resources = ray.cluster_resources()
        gpus = fleet.gpus if fleet.gpus is not None else float(resources.get("GPU", 0) > 0)
        say(
            f"fleet workers={fleet.workers} cpus={fleet.cpus:g} gpus={gpus:g} each; the cluster has "
            f"{resources.get('CPU', 0):g} CPUs and {resources.get('GPU', 0):g} GPUs"
        )
        # Two calls at once: `leave` comes while `work` runs. The second try of `work` follows a restart.
        place = ray.remote(RayWorker).options(
            num_cpus=fleet.cpus,
            num_gpus=gpus,
            max_restarts=-1,
            max_task_retries=-1,
            max_concurrency=2,
        )
        actors = [place.remote() for _ in range(fleet.workers)]
        _watch(ray, fleet, actors, stop, say)
    finally:
        ray.shutdown()


def _watch(
    ray: Any, fleet: RayFleet, actors: list[Any], stop: threading.Event, say: Callable[[str], None]
) -> None:
    running = {actor.work.remote(fleet, number): number for number, actor in enumerate(actors)}
    told, failure, finished = False, None, 0
    while running:
        if stop.is_set() and not told:
            told = True
            for actor in actors:
                actor.leave.remote()
        ended, _ = ray.wait(list(running), timeout=LEAVING_SECONDS if told else LOOK_SECONDS)
        if told and not ended:
            break
        for reference in ended:
            number = running.pop(reference)
            try:
                say(f"ray-{number}: {ray.get(reference)}")
                finished += 1
            except ray.exceptions.RayTaskError as error:
                failure = error.cause if isinstance(error.cause, BlocktrainError) else error
                say(f"ray-{number}: ended: {failure}; it stays away")
    if told and not finished:
        raise StoppedError("stopped before any worker had joined")
    if failure is not None and not finished:
        raise failure
