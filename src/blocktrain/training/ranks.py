"""Several processes that train one block together, as `torchrun` starts them: one worker, many devices.

Where the block fits each device, every rank has a copy of it, takes its share of the batch's sequences, and
the gradients are added up. Where it does not fit, FSDP2 leaves each rank a part of every tensor. A batch is
the same function of (seed, shard, step) for any number of ranks; rank 0 draws it and sends it to the others.

Rank 0 leads: the others wait for its commands, JSON and tensors of known shape; nothing is unpickled. A rank
that is gone closes its connections, so that those who wait for it fail at once; one that hangs is given up
after `STEP_SECONDS`. Knows no rounds, snapshots or coordinator. `ALONE` is the one rank of a plain worker.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from blocktrain.config import Recipe
from blocktrain.data.batches import Batches
from blocktrain.errors import BlocktrainError, DeviceError, UserError
from blocktrain.training.device import HOST

# Importing these takes 0.8 s of processor time, which only sharded ranks spend.
if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

Arrays = Mapping[str, NDArray[np.float32]]
STEP_SECONDS = 300.0
"""How long ranks wait for one another within a step; the first one may compile for minutes."""
BUCKET_VALUES = 1 << 24
"""Gradient values added up at once: 64 MB more memory, and no message for each small tensor."""


class RankError(BlocktrainError):
    """Another rank is gone or does not answer. Nothing is wrong here: torchrun starts all ranks again."""


@dataclass(frozen=True)
class Ranks:
    rank: int = 0
    size: int = 1
    device: torch.device = HOST
    sharded: bool = False
    """Each rank holds a part of every tensor of the block, and not all of it."""
    commands: dist.ProcessGroup | None = None

    @classmethod
    def meet(cls, device: torch.device) -> Ranks:
        """Wait for the other processes that torchrun has started."""
        if device.type not in ("cpu", "cuda"):
            raise DeviceError(f"several ranks need --device cpu or cuda, found {device}")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        patience = timedelta(seconds=STEP_SECONDS)
        store, rank, size = next(rendezvous("env://", timeout=patience))
        # torchrun starts ranks again with the store that they had. Without a name of its own for each start,
        # a rank that is faster than the others found the address of a dead one there.
        store = PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=patience)
        # Rank 0 may wait for an assignment for days, and the others for it.
        commands = dist.new_group(backend="gloo", timeout=timedelta(days=365))
        return cls(dist.get_rank(), dist.get_world_size(), device, commands=commands)

    def part(self) -> None:
        if self.size > 1:
            dist.destroy_process_group()

    def sharing(self, sharded: bool) -> Ranks:
        return dataclasses.replace(self, sharded=sharded)

    @property
    def alone(self) -> bool:
        return self.size == 1

    @cached_property
    def _mesh(self) -> DeviceMesh:
        from torch.distributed.device_mesh import init_device_mesh

        return init_device_mesh(self.device.type, (self.size,))

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Around what needs the other ranks: their loss is a RankError."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if self.alone:
                raise
            # Gloo, NCCL and torch raise RuntimeError for a lost connection, in words of their own.
            reason = str(error).splitlines()[0][:200]
            raise RankError(
                f"rank {self.rank} of {self.size} cannot go on with the others ({reason}); with "
                "`torchrun --max-restarts` all start again"
            ) from error

    # --- commands and tensors from rank 0

    def tell(self, act: str, **values: Any) -> None:
        """Rank 0 says what all do next; the others have heard it already."""
        if self.size > 1 and self.rank == 0:
            data = torch.frombuffer(bytearray(json.dumps([act, values]).encode()), dtype=torch.uint8)
            self.spread(torch.tensor([len(data)]))
            self.spread(data)

    def hear(self) -> tuple[str, dict[str, Any]]:
        """The next command of rank 0."""
        length = self.spread(torch.zeros(1, dtype=torch.int64))
        data = self.spread(torch.zeros(int(length), dtype=torch.uint8))
        act, values = json.loads(data.numpy().tobytes())
        return act, values

    def spread(self, tensor: Tensor) -> Tensor:
        """Rank 0's values, on the host, in every rank's tensor."""
        if self.size > 1:
            dist.broadcast(tensor, 0, group=self.commands)
        return tensor

    def spread_arrays(
        self, module: nn.Module, tensors: Arrays | None
    ) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Each parameter with rank 0's values for it, whole: one tensor at a time, so that no rank holds a
        second copy of the block."""
        for name, parameter in module.named_parameters():
            if tensors is None:
                values = torch.empty(parameter.shape, dtype=torch.float32)
            else:
                values = torch.from_numpy(np.asarray(tensors[name], np.float32, order="C"))
            yield parameter, self.spread(values)

    @torch.no_grad()
    def load(self, module: nn.Module, tensors: Arrays | None) -> None:
        """Set every parameter to rank 0's values; None on the other ranks."""
        for parameter, values in self.spread_arrays(module, tensors):
            local(parameter).copy_(local(split(values, parameter)))

    @torch.no_grad()
    def move(self, module: nn.Module, shift: Arrays | None) -> None:
        """Add what a new snapshot brought, rank 0's values, to every parameter; None on the other ranks."""
        for parameter, values in self.spread_arrays(module, shift):
            # Skipped where zero: -0.0 + 0.0 is 0.0, and a swarm of one must equal the local loop bit for bit.
            if values.any():
                local(parameter).add_(local(split(values, parameter)).to(parameter.device))

    def gather(self, module: nn.Module) -> dict[str, NDArray[np.float32]]:
        """The whole parameters in order of name, on rank 0's host; the others get nothing. Of a sharded block
        one tensor at a time is whole on the devices."""
        parameters, found = dict(module.named_parameters()), {}
        for name in sorted(parameters):
            values = whole(parameters[name].detach())
            if self.rank == 0:
                found[name] = values.to("cpu", torch.float32, copy=True).numpy()
        return found

    # --- a step

    def share(self, count: int) -> slice:
        """This rank's sequences of a batch."""
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def shard(self, block: nn.Module) -> None:
        """Keep a part of every tensor of a block that is on the host, on this rank's device. The layers come
        one by one: the device never holds the block."""
        from torch.distributed.fsdp import fully_shard

        # It warns of outputs that are views, in case they are changed in place; ours are not.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)
        # FSDP2 splits rows and refuses a single number (the scale of the logits): each rank has all of it.
        numbers = {parameter for parameter in block.parameters() if parameter.ndim == 0}
        for parameter in numbers:
            parameter.data = parameter.data.to(self.device)
        layers = [layer for part in block.modules() if isinstance(part, nn.ModuleList) for layer in part]
        for module in (*layers, block):
            sharded = fully_shard(module, mesh=self._mesh, ignored_params=numbers)
            # Added up and not averaged, as every loss is already weighed by its share of the batch.
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Add up the gradients of the ranks, in place; those of sharded tensors are added up already."""
        bucket: list[Tensor] = []
        waiting = [one for one in parameters if not is_split(one)]
        for number, parameter in enumerate(waiting):
            if parameter.grad is None:  # no sequence of this rank's share needed it
                parameter.grad = torch.zeros_like(parameter)
            bucket.append(parameter.grad)
            if number + 1 == len(waiting) or sum(map(torch.numel, bucket)) >= BUCKET_VALUES:
                flat = torch.cat([gradient.flatten() for gradient in bucket])
                dist.all_reduce(flat)
                sizes = [gradient.numel() for gradient in bucket]
                for gradient, values in zip(bucket, torch.split(flat, sizes), strict=True):
                    gradient.copy_(values.view_as(gradient))
                bucket = []

    def trained(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """The parameters that have a gradient on some rank."""
        found = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.int32)
        dist.all_reduce(found, group=self.commands)
        return [parameter for parameter, count in zip(parameters, found.tolist(), strict=True) if count]

    def least(self, number: int) -> int:
        found = torch.tensor([number])
        dist.all_reduce(found, dist.ReduceOp.MIN, group=self.commands)
        return int(found)

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """Of all gradients of a sharded block."""
        squares = torch.zeros(2, device=self.device)
        for gradient in gradients:
            # A number is on every rank and counts once.
            squares[int(not is_split(gradient))] += local(gradient).square().sum()
        parts, numbers = squares[:1].contiguous(), squares[1]
        dist.all_reduce(parts)
        return (parts[0] + numbers).sqrt()


ALONE = Ranks()


def is_split(tensor: Tensor) -> TypeGuard[DTensor]:
    return hasattr(tensor, "placements")


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if is_split(tensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on every rank."""
    return tensor.full_tensor() if is_split(tensor) else tensor


