"""The blocks' open rounds as the database tells them, for `decisions.rounds` to decide on.

Every heartbeat, assignment, commit and look asks, and the answer changes only with arrivals, verdicts and
merges. So what has arrived is remembered, with the block's version and its `revision`, which every arrival
and verdict raises in its own transaction. That is right for several processes too: they read the block's row
anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from sqlalchemy import BigInteger, BindParameter, ColumnElement, bindparam, func, select
from sqlalchemy.orm import Session

from blocktrain.coordinator.decisions.rounds import (
    HISTORY_ARRIVALS,
    PACE_ROUNDS,
    Arrivals,
    BlockPace,
    OpenRound,
    RoundClock,
    RoundFacts,
    round_clock,
    round_state,
    run_seconds_left,
)
from blocktrain.coordinator.reputation_rows import read_standing
from blocktrain.coordinator.run import Run
from blocktrain.coordinator.states import COUNTED, WAITING, UpdateState
from blocktrain.coordinator.storage.queries import live_since
from blocktrain.coordinator.storage.store import BlockRow, MergeRow, Prepared, UpdateRow, WorkerRow

_BLOCK: BindParameter[int] = bindparam("block")
_VERSION: BindParameter[int] = bindparam("version", type_=BigInteger)
_ON_HEAD = UpdateRow.base_version == _VERSION
# What has a merge version belongs to the merge under way, no longer to the open round.
_WAITING = Prepared(
    select(
        UpdateRow.worker_id,
        UpdateRow.state,
        UpdateRow.base_version,
        UpdateRow.revealed,
        UpdateRow.merge_version,
    ).where(UpdateRow.block == _BLOCK, UpdateRow.state.in_((*WAITING, UpdateState.JUDGING)))
)
_REFUSED = Prepared(
    select(UpdateRow.worker_id).where(
        UpdateRow.block == _BLOCK, UpdateRow.state == UpdateState.REFUSED, _ON_HEAD
    )
)
_LIVE = Prepared(
    select(WorkerRow.worker_id, WorkerRow.established, WorkerRow.standing).where(
        WorkerRow.block == _BLOCK, WorkerRow.last_seen > bindparam("since")
    )
)
_HEADS = Prepared(select(BlockRow.block, BlockRow.version, BlockRow.begun).order_by(BlockRow.block))
# Versions only rise, so that their sum tells whether one has. Each row that SQLite finds lets other threads
# have the interpreter, and a transaction that holds the lock of all writers then waits for it.
_SUMS = Prepared(select(func.sum(BlockRow.version), func.sum(BlockRow.begun), func.count(BlockRow.begun)))
_MERGES = Prepared(
    select(MergeRow.begun, MergeRow.closed)
    .where(MergeRow.block == _BLOCK, MergeRow.version > _VERSION - PACE_ROUNDS)
    .order_by(MergeRow.version)
)


def _offsets(*chosen: ColumnElement[bool]) -> Prepared:
    """Offsets of the block's latest arrivals."""
    return Prepared(
        select(UpdateRow.offset)
        .where(UpdateRow.block == _BLOCK, UpdateRow.offset.is_not(None), *chosen)
        .order_by(UpdateRow.revealed.desc())
        .limit(HISTORY_ARRIVALS)
    )


_COUNTED = UpdateRow.state.in_(COUNTED)
_HISTORY = _offsets(_COUNTED, UpdateRow.base_version < _VERSION)
_THIS_ROUND = _offsets(_COUNTED, _ON_HEAD)
_THIS_ROUND_OF_ALL = _offsets(_ON_HEAD)


class _Waiting(NamedTuple):
    """An update that waits for its judge or its merge: the columns of _WAITING."""

    worker_id: str
    state: str
    base_version: int
    revealed: float
    merge_version: int | None


