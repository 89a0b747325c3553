"""Passes of a few new tokens of each text in fixed shapes, which a GPU replays as one captured graph.

A token takes some hundred small operations in each block, and starting them one by one from Python takes
longer than the GPU needs for them. Here everything that changes from pass to pass lies in tensors that stay
where they are: ids, positions, slots, and the shelves with the caches. So a pass is captured once for each
shape and replayed from then on. A text is a row of the pass; rows and new positions of each are padded to
powers of two. What padding writes goes to a slot that no text has, and nobody reads its log-probs.

On a processor the same passes run without capture. Shapes as in caches.py, plus T new positions of each of M
rows, P = M * T of them in all.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from blocktrain.model.block import Block
from blocktrain.model.caches import Cache, Shelf, Shelves
from blocktrain.model.layers import CausalConvolution, Place

MOST_NEW = 128
"""New positions of a text: a whole draft and what a text brings that begins as another does. A prompt has few
operations for its size."""
MOST_POSITIONS = 512
"""New positions of a pass. Beyond, a GPU has enough to do with each operation."""
MOST_CACHED = 1 << 18
"""Positions of the shelf that a pass reads, those of 64 texts of 4,096: their keys are copied into a row."""
MOST_VALUES = 1 << 25
"""Log-probs of a pass; each captured pass keeps the memory for its own."""
MOST_GRAPHS = 64
"""Captured passes that are kept, the least recently used out first."""


# torch has 32 streams for all, so an older and a newer model of one stage may have got the same one.
_capturing = threading.Lock()


@dataclass(frozen=True)
class Shape:
    """What texts must have in common to share a pass."""

    blocks: tuple[int, ...]
    """Those that run, in their order."""
    asked: tuple[int, ...]
    """Those of them whose rows are wanted; none where the last one's features go to another holder."""
    goes_on: bool
    """Whether the first takes features that another holder computed."""
    capacity: int
    """Positions of a slot."""
    num_new: int
    """Positions of each text in this pass, with padding."""
    most_texts: int
    """A power of two."""


class FixedPlaces:
    """Where the positions of a pass are read and written."""

    def __init__(self, slot_P: Tensor, position_P: Tensor, num_rows: int, capacity: int) -> None:
        self.slot_P, self.position_P, self.num_rows = slot_P, position_P, num_rows
        # A row of padding reads anybody's keys.
        self.slot_M = slot_P.view(num_rows, -1)[:, 0].clamp(min=0)
        seen = torch.arange(capacity, device=slot_P.device)
        self._later_MTS = position_P.view(num_rows, -1)[:, :, None] < seen
        self._mask: Tensor | None = None

    def mask(self, q: Tensor, queries: int) -> Tensor:
        """What each position does not see, as minus infinity, for so many queries at each."""
        # The layers of a block have the same heads, so the first makes it for all.
        if self._mask is None:
            mask = torch.zeros(self._later_MTS.shape, dtype=q.dtype, device=q.device)
            self._mask = mask.masked_fill_(self._later_MTS, -torch.inf).repeat(1, queries, 1)[:, None]
        return self._mask


class FixedCache:
    """A block's part of a shelf, to `Block.forward`: a batch of one, the positions of all rows in a row."""

    def __init__(self, shelf: Shelf, places: FixedPlaces) -> None:
        self.shelf, self.places = shelf, places

    def layer(self, index: int) -> FixedLayerCache:
        return FixedLayerCache([room for room in self.shelf.rooms[index] if room is not None], self.places)

    def positions(self, length: int) -> Tensor:
        return self.places.position_P

    def advance(self, length: int) -> None:
        """Nothing: a replay runs no Python, so `FixedPasses.run` counts."""


