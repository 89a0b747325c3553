"""The run a coordinator serves: recipe, text, schemas, initial snapshots; made once, then only reopened.

What every worker must agree on is fixed here and written to the ledger's first entry. Settings that only the
coordinator reads (`config.CHANGEABLE`) may change when it is started again: each change is a ledger entry. A
data directory or database that holds another run is refused in words.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import inspect, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session
from torch import nn

from blocktrain.codec_spec import CodecSpec
from blocktrain.config import (
    CHANGEABLE,
    Recipe,
    SwarmConfig,
    changed_settings,
    refused_changes,
    resolve_recipe,
    with_settings,
)
from blocktrain.coordinator.refusals import Refusal
from blocktrain.coordinator.storage.blobs import Blobs, snapshot_key
from blocktrain.coordinator.storage.ledger import Ledger
from blocktrain.coordinator.storage.store import BlockRow, LedgerRow, RunRow, SnapshotRow, Store
from blocktrain.data.dataset import RunText
from blocktrain.errors import UserError
from blocktrain.ids import CorpusHash
from blocktrain.model.objective import Objective
from blocktrain.training.memory import block_needs
from blocktrain.training.setup import Setup
from blocktrain.training.snapshot import schema_of, tensors_of, to_safetensors
from blocktrain.wire.codec import Schema, frame_length
from blocktrain.wire.hashing import GENESIS_HASH, canonical_json, content_hash, snapshot_hash
from blocktrain.wire.identity import Identity
from blocktrain.wire.messages import BlockLayout, ErrorReason, Receipt, TensorShape

log = logging.getLogger(__name__)


@dataclass
class Run:
    run_id: str
    recipe: Recipe
    """Its settings in `CHANGEABLE` may change while the run is served: read it when it is needed."""
    corpus_sha256: CorpusHash
    coordinator_key: str
    codec: CodecSpec
    schemas: tuple[Schema, ...]
    layouts: tuple[BlockLayout, ...]
    objective: Objective
    training_bytes: tuple[int, ...]
    """What each block takes of a GPU's memory; only workers with one say how much they have."""
    _followed: str = ""
    """The stored recipe that was looked at last: reading one takes as long as some requests."""

    @property
    def swarm(self) -> SwarmConfig:
        return self.recipe.swarm

    @property
    def tokens_per_update(self) -> int:
        return self.swarm.steps_per_round * self.recipe.training.batch * self.recipe.model.context

    def payload_bytes(self, block: int) -> int:
        return self.layouts[block].payload_bytes

    @property
    def max_payload_bytes(self) -> int:
        return max(layout.payload_bytes for layout in self.layouts)

    def follow(self, stored: str) -> None:
        """Take over what another process, or the operator, has changed in the stored recipe."""
        if stored == self._followed:
            return
        self._followed, changed = stored, changed_settings(json.loads(stored), self.recipe)
        settings = {key: old for key, (old, _) in changed.items() if key in CHANGEABLE}
        if settings:
            self.recipe = resolve_recipe(with_settings(self.recipe.to_dict(), settings))


def change_run(
    session: Session, ledger: Ledger, settings: dict[str, Any], now: float, *, finish: bool = False
) -> Receipt:
    """Change settings of the run, and say so in its ledger.

    The kind of the entry is that of the first one, `run`: readers of before there were changes take it.
    """
    row = session.get(RunRow, 1, with_for_update=True)
    assert row is not None
    stored = json.loads(row.recipe)
    before = changed_settings(stored, resolve_recipe(with_settings(stored, settings)))
    row.recipe = canonical_json(with_settings(stored, settings)).decode()
    body: dict[str, Any] = {"settings": settings, "before": {key: old for key, (old, _) in before.items()}}
    if finish:
        body["finish"] = True
    return ledger.append(session, now, "run", body)


