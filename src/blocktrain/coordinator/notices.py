"""Notices to an operator: one HTTP POST when a worker is banned, when the run stalls and when it finishes.

A thread of its own looks and sends, so no round or request ever waits for the receiver. What cannot be
delivered is tried again, ever more slowly, and then dropped with a line in the log; at most MAX_WAITING wait.
What happened while no coordinator ran is not told. Several processes that share a run would each tell: give
the address to one of them.
"""

from __future__ import annotations

import logging
import statistics
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx2

from blocktrain.coordinator.decisions.rounds import PACE_ROUNDS
from blocktrain.coordinator.service import Coordinator
from blocktrain.threads import Threads
from blocktrain.wire.messages import LedgerEntry, StatusAnswer
from blocktrain.wording import counted, duration

log = logging.getLogger(__name__)

STALL_SECONDS = 900.0
STALL_ROUNDS = 4
"""A block has stalled after this many of its usual rounds without a merge, and not before STALL_SECONDS: a
volunteer's machine may sleep for some minutes."""
LOOK_SECONDS = 5.0
SEND_SECONDS = 10.0
MAX_WAITING = 64
MAX_TRIES = 8
LONGEST_WAIT_SECONDS = 60.0
LAST_SEND_SECONDS = 5.0


@dataclass(frozen=True)
class Notice:
    event: str
    """`ban`, `stall`, `resumed` or `finish`."""
    text: str
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Known:
    """What has been told already."""

    entries: int
    """Ledger entries that were looked at."""
    finished: bool
    stalled: bool = False


def notices(
    known: Known, status: StatusAnswer, entries: Sequence[LedgerEntry], started: float
) -> tuple[list[Notice], Known]:
    """What is new since the last look. `started` is when this process began: what was quiet before is no
    stall."""
    found, labels = [], {one.worker_id: one.label for one in status.workers}
    for entry in entries:
        if entry.kind == "ban" and entry.body["until"] > entry.time:
            worker = str(entry.body["worker_id"])
            who = f"{worker[:8]} {labels.get(worker, '')}".rstrip()
            until = duration(entry.body["until"] - entry.time)
            text = f"banned {who} for {until}: {entry.body['reason']}"
            found.append(Notice("ban", text, {"worker_id": worker, "reason": entry.body["reason"]}))

    quiet = stall_sentence(status, started)
    if quiet is not None and not known.stalled:
        found.append(Notice("stall", quiet))
    elif known.stalled and quiet is None and not status.finished:
        found.append(Notice("resumed", "rounds close again"))

    if status.finished and not known.finished:
        score = ""
        for newest in status.evaluations[-1:]:
            score = f", held-out loss {newest.consensus_ce / newest.bytes_per_token:.4f} nats per byte"
        found.append(Notice("finish", f"finished after {counted(status.rounds, 'round')}{score}"))
    seen = entries[-1].sequence + 1 if entries else known.entries
    return found, Known(seen, status.finished, quiet is not None)


def stall_sentence(status: StatusAnswer, started: float) -> str | None:
    """Which block has been quiet for too long, and who could end that; None where all is well."""
    for block in status.blocks:
        if block.finished:
            continue
        seconds = [one.seconds for one in status.reports if one.block == block.block][-PACE_ROUNDS:]
        limit = max(STALL_SECONDS, STALL_ROUNDS * (statistics.median(seconds) if seconds else 0.0))
        quiet = status.server_time - max(block.head_made, started)
        if quiet > limit:
            live = sum(worker.live for worker in status.workers)
            who = f"{counted(live, 'worker')} live" if live else "nobody is at work"
            return f"block {block.block} has closed no round for {duration(quiet)}; {who}"
    return None


class Webhook:
    """Looks for news and sends it."""

    def __init__(self, coordinator: Coordinator, url: str) -> None:
        self._coordinator, self._url = coordinator, url
        # The rest of the address may be a secret: services put a token into its path.
        self._shown = urlsplit(url).hostname
        status = coordinator.status()
        self._started = status.server_time
        self._known = Known(status.ledger_length, status.finished)
        self._waiting: deque[dict[str, Any]] = deque(maxlen=MAX_WAITING)
        self._tries, self._next_try = 0, 0.0

    def look_and_send(self) -> bool:
        self.look()
        self.send()
        return False

    def look(self) -> None:
        status = self._coordinator.status()
        entries = self._coordinator.reports.ledger(self._known.entries).entries
        found, self._known = notices(self._known, status, entries, self._started)
        for one in found:
            log.info("notice event=%s text=%r", one.event, one.text)
            told = f"{status.name} {status.run_id[:8]}: {one.text}"
            # `text` is what Slack and Mattermost show, `content` what Discord does.
            body = {"event": one.event, "text": told, "content": told, "run_id": status.run_id}
            self._waiting.append({**body, "name": status.name, "time": status.server_time, **one.facts})

    def send(self) -> None:
        """Everything that waits, oldest first; the first failure ends it until its next try is due."""
        while self._waiting and time.monotonic() >= self._next_try:
            notice = self._waiting[0]
            try:
                answer = httpx2.post(self._url, json=notice, timeout=SEND_SECONDS, follow_redirects=False)
                problem = None if answer.is_success else f"answered {answer.status_code}"
                hopeless = 400 <= answer.status_code < 500 and answer.status_code not in (408, 429)
            except httpx2.HTTPError as error:
                problem, hopeless = str(error) or type(error).__name__, False
            if problem is not None:
                self._tries += 1
                if not hopeless and self._tries < MAX_TRIES:
                    self._next_try = time.monotonic() + min(LONGEST_WAIT_SECONDS, 2.0 ** (self._tries - 1))
                    return
                log.error("gave up a notice to %s: event=%s %s", self._shown, notice["event"], problem)
            self._waiting.popleft()
            self._tries = 0


@contextmanager
def notified(coordinator: Coordinator, url: str | None) -> Iterator[None]:
    """Sends notices while inside, and what is left at the end once more."""
    if url is None:
        yield
        return
    stop, hook = threading.Event(), Webhook(coordinator, url)
    threads, changes = Threads(stop), coordinator.resources.changes
    failed = coordinator.metrics.failed
    threads.repeat("notices", hook.look_and_send, failed, pause_seconds=LOOK_SECONDS, changes=changes)
    try:
        yield
    finally:
        stop.set()
        changes.notify()
        threads.join(LAST_SEND_SECONDS)
