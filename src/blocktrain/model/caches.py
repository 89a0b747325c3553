"""What blocks remember of texts between passes, and the memory that many texts share.

A text's cache has memory of its own until it goes on in one pass with others. From then on it has a slot on a
shelf: tensors with room for many texts, so that one operation reads or writes the caches of all. Before, each
text had its own operations in each layer of each block, and with 64 clients these took most of a stage's
time.

Shapes as in layers.py, plus N for the batch of one, M texts on one shelf, P new
positions of these texts in a row and W taps of a convolution.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from blocktrain.model.layers import CausalConvolution, LayerCache, Place

LEAST_CAPACITY = 64
MOST_TOGETHER = 40
"""New positions of a text that goes on together with others, a whole draft and some more: all are padded to
the longest. A prompt has more work of its own than operations to save."""
FIRST_SLOTS, FIRST_BYTES = 64, 1 << 30
"""Slots that a shelf begins with, fewer where those of all blocks of a holder would take more memory than
this. On a processor a slot takes memory when a text gets it, so a shelf hardly ever moves."""
KEPT_SLOTS = 16
"""A shelf without texts keeps its memory where no more slots than these were used."""


@dataclass(eq=False)
class Cache:
    """Keys, values and convolution tails of the positions a block has already seen."""

    layers: list[LayerCache] = field(default_factory=list)
    length: int = 0
    shelf: Shelf | None = None
    """Where the memory of the layers lies, if others share it."""
    slot: int = 0
    ahead: bool = False
    """True if others wrote positions which the layers have not counted. They count when somebody asks: with
    64 texts, counting in each layer after each token took longer than the rest of the bookkeeping."""

    @property
    def begun(self) -> bool:
        """True if it holds something whose shape a slot could take."""
        return self.length > 0 and any(part.room is not None for part in self.layers[0].parts)

    def truncate(self, length: int) -> None:
        """Forget every position from `length` on."""
        # The memory stays: a rejected draft is forgotten once per traversal, and its places are written again
        # at once.
        if length < self.length:
            self.length = length
            for layer in self.layers:
                layer.truncate(length)

    def layer(self, index: int) -> LayerCache:
        return self.layers[index]

    def positions(self, length: int) -> slice:
        """Where the next `length` tokens lie in the context."""
        self.settle()
        if self.shelf is not None and self.length + length > self.shelf.capacity:
            # What does not fit there any more gets memory of its own as it grows.
            self.leave_shelf()
        return slice(self.length, self.length + length)

    def advance(self, length: int) -> None:
        self.length += length

    def wrote(self, length: int) -> None:
        """So many positions were written into the memory of the layers from elsewhere."""
        self.length += length
        self.ahead = True

    def settle(self) -> None:
        """Have the layers know the length; see `ahead`."""
        if self.ahead:
            self.ahead = False
            for layer in self.layers:
                layer.settle(self.length)

    def leave_shelf(self) -> None:
        """Give the slot away. The layers still see it, until they grow or are put elsewhere."""
        if self.shelf is not None:
            del self.shelf.texts[self.slot]
            self.shelf = None

    def first(self, length: int) -> Cache:
        """The first positions, in the memory of this cache: to be copied before it goes on."""
        self.settle()
        other = Cache([LayerCache() for _ in self.layers], length)
        for layer, own_layer in zip(self.layers, other.layers, strict=True):
            for part, own in zip(layer.parts, own_layer.parts, strict=True):
                if part.room is not None:
                    own.room, own.length = part.room.narrow(part.dim, 0, length), length
        return other

    def copy(self) -> Cache:
        """The same with memory of its own."""
        self.settle()
        return Cache([layer.copy() for layer in self.layers], self.length)


class Shelf:
    """Room for the caches of many texts of up to `capacity` positions: a slot for each.

    A fixed shelf stays where it is in memory while it has slots enough, and has one more, the last, that no
    text gets (see graphs.py).
    """

    def __init__(self, capacity: int, fixed: bool = False, first_bytes: int = 0) -> None:
        self.capacity, self.fixed, self.first_bytes = capacity, fixed, first_bytes
        self.texts: weakref.WeakValueDictionary[int, Cache] = weakref.WeakValueDictionary()
        """By slot. A cache that nobody holds any more leaves its slot free."""
        self.num_slots = 0
        self.num_used = 0
        """The first slots that texts had so far; in the others are zeros still."""
        self.num_moves = 0
        """How often the memory was taken from elsewhere."""
        self.rooms: list[list[Tensor | None]] = []
        """For each layer, the tensors behind `LayerCache.parts`: [slots, N, ..., capacity, ...]."""

    def put(self, cache: Cache, slot: int | None = None) -> None:
        """Give the cache a slot, or this one, with what it holds."""
        cache.settle()
        # Nobody is here any more: the memory of the busiest moment goes, and the shelf begins small again.
        if not self.texts and not self.fixed and self.num_used > KEPT_SLOTS:
            self.num_slots, self.num_used, self.rooms = 0, 0, []
        # The lowest that is free: texts stay close together, and slots that follow one another are read
        # without a copy.
        if slot is None:
            slot = next(i for i in range(self.num_slots + 1) if i not in self.texts)
        while slot >= self.num_slots:
            self._add_slots(cache)
        # Before the copies: what is still in the old slot is read there, and nobody takes it meanwhile.
        cache.leave_shelf()
        for rooms, layer in zip(self.rooms, cache.layers, strict=True):
            for room, part in zip(rooms, layer.parts, strict=True):
                held = part.held()
                if room is not None and held is not None:
                    own = room[slot]
                    own.narrow(part.dim, 0, part.length).copy_(held)
                    # Zeros behind it: a masked position counts 0 times what is there, which for the infinity
                    # of an earlier text is no number.
                    if slot < self.num_used:
                        own.narrow(part.dim, part.length, self.capacity - part.length).zero_()
                    part.room = own
        self.num_used = max(self.num_used, slot + 1)
        cache.shelf, cache.slot = self, slot
        self.texts[slot] = cache

    def _add_slots(self, cache: Cache) -> None:
        """As many as are wanted to begin with, then as many more as there are."""
        parts = [part for layer in cache.layers for part in layer.parts]
        sizes = [room.nbytes // room.shape[part.dim] for part in parts if (room := part.room) is not None]
        first = min(FIRST_SLOTS, self.first_bytes // (self.capacity * sum(sizes)))
        self.num_slots += max(4, self.num_slots, first)
        self.num_moves += 1
        old, self.rooms = self.rooms, []
        for i, layer in enumerate(cache.layers):
            self.rooms.append([])
            for j, part in enumerate(layer.parts):
                room = None
                if part.room is not None:
                    shape = [self.num_slots + self.fixed, *part.room.shape]
                    shape[1 + part.dim] = self.capacity
                    room = _untouched_zeros(shape, part.room)
                    before = old[i][j] if old else None
                    if before is not None:
                        room[: self.num_used].copy_(before[: self.num_used])
                self.rooms[i].append(room)
        for slot, text in self.texts.items():
            for rooms, layer in zip(self.rooms, text.layers, strict=True):
                for room, part in zip(rooms, layer.parts, strict=True):
                    part.room = None if room is None else room[slot]


def _untouched_zeros(shape: Sequence[int], like: Tensor) -> Tensor:
    """Zeros of the type of another tensor, which on a processor take memory when something is written."""
    if like.device.type != "cpu":
        return like.new_zeros(shape)
    # torch writes its zeros. A stage stood still for a second while a shelf of 12 texts got room for 18.
    size = math.prod(shape) * like.element_size()
    return torch.from_numpy(np.zeros(size, np.uint8)).view(like.dtype).view(*shape)


class Shelves:
    """The shelves of one block, or of several that share caches: one for each power of two of positions."""

    def __init__(self, fixed: bool = False, first_bytes: int = FIRST_BYTES) -> None:
        self._fixed, self._first_bytes = fixed, first_bytes
        self._shelves: dict[int, Shelf] = {}

    def with_room(self, end: int) -> Shelf:
        """The shelf for texts of so many positions."""
        # Powers of two: texts of about one length meet on one shelf, and a text moves seldom.
        capacity = max(LEAST_CAPACITY, 1 << (end - 1).bit_length())
        return self._shelves.setdefault(capacity, Shelf(capacity, self._fixed, self._first_bytes))

    def copy_of(self, cache: Cache, length: int, num_new: int) -> Cache:
        """Another cache with the first positions of this one, for a text that goes on by so many."""
        other = cache.first(length)
        if num_new > MOST_TOGETHER or not other.begun:
            return other.copy()
        # Copied once, to where it stays for a while: memory that is new each time took longer than the copy.
        self.with_room(length + num_new + MOST_TOGETHER).put(other)
        return other

    def hold(self, caches: Sequence[Cache], lengths: Sequence[int]) -> None:
        """Have those caches on a shelf that are to go on together, with room for so many new positions."""
        for cache, length in zip(caches, lengths, strict=True):
            end = cache.length + length
            # A stretch this long keeps the processor busy by itself.
            if length > MOST_TOGETHER or not cache.begun:
                continue
            if cache.shelf is None or cache.shelf.capacity < end:
                self.with_room(end).put(cache)


class Placement:
    """Where the new positions of some texts stand: in the row of a pass, and in their slots."""

    def __init__(
        self, slots: bytes, past: bytes, first: bytes, counts: bytes, span: int, device: str
    ) -> None:
        slot_M, past_M, first_M, count_M = (
            np.frombuffer(one, np.int64) for one in (slots, past, first, counts)
        )
        longest = int(count_M.max())
        self.span, self.shape_MT = span, (len(slot_M), longest)
        is_row = int(slot_M[-1]) - int(slot_M[0]) + 1 == len(slot_M)
        self.first_slot = int(slot_M[0]) if is_row else None
        """None where the slots do not follow one another."""
        ends = [*(np.flatnonzero(np.diff(slot_M) != 1) + 1).tolist(), len(slot_M)]
        starts = [0, *ends[:-1]]
        self.runs = [
            (slice(a, b), slice(int(slot_M[a]), int(slot_M[a]) + b - a))
            for a, b in zip(starts, ends, strict=True)
        ]
        """The texts whose slots do follow one another, and these slots."""
        # Each new position: its text, and which one of that text's.
        text_P = np.repeat(np.arange(len(slot_M)), count_M)
        step_P = np.arange(len(text_P)) - np.repeat(np.cumsum(count_M) - count_M, count_M)
        # Padded with the text's last one.
        within_MT = np.minimum(np.arange(longest), count_M[:, None] - 1)
        pieces = [
            slot_M,
            slot_M[text_P],
            past_M[text_P] + step_P,
            first_M[text_P] + step_P,
            text_P * longest + step_P,
            (first_M[:, None] + within_MT).ravel(),
            (past_M[:, None] + within_MT).ravel(),
        ]
        # One array for all: each transfer to a GPU takes as long as a kernel.
        whole = torch.from_numpy(np.concatenate(pieces)).to(device)
        parts = torch.split(whole, [len(piece) for piece in pieces])
        self.slot_M, self.slot_P, self.position_P, self.row_P, self.place_P, self.row_MT, position_MT = parts
        """`row_P`: where each new position stands in the row of the pass; `place_P`: among padded ones."""
        self._position_MT = position_MT.view(self.shape_MT)
        self._mask: Tensor | None = None
        self.least_position = int(past_M.min())

    def mask(self, q: Tensor, queries: int) -> Tensor:
        """What each position does not see, as minus infinity, for so many queries at each."""
        if self._mask is None or self._mask.dtype != q.dtype or self._mask.shape[2] != q.shape[2]:
            # The same in all layers, and as numbers: kernels would turn truth values into these every time.
            later = self._position_MT[:, :, None] < torch.arange(self.span, device=q.device)
            mask = torch.zeros(later.shape, dtype=q.dtype, device=q.device).masked_fill_(later, -torch.inf)
            self._mask = mask.repeat(1, queries, 1)[:, None]
        return self._mask


# The blocks of a stage hold the same texts, mostly in the same slots: one placement then serves all of them.
_placement = functools.lru_cache(maxsize=4)(Placement)


class Together:
    """Texts on one shelf that go on in one pass: the new positions of all are read and written at once."""

    def __init__(self, shelf: Shelf, caches: Sequence[Cache], spans: Sequence[tuple[int, int]]) -> None:
        """`spans`: where the new positions of each text begin in the row of the pass, and how many they
        are."""
        self.shelf = shelf
        # In order of slots: where these follow one another, keys need no copy.
        texts = [(cache.slot, cache.length, *span) for cache, span in zip(caches, spans, strict=True)]
        slots, past, first, counts = np.array(sorted(texts), np.int64).T
        # Positions that the longest text has now, and a few more: kernels want masks of such widths.
        span = min(shelf.capacity, -(-int((past + counts).max()) // 16) * 16)
        room = next(room for rooms in shelf.rooms for room in rooms if room is not None)
        arrays = (one.tobytes() for one in (slots, past, first, counts))
        self.placement = _placement(*arrays, span, str(room.device))

    @property
    def row_P(self) -> Tensor:
        """Where each new position stands in the row of the pass."""
        return self.placement.row_P

    def attend(self, layer: int, q_HTK: Tensor, k_GTK: Tensor, v_GTK: Tensor) -> Tensor:
        """Attention [H, P, K] of the texts' new positions, from those of the whole pass. Several heads of
        queries may share one of keys."""
        at = self.placement
        k_room, v_room = (room.flatten(1, 2) for room in self._rooms(layer)[:2])
        k_room[at.slot_P, :, at.position_P] = k_GTK[:, at.row_P].transpose(0, 1)
        v_room[at.slot_P, :, at.position_P] = v_GTK[:, at.row_P].transpose(0, 1)
        num_texts, longest = at.shape_MT
        heads, queries = len(k_GTK), len(q_HTK) // len(k_GTK)
        # Queries that share a head of keys stand one after another as if they were more positions: with a
        # mask, no fast kernel knows of shared heads.
        q_HMTK = q_HTK[:, at.row_MT].view(len(q_HTK), num_texts, longest, -1)
        q = q_HMTK.transpose(0, 1).reshape(num_texts, heads, queries * longest, -1)
        mask = at.mask(q, queries)
        if q.device.type == "cpu" and q.dtype == torch.float32:
            y = _few_rows_attention(q, k_room, v_room, at, mask)
        else:
            keys, values = self._texts(k_room), self._texts(v_room)
            y = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        y_HPK = y.reshape(num_texts, len(q_HTK), longest, -1).transpose(0, 1).flatten(1, 2)
        return y_HPK[:, at.place_P]

    def _texts(self, room: Tensor) -> Tensor:
        """The positions so far of these texts alone."""
        at = self.placement
        seen = room.narrow(2, 0, at.span)
        if at.first_slot is None:
            return seen.index_select(0, at.slot_M)
        return seen.narrow(0, at.first_slot, len(at.slot_M))

    def windows(self, layer: int, place: Place, x_PND: Tensor, taps: int) -> Tensor:
        """The inputs [P, W, N, D] that a convolution sees at each new position, whose own are `x_PND`."""
        at, room = self.placement, self._rooms(layer)[2 if place == "attention" else 3]
        # Written first: a convolution sees the position itself too.
        room[at.slot_P, :, at.position_P] = x_PND
        position_PW = at.position_P[:, None] + torch.arange(1 - taps, 1, device=room.device)
        if at.least_position >= taps - 1:
            return room[at.slot_P[:, None], :, position_PW]
        # Zeros where a text has not begun.
        return room[at.slot_P[:, None], :, position_PW.clamp(min=0)] * (position_PW >= 0)[:, :, None, None]

    def _rooms(self, layer: int) -> list[Tensor]:
        rooms = [room for room in self.shelf.rooms[layer] if room is not None]
        assert len(rooms) == len(self.shelf.rooms[layer]) or len(rooms) == 2, "keys and values, or all"
        return rooms


def _few_rows_attention(
    q_MHTK: Tensor, k_room: Tensor, v_room: Tensor, at: Placement, mask_M1TS: Tensor
) -> Tensor:
    """Keys and values of many texts come from main memory, and the products of numpy read them faster than
    torch's kernel: 8 texts of 5 rows over 176 positions of 6 heads take 0.54 instead of 0.82 ms, over 500
    positions 1.2 instead of 2.2. They are read where they lie: of texts whose slots do not follow one
    another, a copy took as long as the products of two layers."""
    k, v = (room.numpy()[:, :, : at.span] for room in (k_room, v_room))
    q_MHKT = (q_MHTK * q_MHTK.shape[-1] ** -0.5).transpose(2, 3).contiguous().numpy()
    scores_MHST = np.empty((*q_MHTK.shape[:2], at.span, q_MHTK.shape[2]), np.float32)
    for texts, slots in at.runs:
        np.matmul(k[slots], q_MHKT[texts], out=scores_MHST[texts])
    shares_MHTS = (torch.from_numpy(scores_MHST).transpose(2, 3) + mask_M1TS).softmax(dim=-1).contiguous()
    y_MHTK = np.empty(q_MHTK.shape, np.float32)
    for texts, slots in at.runs:
        np.matmul(shares_MHTS[texts].numpy(), v[slots], out=y_MHTK[texts])
    return torch.from_numpy(y_MHTK)


class PackedCache:
    """Caches of several texts that share one forward pass: a batch of one, their new tokens in a row."""

    def __init__(self, parts: Sequence[Cache], lengths: Sequence[int], shelves: Shelves) -> None:
        self.parts, self.lengths = list(parts), list(lengths)
        if len(self.parts) > 1:
            shelves.hold(self.parts, self.lengths)
        ends = np.cumsum(self.lengths)
        self.spans = [(int(end) - length, length) for end, length in zip(ends, self.lengths, strict=True)]
        by_shelf: dict[int, list[int]] = defaultdict(list)
        self.alone: list[int] = []
        """Texts that share no memory, and those with much to read: these go one by one."""
        for m, (part, length) in enumerate(zip(self.parts, self.lengths, strict=True)):
            part.positions(length)  # which leaves a shelf that is too short
            if part.shelf is None or length > MOST_TOGETHER or len(self.parts) == 1:
                self.alone.append(m)
            else:
                by_shelf[part.shelf.capacity].append(m)
        self.groups = []
        for members in by_shelf.values():
            shelf = self.parts[members[0]].shelf
            assert shelf is not None
            chosen = [self.parts[m] for m in members]
            self.groups.append(Together(shelf, chosen, [self.spans[m] for m in members]))
        self._together = [m for members in by_shelf.values() for m in members]

    def layer(self, index: int) -> PackedLayerCache:
        return PackedLayerCache(self, index)

    def positions(self, length: int) -> Tensor:
        assert length == sum(self.lengths), "every token belongs to one of the packed texts"
        spans = zip(self.parts, self.lengths, strict=True)
        found = np.concatenate([np.arange(part.length, part.length + count) for part, count in spans])
        # On the device at once: each table that is read with it would fetch it by itself.
        return torch.from_numpy(found).to(self.groups[0].row_P.device if self.groups else "cpu")

    def advance(self, length: int) -> None:
        # The layers of texts that go alone have counted for themselves when they grew.
        for m in self.alone:
            self.parts[m].advance(self.lengths[m])
        for m in self._together:
            self.parts[m].wrote(self.lengths[m])


class PackedLayerCache:
    """One layer's caches of several texts whose new positions lie one after another along T.

    What has weights runs once over all positions; attention and convolutions run once for each shelf.
    """

    def __init__(self, cache: PackedCache, index: int) -> None:
        self.cache, self.index = cache, index

    def attend(self, q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor) -> Tensor:
        cache, y_BHTK = self.cache, torch.empty_like(q_BHTK)
        for group in cache.groups:
            y_BHTK[0].index_copy_(1, group.row_P, group.attend(self.index, q_BHTK[0], k_BHTK[0], v_BHTK[0]))
        for m in cache.alone:
            at, layer = slice(cache.spans[m][0], sum(cache.spans[m])), cache.parts[m].layers[self.index]
            y_BHTK[:, :, at] = layer.attend(q_BHTK[:, :, at], k_BHTK[:, :, at], v_BHTK[:, :, at])
        return y_BHTK

    def convolve(self, place: Place, convolution: CausalConvolution, x_BTD: Tensor) -> Tensor:
        cache, y_BTD = self.cache, torch.empty_like(x_BTD)
        for group in cache.groups:
            x_PD = x_BTD[0, group.row_P]
            windows = group.windows(self.index, place, x_PD[:, None], convolution.taps)
            mixed_PD = (windows[:, :, 0] * convolution.weight.to(x_PD.dtype)).sum(1)
            y_BTD[0].index_copy_(0, group.row_P, x_PD + mixed_PD)
        for m in cache.alone:
            at, layer = slice(cache.spans[m][0], sum(cache.spans[m])), cache.parts[m].layers[self.index]
            y_BTD[:, at] = layer.convolve(place, convolution, x_BTD[:, at])
        return y_BTD
