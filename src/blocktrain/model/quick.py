"""The next rows of some blocks, quickly and roughly: one token of each text at a time, weights in 8 bits.

For drafts, which may be wrong. A pass of few tokens is bound by reading the weights and by the number of
small operations: the layers' matrices are 8-bit integers with a scale for each row, norms' gains are worked
out beforehand, query, key and value share a matrix, so do output map and codebook, and whatever has no cache
is one operation for all texts together. What it costs: docs/history. Of one text, a few tokens can be read
at once, by some of the blocks only. Longer stretches go through `Block.forward`, over the same cache.

Shapes as in layers.py, plus N blocks and M texts.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blocktrain.model.adaptive import AdaptiveBlock
from blocktrain.model.block import Block, BlockOutput
from blocktrain.model.caches import Cache, PackedCache, Shelves
from blocktrain.model.layers import (
    AdaptiveNorm,
    CausalConvolution,
    Layer,
    LayerCache,
    Place,
    causal_attention,
)

# A part that is added to Block and not here would be left out in silence, and drafts would get worse without
# an error. So an unknown part means no quick path.
KNOWN_PARTS = {"embedding", "hint", "upstream", "condition", "layers", "out_norm", "out"}


WIDE_ROWS = 8
"""From so many on bfloat16 is faster than 8 bits, where the processor multiplies in it: the matrices of a
layer of width 384 take 109 instead of 175 us for 8 rows, 264 instead of 699 for 32. Below, reading them
decides."""


@functools.cache
def has_wide_products() -> bool:
    return bool(torch._C._has_mkldnn and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def is_quickenable(block: Block) -> TypeGuard[AdaptiveBlock]:
    """Whether this module knows all the block does without a hint, and the block is on the processor."""
    if not isinstance(block, AdaptiveBlock):
        return False
    parts = {name for name, _ in block.named_children()}
    known = parts <= KNOWN_PARTS and block.upstream is None
    attends = all(isinstance(layer, Layer) and layer.attention is not None for layer in block.layers)
    return known and attends and block.embedding.weight.device.type == "cpu"


class _Norms:
    """The adaptive norms at one place of all blocks; the condition is always that of the null hint."""

    def __init__(self, norms: Sequence[AdaptiveNorm], conditions: Sequence[Tensor]) -> None:
        # The null hint's condition is a constant, so the gains are too: two small products less at every
        # norm.
        maps = [norm.gain_shift(c).chunk(2) for norm, c in zip(norms, conditions, strict=True)]
        gain_N1D, self.shift_N1D = (torch.stack(part)[:, None] for part in zip(*maps, strict=True))
        # RMS norm is sqrt(D) times the vector of length 1; the root goes into the gain, one operation less.
        self.gain_N1D = (1 + gain_N1D) * gain_N1D.shape[-1] ** 0.5

    def of(self, rows: slice) -> _Norms:
        part = copy.copy(self)
        part.gain_N1D, part.shift_N1D = self.gain_N1D[rows], self.shift_N1D[rows]
        return part

    def __call__(self, x_NMD: Tensor) -> Tensor:
        return torch.addcmul(self.shift_N1D, _unit(x_NMD), self.gain_N1D)


def _unit(x: Tensor) -> Tensor:
    """`F.normalize` over the last dimension, in 9 instead of 13 us."""
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / norm.clamp_min_(1e-12)


class _Convolutions:
    def __init__(self, convolutions: Sequence[CausalConvolution]) -> None:
        self.weight = torch.stack([convolution.weight.detach() for convolution in convolutions])
        self.weight[:, -1] += 1  # the position itself is added too

    def of(self, rows: slice) -> _Convolutions:
        part = copy.copy(self)
        part.weight = self.weight[rows]
        return part

    def read(self, y_NTD: Tensor, room_NSD: Tensor, at: int) -> Tensor:
        """Mixed inputs of positions of one text from `at` on, which are written into its memory first."""
        taps, length = self.weight.shape[1], y_NTD.shape[1]
        room_NSD.narrow(1, at, length).copy_(y_NTD)
        begin = max(0, at - taps + 1)
        seen = room_NSD.narrow(1, begin, at + length - begin)
        # Zeros where the text has not begun, as in `CausalConvolution`.
        missing = length + taps - 1 - seen.shape[1]
        seen = F.pad(seen, (0, 0, missing, 0)) if missing else seen
        # Most reads are of one position, for which one product and one sum do. For several, a product for
        # each tap needs no copies of windows that overlap.
        if length == 1:
            return (seen * self.weight).sum(1, keepdim=True)
        mixed_NTD = seen.narrow(1, 0, length) * self.weight[:, :1]
        for i in range(1, taps):
            mixed_NTD.addcmul_(seen.narrow(1, i, length), self.weight[:, i : i + 1])
        return mixed_NTD

    def __call__(self, place: Place, y_NMD: Tensor, cache: PackedCache, index: int) -> Tensor:
        taps, alone = self.weight.shape[1], []
        # The same kind of cache as `Block.forward` fills: `extend` goes on from a draft, and a draft from
        # `extend`.
        for m in cache.alone:
            inputs = cache.parts[m].layers[index].inputs_BSD[place]
            tail = inputs.append(y_NMD[:, m : m + 1])[:, -taps:]
            # Zeros where a text has not begun, as in `CausalConvolution`.
            whole = tail if tail.shape[1] == taps else F.pad(tail, (0, 0, taps - tail.shape[1], 0))
            alone.append((whole * self.weight).sum(1))
        mixed_NMD = _laid_out(alone, cache, y_NMD)
        for group in cache.groups:
            windows = group.windows(index, place, y_NMD[:, group.row_P].transpose(0, 1), taps)
            mixed_NMD[:, group.row_P] = (windows * self.weight.transpose(0, 1)).sum(1).transpose(0, 1)
        return mixed_NMD


def _laid_out(alone: Sequence[Tensor], cache: PackedCache, like_NM: Tensor) -> Tensor:
    """What was found for each text alone, at its place among all; the places of the others are to fill."""
    if not cache.groups:
        return torch.stack(list(alone), dim=1)
    whole = torch.empty_like(like_NM)
    for m, found in zip(cache.alone, alone, strict=True):
        whole[:, m] = found
    return whole


class _Product:
    """Each block's own matrix times its own rows, in 8 bits and bfloat16.

    Products of one token, all layers of two blocks of width 384: fp32 4.0 ms, fp16 1.2, this 0.6; with fp32
    activations there is no fast kernel (8.8 ms). The rough rows chose the exact ones' byte at 479 of 480
    positions (docs/history).
    """

    def __init__(self, *linears: Sequence[nn.Linear]) -> None:
        """Matrices that share an input lie one below the other."""
        self.parts: list[tuple[Tensor, Tensor]] = []
        for one in zip(*linears, strict=True):
            weight = torch.cat([linear.weight for linear in one])
            # A scale for each row of the matrix: one outlier spoils its own row only.
            scale = weight.abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / 127
            self.parts.append(((weight / scale).round().to(torch.int8), scale[:, 0].bfloat16()))

    def of(self, rows: slice) -> _Product:
        part = copy.copy(self)
        part.__dict__.pop("wide", None)
        part.parts = self.parts[rows]
        return part

    @functools.cached_property
    def wide(self) -> list[Tensor]:
        """The same matrices in bfloat16, as products of many rows like them."""
        reorder = torch.ops.mkldnn._reorder_linear_weight
        return [reorder(codes.bfloat16() * scale[:, None], WIDE_ROWS) for codes, scale in self.parts]

    def __call__(self, x_NMD: Tensor) -> Tensor:
        # The kernels know one matrix at a time, and each block has its own.
        if x_NMD.shape[1] >= WIDE_ROWS and has_wide_products():
            pairs = zip(x_NMD.bfloat16(), self.wide, strict=True)
            found = [torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], "") for x, w in pairs]
        else:
            parts = zip(x_NMD.bfloat16(), self.parts, strict=True)
            found = [torch._weight_int8pack_mm(x_MD, *codes_scales) for x_MD, codes_scales in parts]
        # Of one block a view does; `stack` would copy.
        return torch.stack(found) if len(found) > 1 else found[0][None]


class _QuickLayers:
    """The layers at one depth of all blocks."""

    def __init__(self, layers: Sequence[Layer], conditions: Sequence[Tensor]) -> None:
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

    def of(self, rows: slice) -> _QuickLayers:
        """Those of some of the blocks, over the same matrices."""
        part = copy.copy(self)
        part.attention_norm = self.attention_norm.of(rows)
        part.feedforward_norm = self.feedforward_norm.of(rows)
        part.qkv, part.attention_out = self.qkv.of(rows), self.attention_out.of(rows)
        part.up, part.down = self.up.of(rows), self.down.of(rows)
        if self.attention_convolution is not None:
            part.attention_convolution = self.attention_convolution.of(rows)
        if self.feedforward_convolution is not None:
            part.feedforward_convolution = self.feedforward_convolution.of(rows)
        return part

    def read(self, x_NTD: Tensor, rotary: tuple[Tensor, Tensor], rooms: Sequence[Tensor], at: int) -> Tensor:
        """Positions of one text from `at` on; what they leave is written into the memory."""
        k_room, v_room, *inputs = rooms
        length, y_NTD = x_NTD.shape[1], self.attention_norm(x_NTD)
        if self.attention_convolution is not None:
            y_NTD = self.attention_convolution.read(y_NTD, inputs[0], at)
        q, k, v = self._queries_keys_values(y_NTD, rotary)
        # Written before anything is attended to: a position sees itself and those before it in this stretch.
        k_room.narrow(2, at, length).copy_(k[..., 0, :].transpose(1, 2))
        v_room.narrow(2, at, length).copy_(v[..., 0, :].transpose(1, 2))
        keys, values = (room.narrow(2, 0, at + length) for room in (k_room, v_room))
        found = causal_attention(q[..., 0, :].transpose(1, 2), keys, values)
        x_NTD = x_NTD + self.attention_out(found.transpose(1, 2).flatten(2))
        y_NTD = self.feedforward_norm(x_NTD)
        if self.feedforward_convolution is not None:
            y_NTD = self.feedforward_convolution.read(y_NTD, inputs[1], at)
        return x_NTD + self.down(self.up(y_NTD).relu_().square_())

    def _queries_keys_values(
        self, y_NMD: Tensor, rotary: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values; one position each, so that a text's slice has the shape of its cache:
        [N, heads, 1, K]."""
        qkv = self.qkv(y_NMD).float().view(*y_NMD.shape[:2], 3, self.heads, 1, -1)
        # Query and key are normed and rotated as one tensor; see `QuickBlocks.rotary`.
        q_k = _unit(qkv[:, :, :2])
        swapped = q_k.view(*q_k.shape[:-1], 2, -1).flip(-2).view_as(q_k)
        q_k = torch.addcmul(q_k * rotary[0], swapped, rotary[1])
        return q_k[:, :, 0], q_k[:, :, 1], qkv[:, :, 2]

    def step(self, x_NMD: Tensor, rotary: tuple[Tensor, Tensor], cache: PackedCache, index: int) -> Tensor:
        y_NMD = self.attention_norm(x_NMD)
        if self.attention_convolution is not None:
            y_NMD = self.attention_convolution("attention", y_NMD, cache, index)
        q, k, v = self._queries_keys_values(y_NMD, rotary)
        alone = []
        for m in cache.alone:
            layer = cache.parts[m].layers[index]
            keys, values = layer.k_BHSK.append(k[:, m]), layer.v_BHSK.append(v[:, m])
            alone.append(F.scaled_dot_product_attention(q[:, m], keys, values).flatten(1))
        attended = _laid_out(alone, cache, x_NMD)
        for group in cache.groups:
            # To attention the heads of all blocks are heads of one.
            heads_first = (part[:, :, :, 0].transpose(1, 2).flatten(0, 1) for part in (q, k, v))
            found = (
                group.attend(index, *heads_first).view(len(q), self.heads, -1, q.shape[-1]).transpose(1, 2)
            )
            attended[:, group.row_P] = found.flatten(2)
        x_NMD = x_NMD + self.attention_out(attended)
        y_NMD = self.feedforward_norm(x_NMD)
        if self.feedforward_convolution is not None:
            y_NMD = self.feedforward_convolution("feedforward", y_NMD, cache, index)
        return x_NMD + self.down(self.up(y_NMD).relu_().square_())


