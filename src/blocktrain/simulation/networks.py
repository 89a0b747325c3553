"""Networks of the simulation, and the machines on them: how long things take, drawn from a seed.

A network is a value. Spreads are standard deviations of a logarithm: `spread` between machines, for the
whole run, `jitter` from one round or transfer to the next. Draws depend on the seed, the machine and how
many it has made, and not on the policy, so that both policies meet the same weather.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from blocktrain.ids import derive_seed

STANDS_FOR_PARAMETERS = 25_000_000
"""A simulated block is small, and stands for one of this size: its bytes are scaled up to it."""


@dataclass(frozen=True, kw_only=True)
class Network:
    name: str
    sentence: str
    deadline_seconds: float
    """The fixed deadline (tau) of the policy `drop`; `carry` computes its own."""
    compute_seconds: float = 60.0
    """What the steps of one round take on the median machine, of a block with `model.layers_per_block`."""
    compute_spread: float = 0.0
    compute_jitter: float = 0.0
    latency_seconds: float = 0.0
    """Round trip of one request."""
    up_megabits: float = 10_000.0
    """Megabits per second of the median machine, towards the coordinator."""
    down_megabits: float = 10_000.0
    link_spread: float = 0.0
    link_jitter: float = 0.0
    up_for_seconds: float | None = None
    """Mean time between two drop-outs of one machine; None where machines stay."""
    away_seconds: float = 0.0
    """Mean length of a drop-out, in which a machine neither computes nor transfers."""


def transfer_seconds(num_bytes: float, megabits: float) -> float:
    """On a line of so many megabits per second that carries nothing else."""
    return num_bytes * 8 / (megabits * 1e6)


class Machine:
    """One worker's hardware and line."""

    def __init__(self, network: Network, seed: int, index: int) -> None:
        self.network = network
        self._compute = _generator("compute", seed, index)
        self._link = _generator("link", seed, index)
        self._outage = _generator("outage", seed, index)
        self._compute_factor = _lognormal(self._compute, network.compute_spread)
        self._link_factor = _lognormal(self._link, network.link_spread)
        self._outages: list[tuple[float, float]] = []
        self._known_until = 0.0

    def compute_seconds(self) -> float:
        """Computing the steps of the next round."""
        jitter = _lognormal(self._compute, self.network.compute_jitter)
        return self.network.compute_seconds * self._compute_factor * jitter

    def up_seconds(self, num_bytes: float) -> float:
        return self.network.latency_seconds + self._transfer_seconds(num_bytes, self.network.up_megabits)

    def down_seconds(self, num_bytes: float) -> float:
        return self.network.latency_seconds + self._transfer_seconds(num_bytes, self.network.down_megabits)

    def _transfer_seconds(self, num_bytes: float, megabits: float) -> float:
        # The spread is of the line, drawn once; the jitter of the hour, drawn for each transfer.
        factor = self._link_factor * _lognormal(self._link, self.network.link_jitter)
        return transfer_seconds(num_bytes, megabits) * factor

    # --- drop-outs

    def done_at(self, start: float, seconds: float) -> float:
        """When work of some seconds is done that is begun at `start` and rests while the machine is away."""
        at, left = start, seconds
        while True:
            gone, back = self._next_outage(at)
            if at + left <= gone:
                return at + left
            # Work goes on where it stopped, as on a laptop that was closed.
            left -= max(0.0, gone - at)
            at = back

    def worked_seconds(self, start: float, end: float) -> float:
        """How much of a span the machine was there for."""
        self._look_ahead(end)
        away = sum(max(0.0, min(end, back) - max(start, gone)) for gone, back in self._outages)
        return end - start - away

    def away_seconds(self, now: float) -> float:
        """For how long it has been away; 0 while it is there."""
        gone, back = self._next_outage(now)
        return now - gone if gone <= now < back else 0.0

    def _next_outage(self, at: float) -> tuple[float, float]:
        """The first drop-out that is not over at `at`."""
        self._look_ahead(at)
        return next(((gone, back) for gone, back in self._outages if back > at), (math.inf, math.inf))

    def _look_ahead(self, time: float) -> None:
        """Draw drop-outs until one begins after `time`."""
        network = self.network
        if network.up_for_seconds is None:
            return
        # Drawn from a generator of their own: what a worker does must not change when its machine fails.
        while self._known_until <= time or not self._outages or self._outages[-1][0] <= time:
            gone = self._known_until + self._outage.expovariate(1 / network.up_for_seconds)
            back = gone + self._outage.expovariate(1 / network.away_seconds)
            self._outages.append((gone, back))
            self._known_until = back


def _generator(purpose: str, seed: int, index: int) -> random.Random:
    return random.Random(derive_seed(f"simulated {purpose}", seed, index))


def _lognormal(generator: random.Random, sigma: float) -> float:
    # Log-normal, as durations are: often a little shorter than usual, now and then much longer.
    return math.exp(sigma * generator.gauss(0.0, 1.0)) if sigma else 1.0


# Fitted so that the three deadlines let in 22, 61 and 86 % of full updates, as in the litepaper.
_WAN = {
    "compute_spread": 0.03,
    "compute_jitter": 0.05,
    "latency_seconds": 0.15,
    "up_megabits": 30.0,
    "down_megabits": 100.0,
    "link_spread": 0.05,
    "link_jitter": 0.5,
}
_EDGE = {
    "compute_spread": 0.25,
    "compute_jitter": 0.1,
    "latency_seconds": 0.2,
    "up_megabits": 20.0,
    "down_megabits": 60.0,
    "link_spread": 0.3,
    "link_jitter": 0.5,
}

NETWORKS = {
    network.name: network
    for network in (
        Network(
            name="lockstep",
            sentence="One room: equal machines, a fast line, everybody waits for everybody.",
            deadline_seconds=600.0,
        ),
        Network(
            name="mild",
            sentence="One provider: machines differ by a few percent, and so do their good lines.",
            deadline_seconds=74.0,
            compute_spread=0.03,
            compute_jitter=0.05,
            latency_seconds=0.03,
            up_megabits=200.0,
            down_megabits=400.0,
            link_jitter=0.3,
        ),
        Network(
            name="wan-tight",
            sentence="Homes with fibre or cable, and a deadline that one update in five meets.",
            deadline_seconds=86.0,
            **_WAN,
        ),
        Network(
            name="wan-mid",
            sentence="The same homes, and a deadline that three updates in five meet.",
            deadline_seconds=100.5,
            **_WAN,
        ),
        Network(
            name="wan-loose",
            sentence="The same homes, and a deadline that six updates in seven meet.",
            deadline_seconds=116.0,
            **_WAN,
        ),
        Network(
            name="edge-mid",
            sentence="Laptops on slow and unequal lines; one in a while closes its lid for some minutes.",
            deadline_seconds=134.0,
            up_for_seconds=3600.0,
            away_seconds=300.0,
            **_EDGE,
        ),
        Network(
            name="bad-edge",
            sentence="The same laptops, gone as often as every quarter of an hour, and a hasty deadline.",
            deadline_seconds=102.0,
            up_for_seconds=900.0,
            away_seconds=240.0,
            **_EDGE,
        ),
    )
}
