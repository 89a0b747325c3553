"""Readings of this machine: versions, device and memory, disk, limits. Nothing here judges."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

import torch

import blocktrain
from blocktrain.config import find_recipe, load_recipe
from blocktrain.doctor.findings import Device, Disk, Need, Tcp, Versions
from blocktrain.errors import DeviceError
from blocktrain.training.cost import estimated_training_bytes
from blocktrain.training.device import find_device
from blocktrain.training.setup import Setup

MEASURED_RECIPES = ("demo", "wikitext-2", "litepaper", "swarm-t7")
"""Blocks of 0.1 to 6 GB, smallest first."""
PROXY_VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
TCP_SETTINGS = Path("/proc/sys/net/ipv4")
CGROUP = Path("/sys/fs/cgroup")


def read_versions() -> Versions:
    return Versions(tuple(sys.version_info[:3]), str(torch.__version__), blocktrain.__version__)


def read_device(name: str) -> Device:
    try:
        device = find_device(name)
    except DeviceError as error:
        return Device(name, "", None, None, problem=str(error))
    if device.type == "cuda":
        return Device(str(device), torch.cuda.get_device_name(device), *torch.cuda.mem_get_info(device))
    free, total = system_memory()
    description = f"{os.cpu_count()} cores, {platform.machine()}"
    return Device(str(device), description, free, total)


def system_memory() -> tuple[int | None, int | None]:
    """Free and total bytes; a container's limit counts where it is lower."""
    try:
        total: int | None = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        total = None
    # Not MemFree: the page cache counts as used there, and a machine that has read a corpus looks full.
    free = _meminfo("MemAvailable") or total
    limit, used = _number(CGROUP / "memory.max"), _number(CGROUP / "memory.current")
    if limit is not None and used is not None and (free is None or limit - used < free):
        return max(0, limit - used), limit
    return free, total


def _meminfo(key: str) -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == key:
                return 1024 * int(value.split()[0])
    except (OSError, ValueError, IndexError):
        pass
    return None


def _number(path: Path) -> int | None:
    text = _line(path)
    return int(text) if text is not None and text.isdigit() else None


def _line(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def shipped_needs() -> list[Need]:
    """What one block of each measured recipe takes, whatever the environment sets."""
    return [need_of(Setup.of(load_recipe(find_recipe(name), environment={}))) for name in MEASURED_RECIPES]


def need_of(setup: Setup) -> Need:
    return Need(setup.recipe.name, estimated_training_bytes(setup))


def read_disk(folder: Path) -> Disk:
    """Free bytes where the folder is, or where the nearest one above it is that exists."""
    existing = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    writable = existing.is_dir() and os.access(existing, os.W_OK)
    try:
        free: int | None = shutil.disk_usage(existing).free
    except OSError:
        free = None
    return Disk(str(folder), free, writable)


def read_file_limit() -> int | None:
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def read_tcp() -> Tcp:
    idle = _number(TCP_SETTINGS / "tcp_slow_start_after_idle")
    return Tcp(_line(TCP_SETTINGS / "tcp_congestion_control"), None if idle is None else bool(idle))


def read_proxy(environment: Mapping[str, str]) -> dict[str, str]:
    """Proxy variables that are set, without the passwords in them."""
    found = {}
    for name, value in environment.items():
        if name.upper() in PROXY_VARIABLES and value:
            # The findings are pasted into issues.
            place = urlsplit(value)
            found[name] = f"{place.scheme}://…@{place.hostname}" if place.username else value
    return found
