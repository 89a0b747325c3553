"""A real swarm and a real Chromium: the coordinator and workers as processes, an attacker, and a browser."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import shutil
import socket
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, sync_playwright

from blocktrain.config import Recipe
from blocktrain.coordinator.service import DATABASE_FILE
from blocktrain.wire.codec import encode
from blocktrain.wire.hashing import content_hash
from blocktrain.wire.messages import Assignment, Outcome, Verdict, VerdictsAnswer
from tests.coordinator.peer import Peer
from tests.end_to_end.swarm_kit import Coordinator, Kit, Program, tiny_recipe
from tests.waiting import until

CHROMIUM_NAMES = (
    "chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable",
)  # fmt: skip
"""The first is best: the others make a window with tabs and buttons for each page, which takes a second of
processor time."""
CHROMIUM_FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)
WAIT_MS = 30_000
NETWORK_DOWN = ("net::ERR_", "Failed to load resource")
"""What Chromium itself writes when a server it talks to goes away; only an outage may bring it."""


def find_chromium() -> str | None:
    return next((found for name in CHROMIUM_NAMES if (found := shutil.which(name))), None)


@contextmanager
def opened_browser(executable: str) -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=list(CHROMIUM_FLAGS))
        try:
            yield browser
        finally:
            browser.close()


@dataclasses.dataclass
class Watched:
    """A page, and whatever it complained of."""

    page: Page
    context: BrowserContext
    complaints: list[str]

    def fine(self, *, outage: bool = False) -> None:
        wrong = [one for one in self.complaints if not (outage and any(word in one for word in NETWORK_DOWN))]
        assert wrong == []

    def text(self, selector: str) -> str:
        return self.page.locator(selector).inner_text()

    def wait_text(self, selector: str, wanted: str) -> None:
        self.page.locator(selector, has_text=wanted).first.wait_for(timeout=WAIT_MS)


@contextmanager
def watched(browser: Browser, url: str, **options: Any) -> Iterator[Watched]:
    """The page at `url`, loaded and live, in a fresh profile."""
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
    page = context.new_page()
    found = Watched(page, context, [])

    def complain(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            found.complaints.append(f"{message.type}: {message.text}")

    page.on("console", complain)
    page.on("pageerror", lambda error: found.complaints.append(f"exception: {error}"))
    try:
        page.goto(url, timeout=WAIT_MS)
        found.wait_text("#connection", "Live")
        yield found
    finally:
        context.close()


def write_text(path: Path) -> Path:
    """Forty words in random order: held-out text is like training text, to the end of it."""
    words = [hashlib.sha256(bytes([n])).hexdigest()[: 3 + n % 5] for n in range(40)]
    path.write_text(" ".join(words[byte % 40] for byte in hashlib.shake_128(b"text").digest(40_000)))
    return path


def dashboard_recipe(text: Path, judge: str = "off") -> Recipe:
    """Two blocks; a round takes about a second. A worker may be silent for minutes and is still live."""
    return tiny_recipe(
        text,
        model={"blocks": 2, "width": 64},
        training={"batch": 16, "warmup_steps": 5},
        evaluation={"max_bytes": 4000, "pooling_bytes": 1000},
        swarm={
            "codec": "sign",
            "steps_per_round": 15,
            "rounds": 100_000,
            "evaluate_every_seconds": 0.5,
            "lease_seconds": 600.0,
        },
        trust={"judge": judge},
    )


def free_port() -> int:
    """For a coordinator whose address its gateway must know first."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def edit_database(folder: Path, *statements: tuple[str, tuple[Any, ...]]) -> None:
    """What the API would never let anybody write."""
    with closing(sqlite3.connect(folder / DATABASE_FILE)) as database, database:
        for statement, values in statements:
            assert database.execute(statement, values).rowcount > 0, statement


def start_worker(kit: Kit, url: str, label: str) -> Program:
    options = ["--data-dir", str(kit.folder / label), "--device", "cpu", "--label", label]
    options += ["--corpus", kit.corpus]
    return kit.start(label, ["worker", "--coordinator", url, *options])


class Attacker:
    """Sends what should not count: bytes that are no update, or noise as large as honest updates are."""

    def __init__(self, url: str, label: str = "mallory") -> None:
        self.peer = Peer(url, time.time)
        self.peer.join(label=label)

    @property
    def worker_id(self) -> str:
        return self.peer.identity.worker_id

    def send_nonsense(self) -> Verdict:
        assignment = until("the attacker is lent a block", self._lent)
        payload = b"\xff" * self.peer.run.blocks[assignment.block].payload_bytes
        return self.peer.reveal(self.peer.commit(assignment, payload), payload)

    def send_noise(self, seed: int = 0) -> Verdict:
        norm = until("somebody else is merged", self._honest_norm)
        assignment = until("the attacker is lent a block", self._lent)
        noise = self.peer.tensors(assignment.block, seed)
        size = math.sqrt(sum(float((tensor**2).sum()) for tensor in noise.values()))
        scaled = {name: np.float32(3 * norm / size) * tensor for name, tensor in noise.items()}
        payload = encode(self.peer.codec, self.peer.schema(assignment.block), scaled)
        verdict = self.peer.reveal(self.peer.commit(assignment, payload), payload)
        if verdict.outcome is not Outcome.PENDING:
            return verdict
        return until("the attack is judged", lambda: self._judged(payload))

    def _honest_norm(self) -> float | None:
        verdicts = VerdictsAnswer.model_validate_json(self.peer.get("/v1/verdicts").content).verdicts
        return next((one.norm for one in verdicts if one.state == "merged"), None)

    def _lent(self) -> Assignment | None:
        answer = self.peer.ask()
        return answer if isinstance(answer, Assignment) and answer.round == answer.base_version else None

    def _judged(self, payload: bytes) -> Verdict | None:
        path = f"/v1/updates/{content_hash(payload)}/verdict"
        verdict = Verdict.model_validate_json(self.peer.call("GET", path).content)
        return None if verdict.outcome is Outcome.PENDING else verdict

    def close(self) -> None:
        self.peer.close()


@contextmanager
def running_swarm(
    folder: Path, recipe: Recipe, labels: tuple[str, ...], options: tuple[str, ...] = (), port: int = 0
) -> Iterator[Coordinator]:
    kit = Kit(folder)
    try:
        coordinator = Coordinator(kit, recipe, port, list(options)).start()
        for label in labels:
            start_worker(kit, coordinator.url, label)
        yield coordinator
    finally:
        kit.close()
