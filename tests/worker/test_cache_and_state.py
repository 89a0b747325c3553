"""Files a worker keeps: whole or not at all, bounded, and never a reason not to start."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch
from safetensors import safe_open

from blocktrain.client.cache import BlobCache
from blocktrain.client.snapshots import Base
from blocktrain.errors import UserError
from blocktrain.worker.block_progress import PendingState, PendingUpdate
from blocktrain.worker.state import StateFolder


def test_the_cache_keeps_what_was_used_last(tmp_path: Path) -> None:
    cache = BlobCache(tmp_path, max_bytes=250)
    for age, name in enumerate(["old", "used", "new"]):
        path = cache.put(name, b"x" * 100)
        os.utime(path, ns=(age, age))
        if name == "new":
            cache.trim(keep=path)
    assert cache.path("old") is None
    assert cache.read("used") == b"x" * 100


def test_a_blob_larger_than_the_bound_is_still_kept(tmp_path: Path) -> None:
    cache = BlobCache(tmp_path, max_bytes=10)
    cache.put("small", b"x")
    cache.put("large", b"x" * 100)
    assert cache.read("large") == b"x" * 100
    assert cache.path("small") is None


def test_feedback_and_unsettled_updates_are_saved_together(tmp_path: Path) -> None:
    state = StateFolder(tmp_path, print)
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
    state = StateFolder(tmp_path, print)
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
    state = StateFolder(tmp_path, print)
    tensors = {"0.1.momentum": torch.randn(3, 2), "1.0.step": torch.tensor(7.0)}
    state.save_optimizer(0, tensors)
    loaded = state.load_optimizer(0)
    assert loaded is not None
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    assert state.load_optimizer(1) is None


def test_damaged_state_is_reported_and_left_out(tmp_path: Path) -> None:
    lines: list[str] = []
    state = StateFolder(tmp_path, lines.append)
    for name in ("block-0.feedback", "block-0.optimizer", "block-0.snapshot", "last-block"):
        (tmp_path / name).write_bytes(b"\xff" * 20)
    assert state.load_feedback(0) == (None, [])
    assert state.load_optimizer(0) is None
    assert state.load_snapshot_name(0) is None
    assert state.load_last_block() is None
    assert len(lines) == 2


def test_two_workers_cannot_share_a_folder(tmp_path: Path) -> None:
    with StateFolder(tmp_path, print).locked():
        second = StateFolder(tmp_path, print).locked()
        with pytest.raises(UserError, match="its own --data-dir"):
            second.__enter__()
    with StateFolder(tmp_path, print).locked():
        pass


def test_two_threads_may_save_at_once(tmp_path: Path) -> None:
    state = StateFolder(tmp_path, print)
    feedback = {"w": np.zeros(100_000, np.float32)}
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: state.save_feedback(0, feedback, []), range(40)))
    assert state.load_feedback(0)[0] is not None


def test_a_flipped_byte_in_state_is_noticed(tmp_path: Path) -> None:
    lines: list[str] = []
    state = StateFolder(tmp_path, lines.append)
    state.save_feedback(0, {"w": np.ones(64, np.float32)}, [])
    state.save_optimizer(0, {"m": torch.ones(64)})
    for name in ("block-0.feedback", "block-0.optimizer"):
        content = bytearray((tmp_path / name).read_bytes())
        content[-3] ^= 1
        (tmp_path / name).write_bytes(content)
    assert state.load_feedback(0) == (None, [])
    assert state.load_optimizer(0) is None
    assert ["it is not what was written" in line for line in lines] == [True, True]
