"""The run's newest model as one download: a checkpoint folder in a tar file, made while it is sent.

Snapshots are safetensors files of a block's parameters, as a checkpoint has them, so their bytes are passed
on as they are: no copy on disk, one piece at a time in memory. config.json comes last, for it names the
hashes of the files before it. Not covered: whether these are the snapshots that the ledger names;
`blocktrain checkpoint` checks that.
"""

from __future__ import annotations

import hashlib
import json
import tarfile
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import safetensors.torch
from sqlalchemy import select

from blocktrain.coordinator.refusals import Refusal
from blocktrain.coordinator.resources import Resources
from blocktrain.coordinator.storage.blobs import Blobs, snapshot_key
from blocktrain.coordinator.storage.store import BlockRow, EvaluationRow
from blocktrain.data.dataset import TOKENIZER
from blocktrain.model.pooling import Pooling
from blocktrain.training.checkpoint import CODEBOOK_FILE, block_file, checkpoint_config
from blocktrain.training.setup import Setup, with_swarm_schedule
from blocktrain.wire.messages import ErrorReason, EvaluationState

FOLDER = "checkpoint"


@dataclass(frozen=True)
class _Part:
    """A file of the folder: `content`, or an object of the blob store."""

    name: str
    num_bytes: int
    content: bytes | None = None
    key: str = ""


@dataclass(frozen=True)
class ModelArchive:
    name: str
    blobs: Blobs
    parts: Sequence[_Part]
    """Everything but config.json."""
    config: Callable[[dict[str, dict[str, Any]]], bytes]
    """config.json from an entry for each part. Its length depends on no hash."""
    made: float

    def _config(self, hashes: dict[str, str]) -> bytes:
        return self.config(
            {
                part.name: {"file": part.name, "sha256": hashes[part.name], "bytes": part.num_bytes}
                for part in self.parts
            }
        )

    @property
    def num_bytes(self) -> int:
        blank = self._config({part.name: "0" * 64 for part in self.parts})
        sizes = [*(part.num_bytes for part in self.parts), len(blank)]
        return sum(tarfile.BLOCKSIZE + size + _padding(size) for size in sizes) + 2 * tarfile.BLOCKSIZE

    async def stream(self) -> AsyncIterator[bytes]:
        hashes: dict[str, str] = {}
        for part in self.parts:
            yield self._head(part.name, part.num_bytes)
            digest = hashlib.sha256()
            if part.content is not None:
                digest.update(part.content)
                yield part.content
            else:
                async for piece in self.blobs.stream(part.key, 0, part.num_bytes):
                    digest.update(piece)
                    yield piece
            yield bytes(_padding(part.num_bytes))
            hashes[part.name] = digest.hexdigest()
        config = self._config(hashes)
        yield self._head("config.json", len(config)) + config + bytes(_padding(len(config)))
        yield bytes(2 * tarfile.BLOCKSIZE)

    def _head(self, name: str, num_bytes: int) -> bytes:
        entry = tarfile.TarInfo(f"{FOLDER}/{name}")
        entry.size, entry.mtime, entry.mode = num_bytes, int(self.made), 0o644
        return entry.tobuf(tarfile.GNU_FORMAT)  # not ustar, which ends at 8 GiB a file


def newest_model(resources: Resources) -> ModelArchive:
    """The heads of all blocks as they are now."""
    run, blobs = resources.run, resources.blobs
    with resources.store.read() as session:
        heads = session.execute(select(BlockRow.version, BlockRow.head_hash).order_by(BlockRow.block)).all()
        newest = select(EvaluationRow.record).order_by(EvaluationRow.time.desc()).limit(1)
        record = session.scalar(newest)
    # Equal votes until the model was scored, as `blocktrain checkpoint` has them.
    pooling = Pooling((1 / len(heads),) * len(heads))
    if record is not None:
        scored = EvaluationState.model_validate_json(record)
        pooling = Pooling(scored.weights, scored.decays, scored.taus)
    parts = []
    for index, (_, digest) in enumerate(heads):
        size = blobs.size(snapshot_key(digest))
        if size is None:
            raise Refusal(ErrorReason.NOT_FOUND, f"the snapshot of block {index} is not in the blob store")
        parts.append(_Part(block_file(index), size, key=snapshot_key(digest)))
    recipe = with_swarm_schedule(run.recipe)
    table = Setup.of_swarm(run.recipe, run.objective.vocabulary).codebook()().detach().contiguous()
    codebook = safetensors.torch.save({"table": table})
    parts.append(_Part(CODEBOOK_FILE, len(codebook), codebook))
    tokenizer = None if resources.text is None else resources.text.tokenizer()
    if tokenizer is not None:
        parts.append(_Part(TOKENIZER, len(tokenizer), tokenizer))

    def config(entries: dict[str, dict[str, Any]]) -> bytes:
        blocks = [entries[block_file(index)] for index in range(len(heads))]
        content = checkpoint_config(recipe, run.corpus_sha256, pooling, blocks, entries[CODEBOOK_FILE])
        if tokenizer is not None:
            content["tokenizer"] = entries[TOKENIZER]
        return json.dumps(content, indent=2, sort_keys=True).encode() + b"\n"

    rounds = min(version for version, _ in heads)
    name = f"{FOLDER}-{run.run_id[:8]}-round-{rounds}.tar"
    return ModelArchive(name, blobs, parts, config, resources.clock())


def _padding(num_bytes: int) -> int:
    return -num_bytes % tarfile.BLOCKSIZE
