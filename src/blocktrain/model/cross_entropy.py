"""Cross entropy over a large vocabulary without ever holding a batch's logits.

A step of 16,384 tokens over 32,768 has 2 GB of logits in fp32, and as much again for their gradients. Here
some rows at a time are multiplied with the output map, and their gradients are taken at once, so that what
stays until the backward pass is as large as the features and the map. Shapes: N positions, V vocabulary, D
width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK_VALUES = 1 << 26
"""Logits at once, 256 MB in fp32; one step of a byte recipe (8 million) fits and takes the plain path."""
FEWEST_ROWS = 1024
"""With fewer rows a GPU's matrix units wait for memory, however large the vocabulary."""


def rows_at_once(vocabulary: int) -> int:
    return max(FEWEST_ROWS, CHUNK_VALUES // vocabulary)


def chunked_cross_entropy(
    z_ND: Tensor, map_VD: Tensor, targets_N: Tensor, weight_N: Tensor, *, compiled: bool = False
) -> tuple[Tensor, Tensor]:
    """The weighted sum of the rows' cross entropies, and the rows', without gradients."""
    total, ce_N = _Chunked.apply(z_ND, map_VD, targets_N, weight_N, compiled)  # type: ignore[no-untyped-call]
    return total, ce_N


# A function of its own, because autograd keeps what each chunk's backward pass needs, its logits among it,
# and in the end holds them all. The loss is one number, so its gradients are known here already, but for the
# factor that arrives in `backward`.
class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, z_ND: Tensor, map_VD: Tensor, targets_N: Tensor, weight_N: Tensor, compiled: bool
    ) -> tuple[Tensor, Tensor]:
        row_losses = compiled_rows() if compiled else _row_losses
        # The map in the features' dtype once, and not again in each chunk.
        rows, narrow_VD = rows_at_once(len(map_VD)), map_VD.to(z_ND.dtype)
        need_z, need_map = ctx.needs_input_grad[:2]
        grad_z_ND = torch.empty_like(z_ND) if need_z else None
        # In fp32 over the chunks, each of which the matrix units add up in fp32 themselves.
        grad_map_VD = torch.zeros_like(map_VD) if need_map else None
        ce_N = torch.empty(len(z_ND), dtype=torch.float32, device=z_ND.device)
        # The dtypes are chosen above; autocast would choose again, for the gradients' products too.
        with torch.autocast(z_ND.device.type, enabled=False):
            for start in range(0, len(z_ND), rows):
                part = slice(start, start + rows)
                logits = F.linear(z_ND[part], narrow_VD)
                ce_N[part], grad_logits = row_losses(logits, targets_N[part], weight_N[part])
                if grad_z_ND is not None:
                    torch.mm(grad_logits, narrow_VD, out=grad_z_ND[part])
                if grad_map_VD is not None:
                    grad_map_VD += grad_logits.T @ z_ND[part]
        ctx.save_for_backward(grad_z_ND, grad_map_VD)
        # For reports. A gradient through it would need the logits again.
        ctx.mark_non_differentiable(ce_N)
        return (ce_N * weight_N).sum(), ce_N

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        parts = (None if part is None else part * grad.to(part.dtype) for part in ctx.saved_tensors)
        return (*parts, None, None, None)


def _row_losses(logits_CV: Tensor, targets_C: Tensor, weight_C: Tensor) -> tuple[Tensor, Tensor]:
    """Cross entropy of each row, and the gradient of their weighted sum by the logits."""
    # In fp32: in bf16 logits of 12 come in steps of 1/16, too coarse for a loss of 1 nat.
    log_probs_CV = F.log_softmax(logits_CV.float(), dim=-1)
    ce_C = -log_probs_CV.gather(1, targets_C[:, None])[:, 0]
    # A comparison and not a scatter: torch.compile fuses it into the pass that reads the logits.
    is_target_CV = torch.arange(logits_CV.shape[1], device=logits_CV.device) == targets_C[:, None]
    grad_CV = (log_probs_CV.exp() - is_target_CV.float()) * weight_C[:, None]
    return ce_C, grad_CV.to(logits_CV.dtype)


@cache
def compiled_rows() -> Callable[..., tuple[Tensor, Tensor]]:
    # Two passes over the logits and not eight; the products stay the library's.
    return torch.compile(_row_losses, dynamic=False)
