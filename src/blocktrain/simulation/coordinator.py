"""The coordinator's side of a simulated run: the real decisions and the real merge, in virtual time.

What a database row, a blob or a request is to the service is a value here; scheduling, deadlines,
admission and merging are the service's own functions. One thing is added: under `drop` a deadline that
passes with nothing to merge uses up a round, as in the litepaper, where the number of rounds is fixed and
the old snapshot stays.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count

from blocktrain.client.run import Layout
from blocktrain.client.snapshots import Base
from blocktrain.config import SwarmConfig, TrustConfig
from blocktrain.coordinator.decisions.commit_checks import AssignmentView, commit_refusal
from blocktrain.coordinator.decisions.rounds import (
    HISTORY_ARRIVALS,
    OpenRound,
    RoundFacts,
    extra_steps,
    own_share,
    round_state,
    starts_clock,
)
from blocktrain.coordinator.decisions.scheduling import (
    BlockView,
    Done,
    Offer,
    Pause,
    WorkerView,
    next_assignment,
)
from blocktrain.coordinator.refusals import Refusal
from blocktrain.model.objective import Objective
from blocktrain.simulation.clock import VirtualClock
from blocktrain.simulation.networks import Machine
from blocktrain.training.merge import MergeInput, clip_scales, merge_updates, update_norm
from blocktrain.training.snapshot import snapshot_hash
from blocktrain.training.update import Weights
from blocktrain.validation.ruling import MEDIAN_NORMS, Ruling, age_ruling
from blocktrain.wire.codec import decode
from blocktrain.wire.hashing import content_hash
from blocktrain.wire.messages import Assignment, CommitRequest, FrozenSnapshot, Outcome, StandIn
from blocktrain.worker.block_progress import PendingUpdate

UNJUDGED = TrustConfig(judge="off")


@dataclass(frozen=True)
class Accepted:
    """An update that waits for the next merge."""

    worker: int
    update: PendingUpdate
    verdict: Ruling
    norm: float
    tensors: Weights

    @property
    def update_id(self) -> str:
        return content_hash(f"{self.update.assignment_id}/{self.update.payload_hash}".encode())


@dataclass(frozen=True)
class Merged:
    """What is remembered of an update that was merged."""

    worker: int
    payload_hash: str
    age: int
    weight: float
    norm: float


@dataclass(frozen=True)
class Merge:
    """What made a version: nothing, where a round of `drop` passed without an update."""

    version: int
    closed: float
    reason: str
    inputs: tuple[Merged, ...]


@dataclass
class BlockState:
    head: Base
    begun: float | None = None
    pending: list[Accepted] = field(default_factory=list)
    merges: list[Merge] = field(default_factory=list)
    shards: dict[int, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    """Round to worker to data shard."""
    stand_in_shards: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    begun_at: dict[int, float | None] = field(default_factory=dict)
    """Round to its beginning, once it is closed."""
    offsets: list[tuple[int, float]] = field(default_factory=list)
    """Base version and seconds from the beginning of its round, in order of arrival."""
    own_seconds: dict[int, float] = field(default_factory=dict)
    """The last such seconds of a worker."""
    used_bases: set[tuple[int, int]] = field(default_factory=set)
    """Worker and base version of every commit."""
    verdicts: list[tuple[int, Ruling]] = field(default_factory=list)
    """Age and verdict of every update that arrived."""

    @property
    def version(self) -> int:
        return self.head.version

    def running_median(self) -> float | None:
        norms = [one.norm for merge in reversed(self.merges) for one in merge.inputs][:MEDIAN_NORMS]
        return statistics.median(norms) if norms else None


@dataclass
class SimulatedCoordinator:
    swarm: SwarmConfig
    layouts: Sequence[Layout]
    clock: VirtualClock
    blocks: list[BlockState]
    machines: Sequence[Machine]
    objective: Objective
    seats: dict[int, int] = field(default_factory=dict)
    """Worker to the block it is on."""
    watchers: list[Callable[[int], None]] = field(default_factory=list)
    """Told of every new head."""

    # --- asking

    def next_decision(self, worker: int, holding: Mapping[int, int]) -> Offer | Pause | Done:
        view = WorkerView(current_block=self.seats.get(worker), holding=holding)
        return next_assignment(view, [self._view(worker, b) for b in range(len(self.blocks))], self.swarm)

    def _view(self, worker: int, block: int) -> BlockView:
        state = self.blocks[block]
        used = (round_ for round_, shards in state.shards.items() if worker in shards)
        return BlockView(
            block=block,
            version=state.version,
            seats=len(self._live(block, without=worker)),
            used_rounds=frozenset(round_ for round_ in used if round_ >= state.version),
        )

    def _live(self, block: int, without: int | None = None) -> set[int]:
        """Workers on a block whose lease has not lapsed."""
        return {
            worker
            for worker, seat in self.seats.items()
            if seat == block
            and worker != without
            and self.machines[worker].away_seconds(self.clock.now) < self.swarm.lease_seconds
        }

    def lend(self, worker: int, offer: Offer) -> Assignment:
        state, now = self.blocks[offer.block], self.clock.now
        if offer.round == state.version and starts_clock(self._facts(offer.block), str(worker)):
            state.begun = now
        self.seats[worker] = offer.block
        shards = state.shards[offer.round]
        taken = {*shards.values(), *state.stand_in_shards[offer.round]}
        free = (shard for shard in count(offer.block, len(self.blocks)) if shard not in taken)
        shards[worker] = next(free)
        self._await_deadline(offer.block)
        steps = self._stand_in(worker, offer)
        stand_in = StandIn(shard=next(free), steps=steps) if steps else None
        if stand_in is not None:
            state.stand_in_shards[offer.round].add(stand_in.shard)
        return self._assignment(worker, offer, shards[worker], stand_in)

    def _stand_in(self, worker: int, offer: Offer) -> int:
        facts, own = self._facts(offer.block), self.blocks[offer.block].own_seconds.get(worker)
        round_ = self._round(offer.block)
        return extra_steps(facts, round_, str(worker), offer.round, own, self.swarm, self.clock.now)

    def _assignment(self, worker: int, offer: Offer, shard: int, stand_in: StandIn | None) -> Assignment:
        head = self.blocks[offer.block].head
        return Assignment(
            assignment_id=content_hash(f"{offer.block}/{offer.round}/{worker}".encode())[:32],
            block=offer.block,
            round=offer.round,
            base_version=head.version,
            base_hash=head.hash,
            shard=shard,
            first_step=offer.round * self.swarm.steps_per_round,
            steps=self.swarm.steps_per_round + (0 if stand_in is None else stand_in.steps),
            stand_in=stand_in,
            total_steps=self.swarm.total_steps,
            deadline=None,
            deadline_reason="",
            lease_seconds=self.swarm.lease_seconds,
            heartbeat_seconds=self.swarm.lease_seconds / 3,
            server_time=self.clock.now,
            reason=offer.reason,
            frozen=tuple(self._frozen(offer)),
        )

    def _frozen(self, offer: Offer) -> Iterator[FrozenSnapshot]:
        """The heads of the blocks that the objective needs for this round's steps."""
        for block in self.objective.upstream(offer.block):
            head = self.blocks[block].head
            yield FrozenSnapshot(block=block, version=head.version, hash=head.hash)

    # --- commit and reveal

    def commit(self, worker: int, update: PendingUpdate) -> Refusal | None:
        state, layout = self.blocks[update.block], self.layouts[update.block]
        assert update.base is not None
        base = (worker, update.base.version)
        view = AssignmentView(
            block=update.block,
            round=update.round,
            returned=False,
            committed_hash=None,
            payload_bytes=layout.payload_bytes,
            base_version=update.base.version,
            base_used=base in state.used_bases,
            head_version=state.version,
        )
        request = CommitRequest(
            payload_hash=update.payload_hash,
            payload_bytes=len(update.payload),
            base_hash=update.base.hash,
        )
        refusal = commit_refusal(view, request)
        if refusal is None:
            state.used_bases.add(base)
        return refusal

    def reveal(self, worker: int, update: PendingUpdate) -> Ruling:
        """The verdict on a payload that has arrived."""
        state, layout, now = self.blocks[update.block], self.layouts[update.block], self.clock.now
        assert update.assignment is not None
        assert update.base is not None
        age = state.version - update.base.version
        verdict = age_ruling(age, self.swarm, finished=state.version >= self.swarm.rounds)
        state.verdicts.append((age, verdict))
        begun = state.begun if age == 0 else state.begun_at.get(update.base.version)
        if begun is not None:
            stand_in = update.assignment.stand_in
            share = own_share(0 if stand_in is None else stand_in.steps, self.swarm)
            state.offsets.append((update.base.version, max(0.0, now - begun) * share))
            state.own_seconds[worker] = state.offsets[-1][1]
        if verdict.outcome is not Outcome.REFUSED:
            tensors = decode(layout.codec, layout.schema, update.payload)
            norm = update_norm(layout.codec, tensors, update.base.weights)
            state.pending.append(Accepted(worker, update, verdict, norm, tensors))
        self._await_deadline(update.block)
        return verdict

    # --- closing rounds

    def _facts(self, block: int) -> RoundFacts:
        state = self.blocks[block]

        def workers(outcome: Outcome) -> frozenset[str]:
            return frozenset(str(one.worker) for one in state.pending if one.verdict.outcome is outcome)

        earlier = [offset for version, offset in state.offsets if version < state.version]
        return RoundFacts(
            version=state.version,
            begun=state.begun,
            live=frozenset(map(str, self._live(block))),
            on_time=workers(Outcome.ACCEPTED),
            late=workers(Outcome.LATE),
            history=earlier[-HISTORY_ARRIVALS:],
            this_round=[offset for version, offset in state.offsets if version == state.version],
        )

    def _round(self, block: int) -> OpenRound:
        """As the service decides, but the deadline of `drop` stays: an empty round is used up."""
        found = round_state(self._facts(block), self.swarm, UNJUDGED, self.clock.now)
        begun = self.blocks[block].begun
        if self.swarm.policy != "drop" or begun is None:
            return found
        return replace(found, deadline=begun + self.swarm.drop_deadline_seconds)

    def _await_deadline(self, block: int) -> None:
        """Close the block's round if it is due; otherwise look again when its deadline passes."""
        state = self.blocks[block]
        if state.version >= self.swarm.rounds or self._close_if_due(block):
            return
        deadline = self._round(block).deadline
        if deadline is not None and deadline > self.clock.now:
            version = state.version
            self.clock.at(deadline, lambda: self._passed(block, version))

    def _passed(self, block: int, version: int) -> None:
        if self.blocks[block].version == version:
            self._await_deadline(block)

    def _close_if_due(self, block: int) -> bool:
        closing = self._round(block)
        passed = closing.deadline is not None and self.clock.now >= closing.deadline
        if closing.close:
            self._close(block, closing.reason)
        elif self.swarm.policy == "drop" and passed:
            self._close(block, "deadline passed with nothing: the old snapshot stays")
        else:
            return False
        return True

    def _close(self, block: int, reason: str) -> None:
        state, now = self.blocks[block], self.clock.now
        inputs = sorted(state.pending, key=lambda one: one.update_id)
        weights = self._merged(state, inputs) if inputs else state.head.weights
        merged = tuple(_merged(one, state.version) for one in inputs)
        state.pending = []
        state.begun_at[state.version] = state.begun
        state.head = Base(state.version + 1, snapshot_hash(weights), weights)
        state.merges.append(Merge(state.version, now, reason, merged))
        state.begun = now if state.shards[state.version] else None
        for watcher in self.watchers:
            self.clock.at(now, partial(watcher, block))
        self._await_deadline(block)

    def _merged(self, state: BlockState, inputs: Sequence[Accepted]) -> Weights:
        codec = self.layouts[0].codec
        scales = clip_scales(codec, [one.norm for one in inputs], state.running_median())
        values = [_merge_input(one, scale, state.head) for one, scale in zip(inputs, scales, strict=True)]
        return merge_updates(codec, state.head.weights, values, self.swarm.outer_lr)

    @property
    def finished(self) -> bool:
        return all(state.version >= self.swarm.rounds for state in self.blocks)


def _merge_input(one: Accepted, scale: float, head: Base) -> MergeInput:
    own_base = one.update.base
    assert own_base is not None
    return MergeInput(
        update_id=one.update_id,
        weight=one.verdict.weight,
        scale=scale,
        tensors=one.tensors,
        base=None if own_base.version == head.version else own_base.weights,
    )


def _merged(one: Accepted, version: int) -> Merged:
    update = one.update
    assert update.base is not None
    age = version - update.base.version
    return Merged(one.worker, update.payload_hash, age, one.verdict.weight, one.norm)
