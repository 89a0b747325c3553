"""Where text comes from, and that what is held out stays held out."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.config import DataConfig
from blocktrain.data.corpora import BUILTIN_BYTES, Corpus, load_corpus, read_text
from blocktrain.data.shards import Shards
from blocktrain.data.tokenizer import ByteTokenizer
from blocktrain.errors import DataError
from tests.tiny import prose


def corpus_of(path: Path, pool_bytes: int = 100, **settings: float | int | None) -> Corpus:
    return load_corpus(DataConfig(corpus=str(path), **settings), pool_bytes)  # type: ignore[arg-type]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_bytes(prose(4000))
    return path


def test_a_file_is_split_at_its_end_into_training_pooling_and_held_out(text: Path) -> None:
    corpus = corpus_of(text, valid_fraction=0.1)
    assert corpus.train + corpus.pool + corpus.valid == text.read_bytes()
    assert (len(corpus.train), len(corpus.pool), len(corpus.valid)) == (3500, 100, 400)


def test_the_pool_takes_at_most_a_tenth_of_the_training_text(text: Path) -> None:
    corpus = corpus_of(text, pool_bytes=10**6, valid_fraction=0.1)
    assert len(corpus.pool) == 360


def test_max_bytes_cuts_the_training_text_and_not_the_held_out(text: Path) -> None:
    whole, cut = corpus_of(text), corpus_of(text, max_bytes=1000)
    assert len(cut.train) + len(cut.pool) == 1000
    assert cut.valid == whole.valid
    assert cut.sha256 != whole.sha256


def test_a_folder_with_train_and_valid_brings_its_own_split(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_bytes(prose(2000, seed=1))
    (tmp_path / "valid.txt").write_bytes(prose(300, seed=2))
    (tmp_path / "notes.txt").write_text("not part of it")
    corpus = corpus_of(tmp_path)
    assert corpus.train + corpus.pool == prose(2000, seed=1)
    assert corpus.valid == prose(300, seed=2)


def test_a_folder_is_all_its_text_files_in_order(tmp_path: Path) -> None:
    (tmp_path / "b.md").write_text("the second one")
    (tmp_path / "a.txt").write_text("the first one")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "c.py").write_text("the third one")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0")
    corpus = corpus_of(tmp_path)
    assert corpus.train + corpus.pool + corpus.valid == b"the first one\n\nthe second one\n\nthe third one"


def test_a_home_folder_is_understood(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(text.parent))
    assert corpus_of(Path("~") / text.name).sha256 == corpus_of(text).sha256


@given(st.integers(400, 3000), st.floats(0.01, 0.5), st.integers(2, 2000), st.integers(0, 100))
def test_training_never_draws_a_pooled_or_held_out_byte(
    tmp_path_factory: pytest.TempPathFactory, length: int, fraction: float, pool_bytes: int, step: int
) -> None:
    """In numbered text any 17 bytes occur once, so finding them in one part excludes the others."""
    path = tmp_path_factory.mktemp("property") / "text.txt"
    path.write_bytes(b"".join(b"%04d" % (n % 10_000) for n in range(length)))
    corpus = corpus_of(path, pool_bytes, valid_fraction=fraction)
    assert corpus.train + corpus.pool + corpus.valid == path.read_bytes()
    assert corpus.valid
    tokens = ByteTokenizer().encode(corpus.train)
    shards = Shards(tokens, corpus.sha256, seed=0, batch=8, context=16, device=torch.device("cpu"))
    x, y = shards.batch(0, step)
    for window in torch.cat([x, y[:, -1:]], dim=1):
        assert ByteTokenizer().decode(window.tolist()) in corpus.train


@given(st.data())
def test_any_changed_byte_changes_the_corpus_hash(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("hash") / "text.txt"
    text = bytearray(prose(600))
    path.write_bytes(text)
    before = corpus_of(path)
    assert corpus_of(path).sha256 == before.sha256
    place = data.draw(st.integers(0, len(text) - 1))
    text[place] ^= 1
    path.write_bytes(text)
    assert corpus_of(path).sha256 != before.sha256


def test_another_split_of_the_same_text_has_another_hash(text: Path) -> None:
    hashes = {corpus_of(text, pool, valid_fraction=f).sha256 for pool in (50, 100) for f in (0.05, 0.1)}
    assert len(hashes) == 4


def test_the_corpus_hash_is_the_same_on_every_machine(text: Path) -> None:
    assert corpus_of(text).sha256 == "06b88fecd682633e99ae84c1e719681febe90b0c361607b57a851552f1f3df9d"


def test_the_builtin_corpus_is_prose_and_then_sources_the_same_each_time() -> None:
    corpus = load_corpus(DataConfig(corpus="builtin"), 1000)
    size = len(corpus.train) + len(corpus.pool) + len(corpus.valid)
    assert 3_000_000 < size <= BUILTIN_BYTES
    opening = corpus.train[:20_000].decode()
    assert "assert" in opening
    assert opening.count(" the ") > 100
    assert b"\nimport " in corpus.train
    assert b"unittest.main()" not in corpus.train[:1_000_000]
    assert load_corpus(DataConfig(corpus="builtin"), 1000).sha256 == corpus.sha256


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "is empty"),
        (b"\xff\xfe\x00bad", "not UTF-8"),
        (b"text with \0 in it", "NUL"),
        ("naïve".encode("latin-1"), "not UTF-8 text .byte 2."),
    ],
)
def test_what_is_not_text_is_refused(tmp_path: Path, content: bytes, complaint: str) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=complaint):
        read_text(path)
    with pytest.raises(DataError, match=complaint):
        corpus_of(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no text at"):
        corpus_of(tmp_path / "absent.txt")


def test_a_folder_without_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    with pytest.raises(DataError, match="no text files"):
        corpus_of(tmp_path)


def test_a_folder_of_empty_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    (tmp_path / "b.txt").touch()
    with pytest.raises(DataError, match="empty"):
        corpus_of(tmp_path)


@pytest.mark.parametrize("length", [1, 2, 10, 19])
def test_text_too_short_to_hold_anything_out_is_refused(tmp_path: Path, length: int) -> None:
    """Found before training and not after it: scoring needs two tokens, and so does fitting weights."""
    path = tmp_path / "text.txt"
    path.write_bytes(b"x" * length)
    with pytest.raises(DataError, match="too short"):
        corpus_of(path)


@pytest.mark.skipif(importlib.util.find_spec("datasets") is not None, reason="the extra is installed")
def test_a_hugging_face_corpus_names_the_extra_it_needs() -> None:
    with pytest.raises(DataError, match=r"\[datasets\]"):
        load_corpus(DataConfig(corpus="hf:wikitext"), 100)
