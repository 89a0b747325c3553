from __future__ import annotations

import fcntl
import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.forked import fork_the_server, quick_python

MadeOnce = Callable[[str, Callable[[Path], object]], Path]

# A client reads all authorities of the system when it is made, for 25 ms. Here it reads one, whose key
# nobody has; some libraries refuse to have none. Tests of TLS name their own.
os.environ["SSL_CERT_FILE"] = str(Path(__file__).parent / "nobody.crt")
os.environ.pop("SSL_CERT_DIR", None)
settings.register_profile("default", deadline=None, max_examples=25)
settings.load_profile("default")


LONGEST = (
    "dashboard/test_dashboard_page.py",
    "docs/test_documented_commands.py",
    "adversaries/test_attacks.py",
    "cli/test_train_verb.py",
    "adversaries/test_campaigns.py",
    "serving/test_engine.py",
    "training/test_local_run.py",
    "cli/test_demo_verb.py",
    "serving/test_failures.py",
    "coordinator/test_life_of_an_update.py",
    "end_to_end/test_text_travels.py",
    "simulation/test_policies.py",
    "end_to_end/test_workers_come_and_go.py",
    "serving/gateway/test_gateway_completions.py",
    "serving/test_best_tokens.py",
    "serving/test_flights.py",
    "serving/test_serial.py",
    "compatibility/test_what_older_versions_left.py",
    "serving/test_versions.py",
    "data/test_prepare.py",
    "serving/gateway/test_gateway_bpe.py",
    "end_to_end/test_judged_swarm.py",
    "trust/test_judged_updates.py",
    "coordinator/test_kill.py",
    "end_to_end/test_ranks.py",
    "end_to_end/test_refining_swarm.py",
    "coordinator/test_coming_and_going.py",
    "serving/test_following_the_text.py",
    "end_to_end/test_chain_swarm.py",
    "serving/gateway/test_launcher.py",
    "serving/test_other_families.py",
    "end_to_end/test_other_models_in_a_swarm.py",
    "training/test_specialised_run.py",
    "docs/test_notebooks.py",
    "benchmarks/test_fleet.py",
    "serving/gateway/test_gateway_stages.py",
    "end_to_end/test_unequal_swarm.py",
    "coordinator/test_changing_a_run.py",
    "adversaries/test_floods.py",
    "end_to_end/test_whole_swarm.py",
    "adversaries/test_gateway_floods.py",
    "serving/gateway/test_gateway_schema.py",
    "serving/gateway/test_gateway_sweep.py",
)
"""Files that take most processor time, the longest first."""
TOGETHER = {
    "tests/dashboard/": "dashboard",
    "tests/model/test_llama.py": "transformers",
    "tests/training/test_hugging_face.py": "transformers",
    "tests/end_to_end/test_other_models_in_a_swarm.py": "transformers",
    "tests/serving/test_serial.py": "transformers",
}
"""Beginnings of paths whose tests go to one process, because what they share is slow to start: a browser and
a swarm, 10 s of processor time; transformers and its models, 4 s."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Among several processes the long files begin first. They have few tests, so that xdist's own order puts
    them last: on a busy machine the last 5 % of the tests took 24 of 60 minutes, mostly in one process."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        place = {str(Path(__file__).parent / name): number for number, name in enumerate(LONGEST)}
        items.sort(key=lambda item: place.get(str(item.path), len(LONGEST)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """xdist's `loadfile`, but what is TOGETHER goes to one process."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

    class Together(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            groups = (group for path, group in TOGETHER.items() if nodeid.startswith(path))
            return str(next(groups, None) or super()._split_scope(nodeid))

    return Together(config, log)


def pytest_collectstart() -> None:
    """In a process that runs tests. The one that hands them out would wait 2 s for torch before it began.

    Imports leave next to no garbage: looking for it takes each process 1.4 s."""
    gc.disable()
    import torch

    torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    """What the imports left is there to stay: the garbage collector need not look at it again."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    if "PYTEST_XDIST_WORKER" in os.environ and sys.platform == "linux":
        fork_the_server()


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
    import torch

    before = torch.get_rng_state()
    yield
    assert torch.equal(before, torch.get_rng_state())


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus that brings its own split."""
    from tests.tiny import prose

    folder = tmp_path_factory.mktemp("corpus")
    (folder / "train.txt").write_bytes(prose(20_000, seed=1))
    (folder / "valid.txt").write_bytes(prose(1_500, seed=2))
    return folder
