"""The next rows of some blocks, quickly and roughly: a token of each text at a time, or a few of one text.

For drafts, which may be wrong. A pass of few tokens is bound by reading the weights and by the number of
small operations: large matrices have 8 bits, norms' gains are worked out beforehand, query, key and value
share a matrix, so do output map and codebook, and all but the products is numpy, whose operations on a row
of 384 numbers take 1 us where torch's take 3. Many texts are stepped by their ends, in one compiled function
(tails.py, quick_kernel.py). Longer stretches go through `Block.forward`, over the same
cache.

Shapes as in layers.py, plus N blocks, M texts, R new positions of all texts in a row and W taps of a
convolution.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from blocktrain.model.adaptive import AdaptiveBlock
from blocktrain.model.block import Block, BlockOutput
from blocktrain.model.caches import Cache, PackedCache, Shelves
from blocktrain.model.generation import window_start
from blocktrain.model.layers import ROPE_BASE, AdaptiveNorm, CausalConvolution, Layer, LayerCache
from blocktrain.model.tails import LayerArrays, Packed, Tail, Tails, packed

Array = NDArray[np.float32]

# A part that is added to Block and not here would be left out in silence, and drafts would get worse without
# an error. So an unknown part means no quick path.
KNOWN_PARTS = {"embedding", "hint", "upstream", "condition", "layers", "out_norm", "out"}

MANY_ROWS = 2
"""From so many on another kernel is faster, which rounds rows to 8 bits too: among all else that a draft
reads, the matrices of a block of 3 layers of width 384 take 0.87 instead of 2.4 ms for 8 rows."""
SMALL_MATRIX = 1 << 16
"""Numbers. Up to so many a matrix stays in fp32, and one operation multiplies those of all blocks: calling a
kernel takes 12 us for each, and eight rows of width 128 no longer than that."""
LEAST_CAPACITY = 64


def is_quickenable(block: Block) -> TypeGuard[AdaptiveBlock]:
    """Whether this module knows all the block does without a hint, and the block is on the processor."""
    if not isinstance(block, AdaptiveBlock):
        return False
    parts = {name for name, _ in block.named_children()}
    known = parts <= KNOWN_PARTS and block.upstream is None
    attends = all(isinstance(layer, Layer) and layer.attention is not None for layer in block.layers)
    return known and attends and block.embedding.weight.device.type == "cpu"


class QuickCache:
    """What the blocks hold of one text: for each layer keys and values [N, H, S, K], and where it has
    convolutions the inputs [N, S, D] of both."""

    def __init__(self, num_layers: int, shapes: Sequence[tuple[int, ...]]) -> None:
        """`shapes`: of these parts, for a text of no positions."""
        self.rooms: list[list[Array]] = [[np.empty(shape, np.float32) for shape in shapes]] * num_layers
        self.length = self.capacity = 0

    def reserve(self, length: int) -> None:
        """Have memory for so many positions more."""
        end = self.length + length
        if end <= self.capacity:
            return
        # Twice the length, so that a text of n tokens copies its cache log n times and not n times.
        self.capacity = max(LEAST_CAPACITY, end, 2 * self.length)
        self.rooms = [[self._larger(room) for room in rooms] for rooms in self.rooms]

    def _larger(self, room: Array) -> Array:
        *before, _, width = room.shape
        larger = np.zeros((*before, self.capacity, width), np.float32)
        larger[..., : self.length, :] = room[..., : self.length, :]
        return larger

    def truncate(self, length: int) -> None:
        """Forget every position from `length` on."""
        self.length = min(self.length, length)

    @property
    def num_bytes(self) -> int:
        return sum(room.nbytes for rooms in self.rooms for room in rooms)

    def copy(self) -> QuickCache:
        """The same with memory of its own, and no more than it needs."""
        other = copy.copy(self)
        other.capacity = self.length
        other.rooms = [[other._larger(room) for room in rooms] for rooms in self.rooms]
        return other


class Stretch(NamedTuple):
    """New positions of one text in a pass."""

    rooms: list[list[Array]]
    """Of its cache."""
    at: int
    end: int
    """Where in the cache they stand."""
    row: int
    """Where the first of them stands among those of all texts."""
    start: int
    """Of the window that the first of them sees."""

    @property
    def rows(self) -> slice:
        return slice(self.row, self.row + self.end - self.at)


class _Norms:
    """The adaptive norms at one place of all blocks; the condition is always that of the null hint."""

    def __init__(self, norms: Sequence[AdaptiveNorm], conditions: Sequence[Tensor]) -> None:
        # The null hint's condition is a constant, so the gains are too: two small products less at every
        # norm.
        maps = [norm.gain_shift(c).chunk(2) for norm, c in zip(norms, conditions, strict=True)]
        gain_N1D, self.shift_N1D = (torch.stack(part)[:, None].numpy() for part in zip(*maps, strict=True))
        # RMS norm is sqrt(D) times the vector of length 1; the root goes into the gain, one operation less.
        self.gain_N1D = (1 + gain_N1D) * np.float32(gain_N1D.shape[-1] ** 0.5)

    def of(self, blocks: slice) -> _Norms:
        part = copy.copy(self)
        part.gain_N1D, part.shift_N1D = self.gain_N1D[blocks], self.shift_N1D[blocks]
        return part

    def __call__(self, x_NRD: Array) -> Array:
        y_NRD = _unit(x_NRD)
        y_NRD *= self.gain_N1D
        y_NRD += self.shift_N1D
        return y_NRD


def _unit(x: Array) -> Array:
    square = np.einsum("...d,...d->...", x, x)
    square += 1e-24
    found: Array = x * (1 / np.sqrt(square))[..., None]
    return found


class _Convolutions:
    def __init__(self, convolutions: Sequence[CausalConvolution]) -> None:
        weight = torch.stack([convolution.weight.detach() for convolution in convolutions])
        weight[:, -1] += 1  # the position itself is added too
        self.weight_N1WD = weight[:, None].numpy()

    def of(self, blocks: slice) -> _Convolutions:
        part = copy.copy(self)
        part.weight_N1WD = self.weight_N1WD[blocks]
        return part

    def __call__(self, y_NRD: Array, stretches: Sequence[Stretch], layer: int, part: int) -> Array:
        mixed_NRD, taps = np.empty(y_NRD.shape, np.float32), self.weight_N1WD.shape[2]
        for stretch in stretches:
            room = stretch.rooms[layer][part]
            room[:, stretch.at : stretch.end] = y_NRD[:, stretch.rows]
            windows_NTWD = np.zeros(
                (len(room), stretch.end - stretch.at, *self.weight_N1WD.shape[2:]), np.float32
            )
            for i, end in enumerate(range(stretch.at + 1, stretch.end + 1)):
                # Zeros where the text has not begun, as in `CausalConvolution`.
                seen = min(taps, end)
                windows_NTWD[:, i, taps - seen :] = room[:, end - seen : end]
            windows_NTWD *= self.weight_N1WD
            windows_NTWD.sum(axis=2, out=mixed_NRD[:, stretch.rows])
        return mixed_NRD


@functools.cache
def has_packed_products() -> bool:
    return torch.backends.quantized.engine in ("x86", "fbgemm")


@functools.cache
def has_wide_sums() -> bool:
    """Whether the processor adds products of 8 bits up in 32; where it does so in 16, rows get 7 bits."""
    return bool(torch.cpu._is_vnni_supported())


def _packed(codes: Tensor, scales: Tensor) -> Any:
    zeros = torch.zeros(len(scales), dtype=torch.long)
    with warnings.catch_warnings():
        # To be removed in some later torch, and the fastest way there is in those we run with.
        warnings.filterwarnings("ignore", message="torch.quantize_per_tensor", category=UserWarning)
        matrix = torch._make_per_channel_quantized_tensor(codes, scales.double(), zeros, 0)
    return torch.ops.quantized.linear_prepack(matrix, None)


class _Product:
    """Each block's own matrix times its own rows, in 8 bits unless it is small.

    Products of one token, all layers of two blocks of width 384: fp32 4.0 ms, fp16 1.2, 8 bits 0.6; with fp32
    activations there is no fast kernel (8.8 ms). The rough rows chose the exact ones' byte at 479 of 480
    positions (docs/history).
    """

    def __init__(self, *linears: Sequence[nn.Linear]) -> None:
        """Matrices that share an input lie one below the other."""
        self.parts: list[tuple[Tensor, Tensor]] = []
        weights = [torch.cat([linear.weight for linear in one]) for one in zip(*linears, strict=True)]
        self.small_NED: Array | None = None
        # The kernel for one row reads 16 inputs at a time, also beyond the end: it crashed with 136.
        if weights[0].numel() <= SMALL_MATRIX or weights[0].shape[1] % 16:
            self.small_NED = torch.stack(weights).float().contiguous().numpy()
            weights = []
        for weight in weights:
            # A scale for each row of the matrix: one outlier spoils its own row only.
            scale = weight.abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / 127
            self.parts.append(((weight / scale).round().to(torch.int8), scale[:, 0].bfloat16()))
        self.many = [_packed(*codes_scales) for codes_scales in self.parts] if has_packed_products() else []
        """The same matrices for many rows."""

    def of(self, blocks: slice) -> _Product:
        part = copy.copy(self)
        part.parts, part.many = self.parts[blocks], self.many[blocks]
        part.small_NED = None if self.small_NED is None else self.small_NED[blocks]
        return part

    def __call__(self, x_NRD: Array) -> Array:
        if self.small_NED is not None:
            product_NRE: Array = x_NRD @ self.small_NED.swapaxes(1, 2)
            return product_NRE
        # The kernels know one matrix at a time, and each block has its own.
        x = torch.from_numpy(x_NRD)
        if self.many and x_NRD.shape[1] >= MANY_ROWS:
            found = [
                # `default`: torch looks for the overload, 5 us each time.
                torch.ops.quantized.linear_dynamic.default(x_RD, packed, not has_wide_sums())
                for x_RD, packed in zip(x, self.many, strict=True)
            ]
        else:
            parts = zip(x.bfloat16(), self.parts, strict=True)
            found = [torch._weight_int8pack_mm(x_RD, *codes_scales) for x_RD, codes_scales in parts]
        # Of one block a view does; `stack` would copy.
        whole: Array = (torch.stack(found) if len(found) > 1 else found[0][None]).float().numpy()
        return whole

    def matrices(self) -> Array:
        """[N, E, D], as they are rounded."""
        if self.small_NED is not None:
            return self.small_NED
        found = [codes.float() * scale.float()[:, None] for codes, scale in self.parts]
        return torch.stack(found).numpy()

    def of_columns(self, x_NDR: Array) -> Array:
        """Of small matrices, the products [N, E, R] with columns: of two blocks and eight rows, 128 by 512
        numbers, they take 23 instead of 30 us."""
        assert self.small_NED is not None
        product_NER: Array = self.small_NED @ x_NDR
        return product_NER


class _QuickLayers:
    """The layers at one depth of all blocks."""

    def __init__(self, index: int, layers: Sequence[Layer], conditions: Sequence[Tensor]) -> None:
        self.index = index
        attentions = [layer.attention for layer in layers if layer.attention is not None]
        self.heads = attentions[0].heads
        self.attention_norm = _Norms([layer.attention_norm for layer in layers], conditions)
        # One product for three matrices: a pass of one token is bound by the number of small operations.
        self.qkv = _Product(*([getattr(a, name) for a in attentions] for name in "qkv"))
        self.attention_out = _Product([a.out for a in attentions])
        self.feedforward_norm = _Norms([layer.feedforward_norm for layer in layers], conditions)
        self.up = _Product([layer.feedforward.up for layer in layers])
        self.down = _Product([layer.feedforward.down for layer in layers])
        before = [c for layer in layers if (c := layer.attention_convolution) is not None]
        between = [c for layer in layers if (c := layer.feedforward_convolution) is not None]
        self.attention_convolution = _Convolutions(before) if before else None
        self.feedforward_convolution = _Convolutions(between) if between else None

    def of(self, blocks: slice) -> _QuickLayers:
        """Those of some of the blocks, over the same matrices."""
        part = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, (_Norms, _Convolutions, _Product)):
                setattr(part, name, value.of(blocks))
        return part

    def __call__(self, x_NRD: Array, rotary: tuple[Array, Array], stretches: Sequence[Stretch]) -> Array:
        y_NRD = self.attention_norm(x_NRD)
        if self.attention_convolution is not None:
            y_NRD = self.attention_convolution(y_NRD, stretches, self.index, 2)
        x_NRD = x_NRD + self.attention_out(self._attended(self.qkv(y_NRD), rotary, stretches))
        y_NRD = self.feedforward_norm(x_NRD)
        if self.feedforward_convolution is not None:
            y_NRD = self.feedforward_convolution(y_NRD, stretches, self.index, 3)
        small = self.up.small_NED is not None and self.down.small_NED is not None
        hidden = self.up.of_columns(y_NRD.swapaxes(1, 2)) if small else self.up(y_NRD)
        np.maximum(hidden, 0, out=hidden)
        hidden *= hidden
        x_NRD += self.down.of_columns(hidden).swapaxes(1, 2) if small else self.down(hidden)
        return x_NRD

    def _attended(self, qkv: Array, rotary: tuple[Array, Array], stretches: Sequence[Stretch]) -> Array:
        blocks, rows, _ = qkv.shape
        parts = qkv.reshape(blocks, rows, 3, self.heads, -1)
        # Query and key are normed and rotated as one array; see `QuickBlocks._pass`.
        q_k = _unit(parts[:, :, :2])
        halves = q_k.reshape(*q_k.shape[:-1], 2, -1)
        q_k = q_k * rotary[0] + (halves[..., ::-1, :] * rotary[1]).reshape(q_k.shape)
        q, k, v = q_k[:, :, 0], q_k[:, :, 1], parts[:, :, 2]
        found_NRHK = np.empty(q.shape, np.float32)
        for stretch in stretches:
            start, at, end, own = stretch.start, stretch.at, stretch.end, stretch.rows
            k_room, v_room = stretch.rooms[self.index][:2]
            # Also those before it in this stretch.
            k_room[:, :, at:end] = k[:, own].swapaxes(1, 2)
            v_room[:, :, at:end] = v[:, own].swapaxes(1, 2)
            shares_NHST = np.exp(k_room[:, :, start:end] @ q[:, own].transpose(0, 2, 3, 1))
            if end - at > 1:
                shares_NHST[:, :, at - start :] *= np.triu(np.ones((end - at, end - at), np.float32))
            y_NHTK = shares_NHST.swapaxes(2, 3) @ v_room[:, :, start:end]
            y_NHTK /= shares_NHST.sum(axis=2)[..., None]
            found_NRHK[:, own] = y_NHTK.swapaxes(1, 2)
        return found_NRHK.reshape(blocks, rows, -1)


@functools.cache
def _second_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="drafts")


class QuickBlocks:
    """Blocks of one shape, stepped together; a text's cache has a row for each block."""

    @torch.inference_mode()
    def __init__(self, blocks: Sequence[AdaptiveBlock], codebook_VD: Tensor) -> None:
        assert all(map(is_quickenable, blocks))
        self.blocks, self.codebook = list(blocks), codebook_VD
        self.context = blocks[0].context
        self.chosen = slice(None)
        """Which rows of a cache are these blocks'."""
        conditions = [block.condition.null for block in blocks]
        self.embedding_NVD = torch.stack([block.embedding.weight for block in blocks]).numpy()
        width = 2 * blocks[0].rotary_cos.shape[1]
        frequency = ROPE_BASE ** (-np.arange(0, width, 2) / width)
        self.frequency_K = np.concatenate([-frequency, frequency])
        # What is rotated has length 1: its RMS norm is the root of the width times that. For the query it is
        # divided by it again, as attention wants it.
        self.lengths_211 = np.array([1.0, width**0.5])[:, None, None]
        depths = enumerate(zip(*(block.layers for block in blocks), strict=True))
        self.layers = [_QuickLayers(index, layers, conditions) for index, layers in depths]
        heads, width = self.layers[0].heads, self.embedding_NVD.shape[2]
        keys, inputs = (len(blocks), heads, 0, width // heads), (len(blocks), 0, width)
        convolution = self.layers[0].attention_convolution
        self.taps = 0 if convolution is None else convolution.weight_N1WD.shape[2]
        self.shapes = [keys, keys, *([inputs, inputs] if self.taps else [])]
        """Of the parts of a layer's cache."""
        self.out_norm = _Norms([block.out_norm for block in blocks], conditions)
        # Without a hint z_hat = sigma_data * F is linear in the last features: one matrix gives the logits.
        self.logits_VD = [
            block.logit_scale * block.sigma_data * block.output_map(codebook_VD) @ block.out.weight
            for block in blocks
        ]

    def new_cache(self) -> QuickCache:
        return QuickCache(len(self.layers), self.shapes)

    @functools.cached_property
    def leading(self) -> tuple[QuickBlocks, QuickBlocks]:
        """The first block, and all others, over the same matrices; their caches are rows of these blocks'."""
        return self._of(slice(0, 1)), self._of(slice(1, None))

    @functools.cached_property
    def layer_arrays(self) -> LayerArrays:
        """The layers as tails are stepped with."""
        none = np.zeros((len(self.blocks), 1, 0, self.embedding_NVD.shape[2]), np.float32)

        def taps(found: Sequence[_Convolutions | None]) -> Array:
            there = [one.weight_N1WD for one in found if one is not None]
            return np.concatenate(there, axis=1) if there else np.repeat(none, len(self.layers), axis=1)

        def matrices(found: Sequence[_Product]) -> Packed:
            return packed(np.stack([one.matrices() for one in found], axis=1))

        layers = self.layers
        return LayerArrays(
            np.concatenate([layer.attention_norm.gain_N1D for layer in layers], axis=1),
            np.concatenate([layer.attention_norm.shift_N1D for layer in layers], axis=1),
            taps([layer.attention_convolution for layer in layers]),
            np.concatenate([layer.feedforward_norm.gain_N1D for layer in layers], axis=1),
            np.concatenate([layer.feedforward_norm.shift_N1D for layer in layers], axis=1),
            taps([layer.feedforward_convolution for layer in layers]),
            matrices([layer.qkv for layer in layers]),
            matrices([layer.attention_out for layer in layers]),
            matrices([layer.up for layer in layers]),
            matrices([layer.down for layer in layers]),
        )

    @functools.cached_property
    def tails(self) -> Tails:
        heads = self.layers[0].heads
        return Tails(heads, self.embedding_NVD.shape[2] // heads, self.layer_arrays)

    def tail_of(self, cache: QuickCache) -> Tail:
        """The end of what the cache holds."""
        return self.tails.put(cache.rooms, cache.length)

    def _of(self, blocks: slice) -> QuickBlocks:
        part = copy.copy(self)
        for name in ("leading", "layer_arrays", "tails"):
            part.__dict__.pop(name, None)
        part.blocks, part.chosen = self.blocks[blocks], blocks
        part.embedding_NVD, part.logits_VD = self.embedding_NVD[blocks], self.logits_VD[blocks]
        part.layers, part.out_norm = [layer.of(blocks) for layer in self.layers], self.out_norm.of(blocks)
        return part

    @torch.inference_mode()
    def read(self, tokens: Sequence[int], cache: QuickCache, at: int) -> Tensor:
        """Logits [N, T, V] of what follows each of these tokens of one text, the first of which stands at
        `at`. The cache has memory for them, and its length stays: these are guesses, and one that is wrong
        is written over."""
        rooms = [[part[self.chosen] for part in rooms] for rooms in cache.rooms]
        stretch = Stretch(rooms, at, at + len(tokens), 0, window_start(at + 1, self.context))
        return self._pass(tokens, range(stretch.at, stretch.end), [stretch])

    @torch.inference_mode()
    def step(self, tokens: Sequence[int], texts: Sequence[QuickCache] | Sequence[Tail]) -> Tensor:
        """Logits [N, M, V] of what follows each text's token, which its cache or tail then holds."""
        tails = [text for text in texts if isinstance(text, Tail)]
        if tails:
            logits_NMV = self._step_tails(tokens, tails)
        else:
            caches = [text for text in texts if isinstance(text, QuickCache)]
            for cache in caches:
                cache.reserve(1)
            stretches = [
                Stretch(
                    cache.rooms,
                    cache.length,
                    cache.length + 1,
                    m,
                    window_start(cache.length + 1, self.context),
                )
                for m, cache in enumerate(caches)
            ]
            logits_NMV = self._pass(tokens, [cache.length for cache in caches], stretches)
        for text in texts:
            text.length += 1
        return logits_NMV

    def _step_tails(self, tokens: Sequence[int], tails: Sequence[Tail]) -> Tensor:
        from blocktrain.model import quick_kernel

        x_NMD = self.embedding_NVD.take(list(tokens), axis=1)
        at_M = np.array([tail.length for tail in tails])
        # Where the window slid, as little as the blocks themselves would see: with all of the tail 0.56 of
        # what was drafted held, instead of 0.63 (demo model).
        starts = [
            window_start(tail.length + 1, self.context) if tail.length >= self.context else 0
            for tail in tails
        ]
        slot_M, start_M = np.array([tail.slot for tail in tails]), np.array(starts)
        frequency_J, norm = self.frequency_K[len(self.frequency_K) // 2 :], self.out_norm

        # These and no others, should the second thread begin late.
        all_layers, all_arrays = self.layer_arrays, self.tails.arrays

        def run(blocks: slice) -> None:
            layers, arrays = all_layers.of(blocks), all_arrays.of(blocks)
            gain_ND, shift_ND = norm.gain_N1D[blocks, 0], norm.shift_N1D[blocks, 0]
            x = x_NMD[blocks]
            quick_kernel.step(x, slot_M, at_M, start_M, frequency_J, layers, arrays, gain_ND, shift_ND)

        # Blocks need nothing of one another, and the kernel holds no lock.
        half = len(self.blocks) // 2
        other = _second_thread().submit(run, slice(0, half)) if half else None
        try:
            run(slice(half, None))
        finally:
            if other is not None:
                other.result()
        return self._logits(x_NMD)

    def _pass(self, tokens: Sequence[int], positions: Sequence[int], stretches: Sequence[Stretch]) -> Tensor:
        x_NRD = self.embedding_NVD[:, list(tokens)]
        # Not from a table, which would end with the context: a tail goes on where the window slides.
        # x * cos + (halves of x swapped) * sin is the rotation of x.
        angle_R11K = np.multiply.outer(np.array(positions, np.float64), self.frequency_K)[:, None, None]
        cos, sin = (
            (part * self.lengths_211).astype(np.float32) for part in (np.cos(angle_R11K), np.sin(angle_R11K))
        )
        rotary = cos, sin.reshape(*sin.shape[:-1], 2, -1)
        for layers in self.layers:
            x_NRD = layers(x_NRD, rotary, stretches)
        return self._logits(self.out_norm(x_NRD))

    def _logits(self, y_NRD: Array) -> Tensor:
        pairs = zip(self.logits_VD, torch.from_numpy(y_NRD), strict=True)
        return torch.stack([y_RD @ logits_VD.T for logits_VD, y_RD in pairs])

    @torch.inference_mode()
    def extend(self, tokens: Sequence[int], cache: QuickCache) -> None:
        """Have the cache hold all of these too, in one exact pass of each block."""
        cache.reserve(len(tokens))
        ids = torch.tensor([list(tokens)])
        # Exact and not rough: the many rows of a prompt share one reading of the weights anyway.
        for i, block in enumerate(self.blocks):
            part = Cache([LayerCache() for _ in cache.rooms], cache.length)
            for layer, rooms in zip(part.layers, cache.rooms, strict=True):
                # Over the cache's own memory, which is large enough.
                for growing, room in zip(layer.parts, rooms, strict=False):
                    growing.room, growing.length = torch.from_numpy(room[i : i + 1]), cache.length
            block(ids, self.codebook, cache=part)
        cache.length += len(tokens)


class PlainBlocks:
    """The same through `Block.forward`, wherever the blocks are; a cache for each."""

    def __init__(self, blocks: Sequence[Block], codebook_VD: Tensor) -> None:
        self.blocks, self.codebook = list(blocks), codebook_VD
        self.shelves = [Shelves() for _ in blocks]

    def new_cache(self) -> PlainCache:
        return PlainCache([block.new_cache() for block in self.blocks])

    @torch.inference_mode()
    def step(self, tokens: Sequence[int], caches: Sequence[PlainCache]) -> Tensor:
        outputs = self._run(tokens, caches, [1] * len(caches))
        # To the processor, where the rows of all blocks of a draft are pooled.
        return torch.stack([output.logits_BTV[0].float().cpu() for output in outputs])

    @torch.inference_mode()
    def extend(self, tokens: Sequence[int], cache: PlainCache) -> None:
        self._run(tokens, [cache], [len(tokens)])

    def _run(
        self, tokens: Sequence[int], caches: Sequence[PlainCache], lengths: list[int]
    ) -> list[BlockOutput]:
        ids = torch.tensor([list(tokens)], device=self.codebook.device)
        found = []
        for i, block in enumerate(self.blocks):
            parts = [cache.parts[i] for cache in caches]
            cache = PackedCache(parts, lengths, self.shelves[i]) if len(parts) > 1 else parts[0]
            found.append(block(ids, self.codebook, cache=cache))
        return found


class PlainCache:
    def __init__(self, parts: Sequence[Cache]) -> None:
        self.parts = list(parts)

    @property
    def length(self) -> int:
        return self.parts[0].length

    def truncate(self, length: int) -> None:
        for part in self.parts:
            part.truncate(length)

    @property
    def num_bytes(self) -> int:
        layers = [layer for part in self.parts for layer in part.layers]
        return sum(part.room.nbytes for layer in layers for part in layer.parts if part.room is not None)

    def copy(self) -> PlainCache:
        """The same with memory of its own."""
        return PlainCache([part.copy() for part in self.parts])
