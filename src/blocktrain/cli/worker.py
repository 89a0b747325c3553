"""`blocktrain worker`: train blocks for a coordinator, on one device or on several."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from blocktrain.cli.options import (
    WORKER_DATA_DIR,
    CoordinatorOption,
    CorpusOption,
    DeviceOption,
    NiceOption,
    ThreadsOption,
    to_stderr,
)
from blocktrain.errors import UserError
from blocktrain.files import write_whole
from blocktrain.local.processes import STOPPING_SIGNALS, stop_on_signals
from blocktrain.starting import THREAD_COUNTS, limit_processor

BYTES_PER_MBIT = 1e6 / 8

# A volunteer's controls, which `join` has too.
DevicesOption = Annotated[
    str | None,
    typer.Option(
        help="A worker for each of several devices: all (GPUs), numbers such as 0,1, or names: cuda:0,cpu."
    ),
]
WorkerFolderOption = Annotated[
    Path, typer.Option("--data-dir", help="Key, cache and training state; one folder for each worker.")
]
InviteOption = Annotated[
    str | None, typer.Option("--invite", help="Token from the run's operator, if it asks for one.")
]
LabelOption = Annotated[str, typer.Option("--label", help="A name for this worker, shown on the dashboard.")]
CacheOption = Annotated[
    float, typer.Option("--cache-gb", help="Disk space for everything it keeps, training state too.", min=0.1)
]
UpOption = Annotated[
    float | None, typer.Option("--max-up", metavar="MBIT", help="Send at most this many Mbit/s.", min=0.05)
]
DownOption = Annotated[
    float | None,
    typer.Option("--max-down", metavar="MBIT", help="Receive at most this many Mbit/s.", min=0.05),
]
MemoryOption = Annotated[
    float | None,
    typer.Option(
        "--max-memory",
        metavar="GB",
        help="Take only blocks whose training fits into so much device memory.",
        min=0.001,
    ),
]
HoursOption = Annotated[
    str | None,
    typer.Option(
        "--hours", metavar="FROM-UNTIL", help="Work at these times of the day only: 22-7, 22:30-06:15."
    ),
]
MaxHoursOption = Annotated[
    float | None,
    typer.Option("--max-hours", help="Leave after this many hours of work; pauses do not count.", min=0.01),
]
MaxRoundsOption = Annotated[
    int | None, typer.Option("--max-rounds", help="Leave after this many updates.", min=1)
]


class Sharding(StrEnum):
    AUTO = "auto"
    YES = "yes"
    NO = "no"


def worker(
    coordinator: CoordinatorOption,
    device: DeviceOption = "auto",
    devices: DevicesOption = None,
    key: Annotated[
        Path | None, typer.Option(help="Key file that makes this machine the same worker again.")
    ] = None,
    data_dir: WorkerFolderOption = WORKER_DATA_DIR,
    corpus: CorpusOption = None,
    invite: InviteOption = None,
    label: LabelOption = "",
    cache_gb: CacheOption = 4.0,
    max_up: UpOption = None,
    max_down: DownOption = None,
    max_memory: MemoryOption = None,
    hours: HoursOption = None,
    max_hours: MaxHoursOption = None,
    max_rounds: MaxRoundsOption = None,
    threads: ThreadsOption = None,
    nice: NiceOption = 0,
    shard: Annotated[
        Sharding,
        typer.Option(
            help="Under torchrun: each device holds a part of the block (yes) or all of it (no); auto: "
            "a part where all does not fit."
        ),
    ] = Sharding.AUTO,
) -> None:
    """Train blocks for a coordinator. Makes outbound connections only; Ctrl-C leaves politely.

    `blocktrain pause` (or SIGUSR1) pauses it, `blocktrain resume` (or SIGUSR2) lets it go on. With
    `--devices`, bandwidth and disk are shared out; threads, hours and rounds count for each worker.
    Started by `torchrun --nproc-per-node N -m blocktrain worker …`, N devices are one worker.
    """
    limit_processor(threads, nice)
    from blocktrain.client.address import RunLink
    from blocktrain.worker.shifts import CONTRIBUTION_FILE, Contribution, Shifts, Terms, parse_hours

    link, folder = RunLink.parse(coordinator), data_dir.expanduser()
    terms = Terms(
        hours=parse_hours(hours) if hours else None,
        max_seconds=max_hours and 3600 * max_hours,
        max_rounds=max_rounds,
    )
    tokens = (invite or link.invite or "").split("+")
    launched = "TORCHELASTIC_RUN_ID" in os.environ
    if devices is not None and launched:
        raise UserError(
            "--devices starts a worker for each device, and torchrun one for all: use one of them"
        )
    if shard is not Sharding.AUTO and not launched:
        raise UserError("--shard needs several ranks: torchrun --nproc-per-node N -m blocktrain worker …")
    if devices is not None:
        if key is not None:
            raise UserError("--key goes with one worker; those of --devices have theirs in --data-dir")
        flags = {
            "--coordinator": RunLink(link.url, pin=link.pin), "--corpus": corpus, "--hours": hours,
            "--max-hours": max_hours, "--max-rounds": max_rounds, "--max-memory": max_memory,
        }  # fmt: skip
        shared = {"--cache-gb": cache_gb, "--max-up": max_up, "--max-down": max_down}
        work_on_devices(devices, folder, flags, shared, tokens, label)
        return
    from blocktrain.training.device import find_device
    from blocktrain.training.ranks import ALONE, RankError, Ranks
    from blocktrain.worker.program import WorkerOptions, run_worker

    found, ranks = find_device(device), ALONE
    if launched and os.environ["WORLD_SIZE"] != "1":
        if found.type == "cuda" and found.index is None:
            found = find_device(f"cuda:{os.environ['LOCAL_RANK']}")
        ranks = Ranks.meet(found)
    if ranks.rank:
        from blocktrain.worker.ranks import follow

        # Rank 0 is told to stop too, and may need this one to leave politely.
        for number in STOPPING_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        follow(ranks)
        ranks.part()
        return
    options = WorkerOptions(
        coordinator=str(RunLink(link.url, pin=link.pin)),
        data_dir=folder,
        key=key,
        device=found,
        cache_bytes=round(cache_gb * 1e9),
        corpus=corpus,
        invite=tokens[0] or None,
        label=label,
        max_up=max_up and max_up * BYTES_PER_MBIT,
        max_down=max_down and max_down * BYTES_PER_MBIT,
        max_memory=None if max_memory is None else round(max_memory * 1e9),
        ranks=ranks,
        shard=None if shard is Sharding.AUTO else shard is Sharding.YES,
    )
    given = Contribution()
    shifts = Shifts(terms, given, lambda stop: run_worker(options, stop, given), to_stderr, folder=folder)
    shifts.obey_signals()
    try:
        shifts.run(stop_on_signals())
    finally:
        with contextlib.suppress(RankError), ranks.together():
            ranks.tell("end")
            ranks.part()
        if given.steps or given.verdicts:
            to_stderr(given.sentence())
            # For a program that started several workers and sums up.
            write_whole(folder / CONTRIBUTION_FILE, json.dumps(vars(given)).encode(), durable=False)


def work_on_devices(
    devices: str,
    folder: Path,
    flags: Mapping[str, object],
    shared: Mapping[str, float | None],
    tokens: list[str],
    label: str,
) -> None:
    """One worker process for each device; each takes an even share of what is `shared`."""
    from blocktrain.local.crew import Crew, Member, folder_names

    chosen = chosen_devices(devices)
    share = {name: value and value / len(chosen) for name, value in shared.items()}
    # Torch takes all cores in every process: workers would then fight over each of them.
    cores = str(max(1, (os.cpu_count() or 1) // len(chosen)))
    environment = {} if THREAD_COUNTS[0] in os.environ else dict.fromkeys(THREAD_COUNTS, cores)
    members = []
    for number, (device, name) in enumerate(zip(chosen, folder_names(chosen), strict=True)):
        own: dict[str, object] = {
            "--device": device,
            "--data-dir": folder / name,
            # An invitation is good for one worker.
            "--invite": tokens[number] if number < len(tokens) and tokens[number] else None,
            "--label": f"{label} {name}" if label else None,
        }
        given = {name: value for name, value in {**flags, **share, **own}.items() if value is not None}
        verb = ["worker", *(word for flag, value in given.items() for word in (flag, str(value)))]
        members.append(Member(name, folder / name, verb, environment))
    crew = Crew(folder, members, to_stderr)
    crew.obey_signals()
    crew.run(stop_on_signals())


def chosen_devices(devices: str) -> list[str]:
    from blocktrain.local.crew import named_devices

    def look() -> tuple[int, str]:
        import torch

        from blocktrain.training.device import best_device

        return torch.cuda.device_count(), best_device(cuda=False, mps=torch.backends.mps.is_available())

    return named_devices(devices, look)
