"""Manifests, shards and batches on disk: strict reading, the same windows everywhere, nothing held whole."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.data.batches import TURN_TOKENS, DatasetBatches, Drawing, open_batches
from blocktrain.data.bpe import WORD_PATTERN, FileTokenizer, train_bpe
from blocktrain.data.corpora import open_text
from blocktrain.data.dataset import (
    Dataset,
    Manifest,
    ShardEntry,
    check_shard,
    own_cluster,
    read_manifest,
    shard_files,
)
from blocktrain.errors import DataError
from tests.kinds import two_kinds
from tests.tiny import tiny_recipe

CPU = torch.device("cpu")


def write_dataset(folder: Path, vocabulary: int = 2000) -> Dataset:
    """Training shard n holds 100 n, 100 n + 1, … so that a window says where it is from."""
    dtype = "<u2" if vocabulary <= 1 << 16 else "<u4"

    def entry(name: str, first: int, cluster: int = 0) -> ShardEntry:
        content = np.arange(first, first + 400).astype(dtype).tobytes()
        (folder / name).write_bytes(content)
        sha256 = hashlib.sha256(content).hexdigest()
        return ShardEntry(name=name, sha256=sha256, tokens=400, documents=1, bytes=1200, cluster=cluster)

    manifest = Manifest(
        tokenizer="ab" * 32, vocabulary=vocabulary, separator=(0,), clusters=2, left_out=0,
        training=tuple(entry(f"train-{n:05d}.bin", 100 * n, n % 2) for n in range(5)),
        pooling=(entry("pool-00000.bin", 1501),),
        held_out=(entry("held-00000.bin", 1502),),
    )  # fmt: skip
    (folder / "dataset.json").write_bytes(manifest.to_bytes())
    return Dataset.open(folder)


def batches(dataset: Dataset, **options: Any) -> DatasetBatches:
    return DatasetBatches(dataset, Drawing(**{"seed": 0, "batch": 4, "context": 8, **options}), CPU)


# --- manifest ---------------------------------------------------------------------------------------------


def test_a_manifest_reads_back_and_its_bytes_are_its_identity(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path)
    content = (tmp_path / "dataset.json").read_bytes()
    assert read_manifest(content) == dataset.manifest
    assert dataset.manifest.identity == hashlib.sha256(content).hexdigest()
    assert dataset.manifest.bytes_per_token("held_out") == 3


def test_the_form_of_a_manifest_is_fixed(tmp_path: Path) -> None:
    """Written down on the day the format was fixed; a change here changes every dataset's identity."""
    fixed = "19a597af7e0a18841ccc0987aad47e6cf3c60f2d5b1468ce96916cc3936bcc83"
    assert write_dataset(tmp_path).manifest.identity == fixed


def first(change: dict[str, Any]) -> Callable[[dict[str, Any]], None]:
    return lambda value: value["training"][0].update(change)


def overlap(value: dict[str, Any]) -> None:
    value["held_out"][0]["sha256"] = value["training"][0]["sha256"]


BAD_MANIFESTS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a path upwards": (first({"name": "../train-00000.bin"}), "shard name"),
    "an absolute path": (first({"name": "/etc/passwd"}), "shard name"),
    "a name with a line feed": (first({"name": "train-00000.bin\n"}), "shard name"),
    "a held-out name among training": (first({"name": "held-00007.bin"}), "shard name"),
    "a huge shard": (first({"tokens": 1 << 40}), "tokens of train-00000.bin"),
    "a negative length": (first({"tokens": -1}), "tokens of"),
    "a truth for a number": (first({"tokens": True}), "tokens of"),
    "a fraction": (first({"tokens": 400.0}), "tokens of"),
    "no documents": (first({"documents": 0}), "documents of"),
    "a cluster too many": (first({"cluster": 2}), "cluster of"),
    "no hash": (first({"sha256": "xyz"}), "no SHA-256"),
    "a shard with more keys": (first({"url": "http://x"}), "other keys"),
    "one shard in two splits": (overlap, "twice"),
    "one name twice": (lambda v: v["training"].append(v["training"][0]), "twice"),
    "no held-out shards": (lambda v: v["held_out"].clear(), "held_out"),
    "a separator beyond the vocabulary": (lambda v: v["separator"].append(2000), "separator"),
    "a vocabulary for all the memory": (lambda v: v.update(vocabulary=1 << 60), "vocabulary"),
    "another dtype": (lambda v: v.update(dtype="uint32"), "as `data prepare` writes it"),
    "another version": (lambda v: v.update(version=2), "version 2"),
    "another format": (lambda v: v.update(format="parquet"), "not a blocktrain-dataset"),
    "a missing key": (lambda v: v.pop("left_out"), "other keys"),
    "a tokenizer by path": (lambda v: v.update(tokenizer="../t.json"), "tokenizer"),
    "bytes with a large vocabulary": (lambda v: v.update(tokenizer="byte"), "expected 256"),
}


