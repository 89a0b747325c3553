from __future__ import annotations

import errno
import inspect
import os
from pathlib import Path

import pytest

from blocktrain import errors
from blocktrain.errors import StorageError
from blocktrain.files import explained_errors, is_locked, locked_file
from blocktrain.ids import derive_seed


def test_the_drawn_tree_is_the_tree() -> None:
    classes = {name for name, value in vars(errors).items() if inspect.isclass(value)}
    drawn = {
        word
        for line in (errors.__doc__ or "").splitlines()
        for word in line.replace("│", " ").replace("├──", " ").replace("└──", " ").split()[:1]
        if word.endswith("Error")
    }
    assert drawn == classes


def test_misuse_exits_with_two_and_failure_with_one() -> None:
    two = {errors.UserError, errors.RecipeError, errors.DataError, errors.CheckpointError, errors.DeviceError}
    assert {error.exit_code for error in two | {errors.DamagedError}} == {2}
    one = {errors.BlocktrainError, errors.DivergedError, errors.StorageError, errors.WireError}
    assert {error.exit_code for error in one} == {1}


def test_derived_seeds_are_the_same_for_ever() -> None:
    assert derive_seed("noise", 0, 1, 2) == 1712716875110715877
    assert derive_seed("init", 7, "reference") == 8403015446578364587


def test_derived_seeds_tell_their_parts_apart() -> None:
    parts: list[tuple[str | int, ...]] = [
        ("a", "b"), ("ab",), ("a", 1), ("a", "1"), ("b", "a"), ("a",), ("a", 1, 0), ("a", 10)
    ]  # fmt: skip
    seeds = [derive_seed(*one) for one in parts]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.EROFS, "; choose another folder"),
        (errno.ENOENT, "; choose another folder"),
        (errno.ENOSPC, "; free some space"),
    ],
)
def test_space_is_asked_for_only_where_it_helps(number: int, remedy: str) -> None:
    with pytest.raises(StorageError) as caught, explained_errors(Path("run.json")):
        raise OSError(number, os.strerror(number))
    assert f"cannot write run.json: {os.strerror(number)}{remedy}" in str(caught.value)
    assert "--out" not in str(caught.value), "checkpoint, export and import have --to"


def test_a_file_that_cannot_be_opened_is_not_called_locked(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    with locked_file(lock, "taken"):
        assert is_locked(lock)
    assert not is_locked(lock)
    assert not is_locked(tmp_path)  # a folder: opening it fails, as that of another user's file does
    assert not is_locked(lock / "below")
