"""The report of a local run: the same JSON as ever, read back as values."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from blocktrain.errors import DataError
from blocktrain.model.pooling import Pooling
from blocktrain.training.evaluation import Score
from blocktrain.training.report import HeldOutScores, TrainingReport

SCORES = HeldOutScores(
    blocks=[Score(2.0), Score(2.5)],
    consensus=Score(1.9),
    pooling=Pooling((0.75, 0.25)),
    euler=Score(1.8, 0.01),
    reference=Score(1.7),
    bigram_ce=2.4,
    scored_tokens=99,
)
REPORT = TrainingReport(
    scores=SCORES,
    name="tiny",
    seed=3,
    corpus_sha256="ab" * 32,
    tokens={"per_block": 10, "reference": 10},
    parameters={"blocks": 8, "block": 4, "reference": 8},
    flops={"blocks": 100, "reference": 110},
    peak_memory={"block": 1000, "reference": None},
    memory_method="counted",
    seconds={"block 0": 1.5},
    curves={"block 0": [(1, 5.5), (2, 5.0)]},
    recipe={"name": "tiny", "training": {"steps": 2}},
    versions={"torch": "2.12"},
    sample="The ",
)


def written(report: TrainingReport) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(report.to_json()))
    return found


@pytest.mark.parametrize("scores", [SCORES, replace(SCORES, euler=None, reference=None)])
def test_a_report_is_read_back_as_it_was_written(scores: HeldOutScores) -> None:
    report = replace(REPORT, scores=scores)
    assert TrainingReport.of_json(written(report)) == report


def test_the_keys_are_those_of_every_report_so_far() -> None:
    found = written(REPORT)
    assert set(found) == {
        "blocks", "composed", "reference", "gap", "bigram", "scored_tokens", "bytes_per_token", "name",
        "seed", "corpus_sha256", "tokens", "parameters", "flops", "peak_memory_bytes", "seconds",
        "curves", "recipe", "versions", "sample",
    }  # fmt: skip
    assert found["composed"]["consensus"]["weights"] == [0.75, 0.25]
    assert found["peak_memory_bytes"] == {"block": 1000, "reference": None, "method": "counted"}
    assert found["gap"] == pytest.approx(0.1)


@pytest.mark.parametrize("key", ["composed", "curves", "peak_memory_bytes", "scored_tokens"])
def test_what_is_not_a_report_is_refused_in_words(key: str) -> None:
    damaged = written(REPORT)
    damaged[key] = "nothing"
    with pytest.raises(DataError, match="expected the report.json of a `blocktrain train`"):
        TrainingReport.of_json(damaged)
