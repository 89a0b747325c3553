"""Judges elsewhere share the queue; the command line verifies what a coordinator wrote."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import sqlite3
import threading
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from blocktrain.cli.main import app
from blocktrain.client.coordinator import CoordinatorClient, RequestRefused
from blocktrain.client.traffic import Traffic
from blocktrain.judge.judge import Judge
from blocktrain.validation.evidence import report_of
from blocktrain.validation.scorer import Scorer
from blocktrain.wire.codec import decode, encode
from blocktrain.wire.hashing import content_hash
from blocktrain.wire.identity import Identity
from blocktrain.wire.messages import JudgeTask, Outcome, Receipt
from tests.coordinator.conftest import Running
from tests.trust.kit import Trainer, judged, judged_recipe
from tests.validation.kit import corpus


class LocalClient(CoordinatorClient):
    """Signs by the test's clock."""

    def __init__(self, running: Running, identity: Identity) -> None:
        super().__init__(running.url, identity, Traffic(), threading.Event(), lambda _: None, attempts=2)
        running.clients.callback(self.close)
        self.clock = running.clock
        self.audience = self.run().run_id


def test_a_judge_elsewhere_judges_and_a_dead_one_delays_only_its_own(tmp_path: Path) -> None:
    recipe = judged_recipe(judge="external", guard=False)
    with judged(tmp_path, recipe) as running:
        worker = Trainer(running, recipe)
        assignment = worker.peer.lend()
        payload = encode(worker.peer.codec, worker.peer.schema(0), worker.train(assignment))
        first = worker.peer.reveal(worker.peer.commit(assignment, payload), payload)
        assert first.outcome is Outcome.PENDING
        dead, alive = Identity.generate(), Identity.generate()
        with pytest.raises(RequestRefused) as found:
            LocalClient(running, dead).judge_lease()
        assert found.value.reason == "not_judge"
        (tmp_path / "judges.txt").write_text(f"{dead.worker_id}\n{alive.worker_id}\n")
        lost = LocalClient(running, dead).judge_lease()
        assert isinstance(lost, JudgeTask)
        client = LocalClient(running, alive)
        assert client.judge_lease().kind == "wait"
        running.advance(recipe.trust.judge_lease_seconds + 1)
        task = client.judge_lease()
        assert isinstance(task, JudgeTask)
        assert task.update_id == lost.update_id
        decoded = decode(
            worker.peer.codec, worker.peer.schema(0), client.judge_payload(task.update_id, 10**7)
        )
        base = worker.peer.snapshot(0, task.head_hash)
        evidence = Scorer(recipe, corpus()).judge(task, worker.peer.codec, base, base, decoded, {})
        with pytest.raises(RequestRefused) as found:
            LocalClient(running, dead).judge_report(task.update_id, report_of(evidence))
        assert found.value.reason == "lease_lost"
        client.judge_report(task.update_id, report_of(evidence))
        assert worker.wait(payload).outcome is Outcome.ACCEPTED
        running.wait_for_version(0, 1)


def test_a_judge_that_dies_holds_up_no_verdict_but_its_own(tmp_path: Path) -> None:
    recipe = judged_recipe({"replicas": 2, "max_deadline_seconds": 100.0}, judge="external", guard=False)
    with judged(tmp_path, recipe) as running:
        workers = [Trainer(running, recipe) for _ in range(2)]
        payloads = []
        for worker, lease in [(worker, worker.peer.lend()) for worker in workers]:
            payloads.append(encode(worker.peer.codec, worker.peer.schema(0), worker.train(lease)))
            worker.peer.reveal(worker.peer.commit(lease, payloads[-1]), payloads[-1])
        dead, alive = Identity.generate(), Identity.generate()
        (tmp_path / "judges.txt").write_text(f"{dead.worker_id}\n{alive.worker_id}\n")
        lost, client = LocalClient(running, dead).judge_lease(), LocalClient(running, alive)
        task = client.judge_lease()
        assert isinstance(lost, JudgeTask)
        assert isinstance(task, JudgeTask)
        number = [content_hash(payload) for payload in payloads].index(task.payload_hash)
        base = workers[0].peer.snapshot(0, task.head_hash)
        decoded = decode(workers[0].peer.codec, workers[0].peer.schema(0), payloads[number])
        evidence = Scorer(recipe, corpus()).judge(task, workers[0].peer.codec, base, base, decoded, {})
        client.judge_report(task.update_id, report_of(evidence))
        assert workers[number].wait(payloads[number]).outcome is not Outcome.PENDING
        path = f"/v1/updates/{lost.payload_hash}/verdict"
        assert workers[1 - number].peer.call("GET", path).json()["outcome"] == "pending"


