"""The merge: one snapshot and some updates give the next snapshot, the same bytes on every CPU.

    sparse, sign, bits   new = base - alpha * mean_i(weight_i * scale_i * update_i)     fp32
    dense                the same with update_i = base_i - local_i                      fp64, rounded once

The mean is 1/R over R updates, whatever their weights, added in the order given (sorted update ids).
Only element-wise additions and multiplications are used: their result does not depend on the machine,
the number of threads or how the work is cut. Knows nothing of rounds, workers, files or the clock.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from blocktrain.training.snapshot import Tensors
from blocktrain.wire.codec import CodecSpec

if TYPE_CHECKING:
    from blocktrain.wire.messages import MergeRecord

RUNNING_MEDIAN_FACTOR = 3.0
"""An update is clipped to at most this many running medians."""
MERGE_SPAN_VALUES = 1 << 17
"""Values merged at once; four inputs of this size stay in a core's cache."""
NORM_LANES = 1 << 16
"""Partial sums of squares that are kept side by side, and added up by halving."""


@dataclass(frozen=True, kw_only=True)
class MergeInput:
    """One decoded update. For `dense` the tensors are the worker's weights."""

    update_id: str
    weight: float
    """Age weight; 1 for an update on the merge's own base."""
    scale: float
    """Factor that clips its norm, from `clip_scales`."""
    tensors: Tensors
    base: Tensors | None = None
    """Snapshot a late `dense` update was made from; None where it is the merge's own base."""


def clip_scales(codec: CodecSpec, norms: Sequence[float], running_median: float | None) -> list[float]:
    """Factors that clip each norm to min(median of these, 3 x running median)."""
    # One worker whose weights travel is the local loop, bit for bit: nothing to clip against.
    if codec.sends_weights and len(norms) == 1:
        return [1.0]
    # The median cannot be moved by fewer than half of the workers; the running one bounds a round of liars.
    limit = statistics.median(norms)
    if running_median is not None:
        limit = min(limit, RUNNING_MEDIAN_FACTOR * running_median)
    return [1.0 if norm <= limit else limit / norm for norm in norms]


def merge_updates(
    codec: CodecSpec,
    base: Tensors,
    inputs: Sequence[MergeInput],
    alpha: float,
    executor: Executor | None = None,
    out: dict[str, NDArray[np.float32]] | None = None,
) -> dict[str, NDArray[np.float32]]:
    """The next snapshot, written into `out` where given; `inputs` sorted by update id and not empty."""
    assert inputs, "a merge needs an update"
    assert [one.update_id for one in inputs] == sorted(one.update_id for one in inputs)
    result = out or {name: np.empty(tensor.shape, np.float32) for name, tensor in sorted(base.items())}
    merge_span = _merge_weights if codec.sends_weights else _merge_deltas
    # 1/R whatever the weights: a late update at weight 0.5 moves the block half as far, and does not make the
    # others count for more.
    coefficients = [one.weight * one.scale / len(inputs) for one in inputs]

    def work(piece: tuple[str, slice]) -> None:
        """The same span of one tensor in the base, in every input, and in the result."""
        name, span = piece
        parts = [one.tensors[name].reshape(-1)[span] for one in inputs]
        bases = [None if one.base is None else one.base[name].reshape(-1)[span] for one in inputs]
        merge_span(
            base[name].reshape(-1)[span], parts, bases, coefficients, alpha, result[name].reshape(-1)[span]
        )

    pieces = (
        (name, slice(start, start + MERGE_SPAN_VALUES))
        for name in sorted(base)
        for start in range(0, max(1, base[name].size), MERGE_SPAN_VALUES)
    )
    for _ in (map if executor is None else executor.map)(work, pieces):
        pass
    return result


def replay_merge(
    record: MergeRecord,
    base: Tensors,
    decoded: Mapping[str, Tensors],
    bases: Mapping[str, Tensors] | None = None,
    executor: Executor | None = None,
    out: dict[str, NDArray[np.float32]] | None = None,
) -> dict[str, NDArray[np.float32]]:
    """The result of a merge that was recorded; the caller compares its hash with `record.result_hash`.

    `decoded` maps payload hash to decoded update. `bases` maps snapshot hash to snapshot, and is needed
    only for late `dense` updates: a KeyError says which snapshot is missing.
    """
    codec = CodecSpec.parse(record.codec)
    inputs = []
    for one in record.inputs:
        late = codec.sends_weights and one.base_hash != record.base_hash
        inputs.append(
            MergeInput(
                update_id=one.update_id,
                weight=one.weight,
                scale=one.scale,
                tensors=decoded[one.payload_hash],
                base=(bases or {})[one.base_hash] if late else None,
            )
        )
    return merge_updates(codec, base, inputs, record.alpha, executor, out)


def update_norm(codec: CodecSpec, tensors: Tensors, base: Tensors) -> float:
    """L2 norm of a decoded update, equal on every machine; `base` is what a `dense` one is measured from."""
    lanes = np.zeros(NORM_LANES, np.float64)
    for name in sorted(tensors):
        flat = tensors[name].reshape(-1)
        reference = base[name].reshape(-1) if codec.sends_weights else None
        for start in range(0, flat.size, NORM_LANES):
            part = flat[start : start + NORM_LANES].astype(np.float64)
            if reference is not None:
                part -= reference[start : start + NORM_LANES]
            lanes[: part.size] += part * part
    # By halving, an order that no vector width can change; numpy's own sum may differ between machines, and a
    # norm is written to the ledger.
    while lanes.size > 1:
        lanes = lanes[: lanes.size // 2] + lanes[lanes.size // 2 :]
    return float(np.sqrt(lanes[0]))


Span = NDArray[np.float32]


def _merge_deltas(
    base: Span,
    deltas: Sequence[Span],
    _: Sequence[Span | None],
    coefficients: Sequence[float],
    alpha: float,
    out: Span,
) -> None:
    mean = np.float32(coefficients[0]) * deltas[0]
    for coefficient, delta in zip(coefficients[1:], deltas[1:], strict=True):
        mean += np.float32(coefficient) * delta
    np.subtract(base, np.float32(alpha) * mean, out=out)


def _merge_weights(
    base: Span,
    locals_: Sequence[Span],
    bases: Sequence[Span | None],
    coefficients: Sequence[float],
    alpha: float,
    out: Span,
) -> None:
    """base - alpha * sum c (base - local), written as (1 - alpha sum c) base + alpha sum c local.

    Written so, one worker at alpha 1 gives back its weights bit for bit: base - (base - local) would not,
    where local is 2^29 times smaller than base.
    """
    total: NDArray[np.float64] | None = None
    share = 0.0
    for coefficient, local, own_base in zip(coefficients, locals_, bases, strict=True):
        step = alpha * coefficient * local.astype(np.float64)
        if own_base is None:
            share += alpha * coefficient
        else:
            # A late update: its delta is measured from the snapshot it was made from.
            step -= alpha * coefficient * own_base.astype(np.float64)
        total = step if total is None else total + step
    assert total is not None
    if share != 1.0:
        total = (1.0 - share) * base.astype(np.float64) + total
    out[...] = total
