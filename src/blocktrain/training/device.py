"""A training device: its arithmetic, and the room it has for one block's weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from blocktrain.model.block import Block

HOST = torch.device("cpu")


def autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """bf16 matrix products on CUDA, plain fp32 elsewhere."""
    if device.type == "cuda":
        return torch.autocast("cuda", dtype=torch.bfloat16)
    return contextlib.nullcontext()


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