def test_the_judge_program_works_through_the_queue(tmp_path: Path) -> None:
    """With held-out text that it fetches by its key."""
    recipe = judged_recipe(judge="external")
    with judged(tmp_path, recipe) as running:
        worker, identity = Trainer(running, recipe), Identity.generate()
        (tmp_path / "judges.txt").write_text(identity.worker_id)
        said: list[str] = []
        program = Judge(LocalClient(running, identity), torch.device("cpu"), None, None, said.append)
        stop = threading.Event()
        thread = threading.Thread(target=program.run, args=(stop,), daemon=True)
        thread.start()
        try:
            assert worker.round().outcome is Outcome.ACCEPTED
        finally:
            stop.set()
            thread.join(10)
        assert "judged update=" in said[0]


# --- ledger and contributions by command line -----------------------------------------------------------


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.stdout


def test_the_command_line_verifies_a_run_and_its_receipts(tmp_path: Path) -> None:
    folder, recipe = tmp_path / "run", judged_recipe()
    receipts = tmp_path / "worker" / "receipts.jsonl"
    receipts.parent.mkdir()
    with judged(folder, recipe) as running:
        worker = Trainer(running, recipe)
        verdict = worker.round()
        running.wait_for_version(0, 1)
        receipts.write_text(verdict.receipt.model_dump_json() + "\n")
        code, text = run("ledger", "verify", str(folder), "--receipts", str(receipts.parent))
        assert (code, "1 receipts agree" in text) == (0, True), text
        code, text = run("ledger", "verify", running.url, "--against", str(folder), "--json")
        assert code == 0
        assert json.loads(text)["merges"] == 1
        contributions(running, worker)
    two_heads(folder, receipts, verdict.receipt)
    cut_off(folder, receipts)
    tampered(folder)


def contributions(running: Running, worker: Trainer) -> None:
    code, text = run("contributions", running.url)
    assert code == 0
    statement = json.loads(text)["statement"]
    assert [one["worker_id"] for one in statement["workers"]] == [worker.peer.identity.worker_id]
    code, text = run("contributions", running.url, "--csv")
    (row,) = csv.DictReader(io.StringIO(text))
    assert int(row["merged"]) == 1
    assert float(row["gain"]) > 0
    code, text = run("workers", "ls", running.url, "--json")
    assert json.loads(text)["workers"][0]["merged"] == 1
    code, text = run("workers", "ls", running.url)
    assert worker.peer.identity.worker_id in text, "an id is shown whole, however narrow the terminal"


def two_heads(folder: Path, receipts: Path, receipt: Receipt) -> None:
    """The coordinator's key signed another hash for the same number."""
    from blocktrain.coordinator.storage.ledger import signed_bytes
    from blocktrain.wire.identity import load_or_create

    other = "ab" * 32
    signature = load_or_create(folder / "coordinator.key").sign(signed_bytes(other)).hex()
    forged = Receipt(sequence=receipt.sequence, entry_hash=other, signature=signature)
    receipts.write_text(forged.model_dump_json() + "\n")
    code, text = run("ledger", "verify", str(folder), "--receipts", str(receipts))
    assert code == 1
    assert "two heads" in text


def cut_off(folder: Path, receipts: Path) -> None:
    from blocktrain.coordinator.storage.ledger import signed_bytes
    from blocktrain.wire.identity import load_or_create

    signature = load_or_create(folder / "coordinator.key").sign(signed_bytes("cd" * 32)).hex()
    gone = Receipt(sequence=999, entry_hash="cd" * 32, signature=signature)
    receipts.write_text(gone.model_dump_json() + "\n")
    code, text = run("ledger", "verify", str(folder), "--receipts", str(receipts))
    assert code == 1
    assert "is gone" in text


def tampered(folder: Path) -> None:
    with contextlib.closing(sqlite3.connect(folder / "coordinator.sqlite")) as database, database:
        database.execute(
            "UPDATE ledger SET body = replace(body, 'accepted', 'accEpted') WHERE kind = 'verdict'"
        )
    code, text = run("ledger", "verify", str(folder))
    assert code == 1
    assert "entry 5 (verdict)" in text


def test_a_folder_without_a_ledger_is_misuse(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["ledger", "verify", str(tmp_path)])
    assert "expected a coordinator's --data-dir" in str(result.exception)
