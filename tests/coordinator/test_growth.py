"""What an hour of rounds leaves behind, with the clock moved by hand: docs/host.md, "What grows"."""

from __future__ import annotations

from pathlib import Path

import fleet

from tests.coordinator.conftest import served, tiny_recipe

ROUNDS, ROUND_SECONDS = 20, 180.0
KEPT = 8


def test_an_hour_of_rounds_leaves_the_ledger_and_two_rows_of_each_update(tmp_path: Path) -> None:
    with served(tmp_path, tiny_recipe(blocks=1, rounds=100, keep_snapshots=KEPT)) as running:
        peer = running.peer()
        for number in range(ROUNDS):
            peer.deliver(peer.lend(), number)
            running.wait_for_version(0, number + 1)
            running.advance(ROUND_SECONDS)
        running.coordinator.sweep()
        rows = fleet.num_rows(running.coordinator.resources.store)
        assert rows["nonces"] == 0
        assert rows["updates"] == rows["assignments"] == rows["merges"] == ROUNDS
        # The run and the join; for an update assignment, commit, reveal and verdict, for a round merge and
        # snapshot.
        assert rows["ledger"] == 2 + (4 + 2) * ROUNDS
        assert len(list((tmp_path / "blobs" / "payloads").iterdir())) == ROUNDS
        assert len(list((tmp_path / "blobs" / "snapshots").iterdir())) == KEPT + 1
