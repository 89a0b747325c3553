"""Who may come in, how often and how many at once.

Decisions take the clock as an argument and give a value; only `Places` waits, and only `Quotas` writes a
file. Nothing here knows HTTP: the gateway turns a `TooManyRequestsError` into an answer. Keys are compared as
hashes, in constant time.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import hmac
import logging
import math
import re
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from blocktrain.errors import UserError
from blocktrain.files import write_whole

log = logging.getLogger(__name__)

ANYONE = "anyone"
CLIENT_SHARE = 0.75
"""The share one client may have of the places that others leave: some are left for the next to come. Two
requests for 128 choices that nobody read held all 256 places."""
CHOICES_AT_ONCE = 8
"""Choices of one request that are written at a time while there are other requests. A short answer beside one
request for 64 choices took 6.6 times as long as alone."""
MAX_REMEMBERED_CALLERS = 10_000
MIN_KEY_CHARACTERS = 8
DAY_SECONDS = 86_400
QUOTA = "tokens_per_day="
T = TypeVar("T")


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
    reader_seconds: float = 20.0
    """An answer that its reader does not take for this long is given up, and its places with it."""
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

    def __init__(self, reason: str, retry_after_seconds: int, *, code: str = "rate_limit_exceeded") -> None:
        super().__init__(reason)
        self.reason, self.retry_after_seconds, self.code = reason, retry_after_seconds, code


class Keys:
    """The bearer keys of a file: one per line, optionally `name = key` and behind it `tokens_per_day=NUMBER`;
    `#` starts a comment."""

    def __init__(
        self,
        keys: Iterable[tuple[str, str]],
        quotas: Mapping[str, int] | None = None,
        usage_file: Path | None = None,
    ) -> None:
        """`quotas` are tokens per day by name; what is used of them is written to `usage_file`."""
        self._names = {_digest(key): name for name, key in keys}
        self.quotas = dict(quotas or {})
        self.usage_file = usage_file

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
    quotas: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        # Keys hold no `#`; what follows one is a comment.
        words = line.partition("#")[0].split()
        if not words:
            continue
        quota = words.pop().removeprefix(QUOTA) if words[-1].startswith(QUOTA) else None
        text = " ".join(words)
        name, equals, key = text.partition("=")
        name, key = (name.strip(), key.strip()) if equals else (f"key-{number}", text)
        if len(key) < MIN_KEY_CHARACTERS or not key.isascii() or " " in key:
            raise UserError(
                f"{path}, line {number}: expected {MIN_KEY_CHARACTERS} or more ASCII characters, no spaces"
            )
        keys.append((name, key))
        if quota is not None:
            if re.fullmatch(r"[1-9][0-9]{0,17}", quota) is None:
                raise UserError(f"{path}, line {number}: expected {QUOTA} and a whole number above 0")
            quotas[name] = int(quota)
    if not keys:
        raise UserError(f"{path} holds no keys; write one per line, or leave the option out to serve anyone")
    return Keys(keys, quotas, path.with_name(f"{path.name}.used"))


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


class QuotaRecord(msgspec.Struct, forbid_unknown_fields=True):
    """What is written of quotas: a day, counted from 1970, and the tokens that each owner used on it."""

    day: int
    used: dict[str, int]


class Quotas:
    """Tokens that each key's owner has used on the present day, UTC; with a file, restarts or not. They are
    counted on the event loop and written by a thread; what is counted while it writes is written together."""

    def __init__(self, tokens_per_day: Mapping[str, int], file: Path | None = None) -> None:
        self.tokens_per_day, self.file = tokens_per_day, file if tokens_per_day else None
        self._day, self._used = 0, Counter[str]()
        self._lock = threading.Lock()
        self._unwritten = False
        if self.file is None:
            return
        try:
            record = msgspec.json.decode(self.file.read_bytes(), type=QuotaRecord)
            self._day, self._used = record.day, Counter(record.used)
        except FileNotFoundError:
            pass
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            # Somebody's mistake, as it is written whole. Nobody is locked out for that, and the file is kept
            # to look at. (msgspec lets bytes that are no UTF-8 through as Python's own error.)
            log.warning("lost the usage of keys file=%s reason=%s", self.file, error)
            with suppress(OSError):
                self.file.replace(self.file.with_name(f"{self.file.name}.damaged"))
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="quotas")
        # Now, and not with the first answer: an operator should read here that nothing can be written.
        self._write(self.file)

    def _write(self, file: Path) -> None:
        with self._lock:
            self._unwritten = False
            content = msgspec.json.encode(QuotaRecord(self._day, dict(self._used)))
        try:
            write_whole(file, content)
        except OSError as error:
            log.warning("a restart will forget the usage of keys file=%s reason=%s", file, error)

    def flush(self) -> None:
        """Wait until all is written."""
        if self.file is not None:
            self._writer.submit(lambda: None).result()

    def check(self, owner: str, now: float) -> None:
        """An answer that begins within the quota is written to its end; the next is refused."""
        most = self.tokens_per_day.get(owner)
        if most is not None and int(now // DAY_SECONDS) == self._day and self._used[owner] >= most:
            left = math.ceil(DAY_SECONDS - now % DAY_SECONDS)
            sentence = f"the {most} tokens of this day (UTC) are used up"
            raise TooManyRequestsError(sentence, left, code="insufficient_quota")

    def count(self, owner: str, tokens: int, now: float) -> None:
        with self._lock:
            if int(now // DAY_SECONDS) != self._day:
                self._day, self._used = int(now // DAY_SECONDS), Counter()
            if owner not in self.tokens_per_day:
                return
            self._used[owner] += tokens
            waits, self._unwritten = self._unwritten, True
        if self.file is not None and not waits:
            self._writer.submit(self._write, self.file)


@dataclass(frozen=True, eq=False)
class Turn:
    """A request that waits for places."""

    client: str
    count: int
    come: asyncio.Future[None]


class Places:
    """Places for generations; a bounded number of requests may wait. A client's requests get theirs in order
    of arrival. Those of others pass a request that waits for its own client's share."""

    def __init__(self, limits: GatewayLimits) -> None:
        self.limits = limits
        self.requests = 0
        """Requests that have their places."""
        self._held: Counter[str] = Counter()
        self._waiting: list[Turn] = []

    @property
    def active(self) -> int:
        return self._held.total()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def _fits(self, client: str, count: int) -> bool:
        mine = self._held[client]
        free = self.limits.max_active - (self.active - mine)
        return mine + count <= math.ceil(CLIENT_SHARE * free)

    @asynccontextmanager
    async def taken(self, count: int, client: str = ANYONE) -> AsyncIterator[None]:
        """`count` places at once, or TooManyRequestsError. A request for more than a client may ever have
        counts as that."""
        limits = self.limits
        count = min(count, math.ceil(CLIENT_SHARE * limits.max_active))
        own = sum(turn.client == client for turn in self._waiting)
        # Not past the client's own that wait, even where a small request would fit.
        if not own and self._fits(client, count):
            self._held[client] += count
        elif len(self._waiting) >= limits.max_waiting or own >= math.ceil(CLIENT_SHARE * limits.max_waiting):
            sentence = f"{self.active} generations are in progress and {len(self._waiting)} requests wait"
            raise TooManyRequestsError(sentence, 1)
        else:
            await self._wait(client, count)
        self.requests += 1
        try:
            yield
        finally:
            self.requests -= 1
            self._give_back(client, count)

    async def _wait(self, client: str, count: int) -> None:
        turn = Turn(client, count, asyncio.get_running_loop().create_future())
        self._waiting.append(turn)
        try:
            # Not wait_for: before Python 3.12 it swallows a cancellation that meets a finished future.
            async with asyncio.timeout(self.limits.wait_seconds):
                await turn.come
        except (TimeoutError, asyncio.CancelledError) as error:
            if turn in self._waiting:
                self._waiting.remove(turn)
                self._give_back(client, 0)
            elif turn.come.done() and not turn.come.cancelled():
                self._give_back(client, count)  # given in the same moment as the waiter went away
            if isinstance(error, TimeoutError):
                sentence = f"no place became free within {self.limits.wait_seconds:g} s"
                raise TooManyRequestsError(sentence, 2) from None
            raise

    def _give_back(self, client: str, count: int) -> None:
        """Free places go to the one that waits longest and fits; within one client nobody is overtaken."""
        self._held[client] -= count
        if self._held[client] <= 0:
            del self._held[client]
        blocked: set[str] = set()
        for turn in list(self._waiting):
            if turn.come.done():
                self._waiting.remove(turn)
            elif turn.client in blocked or not self._fits(turn.client, turn.count):
                blocked.add(turn.client)
            else:
                self._waiting.remove(turn)
                self._held[turn.client] += turn.count
                turn.come.set_result(None)


class ChoiceTurns:
    """Whose turn it is among the choices of one request. All go on at once where it is `alone`; beside other
    requests CHOICES_AT_ONCE do, piece by piece in turn, so that `n` does not count as so many clients."""

    def __init__(self, alone: Callable[[], bool]) -> None:
        self.alone = alone
        self._busy = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def next(self, pieces: AsyncIterator[T]) -> T | None:
        """The next piece of a choice, when it is its turn; None behind the last."""
        while self._busy >= CHOICES_AT_ONCE and not self.alone():
            come = asyncio.get_running_loop().create_future()
            self._waiting.append(come)
            await come
        self._busy += 1
        try:
            return await anext(pieces, None)
        finally:
            self._busy -= 1
            # One is always under way while others wait, so what has changed since is looked at here.
            for _ in range(len(self._waiting) if self.alone() else 1):
                while self._waiting and self._waiting[0].done():  # it was cancelled
                    self._waiting.popleft()
                if self._waiting:
                    self._waiting.popleft().set_result(None)
