"""What shorter activations between the parts of a serial model cost: bytes, loss, and how far rows are off.

    blocktrain import MODEL --to parts --parts 3
    python benchmarks/activations.py parts --text held-out.txt --json activations.json

Every part runs in this process; what passes from one to the next is encoded and decoded as between stages.
Prints for each way: bytes of a position at a hop, cross entropy, the largest and the usual error of a row's
likely tokens, and how many greedy choices differ from fp32's. Exits 1 where bf16 costs more than 0.001 nats.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from provenance import check_claims, write_report

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
from blocktrain.serving.blocks import HeldBlocks, RowWork
from blocktrain.training.checkpoint import Checkpoint, load_checkpoint
from blocktrain.wire.frames import ActivationCodec, activation_bytes, decode_activations, encode_activations

WAYS = (ActivationCodec.F32, ActivationCodec.BF16, ActivationCodec.Q8)
LIKELY_NATS = 5.0
"""A row's tokens so far below its best count as likely."""


def rows_through(parts: Sequence[HeldBlocks], ids: list[int], codec: ActivationCodec) -> NDArray[np.float64]:
    """The last part's log-probs of every position."""
    upstream = None
    for index, part in enumerate(parts):
        last = index == len(parts) - 1
        work = RowWork(ids, len(ids), (index,) if last else (), part.new_caches([index], alone=True))
        work.upstream_TD = upstream
        found = part.rows([work])[0]
        if found.features_TD is not None:
            sent = encode_activations(found.features_TD, codec)
            upstream = decode_activations(sent, codec, len(ids), found.features_TD.shape[1])
    return found.rows.astype(np.float64)


def measure(checkpoint: Checkpoint, windows: list[list[int]]) -> list[dict[str, Any]]:
    parts = [
        HeldBlocks(
            Checkpoint(
                checkpoint.recipe,
                checkpoint.corpus_sha256,
                checkpoint.objective,
                [block],
                checkpoint.codebook_VD,
                checkpoint.pooling,
                checkpoint.tokenizer,
            ),
            [index],
        )
        for index, block in enumerate(checkpoint.blocks)
    ]
    found: dict[ActivationCodec, list[NDArray[np.float64]]] = {
        codec: [rows_through(parts, ids[:-1], codec) for ids in windows] for codec in WAYS
    }
    table = []
    for codec in WAYS:
        losses, errors, differ = [], [], 0
        for ids, exact, rows in zip(windows, found[ActivationCodec.F32], found[codec], strict=True):
            losses.append(-rows[np.arange(len(rows)), ids[1:]])
            likely = exact > exact.max(axis=-1, keepdims=True) - LIKELY_NATS
            errors.append(np.abs(rows - exact)[likely])
            differ += int((rows.argmax(axis=-1) != exact.argmax(axis=-1)).sum())
        error, loss = np.concatenate(errors), np.concatenate(losses)
        table.append(
            {
                "activations": codec.value,
                "bytes_per_position": activation_bytes(codec, checkpoint.recipe.model.width),
                "ce": float(loss.mean()),
                "largest_error": float(error.max()),
                "median_error": float(np.median(error)),
                "greedy_choices_that_differ": differ,
                "positions": len(loss),
            }
        )
    return table


def claims_of(rows: Sequence[dict[str, Any]]) -> dict[str, bool]:
    ce = {row["activations"]: row["ce"] for row in rows}
    return {"bf16 costs at most 0.001 nats": abs(ce["bf16"] - ce["f32"]) <= 0.001}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=16, help="of a context each, from the beginning")
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    checkpoint = load_checkpoint(arguments.checkpoint, torch.device("cpu"))
    if not checkpoint.objective.is_serial:
        sys.exit(f"{arguments.checkpoint} is no serial model; make one with `blocktrain import --parts N`")
    # Eight bytes for a token are enough for all tokenizers we know.
    length = checkpoint.recipe.model.context + 1
    with arguments.text.open("rb") as file:
        text = file.read(8 * length * arguments.windows).decode("utf-8", "ignore")
    tokens = checkpoint.tokenizer.encode(text.encode()).tolist()
    windows = [tokens[i * length : (i + 1) * length] for i in range(arguments.windows)]
    rows = measure(checkpoint, [ids for ids in windows if len(ids) == length])
    print("activations  bytes  ce        largest error  median error  other greedy choices")
    for row in rows:
        print(
            f"{row['activations']:11s}  {row['bytes_per_position']:5d}  {row['ce']:.6f}  "
            f"{row['largest_error']:13.6f}  {row['median_error']:12.6f}  "
            f"{row['greedy_choices_that_differ']} of {row['positions']}"
        )
    write_report(arguments.json, "activations", rows)
    sys.exit(check_claims(claims_of(rows)))


if __name__ == "__main__":
    main()
