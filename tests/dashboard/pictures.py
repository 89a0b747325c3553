"""Pictures of a real swarm's dashboard: `python -m tests.dashboard.pictures FOLDER`.

Four workers train three judged blocks on the builtin text, beside a reference that is trained first; an
attacker's noise is refused; a gateway serves the reference run's checkpoint. Some minutes on two cores.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from playwright.sync_api import Browser, expect

from blocktrain.config import Recipe, resolve_recipe
from blocktrain.serving.engine.local import LocalEngine
from blocktrain.serving.gateway.app import GatewayConfig
from blocktrain.serving.gateway.main import background_gateway
from blocktrain.training.local import LocalRun, Silent
from tests.coordinator.peer import Refused
from tests.dashboard.kit import (
    WAIT_MS,
    Attacker,
    Watched,
    find_chromium,
    free_port,
    opened_browser,
    running_swarm,
    watched,
)
from tests.end_to_end.swarm_kit import Coordinator

ROUNDS = 8
SHOWN_ROUND = 6
STEPS = 24
LABELS = ("attic (old laptop)", "cellar", "lab-3", "office 2")
SCREENS: dict[str, dict[str, Any]] = {
    "dashboard": {"viewport": {"width": 1280, "height": 1880}},
    "desktop": {},
    "dark": {"color_scheme": "dark"},
    "phone": {"viewport": {"width": 360, "height": 740}, "device_scale_factor": 2},
}


def picture_recipe() -> Recipe:
    return resolve_recipe(
        {
            "name": "demo",
            "model": {"width": 128, "heads": 4, "blocks": 3, "layers_per_block": 1, "context": 128},
            "data": {"corpus": "builtin", "max_bytes": 6_000_000},
            "training": {"batch": 16, "warmup_steps": 10, "steps": STEPS * ROUNDS},
            "evaluation": {"max_bytes": 8192, "pooling_bytes": 8192, "noise_draws": 1},
            "swarm": {
                "steps_per_round": STEPS,
                "rounds": ROUNDS,
                "replicas": 1,
                "evaluate_every_seconds": 2.0,
            },
            "trust": {"stamp_bits": 0},
        }
    )


def train_reference(recipe: Recipe, folder: Path) -> Path:
    run = LocalRun(recipe, folder, torch.device("cpu"), Silent())
    run.train(resume=False)
    run.finish()
    return folder


def attack(coordinator: Coordinator) -> None:
    attacker = Attacker(coordinator.url)
    try:
        for seed in range(3):
            verdict = attacker.send_noise(seed)
            print(f"attack: {verdict.outcome}, {verdict.sentence}")
    except (Refused, AssertionError) as error:
        print(f"attack: {error}")
    attacker.close()


@contextmanager
def attacked_swarm(folder: Path) -> Iterator[Coordinator]:
    recipe = picture_recipe()
    reference = train_reference(recipe, folder / "reference")
    port = free_port()
    origins = GatewayConfig(origins=(f"http://127.0.0.1:{port}",))
    with background_gateway(LocalEngine(reference / "checkpoint"), origins) as gateway:
        options = ("--gateway", gateway, "--reference", str(reference / "report.json"))
        with running_swarm(folder, recipe, LABELS, options, port) as coordinator:
            coordinator.reach(2, seconds=1800)  # of weights that have learnt nothing, noise may be a gain
            attack(coordinator)
            coordinator.reach(SHOWN_ROUND, seconds=1800)  # a busy machine takes long
            yield coordinator


def prepare(page: Watched) -> None:
    """As a reader would leave it: the attacker opened, the ledger verified, a sentence continued."""
    page.page.locator("#chat-link").click()
    expect(page.page.locator("#chat-about")).to_contain_text("served by", timeout=WAIT_MS)
    page.page.get_by_label("Continue my text").check()
    page.page.locator("#chat-text").fill("If the argument is")
    page.page.get_by_role("button", name="Send").click()
    page.page.locator("#verify").click()
    page.page.locator("button.disclose", has_text="mallory").click()
    expect(page.page.locator("#verify-result")).to_contain_text("hold", timeout=WAIT_MS)
    expect(page.page.locator("#chat-cost")).to_contain_text("bytes in", timeout=4 * WAIT_MS)
    page.page.evaluate("document.activeElement.blur(), scrollTo(0, 0)")


def take(browser: Browser, url: str, folder: Path) -> None:
    for name, options in SCREENS.items():
        with watched(browser, url, reduced_motion="reduce", **options) as page:
            prepare(page)
            path = folder / f"{name}.png"
            page.page.screenshot(path=path, full_page=name != "dashboard")
            Image.open(path).convert("RGB").quantize(256, Image.Quantize.FASTOCTREE).save(path, optimize=True)
            print(f"{path}: {path.stat().st_size} bytes")


def main(folder: Path) -> None:
    executable = find_chromium()
    assert executable is not None, "apt-get install chromium"
    folder.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as scratch,
        attacked_swarm(Path(scratch)) as coordinator,
        opened_browser(executable) as browser,
    ):
        take(browser, coordinator.url, folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
