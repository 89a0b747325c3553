"""Who trains what next: a pure function of the blocks' states and the asking worker.

Least-covered block first, then the stalest; a worker stays with the block it holds unless moving evens
out the replicas or its block is `swarm.max_lead` rounds ahead of another. A worker that has delivered its
update runs one round ahead on its own weights instead of waiting for the others. Knows nothing of the
database, leases or the clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from blocktrain.config import SwarmConfig

PAUSE_SECONDS = 0.5
"""How long a worker with nothing to do waits before it asks again."""
ROUNDS_WORTH_A_SNAPSHOT = 4
"""With fewer rounds left, a block that has its replicas is not worth another worker's download: at the end of
T7 such help moved 647 MB of snapshots for two updates, beside 259 MB of payloads in the whole run."""
TRAINING_BYTES_PER_PARAMETER = 16
"""Weights, gradient and two optimizer moments in fp32; activations come on top."""


@dataclass(frozen=True, kw_only=True)
class BlockView:
    """A block as the asking worker's schedule sees it."""

    block: int
    version: int
    """Head snapshot; also the number of the open round."""
    seats: int
    """Live workers on this block, the asking one not counted."""
    used_rounds: frozenset[int] = frozenset()
    """Rounds of this block for which the asking worker already has an assignment."""
    num_parameters: int = 0


@dataclass(frozen=True, kw_only=True)
class WorkerView:
    current_block: int | None = None
    """The block it was last assigned, while its seat there is live."""
    holding: Mapping[int, int] = field(default_factory=dict)
    """Block to cached snapshot version."""
    prefer_block: int | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True)
class Offer:
    block: int
    round: int
    reason: str


@dataclass(frozen=True)
class Pause:
    seconds: float
    reason: str


@dataclass(frozen=True)
class Done:
    reason: str


Decision = Offer | Pause | Done


@dataclass(frozen=True)
class _Candidate:
    view: BlockView
    round: int


def next_assignment(worker: WorkerView, blocks: Sequence[BlockView], swarm: SwarmConfig) -> Decision:
    unfinished = [view for view in blocks if view.version < swarm.rounds]
    if not unfinished:
        return Done(f"every block has had its {swarm.rounds} rounds")
    fitting = [view for view in unfinished if _fits(worker, view)]
    if not fitting:
        return Pause(60.0, _too_small(worker, unfinished))
    candidates = [found for view in fitting if (found := _candidate(view, swarm)) is not None]
    if not candidates:
        return Pause(PAUSE_SECONDS, "this worker has delivered for every open round; others are still at it")
    best = min(candidates, key=lambda one: _priority(worker, one))
    own = next((one for one in candidates if one.view.block == worker.current_block), None)
    if own is not None:
        reason = _reason_to_move(own, best, swarm)
        return _offer(best, reason) if reason else _offer(own, f"stays on block {own.view.block}")
    if any(view.block == worker.current_block for view in fitting) and best.view.seats >= swarm.replicas:
        return Pause(PAUSE_SECONDS, f"delivered for block {worker.current_block}; its round still collects")
    if _help_costs_more_than_it_brings(worker, best, swarm):
        return Pause(PAUSE_SECONDS, f"the last rounds of block {best.view.block} have their workers")
    return _offer(best, f"block {best.view.block} has the fewest workers ({best.view.seats})")


def _help_costs_more_than_it_brings(worker: WorkerView, best: _Candidate, swarm: SwarmConfig) -> bool:
    at_hand = worker.holding.get(best.view.block, -1) >= best.view.version - 1
    few_left = swarm.rounds - best.round < ROUNDS_WORTH_A_SNAPSHOT
    return best.view.seats >= swarm.replicas and few_left and best.view.version > 0 and not at_hand


def _candidate(view: BlockView, swarm: SwarmConfig) -> _Candidate | None:
    """The open round, or the one after it, whichever this worker has not had yet."""
    for round_ in (view.version, view.version + 1):
        if round_ < swarm.rounds and round_ not in view.used_rounds:
            return _Candidate(view, round_)
    return None


def _priority(worker: WorkerView, one: _Candidate) -> tuple[int, int, bool, bool, int, int]:
    block = one.view.block
    return (
        one.view.seats,
        one.round,
        block != worker.current_block,
        block != worker.prefer_block,
        -worker.holding.get(block, -1),
        block,
    )


def _reason_to_move(own: _Candidate, best: _Candidate, swarm: SwarmConfig) -> str:
    """Empty where staying is as good. Without the mover both counts exclude it, so no two swap for ever."""
    if best.view.seats < own.view.seats:
        return (
            f"block {best.view.block} has {best.view.seats} workers, block {own.view.block} would keep "
            f"{own.view.seats}"
        )
    lead = own.round - best.round
    if best.view.seats == own.view.seats and lead >= swarm.max_lead:
        return f"block {best.view.block} is {lead} rounds behind block {own.view.block}"
    return ""


def _offer(one: _Candidate, reason: str) -> Offer:
    if one.round > one.view.version:
        reason += f"; round {one.view.version} still collects, so it runs ahead into round {one.round}"
    return Offer(one.view.block, one.round, reason)


def _fits(worker: WorkerView, view: BlockView) -> bool:
    needed = TRAINING_BYTES_PER_PARAMETER * view.num_parameters
    return worker.memory_bytes is None or worker.memory_bytes >= needed


def _too_small(worker: WorkerView, blocks: Sequence[BlockView]) -> str:
    smallest = min(view.num_parameters for view in blocks) * TRAINING_BYTES_PER_PARAMETER
    return (
        f"the smallest block needs about {smallest / 1e9:.1f} GB to train, this device has "
        f"{(worker.memory_bytes or 0) / 1e9:.1f} GB; use a larger device"
    )
