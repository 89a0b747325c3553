"""The run a coordinator serves: recipe, text, schemas, initial snapshots; made once, then only reopened.

What every worker must agree on is fixed here and written to the ledger's first entry. A data directory or
database that holds another run is refused in words.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from sqlalchemy.exc import IntegrityError

from blocktrain.config import Recipe, SwarmConfig, changed_settings
from blocktrain.coordinator.storage.blobs import Blobs, snapshot_key
from blocktrain.coordinator.storage.ledger import Ledger
from blocktrain.coordinator.storage.store import BlockRow, RunRow, SnapshotRow, Store
from blocktrain.data.dataset import RunText
from blocktrain.errors import UserError
from blocktrain.ids import CorpusHash
from blocktrain.model.objective import Objective
from blocktrain.training.setup import Setup
from blocktrain.training.snapshot import schema_of, snapshot_hash, tensors_of, to_safetensors
from blocktrain.wire.codec import CodecSpec, Schema, frame_length
from blocktrain.wire.hashing import GENESIS_HASH, canonical_json, content_hash
from blocktrain.wire.identity import Identity
from blocktrain.wire.messages import BlockLayout, TensorShape


@dataclass(frozen=True)
class Run:
    run_id: str
    recipe: Recipe
    corpus_sha256: CorpusHash
    coordinator_key: str
    codec: CodecSpec
    schemas: tuple[Schema, ...]
    layouts: tuple[BlockLayout, ...]
    objective: Objective

    @property
    def swarm(self) -> SwarmConfig:
        return self.recipe.swarm

    def payload_bytes(self, block: int) -> int:
        return self.layouts[block].payload_bytes

    @property
    def max_payload_bytes(self) -> int:
        return max(layout.payload_bytes for layout in self.layouts)


def open_run(
    store: Store, blobs: Blobs, identity: Identity, recipe: Recipe, text: RunText, now: float
) -> Run:
    """The run in this database, which is made if there is none; another recipe, text or key is refused."""
    setup, codec = Setup.of_swarm(recipe, text.manifest.vocabulary), CodecSpec.parse(recipe.swarm.codec)
    # Initial weights follow from seed and block, so nothing has to be fetched to open a run again, and
    # workers can make version 0 themselves.
    layouts, schemas = [], []
    for block in range(recipe.model.blocks):
        module = setup.initial(block)
        schema, tensors = schema_of(module), tensors_of(module)
        digest = snapshot_hash(tensors)
        # Version 0, where it is not stored yet: blobs come before the rows that name them.
        if blobs.size(snapshot_key(digest)) is None:
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
    opened = partial(_open_row, store, identity, recipe, text.sha256, layouts, now)
    try:
        run_id = opened()
    except IntegrityError:  # another process made the run between our look and our write
        run_id = opened()
    key = identity.public_key.hex()
    schemas_, layouts_ = tuple(schemas), tuple(layouts)
    return Run(run_id, recipe, text.sha256, key, codec, schemas_, layouts_, setup.objective)


def _open_row(
    store: Store,
    identity: Identity,
    recipe: Recipe,
    corpus: CorpusHash,
    layouts: Sequence[BlockLayout],
    now: float,
) -> str:
    """The run's id from its row; made with the ledger's first entry, or compared with what was given."""
    key = identity.public_key.hex()
    with store.write() as session:
        # There is one row, number 1; its primary key lets only one of two processes make the run.
        row = session.get(RunRow, 1, with_for_update=True)
        if row is None:
            description: dict[str, Any] = {
                "recipe": recipe.to_dict(),
                "corpus_sha256": corpus,
                "coordinator_key": key,
                "created": now,
                "blocks": [layout.model_dump(mode="json") for layout in layouts],
            }
            # The id is the hash of what all must agree on: two runs with one id would be one run.
            run_id = content_hash(canonical_json(description))
            row = RunRow(
                id=1,
                run_id=run_id,
                recipe=canonical_json(recipe.to_dict()).decode(),
                corpus_sha256=corpus,
                coordinator_key=key,
                created=now,
                ledger_length=0,
                ledger_hash=GENESIS_HASH,
            )
            session.add(row)
            session.flush()
            Ledger(identity).append(session, now, "run", {"run_id": run_id, **description})
            for one in layouts:
                head = one.initial_hash
                session.add(BlockRow(block=one.block, version=0, head_hash=head))
                session.add(SnapshotRow(block=one.block, version=0, hash=head, num_bytes=0, made=now))
            return run_id
        name = row.run_id[:12]
        changed = changed_settings(json.loads(row.recipe), recipe)
        for place in ("data.corpus", "data.dataset"):
            changed.pop(place, None)  # each machine has its text elsewhere; the hash is compared instead
        if changed:
            told = [f"{setting} was {old!r} and is {new!r}" for setting, (old, new) in changed.items()]
            shown = ", ".join(told[:3]) + (f" and {len(told) - 3} more" if len(told) > 3 else "")
            raise UserError(
                f"this data directory holds run {name} of another recipe: {shown}; use that recipe, or a new "
                "--data-dir"
            )
        if row.corpus_sha256 != corpus:
            raise UserError(
                f"this data directory holds run {name} on text {row.corpus_sha256[:12]}…, the recipe's text "
                f"is now {corpus[:12]}…; bring the text back, or use a new --data-dir"
            )
        if row.coordinator_key != key:
            raise UserError(
                f"run {name} in this database belongs to coordinator key {row.coordinator_key[:12]}…, this "
                f"one has {key[:12]}…; copy coordinator.key from the first coordinator's --data-dir"
            )
        return row.run_id
