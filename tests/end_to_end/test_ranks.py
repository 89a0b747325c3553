"""One worker of two ranks, started by torchrun: it trains as one process does, and survives a killed rank."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from blocktrain.training.device import HOST
from blocktrain.training.local import LocalRun, Silent
from blocktrain.training.setup import with_swarm_schedule
from blocktrain.training.snapshot import from_safetensors, schema_of, tensors_of
from tests.end_to_end.swarm_kit import Coordinator, Kit, tiny_recipe
from tests.forked import ForkedProcess, processes, quick_python
from tests.waiting import PATIENCE_SECONDS, until


def run_torchrun(arguments: list[str], log: Path, python: str) -> None:
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.environ |= {"PYTHON_EXEC": python, "OMP_NUM_THREADS": "1"}
    from torch.distributed.run import main

    main(["--standalone", "--nproc-per-node", "2", "--max-restarts", "2", "-m", "blocktrain", *arguments])


@contextmanager
def torchrun(kit: Kit, coordinator: Coordinator, *flags: str) -> Iterator[ForkedProcess]:
    arguments = ["worker", "--coordinator", coordinator.url, "--data-dir", str(kit.folder / "ranks")]
    arguments += ["--device", "cpu", "--corpus", kit.corpus, *flags]
    log = kit.folder / "ranks.log"
    process = processes.Process(target=run_torchrun, args=(arguments, log, quick_python()))
    process.start()
    try:
        yield process
        process.join(PATIENCE_SECONDS)
        assert process.exitcode == 0, log.read_text()
    finally:
        process.terminate()
        process.join()


def children(pid: int) -> dict[str, int]:
    """The processes of a torchrun by rank."""
    found = {}
    for child in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
        try:
            environment = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        except OSError:
            continue  # it has ended
        ranks = [value[5:].decode() for value in environment if value.startswith(b"RANK=")]
        found.update(dict.fromkeys(ranks, child))
    return found


def test_a_worker_of_two_ranks_trains_what_the_local_loop_trains(
    kit: Kit, text: Path, tmp_path: Path
) -> None:
    recipe = tiny_recipe(text, training={"matrix_lr": 1e-3})
    coordinator = Coordinator(kit, recipe).start()
    with torchrun(kit, coordinator):
        status = coordinator.finished()
    (worker,) = status.workers
    assert worker.device.startswith("2x cpu")
    local = LocalRun(with_swarm_schedule(recipe), tmp_path / "local", HOST, Silent())
    local.train(resume=False)
    expected, schema = tensors_of(local.blocks[0]), schema_of(local.blocks[0])
    found = from_safetensors(
        coordinator.client().fetch(f"/v1/snapshots/{status.blocks[0].head_hash}"), schema
    )
    # Twelve steps of Muon, whose products are in bf16: 6e-5 where a weight has moved by 1e-2.
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, atol=3e-4, err_msg=name)
    first = tensors_of(local.setup.initial(0))
    assert max(float(np.abs(found[name] - values).max()) for name, values in first.items()) > 5e-3


def test_a_killed_rank_ends_the_round_and_the_worker_goes_on_from_the_head(kit: Kit, text: Path) -> None:
    recipe = tiny_recipe(text, swarm={"rounds": 6, "steps_per_round": 4, "lease_seconds": 60.0})
    coordinator = Coordinator(kit, recipe).start()
    with torchrun(kit, coordinator, "--shard", "yes") as process:
        coordinator.reach(1)
        assert (pid := process.pid) is not None
        first = children(pid)
        os.kill(first["1"], signal.SIGKILL)

        def started_again() -> bool:
            now = children(pid)
            return set(now) == {"0", "1"} and not set(now.values()) & set(first.values())

        until("both ranks are started again", started_again)
        status = coordinator.finished()
    assert len(status.workers) == 1
    assert coordinator.verify().merges == 6
