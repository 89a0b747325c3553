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
from blocktrain.training.device import find_device
from blocktrain.training.memory import block_needs, free_memory, number_in
from blocktrain.training.setup import Setup

MEASURED_RECIPES = ("demo", "wikitext-2", "litepaper", "swarm-t7")
"""Blocks of 0.1 to 6 GB, smallest first."""
PROXY_VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
TCP_SETTINGS = Path("/proc/sys/net/ipv4")


def read_versions() -> Versions:
    return Versions(tuple(sys.version_info[:3]), str(torch.__version__), blocktrain.__version__)


def read_device(name: str) -> Device:
    try:
        device = find_device(name)
    except DeviceError as error:
        return Device(name, problem=str(error))
    on_gpu = device.type == "cuda"
    cores = f"{os.cpu_count()} cores, {platform.machine()}"
    free, _ = free_memory(device)
    return Device(str(device), torch.cuda.get_device_name(device) if on_gpu else cores, free)


def _line(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def shipped_needs() -> list[Need]:
    """What one block of each measured recipe takes, whatever the environment sets."""
    return [need_of(Setup.of(load_recipe(find_recipe(name), environment={}))) for name in MEASURED_RECIPES]


def need_of(setup: Setup, device_type: str = "cpu") -> Need:
    """Of the smallest block: with room for that one a machine can take part."""
    return Need(setup.recipe.name, min(block_needs(setup.recipe, setup.objective, device_type)))


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
    idle = number_in(TCP_SETTINGS / "tcp_slow_start_after_idle")
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
