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


class Seat:
    """Room on a device for the weights of one block at a time; the others wait in host memory."""

    def __init__(self, device: torch.device, occupant: Block | None = None) -> None:
        self.device, self.occupant = device, occupant

    def take(self, block: Block) -> None:
        """Whoever is there leaves first: two blocks are never on the device together."""
        if self.occupant is not block:
            self.leave()
            block.to(self.device)
            self.occupant = block

    def leave(self) -> None:
        if self.occupant is not None:
            self.occupant.to(HOST)
        self.occupant = None

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Others may take the seat meanwhile; afterwards whoever has it now, or nobody, is back."""
        owner = self.occupant
        try:
            yield
        finally:
            self.leave() if owner is None else self.take(owner)
