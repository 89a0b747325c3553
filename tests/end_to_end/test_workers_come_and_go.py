"""Workers die, return, join late and leave; nobody else waits for them."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import httpx2
import pytest

from blocktrain.wire.identity import load_or_create
from blocktrain.wire.messages import BlockAnswer
from tests.end_to_end.swarm_kit import Coordinator, Kit, Program, tiny_recipe
from tests.waiting import until

SPARSE = {"codec": "sparse:64", "steps_per_round": 3, "rounds": 10_000, "lease_seconds": 3.0}


def worker_id(kit: Kit, name: str) -> str:
    return load_or_create(kit.folder / name / "key.pem").worker_id


def accepted(coordinator: Coordinator, worker: str) -> int:
    return sum(one.accepted for one in coordinator.status().workers if one.worker_id == worker)


def first_line(program: Program, pattern: str) -> str:
    def found() -> str:
        match = re.search(pattern, program.text())
        return match.group(0) if match else ""

    return until(f"{pattern!r} in {program.log.name}", found)


def test_a_killed_worker_delays_nobody_and_returns_as_itself_and_a_joiner_counts_at_once(
    kit: Kit, text: Path
) -> None:
    recipe = tiny_recipe(text, swarm={**SPARSE, "replicas": 2})
    coordinator = Coordinator(kit, recipe).start()
    steady, victim = kit.worker(coordinator.url, "steady"), kit.worker(coordinator.url, "victim")
    names = worker_id_when_there(kit, "steady"), worker_id_when_there(kit, "victim")
    until("both deliver", lambda: all(accepted(coordinator, name) for name in names))

    victim.kill()
    block = until("a round has begun", lambda: begun(coordinator))
    coordinator.reach(block.head_version + 2)
    assert all(
        names[0] in {one.worker_id for one in merge.inputs}
        for merge in coordinator.merges()[block.head_version :]
    )

    count = accepted(coordinator, names[1])
    kit.worker(coordinator.url, "victim")
    until("the victim delivers again", lambda: accepted(coordinator, names[1]) > count)
    assert len(coordinator.status().workers) == 2

    late = kit.worker(coordinator.url, "late")
    verdict = first_line(late, r"verdict .*")
    assert "outcome=accepted age=0" in verdict, verdict
    steady.stop()
    coordinator.verify()


def begun(coordinator: Coordinator) -> BlockAnswer | None:
    block = coordinator.client().block(0)
    return block if block.round.deadline is not None else None


def worker_id_when_there(kit: Kit, name: str) -> str:
    until(f"{name} has a key", lambda: (kit.folder / name / "key.pem").exists())
    return worker_id(kit, name)


def test_joiner_and_leaver_shift_replicas_and_a_run_without_workers(kit: Kit, text: Path) -> None:
    recipe = tiny_recipe(text, swarm={**SPARSE, "replicas": 1}, model={"blocks": 2})
    coordinator = Coordinator(kit, recipe).start()
    first = kit.worker(coordinator.url, "first")
    coordinator.reach(2, block=0)
    coordinator.reach(2, block=1)

    late = kit.worker(coordinator.url, "late")
    until("each has a block", lambda: blocks_of(coordinator) == {0, 1})

    assert first.stop() == 0, first.text()
    left = [block.head_version for block in coordinator.status().blocks]
    coordinator.reach(left[0] + 1, block=0)
    coordinator.reach(left[1] + 1, block=1)

    assert late.stop() == 0, late.text()
    before = [block.head_version for block in coordinator.status().blocks]
    again = kit.worker(coordinator.url, "late")
    coordinator.reach(before[0] + 1, block=0)
    coordinator.reach(before[1] + 1, block=1)
    assert again.stop() == 0
    coordinator.verify()


def blocks_of(coordinator: Coordinator) -> set[int | None]:
    return {worker.block for worker in coordinator.status().workers if worker.live}


def test_ctrl_c_hands_the_lease_back_and_another_text_is_refused(
    kit: Kit, text: Path, tmp_path: Path
) -> None:
    recipe = tiny_recipe(text, swarm={**SPARSE, "steps_per_round": 100_000})
    coordinator = Coordinator(kit, recipe).start()
    other = tmp_path / "other.txt"
    other.write_text("something else " * 500)
    arguments = ["worker", "--coordinator", coordinator.url, "--corpus", str(other)]
    stranger = kit.start("stranger", [*arguments, "--data-dir", str(tmp_path / "stranger")])
    worker = kit.worker(coordinator.url)
    first_line(worker, r"train block=0.*")
    assert worker.stop() == 0, worker.text()
    kinds = [entry.kind for entry in coordinator.ledger()]
    assert kinds.count("return") == kinds.count("assign") >= 1
    shown = kit.start("status", ["status", coordinator.url, "--json"])
    assert shown.wait() == 0
    assert json.loads(shown.text())["workers"][0]["worker_id"] == worker_id(kit, "worker")
    assert stranger.wait() == 2
    assert "this machine's text is not the run's" in stranger.text()


def test_a_worker_pauses_resumes_and_leaves_by_its_user_s_terms(kit: Kit, text: Path) -> None:
    coordinator = Coordinator(kit, tiny_recipe(text, swarm={**SPARSE, "steps_per_round": 20})).start()
    worker = kit.worker(coordinator.url, "worker", "--max-rounds", "2", "--max-up", "50", "--max-down", "50")
    first_line(worker, r"train block=0.*")
    worker.send(signal.SIGUSR1)
    first_line(worker, r"paused: asked to by SIGUSR1.*")
    kinds = [entry.kind for entry in coordinator.ledger()]
    assert kinds.count("return") + kinds.count("commit") >= kinds.count("assign"), (
        "nothing is held in a pause"
    )
    worker.send(signal.SIGUSR2)
    first_line(worker, r"resumed")
    assert worker.wait() == 0, worker.text()
    assert re.search(r"leaving: \d+ rounds? done, as --max-rounds asks\n", worker.text())
    assert re.search(r"\ncontributed [2-9] updates \(.*\), [\d,]+ steps in .* [kM]?B down\n$", worker.text())


@pytest.mark.slow
def test_a_worker_joining_at_round_fifty_counts_in_its_first_round(kit: Kit, text: Path) -> None:
    recipe = tiny_recipe(text, swarm={**SPARSE, "steps_per_round": 1})
    coordinator = Coordinator(kit, recipe).start()
    kit.worker(coordinator.url, "first")
    coordinator.reach(50)
    late = kit.worker(coordinator.url, "late")
    assert "outcome=accepted age=0" in first_line(late, r"verdict .*")


@pytest.mark.slow
def test_a_worker_that_slept_for_many_rounds_goes_on_by_itself(kit: Kit, text: Path) -> None:
    """Like a laptop: stopped in the middle of a round, woken when its work is too old to count."""
    recipe = tiny_recipe(text, swarm={**SPARSE, "replicas": 2, "min_deadline_seconds": 0.2})
    coordinator = Coordinator(kit, recipe).start()
    kit.worker(coordinator.url, "steady")
    sleeper = kit.worker(coordinator.url, "sleeper")
    name = worker_id_when_there(kit, "sleeper")
    until("the sleeper delivers", lambda: accepted(coordinator, name) >= 2)
    sleeper.send(signal.SIGSTOP)
    coordinator.reach(coordinator.version() + recipe.swarm.max_age + 3)
    count = accepted(coordinator, name)
    sleeper.send(signal.SIGCONT)
    until("it delivers again", lambda: accepted(coordinator, name) > count)
    assert re.search(r"cancelled|outcome=(late|refused)", sleeper.text()), sleeper.text()
    assert sleeper.stop() == 0
    coordinator.verify()


@pytest.mark.slow
def test_a_swarm_on_shared_storage_sends_payloads_straight_to_it(kit: Kit, text: Path) -> None:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    httpx2.put(f"{endpoint}/bucket").raise_for_status()
    storage = {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ALLOW_HTTP": "true",
    }
    recipe = tiny_recipe(text, swarm={"replicas": 2, "codec": "sign", "rounds": 5})
    coordinator = Coordinator(
        kit, recipe, options=["--blobs", "s3://bucket/run"], environment=storage
    ).start()
    workers = [kit.worker(coordinator.url, "one"), kit.worker(coordinator.url, "two")]
    coordinator.finished()
    assert [worker.wait() for worker in workers] == [0, 0], workers[0].text()
    assert all("outcome=accepted" in worker.text() for worker in workers)
    coordinator.verify()
    server.stop()
