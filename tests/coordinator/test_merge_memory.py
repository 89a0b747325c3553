"""A coordinator merges blocks that it could not hold several times over."""

from __future__ import annotations

import dataclasses
import tracemalloc

import pytest

from tests.coordinator.conftest import Place, tiny_recipe


@pytest.mark.parametrize("codec", ["sign", "dense"])
def test_two_updates_are_merged_in_less_than_one_and_a_half_times_their_block(
    local: Place, codec: str
) -> None:
    """Counted is what numpy and Python allocate, in coordinator and clients, from reveal to new head."""
    recipe = tiny_recipe(1, replicas=2, codec=codec)
    model = dataclasses.replace(recipe.model, width=384, heads=4, layers_per_block=3)
    with local.serve(dataclasses.replace(recipe, model=model)) as running:
        peers = [running.peer(), running.peer()]
        payloads = [peer.payload(0, seed) for seed, peer in enumerate(peers)]
        commits = [peer.commit(peer.lend(), payload) for peer, payload in zip(peers, payloads, strict=True)]
        block_bytes = 4 * peers[0].schema(0).num_values
        tracemalloc.start()
        try:
            for peer, committed, payload in zip(peers, commits, payloads, strict=True):
                peer.reveal(committed, payload)
            running.wait_for_version(0, 1)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert block_bytes > 20_000_000
        assert peak < 1.5 * block_bytes
