"""Every file under deploy/ beside the tests that use it. `make deploy-check` runs them all; those that take
more than moments carry the mark `deploy` and are not in `make test`."""

from __future__ import annotations

import importlib

import pytest

from tests.docs.pages import ROOT

HELM = (
    "test_helm_chart.test_helm_finds_nothing_to_complain_about",
    "test_helm_chart.test_every_object_is_what_kubernetes_expects_and_starts_a_program_that_exists",
)
UNIT = ("test_deploy_files.test_systemd_accepts_a_unit",)
WORKER = "test_started_as_written.test_a_worker_joins_and_leaves_when_it_is_told"
CHECKS = {
    "Containerfile": (
        "test_container_build."
        "test_every_line_of_the_container_file_runs_and_the_image_starts_a_healthy_coordinator",
    ),
    "blocktrain-coordinator.service": (
        *UNIT,
        "test_started_as_written.test_the_coordinator_of_the_unit_serves_its_recipe",
    ),
    "blocktrain-worker.service": (*UNIT, WORKER),
    "compose.yaml": (
        "test_deploy_files.test_compose_is_what_the_compose_specification_allows",
        "test_started_as_written.test_the_coordinators_of_compose_serve_one_run_and_its_worker_joins",
    ),
    "helm/blocktrain/Chart.yaml": HELM,
    "helm/blocktrain/templates/_names.tpl": HELM,
    "helm/blocktrain/templates/coordinator.yaml": HELM,
    "helm/blocktrain/templates/worker.yaml": HELM,
    "helm/blocktrain/values.schema.json": (
        "test_helm_chart.test_coordinators_that_share_nothing_are_refused",
    ),
    "helm/blocktrain/values.yaml": HELM,
    "skypilot/worker.yaml": ("test_skypilot.test_skypilot_takes_the_task_and_refuses_a_wrong_one", WORKER),
    "slurm/worker.sbatch": (WORKER,),
}
NO_FILE = {
    "blocktrain fleet ray": ("test_ray_fleet.test_a_killed_actor_is_started_again_and_the_run_finishes",)
}
"""What docs/host.md offers without a file."""


def test_every_file_under_deploy_has_a_check() -> None:
    folder = ROOT / "deploy"
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert found == set(CHECKS), "say here which test uses the new file, or write one"


@pytest.mark.parametrize(
    "name", sorted({one for names in (*CHECKS.values(), *NO_FILE.values()) for one in names})
)
def test_a_check_is_a_test_that_exists(name: str) -> None:
    module, _, function = name.partition(".")
    found = getattr(importlib.import_module(f"tests.deploy.{module}"), function)
    marks = {mark.name for mark in getattr(found, "pytestmark", ())}
    assert "slow" not in marks, "CI does not run what is slow"
