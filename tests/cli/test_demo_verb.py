"""`blocktrain demo`: the first thing a newcomer runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from program import run_main

TINY = {
    "TRAINING_STEPS": "2",
    "MODEL_WIDTH": "32",
    "MODEL_CONTEXT": "32",
    "DATA_MAX_BYTES": "20000",
    "EVALUATION_MAX_BYTES": "200",
    "EVALUATION_POOLING_BYTES": "200",
    "EVALUATION_SAMPLE_BYTES": "10",
}


@pytest.fixture
def tiny_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TINY.items():
        monkeypatch.setenv(f"BLOCKTRAIN_{name}", value)


@pytest.mark.usefixtures("tiny_demo")
def test_a_demo_replaces_an_earlier_one_and_nothing_else(tmp_path: Path) -> None:
    first = run_main("demo", "--out", tmp_path)
    assert first.code == 0, first.err
    (tmp_path / "notes.txt").write_text("mine")
    second = run_main("demo", "--out", tmp_path)
    assert second.code == 0, second.err
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert (tmp_path / "report.json").exists()


@pytest.mark.usefixtures("tiny_demo")
def test_the_demo_explains_itself_with_and_without_a_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = run_main("demo", "--out", tmp_path / "with").err
    for words in (
        "Each block is trained alone",
        "bigram counts",
        "end to end",
        "A sample",
        "blocktrain generate",
    ):
        assert words in told
    monkeypatch.setenv("BLOCKTRAIN_TRAINING_REFERENCE", "false")
    without = run_main("demo", "--out", tmp_path / "without")
    assert without.code == 0
    assert "bigram counts" in without.err


@pytest.mark.slow
def test_the_demos_composed_model_beats_bigram_counts(tmp_path: Path) -> None:
    assert run_main("demo", "--out", tmp_path / "demo").code == 0
    report = json.loads((tmp_path / "demo" / "report.json").read_text())
    assert report["composed"]["consensus"]["ce"] < report["bigram"]["ce"]
