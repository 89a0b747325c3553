"""When a worker works by its user's terms, how fast it may send, and what it says it gave."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter

import pytest

from blocktrain.client.traffic import SAVED_UP_SECONDS, Pace
from blocktrain.errors import StoppedError, UserError
from blocktrain.worker.shifts import Contribution, Shifts, Terms, Wish, decide, parse_hours


def wish(
    terms: Terms, *, at: str = "12:00", paused: bool = False, worked: float = 0, rounds: int = 0
) -> Wish:
    hour, minute = map(int, at.split(":"))
    asked = "asked to" if paused else None
    return decide(
        terms, minute=60 * hour + minute, asked_to_pause=asked, worked_seconds=worked, rounds=rounds
    )[0]


@pytest.mark.parametrize(
    ("text", "at", "expected"),
    [
        ("22-7", "23:00", Wish.WORK),
        ("22-7", "06:59", Wish.WORK),
        ("22-7", "07:00", Wish.PAUSE),
        ("22-7", "21:59", Wish.PAUSE),
        ("9-17", "09:00", Wish.WORK),
        ("9-17", "17:00", Wish.PAUSE),
        ("22:30-06:15", "06:14", Wish.WORK),
        ("22:30-06:15", "22:29", Wish.PAUSE),
        ("0-24", "00:00", Wish.WORK),
    ],
)
def test_hours_of_the_day_may_reach_over_midnight(text: str, at: str, expected: Wish) -> None:
    assert wish(Terms(hours=parse_hours(text)), at=at) is expected


@pytest.mark.parametrize("text", ["", "7", "7-7", "25-3", "22:70-3", "night", "22-7-9"])
def test_hours_that_are_no_hours_are_misuse(text: str) -> None:
    with pytest.raises(UserError, match="expected two times of the day"):
        parse_hours(text)


def test_a_worker_leaves_when_its_share_is_done_even_in_a_pause() -> None:
    terms = Terms(hours=(540, 600), max_seconds=3600, max_rounds=3)
    assert wish(terms, at="09:30", worked=3599, rounds=2) is Wish.WORK
    assert wish(terms, at="09:30", worked=3600) is Wish.LEAVE
    assert wish(terms, at="20:00", paused=True, rounds=3) is Wish.LEAVE
    assert wish(terms, at="09:30", paused=True) is Wish.PAUSE


def test_a_pace_lets_through_what_it_says() -> None:
    pace = Pace(1000.0)
    now, moved = 100.0, 0
    while now < 110.0:  # a sender that always has more, and waits as it is told
        moved += 100
        now += pace.debt_seconds(100, now)
    assert moved == pytest.approx(1000 * (10 + SAVED_UP_SECONDS), abs=100)
    assert Pace(None).debt_seconds(10**9, 0.0) == 0.0


def test_a_pause_is_a_leave_and_a_return() -> None:
    """SIGUSR1 ends the shift, SIGUSR2 begins another, which ends by itself, as in a finished run."""
    shifts_begun: list[int] = []
    said: list[str] = []

    def work(ended: threading.Event) -> None:
        shifts_begun.append(1)
        if len(shifts_begun) == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert ended.wait(30)

    def say(line: str) -> None:
        said.append(line)
        if line.startswith("paused"):
            os.kill(os.getpid(), signal.SIGUSR2)

    before = [signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2)]
    shifts = Shifts(Terms(), Contribution(), work, say)
    shifts.obey_signals()
    try:
        shifts.run(threading.Event())
    finally:
        for number, handler in zip((signal.SIGUSR1, signal.SIGUSR2), before, strict=True):
            signal.signal(number, handler)
    assert len(shifts_begun) == 2
    assert said == ["paused: asked to by SIGUSR1; SIGUSR2 resumes", "resumed"]


def test_the_last_round_ends_the_work() -> None:
    given, said = Contribution(), list[str]()

    def work(ended: threading.Event) -> None:
        given.verdicts["accepted"] += 2
        assert ended.wait(30)

    Shifts(Terms(max_rounds=2), given, work, said.append).run(threading.Event())
    assert said == ["leaving: 2 rounds done, as --max-rounds asks"]


def test_a_stop_before_joining_is_told_and_a_pause_before_joining_is_not() -> None:
    def work(ended: threading.Event) -> None:
        assert ended.wait(30)
        raise StoppedError("stopped before joining")

    stop = threading.Event()
    threading.Timer(0.1, stop.set).start()
    with pytest.raises(StoppedError):
        Shifts(Terms(), Contribution(), work, lambda _: None).run(stop)
    given = Contribution()
    minutes = iter([600, *[60] * 3])  # inside the hours once, outside afterwards
    stop = threading.Event()
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        stop.set()

    Shifts(Terms(hours=(540, 660)), given, work, say, lambda: next(minutes, 60)).run(stop)
    assert said == ["paused: until 09:00, as --hours asks"]


def test_what_was_given_is_one_sentence() -> None:
    given = Contribution(90.0, 60.0, 1200, Counter(accepted=3, late=1), 2_500_000, 7_000_000)
    assert given.sentence() == (
        "contributed 4 updates (3 accepted, 1 late), 1,200 steps in 1 min 0 s of computing, "
        "2.5 MB up, 7.0 MB down"
    )
    given.text_bytes = 6_000_000  # a volunteer pays for these too
    assert given.sentence().endswith("2.5 MB up, 7.0 MB down, 6.0 MB of the run's text")