def split(values: Tensor, like: Tensor) -> Tensor:
    """Whole values, which every rank has, split as `like` is."""
    if not is_split(like):
        return values
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(values.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def joined(part: Tensor, like: Tensor) -> Tensor:
    """Whole values from the parts that the ranks hold, split as `like` is."""
    if not is_split(like):
        return part
    from torch.distributed.tensor import DTensor

    mesh, placements = like.device_mesh, like.placements
    return DTensor.from_local(
        part, mesh, placements, run_check=False, shape=like.shape, stride=like.stride()
    ).full_tensor()


def check_share(recipe: Recipe, ranks: Ranks) -> None:
    """Refuse a batch that so many ranks cannot share."""
    batch = recipe.training.batch
    if batch < ranks.size:
        raise UserError(
            f"{ranks.size} ranks cannot share a batch of {batch} sequences; start at most {batch} "
            "(torchrun --nproc-per-node)"
        )
    # A pass through a sharded block needs all ranks: each must make as many.
    if ranks.sharded and batch % ranks.size:
        best = math.gcd(batch, ranks.size)
        raise UserError(
            f"ranks that share a block need the same number of sequences each: a batch of {batch} does not "
            f"divide by {ranks.size}; start {best if best > 1 else 'another number of'} ranks, or --shard no"
        )


class SpreadBatches:
    """Batches that rank 0 draws and every rank gets; None on the other ranks, which need no text."""

    def __init__(self, batches: Batches | None, recipe: Recipe, ranks: Ranks) -> None:
        self.batches, self.ranks = batches, ranks
        self.shape = recipe.training.batch, recipe.model.context + 1
        self._last: tuple[tuple[int, int, int | None], Tensor] | None = None

    def batch(self, shard: int, step: int, block: int | None = None) -> tuple[Tensor, Tensor]:
        # Kept, because a rank that ran out of memory asks again, and the others do not.
        if self._last is None or self._last[0] != (shard, step, block):
            windows = torch.empty(self.shape, dtype=torch.int32)
            if self.batches is not None:
                tokens, targets = self.batches.batch(shard, step, block)
                windows[:, :-1], windows[:, -1] = tokens, targets[:, -1]
            moved = self.ranks.spread(windows).to(self.ranks.device, non_blocking=True).long()
            self._last = (shard, step, block), moved
        windows = self._last[1]
        return windows[:, :-1], windows[:, 1:]
