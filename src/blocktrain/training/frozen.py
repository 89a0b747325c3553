"""What frozen blocks hand on to the block in training: computed for a window of steps at a time, one frozen
block on the device at once, and kept in host memory until the step that needs it.

A frozen block sees the tokens of a step's batch, without hints or gradients, in one pass of the same size
as the step's own, so that neither the window nor the memory it may take changes a result. Knows nothing of
optimizers, nor of where frozen weights come from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from blocktrain.model.block import Block
from blocktrain.model.composition import hand_on
from blocktrain.model.objective import Objective
from blocktrain.training.device import Seat, autocast


def handed_dtype(device: torch.device) -> torch.dtype:
    """As frozen outputs are kept: on CUDA in the precision that matrix products read them in anyway."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


@torch.no_grad()
def heard_by(
    objective: Objective, index: int, frozen: Sequence[Block], tokens_BT: Tensor, codebook_VD: Tensor
) -> Tensor | None:
    """What block `index` hears from `frozen`, the blocks of `objective.frozen(index)`, about these tokens.

    Nothing is kept. Blocks in host memory come to the device of the tokens one at a time.
    """
    seat, heard = Seat(tokens_BT.device), None
    with seat.lent():
        for number, block in zip(objective.frozen(index) if frozen else (), frozen, strict=True):
            if next(block.parameters()).device != seat.device:
                seat.take(block)
            heard = _handed(objective, number, block, tokens_BT, codebook_VD, heard)
    return heard


def _handed(
    objective: Objective,
    index: int,
    block: Block,
    tokens_BT: Tensor,
    codebook_VD: Tensor,
    heard: Tensor | None,
) -> Tensor:
    # Autocast keeps bf16 copies of weights until it ends, so it ends with each pass.
    with autocast(tokens_BT.device):
        handed = hand_on(objective, index, block, tokens_BT, codebook_VD, heard)
    return handed.to(handed_dtype(tokens_BT.device))


class FrozenOutputs:
    """What the frozen blocks of block `index` hand on, for a window of steps."""

    def __init__(
        self,
        objective: Objective,
        index: int,
        blocks: Sequence[Block],
        codebook_VD: Tensor,
        *,
        max_host_bytes: int,
    ) -> None:
        self.objective, self.codebook, self.max_host_bytes = objective, codebook_VD, max_host_bytes
        self.numbered = list(zip(objective.frozen(index) if blocks else (), blocks, strict=True))
        self._kept: dict[tuple[int, int], Tensor] = {}

    def __bool__(self) -> bool:
        return bool(self.numbered)

    @property
    def host_bytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in self._kept.values())

    def prepared(self, shard: int, step: int) -> bool:
        return (shard, step) in self._kept

    def heard(self, shard: int, step: int) -> Tensor:
        """On the device; the step must be prepared."""
        return self._kept[shard, step].to(self.codebook.device, non_blocking=True)

    @torch.no_grad()
    def prepare(self, seat: Seat, shard: int, steps: Sequence[int], tokens: Callable[[int], Tensor]) -> None:
        """Run the frozen blocks over the batches `tokens(step)`, as many steps as fit, one at least."""
        self._kept.clear()
        try:
            with seat.lent():
                for number, block in self.numbered:
                    seat.take(block)
                    steps = self._run(number, block, shard, steps, tokens)
        except BaseException:
            # What only some of the blocks have handed on must not pass for the whole.
            self._kept.clear()
            raise

    def _run(
        self, number: int, block: Block, shard: int, steps: Sequence[int], tokens: Callable[[int], Tensor]
    ) -> list[int]:
        """One frozen block over the steps that fit, which it returns."""
        done: list[int] = []
        for step in steps:
            if not self._fits(shard, step):
                break
            earlier = self.heard(shard, step) if self.prepared(shard, step) else None
            handed = _handed(self.objective, number, block, tokens(step), self.codebook, earlier)
            self._keep(shard, step, handed)
            done.append(step)
        return done

    def _fits(self, shard: int, step: int) -> bool:
        """One more of what is kept already; an objective hands on one shape throughout."""
        if not self._kept or self.prepared(shard, step):
            return True
        return self.host_bytes // len(self._kept) * (len(self._kept) + 1) <= self.max_host_bytes

    def _keep(self, shard: int, step: int, handed: Tensor) -> None:
        """Pinned where that makes copies asynchronous; both copies are in the device's own order."""
        if handed.device.type != "cuda":
            self._kept[shard, step] = handed
            return
        if not self.prepared(shard, step):
            self._kept[shard, step] = torch.empty(handed.shape, dtype=handed.dtype, pin_memory=True)
        self._kept[shard, step].copy_(handed, non_blocking=True)
