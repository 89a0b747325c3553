"""Some of a checkpoint's blocks on one device, run for several sessions in one forward pass.

What comes out for a position is one row: the sum over the asked blocks of pooling weight times log-probs.
With fixed weights the rows of different holders add up to the consensus, which the engine normalises. Where
weights follow the text, those of the asked blocks have sum one, and their logarithms go with the row. Parts
of a serial model may go on from features that another holder computed, and give features to the next. Knows
nothing of sockets, sessions' names or time; not safe to call from two threads at once.
"""

from __future__ import annotations

import copy
import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from blocktrain.model.block import Block, BlockOutput
from blocktrain.model.caches import FIRST_BYTES, Cache, PackedCache, Shelves
from blocktrain.model.graphs import FixedPasses, Shape
from blocktrain.model.packed import is_packable, packed
from blocktrain.model.pooling import LEAST_WEIGHT, TrackRecord
from blocktrain.model.quick import PlainBlocks, QuickBlocks, is_quickenable
from blocktrain.model.sampling import Sampler, best_scores, normalised
from blocktrain.model.sweep import begin_sweep, refine, sweep_noise
from blocktrain.training.checkpoint import Checkpoint
from blocktrain.wire import frames
from blocktrain.wire.frame_metadata import Draw
from blocktrain.wire.frames import Codec

FEW_VALUES = 4096
"""Log-probs of a work whose best are found in its pass, with those of the others; the noise of so many takes
0.1 ms, and of 32,768 a millisecond."""
KEPT_ROWS, KEPT_VALUES = 128, 1 << 20
"""Rows and log-probs of the last positions that a cache keeps at most where pooling follows the text. So far
back a wrong draft may lie without the text being sent again."""


class RoughBlocks(Protocol):
    """Rough rows for drafts: `model.quick`. A cache belongs to the steps that made it."""

    def new_cache(self) -> Any: ...

    def step(self, tokens: Sequence[int], caches: Sequence[Any]) -> Tensor: ...

    def extend(self, tokens: Sequence[int], cache: Any) -> None: ...


class WeighedRows(NamedTuple):
    """The asked blocks' rows [R, V] as one, or what a part of a serial model hands on."""

    rows: NDArray[Any]
    log_weights: NDArray[np.float64]
    """[R, asked blocks], not normalised: what the blocks count for at each row where pooling follows the
    text. [R, 0] where it does not."""
    features_TD: NDArray[Any] | None = None
    """Of all new tokens, where the work hands on; there are no rows then."""
    encoded: tuple[Codec, bytes] | None = None
    """Rows and log-weights as they travel, where the work asked for it and they are finite."""
    draw: Draw | None = None
    """What the best tokens were chosen with, where these alone are encoded."""


@dataclass
class BlockCache:
    """What is kept of one text for one block between passes."""

    layers: Cache
    record: TrackRecord | None
    """None where pooling does not follow the text."""
    ids: list[int] = field(default_factory=list)
    """What it holds: of a text that goes on, more may have been asked for by now, or something else."""


@dataclass
class RowWork:
    """New tokens of one text, behind what its caches already hold, and the rows they ask for."""

    ids: Sequence[int]
    num_rows: int
    """Rows asked for: those of the last `num_rows` ids."""
    blocks: tuple[int, ...]
    """Whose rows are asked for; none where the work hands on."""
    caches: dict[int, BlockCache]
    """One per block that must run; see `HeldBlocks.new_caches`."""
    base: int = 0
    """Positions to keep in the caches; what they hold beyond is forgotten first."""
    exact: bool = False
    """One row in float64, from the ids alone; the caches say which blocks run, and stay as they are."""
    upstream_TD: NDArray[Any] | None = None
    """What the parts before made of the ids, where another holder has them."""
    like: dict[int, BlockCache] | None = None
    """Another text's caches to begin with."""
    known: Sequence[int] = ()
    """What they must hold before the ids. A traversal of that text may have been given up before it ran, and
    its caches then still hold a draft that was wrong."""
    codec: Codec | None = None
    """How the rows will travel: those of a pass are encoded at once."""
    draw: Draw | None = None
    """Where the best tokens alone will travel: how the engine chooses."""

    @property
    def hands_on(self) -> bool:
        return not self.blocks

    @property
    def runnable(self) -> bool:
        """Whether the caches hold what the ids continue."""
        held, base = (self.like or self.caches).values(), self.base
        if self.like is not None and not all(cache.ids[:base] == self.known for cache in held):
            return False
        # A loop: this is asked for every text of a pass, and a generator takes longer than what it does.
        for cache in held:
            if cache.layers.length < base or (cache.record is not None and not cache.record.continues(base)):
                return False
        return True


