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
from blocktrain.wording import counted

PAUSE_SECONDS = 0.5
"""How long a worker with nothing to do waits before it asks again."""
FULL_SECONDS = 30.0
"""How long a worker waits where all seats are taken: seats get free when workers leave, not every round."""
TOO_SMALL_SECONDS = 60.0
MAX_GIVEN_UP = 10
"""Assignments that a worker may give up without an update in GIVEN_UP_SECONDS. One that declines, restarts
and moves gives up two or three; one that did nothing else wrote 45 ledger entries a second."""
GIVEN_UP_SECONDS = 600.0
ROUNDS_WORTH_A_SNAPSHOT = 4
"""With fewer rounds left, a block that has its replicas is not worth another worker's download: at the end of
T7 such help moved 647 MB of snapshots for two updates, beside 259 MB of payloads in the whole run."""


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
    training_bytes: int = 0
    """Device memory that training it takes."""
    full: bool = False
    """Others have taken all its seats."""


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
    """What the worker trains next, why, or how long it waits."""
    unfinished = [view for view in blocks if view.version < swarm.rounds]
    if not unfinished:
        return Done(f"every block has had its {counted(swarm.rounds, 'round')}")

    # A full block keeps the workers it has and takes no others.
    open_ = [view for view in unfinished if not view.full or view.block == worker.current_block]
    if not open_:
        return Pause(FULL_SECONDS, "every block that still trains has all its seats taken")

    fitting = [
        view for view in open_ if worker.memory_bytes is None or worker.memory_bytes >= view.training_bytes
    ]
    if not fitting:
        smallest = min(view.training_bytes for view in open_)
        return Pause(
            TOO_SMALL_SECONDS,
            f"the smallest block needs about {smallest / 1e9:.1f} GB to train, this device has "
            f"{(worker.memory_bytes or 0) / 1e9:.1f} GB; use a larger device",
        )

    # Each block offers its open round, or the one after it, whichever this worker has not had yet.
    candidates = []
    for view in fitting:
        rounds = (view.version, view.version + 1)
        unused = [one for one in rounds if one < swarm.rounds and one not in view.used_rounds]
        candidates += [_Candidate(view, one) for one in unused[:1]]
    if not candidates:
        return Pause(PAUSE_SECONDS, "delivered for every open round; they wait for others, or for the judge")

    # Fewest workers first, then the stalest; equals are told apart by what the worker has and prefers, then
    # by size: a large block fits few workers, and one that fits should not begin with what all can train.
    # Blocks of a chain differ by a few percent and begin with the first.
    smallest = min(view.training_bytes for view in fitting)

    def priority(one: _Candidate) -> tuple[int, int, bool, bool, int, int, int]:
        block = one.view.block
        held, size = worker.holding.get(block, -1), one.view.training_bytes
        size = size if size > 1.25 * smallest else smallest
        elsewhere, other = block != worker.current_block, block != worker.prefer_block
        return one.view.seats, one.round, elsewhere, other, -held, -size, block

    best = min(candidates, key=priority)
    own = next((one for one in candidates if one.view.block == worker.current_block), None)
    if own is not None:
        # Moving costs a download, so staying is the rule. Both counts exclude the asking worker, so two
        # workers cannot swap blocks endlessly.
        lead = own.round - best.round
        if best.view.seats < own.view.seats:
            return _offer(
                best,
                f"block {best.view.block} has {best.view.seats} workers, block {own.view.block} would keep "
                f"{own.view.seats}",
            )
        if best.view.seats == own.view.seats and lead >= swarm.max_lead:
            return _offer(
                best, f"block {best.view.block} is {counted(lead, 'round')} behind block {own.view.block}"
            )
        return _offer(own, f"stays on block {own.view.block}")

    # Its own block has nothing for it now. Others that have their replicas do not need its help.
    has_replicas = best.view.seats >= swarm.replicas
    if has_replicas and any(view.block == worker.current_block for view in fitting):
        return Pause(PAUSE_SECONDS, f"delivered for block {worker.current_block}; its round still collects")
    at_hand = worker.holding.get(best.view.block, -1) >= best.view.version - 1
    few_left = swarm.rounds - best.round < ROUNDS_WORTH_A_SNAPSHOT
    if has_replicas and few_left and best.view.version > 0 and not at_hand:
        return Pause(PAUSE_SECONDS, f"the last rounds of block {best.view.block} have their workers")
    return _offer(best, f"block {best.view.block} has the fewest workers ({best.view.seats})")


def pause_after_giving_up(lent: Sequence[float], now: float) -> Pause | None:
    """How long a worker waits that has given up too much; `lent` has the times at which those assignments
    were lent. Every one is three or four entries in a ledger that nobody can shorten."""
    recent = sorted(at for at in lent if at > now - GIVEN_UP_SECONDS)
    if len(recent) < MAX_GIVEN_UP:
        return None
    return Pause(
        recent[-MAX_GIVEN_UP] + GIVEN_UP_SECONDS - now,
        f"this worker gave up {len(recent)} assignments within {GIVEN_UP_SECONDS:.0f} s without an update, "
        "as many as it may; deliver the next one",
    )


def _offer(one: _Candidate, reason: str) -> Offer:
    if one.round > one.view.version:
        reason += f"; round {one.view.version} still collects, so it runs ahead into round {one.round}"
    return Offer(one.view.block, one.round, reason)
