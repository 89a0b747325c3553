"""Who may come in, how often and how many at once.

Decisions take the clock as an argument and give a value; only `Door` waits. Nothing here knows HTTP:
the gateway turns a `Refusal` into an answer. Keys are compared as hashes, in constant time.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import hmac
import math
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from blocktrain.errors import UserError

ANYONE = "anyone"
MAX_REMEMBERED_CALLERS = 10_000
MIN_KEY_CHARACTERS = 8


@dataclass(frozen=True, kw_only=True)
class Limits:
    max_active: int = 256
    """Generations in progress at once; every choice of `n` and every prompt of a list is one."""
    max_waiting: int = 64
    """Requests that may wait for a place; the next one is answered 429."""
    wait_seconds: float = 30.0
    """How long a request waits for a place before it is answered 429."""
    requests_per_minute: int | None = None
    """For each key (each address where no keys are set); None for no limit."""
    max_body_bytes: int = 2_000_000
    """Larger requests are answered 413 without being read to the end."""
    max_choices: int = 128
    """Prompts times `n` in one request."""
    max_tokens: int = 16_384
    """Tokens one generation may ask for."""
    max_prompt_tokens: int = 65_536
    """Tokens of all prompts of one request, even where long prompts may slide."""
    max_logprobs: int = 20
    """Alternatives reported for each token."""
    request_seconds: float = 600.0
    """No answer takes longer; what is unfinished by then is given up."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            least = 0 if name == "max_waiting" else 1e-3
            if value is not None and not least <= value < math.inf:
                raise UserError(f"limit {name} must be above 0 and finite, found {value}")


def parse_limits(changes: Iterable[str]) -> Limits:
    """The limits with some changed, each written `name=value`; `none` lifts one that can be lifted."""
    values: dict[str, float | None] = {}
    known = {field.name: field for field in dataclasses.fields(Limits)}
    for change in changes:
        name, _, text = change.partition("=")
        if name.strip() not in known:
            raise UserError(f"unknown limit {name.strip()!r}; known: {', '.join(known)}")
        values[name.strip()] = _limit(known[name.strip()], text.strip())
    return dataclasses.replace(Limits(), **values)  # type: ignore[arg-type]


def _limit(field: dataclasses.Field[object], text: str) -> float | None:
    if text.lower() == "none" and field.default is None:
        return None
    whole = not isinstance(field.default, float)
    try:
        return int(text) if whole else float(text)
    except ValueError:
        kind = "a whole number" if whole else "a number"
        raise UserError(f"limit {field.name} must be {kind}, found {text!r}") from None


class Refusal(Exception):
    """Why there is no place, and when to try again."""

    def __init__(self, reason: str, retry_after_seconds: int) -> None:
        super().__init__(reason)
        self.reason, self.retry_after_seconds = reason, retry_after_seconds


class Keys:
    """The bearer keys of a file: one per line, optionally `name = key`; `#` starts a comment."""

    def __init__(self, keys: Iterable[tuple[str, str]]) -> None:
        self._names = {_digest(key): name for name, key in keys}

    def __len__(self) -> int:
        return len(self._names)

    def owner(self, key: str) -> str | None:
        """The name that goes with a key, or None for a key nobody was given."""
        digest = _digest(key)
        found = None
        for known, name in self._names.items():
            if hmac.compare_digest(known, digest):
                found = name
        return found


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def load_keys(path: Path) -> Keys:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the key file {path}: {error}") from None
    keys = list(_parse_keys(lines, path))
    if not keys:
        raise UserError(f"{path} holds no keys; write one per line, or leave the option out to serve anyone")
    return Keys(keys)


def _parse_keys(lines: Iterable[str], path: Path) -> Iterable[tuple[str, str]]:
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        name, equals, key = text.partition("=")
        name, key = (name.strip(), key.strip()) if equals else (f"key-{number}", text)
        if len(key) < MIN_KEY_CHARACTERS or not key.isascii() or " " in key:
            raise UserError(
                f"{path}, line {number}: expected {MIN_KEY_CHARACTERS} or more ASCII characters, no spaces"
            )
        yield name, key


@dataclass(frozen=True)
class Bucket:
    """Requests a caller has left, as of a moment; refills evenly up to one minute's worth."""

    left: float
    at: float


def after_request(bucket: Bucket, now: float, per_minute: int) -> tuple[Bucket, float]:
    """The bucket after one more request, and the seconds to wait first (0 where it may go ahead)."""
    left = min(float(per_minute), bucket.left + (now - bucket.at) * per_minute / 60)
    if left >= 1:
        return Bucket(left - 1, now), 0.0
    return Bucket(left, now), (1 - left) * 60 / per_minute


class Rates:
    """A bucket for each caller. Those not heard of for longest are forgotten first."""

    def __init__(self, per_minute: int | None) -> None:
        self.per_minute = per_minute
        self._buckets: OrderedDict[str, Bucket] = OrderedDict()

    def check(self, caller: str, now: float) -> None:
        if self.per_minute is None:
            return
        before = self._buckets.pop(caller, Bucket(float(self.per_minute), now))
        self._buckets[caller], wait = after_request(before, now, self.per_minute)
        if len(self._buckets) > MAX_REMEMBERED_CALLERS:
            self._buckets.popitem(last=False)
        if wait:
            raise Refusal(f"more than {self.per_minute} requests per minute", math.ceil(wait))


class Door:
    """Places for generations, given out in order of arrival; a bounded number of requests may wait."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.active = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @asynccontextmanager
    async def places(self, count: int) -> AsyncIterator[None]:
        """`count` places at once, or a `Refusal`. A request larger than the house counts as all of it."""
        count = min(count, self.limits.max_active)
        await self._enter(count)
        try:
            yield
        finally:
            self._leave(count)

    async def _enter(self, count: int) -> None:
        if not self._waiting and self.active + count <= self.limits.max_active:
            self.active += count
            return
        if len(self._waiting) >= self.limits.max_waiting:
            raise Refusal(
                f"{self.active} generations are in progress and {len(self._waiting)} requests wait", 1
            )
        await self._wait(count)

    async def _wait(self, count: int) -> None:
        turn = (count, asyncio.get_running_loop().create_future())
        self._waiting.append(turn)
        try:
            # Not wait_for: before Python 3.12 it swallows a cancellation that meets a finished future.
            async with asyncio.timeout(self.limits.wait_seconds):
                await turn[1]
        except TimeoutError:
            self._give_up(turn)
            raise Refusal(f"no place became free within {self.limits.wait_seconds:g} s", 2) from None
        except asyncio.CancelledError:
            self._give_up(turn)
            raise

    def _give_up(self, turn: tuple[int, asyncio.Future[None]]) -> None:
        if turn in self._waiting:
            self._waiting.remove(turn)
            self._admit()
        elif turn[1].done() and not turn[1].cancelled():
            self._leave(turn[0])  # the place was given in the same moment as the waiter went away

    def _leave(self, count: int) -> None:
        self.active -= count
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self.active + self._waiting[0][0] <= self.limits.max_active:
            count, turn = self._waiting.popleft()
            if not turn.done():
                self.active += count
                turn.set_result(None)
