"""A training device: its arithmetic, and the room it has for one block's weights."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator

import torch

from blocktrain.errors import DeviceError
from blocktrain.model.block import Block

HOST = torch.device("cpu")


def autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """bf16 matrix products on CUDA, plain fp32 elsewhere."""
    # bf16 needs no loss scaling, unlike fp16; on CPUs it is slower than fp32 where the processor lacks it.
    if device.type == "cuda":
        return torch.autocast("cuda", dtype=torch.bfloat16)
    return contextlib.nullcontext()


def find_device(name: str) -> torch.device:
    """The device that `--device` names, tried out; `auto` is the best one here."""
    if name == "auto":
        name = best_device(cuda=torch.cuda.is_available(), mps=torch.backends.mps.is_available())
        return torch.device(name)
    if re.fullmatch(r"cpu|mps|cuda(:[0-9]+)?", name) is None:
        raise DeviceError(
            f"device {name!r} does not exist here: expected cpu, cuda, cuda:1, mps or auto; try --device cpu"
        )
    try:
        device = torch.device(name)
        # Tried and not only named: a driver that is too old fails here, with its own words, and not an hour
        # later.
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise DeviceError(f"device {name!r} does not exist here ({reason}); try --device cpu") from None
    return device


def best_device(*, cuda: bool, mps: bool) -> str:
    return "cuda" if cuda else "mps" if mps else "cpu"


def device_label(device: torch.device, count: int = 1) -> str:
    """How the device is called where others see it: `cuda (NVIDIA H200)`, `8x cuda (NVIDIA H200)`, `cpu (8
    cores)`."""
    if device.type == "cuda":
        name = torch.cuda.get_device_properties(device).name
    elif device.type == "cpu":
        cores = os.cpu_count() or 1
        name = f"{cores} core{'s' if cores > 1 else ''}"
    else:
        return device.type
    # Only what a label may hold, and room for the brackets within its 64 characters.
    several = f"{count}x " if count > 1 else ""
    return f"{several}{device.type} ({re.sub(r'[^A-Za-z0-9 ._:/@+-]', ' ', name)[:48].strip()})"


class DeviceRoom:
    """Room on a device for the weights of one block at a time; the others wait in host memory."""

    def __init__(self, device: torch.device, block: Block | None = None) -> None:
        self.device, self.block = device, block

    def take(self, block: Block) -> None:
        """Bring a block to the device. The one that is there leaves first: never two at once."""
        if self.block is not block:
            self.leave()
            block.to(self.device)
            self.block = block

    def leave(self) -> None:
        if self.block is not None:
            self.block.to(HOST)
        self.block = None

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Let other blocks use the device inside the `with`; restores the current block afterwards."""
        before = self.block
        try:
            yield
        finally:
            self.leave() if before is None else self.take(before)