@dataclass(frozen=True, kw_only=True)
class Refinement:
    """New tokens to be written at once behind known ones."""

    known: Sequence[int]
    num_new: int
    seed: int
    position: int
    """Where in the whole text the first new token stands."""
    passes: int


class HeldBlocks:
    def __init__(
        self,
        checkpoint: Checkpoint,
        held: Sequence[int],
        fixed_shapes: bool = False,
        first_bytes: int = FIRST_BYTES,
    ) -> None:
        """`held` names the checkpoint's loaded blocks, in the same order. `fixed_shapes`: texts that go on by
        a few tokens do so in passes of fixed shapes, which a GPU captures and replays; the caches of all
        blocks for texts of one length then begin with about `first_bytes`."""
        self.blocks: dict[int, Block] = dict(zip(held, checkpoint.blocks, strict=True))
        self.objective = checkpoint.objective
        self.codebook = checkpoint.codebook_VD
        self.pooling = checkpoint.pooling
        self.vocabulary = checkpoint.tokenizer.vocabulary
        self.context = checkpoint.recipe.model.context
        # Laid out for few rows: a pass of 17 tokens takes 12.6 instead of 15.2 ms (docs/history).
        self._running = {
            index: packed(block) if is_packable(block) else block for index, block in self.blocks.items()
        }
        parameter = next((p for block in self.blocks.values() for p in block.parameters()), self.codebook)
        self.dtype = parameter.dtype
        self._shelves = {
            index: Shelves(fixed_shapes, first_bytes // len(self.blocks)) for index in self.blocks
        }
        self._fixed: FixedPasses | None = None
        if fixed_shapes:
            self._fixed = FixedPasses(
                self._running, self.objective.upstream, self.codebook, self.vocabulary, self._shelves
            )
        self._hands_features = self.objective.is_serial or any(map(self.objective.upstream, held))
        """Whether what a block computed goes into others, here or elsewhere."""
        self._exact_blocks: dict[int, Block] = {}
        self._steps: dict[tuple[int, ...], RoughBlocks] = {}

    def needed(self, blocks: Sequence[int]) -> list[int]:
        """The blocks that must run for these: themselves, and those held here whose features they take."""
        upstream = {other for block in blocks for other in self.objective.upstream(block)}
        return sorted({*blocks, *(upstream & self.blocks.keys())})

    def new_caches(self, blocks: Sequence[int], alone: bool = False) -> dict[int, BlockCache]:
        """Of the blocks that must run for these; of these `alone` where their features come from elsewhere,
        or go there."""

        def record() -> TrackRecord | None:
            return TrackRecord(self.pooling.decays) if self.pooling.follows_text else None

        needed = blocks if alone else self.needed(blocks)
        return {block: BlockCache(self.blocks[block].new_cache(), record()) for block in needed}

    def is_quick(self, blocks: Sequence[int]) -> bool:
        """Whether `steps` of these are `QuickBlocks`."""
        return all(is_quickenable(self._running[block]) for block in blocks)

    def steps(self, blocks: tuple[int, ...]) -> RoughBlocks:
        """These blocks' rough next rows, for drafts."""
        # Kept: all requests draft with the same rounded matrices.
        if blocks not in self._steps:
            chosen = [self._running[block] for block in blocks]
            quick = [block for block in chosen if is_quickenable(block)]
            all_quick = len(quick) == len(chosen)
            self._steps[blocks] = (
                QuickBlocks(quick, self.codebook) if all_quick else PlainBlocks(chosen, self.codebook)
            )
        return self._steps[blocks]

    @torch.inference_mode()
    def rows(self, works: Sequence[RowWork]) -> list[WeighedRows]:
        """The rows of each work; its caches then hold its ids too."""
        if works[0].exact:
            return [self._exact(work) for work in works]
        # Copies first: a text that others begin with may itself go on in this pass.
        for work in works:
            assert work.runnable, "the caches lack positions before the new ids"
            for index, other in (work.like or {}).items():
                cache = work.caches[index]
                cache.layers = self._shelves[index].copy_of(other.layers, work.base, len(work.ids))
                cache.record, cache.ids = copy.deepcopy(other.record), other.ids
        for work in works:
            ids: list[int] = []
            for cache in work.caches.values():
                cache.layers.truncate(work.base)
                # One list for all blocks: they hold the same tokens.
                ids = ids or [*cache.ids[: work.base], *work.ids]
                cache.ids = ids
        alike: dict[tuple[Shape | None, tuple[int, ...]], list[int]] = defaultdict(list)
        for i, work in enumerate(works):
            shape = self._fixed_shape(work)
            alike[shape, work.blocks if shape is not None else ()].append(i)
        answers: dict[int, WeighedRows] = {}
        for (shape, _), members in alike.items():
            # In the order in which their caches lie, so that rows need not be gathered for them.
            members.sort(key=lambda i: next(iter(works[i].caches.values())).layers.slot)
            size = len(works) if shape is None else shape.most_texts
            for some in (members[i : i + size] for i in range(0, len(members), size)):
                chosen = [works[i] for i in some]
                rows = self._packed_rows(chosen) if shape is None else self._fixed_rows(shape, chosen)
                answers |= zip(some, rows, strict=True)
        return [answers[i] for i in range(len(works))]

    def _fixed_shape(self, work: RowWork) -> Shape | None:
        """The shape in which the work goes on together with others; None where it does not."""
        if self._fixed is None:
            return None
        caches = {block: cache.layers for block, cache in work.caches.items()}
        # Where pooling follows the text, every block that runs must know how well it predicted.
        every = self.pooling.follows_text and not work.hands_on
        wanted = tuple(caches) if every else work.blocks
        return self._fixed.place(caches, wanted, len(work.ids), work.upstream_TD is not None)

    def _fixed_rows(self, shape: Shape, works: Sequence[RowWork]) -> list[WeighedRows]:
        """Of works that asked the same blocks, in one pass of a fixed shape."""
        assert self._fixed is not None, "a shape is one of its passes"
        caches = [{block: cache.layers for block, cache in work.caches.items()} for work in works]
        given = [work.upstream_TD for work in works if work.upstream_TD is not None]
        log_probs_NMTV = self._fixed.run(shape, [work.ids for work in works], caches, given)
        if works[0].hands_on:
            handed = _handed_on(log_probs_NMTV.flatten(1, 2)).features_TD
            assert handed is not None
            own = [handed[m * shape.num_new :][: len(work.ids)].copy() for m, work in enumerate(works)]
            return [WeighedRows(np.empty((0, 0)), np.empty((0, 0)), one) for one in own]
        said = []
        if self.pooling.follows_text:
            for block, log_probs_MTV in zip(shape.asked, log_probs_NMTV, strict=True):
                # Without the rows of padding.
                pairs = zip(log_probs_MTV, works, strict=False)
                recorded = self._recorded(works, block, [row_TV[: len(work.ids)] for row_TV, work in pairs])
                if block in works[0].blocks:
                    said.append(_joined(recorded))
        else:
            asked = [
                m * shape.num_new + t
                for m, work in enumerate(works)
                for t in range(len(work.ids) - work.num_rows, len(work.ids))
            ]
            index = torch.tensor(asked, device=log_probs_NMTV.device)
            said = [(rows_RV, np.empty(0)) for rows_RV in log_probs_NMTV.flatten(1, 2)[:, index]]
        return self._answers(works, self._weighed(works[0].blocks, said))

    def _packed_rows(self, works: Sequence[RowWork]) -> list[WeighedRows]:
        """Of any works, the new tokens of all in one row."""
        device = self.codebook.device
        found: dict[int, tuple[dict[int, int], Tensor, NDArray[np.float64]]] = {}
        """What each block said to some works: where the rows of each begin, and those of all."""
        features = [self._upstream(work, self.dtype) for work in works]
        ids, ids_of = torch.empty(0), None
        # In order of blocks, because a block may take the features of the one before it.
        for index in sorted(self.blocks):
            chosen = [i for i, work in enumerate(works) if index in work.caches]
            if not chosen:
                continue
            # Attention keeps the works apart by their caches.
            lengths = [len(works[i].ids) for i in chosen]
            caches = [works[i].caches[index].layers for i in chosen]
            # One work alone needs no packing, which would cost it a third more.
            shelves = self._shelves[index]
            packed_cache = PackedCache(caches, lengths, shelves) if len(caches) > 1 else caches[0]
            if chosen != ids_of:
                ids = torch.tensor([[token for i in chosen for token in works[i].ids]], device=device)
                ids_of = chosen
            parts = [part for i in chosen if (part := features[i]) is not None]
            upstream = torch.cat(parts, dim=1) if parts and self.objective.upstream(index) else None
            output = self._running[index](ids, self.codebook, upstream_BTD=upstream, cache=packed_cache)
            if self._hands_features:
                for i, part in zip(chosen, torch.split(output.features_BTD, lengths, dim=1), strict=True):
                    features[i] = part
            # A block may run only because another takes its output; then it is not in the sum.
            if any(index in works[i].blocks for i in chosen) or self.pooling.follows_text:
                counts = [works[i].num_rows for i in chosen]
                starts = dict(zip(chosen, itertools.accumulate(counts, initial=0), strict=False))
                found[index] = starts, *self._said([works[i] for i in chosen], index, output)
        # Works that asked the same blocks are weighed at once, and come from the device at once.
        alike: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for i, work in enumerate(works):
            alike[work.blocks].append(i)
        answers: dict[int, WeighedRows] = {}
        for blocks, members in alike.items():
            if not blocks:
                answers |= {i: _handed_on(features[i]) for i in members}
                continue
            said = []
            for starts, rows_RV, logs in (found[block] for block in sorted(blocks)):
                if len(members) < len(starts):
                    own = [r for i in members for r in range(starts[i], starts[i] + works[i].num_rows)]
                    rows_RV, logs = rows_RV[torch.tensor(own, device=device)], logs[own]
                said.append((rows_RV, logs))
            whole = self._weighed(blocks, said)
            answers |= zip(members, self._answers([works[i] for i in members], whole), strict=True)
        return [answers[i] for i in range(len(works))]

    def _answers(self, works: Sequence[RowWork], whole: WeighedRows) -> list[WeighedRows]:
        """The part of each work, in the order of the rows, encoded as it asked."""
        codecs = {work.codec for work in works} - {None}
        finite = bool(codecs) and np.isfinite(whole.rows).all() and np.isfinite(whole.log_weights).all()
        wholly = codecs - {Codec.BEST} if finite else set()
        travels = {one: frames.encode_rows(whole.rows, one) for one in wholly if one is not None}
        best = self._best(works, whole.rows) if finite and Codec.BEST in codecs else {}
        answers, start = [], 0
        for i, work in enumerate(works):
            first, start = start, start + work.num_rows
            logs, codec, rows, draw = whole.log_weights[first:start], work.codec, best.get(i), None
            if rows is not None:
                draw = work.draw
            elif codec in travels:
                size = frames.row_bytes(codec, self.vocabulary)
                rows = travels[codec][first * size : start * size]
            encoded = (codec, rows + frames.encode_log_weights(logs)) if codec and rows is not None else None
            # Copies: of a view, a session would keep the rows of all others for as long as its own.
            own = whole.rows[first:start].copy()
            answers.append(WeighedRows(own, logs.copy(), encoded=encoded, draw=draw))
        return answers

    def _best(self, works: Sequence[RowWork], rows_RV: NDArray[Any]) -> dict[int, bytes]:
        """The best tokens of works that ask for these alone, by the works' places. Without works that have
        many values: their noise takes long, and other threads can find it."""
        ends = list(itertools.accumulate(work.num_rows for work in works))
        alike: dict[int, list[int]] = defaultdict(list)
        for i, work in enumerate(works):
            if work.draw is not None and work.num_rows * self.vocabulary <= FEW_VALUES:
                alike[work.draw.tokens].append(i)
        found: dict[int, bytes] = {}
        for tokens, members in alike.items():
            places: list[tuple[Sampler, int]] = []
            index: list[int] = []
            for i in members:
                draw, count = works[i].draw, works[i].num_rows
                assert draw is not None
                sampler = Sampler(seed=draw.seed, temperature=draw.temperature)
                places += [(sampler, draw.position + t) for t in range(count)]
                index += range(ends[i] - count, ends[i])
            ids, scores = best_scores(rows_RV[index], places, self.share_of(works[0].blocks), tokens)
            # A temperature may be so low that no score is finite; then the stage says so to its client.
            if np.isfinite(scores).all():
                counts = [works[i].num_rows for i in members]
                payloads = frames.encode_best(ids, scores, self.vocabulary, counts)
                found |= zip(members, payloads, strict=True)
        return found

    def _upstream(self, work: RowWork, dtype: torch.dtype) -> Tensor | None:
        if work.upstream_TD is None:
            return None
        # A copy: bytes from the network are read-only, and torch warns of such memory.
        return torch.tensor(work.upstream_TD, device=self.codebook.device, dtype=dtype)[None]

    def _said(
        self, works: Sequence[RowWork], block: int, output: BlockOutput
    ) -> tuple[Tensor, NDArray[np.float64]]:
        """A block's rows for all works of a pass, and its log-weight in each row."""
        z_hat_TD, counts = output.z_hat_BTD[0], [work.num_rows for work in works]
        ends = list(itertools.accumulate(len(work.ids) for work in works))
        if not self.pooling.follows_text:
            # Logits of the asked rows alone: a prompt of 2,000 tokens over 150,000 has 1.2 GB of them.
            if sum(counts) < len(z_hat_TD):
                asked = [t for end, count in zip(ends, counts, strict=True) for t in range(end - count, end)]
                z_hat_TD = z_hat_TD[torch.tensor(asked, device=z_hat_TD.device)]
            rows_RV = F.log_softmax(output.logits_of(z_hat_TD).float(), dim=-1)
            return rows_RV, np.empty(len(rows_RV))
        log_probs_TV = F.log_softmax(output.logits_of(z_hat_TD).float(), dim=-1)
        own = torch.split(log_probs_TV, [len(work.ids) for work in works])
        return _joined(self._recorded(works, block, own))

    def _recorded(
        self, works: Sequence[RowWork], block: int, own: Sequence[Tensor]
    ) -> list[tuple[Tensor, NDArray[np.float64]]]:
        """What a block said where pooling follows the text; `own` are its log-probs of each work's ids."""
        said = []
        # Of all new tokens: how well the block predicted each of them counts from the next one on.
        for work, own_TV in zip(works, own, strict=True):
            record = work.caches[block].record
            assert record is not None, "made with the cache where pooling follows the text"
            keep = max(work.num_rows, min(KEPT_ROWS, KEPT_VALUES // self.vocabulary))
            past_TD = record.extend(work.base, work.ids, own_TV, keep=keep)
            logs = self.pooling.log_weights(block, past_TD[-work.num_rows :])
            said.append((own_TV[-work.num_rows :], logs))
        return said

    def _weighed(
        self, asked: Sequence[int], said: Sequence[tuple[Tensor, NDArray[np.float64]]]
    ) -> WeighedRows:
        """Rows of the asked blocks, which came in order of blocks, as one."""
        blocks, total = sorted(asked), torch.zeros_like(said[0][0])
        if not self.pooling.follows_text:
            for block, (rows, _) in zip(blocks, said, strict=True):
                total += self.pooling.weights[block] * rows
            return WeighedRows(total.cpu().numpy(), np.empty((len(total), 0)))
        logs = np.stack([one for _, one in said], axis=1)
        weights = torch.from_numpy(np.exp(normalised(logs))).to(total)
        for i, (rows, _) in enumerate(said):
            total += weights[:, i, None] * rows
        return WeighedRows(total.cpu().numpy(), logs[:, [blocks.index(block) for block in asked]])

    def share_of(self, asked: Sequence[int]) -> float:
        """What the rows of these blocks together are multiplied by."""
        if self.pooling.follows_text:
            return 1.0
        return max(LEAST_WEIGHT, sum(self.pooling.weights[block] for block in asked))

    @torch.inference_mode()
    def refine(
        self, task: Refinement, blocks: Sequence[int], rows: NDArray[np.float64] | None
    ) -> NDArray[np.float32]:
        """The rows [N, V] that these neighbouring blocks make of `rows`: log-probs behind the last block."""
        device = self.codebook.device
        length = len(task.known) + task.num_new - 1
        z0_TD = sweep_noise(task.seed, task.position, length, self.codebook.shape[1])
        known = torch.tensor([list(task.known)], device=device)
        sweep = begin_sweep(self.objective, known, task.num_new, z0_TD[None].to(device))
        if rows is not None:
            sweep = sweep.with_new_rows(torch.from_numpy(rows).to(device, torch.float32)[None])
        held = {index: self.blocks[index] for index in blocks}
        sweep, log_probs = refine(self.objective, held, self.codebook, sweep, task.passes)
        last = blocks[-1] == self.objective.model.blocks - 1
        refined: NDArray[np.float32] = (log_probs if last else sweep.new_rows)[0].cpu().numpy()
        return refined

    def _exact(self, work: RowWork) -> WeighedRows:
        """The row after the work's ids in float64, from ids alone: what near ties are settled with."""
        tokens = torch.tensor([list(work.ids)], device=self.codebook.device)
        codebook = self.codebook.double()
        features = self._upstream(work, torch.float64)
        said = []
        for index in sorted(work.caches):
            # Kept: a near tie comes about once in 2,000 tokens, and its block is small beside its caches.
            if index not in self._exact_blocks:
                self._exact_blocks[index] = copy.deepcopy(self.blocks[index]).double()
            upstream = features if self.objective.upstream(index) else None
            output: BlockOutput = self._exact_blocks[index](tokens, codebook, upstream_BTD=upstream)
            features = output.features_BTD
            if index in work.blocks:
                log_probs_TV, logs = F.log_softmax(output.logits_BTV[0], dim=-1), np.empty(0)
                if self.pooling.follows_text:
                    past_TD = TrackRecord(self.pooling.decays).extend(0, work.ids, log_probs_TV, keep=1)
                    logs = self.pooling.log_weights(index, past_TD[-1:])
                said.append((log_probs_TV[-1:], logs))
        return _handed_on(features) if work.hands_on else self._weighed(work.blocks, said)


def _joined(said: Sequence[tuple[Tensor, NDArray[np.float64]]]) -> tuple[Tensor, NDArray[np.float64]]:
    """What a block said to several works, as one."""
    return torch.cat([rows for rows, _ in said]), np.concatenate([logs for _, logs in said])


def _handed_on(features_1TD: Tensor | None) -> WeighedRows:
    assert features_1TD is not None, "a part that ran has features"
    values = features_1TD[0]
    # numpy knows no bf16, in which a part on a GPU may compute.
    values = values if values.dtype == torch.float64 else values.float()
    return WeighedRows(np.empty((0, 0)), np.empty((0, 0)), values.cpu().numpy())
