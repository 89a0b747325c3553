"""One token of many texts through some blocks, compiled: what `QuickBlocks` steps over tails with.

A step of eight texts through two blocks of width 128 is 13 million multiplications; in numpy it was 130
operations too, and took 0.7 ms, most of it to call them. Here it is one function that holds no lock of Python
and takes 0.2 ms. numba compiles it when it is first used on a machine, in some seconds, and keeps it on disk.
Matrices, keys and values have 8 bits, sums 32. Only processors with AVX-512 VNNI have the instruction for
that; in fp32 the same function took three times as long as numpy and torch do.

Knows arrays only. Shapes as in quick.py, plus L layers, E outputs of a matrix and F numbers between the two
of feed-forward.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
import numba
import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from blocktrain.model.tails import (
    ALIGNED,
    INPUTS,
    LANES,
    MIDDLE,
    OUTPUTS,
    ROWS,
    TAIL,
    VECTORS,
    LayerArrays,
    Tails,
    packed,
)

MADE_FOR = "f3b84b2eac7167c5"
"""Which tails.py this was compiled for: what numba keeps on disk is made again when this file changes, and
not when that one does. A test says what belongs here."""


def _has_vnni() -> bool:
    # Told to compile for another processor than this one, numba need not know the instruction.
    told = getattr(numba.config, "CPU_NAME", None) or getattr(numba.config, "CPU_FEATURES", None)
    return not told and bool(llvm.get_host_cpu_features().get("avx512vnni"))


HAS_VNNI = _has_vnni()


@intrinsic
def _tile(typing: Any, tile: Any, inputs: Any, stride: Any, fours: Any, found: Any) -> Any:
    """ROWS x OUTPUTS sums of products, from and to these addresses."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        tile, inputs, stride, fours, found = arguments
        number, vector = ir.IntType(32), ir.VectorType(ir.IntType(32), LANES)
        nothing, splat = (
            ir.Constant(vector, ir.Undefined),
            ir.Constant(ir.VectorType(number, LANES), [0] * LANES),
        )
        kind = ir.FunctionType(vector, [vector] * 3)
        multiply = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.vpdpbusd.512")

        def at(base: Any, offset: Any, step: int, of: Any) -> Any:
            place = builder.add(base, builder.mul(offset, ir.Constant(ir.IntType(64), step)))
            return builder.inttoptr(place, of.as_pointer())

        def constant(value: int) -> Any:
            return ir.Constant(ir.IntType(64), value)

        sums = [[cgutils.alloca_once(builder, vector) for _ in range(VECTORS)] for _ in range(ROWS)]
        for row in sums:
            for one in row:
                builder.store(ir.Constant(vector, None), one)
        with cgutils.for_range(builder, fours) as loop:
            begin = builder.add(tile, builder.mul(loop.index, constant(4 * OUTPUTS)))
            weights = [builder.load(at(begin, constant(i), 4 * LANES, vector)) for i in range(VECTORS)]
            for weight in weights:
                weight.align = ALIGNED
            for i, row in enumerate(sums):
                own = builder.add(inputs, builder.mul(stride, constant(i)))
                four = builder.load(at(own, loop.index, 4, number))
                four.align = 1
                one = builder.insert_element(nothing, four, ir.Constant(number, 0))
                all_alike = builder.shuffle_vector(one, nothing, splat)
                for total, weight in zip(row, weights, strict=True):
                    builder.store(builder.call(multiply, [builder.load(total), weight, all_alike]), total)
        for i, total in enumerate(total for row in sums for total in row):
            builder.store(builder.load(total), at(found, constant(i), 4 * LANES, vector)).align = 1
        return context.get_dummy_value()

    signature = types.void(types.intp, types.intp, types.intp, types.intp, types.intp)
    return signature, emit


def _has_place_for_caches() -> bool:
    """Whether numba finds a folder to keep what it compiled in."""
    try:
        njit(cache=True)(_has_vnni)
    except RuntimeError:  # a program that is installed where nothing can be written, and no home either
        return False
    return True


_compiled = njit(nogil=True, fastmath=True, cache=_has_place_for_caches(), error_model="numpy")


