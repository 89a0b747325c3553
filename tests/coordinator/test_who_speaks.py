"""Which block has the most say where: the sample, the pieces, and what is not shown."""

from __future__ import annotations

from pathlib import Path

import torch

from blocktrain.coordinator.scoring import sample_of_each_cluster, who_speaks
from blocktrain.data.tokenizer import ByteTokenizer
from tests.kinds import held_out_text, two_kinds


def test_the_sample_has_training_text_of_each_kind_and_no_other(tmp_path: Path) -> None:
    dataset = two_kinds(tmp_path)
    sample = bytes(sample_of_each_cluster(dataset, 60).tolist())
    files = [(tmp_path / f"train-0000{n}.bin").read_bytes() for n in (0, 1)]
    assert sample == files[0][:30] + files[1][:30]
    assert not any(sample[:30] in held_out_text(kind) for kind in (0, 1))


def test_pieces_are_the_runs_of_the_block_with_the_most_say() -> None:
    text = "abcdéf".encode()
    tokens = ByteTokenizer().encode(text)
    # Row t says who speaks token t + 1; the first token has nobody and goes with the second.
    first = torch.tensor([0.9, 0.7, 0.8, 0.4, 0.2, 0.1, 0.5])
    pieces = who_speaks(torch.stack([first, 1 - first]), tokens, ByteTokenizer())
    assert [(piece.block, piece.text) for piece in pieces] == [(0, "abcd"), (1, "éf")]
    assert abs(pieces[0].weight - 0.8) < 1e-6
    assert abs(pieces[1].weight - (0.6 + 0.8 + 0.9) / 3) < 1e-6
    assert "".join(piece.text for piece in pieces) == text.decode()
