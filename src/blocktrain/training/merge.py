"""The merge: one snapshot and some updates give the next snapshot, the same bytes on every CPU.

    sparse, sign, bits   new = base - alpha * mean_i(weight_i * scale_i * update_i)     fp32
    dense                the same with update_i = base_i - local_i                      fp64, rounded once

The mean is 1/R over R updates, whatever their weights, added in the order given (sorted update ids).
Only element-wise additions and multiplications are used: their result does not depend on the machine,
the number of threads or how the work is cut. So it is cut into bands: a block of a billion parameters is
merged, hashed and written in the memory of a few bands. Knows nothing of rounds, workers, files or the clock.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from blocktrain.codec_spec import CodecSpec
from blocktrain.wire.codec import Schema, Values

if TYPE_CHECKING:
    from blocktrain.wire.messages import MergeRecord

RUNNING_MEDIAN_FACTOR = 3.0
"""An update is clipped to at most this many running medians."""
BANDS_AHEAD = 4
"""Bands that threads have merged, or are at, while the caller hashes and writes an earlier one."""
NORM_LANES = 1 << 16
"""Partial sums of squares that are kept side by side, and added up by halving."""

Span = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class MergeInput:
    """One update. For `dense` its values are the worker's weights."""

    update_id: str
    weight: float
    """Age weight; 1 for an update on the merge's own base."""
    scale: float
    """Factor that clips its norm, from `clip_scales`."""
    values: Values
    base: Values | None = None
    """Snapshot a late `dense` update was made from; None where it is the merge's own base."""


@dataclass(frozen=True)
class MergedBand:
    """The same band of one tensor in the base and in the result."""

    name: str
    band: slice
    base: Span
    values: Span


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


def merged_bands(
    codec: CodecSpec,
    schema: Schema,
    base: Values,
    inputs: Sequence[MergeInput],
    alpha: float,
    executor: Executor | None = None,
) -> Iterator[MergedBand]:
    """The next snapshot, band by band in order; `inputs` sorted by update id and not empty."""
    assert inputs, "a merge needs an update"
    assert [one.update_id for one in inputs] == sorted(one.update_id for one in inputs)
    merge = _merge_weights if codec.sends_weights else _merge_deltas
    # 1/R whatever the weights: a late update at weight 0.5 moves the block half as far, and does not make the
    # others count for more.
    coefficients = [one.weight * one.scale / len(inputs) for one in inputs]

    def work(name: str, band: slice) -> MergedBand:
        before = base(name, band)
        return MergedBand(name, band, before, merge(name, band, before, inputs, coefficients, alpha))

    if executor is None:
        yield from (work(*piece) for piece in schema.bands())
        return
    # A few at a time: threads that run ahead of a slow disk would fill the memory with what they merged.
    pending: deque[Future[MergedBand]] = deque()
    try:
        for piece in schema.bands():
            pending.append(executor.submit(work, *piece))
            if len(pending) > BANDS_AHEAD:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        for future in pending:
            future.cancel()


def assembled(schema: Schema, bands: Iterator[MergedBand]) -> dict[str, NDArray[np.float32]]:
    result = {name: np.empty(shape, np.float32) for name, shape in schema.tensors}
    for one in bands:
        result[one.name].reshape(-1)[one.band] = one.values
    return result


def replay_merge(
    record: MergeRecord,
    schema: Schema,
    base: Values,
    updates: Mapping[str, Values],
    bases: Mapping[str, Values] | None = None,
    executor: Executor | None = None,
) -> Iterator[MergedBand]:
    """The result of a merge that was recorded; the caller compares its hash with `record.result_hash`.

    `updates` maps payload hash to update. `bases` maps snapshot hash to snapshot, and is needed only for late
    `dense` updates: a KeyError says which snapshot is missing.
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
                values=updates[one.payload_hash],
                base=(bases or {})[one.base_hash] if late else None,
            )
        )
    return merged_bands(codec, schema, base, inputs, record.alpha, executor)


def update_norm(schema: Schema, values: Values, base: Values | None) -> float:
    """L2 norm of an update, equal on every machine; `base` is what a `dense` one is measured from."""
    lanes = np.zeros(NORM_LANES, np.float64)
    for name, band in schema.bands():
        flat = values(name, band)
        reference = None if base is None else base(name, band)
        # A value's lane follows from its place in the tensor, however the tensor is cut into bands.
        start, lane = 0, band.start % NORM_LANES
        while start < flat.size:
            part = flat[start : start + NORM_LANES - lane].astype(np.float64)
            if reference is not None:
                part -= reference[start : start + part.size]
            lanes[lane : lane + part.size] += part * part
            start, lane = start + part.size, 0
    # By halving, an order that no vector width can change; numpy's own sum may differ between machines, and a
    # norm is written to the ledger.
    while lanes.size > 1:
        lanes = lanes[: lanes.size // 2] + lanes[lanes.size // 2 :]
    return float(np.sqrt(lanes[0]))


def _merge_deltas(
    name: str,
    band: slice,
    base: Span,
    inputs: Sequence[MergeInput],
    coefficients: Sequence[float],
    alpha: float,
) -> Span:
    # One update at a time: what is in memory does not grow with their number.
    mean: Span = np.float32(coefficients[0]) * inputs[0].values(name, band)
    for coefficient, one in zip(coefficients[1:], inputs[1:], strict=True):
        mean += np.float32(coefficient) * one.values(name, band)
    mean *= np.float32(alpha)
    np.subtract(base, mean, out=mean)
    return mean


def _merge_weights(
    name: str,
    band: slice,
    base: Span,
    inputs: Sequence[MergeInput],
    coefficients: Sequence[float],
    alpha: float,
) -> Span:
    """base - alpha * sum c (base - local), written as (1 - alpha sum c) base + alpha sum c local.

    Written so, one worker at alpha 1 gives back its weights bit for bit: base - (base - local) would not,
    where local is 2^29 times smaller than base.
    """
    total: NDArray[np.float64] | None = None
    share = 0.0
    for coefficient, one in zip(coefficients, inputs, strict=True):
        step = alpha * coefficient * one.values(name, band).astype(np.float64)
        if one.base is None:
            share += alpha * coefficient
        else:
            # A late update: its delta is measured from the snapshot it was made from.
            step -= alpha * coefficient * one.base(name, band).astype(np.float64)
        total = step if total is None else total + step
    assert total is not None
    if share != 1.0:
        total = (1.0 - share) * base.astype(np.float64) + total
    return total.astype(np.float32)
