"""What makes two copies of a checkpoint the same model: the hash that HELLO compares.

It covers shapes, objective, tokenizer, pooling weights, the codebook and the hash of every block's file,
so a gateway that holds its drafting blocks alone and a stage that holds block 3 alone can still agree on it.
"""

from __future__ import annotations

from pathlib import Path

from blocktrain.errors import CheckpointError
from blocktrain.serving.engine.requests import ModelInfo
from blocktrain.serving.versions import versions_of
from blocktrain.training.checkpoint import Checkpoint, read_config
from blocktrain.wire.frame_metadata import MAX_NAME, ModelShape
from blocktrain.wire.hashing import canonical_json, content_hash, snapshot_hash


def fingerprint(path: Path, checkpoint: Checkpoint) -> ModelShape:
    """The fingerprint of the checkpoint that was loaded from `path`."""
    config = read_config(path)
    try:
        digests = [str(entry["sha256"]) for entry in config["blocks"]]
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{path / 'config.json'} is damaged: no {error} of its blocks") from None
    # The codebook has no file of its own in `blocks`, and rows mean nothing without it.
    codebook_hash = snapshot_hash({"table": checkpoint.codebook_VD.float().cpu().numpy()})
    recipe = checkpoint.recipe.to_dict()
    bound = {
        "model": recipe["model"],
        "objective": recipe["objective"],
        "tokenizer": checkpoint.tokenizer.name,
        # As hex: every bit of a weight counts.
        "pooling": [float(weight).hex() for weight in checkpoint.pooling.weights],
        "codebook": codebook_hash,
        "blocks": digests,
    }
    if checkpoint.pooling.follows_text:
        bound["pooling_follows_text"] = [
            float(one).hex() for one in (*checkpoint.pooling.decays, *checkpoint.pooling.taus)
        ]
    return ModelShape(
        name=checkpoint.recipe.name[:MAX_NAME],
        model_hash=content_hash(canonical_json(bound)),
        codebook_hash=codebook_hash,
        vocabulary=checkpoint.tokenizer.vocabulary,
        width=checkpoint.recipe.model.width,
        context=checkpoint.recipe.model.context,
        num_blocks=checkpoint.recipe.model.blocks,
    )


def model_mismatch(*, expected: ModelShape, found: ModelShape) -> str | None:
    """A sentence that names both models, or None when they are the same."""
    if expected == found:
        return None
    names = ", ".join(
        f"{field} {getattr(expected, field)} against {getattr(found, field)}"
        for field in ("vocabulary", "width", "context", "num_blocks")
        if getattr(expected, field) != getattr(found, field)
    )
    return (
        f"this stage serves model {expected.name!r} ({expected.model_hash[:12]}), the other side asks for "
        f"{found.name!r} ({found.model_hash[:12]})"
        + (f": {names}" if names else "")
        + "; give both the same checkpoint"
    )


def model_info(path: Path, checkpoint: Checkpoint, shape: ModelShape) -> ModelInfo:
    """What clients are told of the checkpoint that was loaded from `path`."""
    return ModelInfo(
        name=shape.name,
        model_hash=shape.model_hash,
        vocabulary=shape.vocabulary,
        context=shape.context,
        num_blocks=shape.num_blocks,
        tokenizer=checkpoint.tokenizer,
        trained_for_sweep=checkpoint.objective.trained_for_sweep,
        versions=versions_of(path),
    )
