"""What joining a run will use of this machine, said before it begins."""

from __future__ import annotations

from collections.abc import Sequence

from blocktrain.client.run import Layout, run_setup
from blocktrain.client.snapshots import fetched_bytes
from blocktrain.data.dataset import Manifest
from blocktrain.doctor.findings import Device, Disk
from blocktrain.training.memory import block_needs
from blocktrain.wire.messages import RunAnswer, StatusAnswer
from blocktrain.wording import size


def joining_plan(
    url: str,
    run: RunAnswer,
    status: StatusAnswer,
    devices: Sequence[Device],
    disk: Disk,
    cache_gb: float,
    limits: Sequence[str] = (),
    corpus: str | None = None,
    manifest: Manifest | None = None,
) -> list[str]:
    """Memory, disk, bandwidth and device, one line each; figures are estimates, rounded up.

    `manifest` is that of the text which the coordinator serves; None where it serves none.
    Several devices are those of one worker each: their memory is not read, as that would take some of it.
    """
    setup = run_setup(run.recipe, run.vocabulary)
    layouts = [Layout.of(layout) for layout in run.blocks]
    payload = max(layout.payload_bytes for layout in layouts)
    snapshot = max(4 * layout.schema.num_values for layout in layouts)
    # More than `replicas` may work on a block, so the own update is not taken off.
    updates = setup.recipe.swarm.replicas
    down = round(fetched_bytes(merges=1, payloads=updates, payload_bytes=payload, snapshot_bytes=snapshot))
    live = sum(worker.live for worker in status.workers)
    slowest = min(block.head_version for block in status.blocks)
    first, several = devices[0], len(devices) > 1
    free = "" if first.free_bytes is None else f" of {size(first.free_bytes)} free"
    disk_free = "" if disk.free_bytes is None else f" ({size(disk.free_bytes)} free)"
    named = ", ".join(f"{device.name} {device.description}".rstrip() for device in devices)
    each = " for each worker" if several else ""
    if corpus is not None:
        text = f"{corpus}, on this machine"
    elif manifest is not None:
        whole = manifest.dtype.itemsize * sum(shard.tokens for shard in manifest.training)
        text = f"up to {size(whole)} down, as it is needed; kept within the disk space above"
    else:
        text = f"{setup.recipe.data.corpus}, which must be on this machine"
    needs = block_needs(setup.recipe, setup.objective, first.name.partition(":")[0])
    least, most = size(min(needs)), size(max(needs))
    needed = most if least == most else f"{least} to {most}, as much as fits here"
    return [
        f"run      {status.name} at {url}: round {slowest}/{status.rounds}, workers now: {live}",
        f"device   {named}" + (f": {len(devices)} workers" if several else ""),
        f"memory   about {needed}{each}{free}, beside the program's own",
        f"disk     up to {cache_gb:g} GB in all, in {disk.folder}{disk_free}",
        f"network  each round about {size(payload)} up and at most {size(down)} down{each}; to begin "
        f"{size(snapshot)} down; outbound connections only",
        f"text     {text}",
        *([f"limits   {', '.join(limits)}"] if limits else []),
        "leaving  Ctrl-C, at any time; the same command comes back; `blocktrain pause` for a while",
    ]