def finish_run(session: Session, run: Run, ledger: Ledger, now: float) -> Receipt:
    """No round begins from here on: `swarm.rounds` becomes what the slowest block has had.

    Blocks that are ahead keep their heads. Started again with the recipe it had, the run stays finished;
    another `swarm.rounds` takes it up.
    """
    rows = session.scalars(select(BlockRow).order_by(BlockRow.block).with_for_update()).all()
    slowest = min(rows, key=lambda row: row.version)
    if slowest.version == 0:
        raise Refusal(
            ErrorReason.ROUND_NOT_OPEN,
            f"block {slowest.block} has had no round yet, so there is no model to finish with",
            "wait for its first merge, or stop the coordinator",
        )
    if slowest.version >= run.swarm.rounds:
        raise Refusal(ErrorReason.ROUND_NOT_OPEN, "the run is finished already")
    return change_run(session, ledger, {"swarm.rounds": slowest.version}, now, finish=True)


def open_run(
    store: Store,
    blobs: Blobs,
    identity: Identity,
    recipe: Recipe,
    text: RunText,
    now: float,
    start: Sequence[nn.Module] | None = None,
) -> Run:
    """The run in this database, which is made if there is none; another recipe, text or key is refused.

    `start` are the blocks to begin from, where that is not the recipe's seed.
    """
    setup, codec = Setup.of_swarm(recipe, text.manifest.vocabulary), CodecSpec.parse(recipe.swarm.codec)
    with store.read() as session:
        is_new = session.get(RunRow, 1) is None
    # Initial weights follow from seed and block, so workers can make version 0 themselves.
    layouts, schemas = [], []
    for block in range(recipe.model.blocks):
        module = setup.initial(block) if start is None else start[block]
        schema, tensors = schema_of(module), tensors_of(module)
        digest = snapshot_hash(tensors)
        # Version 0, where it is not stored yet: blobs come before the rows that name them.
        if is_new and blobs.size(snapshot_key(digest)) is None:
            blobs.put(snapshot_key(digest), to_safetensors(tensors))
        schemas.append(schema)
        layouts.append(
            BlockLayout(
                block=block,
                tensors=tuple(TensorShape(name=name, shape=shape) for name, shape in schema.tensors),
                schema_hash=schema.schema_hash(),
                codec=str(codec),
                payload_bytes=frame_length(codec, schema),
                initial_hash=digest,
            )
        )
    key = identity.public_key.hex()
    shapes = tuple(schemas), tuple(layouts)
    needs = tuple(block_needs(recipe, setup.objective, "cuda"))
    run = Run("", recipe, text.sha256, key, codec, *shapes, setup.objective, needs)
    try:
        _open_row(store, identity, run, now, begins_elsewhere=start is not None)
    except IntegrityError:  # another process made the run between our look and our write
        _open_row(store, identity, run, now, begins_elsewhere=start is not None)
    return run


def _compared(
    session: Session, row: RunRow, recipe: Recipe, corpus_sha256: str, key: str
) -> tuple[Recipe, dict[str, tuple[Any, Any]]]:
    """The recipe to go on with, and the settings in which it differs from the stored one, and may; another
    run is refused. One that its operator finished stays so, with the rounds that it has had."""
    name = row.run_id[:12]
    changed = changed_settings(json.loads(row.recipe), recipe)
    changed.pop("data.dataset", None)
    changed.pop("data.corpus", None)  # each machine has its text elsewhere; the hash is compared instead
    # A run that its operator finished stays so when it is started again with the recipe it had.
    last = session.scalars(
        select(LedgerRow.body).where(LedgerRow.kind == "run").order_by(LedgerRow.sequence.desc())
    ).first()
    ended = json.loads(last or "{}")
    if ended.get("finish") and ended["before"] == {"swarm.rounds": recipe.swarm.rounds}:
        changed.pop("swarm.rounds", None)
        swarm = replace(recipe.swarm, rounds=ended["settings"]["swarm.rounds"])
        recipe = replace(recipe, swarm=swarm)
    if refused := refused_changes(changed):
        shown = ", ".join(refused[:3]) + (f" and {len(refused) - 3} more" if len(refused) > 3 else "")
        raise UserError(
            f"this data directory holds run {name} of another recipe: {shown}; use that recipe, or a new "
            "--data-dir (docs/host.md lists what may change in a run)"
        )
    if row.corpus_sha256 != corpus_sha256:
        raise UserError(
            f"this data directory holds run {name} on text {row.corpus_sha256[:12]}…, the recipe's text "
            f"is now {corpus_sha256[:12]}…; bring the text back, or use a new --data-dir"
        )
    if row.coordinator_key != key:
        raise UserError(
            f"run {name} in this database belongs to coordinator key {row.coordinator_key[:12]}…, this "
            f"one has {key[:12]}…; copy coordinator.key from the first coordinator's "
            "--data-dir"
        )
    return recipe, changed


