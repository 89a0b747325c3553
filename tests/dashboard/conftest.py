from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from tests.coordinator.conftest import Running, served, tiny_recipe
from tests.dashboard.kit import (
    Watched,
    dashboard_recipe,
    find_chromium,
    opened_browser,
    running_swarm,
    watched,
    write_text,
)
from tests.end_to_end.swarm_kit import Coordinator, Kit
from tests.waiting import until

REFERENCE = 0.5


# No fixture here outlives this package: Playwright's event loop would be in the way of tests that run one of
# their own.


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    executable = find_chromium()
    if executable is None:
        pytest.skip("no Chromium for the dashboard here: apt-get install chromium-headless-shell")
    with opened_browser(executable) as found:
        yield found


@pytest.fixture(scope="package")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("dashboard-text") / "text.txt")


@pytest.fixture(scope="package")
def swarm(tmp_path_factory: pytest.TempPathFactory, text: Path, browser: Browser) -> Iterator[Coordinator]:
    """A coordinator and two workers who have done three scored rounds. Then the workers are stopped: at work
    they would take most of two cores from the page."""
    folder = tmp_path_factory.mktemp("swarm")
    labels = ("attic (old laptop)", "cellar")
    with running_swarm(folder, dashboard_recipe(text), labels, ("--reference", str(REFERENCE))) as found:
        for block in range(2):
            found.reach(3, block)
        until("three scores", lambda: len(found.status().evaluations) >= 3)
        signal_workers(found, signal.SIGSTOP)
        yield found


@pytest.fixture
def at_work(swarm: Coordinator) -> Iterator[None]:
    """The workers of the swarm go on for one test."""
    signal_workers(swarm, signal.SIGCONT)
    yield
    signal_workers(swarm, signal.SIGSTOP)


def signal_workers(swarm: Coordinator, number: signal.Signals) -> None:
    for program in swarm.kit.programs:
        if program is not swarm.program:
            program.send(number)


@pytest.fixture
def page(browser: Browser, swarm: Coordinator) -> Iterator[Watched]:
    with watched(browser, swarm.url) as found:
        yield found
        found.fine()


@pytest.fixture
def quiet(tmp_path: Path) -> Iterator[Running]:
    """A coordinator of its own in this process, without workers: its data may be altered."""
    with served(tmp_path, tiny_recipe()) as running:
        yield running


@pytest.fixture
def quiet_page(browser: Browser, quiet: Running) -> Iterator[Watched]:
    with watched(browser, quiet.url) as found:
        yield found
        found.fine()


@pytest.fixture
def mortal(tmp_path: Path, text: Path, browser: Browser) -> Iterator[Coordinator]:
    """A coordinator that may be killed."""
    kit = Kit(tmp_path)
    yield Coordinator(kit, dashboard_recipe(text)).start()
    kit.close()
