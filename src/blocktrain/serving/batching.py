"""Continuous batching: whatever waits when the blocks fall idle shares the next forward pass.

Requests join and leave at traversal boundaries. One thread computes; everything else happens on the event
loop. Processor time of one core for one new token in each of 16 sessions of 150 to 350 positions (d = 384,
3 layers): 70 ms one by one, 18 ms packed; in each of 64: 335 and 62 ms. Knows works and deadlines, not who
asked.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from blocktrain.serving.blocks import HeldBlocks, RowWork, WeighedRows

T = TypeVar("T")

SWITCH_SECONDS = 0.0005
"""How long the event loop waits for the computing thread to let go of Python. With Python's 5 ms each of a
gateway's questions took 1.3 ms to send while others drafted, of 0.03, and eight clients wrote 0.8 as fast."""
MAX_BATCH_TOKENS = 2048
"""New tokens in one forward pass; bounds how long a request that comes next can wait."""


class LateError(Exception):
    """The deadline passed while the work was waiting."""


class CacheGapError(Exception):
    """The caches lack what the work continues; its ids must be sent again."""


class QueueFullError(Exception):
    """More work waits than may."""


@dataclass
class _Job:
    work: RowWork
    deadline: float
    future: asyncio.Future[WeighedRows]

    @property
    def owner(self) -> int:
        """Works of one session share its caches, and run one after another."""
        return id(self.work.caches) if self.work.caches else id(self)

    @property
    def needs(self) -> set[int]:
        """Whose earlier works must have run before this one, or have cached what it begins with."""
        return {self.owner} if self.work.like is None else {self.owner, id(self.work.like)}


class Batcher:
    def __init__(
        self,
        held: HeldBlocks,
        *,
        max_waiting: int = 4096,
        observe: Callable[[int, int, float], None] | None = None,
    ) -> None:
        """`observe` is told works, tokens and seconds of every forward pass."""
        self.held, self.max_waiting = held, max_waiting
        sys.setswitchinterval(SWITCH_SECONDS)
        self._observe = observe or (lambda works, tokens, seconds: None)
        self._waiting: deque[_Job] = deque()
        self._wake = asyncio.Event()
        # One thread: blocks and caches are not safe to run from two, and a second would only share the cores.
        self.executor = ThreadPoolExecutor(1, thread_name_prefix="blocks")
        self._task: asyncio.Task[None] | None = None
        """Begins with the first work, on the event loop that asks."""

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    async def close(self) -> None:
        # Forgotten: how a task ended refers to what it ran, and so to this batcher and its blocks.
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        while self._waiting:
            self._waiting.popleft().future.cancel()
        self.executor.shutdown(wait=True, cancel_futures=True)

    def submit(self, work: RowWork, deadline: float = float("inf")) -> asyncio.Future[WeighedRows]:
        """The rows of `work`, in time; `deadline` is on the event loop's clock."""
        if len(self._waiting) >= self.max_waiting:
            raise QueueFullError(f"{len(self._waiting)} requests are waiting; expected fewer")
        loop = asyncio.get_running_loop()
        if self._task is None:
            self._task = loop.create_task(self._run(), name="batcher")
        job = _Job(work, deadline, loop.create_future())
        self._waiting.append(job)
        self._wake.set()
        return job.future

    async def call(self, function: Callable[[], T], deadline: float = float("inf")) -> T:
        """Run something else in the computing thread, such as a draft; LateError if its turn comes late."""
        loop = asyncio.get_running_loop()

        def in_time() -> T:
            # Asked in the computing thread, when its turn has come.
            if loop.time() >= deadline:
                raise LateError("the deadline passed while the request was waiting")
            return function()

        return await loop.run_in_executor(self.executor, in_time)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._wake.wait()
            # Whatever arrived during the last pass: batches grow with load and add no waiting of their own.
            jobs = self._take(loop.time())
            if not self._waiting:
                self._wake.clear()
            if not jobs:
                continue
            began = loop.time()
            try:
                rows = await loop.run_in_executor(self.executor, self.held.rows, [job.work for job in jobs])
            except Exception as error:  # translated once for everybody who waits
                failed = {job.owner for job in jobs}
                for job in jobs:
                    if not job.future.done():
                        job.future.set_exception(error)
                # Caches may be half way through the pass: nothing goes on from them.
                for job in self._waiting:
                    if job.needs & failed and not job.future.done():
                        job.future.set_exception(CacheGapError("the pass before this one failed"))
                continue
            self._observe(len(jobs), sum(len(job.work.ids) for job in jobs), loop.time() - began)
            for job, values in zip(jobs, rows, strict=True):
                if not job.future.done():
                    job.future.set_result(values)

    def _take(self, now: float) -> list[_Job]:
        """The next batch in order of arrival: at most one job of a session, exact passes alone, and one that
        begins with what another session will have cached behind the jobs of that one."""
        taken: list[_Job] = []
        later: deque[_Job] = deque()
        owners: set[int] = set()
        tokens = 0
        while self._waiting:
            # Not stopped at a full batch: what is left waits on, in its order.
            job = self._waiting.popleft()
            full = bool(taken) and (job.work.exact or taken[0].work.exact or tokens >= MAX_BATCH_TOKENS)
            if job.future.done():
                continue  # its client has gone away, and what the session asks next need not wait for it
            # Caches are copied before a pass: what another session holds now need not be waited for.
            waits = job.needs & owners and (job.owner in owners or not job.work.runnable)
            if waits or full:
                later.append(job)
            elif now >= job.deadline:
                job.future.set_exception(LateError("the deadline passed while the request was waiting"))
            elif not job.work.runnable:
                job.future.set_exception(CacheGapError("the session's cache lacks earlier positions"))
            else:
                taken.append(job)
                tokens += len(job.work.ids)
            owners.add(job.owner)
        self._waiting = later
        return taken