class QuickBlocks:
    """Blocks of one shape, stepped together; a text's cache has a row for each block."""

    @torch.inference_mode()
    def __init__(self, blocks: Sequence[AdaptiveBlock], codebook_VD: Tensor) -> None:
        assert all(map(is_quickenable, blocks))
        self.blocks, self.codebook = list(blocks), codebook_VD
        self.shelves = Shelves()
        self.rows = slice(None)
        """Which rows of a cache are these blocks'."""
        conditions = [block.condition.null for block in blocks]
        self.embedding_NVD = torch.stack([block.embedding.weight for block in blocks])
        cos, sin = blocks[0].rotary_cos, blocks[0].rotary_sin
        # For x of length 1, x * first + (halves of x swapped) * second is the rotation of its RMS norm.
        scale = (2 * cos.shape[1]) ** 0.5
        self.rotary = scale * torch.cat([cos, cos], dim=1), scale * torch.cat([-sin, sin], dim=1)
        depths = zip(*(block.layers for block in blocks), strict=True)
        self.layers = [_QuickLayers(layers, conditions) for layers in depths]
        heads, width = self.layers[0].heads, self.embedding_NVD.shape[2]
        keys = torch.empty(len(blocks), heads, 0, width // heads)
        convolves = self.layers[0].attention_convolution is not None
        inputs = torch.empty(len(blocks), 0, width) if convolves else None
        self.like = [keys, keys, inputs, inputs]
        """Of what shape the parts of a layer's cache are."""
        self.out_norm = _Norms([block.out_norm for block in blocks], conditions)
        # Without a hint z_hat = sigma_data * F is linear in the last features: one matrix gives the logits.
        self.logits_VD = [
            block.logit_scale * block.sigma_data * block.output_map(codebook_VD) @ block.out.weight
            for block in blocks
        ]

    def new_cache(self) -> Cache:
        return self.blocks[0].new_cache()

    @functools.cached_property
    def leading(self) -> tuple[QuickBlocks, QuickBlocks]:
        """The first block, and all others, over the same matrices; their caches are rows of these blocks'."""
        return self._of(slice(0, 1)), self._of(slice(1, None))

    def first(self, count: int) -> QuickBlocks:
        """The first blocks alone, over the same matrices, with caches of their own."""
        if count == len(self.blocks):
            return self
        part = self._of(slice(0, count))
        part.rows, part.shelves = slice(None), Shelves()
        part.like = [None if like is None else like[:count] for like in self.like]
        return part

    def _of(self, rows: slice) -> QuickBlocks:
        part = copy.copy(self)
        part.__dict__.pop("leading", None)
        part.blocks, part.rows = self.blocks[rows], rows
        part.embedding_NVD, part.logits_VD = self.embedding_NVD[rows], self.logits_VD[rows]
        part.layers, part.out_norm = [layer.of(rows) for layer in self.layers], self.out_norm.of(rows)
        return part

    @torch.inference_mode()
    def read(self, tokens: Sequence[int], cache: Cache, at: int) -> Tensor:
        """Logits [N, T, V] of what follows each of these tokens of one text, the first of which stands at
        `at`. The cache has memory for them, and its length stays."""
        x_NTD = self.embedding_NVD[:, list(tokens)]
        # The length of the cache stays: these are guesses, and one that is wrong is written over.
        rotary = self.rotary[0].narrow(0, at, len(tokens)), self.rotary[1].narrow(0, at, len(tokens))
        cos, sin = (table[:, None, None, None] for table in rotary)
        for layers, layer in zip(self.layers, cache.layers, strict=True):
            rooms = [part.room[self.rows] for part in layer.parts if part.room is not None]
            x_NTD = layers.read(x_NTD, (cos, sin), rooms, at)
        pairs = zip(self.logits_VD, self.out_norm(x_NTD), strict=True)
        return torch.stack([F.linear(y_TD, logits_VD) for logits_VD, y_TD in pairs])

    @torch.inference_mode()
    def reserve(self, cache: Cache, length: int) -> None:
        """Have memory for so many positions more."""
        # `read` writes into memory and never lets it grow.
        end = cache.positions(length).stop
        for layer in cache.layers:
            for part, like in zip(layer.parts, self.like, strict=True):
                if like is not None:
                    part.reserve(like, end)

    @torch.inference_mode()
    def step(self, tokens: Sequence[int], caches: Sequence[Cache]) -> Tensor:
        """Logits [N, M, V] of what follows each text's token, which its cache then holds."""
        x_NMD = self.embedding_NVD[:, list(tokens)]
        # A row of the table for each text; they stand at different positions.
        positions = [cache.length for cache in caches]
        cos, sin = (table[positions][:, None, None, None] for table in self.rotary)
        packed = PackedCache(caches, [1] * len(caches), self.shelves)
        for i, layers in enumerate(self.layers):
            x_NMD = layers.step(x_NMD, (cos, sin), packed, i)
        packed.advance(len(caches))
        pairs = zip(self.logits_VD, self.out_norm(x_NMD), strict=True)
        return torch.stack([F.linear(y_MD, logits_VD) for logits_VD, y_MD in pairs])

    @torch.inference_mode()
    def extend(self, tokens: Sequence[int], cache: Cache) -> None:
        """Have the cache hold all of these too, in one exact pass of each block."""
        ids = torch.tensor([list(tokens)])
        cache.leave_shelf()
        cache.settle()
        # Exact and not in 8 bits: the many rows of a prompt share one reading of the weights anyway.
        parts = [_row_of(cache, i) for i in range(len(self.blocks))]
        for block, part in zip(self.blocks, parts, strict=True):
            block(ids, self.codebook, cache=part)
        for layer, *joined in zip(cache.layers, *(part.layers for part in parts), strict=True):
            for growing, *pieces in zip(layer.parts, *(one.parts for one in joined), strict=True):
                # A part that outgrew the shared memory has a room of its own; joined again here, once per
                # stretch and not per token.
                rooms = [piece.room for piece in pieces if piece.room is not None]
                if rooms:
                    growing.room, growing.length = torch.cat(rooms), pieces[0].length
        cache.advance(len(tokens))


def _row_of(cache: Cache, index: int) -> Cache:
    """One block's part of the cache, over the same memory while that suffices."""
    part = Cache([LayerCache() for _ in cache.layers], cache.length)
    for whole, own in zip(cache.layers, part.layers, strict=True):
        for source, target in zip(whole.parts, own.parts, strict=True):
            target.length = source.length
            target.room = None if source.room is None else source.room[index : index + 1]
    return part


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

    def first(self, count: int) -> PlainBlocks:
        """The first blocks alone, with caches of their own."""
        return self if count == len(self.blocks) else PlainBlocks(self.blocks[:count], self.codebook)

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

    def copy(self) -> PlainCache:
        """The same with memory of its own."""
        return PlainCache([part.copy() for part in self.parts])