@pytest.mark.parametrize("case", BAD_MANIFESTS)
def test_a_bad_manifest_is_refused(tmp_path: Path, case: str) -> None:
    change, complaint = BAD_MANIFESTS[case]
    value = json.loads(write_dataset(tmp_path).manifest.to_bytes())
    change(value)
    with pytest.raises(DataError, match=complaint):
        read_manifest(json.dumps(value).encode())


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"[" * 100_000, b'{"a": 1e999}', b"\xff", b"9" * 5000])
def test_what_is_no_manifest_is_refused(content: bytes) -> None:
    with pytest.raises(DataError, match="fetch it again"):
        read_manifest(content)


# --- shards -----------------------------------------------------------------------------------------------


def test_a_damaged_shard_is_refused(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path)
    entry, path = dataset.manifest.training[1], tmp_path / "train-00001.bin"
    check_shard(path, entry, dataset.manifest)
    content = path.read_bytes()
    path.write_bytes(content[:-2])
    with pytest.raises(DataError, match="expected 800 bytes, found 798"):
        dataset.tokens(entry)
    path.write_bytes(content[:9] + bytes([content[9] ^ 1]) + content[10:])
    with pytest.raises(DataError, match="damaged: expected sha256.*fetch it again"):
        check_shard(path, entry, dataset.manifest)
    path.unlink()
    with pytest.raises(DataError, match="cannot read"):
        check_shard(path, entry, dataset.manifest)


def test_tokens_beyond_the_vocabulary_are_refused_though_the_hash_is_right(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path)
    smaller = replace(dataset.manifest, vocabulary=450)
    check_shard(tmp_path / "train-00000.bin", smaller.training[0], smaller)
    with pytest.raises(DataError, match="token 499, the vocabulary has 450"):
        check_shard(tmp_path / "train-00001.bin", smaller.training[1], smaller)


