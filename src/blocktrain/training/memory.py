"""Memory that is free here, and whether training fits into it: asked before anything is allocated.

Not covered: what other programs take later.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from blocktrain.errors import DeviceError
from blocktrain.training.cost import estimated_training_bytes
from blocktrain.training.setup import Setup

CGROUP = Path("/sys/fs/cgroup")
MEMORY_FILE = Path("/proc/meminfo")


def free_memory(device: torch.device) -> tuple[int | None, int | None]:
    """Free and total bytes of a device, each None where the system does not say; a container's limit counts
    where it is lower."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)
    try:
        total: int | None = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        total = None
    # Not MemFree: the page cache counts as used there, and a machine that has read a corpus looks full.
    free = meminfo("MemAvailable") or total
    limit, used = number_in(CGROUP / "memory.max"), number_in(CGROUP / "memory.current")
    if limit is not None and used is not None and (free is None or limit - used < free):
        return max(0, limit - used), limit
    return free, total


def check_fits(setup: Setup, device: torch.device) -> None:
    """Refuse a block that cannot be trained here. Without this the kernel kills the process some seconds
    later (exit code 137 and no word), or its neighbours."""
    free, _ = free_memory(device)
    if free is None:
        return
    if device.type != "cuda":
        free += meminfo("SwapFree") or 0  # slow, but the user's choice
    needed = estimated_training_bytes(setup)
    if needed > free:
        raise DeviceError(
            f"training one block of {setup.recipe.name} needs about {needed / 1e9:.1f} GB of memory, and "
            f"{device} has {free / 1e9:.1f} GB free; close other programs, use another machine or --device, "
            "or, where the recipe is yours, take a smaller model.width, model.layers_per_block or "
            "training.batch"
        )


def meminfo(key: str) -> int | None:
    try:
        for line in MEMORY_FILE.read_text().splitlines():
            name, _, value = line.partition(":")
            if name == key:
                return 1024 * int(value.split()[0])
    except (OSError, ValueError, IndexError):
        pass
    return None


def number_in(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
