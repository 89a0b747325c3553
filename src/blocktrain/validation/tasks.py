"""A judge's task as values: the block after the update, the evidence as a message and back.

Used by the coordinator's own judge and by `blocktrain judge` alike.
"""

from __future__ import annotations

import math
from dataclasses import asdict

import numpy as np
from numpy.typing import NDArray

from blocktrain.training.snapshot import Tensors
from blocktrain.training.update import delta_of
from blocktrain.validation.evidence import Evidence, Gain
from blocktrain.validation.scorer import Work
from blocktrain.wire.codec import CodecSpec
from blocktrain.wire.messages import EvidenceReport, GainReport, JudgeTask


def applied(
    codec: CodecSpec, base: Tensors, own_base: Tensors, decoded: Tensors, step: float
) -> dict[str, NDArray[np.float32]]:
    """The block after one update alone, measured from `own_base` and applied to `base`."""
    # In fp64, rounded once: how that differs from the fp32 sum of a merge is far below what a judge can see.
    delta = delta_of(codec, decoded, own_base)
    return {
        name: np.asarray(base[name] - step * delta[name].astype(np.float64), dtype=np.float32)
        for name in base
    }


def work_of(task: JudgeTask) -> Work:
    return Work(task.shard, task.first_step, task.steps)


def report_of(evidence: Evidence) -> EvidenceReport:
    return EvidenceReport(
        held_out=_report(evidence.held_out),
        assigned=_report(evidence.assigned),
        other=_report(evidence.other),
        tokens=evidence.tokens,
        own=None if evidence.own is None else _report(evidence.own),
        rest=None if evidence.rest is None else _report(evidence.rest),
    )


def _report(gain: Gain) -> GainReport:
    # JSON has no NaN: a block that was broken by the update is told as absent numbers.
    if not (math.isfinite(gain.mean) and math.isfinite(gain.error)):
        return GainReport(mean=None, error=None, windows=gain.windows)
    return GainReport(**asdict(gain))


def evidence_of(found: EvidenceReport) -> Evidence:
    return Evidence(
        _gain(found.held_out),
        _gain(found.assigned),
        _gain(found.other),
        found.tokens,
        None if found.own is None else _gain(found.own),
        None if found.rest is None else _gain(found.rest),
    )


def _gain(found: GainReport) -> Gain:
    if found.mean is None or found.error is None:
        return Gain(math.nan, math.nan, found.windows)
    return Gain(found.mean, found.error, found.windows)
