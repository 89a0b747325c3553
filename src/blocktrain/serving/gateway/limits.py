"""Who may come in, how often and how many at once.

Decisions take the clock as an argument and give a value; only `Places` waits. Nothing here knows HTTP:
the gateway turns a `TooManyRequestsError` into an answer. Keys are compared as hashes, in constant time.
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
class GatewayLimits:
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


def parse_limits(changes: Iterable[str]) -> GatewayLimits:
    """The limits with some changed, each written `name=value`; `none` lifts one that can be lifted."""
    values: dict[str, float | None] = {}
    known = {field.name: field for field in dataclasses.fields(GatewayLimits)}
    for change in changes:
        name, text = (part.strip() for part in change.partition("=")[::2])
        if name not in known:
            raise UserError(f"unknown limit {name!r}; known: {', '.join(known)}")
        whole = not isinstance(known[name].default, float)
        if text.lower() == "none" and known[name].default is None:
            values[name] = None
            continue
        try:
            values[name] = int(text) if whole else float(text)
        except ValueError:
            kind = "a whole number" if whole else "a number"
            raise UserError(f"limit {name} must be {kind}, found {text!r}") from None
    return dataclasses.replace(GatewayLimits(), **values)  # type: ignore[arg-type]


class TooManyRequestsError(Exception):
    """Why there is no place, and when to try again."""

    def __init__(self, reason: str, retry_after_seconds: int) -> None:
        super().__init__(reason)
        self.reason, self.retry_after_seconds = reason, retry_after_seconds


class Keys:
    """The bearer keys of a file: one per line, optionally `name = key`; `#` starts a comment."""

    def __init__(self, keys: Iterable[tuple[str, str]]) -> None:
        self._names = {_digest(key): name for name, key in keys}

    def owner(self, key: str) -> str | None:
        """The name that goes with a key, or None for a key nobody was given."""
        digest, found = _digest(key), None
        # Every key is compared, so that the time taken says nothing about which one came close.
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
    keys: list[tuple[str, str]] = []
    for number, line in enumerate(lines, start=1):
        # Keys hold no `#`; what follows one is a comment.
        text = line.partition("#")[0].strip()
        if not text:
            continue
        name, equals, key = text.partition("=")
        name, key = (name.strip(), key.strip()) if equals else (f"key-{number}", text)
        if len(key) < MIN_KEY_CHARACTERS or not key.isascii() or " " in key:
            raise UserError(
                f"{path}, line {number}: expected {MIN_KEY_CHARACTERS} or more ASCII characters, no spaces"
            )
        keys.append((name, key))
    if not keys:
        raise UserError(f"{path} holds no keys; write one per line, or leave the option out to serve anyone")
    return Keys(keys)


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
    """A bucket for each caller. The caller that was silent for longest is forgotten first."""

    def __init__(self, per_minute: int | None) -> None:
        self.per_minute = per_minute
        self._buckets: OrderedDict[str, Bucket] = OrderedDict()

    def check(self, caller: str, now: float) -> None:
        if self.per_minute is None:
            return
        before = self._buckets.pop(caller, Bucket(float(self.per_minute), now))
        self._buckets[caller], wait = after_request(before, now, self.per_minute)
        # Bounded: addresses are free to make up, and each would keep a bucket.
        if len(self._buckets) > MAX_REMEMBERED_CALLERS:
            self._buckets.popitem(last=False)
        if wait:
            raise TooManyRequestsError(f"more than {self.per_minute} requests per minute", math.ceil(wait))


class Places:
    """Places for generations, given out in order of arrival; a bounded number of requests may wait."""

    def __init__(self, limits: GatewayLimits) -> None:
        self.limits = limits
        self.active = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @asynccontextmanager
    async def taken(self, count: int) -> AsyncIterator[None]:
        """`count` places at once, or TooManyRequestsError. A request for more than all counts as all."""
        limits, count = self.limits, min(count, self.limits.max_active)
        # Not past those who wait, even where a small request would fit.
        if not self._waiting and self.active + count <= limits.max_active:
            self.active += count
        elif len(self._waiting) >= limits.max_waiting:
            raise TooManyRequestsError(
                f"{self.active} generations are in progress and {len(self._waiting)} requests wait", 1
            )
        else:
            await self._wait(count)
        try:
            yield
        finally:
            self._give_back(count)

    async def _wait(self, count: int) -> None:
        turn = (count, asyncio.get_running_loop().create_future())
        self._waiting.append(turn)
        try:
            # Not wait_for: before Python 3.12 it swallows a cancellation that meets a finished future.
            async with asyncio.timeout(self.limits.wait_seconds):
                await turn[1]
        except (TimeoutError, asyncio.CancelledError) as error:
            if turn in self._waiting:
                self._waiting.remove(turn)
                self._give_back(0)
            elif turn[1].done() and not turn[1].cancelled():
                self._give_back(count)  # the place was given in the same moment as the waiter went away
            if isinstance(error, TimeoutError):
                sentence = f"no place became free within {self.limits.wait_seconds:g} s"
                raise TooManyRequestsError(sentence, 2) from None
            raise

    def _give_back(self, count: int) -> None:
        """Free places go to whoever waits longest; a large request is not overtaken by small ones."""
        self.active -= count
        while self._waiting and self.active + self._waiting[0][0] <= self.limits.max_active:
            wanted, turn = self._waiting.popleft()
            if not turn.done():
                self.active += wanted
                turn.set_result(None)
