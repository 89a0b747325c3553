"""One test per attack that must leave no trace: refused with its reason, the next snapshot as without it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.adversaries import attacks
from tests.adversaries.attacks import REFUSED, Entry, play
from tests.adversaries.swarm import Warm

MAX_GROWTH_MB = 64


@pytest.mark.parametrize("entry", REFUSED, ids=lambda entry: f"{entry.number}-{entry.attack.__name__}")
def test_attack_is_refused_and_leaves_the_next_snapshot_as_it_was(
    entry: Entry, warm: Warm, usual_mb: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attacks, "SYBILS", 150)  # a thousand in benchmarks/attacks.py
    scene, head, peak = play(warm, entry.attack, tmp_path / "run")
    assert scene.surprises == []
    assert head == warm.next_hash
    assert peak - usual_mb < MAX_GROWTH_MB