@_compiled
def _product(x_RD: Any, tiles: Any, scale: Any, y_RE: Any) -> None:
    """Rows times a packed matrix, rows rounded to 8 bits too."""
    rows, width = x_RD.shape
    num_tiles, fours, _ = tiles.shape
    codes = np.zeros((-(-rows // ROWS) * ROWS, 4 * fours), np.int8)
    length_R, middle_R = np.empty(rows, np.float32), np.empty(rows, np.int32)
    for r in range(rows):
        largest = np.float32(0)
        for d in range(width):
            largest = max(largest, abs(x_RD[r, d]))
        length_R[r] = largest / np.float32(127) + np.float32(1e-20)
        times, total = np.float32(1) / length_R[r], np.int32(0)
        for d in range(width):
            # A cast cuts off towards zero, and these are above it.
            code = np.int32(x_RD[r, d] * times + np.float32(128.5)) - np.int32(128)
            codes[r, d] = np.int8(code)
            total += code
        middle_R[r] = total * np.int32(MIDDLE)
    found = np.empty((ROWS, OUTPUTS), np.int32)
    for t in range(num_tiles):
        first = t * OUTPUTS
        count = min(OUTPUTS, y_RE.shape[1] - first)
        for begin in range(0, rows, ROWS):
            tile, inputs = tiles[t].ctypes.data, codes[begin].ctypes.data
            _tile(tile, inputs, codes.shape[1], fours, found.ctypes.data)
            for r in range(begin, min(begin + ROWS, rows)):
                for e in range(count):
                    sums = np.float32(found[r - begin, e] - middle_R[r])
                    y_RE[r, first + e] = sums * (scale[first + e] * length_R[r])


@_compiled
def _normed(x_MD: Any, gain_D: Any, shift_D: Any, y_MD: Any) -> None:
    texts, width = x_MD.shape
    for m in range(texts):
        square = np.float32(1e-24)
        for d in range(width):
            square += x_MD[m, d] * x_MD[m, d]
        times = np.float32(1) / np.sqrt(square)
        for d in range(width):
            y_MD[m, d] = x_MD[m, d] * times * gain_D[d] + shift_D[d]


@_compiled
def _convolved(y_MD: Any, room_STD: Any, slot_M: Any, at_M: Any, weight_WD: Any) -> None:
    """In place; the inputs are written first, as a convolution sees the position itself too."""
    taps, width = weight_WD.shape
    for m in range(len(slot_M)):
        own_TD, at = room_STD[slot_M[m]], at_M[m]
        for d in range(width):
            own_TD[at % INPUTS, d] = y_MD[m, d]
            y_MD[m, d] = 0
        for tap in range(taps):
            position = at - taps + 1 + tap
            # Zeros where the text has not begun.
            if position >= 0:
                for d in range(width):
                    y_MD[m, d] += weight_WD[tap, d] * own_TD[position % INPUTS, d]


@_compiled
def _kept(x_K: Any, codes_K: Any) -> np.float32:
    """In 8 bits; gives the scale."""
    largest = np.float32(1e-12)
    for k in range(len(x_K)):
        largest = max(largest, abs(x_K[k]))
    times = np.float32(127) / largest
    for k in range(len(x_K)):
        codes_K[k] = np.int8(np.int32(x_K[k] * times + np.float32(128.5)) - np.int32(128))
    return largest / np.float32(127)


@_compiled
def _attended(
    qkv_ME: Any,
    room: Any,
    scales: Any,
    slot_M: Any,
    at_M: Any,
    start_M: Any,
    position_ST: Any,
    turn_MJ: Any,
    y_MD: Any,
) -> None:
    """`room` [S, 2, H, T, K] and `scales` [S, 2, H, T] are the keys and values of a layer, `turn_MJ` the
    cosines and sines of the rotation."""
    heads, width = room.shape[2], room.shape[4]
    half, whole = width // 2, heads * width
    x_2K, share_T = np.empty((2, width), np.float32), np.empty(TAIL, np.float32)
    for m in range(len(slot_M)):
        slot, place = slot_M[m], at_M[m] % TAIL
        for h in range(heads):
            for which in range(2):
                begin, square = which * whole + h * width, np.float32(1e-24)
                for k in range(width):
                    square += qkv_ME[m, begin + k] * qkv_ME[m, begin + k]
                # What is rotated has length 1: its RMS norm is the root of the width times that. For the
                # query it is divided by it again, as attention wants it.
                times = np.float32(1) / np.sqrt(square)
                if which:
                    times *= np.sqrt(np.float32(width))
                for k in range(half):
                    low, high = qkv_ME[m, begin + k] * times, qkv_ME[m, begin + half + k] * times
                    x_2K[which, k] = low * turn_MJ[m, k] - high * turn_MJ[m, half + k]
                    x_2K[which, half + k] = high * turn_MJ[m, k] + low * turn_MJ[m, half + k]
            scales[slot, 0, h, place] = _kept(x_2K[1], room[slot, 0, h, place])
            begin = 2 * whole + h * width
            scales[slot, 1, h, place] = _kept(qkv_ME[m, begin : begin + width], room[slot, 1, h, place])
            query_K, total = x_2K[0], np.float32(0)
            for t in range(TAIL):
                score = np.float32(0)
                for k in range(width):
                    score += query_K[k] * np.float32(room[slot, 0, h, t, k])
                share_T[t] = score * scales[slot, 0, h, t]
            for t in range(TAIL):
                # No score is above the root of the head's width, as queries and keys have a fixed length.
                # Their exponential: that of a 64th, squared six times, which needs no call and no table.
                part = share_T[t] * np.float32(1 / 64)
                power = np.float32(1) + part * (
                    np.float32(1)
                    + part * (np.float32(1 / 2) + part * (np.float32(1 / 6) + part * np.float32(1 / 24)))
                )
                power *= power
                power *= power
                power *= power
                power *= power
                power *= power
                power *= power
                # What a wrong draft left behind this position is not seen.
                seen = position_ST[slot, t] >= start_M[m] and position_ST[slot, t] <= at_M[m]
                share_T[t] = power if seen else np.float32(0)
                total += share_T[t]
            own_K = y_MD[m, h * width : (h + 1) * width]
            for k in range(width):
                own_K[k] = 0
            for t in range(TAIL):
                share = share_T[t] * scales[slot, 1, h, t] / total
                for k in range(width):
                    own_K[k] += share * np.float32(room[slot, 1, h, t, k])


@_compiled
def step(
    x_NMD: Any,
    slot_M: Any,
    at_M: Any,
    start_M: Any,
    frequency_J: Any,
    layers: Any,
    tails: Any,
    out_gain_ND: Any,
    out_shift_ND: Any,
) -> None:
    """From the embeddings of a token of each text, in place, to what the output maps are multiplied with."""
    blocks, texts, width = x_NMD.shape
    between = 4 * layers.down.tiles.shape[3]
    half = len(frequency_J)
    turn_MJ = np.empty((texts, 2 * half), np.float32)
    for m in range(texts):
        tails.positions[slot_M[m], at_M[m] % TAIL] = at_M[m]
        for j in range(half):
            turn_MJ[m, j] = np.cos(at_M[m] * frequency_J[j])
            turn_MJ[m, half + j] = np.sin(at_M[m] * frequency_J[j])
    y_MD, more_MD = np.empty((texts, width), np.float32), np.empty((texts, width), np.float32)
    qkv_ME, hidden_MF = np.empty((texts, 3 * width), np.float32), np.empty((texts, between), np.float32)
    for n in range(blocks):
        x_MD = x_NMD[n]
        for i in range(layers.attention_gain.shape[1]):
            _normed(x_MD, layers.attention_gain[n, i], layers.attention_shift[n, i], y_MD)
            if layers.attention_taps.shape[2]:
                _convolved(y_MD, tails.inputs[n, i, 0], slot_M, at_M, layers.attention_taps[n, i])
            _product(y_MD, layers.qkv.tiles[n, i], layers.qkv.scale[n, i], qkv_ME)
            room, scales = tails.keys_values[n, i], tails.scales[n, i]
            _attended(qkv_ME, room, scales, slot_M, at_M, start_M, tails.positions, turn_MJ, y_MD)
            _product(y_MD, layers.out.tiles[n, i], layers.out.scale[n, i], more_MD)
            for m in range(texts):
                for d in range(width):
                    x_MD[m, d] += more_MD[m, d]
            _normed(x_MD, layers.feedforward_gain[n, i], layers.feedforward_shift[n, i], y_MD)
            if layers.feedforward_taps.shape[2]:
                _convolved(y_MD, tails.inputs[n, i, 1], slot_M, at_M, layers.feedforward_taps[n, i])
            _product(y_MD, layers.up.tiles[n, i], layers.up.scale[n, i], hidden_MF)
            for m in range(texts):
                for f in range(between):
                    number = max(hidden_MF[m, f], np.float32(0))
                    hidden_MF[m, f] = number * number
            _product(hidden_MF, layers.down.tiles[n, i], layers.down.scale[n, i], more_MD)
            for m in range(texts):
                for d in range(width):
                    x_MD[m, d] += more_MD[m, d]
        _normed(x_MD, out_gain_ND[n], out_shift_ND[n], y_MD)
        for m in range(texts):
            for d in range(width):
                x_MD[m, d] = y_MD[m, d]


def compile_now() -> None:
    """Or load what was compiled before, so that no request waits for it."""
    gain, taps = np.zeros((1, 1, 4), np.float32), np.zeros((1, 1, 0, 4), np.float32)
    square, up, down = (packed(np.zeros((1, 1, *shape), np.float32)) for shape in ((4, 4), (8, 4), (4, 8)))
    qkv = packed(np.zeros((1, 1, 12, 4), np.float32))
    layers = LayerArrays(gain, gain, taps, gain, gain, taps, qkv, square, up, down)
    tails = Tails(1, 4, layers)
    tails.put([[np.zeros((1, 1, 0, 4), np.float32)] * 2], 0)
    zero = np.zeros(1, np.int64)
    step(gain.copy(), zero, zero, zero, np.ones(2), layers, tails.arrays, gain[:, 0], gain[:, 0])
