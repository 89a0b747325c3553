"""The ends of many texts, as some blocks hold them in 8 bits for drafts, and the blocks' matrices for that.

What is computed with them stands in quick_kernel.py, which is compiled; this module has the arrays. Shapes as
in quick.py, plus L layers, S slots and E outputs of a matrix.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]

TAIL = 128
"""Positions of a text that a draft for many sees at most."""
ROWS, LANES, VECTORS = 8, 16, 2
"""Of a tile: rows of the input, and outputs, so many to a vector of 32-bit numbers. With one vector the
products of a step of three blocks of width 384 took 0.57 instead of 0.40 ms."""
OUTPUTS = LANES * VECTORS
ALIGNED = 64
MIDDLE = 128
"""What is added to the numbers of a matrix, which the instruction wants without a sign."""
INPUTS = 64
"""Positions whose inputs of the convolutions are held: as far as a wrong draft is cut back, and some."""
FIRST_SLOTS, FEW_SLOTS = 64, 8
"""Slots to begin with, which take memory when a text gets them; and so many used that nobody minds."""


class Packed(NamedTuple):
    """Matrices of one shape [..., E, D] as tiles of 8-bit numbers, a scale for each output."""

    tiles: NDArray[np.uint8]
    """[..., E / OUTPUTS, D / 4, OUTPUTS * 4], the numbers of four inputs side by side."""
    scale: Array


def packed(matrices: Array) -> Packed:
    """Outputs and inputs are filled up with zeros to whole tiles."""
    *before, outputs, inputs = matrices.shape
    matrices = np.pad(matrices, [(0, 0)] * len(before) + [(0, -outputs % OUTPUTS), (0, -inputs % 4)])
    scale = np.maximum(np.abs(matrices).max(axis=-1), 1e-12) / 127
    codes = np.round(matrices / scale[..., None]).astype(np.int16) + MIDDLE
    *_, outputs, inputs = matrices.shape
    tiles = codes.reshape(*before, outputs // OUTPUTS, OUTPUTS, inputs // 4, 4).swapaxes(-3, -2)
    raw = np.empty(tiles.size + ALIGNED, np.uint8)
    room = raw[-raw.ctypes.data % ALIGNED :][: tiles.size].reshape(*tiles.shape[:-2], OUTPUTS * 4)
    room[...] = tiles.reshape(room.shape)
    return Packed(room, scale.astype(np.float32))


class LayerArrays(NamedTuple):
    """What the layers of all blocks are, [N, L, ...] each; convolutions of no taps where there are none."""

    attention_gain: Array
    attention_shift: Array
    attention_taps: Array
    feedforward_gain: Array
    feedforward_shift: Array
    feedforward_taps: Array
    qkv: Packed
    out: Packed
    up: Packed
    down: Packed

    def of(self, blocks: slice) -> LayerArrays:
        """Those of some of the blocks."""
        found: list[Any] = [
            Packed(one.tiles[blocks], one.scale[blocks]) if isinstance(one, Packed) else one[blocks]
            for one in self
        ]
        return LayerArrays(*found)


class TailArrays(NamedTuple):
    """What is held of texts, a slot S for each."""

    keys_values: NDArray[np.int8]
    """[N, L, S, 2, H, TAIL, K], position p in place p % TAIL."""
    scales: Array
    """Of each of them [N, L, S, 2, H, TAIL]."""
    inputs: Array
    """Of the convolutions before attention and before feed-forward [N, L, 2, S, INPUTS, D]."""
    positions: NDArray[np.int64]
    """Which position of the text was last written to each place of each slot [S, TAIL]; -1 for none."""

    def of(self, blocks: slice) -> TailArrays:
        """Those of some of the blocks."""
        return TailArrays(self.keys_values[blocks], self.scales[blocks], self.inputs[blocks], self.positions)


class Tail:
    """What the blocks hold of the end of one text, in a slot of `Tails`."""

    def __init__(self, slot: int, length: int) -> None:
        self.slot = slot
        self.length = length
        """Of the text since where its positions begin, of which it is the end."""

    def truncate(self, length: int) -> None:
        self.length = min(self.length, length)


class Tails:
    """Room for the ends of many texts, a slot for each, so that one operation reads or writes those of all.

    A draft for many texts sees TAIL positions of each at most, keys and values in 8 bits: 7 MB for eight
    texts in three blocks of width 384, and 14 MB of convolutions' inputs, of which a step reads the last few.
    All keys and values of 200 positions of each took 44 MB, and reading them most of a step.
    """

    def __init__(self, heads: int, head_width: int, layers: LayerArrays) -> None:
        self.texts: weakref.WeakValueDictionary[int, Tail] = weakref.WeakValueDictionary()
        """By slot. A tail that nobody holds any more leaves its slot free."""
        blocks, depth, taps, width = layers.attention_taps.shape
        self._sizes = (
            (blocks, depth, FIRST_SLOTS, 2, heads, TAIL, head_width),
            (blocks, depth, FIRST_SLOTS, 2, heads, TAIL),
            (blocks, depth, 2, FIRST_SLOTS, INPUTS if taps else 0, width),
            (FIRST_SLOTS, TAIL),
        )
        self._clear()

    def _clear(self) -> None:
        room, scales, inputs, positions = self._sizes
        self.num_used = 0
        """The first slots that texts had so far."""
        self.arrays = TailArrays(
            np.zeros(room, np.int8),
            np.zeros(scales, np.float32),
            np.zeros(inputs, np.float32),
            np.zeros(positions, np.int64),
        )

    def put(self, rooms: Sequence[Sequence[Array]], length: int) -> Tail:
        """The end of a text of so many positions, in the lowest free slot; `rooms` are those of its cache."""
        # Nobody is here any more: the memory of the busiest moment goes.
        if not self.texts and self.num_used > FEW_SLOTS:
            self._clear()
        slots = len(self.arrays.positions)
        slot = next(i for i in range(slots + 1) if i not in self.texts)
        if slot == slots:
            before = self.arrays
            self.arrays = TailArrays(
                _twice(before.keys_values, 2),
                _twice(before.scales, 2),
                _twice(before.inputs, 3),
                _twice(before.positions, 0),
            )
        self.num_used = max(self.num_used, slot + 1)
        arrays, positions = self.arrays, np.arange(max(0, length - TAIL), length)
        places = positions % TAIL
        for i, (keys, values, *inputs) in enumerate(rooms):
            for which, part in enumerate((keys, values)):
                end = part[..., positions, :]
                scale = np.maximum(np.abs(end).max(axis=-1), 1e-12) / 127
                arrays.keys_values[:, i, slot, which][..., places, :] = np.round(end / scale[..., None])
                arrays.scales[:, i, slot, which][..., places] = scale
            for which, part in enumerate(inputs):
                last = positions[-INPUTS:]
                arrays.inputs[:, i, which, slot][:, last % INPUTS] = part[:, last]
        arrays.positions[slot] = -1
        arrays.positions[slot, places] = positions
        self.texts[slot] = tail = Tail(slot, length)
        return tail


def _twice(room: NDArray[Any], axis: int) -> NDArray[Any]:
    shape = list(room.shape)
    shape[axis] *= 2
    larger = np.zeros(shape, room.dtype)
    larger[(slice(None),) * axis + (slice(0, room.shape[axis]),)] = room
    return larger
