"""Labels stand wherever ids do, and an id is accepted by its first digits or its label (A2.14)."""

from __future__ import annotations

import csv
import io
import time
from pathlib import Path

import pytest

from blocktrain.cli.workers import found_worker
from blocktrain.client.coordinator import public_client
from blocktrain.errors import UserError
from tests.cli.program import run_main
from tests.coordinator.conftest import served, tiny_recipe


def test_an_operator_bans_lifts_and_removes_by_label_and_by_first_digits(tmp_path: Path) -> None:
    with served(tmp_path, tiny_recipe(blocks=1)) as running:
        running.clock.now = time.time()
        anna, carl = running.peer(join=False), running.peer(join=False)
        anna.join(label="anna")
        carl.join(label="carl")
        anna.deliver(anna.lend())
        running.wait_for_version(0, 1)
        ids = {"anna": anna.identity.worker_id, "carl": carl.identity.worker_id}
        listed = run_main("workers", "ls", running.url).out
        assert all(f"{ids[name]} │ {name}" in listed for name in ids), listed
        table = list(csv.DictReader(io.StringIO(run_main("contributions", running.url, "--csv").out)))
        assert [(row["worker_id"], row["label"]) for row in table] == [(ids["anna"], "anna")]

        operator = ("--coordinator", running.url, "--data-dir", tmp_path)
        banned = run_main("workers", "ban", "carl", *operator, "--reason", "floods", "--hours", "2")
        assert banned.code == 0, banned.err
        assert f"banned {ids['carl']} (carl) for 2 h" in banned.out
        lifted = run_main("workers", "ban", ids["carl"][:8], *operator, "--reason", "done", "--hours", "0")
        assert f"lifted the ban of {ids['carl']} (carl)" in lifted.out
        assert f"removed {ids['carl']} (carl)" in run_main("workers", "rm", "carl", *operator).out
        unknown = run_main("workers", "rm", "dora", *operator)
        assert (unknown.code, "'dora' is no worker of this run" in unknown.complaint) == (2, True)


def test_a_name_that_fits_two_workers_is_refused_and_a_whole_id_is_taken(tmp_path: Path) -> None:
    with served(tmp_path, tiny_recipe(blocks=1)) as running:
        for _ in range(2):
            running.peer(join=False).join(label="twin")
        with public_client(running.url) as client:
            workers = client.workers().workers
    with pytest.raises(UserError, match=r"'twin' fits 2 workers \([0-9a-f]{12} twin, "):
        found_worker("twin", workers)
    with pytest.raises(UserError, match="is no worker"):
        found_worker("", workers)
    for one in workers:
        assert found_worker(one.worker_id, workers)[0] == one.worker_id
    assert found_worker("ab" * 16, workers) == ("ab" * 16, "ab" * 16)
