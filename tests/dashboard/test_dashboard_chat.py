"""The chat box: a real gateway, reached by the page itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from playwright.sync_api import Browser, expect

from blocktrain.config import resolve_recipe
from blocktrain.serving.engine.local import LocalEngine
from blocktrain.serving.gateway.app import GatewayConfig
from blocktrain.serving.gateway.limits import load_keys
from blocktrain.serving.gateway.main import background_gateway
from blocktrain.training.local import LocalRun, Silent
from tests.coordinator.conftest import Running
from tests.dashboard.kit import WAIT_MS, Watched, dashboard_recipe, free_port, watched
from tests.end_to_end.swarm_kit import Coordinator, Kit


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    folder = tmp_path_factory.mktemp("chat")
    changes = ["training.steps=3", "name=small", "evaluation.sample_bytes=0"]
    recipe = resolve_recipe(dashboard_recipe(text).to_dict(), changes)
    run = LocalRun(recipe, folder, torch.device("cpu"), Silent())
    run.train(resume=False)
    run.finish()
    return folder / "checkpoint"


@pytest.fixture
def kit(tmp_path: Path, browser: Browser) -> Iterator[Kit]:
    kit = Kit(tmp_path)
    yield kit
    kit.close()


def test_an_answer_is_streamed_from_the_gateway(
    browser: Browser, kit: Kit, text: Path, checkpoint: Path
) -> None:
    port = free_port()
    config = GatewayConfig(origins=(f"http://127.0.0.1:{port}",))
    with background_gateway(LocalEngine(checkpoint), config) as gateway:
        coordinator = Coordinator(kit, dashboard_recipe(text), port, ["--gateway", gateway]).start()
        with watched(browser, coordinator.url) as page:
            page.page.locator("#chat-link").click()
            expect(page.page.locator("#chat-about")).to_contain_text(
                f"small, served by {gateway}", timeout=WAIT_MS
            )
            page.page.locator("#chat-text").fill("hello")
            page.page.locator("#chat-text").press("Enter")
            expect(page.page.locator("#chat-log .you .said")).to_have_text("hello")
            expect(page.page.locator("#chat-cost")).to_contain_text("bytes in", timeout=WAIT_MS)
            page.page.get_by_label("Continue my text").check()
            page.page.locator("#chat-text").fill("abc <b>def")
            page.page.get_by_role("button", name="Send").click()
            said = page.page.locator("#chat-log .text .said")
            expect(said).not_to_have_attribute("aria-busy", "true", timeout=WAIT_MS)
            content = said.text_content()
            assert content is not None
            assert content.startswith("abc <b>def")
            assert len(content) > len("abc <b>def")
            page.fine()


def test_a_gateway_that_asks_for_a_key_gets_it_from_the_reader(
    browser: Browser, quiet: Running, checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "keys").write_text("reader = secret-of-the-reader-1234\n")
    config = GatewayConfig(origins=(quiet.url,), keys=load_keys(tmp_path / "keys"))
    with background_gateway(LocalEngine(checkpoint), config) as gateway:
        quiet.coordinator.display.gateway = gateway
        with watched(browser, quiet.url) as page:
            page.page.locator("#chat-link").click()
            expect(page.page.locator("#chat-about")).to_contain_text("asks for a key", timeout=WAIT_MS)
            expect(page.page.get_by_role("button", name="Send")).to_be_disabled()
            page.page.get_by_label("Key of the gateway").fill("secret-of-the-reader-1234")
            page.page.get_by_label("Key of the gateway").press("Tab")
            expect(page.page.get_by_role("button", name="Send")).to_be_enabled(timeout=WAIT_MS)
            page.fine(outage=True)  # Chromium reports the 401 before the key


def test_a_gateway_that_does_not_answer_is_named_with_the_remedy(
    browser: Browser, quiet: Running, checkpoint: Path
) -> None:
    """One that runs, but was not told of this page, looks the same from here."""
    with background_gateway(LocalEngine(checkpoint)) as gateway:
        quiet.coordinator.display.gateway = gateway
        with watched(browser, quiet.url) as page:
            about = page.page.locator("#chat-about")
            page.fine()  # nobody has looked at the box, so nothing was asked
            page.page.locator("#chat-link").click()
            expect(about).to_contain_text(f"Waiting for the gateway at {gateway}", timeout=WAIT_MS)
            expect(about).to_contain_text(f"--origin {quiet.url}")
            expect(page.page.get_by_role("button", name="Send")).to_be_disabled()
            assert any("CORS policy" in complaint for complaint in page.complaints)


def test_without_a_gateway_there_is_no_chat(quiet_page: Watched) -> None:
    expect(quiet_page.page.locator("#chat")).to_be_hidden()
    expect(quiet_page.page.locator("#chat-link")).to_be_hidden()
