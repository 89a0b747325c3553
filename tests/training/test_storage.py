"""Files are the old ones or the new ones, never torn, whatever happens while they are written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from blocktrain.errors import CheckpointError, StorageError
from blocktrain.training.storage import read_tensors, replaced_folder, write_file, write_json, write_tensors


def test_a_file_is_written_with_the_folders_it_needs(tmp_path: Path) -> None:
    write_file(tmp_path / "a" / "b" / "c.txt", b"content")
    assert (tmp_path / "a" / "b" / "c.txt").read_bytes() == b"content"
    assert [file.name for file in (tmp_path / "a" / "b").iterdir()] == ["c.txt"]


def test_a_place_that_cannot_be_written_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(StorageError, match="cannot write .*report.json.*choose another folder"):
        write_json(tmp_path / "file" / "report.json", {})
    assert (tmp_path / "file").read_text() == "not a folder"


def test_tensors_and_their_metadata_come_back(tmp_path: Path) -> None:
    tensors = {"w": torch.arange(6.0).reshape(2, 3).T, "scale": torch.tensor(3.5)}
    write_tensors(tmp_path / "t.safetensors", tensors, {"step": "7"})
    found, metadata = read_tensors(tmp_path / "t.safetensors")
    assert metadata == {"step": "7"}
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_every_truncation_of_a_tensor_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    write_tensors(path, {"w": torch.arange(6.0)})
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match="truncated"):
            read_tensors(path)


def test_a_replaced_folder_is_the_new_one_alone(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    path.mkdir()
    (path / "old").write_text("old")
    with replaced_folder(path) as folder:
        (folder / "new").write_text("new")
        assert (path / "old").exists()
    assert [file.name for file in path.iterdir()] == ["new"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["folder"]


def test_a_failure_leaves_the_old_folder_whole(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    path.mkdir()
    (path / "old").write_text("old")

    def fail() -> None:
        with replaced_folder(path) as folder:
            (folder / "new").write_text("new")
            raise OSError(28, "No space left on device")

    with pytest.raises(StorageError, match="No space left on device"):
        fail()
    assert [file.name for file in path.iterdir()] == ["old"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["folder"]
