"""Files a worker keeps: whole or not at all, bounded, and never a reason not to start."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch
from safetensors import safe_open

from blocktrain.client.cache import BlobCache
from blocktrain.client.snapshots import Base
from blocktrain.errors import StorageError, UserError
from blocktrain.wire.messages import Receipt
from blocktrain.worker.block_progress import PendingState, PendingUpdate
from blocktrain.worker.state import StateFolder


def state_folder(folder: Path, report: Callable[[str], None] = print) -> StateFolder:
    return StateFolder(folder, report, BlobCache(folder / "cache", 1 << 30, folder.parent))


def test_the_cache_keeps_what_was_used_last(tmp_path: Path) -> None:
    cache = BlobCache(tmp_path, max_bytes=250)
    for age, name in enumerate(["old", "used"]):
        os.utime(cache.put(name, b"x" * 100), ns=(age, age))
    cache.put("new", b"x" * 100)
    assert cache.path("old") is None
    assert cache.read("used") == b"x" * 100


def test_a_blob_larger_than_the_bound_is_still_kept(tmp_path: Path) -> None:
    cache = BlobCache(tmp_path, max_bytes=10)
    cache.put("small", b"x")
    cache.put("large", b"x" * 100)
    assert cache.read("large") == b"x" * 100
    assert cache.path("small") is None


def test_feedback_and_unsettled_updates_are_saved_together(tmp_path: Path) -> None:
    state = state_folder(tmp_path)
    update = PendingUpdate(
        assignment_id="a",
        block=3,
        round=1,
        state=PendingState.FORMED,
        loss=2.0,
        base=Base(1, "c", {}),
        payload_hash="b",
    )
    feedback = {"w": np.arange(4, dtype=np.float32)}
    state.save_feedback(3, feedback, [update])
    loaded, updates = state.load_feedback(3)
    assert loaded is not None
    np.testing.assert_array_equal(loaded["w"], feedback["w"])
    assert [vars(one) for one in updates] == [vars(update)]
    state.save_feedback(3, None, [])
    assert state.load_feedback(3) == (None, [])
    assert state.load_feedback(4) == (None, [])


def test_a_feedback_file_of_an_earlier_version_opens(tmp_path: Path) -> None:
    """As commit 59aa936 wrote it: the updates as JSON in the metadata."""
    outbox = (
        '{"updates":[{"assignment_id":"a","payload_hash":"b","base_version":4,"base_hash":"c","loss":2.5}]}'
    )
    feedback = {"w": np.arange(4, dtype=np.float32)}
    safetensors.numpy.save_file(feedback, tmp_path / "block-0.feedback", {"outbox": outbox})
    (tmp_path / "block-0.snapshot").write_text('{"version":4,"hash":"c"}')
    (tmp_path / "last-block").write_text("0")
    state = state_folder(tmp_path)
    loaded, (update,) = state.load_feedback(0)
    assert loaded is not None
    np.testing.assert_array_equal(loaded["w"], feedback["w"])
    assert (update.assignment_id, update.payload_hash, update.loss) == ("a", "b", 2.5)
    assert update.base == Base(4, "c", {})
    kept = state.load_snapshot_name(0)
    assert kept is not None
    assert (kept.version, kept.hash, state.load_last_block()) == (4, "c", 0)
    state.save_feedback(0, loaded, [update])
    with safe_open(tmp_path / "block-0.feedback", "numpy") as file:
        assert file.metadata()["outbox"] == outbox, "and that version opens ours"


def test_optimizer_state_comes_back_bit_for_bit(tmp_path: Path) -> None:
    state = state_folder(tmp_path)
    tensors = {"0.1.momentum": torch.randn(3, 2), "1.0.step": torch.tensor(7.0)}
    state.save_optimizer(0, tensors)
    loaded = state.load_optimizer(0)
    assert loaded is not None
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    assert state.load_optimizer(1) is None


def test_damaged_state_is_reported_and_left_out(tmp_path: Path) -> None:
    lines: list[str] = []
    state = state_folder(tmp_path, lines.append)
    for name in ("block-0.feedback", "block-0.optimizer", "block-0.snapshot", "last-block"):
        (tmp_path / name).write_bytes(b"\xff" * 20)
    assert state.load_feedback(0) == (None, [])
    assert state.load_optimizer(0) is None
    assert state.load_snapshot_name(0) is None
    assert state.load_last_block() is None
    assert len(lines) == 2


def test_two_workers_cannot_share_a_folder(tmp_path: Path) -> None:
    with state_folder(tmp_path).locked():
        second = state_folder(tmp_path).locked()
        with pytest.raises(UserError, match="its own --data-dir"):
            second.__enter__()
    with state_folder(tmp_path).locked():
        pass


def test_two_threads_may_save_at_once(tmp_path: Path) -> None:
    state = state_folder(tmp_path)
    feedback = {"w": np.zeros(100_000, np.float32)}
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: state.save_feedback(0, feedback, []), range(40)))
    assert state.load_feedback(0)[0] is not None


def test_a_flipped_byte_in_state_is_noticed(tmp_path: Path) -> None:
    lines: list[str] = []
    state = state_folder(tmp_path, lines.append)
    state.save_feedback(0, {"w": np.ones(64, np.float32)}, [])
    state.save_optimizer(0, {"m": torch.ones(64)})
    for name in ("block-0.feedback", "block-0.optimizer"):
        content = bytearray((tmp_path / name).read_bytes())
        content[-3] ^= 1
        (tmp_path / name).write_bytes(content)
    assert state.load_feedback(0) == (None, [])
    assert state.load_optimizer(0) is None
    assert ["it is not what was written" in line for line in lines] == [True, True]


# --- one bound for everything -----------------------------------------------------------------------------

RUN, OTHER_RUN = "0123456789abcdef", "fedcba9876543210"


def disk_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_the_bound_holds_for_blobs_state_receipts_and_other_runs_together(tmp_path: Path) -> None:
    bound = 100_000
    cache = BlobCache(tmp_path / RUN / "cache", bound, tmp_path)
    state = StateFolder(tmp_path / RUN, print, cache)
    earlier = tmp_path / OTHER_RUN
    (earlier / "cache").mkdir(parents=True)
    for name in ("lock", "block-0.feedback", "receipts.jsonl", "cache/a.text"):
        (earlier / name).write_bytes(b"" if name == "lock" else bytes(20_000))
    (tmp_path / "letters.txt").write_bytes(bytes(3 * bound))
    receipt = Receipt(sequence=1, entry_hash="0f" * 32, signature="0f" * 64)

    def download(number: int) -> None:
        cache.partial(f"{number}.text", 8_000).write_bytes(bytes(8_000))
        cache.complete(f"{number}.text")

    acts: list[Callable[[int], object]] = [
        lambda n: cache.put(f"{n}.update", bytes(9_000)),
        lambda n: state.save_feedback(n % 3, {"w": np.zeros(2_500, np.float32)}, []),
        lambda n: state.save_optimizer(n % 3, {"m": torch.zeros(5_000)}),
        lambda n: state.save_receipt(receipt),
        download,
    ]
    with state.locked():
        for number in range(30):
            for act in acts:
                act(number)
                assert disk_bytes(tmp_path / RUN) + disk_bytes(earlier) <= bound
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(lambda n: acts[n % len(acts)](n // len(acts)), range(150, 300)))
        assert bound / 2 < disk_bytes(tmp_path / RUN) + disk_bytes(earlier) <= bound
        assert len((state.folder / "receipts.jsonl").read_text().splitlines()) == 60
        acts[1](0)
        assert state.load_feedback(0)[0] is not None, "what was written last stays"
    assert not (earlier / "cache" / "a.text").exists(), "the oldest goes first"
    assert (tmp_path / "letters.txt").stat().st_size == 3 * bound, "what is not a run's stays"


def test_what_can_never_fit_is_refused_with_the_remedy_and_leaves_nothing(tmp_path: Path) -> None:
    cache = BlobCache(tmp_path / RUN / "cache", 10_000, tmp_path)
    state = StateFolder(tmp_path / RUN, print, cache)
    with state.locked():
        for attempt in (
            lambda: cache.put("a", bytes(10_001)),
            lambda: cache.partial("a", 10_001),
            lambda: state.save_optimizer(0, {"m": torch.zeros(2_600)}),
        ):
            with pytest.raises(StorageError, match="name a larger --cache-gb"):
                attempt()
        assert disk_bytes(tmp_path) == 0


def test_a_run_that_another_worker_is_in_keeps_its_files(tmp_path: Path) -> None:
    cache = BlobCache(tmp_path / RUN / "cache", 10_000, tmp_path)
    (tmp_path / OTHER_RUN).mkdir()
    (tmp_path / OTHER_RUN / "block-0.feedback").write_bytes(bytes(6_000))
    code = (
        "import sys; from pathlib import Path; from blocktrain.files import locked_file\n"
        "with locked_file(Path(sys.argv[1]), 'taken'): print('in', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path / OTHER_RUN / "lock")]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdout is not None
    assert other.stdout.readline() == b"in\n"
    with StateFolder(tmp_path / RUN, print, cache).locked():
        with pytest.raises(StorageError, match="name a larger --cache-gb"):
            cache.put("a", bytes(5_000))
        other.communicate(b"")
        cache.put("a", bytes(5_000))
    assert not (tmp_path / OTHER_RUN / "block-0.feedback").exists()