class FixedLayerCache:
    def __init__(self, rooms: Sequence[Tensor], places: FixedPlaces) -> None:
        self.rooms, self.places = rooms, places

    def attend(self, q_1HPK: Tensor, k_1GPK: Tensor, v_1GPK: Tensor) -> Tensor:
        at = self.places
        k_room, v_room = (room[:, 0] for room in self.rooms[:2])
        k_room[at.slot_P, :, at.position_P] = k_1GPK[0].transpose(0, 1)
        v_room[at.slot_P, :, at.position_P] = v_1GPK[0].transpose(0, 1)
        (_, heads, _, width), shared = q_1HPK.shape, k_1GPK.shape[1]
        # As in caches.py: queries that share a head of keys stand one after another as more positions.
        q_MHTK = q_1HPK[0].reshape(heads, at.num_rows, -1, width).transpose(0, 1)
        q = q_MHTK.reshape(at.num_rows, shared, -1, width)
        keys, values = k_room.index_select(0, at.slot_M), v_room.index_select(0, at.slot_M)
        y = F.scaled_dot_product_attention(q, keys, values, attn_mask=at.mask(q, heads // shared))
        return y.reshape(q_MHTK.shape).transpose(0, 1).reshape(q_1HPK.shape)

    def convolve(self, place: Place, convolution: CausalConvolution, x_1PD: Tensor) -> Tensor:
        at, room = self.places, self.rooms[2 if place == "attention" else 3][:, 0]
        room[at.slot_P, at.position_P] = x_1PD[0]
        position_PW = at.position_P[:, None] + torch.arange(1 - convolution.taps, 1, device=room.device)
        # Zeros where a text has not begun.
        windows = room[at.slot_P[:, None], position_PW.clamp(min=0)] * (position_PW >= 0)[:, :, None]
        return x_1PD + (windows * convolution.weight.to(x_1PD.dtype)).sum(1)


class FixedPasses:
    """The passes of some blocks. Not safe to call from two threads at once."""

    def __init__(
        self,
        blocks: Mapping[int, Block],
        upstream: Callable[[int], Collection[int]],
        codebook_VD: Tensor,
        vocabulary: int,
        shelves: Mapping[int, Shelves],
    ) -> None:
        self._blocks, self._upstream, self._codebook = blocks, upstream, codebook_VD
        self._vocabulary, self._shelves = vocabulary, shelves
        # Captured passes read their numbers here: ids, slots and positions, one after another.
        self._inputs = torch.zeros(3 * MOST_POSITIONS, dtype=torch.int64, device=codebook_VD.device)
        # And the features that other holders computed.
        dtype = next((p.dtype for block in blocks.values() for p in block.parameters()), codebook_VD.dtype)
        # A stage that holds the block before it too may be asked for this one alone.
        rows = MOST_POSITIONS if any(map(upstream, blocks)) else 0
        self._given_PD = codebook_VD.new_zeros(rows, codebook_VD.shape[1], dtype=dtype)
        self._captured: dict[tuple[Any, ...], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        """By shape, number of rows, and how often the memory of each block moved."""
        self._device = codebook_VD.device
        self._own_streams: dict[int, torch.cuda.Stream] = {}
        if self._device.type == "cuda":
            self._stream, *own = (torch.cuda.Stream(self._device) for _ in range(1 + len(blocks)))  # type: ignore[no-untyped-call]
            self._own_streams = dict(zip(blocks, own, strict=True))
            # One pool for all: no two passes run at once, so they may use the same memory.
            self._pool = torch.cuda.graph_pool_handle()

    def place(
        self, caches: Mapping[int, Cache], asked: Sequence[int], num_new: int, goes_on: bool
    ) -> Shape | None:
        """Give a text's caches one slot on the shelves of all its blocks, with room for so many more
        positions. None where this is no pass for it."""
        longest = 1 << (num_new - 1).bit_length()
        if longest > MOST_NEW:
            return None
        first = next(iter(caches.values()))
        place, end = (first.shelf and first.shelf.capacity, first.slot), first.length + num_new
        fits = first.shelf is not None and first.shelf.capacity >= end
        if not fits or any((c.shelf and c.shelf.capacity, c.slot) != place for c in caches.values()):
            if not all(cache.begun for cache in caches.values()):
                return None
            shelves = [self._shelves[block].with_room(end) for block in caches]
            slot = next(i for i in itertools.count() if not any(i in shelf.texts for shelf in shelves))
            for shelf, cache in zip(shelves, caches.values(), strict=True):
                shelf.put(cache, slot)
        assert first.shelf is not None
        capacity = first.shelf.capacity
        most_texts = min(
            MOST_POSITIONS // longest,
            MOST_CACHED // capacity,
            MOST_VALUES // (longest * (len(asked) * self._vocabulary or self._codebook.shape[1])),
        )
        if not most_texts:
            return None
        most_texts = 1 << (most_texts.bit_length() - 1)
        return Shape(tuple(sorted(caches)), tuple(sorted(asked)), goes_on, capacity, longest, most_texts)

    def run(
        self,
        shape: Shape,
        ids: Sequence[Sequence[int]],
        caches: Sequence[Mapping[int, Cache]],
        given: Sequence[NDArray[Any]],
    ) -> Tensor:
        """Log-probs [asked blocks, M, T, V] behind the new ids of these texts, which their caches then hold,
        or without asked blocks the last one's features [1, M, T, D]. The next pass overwrites them. `given`:
        where the pass goes on from features, those at each text's ids."""
        assert len(ids) <= shape.most_texts
        cache_M = [next(iter(one.values())) for one in caches]
        slot_M, past_M = (np.array(one) for one in ([c.slot for c in cache_M], [c.length for c in cache_M]))
        count_M = np.array([len(one) for one in ids])
        num_rows = 1 << (len(ids) - 1).bit_length()
        # Each new position: its text, and which one of that text's.
        text = np.repeat(np.arange(len(ids)), count_M)
        step = np.arange(len(text)) - np.repeat(np.cumsum(count_M) - count_M, count_M)
        inputs = np.zeros((3, num_rows * shape.num_new), np.int64)
        inputs[1] = -1  # padding goes to the last slot
        values = [token for one in ids for token in one], slot_M[text], past_M[text] + step
        inputs[:, text * shape.num_new + step] = np.array(values)
        self._inputs[: inputs.size].copy_(torch.from_numpy(inputs.ravel()))
        if shape.goes_on:
            given_PD = np.zeros((inputs.shape[1], self._given_PD.shape[1]), np.float32)
            given_PD[text * shape.num_new + step] = np.concatenate(given)
            self._given_PD[: len(given_PD)].copy_(torch.from_numpy(given_PD))
        shelves = {block: shelf for block, cache in caches[0].items() if (shelf := cache.shelf) is not None}
        found_NPV = self._found(shape, num_rows, shelves)
        for one, length in zip(caches, count_M.tolist(), strict=True):
            for cache in one.values():
                cache.wrote(length)
        return found_NPV.view(len(found_NPV), num_rows, shape.num_new, -1)

    def _found(self, shape: Shape, num_rows: int, shelves: Mapping[int, Shelf]) -> Tensor:
        """Of the pass whose numbers lie in the inputs: captured at first, replayed from then on."""
        if self._device.type != "cuda":
            return self._forward(shape, num_rows, shelves)
        # Memory that moved is read elsewhere: what was captured before is of no use.
        key: tuple[Any, ...] = (shape, num_rows, *(shelves[block].num_moves for block in shape.blocks))
        known = self._captured.pop(key) if key in self._captured else None
        if known is None:
            # Each keeps the memory of its log-probs.
            at = shape.blocks, shape.capacity
            for old in [one for one in self._captured if (one[0].blocks, one[0].capacity) == at]:
                if old[2:] != key[2:]:
                    del self._captured[old]
        self._captured[key] = graph, found_NPV = known or self._capture(shape, num_rows, shelves)
        if len(self._captured) > MOST_GRAPHS:
            del self._captured[next(iter(self._captured))]
        graph.replay()
        return found_NPV

    def _capture(
        self, shape: Shape, num_rows: int, shelves: Mapping[int, Shelf]
    ) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        outside, graph = torch.cuda.current_stream(self._device), torch.cuda.CUDAGraph()
        with _capturing:
            # Once before: libraries choose kernels and take memory at their first call, which no capture
            # allows. It writes the caches as the replay will, with the same values.
            self._stream.wait_stream(outside)
            with torch.cuda.stream(self._stream):
                self._forward(shape, num_rows, shelves)
            outside.wait_stream(self._stream)
            # Of this thread alone: another may be loading newer weights to the same GPU.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                found_NPV = self._forward(shape, num_rows, shelves)
        return graph, found_NPV

    def _forward(self, shape: Shape, num_rows: int, shelves: Mapping[int, Shelf]) -> Tensor:
        ids_P, slot_P, position_P = self._inputs[: 3 * num_rows * shape.num_new].view(3, -1)
        said: list[Tensor] = []
        features = self._given_PD[None, : len(ids_P)] if shape.goes_on else None
        # Blocks that take nothing from one another run side by side: with a token of each text, one alone
        # leaves most of a GPU idle.
        independent = not any(self._upstream(block) for block in shape.blocks)
        streams = self._own_streams if independent else {}
        for block in shape.blocks:
            own = streams.get(block)
            if own is not None:
                own.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(own) if own is not None else contextlib.nullcontext():
                places = FixedPlaces(slot_P, position_P, num_rows, shape.capacity)
                upstream = features if self._upstream(block) else None
                output = self._blocks[block](
                    ids_P[None],
                    self._codebook,
                    upstream_BTD=upstream,
                    cache=FixedCache(shelves[block], places),
                )
                features = output.features_BTD
                if block in shape.asked:
                    logits_PV = output.logits_of(output.z_hat_BTD[0]).float()
                    said.append(F.log_softmax(logits_PV, dim=-1))
        for block in shape.blocks if streams else ():
            torch.cuda.current_stream(self._device).wait_stream(streams[block])
        if said:
            return torch.stack(said)
        assert features is not None, "a block ran"
        return features
