from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from blocktrain.errors import UserError
from blocktrain.serving.gateway.limits import (
    CHOICES_AT_ONCE,
    DAY_SECONDS,
    Bucket,
    ChoiceTurns,
    GatewayLimits,
    Keys,
    Places,
    Quotas,
    Rates,
    TooManyRequestsError,
    after_request,
    load_keys,
)


def test_keys_of_a_file_have_names(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# staff\nalice = sk-alice-123\n\nsk-nameless-1  # a robot\n")
    keys = load_keys(file)
    assert keys.owner("sk-alice-123") == "alice"
    assert keys.owner("sk-nameless-1") == "key-4"
    assert keys.owner("sk-alice-124") is None


def test_a_key_may_have_a_quota_for_each_day(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("alice = sk-alice-123 tokens_per_day=100\nsk-nameless-1 tokens_per_day=7 # a robot\n")
    keys = load_keys(file)
    assert (keys.owner("sk-alice-123"), keys.owner("sk-nameless-1")) == ("alice", "key-2")
    quotas = Quotas(keys.quotas)
    noon = 20_000 * DAY_SECONDS + 43_200.0
    quotas.count("alice", 99, noon)
    quotas.check("alice", noon)
    quotas.count("alice", 1, noon)
    with pytest.raises(TooManyRequestsError, match="the 100 tokens of this day") as refusal:
        quotas.check("alice", noon + 1)
    assert (refusal.value.retry_after_seconds, refusal.value.code) == (43_199, "insufficient_quota")
    quotas.check("key-2", noon)
    quotas.check("bob, who has none", noon)
    quotas.check("alice", noon + 43_200)  # the next day


def test_what_was_used_of_a_quota_outlives_the_gateway(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, noon = tmp_path / "keys", 20_000 * DAY_SECONDS + 43_200.0
    file.write_text("alice = sk-alice-123 tokens_per_day=100\nbob = sk-bob-1234\n")

    def started() -> Quotas:
        keys = load_keys(file)
        return Quotas(keys.quotas, keys.usage_file)

    before = started()
    before.count("alice", 60, noon)
    before.count("bob", 1000, noon)
    before.flush()
    again = started()
    again.check("alice", noon)
    for _ in range(40):
        again.count("alice", 1, noon)
    again.flush()
    with pytest.raises(TooManyRequestsError, match="the 100 tokens of this day"):
        started().check("alice", noon)
    started().check("alice", noon + DAY_SECONDS)
    assert json.loads((tmp_path / "keys.used").read_text()) == {"day": 20_000, "used": {"alice": 100}}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["keys", "keys.used"]
    assert caplog.records == []
    # What cannot be read or written is told, and nobody is locked out.
    (tmp_path / "keys.used").write_text("")
    started().check("alice", noon)
    assert "lost the usage of keys" in caplog.text
    (tmp_path / "keys.used").unlink()
    (tmp_path / "keys.used").mkdir()
    started().check("alice", noon)
    assert "a restart will forget the usage of keys" in caplog.text


def test_no_usage_is_written_where_there_is_no_quota(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("alice = sk-alice-123\n")
    keys = load_keys(file)
    Quotas(keys.quotas, keys.usage_file).count("alice", 5, 0.0)
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("quota", ["", "many", "0", "-5", "1.5"])
def test_a_quota_that_is_no_number_is_refused(tmp_path: Path, quota: str) -> None:
    file = tmp_path / "keys"
    file.write_text(f"alice = sk-alice-123 tokens_per_day={quota}\n")
    with pytest.raises(UserError, match="line 1: expected tokens_per_day= and a whole number above 0"):
        load_keys(file)


def test_many_choices_take_turns_beside_another_request() -> None:
    async def scene() -> None:
        others, under_way, most = 0, 0, 0
        turns = ChoiceTurns(lambda: not others)
        held = asyncio.Event()

        async def pieces() -> AsyncIterator[int]:
            nonlocal under_way, most
            for number in range(4):
                under_way += 1
                most = max(most, under_way)
                await held.wait()
                await asyncio.sleep(0)
                under_way -= 1
                yield number

        async def written() -> list[int]:
            found, source = [], pieces()
            while (piece := await turns.next(source)) is not None:
                found.append(piece)
            return found

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(written()) for _ in range(3 * CHOICES_AT_ONCE)]
            await _settle()
            assert under_way == len(tasks)  # alone: all at once
            others = 1
            held.set()
            while most == len(tasks) and any(not task.done() for task in tasks):
                await asyncio.sleep(0)
                if under_way <= CHOICES_AT_ONCE:
                    most = 0
            assert not all(task.done() for task in tasks)
            while not all(task.done() for task in tasks):
                assert under_way <= CHOICES_AT_ONCE
                await asyncio.sleep(0)
        assert 0 < most <= CHOICES_AT_ONCE
        assert [task.result() for task in tasks] == [[0, 1, 2, 3]] * len(tasks)

    asyncio.run(scene())


@pytest.mark.parametrize("content", ["", "# nothing\n", "short\n", "a = with space\n", "ключ-ключ-ключ\n"])
def test_a_useless_key_file_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "keys"
    file.write_text(content)
    with pytest.raises(UserError, match="keys"):
        load_keys(file)


def test_a_missing_key_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read the key file"):
        load_keys(tmp_path / "none")


def test_no_key_opens_an_empty_set() -> None:
    assert Keys([]).owner("") is None


def test_a_bucket_refills_evenly() -> None:
    bucket, wait = after_request(Bucket(1.0, 0.0), 0.0, 60)
    assert (bucket.left, wait) == (0.0, 0.0)
    bucket, wait = after_request(bucket, 0.25, 60)
    assert wait == pytest.approx(0.75)
    bucket, wait = after_request(bucket, 1.0, 60)
    assert wait == 0.0


def test_each_caller_has_a_rate_of_its_own() -> None:
    rates = Rates(2)
    for caller in ("a", "a", "b"):
        rates.check(caller, 0.0)
    with pytest.raises(TooManyRequestsError) as refusal:
        rates.check("a", 0.0)
    assert refusal.value.retry_after_seconds == 30
    rates.check("b", 0.0)
    rates.check("a", 31.0)


def test_a_limit_of_nothing_is_refused() -> None:
    with pytest.raises(UserError, match="max_active"):
        GatewayLimits(max_active=0)


async def _enter(places: Places, count: int, inside: list[int], leave: asyncio.Event) -> None:
    async with places.taken(count):
        inside.append(count)
        await leave.wait()


async def _settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_places_are_given_by_order_of_arrival_and_refuses_beyond_its_queue() -> None:
    async def scene() -> None:
        places = Places(GatewayLimits(max_active=4, max_waiting=2))
        inside: list[int] = []
        leave = [asyncio.Event() for _ in range(3)]
        tasks = [
            asyncio.create_task(_enter(places, n, inside, e)) for n, e in zip((3, 2, 1), leave, strict=True)
        ]
        await _settle()
        assert (inside, places.active, places.waiting) == ([3], 3, 2)
        with pytest.raises(TooManyRequestsError):
            await _enter(places, 1, inside, leave[0])
        leave[0].set()
        await _settle()
        assert (inside, places.active, places.waiting) == ([3, 2, 1], 3, 0)
        leave[1].set()
        leave[2].set()
        await asyncio.gather(*tasks)
        assert places.active == 0

    asyncio.run(scene())


def test_waiting_ends_with_a_refusal_and_leaves_nothing_behind() -> None:
    async def scene() -> None:
        places = Places(GatewayLimits(max_active=1, max_waiting=5, wait_seconds=0.01))
        leave = asyncio.Event()
        first = asyncio.create_task(_enter(places, 1, [], leave))
        await _settle()
        with pytest.raises(TooManyRequestsError, match="no place became free"):
            await _enter(places, 1, [], leave)
        assert places.waiting == 0
        leave.set()
        await first
        assert places.active == 0

    asyncio.run(scene())


def test_a_cancelled_waiter_gives_its_turn_away() -> None:
    async def scene() -> None:
        places = Places(GatewayLimits(max_active=2))
        leave = asyncio.Event()
        inside: list[int] = []
        tasks = [asyncio.create_task(_enter(places, n, inside, leave)) for n in (1, 2, 1)]
        await _settle()
        assert inside == [1]
        tasks[1].cancel()
        await _settle()
        assert inside == [1, 1]
        leave.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (places.active, places.waiting) == (0, 0)

    asyncio.run(scene())


def test_a_waiter_cancelled_in_the_moment_of_its_turn_gives_the_place_back() -> None:
    async def scene() -> None:
        places = Places(GatewayLimits(max_active=1))
        leave = asyncio.Event()
        first = asyncio.create_task(_enter(places, 1, [], leave))
        second = asyncio.create_task(_enter(places, 1, [], asyncio.Event()))
        await _settle()
        leave.set()
        await first  # the place is now the second's, which has not run yet
        assert places.active == 1
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        assert (places.active, places.waiting) == (0, 0)

    asyncio.run(scene())