def test_a_changed_tokenizer_is_refused(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(train_bpe(["some words"], 260))
    with pytest.raises(DataError, match="tokenizer.json changed"):
        dataset.tokenizer()


def test_a_large_vocabulary_has_four_bytes_a_token(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path, vocabulary=70_000)
    assert dataset.manifest.dtype == np.dtype("<u4")
    assert dataset.tokens(dataset.manifest.training[1])[:3].tolist() == [100, 101, 102]
    assert dataset.first_tokens("held_out", 15).tolist() == [1502, 1503, 1504, 1505, 1506]
    assert len(dataset.first_tokens("held_out", 10**9)) == 400


def test_the_beginning_of_a_split_has_text_of_every_cluster(tmp_path: Path) -> None:
    # Of five training shards of 400 tokens, three are of cluster 0 and two of cluster 1.
    found = write_dataset(tmp_path).first_tokens("training", 30)
    assert found.tolist() == [0, 1, 2, 3, 4, 5, 100, 101, 102, 103]
    whole = write_dataset(tmp_path).first_tokens("training")
    assert whole[::400].tolist() == [0, 100, 200, 300, 400]


# --- batches ----------------------------------------------------------------------------------------------


def test_a_batch_depends_on_dataset_seed_shard_and_step_alone(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path)
    walked = batches(dataset)
    for step in range(5):
        walked.batch(3, step)
    direct = batches(dataset)
    for one, other in zip(walked.batch(3, 5), direct.batch(3, 5), strict=True):
        assert torch.equal(one, other)
    for options, shard, step in (({"seed": 1}, 3, 5), ({}, 4, 5), ({}, 3, 6)):
        assert not torch.equal(batches(dataset, **options).batch(shard, step)[0], direct.batch(3, 5)[0])


def test_batches_are_the_same_on_every_machine(tmp_path: Path) -> None:
    """Written down on the day the format was fixed; a change here changes every run."""
    dataset = write_dataset(tmp_path)
    x, _ = batches(dataset).batch(shard=7, step=11)
    assert shard_files(dataset.manifest, 0, 7, context=8) == (0, 1)
    assert x[:, 0].tolist() == [267, 191, 422, 160]


def test_windows_lie_inside_the_files_of_their_shard(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path)
    drawn = batches(dataset, batch=32)
    for shard in range(8):
        files = shard_files(dataset.manifest, 0, shard, context=8)
        assert len(files) == 2
        for step in range(4):
            x, y = drawn.batch(shard, step)
            assert torch.equal(y, x + 1)
            inside = [(x[:, 0] >= 100 * n) & (y[:, -1] < 100 * n + 400) for n in files]
            assert bool(torch.stack(inside).any(0).all())


def anonymous_megabytes() -> float:
    """Memory that only this process can free; pages of mapped files are not among it."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon")) / 1000


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc here")
def test_a_hundred_gigabytes_of_text_give_batches_in_little_memory(tmp_path: Path) -> None:
    """Files with holes: 50 shards of 2 GB that take no place on the disk."""
    small, tokens = write_dataset(tmp_path).manifest, 1 << 30
    entries = tuple(
        ShardEntry(
            name=f"train-{n:05d}.bin", sha256=f"{n:064x}", tokens=tokens, documents=1, bytes=4, cluster=0
        )
        for n in range(50)
    )
    for entry in entries:
        with (tmp_path / entry.name).open("wb") as file:
            file.truncate(2 * tokens)
            file.seek(2 * (tokens - 1))
            file.write(b"\x07\x00")
    dataset = Dataset(tmp_path, replace(small, training=entries))
    assert 2 * dataset.manifest.tokens("training") > 100e9
    drawn = batches(dataset, batch=32, context=1024)
    drawn.batch(0, 0)
    before = anonymous_megabytes()
    for shard in range(40):
        for step in range(3):
            x, _ = drawn.batch(shard, step)
            assert x.shape == (32, 1024)
    grown = anonymous_megabytes() - before
    drawn.close()
    last = dataset.tokens(entries[-1])
    assert last[-1] == 7
    assert grown < 64, "a batch has 0.26 MB as int64"


def test_files_can_be_of_one_cluster_and_all_are_used(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path)
    manifest = dataset.manifest
    assert {n for shard in range(64) for n in shard_files(manifest, 0, shard, context=8)} == {0, 1, 2, 3, 4}
    odd = {n for shard in range(64) for n in shard_files(manifest, 0, shard, context=8, cluster=1)}
    assert odd == {1, 3}
    assert shard_files(manifest, 0, 0, context=8, spread=9) == (0, 1, 2, 3, 4)
    with pytest.raises(DataError, match="longer than a window of 401"):
        shard_files(manifest, 0, 0, context=400)
    with pytest.raises(DataError, match="fewer than one batch"):
        batches(dataset, batch=10_000).batch(0, 0)


def test_a_shard_moves_on_to_other_files_between_rounds(tmp_path: Path) -> None:
    """A long run sees the whole text, and an assignment needs the files of one turn."""
    manifest = write_dataset(tmp_path).manifest
    drawing = Drawing(seed=0, batch=TURN_TOKENS // (8 * 10), context=8, steps_per_round=4)
    assert [drawing.turn(step) for step in (0, 9, 11, 12, 23, 24)] == [0, 0, 0, 1, 2, 2]
    pairs = [drawing.files(manifest, 7, step, None)[0] for step in range(0, 400, 4)]
    assert pairs[0] == shard_files(manifest, 0, 7, context=8)
    assert {one for pair in pairs for one in pair} == {0, 1, 2, 3, 4}


def test_a_specialised_block_draws_its_share_from_its_own_cluster(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path)
    special = batches(dataset, batch=20, num_blocks=2, own_share=0.75)
    plain = batches(dataset, batch=20)
    for block in (0, 1):
        own = shard_files(dataset.manifest, 0, 3, context=8, cluster=block)
        assert all(n % 2 == block for n in own)
        first, other = (special.batch(3, 5, one)[0][:, 0] for one in (block, 1 - block))
        is_own = np.diff(np.floor(np.arange(21) * 0.75)) > 0
        assert is_own.sum() == 15
        # The rest is the same for every block, from a file of each cluster; own rows are of the own cluster.
        shared, mine = special.drawing.files(dataset.manifest, 3, 5, block)
        assert mine == own
        assert [n % 2 for n in shared] == [0, 1]
        assert torch.equal(first[~is_own], other[~is_own])
        assert not torch.equal(first[is_own], other[is_own])
        for files, starts in ((own, first[is_own]), (shared, first[~is_own])):
            assert all(any(100 * n <= at < 100 * n + 400 for n in files) for at in starts.tolist())
    # The reference of all layers draws as before, and so does every block without a share.
    assert torch.equal(special.batch(3, 5, None)[0], plain.batch(3, 5)[0])
    assert torch.equal(plain.batch(3, 5, 1)[0], plain.batch(3, 5)[0])


def test_specialised_batches_are_the_same_on_every_machine(tmp_path: Path) -> None:
    """Written down on the day the share was fixed; a change here changes every specialised run."""
    x, _ = batches(write_dataset(tmp_path), num_blocks=2, own_share=0.75).batch(7, 11, 1)
    assert x[:, 0].tolist() == [267, 391, 622, 260]


@pytest.mark.parametrize(("clusters", "blocks"), [(1, 4), (3, 4), (8, 4)])
def test_a_text_of_other_clusters_than_blocks_says_what_to_do(
    tmp_path: Path, clusters: int, blocks: int
) -> None:
    manifest = replace(write_dataset(tmp_path).manifest, clusters=clusters)
    assert own_cluster(manifest, blocks, 0.0, 1) is None
    with pytest.raises(DataError, match=f"--clusters {blocks}"):
        own_cluster(manifest, blocks, 0.75, 1)
    assert [own_cluster(replace(manifest, clusters=2), 4, 0.75, block) for block in range(4)] == [0, 1, 0, 1]


def test_a_cluster_without_pooling_text_says_what_to_do(tmp_path: Path) -> None:
    manifest = two_kinds(tmp_path).manifest
    (tmp_path / "dataset.json").write_bytes(replace(manifest, pooling=manifest.pooling[:1]).to_bytes())
    with pytest.raises(DataError, match=r"cluster 1 has none; .* larger --pooling"):
        open_text(tiny_recipe("model.blocks=2", f"data.dataset={tmp_path}", "data.own_share=0.5"))
    assert open_text(tiny_recipe(f"data.dataset={tmp_path}")).manifest.clusters == 2


def test_plain_text_has_no_clusters(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("one two three " * 400)
    recipe = tiny_recipe(f"data.corpus={tmp_path / 'text.txt'}", "data.own_share=0.5")
    with pytest.raises(DataError, match="prepared without clusters"):
        open_text(recipe)
    plain = open_text(tiny_recipe(f"data.corpus={tmp_path / 'text.txt'}"))
    with pytest.raises(DataError, match="prepared without clusters"):
        open_batches(recipe, plain, CPU)


# --- tokenizers -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bpe() -> FileTokenizer:
    text = "It's the 1,234 naïve words;  they're  «here»\n\n\tand there: x = [1, 2]\r\n don't " * 20
    return FileTokenizer(train_bpe([text], 400), "test")


anything = st.text(st.characters(exclude_categories=["Cs"]), max_size=80)
wordy = st.text(st.sampled_from(" \t\n\r\f\v'aZs09éñ中.<|>-\x1c\x85\xa0\u2028\x00"), max_size=60)


@given(st.one_of(anything, wordy))
def test_remembered_words_give_the_library_s_tokens(bpe: FileTokenizer, text: str) -> None:
    """The quick way and the library agree on every text, and nothing is lost."""
    assert bpe._splits_as_we_do
    assert "".join(re.findall(WORD_PATTERN, text)) == text
    (quick,) = bpe.encode_documents([text])
    (plain,) = bpe._plain([text])
    assert np.frombuffer(quick, bpe.dtype).tolist() == plain
    assert bpe.decode(plain) == text.encode()


def test_a_tokenizer_of_another_kind_goes_through_the_library(bpe: FileTokenizer) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    other = Tokenizer(models.BPE())
    other.pre_tokenizer, other.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    other.train_from_iterator(["some words and some more"], trainer)
    made = FileTokenizer(other.to_str().encode(), "other")
    assert not made._splits_as_we_do
    assert made.decode(made.encode(b"some more words, na\xc3\xafve")) == b"some more words, na\xc3\xafve"
    assert made.separator == tuple(made.encode(b"\n\n").tolist())


def test_training_twice_gives_the_same_file() -> None:
    text = ["the same words in the same order " * 9, "and others"]
    assert train_bpe(text, 300) == train_bpe(text, 300)
