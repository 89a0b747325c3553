"""Hostile inputs by the ten thousand, spread over everything that reads a stranger's bytes."""

from __future__ import annotations

from itertools import islice

import pytest

from tests.adversaries.mutations import hostile_inputs
from tests.adversaries.readers import Reader, readers


@pytest.mark.parametrize("inputs", [25_000, pytest.param(100_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("reader", readers(), ids=lambda reader: reader.name)
def test_hostile_bytes_are_read_or_refused_and_never_crash(reader: Reader, inputs: int) -> None:
    assert all(map(reader.read, reader.samples)), "a sample of sound bytes was refused"
    share = 1 + inputs // len(readers())
    seed = readers().index(reader)
    answers = [reader.read(data) for data in islice(hostile_inputs(reader.samples, seed), share)]
    assert not all(answers)
