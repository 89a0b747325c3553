"""torch.optim.Muon with the matrices of one shape orthogonalised together.

Muon instead of AdamW on the layers' matrices took a 12-layer model from 1.142 to 0.997 nats per byte in 1000
steps, more than any change of the objective did. The library's step runs five Newton-Schulz iterations matrix
by matrix: some 25 small kernels each, so that a small model spends most of a step launching them. Stacking
matrices of equal shape gives the same update (a test holds it beside torch.optim.Muon) in a handful of
launches. State and options are the parent's.

Ranks that train together each orthogonalise some of the matrices. Where they hold parts of a block, momentum
stays in parts, and the matrices of one stack are made whole and split again (docs/decisions/0022).
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from blocktrain.training.ranks import ALONE, Ranks, joined, local, split


def orthogonalised(
    stack_NRC: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> Tensor:
    """Newton-Schulz iteration towards the nearest orthogonal matrix, for a stack of matrices, in bf16."""
    a, b, c = coefficients
    x = stack_NRC.bfloat16()
    tall = x.shape[1] > x.shape[2]
    # The gram matrix then has the shorter side, and the norm bounds the singular values by 1.
    x = x.mT if tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=eps)
    # A processor without bf16 instructions (AVX2 and less) multiplies in bf16 at a ninetieth of the speed of
    # fp32: 0.9 against 79 GFLOP/s on one core. So on any CPU the products are made in fp32, and rounded to
    # bf16 where products in bf16 are: machines with and without such instructions then train alike.
    in_fp32 = x.device.type == "cpu"

    def rounded(product: Tensor) -> Tensor:
        return product.bfloat16().float() if in_fp32 else product

    x = x.float() if in_fp32 else x
    for _ in range(steps):
        gram = rounded(x @ x.mT)
        polynomial = rounded(torch.baddbmm(gram, gram, gram, beta=b, alpha=c))
        x = rounded(torch.baddbmm(x, polynomial, x, beta=a))
    x = x.bfloat16()
    return x.mT if tall else x


STACK_VALUES = 1 << 26
"""Matrix values orthogonalised at once: a stack of all matrices of a block of a billion parameters would take
as much memory again as their momentum, and from 64 million on nothing is gained by more."""


class BatchedMuon(torch.optim.Muon):
    def __init__(
        self,
        *arguments: Any,
        buffer_dtype: torch.dtype = torch.float32,
        ranks: Ranks = ALONE,
        **settings: Any,
    ) -> None:
        super().__init__(*arguments, **settings)
        self.buffer_dtype, self.ranks = buffer_dtype, ranks

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            shapes: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    shapes[parameter.shape].append(parameter)
            for shape, parameters in shapes.items():
                at_once = max(1, STACK_VALUES // shape.numel())
                for start in range(0, len(parameters), at_once):
                    self._step_shape(parameters[start : start + at_once], group)

    def _step_shape(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
        buffers = [local(self._buffer(parameter)) for parameter in parameters]
        # Nesterov momentum, as the library's default. It moves in fp32, however it is kept.
        wide = [buffer.to(gradients[0].dtype) for buffer in buffers]
        torch._foreach_lerp_(wide, gradients, 1 - group["momentum"])
        updates = torch._foreach_lerp(gradients, wide, group["momentum"])
        if wide[0] is not buffers[0]:
            torch._foreach_copy_(buffers, wide)
        stack = torch.stack(list(map(joined, updates, parameters)))
        stack = self._by_all_ranks(stack, group["ns_coefficients"], group["ns_steps"], group["eps"])
        rows, columns = parameters[0].shape
        # `match_rms_adamw`: updates as large as AdamW's, so that one learning rate serves both optimizers.
        adjusted = group["lr"] * 0.2 * math.sqrt(max(rows, columns))
        changes = map(local, map(split, stack.to(parameters[0].dtype).unbind(), parameters))
        values = list(map(local, parameters))
        torch._foreach_mul_(values, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(values, list(changes), alpha=-adjusted)

    def _by_all_ranks(self, stack_NRC: Tensor, *settings: Any) -> Tensor:
        """`orthogonalised`, each rank some of the matrices: the iterations cost 5 * width / tokens of the
        step's other products, and that share would grow with the ranks, each of which has fewer tokens."""
        if self.ranks.alone:
            return orthogonalised(stack_NRC, *settings)
        count = -(-len(stack_NRC) // self.ranks.size)
        own = stack_NRC[count * self.ranks.rank :][:count]
        done = stack_NRC.new_zeros(count, *stack_NRC.shape[1:], dtype=torch.bfloat16)
        if len(own):
            done[: len(own)] = orthogonalised(own, *settings)
        found = done.new_empty(count * self.ranks.size, *done.shape[1:])
        dist.all_gather(list(found.chunk(self.ranks.size)), done)
        return found[: len(stack_NRC)]

    def _buffer(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter, dtype=self.buffer_dtype)
        # A state that was loaded has the parameter's type.
        state["momentum_buffer"] = state["momentum_buffer"].to(self.buffer_dtype)
        buffer: Tensor = state["momentum_buffer"]
        return buffer
