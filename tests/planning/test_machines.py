"""Machines are read from options, files and runs, and what is wrong in them is said."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from blocktrain.errors import UserError
from blocktrain.planning.machines import (
    CARDS,
    SUSTAINED_SHARE,
    MachineGroup,
    groups_of_workers,
    parse_group,
    read_groups,
)
from blocktrain.wire.messages import ByteCounts, WorkerState


def test_a_known_card_brings_its_data_sheet() -> None:
    group = parse_group("8x RTX-4090 up_mbit=30")
    assert (group.count, group.device, group.memory_gb, group.up_mbit) == (8, "rtx-4090", 24, 30)
    assert group.tflops == SUSTAINED_SHARE * CARDS["rtx-4090"].peak_tflops
    assert parse_group("h100 memory_gb=94").memory_gb == 94


def test_any_other_device_is_described() -> None:
    group = parse_group("device=cpu memory_gb=32 tflops=0.5")
    assert group == MachineGroup(device="cpu", memory_gb=32.0, tflops=0.5)
    assert group.device_type == "cpu"


@pytest.mark.parametrize("suffix", ["toml", "json"])
def test_files_say_the_same_as_options(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"machines.{suffix}"
    if suffix == "toml":
        path.write_text(
            '[[machines]]\ncount = 2\ndevice = "h100"\nup_mbit = 500\n[[machines]]\ndevice = "t4"\n'
        )
    else:
        listed = [{"count": 2, "device": "h100", "up_mbit": 500}, {"device": "t4"}]
        path.write_text(json.dumps({"machines": listed}))
    assert read_groups(path) == [parse_group("2x h100 up_mbit=500"), parse_group("t4")]


BAD_OPTIONS = {
    "8x": "device is missing",
    "rtx-4900": "did you mean rtx-4090",
    "8x h100 speed=3": "unknown key 'speed'",
    "h100 up_mbit=fast": "up_mbit must be float",
    "h100 up_mbit=0": "up_mbit must be between 1e-09 and 1e+09, found 0.0",
    "h100 up_mbit=nan": "up_mbit must be between",
    "h100 tflops=inf": "tflops must be between",
    "1000000x h100 tflops=1e306": "tflops must be between",
    "h100 up_mbit=1e-300": "up_mbit must be between",
    "h100 memory_gb=1e300": "memory_gb must be between",
    "0x h100": "count must be between 1 and",
    "h100 h200": "device stands twice",
    "": "device is missing",
}


@pytest.mark.parametrize("text", BAD_OPTIONS)
def test_a_bad_option_is_refused(text: str) -> None:
    with pytest.raises(UserError) as refused:
        parse_group(text)
    assert BAD_OPTIONS[text] in str(refused.value)


BAD_FILES = {
    "": "expected one table [[machines]]",
    "machines = 3": "expected one table [[machines]]",
    "machines = []": "expected one table [[machines]]",
    "[[machines]]\ncount = true\ndevice = 't4'": "count must be int, found True",
    "[[machines]]\ncount = '3'\ndevice = 't4'": "count must be int, found '3'",
    "[[machines]]\ndevice = 3": "device must be str",
    "[[machines": "cannot read machines",
    f"[[machines]]\ndevice = 't4'\nmemory_gb = {10**400}": "memory_gb must be between",
}


@pytest.mark.parametrize("text", BAD_FILES)
def test_a_bad_file_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "machines.toml"
    path.write_text(text)
    with pytest.raises(UserError) as refused:
        read_groups(path)
    assert BAD_FILES[text] in str(refused.value)


def test_a_file_that_is_missing_or_huge_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read machines"):
        read_groups(tmp_path / "none.toml")
    (tmp_path / "huge.json").write_bytes(b" " * (1 << 20) + b"[]")
    with pytest.raises(UserError, match="is larger than"):
        read_groups(tmp_path / "huge.json")


def worker(name: str, **changes: Any) -> WorkerState:
    given = {
        "worker_id": name * 32,
        "label": name,
        "device": "cuda (NVIDIA H200)",
        "memory_bytes": 141_000_000_000,
        "block": 0,
        "live": True,
        "last_seen": 0.0,
        "step": None,
        "loss": None,
        "accepted": 3,
        "late": 0,
        "refused": 0,
        "seconds_computing": 100.0,
        "seconds_transferring": 10.0,
        "seconds_waiting": 0.0,
        "tokens_per_second": 50_000.0,
        "up": ByteCounts(payload=100_000_000),
        "down": ByteCounts(payload=200_000_000),
    }
    return WorkerState.model_validate({**given, **changes})


def test_workers_of_a_run_are_machines_as_fast_as_they_were() -> None:
    slow = {"device": "cpu (8 cores)", "memory_bytes": None, "tokens_per_second": 500.0}
    workers = (
        worker("a"),
        worker("b", tokens_per_second=50_010.0),
        worker("c", **slow),
        worker("d", live=False),
        worker("e", tokens_per_second=None),
    )
    # A tiny model on a slow machine is no thousandth of a TFLOP/s.
    (tiny,) = groups_of_workers([worker("f", tokens_per_second=100.0)], flops_per_token=1e6)
    assert tiny.tflops == 1e-4
    assert groups_of_workers(workers, flops_per_token=8e9) == [
        MachineGroup(count=2, device="nvidia h200", memory_gb=141, tflops=400, up_mbit=80, down_mbit=160),
        MachineGroup(device="cpu", memory_gb=math.inf, tflops=4, up_mbit=80, down_mbit=160),
    ]
