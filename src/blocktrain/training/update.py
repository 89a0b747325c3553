"""A worker's change to a block as an update: delta, error feedback, frame; and what was not sent.

Pure: tensors in, numpy and bytes out; knows nothing of rounds, files, sockets or the clock. Signs follow
protocol.md: a delta is what to *subtract* from the base, `delta = theta_base - theta_local`.

The one rule everything here keeps: progress is either in the snapshot, in the local weights, or in the
error feedback, and never in two of them. What a frame leaves out stays in the feedback; a frame that
does not count returns to it whole; a new snapshot moves the local weights by what others added.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from blocktrain.codec_spec import CodecSpec
from blocktrain.wire.codec import Schema, Tensors, decode, encode

Weights = dict[str, NDArray[np.float32]]
"""Tensors by name; every value an array, also the scalars (numpy's arithmetic turns those into numbers)."""


@dataclass(frozen=True)
class EncodedUpdate:
    payload: bytes
    feedback: Weights | None
    """What the payload leaves out; None when it leaves out nothing."""


def difference(left: Tensors, right: Tensors) -> Weights:
    return {name: np.asarray(left[name] - right[name]) for name in left}


def encode_update(
    codec: CodecSpec,
    schema: Schema,
    *,
    base: Tensors,
    origin: Tensors,
    local: Tensors,
    feedback: Tensors | None,
    beta: float,
) -> EncodedUpdate:
    """The frame of the progress from `origin` to `local`, plus what earlier frames left out.

    `origin` is where this update's progress starts: the base snapshot, or the worker's own weights at
    its previous update while that one was still on its way.
    """
    if codec.sends_weights:
        return EncodedUpdate(encode(codec, schema, _dense_weights(base, origin, local, feedback, beta)), None)
    # Error feedback: what compression left out of the last frame goes into this one, at beta. `sparse:64`
    # sends one value in 64: in one shot its error is 0.94 of the update, which must not be lost.
    wanted = difference(origin, local)
    if feedback is not None:
        wanted = _sum(wanted, {name: np.float32(beta) * value for name, value in feedback.items()})
    payload = encode(codec, schema, wanted)
    return EncodedUpdate(payload, difference(wanted, decode(codec, schema, payload)))


def _dense_weights(
    base: Tensors, origin: Tensors, local: Tensors, feedback: Tensors | None, beta: float
) -> Tensors:
    """Where the uncompressed update wants the weights: `local`, bit for bit, if nothing else is pending."""
    # base - (base - local) is not local in floating point; a swarm of one must equal the local loop.
    if feedback is None and is_same(origin, base):
        return local
    wanted: Weights = {}
    for name, start in origin.items():
        delta = start.astype(np.float64) - local[name]
        if feedback is not None:
            delta = delta + beta * feedback[name].astype(np.float64)
        wanted[name] = np.asarray(base[name] - delta, dtype=np.float32)
    return wanted


def decoded_delta(codec: CodecSpec, schema: Schema, payload: bytes, base: Tensors) -> Weights:
    """The delta a receiver reads out of a frame."""
    return delta_of(codec, decode(codec, schema, payload), base)


def delta_of(codec: CodecSpec, decoded: Tensors, base: Tensors) -> Weights:
    """The delta of a decoded update: itself, or the way from `base` to the weights the codec sends."""
    return difference(base, decoded) if codec.sends_weights else dict(decoded)


def fold_back(feedback: Tensors | None, delta: Tensors, share: float = 1.0) -> Weights:
    """Error feedback after an update of which `share` did not count: 1 if refused, 0 if merged in full."""
    returned = {name: np.asarray(np.float32(share) * value) for name, value in delta.items()}
    return returned if feedback is None else _sum(returned, feedback)


def _sum(left: Tensors, right: Tensors) -> Weights:
    return {name: np.asarray(left[name] + right[name]) for name in left}


def is_same(left: Tensors, right: Tensors) -> bool:
    return left is right or all(np.array_equal(left[name], right[name]) for name in left)


def is_finite(weights: Tensors) -> bool:
    return all(bool(np.isfinite(value).all()) for value in weights.values())


def moved(weights: Tensors, shift: Tensors) -> Weights:
    return {
        name: np.asarray(value + shift[name]) if shift[name].any() else value
        for name, value in weights.items()
    }
