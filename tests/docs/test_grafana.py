"""Every metric and label that the Grafana dashboard asks for is in a real /metrics page."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx2
import pytest

from blocktrain.coordinator.metrics import Metrics
from blocktrain.serving.engine.local import LocalEngine
from blocktrain.serving.gateway.main import background_gateway
from blocktrain.serving.gateway.metrics import GatewayMetrics
from tests.coordinator.conftest import served, tiny_recipe
from tests.docs.pages import ROOT

DASHBOARD = json.loads((ROOT / "docs" / "grafana" / "blocktrain.json").read_text(encoding="utf-8"))
QUERIES = [target for panel in DASHBOARD["panels"] for target in panel["targets"]]
METRIC = re.compile(r"\bblocktrain_\w+")


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory, trained_demo: Path) -> set[str]:
    """The names in the pages of a coordinator and a gateway."""
    with served(tmp_path_factory.mktemp("metrics"), tiny_recipe()) as running:
        page = httpx2.get(f"{running.url}/metrics").text
    with background_gateway(LocalEngine(trained_demo / "checkpoint")) as url:
        page += httpx2.get(f"{url}/metrics").text
    names = set()
    for name, kind in re.findall(r"^# TYPE (\w+) (\w+)$", page, re.MULTILINE):
        endings = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
        names |= {name + ending for ending in endings}
    return names


def labels() -> dict[str, set[str]]:
    """The labels of each metric, by the code that makes it."""
    found = {}
    for owner in (Metrics(), GatewayMetrics()):
        for metric in vars(owner).values():
            if hasattr(metric, "_labelnames"):
                found[metric._name] = set(metric._labelnames)
    return found


def test_the_dashboard_draws_everything_a_coordinator_and_a_gateway_are_watched_by(shown: set[str]) -> None:
    asked = {name for query in QUERIES for name in METRIC.findall(query["expr"])}
    assert asked <= shown
    for name in (
        "consensus_ce",
        "block_version",
        "workers",
        "participation",
        "verdicts_total",
        "bytes_total",
    ):
        assert f"blocktrain_{name}" in asked


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: query["expr"][:60])
def test_a_query_groups_by_labels_that_its_metric_has(query: dict[str, str]) -> None:
    known = labels()
    names = METRIC.findall(query["expr"])
    families = [re.sub(r"_(total|bucket)$", "", name) for name in names]
    has = set.intersection(*(known[name] for name in families)) | {"le", "job"}
    grouped = {label for part in re.findall(r"by \(([^)]*)\)", query["expr"]) for label in part.split(", ")}
    legend = set(re.findall(r"\{\{(\w+)\}\}", query["legendFormat"]))
    assert grouped | legend <= has
    assert query["expr"].count("(") == query["expr"].count(")")


def test_panels_do_not_lie_over_one_another() -> None:
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in DASHBOARD["panels"]]
    assert len(set(places)) == len(places)
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(places)
