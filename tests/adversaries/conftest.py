from __future__ import annotations

from pathlib import Path

import pytest

from tests.adversaries.attacks import nobody, play
from tests.adversaries.swarm import Warm, warmed_up


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Warm:
    """A judged run with established workers, made once."""
    return warmed_up(tmp_path_factory.mktemp("warm"))


@pytest.fixture(scope="session")
def usual_mb(warm: Warm, tmp_path_factory: pytest.TempPathFactory) -> float:
    """The coordinator's peak memory in a round that nobody attacks."""
    _, head, peak = play(warm, nobody, Path(tmp_path_factory.mktemp("nobody")) / "run")
    assert head == warm.next_hash
    return peak
