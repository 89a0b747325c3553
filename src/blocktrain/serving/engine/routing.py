"""Which stage is asked for which blocks: a pure decision over what is known of the links."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Candidate:
    """A stage that could be asked now."""

    link: int
    blocks: frozenset[int]
    slow: bool = False
    """It was beaten by a spare a moment ago."""
    warm: bool = False
    """It holds this session's caches."""


@dataclass(frozen=True)
class Route:
    legs: list[tuple[int, tuple[int, ...]]]
    """Links and the blocks asked of each; no block twice."""
    missing: tuple[int, ...]
    """Blocks that no candidate serves."""


def cheapest_route(blocks: Collection[int], candidates: Sequence[Candidate], spread: int = 0) -> Route:
    """Every block from one link: quick ones first, then those with warm caches, then those with most blocks.

    `spread` (a session's number) turns the order of equals, so that sessions share out equal stages.
    """

    def cost(candidate: Candidate) -> tuple[bool, bool, int, int]:
        turn = (candidate.link + spread) % max(1, len(candidates))
        return candidate.slow, not candidate.warm, -len(candidate.blocks), turn

    left = set(blocks)
    legs: list[tuple[int, tuple[int, ...]]] = []
    for candidate in sorted(candidates, key=cost):
        part = tuple(sorted(left & candidate.blocks))
        if part:
            legs.append((candidate.link, part))
            left -= candidate.blocks
    return Route(legs, tuple(sorted(left)))
