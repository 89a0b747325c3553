from __future__ import annotations

import pytest

from tests.adversaries.attacks import everybody_works, nobody, play
from tests.adversaries.swarm import Settings, Warm, warmed_up


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Warm:
    """A judged run with established workers, made once."""
    return warmed_up(tmp_path_factory.mktemp("warm"), Settings(steps=12, batch=16))


@pytest.fixture(scope="session")
def usual_mb(warm: Warm, tmp_path_factory: pytest.TempPathFactory) -> float:
    """The coordinator's peak memory in a round of as many updates that nobody attacks."""
    folder = tmp_path_factory.mktemp("unattacked")
    _, head, _ = play(warm, nobody, folder / "nobody")
    assert head == warm.next_hash
    return play(warm, everybody_works, folder / "everybody")[2]
