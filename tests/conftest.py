from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from tests.tiny import prose

torch.set_num_threads(1)
settings.register_profile("default", deadline=None, max_examples=50)
settings.load_profile("default")


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer's own BLOCKTRAIN_* variables change no test."""
    for variable in [name for name in os.environ if name.startswith("BLOCKTRAIN_")]:
        monkeypatch.delenv(variable)


@pytest.fixture
def unchanged_random_state() -> Iterator[None]:
    before = torch.get_rng_state()
    yield
    assert torch.equal(before, torch.get_rng_state())


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus that brings its own split."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "train.txt").write_bytes(prose(20_000, seed=1))
    (folder / "valid.txt").write_bytes(prose(1_500, seed=2))
    return folder
