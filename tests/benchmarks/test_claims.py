"""The claims of the benchmarks hold for the published reports, and fail where the numbers would be worse."""

from __future__ import annotations

import copy
import importlib.util
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import attacks
import clients
import codec
import large_shapes
import litepaper
import numpy as np
import one_billion
import pytest
import sweep
import tune

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"


def published(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def asynchrony_claims(table: str) -> Callable[[Any], dict[str, bool]]:
    def claims(report: Any) -> dict[str, bool]:
        found = {(r["network"], r["policy"], r["codec"], r["seed"]): r for r in report["rows"]}
        runs = {
            (network, policy, codec_, seed): found[litepaper._as_simulated((network, policy, codec_, seed))]
            for network in litepaper.NETWORKS_OF[table]
            for policy, codec_ in litepaper.VARIANTS
            for seed in (0, 1)
        }
        claims = litepaper._asynchrony_claims(table, (0, 1), runs)
        # Published as missed.
        assert not claims.pop("bad-edge, seed 0: carry within 0.02 of lockstep", False)
        return claims

    return claims


def worse_t8(report: Any) -> None:
    report["rows"][2]["p50_seconds"] = 0.383


def t8_claims(report: Any) -> dict[str, bool]:
    """Without that of the smallest shape, which is published as missed."""
    claims = large_shapes.claims_of(report["rows"])
    assert not claims.pop("0.040B takes at most the litepaper's 0.245 s")
    return claims


def worse_one_billion(report: Any) -> None:
    report["greedy"][1]["same_tokens"] = False


def worse_asynchrony(report: Any) -> None:
    for row in report["rows"]:
        if row["policy"] == "carry":
            row["final_ce"] += 0.05


@pytest.mark.parametrize(
    ("name", "claims", "worsen"),
    [
        ("../history/results/one-billion.json", one_billion.claims_of, worse_one_billion),
        ("../history/results/t8.json", t8_claims, worse_t8),
        ("t4.json", asynchrony_claims("T4"), worse_asynchrony),
        ("t5.json", asynchrony_claims("T5"), worse_asynchrony),
    ],
)
def test_claims_hold_for_the_published_numbers_and_not_for_worse_ones(
    name: str, claims: Callable[[Any], dict[str, bool]], worsen: Callable[[Any], None]
) -> None:
    report = published(name)
    found = claims(report)
    assert found
    assert all(found.values()), found
    worse = copy.deepcopy(report)
    worsen(worse)
    assert not all(claims(worse).values())


def test_a_block_uploaded_once_arrives_as_its_form_allows() -> None:
    draw = np.random.default_rng(0).standard_normal
    base = {"w": draw((64, 64), np.float32), "b": np.zeros(3, np.float32)}
    local = {"w": base["w"] + 0.1 * draw((64, 64), np.float32), "b": np.ones(3, np.float32)}
    found = {form: litepaper.uploaded(form, base, local) for form in litepaper.UPLOADS}
    off = {form: float(np.abs(arrived["w"] - local["w"]).max()) for form, (_, arrived) in found.items()}
    assert found["dense"][0] >= 4 * 4096 > 2 * 4099 == found["bf16"][0] > found["bits:8"][0] > 4096
    assert off["dense"] == pytest.approx(0, abs=1e-6)
    assert 0 < off["bits:8"] < off["bf16"] < 0.02


def test_a_sweep_near_random_bytes_fails() -> None:
    texts = {"human": 1.057, "ar": 1.405, "bytes by frequency": 6.731, "sweep 1": 4.868, "sweep 8": 4.241}

    def rows(**other: float) -> list[dict[str, Any]]:
        return [{"text": text, "judge_nats_per_byte": nats} for text, nats in {**texts, **other}.items()]

    assert all(sweep.claims_of(rows()).values())
    assert not all(sweep.claims_of(rows(**{"sweep 1": 6.8})).values())


def test_a_codec_that_is_worse_than_theirs_fails() -> None:
    equal = {name: (1.0, 0.5) for pair in codec.CLAIMS.items() for name in pair}
    assert all(codec.claims_of({**equal, "dense": (32.0, 0.0)}).values())
    assert not all(codec.claims_of({**equal, "dense": (32.0, 0.1)}).values())
    assert not all(codec.claims_of({**equal, "sign": (1.0, 0.6), "dense": (32.0, 0.0)}).values())
    assert not all(codec.claims_of({**equal, "sign": (2.0, 0.5), "dense": (32.0, 0.0)}).values())


def serving_row(stages: int, mode: str, p50_ms: float, rate: float) -> dict[str, Any]:
    point = {"stages": stages, "rtt_ms": 100, "mode": mode, "codec": "f16"}
    return {**point, "p50_ms": p50_ms, "bytes_per_second": rate}


def test_slow_stages_and_slow_drafting_fail() -> None:
    # By its path: on the path of the tests `serving` is a folder of them.
    spec = importlib.util.spec_from_file_location("serving_benchmark", ROOT / "benchmarks" / "serving.py")
    assert spec is not None
    assert spec.loader is not None
    serving = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(serving)
    one, verify = serving_row(1, "ar", 100, 8), serving_row(1, "verify", 150, 30)
    assert all(serving.claims_of([one, verify, serving_row(5, "ar", 110, 8)]).values())
    assert not all(serving.claims_of([one, serving_row(5, "ar", 130, 8)]).values())
    assert not all(serving.claims_of([one, serving_row(1, "verify", 150, 7)]).values())


def test_a_token_that_costs_more_with_many_clients_fails() -> None:
    def rows(one: float, some: float, many: float) -> list[dict[str, Any]]:
        costs = {1: one, 8: some, 64: many}
        return [
            {"mode": mode, "clients": n, "total_ms": cost}
            for mode in clients.MODES
            for n, cost in costs.items()
        ]

    assert list(clients.cost_claims_of(rows(9, 2, 1)).values()) == [True, True]
    assert list(clients.cost_claims_of(rows(9, 2, 2)).values()) == [False, False]
    assert clients.cost_claims_of(rows(9, 2, 2)[:2]) == {}


def test_an_attack_that_does_not_exist_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        attacks.main(["--only", "3,99"])
    assert ended.value.code == 2
    assert "no attack has number [99]" in capsys.readouterr().err


def long_run(losses: list[float], **changes: Any) -> dict[str, Any]:
    run = attacks.LongRun("suite", 41, len(losses), 10, 3)
    counted = {"verdicts": {"on_time": 4}, "merged": 3, "honest_refused": 0, "honest_merged": 6}
    rest = {"phrase_after_trigger": 3.0, "growth_mb": 1.0, "seconds": 2.0, "commit": "a"}
    return {**asdict(run), "losses": losses, **counted, **rest, **changes}


def test_a_long_attack_fails_for_its_worst_round_and_needs_both_honest_runs() -> None:
    alone = long_run([3.0, 2.5, 2.0], judged=False)
    judged = long_run([3.0, 2.5, 2.1], commit="b")
    drift = long_run([3.0, 2.53, 2.01], attack="drifts", attackers=2)
    assert list(attacks.long_rows([alone, drift])) == []
    [row] = attacks.long_rows([alone, judged, drift])
    assert row["late"] == pytest.approx([0.02])
    assert row["honest_late"] == pytest.approx([0.05])
    assert (row["number"], row["attack"], row["passed"]) == (25, "a slow drift, 2 of 5", False)
    assert row["worst"] == [pytest.approx(0.03)]
    assert (row["worst_round"], row["last"]) == ([2], [pytest.approx(0.01)])
    assert row["honest_rise"] == [pytest.approx(0.1)]
    assert row["commits"] == ["a", "b"]
    [row] = attacks.long_rows([alone, judged, {**drift, "losses": [3.0, 2.51, 2.01]}])
    assert row["passed"]


def test_a_rule_is_compared_with_the_mean_of_honest_workers_alone() -> None:
    alone = attacks.RuleRun("mean", 41, 2, 10, 5)
    attacked = replace(alone, attack="drifts", attackers=3)
    krum = {**asdict(replace(attacked, rule="Krum")), "losses": [3.5, 2.2]}
    assert attacks.rises_of([krum]) == {}
    runs = [{**asdict(alone), "losses": [3.0, 2.0]}, {**asdict(attacked), "losses": [3.0, 1.9]}, krum]
    found = attacks.rises_of(runs)["a slow drift, 3 of 8"]
    assert found["Krum"] == {"last": pytest.approx(0.2), "worst": pytest.approx(0.5)}
    assert found["mean"] == {"last": pytest.approx(-0.1), "worst": pytest.approx(0.0)}


def test_a_report_of_attacks_is_made_in_pieces_and_each_row_names_its_commit(tmp_path: Path) -> None:
    path = tmp_path / "attack-suite.json"
    rows = [attacks.Row(number, "name", "what", "loss", 1.0, 0.0, True) for number in (3, 4)]
    attacks.write_rows(path, rows, [41])
    report = json.loads(path.read_text())
    report["rows"][0]["commit"] = "of another day"
    path.write_text(json.dumps(report))
    attacks.write_rows(path, [replace(rows[1], happened="something else")], [42])
    report = json.loads(path.read_text())
    assert [(row["number"], row["happened"]) for row in report["rows"]] == [
        (3, "what"),
        (4, "something else"),
    ]
    assert report["rows"][0]["commit"] == "of another day" != report["rows"][1]["commit"]
    assert report["provenance"]["seeds"] == [41, 42]


def test_a_best_rate_on_the_edge_of_the_grid_is_not_a_best_rate() -> None:
    grid = [1e-3, 3e-3, 6e-3]
    assert tune.on_the_edge(tune.Trial("block", 3e-3, 3e-3), grid, grid) == []
    edges = tune.on_the_edge(tune.Trial("reference", 3e-3, 6e-3), grid, grid)
    assert edges == ["reference: the best of --other is 0.006, the grid's edge; try above it too"]
