"""`blocktrain demo`: the first thing a newcomer runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from blocktrain.local.attacker import Fate
from blocktrain.local.demo import MARKER, clear_earlier_demo, summary_rows, thinned
from tests.cli.program import run_main

TINY = {
    "MODEL_WIDTH": "64",
    "MODEL_HEADS": "2",
    "MODEL_LAYERS_PER_BLOCK": "1",
    "MODEL_CONTEXT": "64",
    "TRAINING_BATCH": "8",
    "TRAINING_WARMUP_STEPS": "2",
    "TRAINING_FINAL_LR": "1",
    "DATA_MAX_BYTES": "300000",
    "EVALUATION_MAX_BYTES": "4096",
    "EVALUATION_POOLING_BYTES": "4096",
    "EVALUATION_NOISE_DRAWS": "1",
    "SWARM_ROUNDS": "2",
    "SWARM_STEPS_PER_ROUND": "10",
    "SWARM_CODEC": "sparse:1024",
    "SWARM_EVALUATE_EVERY_SECONDS": "600",
}
"""Two rounds, and rates that do not fall: most updates then gain half a nat. Later ones gained less than a
judge's 12 windows can show, and a block repeated its last round until an update was lucky (35 to 115 s)."""


@pytest.mark.usefixtures("quick_children")
def test_the_demo_trains_shuts_out_an_attacker_verifies_and_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in TINY.items():
        monkeypatch.setenv(f"BLOCKTRAIN_{name}", value)
    outcome = run_main("demo", "--once", "--out", tmp_path / "demo")
    assert outcome.code == 0, outcome.err
    report = json.loads((tmp_path / "demo" / "report.json").read_text())
    assert report["attacker"]["merged"] == 0
    assert report["lossless"]
    assert report["versions"].keys() >= {"python", "torch"}
    assert report["bytes_per_traversal"] >= 1
    assert report["ledger_entries"] > report["merges"] == 6
    assert 0 < report["bytes_moved"] < report["full_checkpoint_bytes"]
    assert report["final"]["consensus_ce"] < 5.0
    assert (tmp_path / "demo" / "checkpoint" / "config.json").exists()
    assert (tmp_path / "demo" / "curves.png").read_bytes().startswith(b"\x89PNG")
    told = (
        "loss by round",
        "slowest block",
        "end to end with the same steps",
        "attacker",
        "every entry holds",
        "per traversal",
    )
    for words in told:
        assert words in outcome.out, outcome.out
    assert "Dashboard: http://127.0.0.1:" in outcome.err


def test_a_demo_replaces_an_earlier_one_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / MARKER).write_text(json.dumps({"recipe": {"name": "demo"}}))
    (tmp_path / "worker-0").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    clear_earlier_demo(tmp_path, "demo")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_the_attackers_fate_is_told_in_a_sentence() -> None:
    fate = Fate("w")
    assert "not let near a block" in fate.sentence()
    fate.sent = 2
    fate.outcomes["refused (harmful)"] += 2
    fate.shut_out = "banned"
    assert fate.sentence() == "sent 2 reversed updates: 2 refused (harmful); then shut out: banned"


def test_a_text_that_differs_from_plain_decoding_is_said_loudly() -> None:
    summary = {
        "final": {"consensus_ce": 2.0},
        "reference_ce": 2.1,
        "ce_per_round": [{"rounds": [0, 1], "ce": 3.0}],
        "bigram_ce": None,
        "full_checkpoint_bytes": 100,
        "bytes_moved": 10,
        "updates": 1,
        "arrived": 2,
        "attacker": {"sent": 1, "merged": 1, "fate": "sent"},
        "ledger_entries": 3,
        "merges": 1,
        "ledger": "holds",
        "bytes_per_traversal": 2.0,
        "sample_bytes": 4,
        "traversals": 2,
        "lossless": False,
    }
    rows = dict(summary_rows(summary))
    assert "NOT" in rows["serving"]
    assert "1 got merged" in rows["attacker"]


def test_a_long_history_is_thinned_to_its_ends_and_some_between() -> None:
    values = [{"n": n} for n in range(100)]
    assert [one["n"] for one in thinned(values, 3)] == [0, 50, 99]