class OpenRounds:
    def __init__(self, run: Run) -> None:
        self._run = run
        self._arrivals: dict[int, tuple[tuple[int, int, int | None], Arrivals]] = {}
        """Block to a moment of its row and what had arrived then."""
        self._heads: tuple[Any, list[Any]] = (), []
        """Sums of the blocks' rows, and the rows of then."""
        self._paces: tuple[list[Any], list[BlockPace]] = [], []
        """Rows of the blocks, and how fast their rounds close."""

    def state(self, session: Session, row: BlockRow, now: float) -> OpenRound:
        """The block's open round as it stands: who it waits for, until when, and whether it closes now."""
        return round_state(self.facts(session, row, now), self._run.swarm, self._run.recipe.trust, now)

    def clock(self, session: Session, row: BlockRow, now: float) -> RoundClock:
        """Its deadline alone, which takes no look at the workers."""
        return round_clock(self.arrivals(session, row), self._run.swarm, now)

    def facts(self, session: Session, row: BlockRow, now: float) -> RoundFacts:
        workers = _LIVE(session, block=row.block, since=live_since(now, self._run.swarm))
        established = {
            name: read_standing(standing).good_verdicts for name, is_one, standing in workers if is_one
        }
        live = frozenset(name for name, _, _ in workers)
        return RoundFacts(**vars(self.arrivals(session, row)), live=live, established=established)

    def arrivals(self, session: Session, row: BlockRow) -> Arrivals:
        """Not for a transaction that has raised the block's revision itself: it may yet be rolled back."""
        moment = row.revision, row.version, row.closing_version
        remembered, found = self._arrivals.get(row.block, (None, None))
        if found is None or remembered != moment:
            # The row was read before: what is found now is of that moment, or newer.
            found = _arrivals(session, row)
            self._arrivals[row.block] = moment, found
        return replace(
            found, begun=row.begun, merging=row.closing_version is not None, claimed_until=row.claim_until
        )

    def heads(self, session: Session) -> list[tuple[int, int, float | None]]:
        """Every block with its version and when its round began."""
        [sums] = _SUMS(session)
        remembered, found = self._heads
        if remembered != sums:
            found = _HEADS(session)
            self._heads = sums, found
        return found

    def seconds_left(self, session: Session, now: float) -> float | None:
        """Until the run is finished, at the pace of the last rounds."""
        heads = self.heads(session)
        paced, paces = self._paces
        if paced is not heads:
            known = {block: pace for (block, *_), pace in zip(paced, paces, strict=True)}
            paces = []
            for block, version, begun in heads:
                pace = known.get(block)
                if pace is None or pace.version != version:
                    merges = _MERGES(session, block=block, version=version)
                    first = next((end - start for start, end in merges[:1] if start is not None), None)
                    closed = tuple(end for _, end in merges)
                    pace = BlockPace(version=version, closed=closed, first_seconds=first)
                paces.append(replace(pace, begun=begun))
            self._paces = heads, paces
        return run_seconds_left(paces, self._run.swarm.rounds, now)


def _arrivals(session: Session, row: BlockRow) -> Arrivals:
    session.flush()

    def offsets(statement: Prepared, version: int = row.version) -> Sequence[float]:
        return [offset for (offset,) in statement(session, block=row.block, version=version)]

    updates = [_Waiting(*one) for one in _WAITING(session, block=row.block)]
    waiting = [one for one in updates if one.state in WAITING and one.merge_version is None]
    history = offsets(_HISTORY)
    return Arrivals(
        version=row.version,
        begun=row.begun,
        on_time=frozenset(one.worker_id for one in waiting if one.state == UpdateState.ACCEPTED),
        late=frozenset(one.worker_id for one in waiting if one.state == UpdateState.LATE),
        counted=frozenset(
            one.worker_id for one in updates if one.state in WAITING and one.base_version == row.version
        ),
        refused=frozenset(name for (name,) in _REFUSED(session, block=row.block, version=row.version)),
        judging=tuple(one.revealed for one in updates if one.state == UpdateState.JUDGING),
        history=history,
        before=offsets(_HISTORY, row.version - 1) if history else (),
        # Where nothing counts nobody can be cut off, and a lone worker that was refused may try again soon.
        this_round=() if history else offsets(_THIS_ROUND) or offsets(_THIS_ROUND_OF_ALL),
    )