def refuse_another_run(store: Store, identity: Identity, recipe: Recipe, text: RunText) -> None:
    """Before the tables are brought to this version, so that a folder that is refused stays as it was: with
    the run that it holds an older program may go on."""
    with store.read() as session:
        row = session.get(RunRow, 1) if inspect(session.connection()).has_table("run") else None
        if row is not None:
            _compared(session, row, recipe, text.sha256, identity.public_key.hex())


def _open_row(store: Store, identity: Identity, run: Run, now: float, *, begins_elsewhere: bool) -> None:
    """Make the run's row with the ledger's first entry; or compare with what was given, and complete `run`
    with what the row knows."""
    with store.write() as session:
        # There is one row, number 1; its primary key lets only one of two processes make the run.
        row = session.get(RunRow, 1, with_for_update=True)
        if row is None:
            description: dict[str, Any] = {
                "recipe": run.recipe.to_dict(),
                "corpus_sha256": run.corpus_sha256,
                "coordinator_key": run.coordinator_key,
                "created": now,
                "blocks": [layout.model_dump(mode="json") for layout in run.layouts],
            }
            # The id is the hash of what all must agree on: two runs with one id would be one run.
            run.run_id = content_hash(canonical_json(description))
            row = RunRow(
                id=1,
                run_id=run.run_id,
                recipe=canonical_json(run.recipe.to_dict()).decode(),
                corpus_sha256=run.corpus_sha256,
                coordinator_key=run.coordinator_key,
                created=now,
                ledger_length=0,
                ledger_hash=GENESIS_HASH,
            )
            session.add(row)
            session.flush()
            Ledger(identity).append(session, now, "run", {"run_id": run.run_id, **description})
            for one in run.layouts:
                head = one.initial_hash
                session.add(BlockRow(block=one.block, version=0, head_hash=head))
                session.add(SnapshotRow(block=one.block, version=0, hash=head, num_bytes=0, made=now))
            return
        run.run_id, name = row.run_id, row.run_id[:12]
        run.recipe, changed = _compared(session, row, run.recipe, run.corpus_sha256, run.coordinator_key)
        # The first weights are the run's, not those that this torch would draw from the seed.
        columns = select(SnapshotRow.block, SnapshotRow.hash).where(SnapshotRow.version == 0)
        first = {row.block: row.hash for row in session.execute(columns)}
        if begins_elsewhere and any(one.initial_hash != first[one.block] for one in run.layouts):
            raise UserError(
                f"this data directory holds run {name}, which began from other weights than --from names; "
                "leave out --from to go on with it, or use a new --data-dir"
            )
        run.layouts = tuple(one.model_copy(update={"initial_hash": first[one.block]}) for one in run.layouts)
        if changed:
            change_run(session, Ledger(identity), {key: new for key, (_, new) in changed.items()}, now)
            for key, (old, new) in changed.items():
                log.info("changed %s from %r to %r: %s", key, old, new, CHANGEABLE[key])
