"""The backup that docs/host.md describes: made while a run goes on, put back, and gone on with."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from blocktrain.coordinator.storage.blobs import payload_key
from blocktrain.judge.ledger_check import verify_place
from blocktrain.wire.hashing import content_hash
from blocktrain.wire.messages import Outcome
from tests.coordinator.conftest import served, tiny_recipe
from tests.docs.pages import ROOT, fences

PAGE = ROOT / "docs" / "host.md"
COPY, CHECK = "backup/coordinator.sqlite", "blocktrain ledger verify backup"


def documented_script() -> str:
    """The commands of the page, up to the one that checks the copy: the test does that itself."""
    (found,) = [fence.body for fence in fences(PAGE) if COPY in fence.body]
    script, _, rest = found.partition(CHECK)
    assert rest == "\n", "the block ends with the check"
    return re.sub(r"\bdata/demo\b", "data", script)


def test_a_run_that_is_copied_while_it_goes_on_can_be_put_back(tmp_path: Path) -> None:
    recipe = tiny_recipe(blocks=1, rounds=50)
    with served(tmp_path / "data", recipe) as running:
        peer = running.peer()
        peer.deliver(peer.lend(), 0)
        running.wait_for_version(0, 1)
        subprocess.run(["bash", "-e", "-c", documented_script()], cwd=tmp_path, check=True, timeout=60)
        peer.deliver(peer.lend(), 1)
        running.wait_for_version(0, 2)
    found = verify_place(str(tmp_path / "backup"))
    assert found.ok, found.report.reason
    assert found.report.merges == 1
    # The machine is lost: the copy takes its place, and the same worker goes on.
    shutil.rmtree(tmp_path / "data")
    (tmp_path / "backup").rename(tmp_path / "data")
    with served(tmp_path / "data", recipe, running.clock) as again:
        returned = again.peer(peer.identity)
        assert returned.deliver(returned.lend(), 2).outcome == Outcome.ACCEPTED
        again.wait_for_version(0, 2)
    assert verify_place(str(tmp_path / "data")).report.merges == 2


def test_a_payload_that_the_copy_came_too_late_for_does_not_stop_its_block(tmp_path: Path) -> None:
    recipe = tiny_recipe(blocks=1, replicas=2, rounds=50)
    with served(tmp_path / "data", recipe) as running:
        peer, other = running.peer(), running.peer()
        lease, others = peer.lend(), other.lend()
        assert peer.deliver(lease, 0).outcome == Outcome.ACCEPTED
    payload = content_hash(peer.payload(0, 0))
    (tmp_path / "data" / "blobs" / payload_key(payload)).unlink()
    with served(tmp_path / "data", recipe, running.clock) as again:
        told = again.coordinator.updates.verdict(peer.identity.worker_id, payload)
        assert (told.outcome, told.reason, told.held_against) == (Outcome.REFUSED, "removed", False)
        assert "backup" in told.sentence
        returned = again.peer(other.identity)
        assert returned.deliver(others, 1).outcome == Outcome.ACCEPTED
        again.advance(1000)
        again.wait_for_version(0, 1)
