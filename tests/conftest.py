from __future__ import annotations

import fcntl
import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from tests.forked import quick_python
from tests.tiny import prose

MadeOnce = Callable[[str, Callable[[Path], object]], Path]

torch.set_num_threads(1)
settings.register_profile("default", deadline=None, max_examples=25)
settings.load_profile("default")


LONGEST = (
    "adversaries/test_campaigns.py",
    "adversaries/test_attacks.py",
    "docs/test_documented_commands.py",
    "cli/test_demo_verb.py",
    "dashboard/test_dashboard_page.py",
    "dashboard/test_dashboard_live.py",
    "serving/test_engine.py",
    "end_to_end/test_text_travels.py",
    "data/test_prepare.py",
    "cli/test_train_verb.py",
    "end_to_end/test_workers_come_and_go.py",
    "coordinator/test_coming_and_going.py",
    "compatibility/test_what_older_versions_left.py",
    "trust/test_judged_updates.py",
    "serving/test_best_tokens.py",
    "coordinator/test_life_of_an_update.py",
    "serving/gateway/test_launcher.py",
    "simulation/test_policies.py",
    "coordinator/test_kill.py",
    "dashboard/test_dashboard_inert.py",
    "adversaries/test_floods.py",
    "serving/gateway/test_gateway_sweep.py",
    "end_to_end/test_chain_swarm.py",
    "docs/test_notebooks.py",
    "training/test_local_run.py",
    "dashboard/test_dashboard_chat.py",
    "end_to_end/test_other_models_in_a_swarm.py",
    "serving/gateway/test_gateway_schema.py",
    "coordinator/test_changing_a_run.py",
    "training/test_specialised_run.py",
    "serving/gateway/test_gateway_stages.py",
    "end_to_end/test_refining_swarm.py",
    "serving/gateway/test_gateway_bpe.py",
    "serving/test_versions.py",
)
"""Files that take longest, by `--durations`, the longest first."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Among several processes the long files begin first. They have few tests, so that xdist's own order puts
    them last: on a busy machine the last 5 % of the tests took 24 of 60 minutes, mostly in one process."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        place = {str(Path(__file__).parent / name): number for number, name in enumerate(LONGEST)}
        items.sort(key=lambda item: place.get(str(item.path), len(LONGEST)))


def pytest_collection_finish() -> None:
    """What the imports left is there to stay: the garbage collector need not look at it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer's own BLOCKTRAIN_* variables change no test."""
    for variable in [name for name in os.environ if name.startswith("BLOCKTRAIN_")]:
        monkeypatch.delenv(variable)


@pytest.fixture
def quick_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that the code under test starts are forked, which saves each 4 s of importing torch."""
    monkeypatch.setattr(sys, "executable", quick_python())


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> MadeOnce:
    """A folder that the first process which needs it makes, and every process of the session reads."""
    base = tmp_path_factory.getbasetemp()
    root = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def folder(name: str, make: Callable[[Path], object]) -> Path:
        found = root / name
        with (root / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not found.exists():
                make(root / f"{name}.unfinished")
                (root / f"{name}.unfinished").rename(found)
        return found

    return folder


@pytest.fixture
def unchanged_random_state() -> Iterator[None]:
    before = torch.get_rng_state()
    yield
    assert torch.equal(before, torch.get_rng_state())


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus that brings its own split."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "train.txt").write_bytes(prose(20_000, seed=1))
    (folder / "valid.txt").write_bytes(prose(1_500, seed=2))
    return folder
