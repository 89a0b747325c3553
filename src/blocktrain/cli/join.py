"""`blocktrain join`: everything a volunteer needs, in one link."""

from __future__ import annotations

from typing import Annotated

import typer

from blocktrain.cli.options import (
    WORKER_DATA_DIR,
    CorpusOption,
    DeviceOption,
    NiceOption,
    ThreadsOption,
    to_stderr,
)
from blocktrain.cli.worker import (
    CacheOption,
    DevicesOption,
    DownOption,
    HoursOption,
    InviteOption,
    LabelOption,
    MaxHoursOption,
    MaxRoundsOption,
    MemoryOption,
    UpOption,
    WorkerFolderOption,
    chosen_devices,
    worker,
)
from blocktrain.wording import counted


def join(
    link: Annotated[str, typer.Argument(help="The link, or the address, that the run's host sent.")],
    device: DeviceOption = "auto",
    devices: DevicesOption = None,
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
) -> None:
    """Join a run by its link: shows what it will use of this machine, then trains. Ctrl-C leaves politely.

    The options are those of `blocktrain worker`, which does the same without the summary, for services.
    """
    from blocktrain.client.coordinator import public_client
    from blocktrain.client.texts import fetched_manifest
    from blocktrain.doctor.findings import Device
    from blocktrain.doctor.machine import read_device, read_disk
    from blocktrain.doctor.plan import joining_plan
    from blocktrain.worker.shifts import parse_hours

    if hours is not None:
        parse_hours(hours)  # a mistake is told before a plan is
    limits = {
        "threads for each worker: {}": threads,
        "other programs first (nice {})": nice or None,
        "{} Mbit/s up": max_up,
        "{} Mbit/s down": max_down,
        "blocks within {} GB": max_memory,
        "only at {} o'clock": hours,
        "leaves after {} h": max_hours,
        "leaves after {}": max_rounds and counted(max_rounds, "update"),
    }
    with public_client(link, report=to_stderr) as client:
        run = client.run()
        plan = joining_plan(
            client.url,
            run,
            client.status(),
            [read_device(device)] if devices is None else [Device(one) for one in chosen_devices(devices)],
            read_disk(data_dir.expanduser()),
            cache_gb,
            [text.format(value) for text, value in limits.items() if value is not None],
            corpus,
            fetched_manifest(client, run) if corpus is None and run.dataset is not None else None,
        )
    for line in plan:
        to_stderr(line)
    worker(
        coordinator=link, device=device, devices=devices, data_dir=data_dir, corpus=corpus, invite=invite,
        label=label, cache_gb=cache_gb, max_up=max_up, max_down=max_down, hours=hours, max_hours=max_hours,
        max_rounds=max_rounds, max_memory=max_memory, threads=threads, nice=nice,
    )  # fmt: skip
