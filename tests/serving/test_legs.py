"""A leg of a traversal asks in its own task: who answers first ends it, and a cancellation still does."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field

import numpy as np
import pytest

from blocktrain.serving.blocks import WeighedRows
from blocktrain.serving.engine.fanout import Fanout, FanoutConfig
from blocktrain.serving.engine.link import LinkConfig, LinkError, StageLink
from blocktrain.serving.engine.questions import Question
from blocktrain.serving.engine.requests import GenerationStats
from blocktrain.serving.engine.rows import Part
from blocktrain.serving.transport import Address
from blocktrain.wire.frame_metadata import Hello, ModelShape
from blocktrain.wire.frames import Codec, FrameType

SHAPE = ModelShape("tiny", "", "", 256, 8, 64, 1)
HOUR = 3600.0


class NearLink(StageLink):
    """Within reach without a connection."""

    def lost_at(self, now: float) -> float | None:
        return None


@dataclass(eq=False, kw_only=True)
class Scripted(Question):
    """Answers after so many seconds of each link; negative: fails after as many."""

    seconds: dict[int, float]
    asked: list[int] = field(default_factory=list)

    async def ask(self, link: StageLink, blocks: tuple[int, ...]) -> Part:
        self.asked.append(link.number)
        await asyncio.sleep(abs(self.seconds[link.number]))
        if self.seconds[link.number] < 0:
            raise LinkError("failed as told")
        return Part(blocks, WeighedRows(np.full((1, 1), link.number), np.empty((1, 0))), np.zeros((1, 1)))


def two_stages(seconds: dict[int, float]) -> tuple[Fanout, Scripted]:
    links = [
        NearLink(number, Address("127.0.0.1", 1 + number), Hello("me", SHAPE), LinkConfig())
        for number in range(2)
    ]
    for link in links:
        link.blocks = frozenset({0})
    question = Scripted(
        type=FrameType.SCORE,
        codec=Codec.F32,
        shape=SHAPE,
        ids=[1],
        num_rows=1,
        deadline=math.inf,
        stats=GenerationStats(),
        spread=0,
        seconds=seconds,
    )
    return Fanout(links, 1, FanoutConfig(hedge_seconds=0.02, degrade_seconds=HOUR)), question


@pytest.mark.parametrize(
    ("seconds", "answers", "slow"),
    [
        ({0: 0.0, 1: HOUR}, 0, False),
        ({0: HOUR, 1: 0.01}, 1, True),  # the spare is first
        ({0: 0.06, 1: HOUR}, 0, False),  # the one that lags is first all the same
        ({0: -0.06, 1: 0.1}, 1, True),  # it fails while the spare is at it, which is not asked twice
        ({0: -0.001, 1: 0.01}, 1, False),  # it fails before it lags
    ],
)
def test_who_answers_first_ends_a_leg(seconds: dict[int, float], answers: int, slow: bool) -> None:
    async def check() -> None:
        fanout, question = two_stages(seconds)
        (part,) = await asyncio.wait_for(fanout.collect(question), 5)
        assert part.said.rows[0, 0] == answers
        assert len(question.asked) == len(set(question.asked))
        assert (fanout.links[0].slow_until > 0) is slow
        me = asyncio.current_task()
        assert me is not None
        assert not me.cancelling()
        assert asyncio.all_tasks() == {me}

    asyncio.run(check())


@pytest.mark.parametrize("after_seconds", [0.01, 0.05])
def test_a_leg_that_nobody_waits_for_leaves_nothing_behind(after_seconds: float) -> None:
    async def check() -> None:
        fanout, question = two_stages({0: HOUR, 1: HOUR})
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(after_seconds):
                await fanout.collect(question)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(check())


def test_a_cancellation_in_the_moment_of_the_spares_answer_is_not_lost() -> None:
    async def check() -> None:
        fanout, question = two_stages({0: HOUR, 1: 0.01})
        writing = asyncio.create_task(fanout.collect(question))
        # Whatever comes first in the turn in which the spare's answer ends the leg.
        while fanout.links[0].slow_until == 0:
            await asyncio.sleep(0)
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(check())


def test_a_stage_that_lags_and_then_fails_is_replaced_once() -> None:
    async def check() -> None:
        fanout, question = two_stages({0: -0.06, 1: 0.3})
        failing, spare = fanout.links
        loop = asyncio.get_running_loop()
        # The spare comes when the leg has looked for others in vain, has failed, and waits for any.
        spare.draining = True
        loop.call_later(0.05, setattr, failing, "draining", True)
        loop.call_later(0.15, setattr, spare, "draining", False)
        (part,) = await asyncio.wait_for(fanout.collect(question), 5)
        assert part.said.rows[0, 0] == 1
        assert question.asked == [0, 1]

    asyncio.run(check())
