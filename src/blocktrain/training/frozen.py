"""Frozen blocks around a block in training, one of them on the device at once.

The features that it takes from blocks upstream are computed for a window of steps at once and kept in host
memory until the step that needs them. Where it is a part of a serial model, its loss runs through the parts
behind it: forward, and once more backward for the gradient of its own features.

A frozen block sees the tokens of a step's batch, without hints or gradients, in one pass of the same size
as the step's own, so that neither the window nor the memory it may take changes a result. Knows nothing of
optimizers, nor of where frozen weights come from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from blocktrain.model.adaptive import AdaptiveBlock
from blocktrain.model.block import Block, BlockOutput
from blocktrain.model.objective import Objective
from blocktrain.training.device import HOST, DeviceRoom, autocast


@torch.no_grad()
def upstream_features(frozen: Sequence[Block], tokens_BT: Tensor, codebook_VD: Tensor) -> Tensor | None:
    """What the last of `frozen` makes of these tokens, each block fed by the one before; None without blocks.

    Nothing is kept. Blocks in host memory come to the device of the tokens one at a time.
    """
    room, features = DeviceRoom(tokens_BT.device), None
    with room.lent():
        for block in frozen:
            _visit(room, block)
            features = _features(block, tokens_BT, codebook_VD, features)
    return features


def _visit(room: DeviceRoom, block: Block) -> None:
    if next(block.parameters()).device != room.device:
        room.take(block)


def gradient_behind(
    objective: Objective,
    behind: Sequence[Block],
    features_BTD: Tensor,
    tokens_BT: Tensor,
    targets_BT: Tensor,
    codebook_VD: Tensor,
    share: float,
) -> tuple[Tensor, Tensor]:
    """The cross entropy of a serial model that goes on from these features with the parts `behind`, and the
    gradient of `share` times its loss by the features.

    Kept between forward and backward are the inputs of the parts alone: each runs again for its gradients,
    so that its weights and activations are on the device only while it is its turn.
    """
    *inner, last = behind
    inputs, room = [features_BTD.detach()], DeviceRoom(tokens_BT.device)
    with room.lent():
        for part in inner:
            _visit(room, part)
            with torch.no_grad(), autocast(room.device):
                inputs.append(part(tokens_BT, codebook_VD, upstream_BTD=inputs[-1]).features_BTD)
        _visit(room, last)
        x_BTD = inputs.pop().requires_grad_()
        with autocast(room.device):
            loss = objective.loss(last, tokens_BT, targets_BT, codebook_VD, upstream_BTD=x_BTD)
        # By the features and by nothing else: no weight of a frozen part gets a gradient.
        (gradient_BTD,) = torch.autograd.grad(share * loss.total, x_BTD)
        while inputs:
            part, x_BTD = inner[len(inputs) - 1], inputs.pop().requires_grad_()
            _visit(room, part)
            with autocast(room.device):
                y_BTD = part(tokens_BT, codebook_VD, upstream_BTD=x_BTD).features_BTD
            (gradient_BTD,) = torch.autograd.grad(y_BTD, x_BTD, gradient_BTD)
    return loss.ce, gradient_BTD


@torch.no_grad()
def logits_behind(
    behind: Sequence[Block], output: BlockOutput, tokens_BT: Tensor, codebook_VD: Tensor
) -> Tensor:
    """The logits of a block's output, or those of the last part behind it where there are any."""
    room = DeviceRoom(tokens_BT.device)
    with room.lent():
        for part in behind:
            _visit(room, part)
            output = part(tokens_BT, codebook_VD, upstream_BTD=output.features_BTD)
        return output.logits_BTV


def for_host_memory(block: Block, device: torch.device) -> Block:
    """A frozen block that waits in host memory for its turn on the device: of a plain causal model in bf16
    where the device computes in bf16 anyway, which halves memory and transfers."""
    block = block.to(HOST).eval()
    if device.type == "cuda" and not isinstance(block, AdaptiveBlock):
        # Parameters only: rotary tables in bf16 would keep two digits of a position.
        for parameter in block.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
    return block


def _features(block: Block, tokens_BT: Tensor, codebook_VD: Tensor, upstream_BTD: Tensor | None) -> Tensor:
    # Autocast keeps bf16 copies of weights until it ends, so it ends with each pass.
    with autocast(tokens_BT.device):
        features: Tensor = block(tokens_BT, codebook_VD, upstream_BTD=upstream_BTD).features_BTD
    # On CUDA in bf16, in which the next block's matrix products read them anyway: half the bytes.
    return features.to(torch.bfloat16 if tokens_BT.device.type == "cuda" else torch.float32)


class FrozenOutputs:
    """The features of the last of some frozen blocks, for a window of steps."""

    def __init__(self, blocks: Sequence[Block], codebook_VD: Tensor, *, max_host_bytes: int) -> None:
        self.blocks, self.codebook, self.max_host_bytes = list(blocks), codebook_VD, max_host_bytes
        self._kept: dict[tuple[int, int], Tensor] = {}

    def __bool__(self) -> bool:
        return bool(self.blocks)

    @property
    def host_bytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in self._kept.values())

    def prepared(self, shard: int, step: int) -> bool:
        return (shard, step) in self._kept

    def features(self, shard: int, step: int) -> Tensor:
        """On the device; the step must be prepared."""
        return self._kept[shard, step].to(self.codebook.device, non_blocking=True)

    @torch.no_grad()
    def prepare(
        self, room: DeviceRoom, shard: int, steps: Sequence[int], tokens: Callable[[int], Tensor]
    ) -> None:
        """Run the frozen blocks over the batches `tokens(step)`, as many steps as fit, one at least."""
        self._kept.clear()
        try:
            with room.lent():
                # Blocks outside, steps inside: each block's weights travel to the device once for the window.
                for block in self.blocks:
                    room.take(block)
                    steps = self._run(block, shard, steps, tokens)
        except BaseException:
            # The features of some of the blocks must not pass for those of the last.
            self._kept.clear()
            raise

    def _run(
        self, block: Block, shard: int, steps: Sequence[int], tokens: Callable[[int], Tensor]
    ) -> list[int]:
        """One frozen block over the steps that fit, which it returns."""
        done: list[int] = []
        for step in steps:
            earlier = self.features(shard, step) if self.prepared(shard, step) else None
            # The first block decides how many steps fit: all features have one shape, and the later blocks
            # write theirs over those of the block before.
            if earlier is None and self._kept:
                one = self.host_bytes // len(self._kept)
                if one * (len(self._kept) + 1) > self.max_host_bytes:
                    break
            features = _features(block, tokens(step), self.codebook, earlier)
            if features.device.type == "cuda":
                # Pinned memory makes the copies asynchronous; both ways they run in the device's own order.
                if earlier is None:
                    self._kept[shard, step] = torch.empty(
                        features.shape, dtype=features.dtype, pin_memory=True
                    )
                self._kept[shard, step].copy_(features, non_blocking=True)
            else:
                self._kept[shard, step] = features
            done.append(step)
        return done
