"""Preparing: the same bytes however it runs, whole documents in one split, and errors that say what to do."""

from __future__ import annotations

import gzip
import hashlib
import json
import lzma
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from blocktrain.data import prepare as preparing
from blocktrain.data.bpe import FileTokenizer, train_bpe
from blocktrain.data.dataset import SPLITS, Dataset, Manifest, check_shard, total
from blocktrain.data.portions import EncoderProcess, Portion
from blocktrain.data.prepare import PrepareOptions, Reserve, document_keys, prepare
from blocktrain.errors import BlocktrainError, DataError, StorageError, UserError

SUBJECTS = (
    ["river", "bridge", "stone", "water", "flood", "bank", "current", "ferry", "harbour", "tide"],
    ["engine", "piston", "valve", "exhaust", "gear", "clutch", "throttle", "ignition", "axle", "brake"],
    ["violin", "concerto", "melody", "tempo", "chord", "orchestra", "soprano", "rhythm", "sonata", "choir"],
)


def essay(number: int, words: int = 150) -> str:
    """Text about one of three subjects, the same for the same number."""
    raw = hashlib.shake_128(f"essay {number}".encode()).digest(2 * words)
    subject = SUBJECTS[number % 3]
    told = [f"{subject[a % 10]}{'' if b > 99 else b}" for a, b in zip(raw[::2], raw[1::2], strict=True)]
    return f"Essay {number}.\n" + " ".join(told) + " fin é."


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lines") / "essays.jsonl"
    path.write_text("".join(json.dumps({"text": essay(i)}) + "\n" for i in range(400)))
    return path


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_bytes(train_bpe((essay(i) for i in range(100)), 500))
    return path


@pytest.fixture(autouse=True)
def _small_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few hundred documents are many portions and checkpoints."""
    monkeypatch.setattr(preparing, "PORTION_BYTES", 8_000)
    monkeypatch.setattr(preparing, "CHECKPOINT_BYTES", 40_000)


def make(out: Path, *sources: Path | str, processes: int = 1, **options: object) -> Manifest:
    if "tokenizer" in options:
        options["tokenizer"] = str(options["tokenizer"])
    named = {"shard_tokens": 20_000, "held_out": 0.05, "pooling": 0.03, **options}
    chosen = PrepareOptions(sources=tuple(map(str, sources)), **named)  # type: ignore[arg-type]
    return prepare(chosen, out, processes=processes, watch=lambda *_: None)


def texts_of(folder: Path) -> dict[str, list[str]]:
    """The documents of each split, read back from its shards."""
    dataset = Dataset.open(folder)
    decoder, separator = dataset.tokenizer(), list(dataset.manifest.separator)
    found: dict[str, list[str]] = {}
    for split in SPLITS:
        found[split] = []
        for entry in dataset.manifest.split(split):
            check_shard(folder / entry.name, entry, dataset.manifest)
            document: list[int] = []
            for token in dataset.tokens(entry).tolist():
                document.append(token)
                if document[-len(separator) :] == separator:
                    found[split].append(decoder.decode(document[: -len(separator)]).decode())
                    document = []
            assert not document
            assert entry.bytes == sum(len(text.encode()) for text in found[split][-entry.documents :])
    return found


@pytest.mark.parametrize("kind", ["byte", "bpe"])
def test_every_document_is_whole_and_in_one_split(
    tmp_path: Path, lines: Path, tokenizer: Path, kind: str
) -> None:
    manifest = make(tmp_path / "set", lines, tokenizer="byte" if kind == "byte" else tokenizer)
    found = texts_of(tmp_path / "set")
    assert sorted(text for texts in found.values() for text in texts) == sorted(map(essay, range(400)))
    assert all(found.values())
    assert len(manifest.training) > 1
    assert sum(len(texts) for texts in found.values()) == 400 - manifest.left_out
    assert not (tmp_path / "set" / ".prepare").exists()


def test_processes_and_packing_change_nothing(tmp_path: Path, lines: Path, tokenizer: Path) -> None:
    content = lines.read_bytes()
    first = make(tmp_path / "first", lines, tokenizer=tokenizer, clusters=3)
    second = make(tmp_path / "second", lines, tokenizer=tokenizer, clusters=3, processes=3)
    assert first.identity == second.identity
    packed = {
        ".gz": gzip.compress(content),
        ".xz": lzma.compress(content),
        ".zst": zstandard.compress(content),
    }
    for suffix, data in packed.items():
        path = tmp_path / f"essays.jsonl{suffix}"
        path.write_bytes(data)
        assert make(tmp_path / suffix[1:], path, tokenizer=tokenizer, clusters=3) == first


def test_parquet_and_folders_of_text_give_the_same_documents(tmp_path: Path) -> None:
    (tmp_path / "folder" / "deep").mkdir(parents=True)
    for i in range(60):
        (tmp_path / "folder" / ("deep" if i % 2 else ".") / f"{i}.txt").write_text(essay(i))
    (tmp_path / "folder" / "picture.png").write_bytes(b"\x89PNG")
    table = pyarrow.table({"body": [essay(i) for i in range(60)], "other": list(range(60))})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    make(tmp_path / "a", tmp_path / "folder")
    make(tmp_path / "b", tmp_path / "rows.parquet", field="body")
    a, b = texts_of(tmp_path / "a"), texts_of(tmp_path / "b")
    assert {split: sorted(texts) for split, texts in a.items()} == {
        s: sorted(texts) for s, texts in b.items()
    }


def test_hugging_face_rows_are_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's own part is played by a module with the one function that is called."""
    (tmp_path / "datasets.py").write_text(
        "def load_dataset(name, configuration, *, split, streaming):\n"
        "    assert (name, configuration, split, streaming) == ('owner/name', 'small', 'train', True)\n"
        "    return ({'text': f'document number {i} of the set ' * 9} for i in range(50))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "datasets", raising=False)
    manifest = make(tmp_path / "set", "hf:owner/name:small")
    del sys.modules["datasets"]  # by monkeypatch it would come back at the end, and other tests would meet it
    assert sum(total(manifest.split(split))[1] for split in SPLITS) + manifest.left_out == 50


def test_splits_are_chosen_by_the_text_not_by_its_place(tmp_path: Path, lines: Path) -> None:
    turned = tmp_path / "turned.jsonl"
    turned.write_bytes(b"".join(reversed(lines.read_bytes().splitlines(keepends=True))))
    make(tmp_path / "a", lines)
    make(tmp_path / "b", turned)
    a, b = texts_of(tmp_path / "a"), texts_of(tmp_path / "b")
    for split in SPLITS:
        assert sorted(a[split]) == sorted(b[split])


def test_near_copies_of_held_out_documents_are_in_no_split(tmp_path: Path, lines: Path) -> None:
    make(tmp_path / "plain", lines)
    held = texts_of(tmp_path / "plain")["held_out"]
    copies = [text.replace("fin", "end of it").upper() for text in held]
    quoting = "A long foreword of our own that nobody else has written so far. " * 5 + held[0]
    more = tmp_path / "more.jsonl"
    more.write_text("".join(json.dumps({"text": text}) + "\n" for text in [*copies, quoting]))
    manifest = make(tmp_path / "set", lines, more)
    found = texts_of(tmp_path / "set")
    seen = {*found["training"], *found["pooling"]}
    assert set(held) <= set(found["held_out"])
    assert not seen & {*copies, quoting}
    assert manifest.left_out >= len({*copies, quoting} - set(found["held_out"]))


def test_a_source_can_be_held_out_as_a_whole(tmp_path: Path, lines: Path) -> None:
    apart = tmp_path / "apart.jsonl"
    apart.write_text("".join(json.dumps({"text": essay(i)}) + "\n" for i in range(395, 410)))
    make(tmp_path / "set", lines, held_out_from=(str(apart),))
    found = texts_of(tmp_path / "set")
    assert sorted(found["held_out"]) == sorted(essay(i) for i in range(395, 410))
    assert not {*found["training"], *found["pooling"]} & set(found["held_out"])


def test_clusters_follow_the_subjects(tmp_path: Path, lines: Path) -> None:
    manifest = make(tmp_path / "set", lines, clusters=3)
    dataset = Dataset.open(tmp_path / "set")
    for entry in manifest.training:
        text = bytes(dataset.tokens(entry).astype(np.uint8)).decode()
        counts = [sum(text.count(word) for word in subject) for subject in SUBJECTS]
        assert max(counts) > 0.95 * sum(counts)
    assert {entry.cluster for entry in manifest.training} == {0, 1, 2}


def test_a_sorted_source_is_mixed_over_the_shards(tmp_path: Path) -> None:
    path = tmp_path / "sorted.jsonl"
    ordered = sorted(range(450), key=lambda i: i % 3)
    path.write_text("".join(json.dumps({"text": essay(i)}) + "\n" for i in ordered))
    make(tmp_path / "set", path, shard_tokens=20_000)
    dataset = Dataset.open(tmp_path / "set")
    mixed = 0
    for entry in dataset.manifest.training:
        text = bytes(dataset.tokens(entry).astype(np.uint8)).decode()
        mixed += sum(any(word in text for word in subject) for subject in SUBJECTS) > 1
    assert mixed > len(dataset.manifest.training) / 3


KILLED = """
import os, signal, sys
from pathlib import Path
from typing import Any
from blocktrain.data import prepare as preparing
preparing.PORTION_BYTES, preparing.CHECKPOINT_BYTES = 8_000, 40_000
source, out, tokenizer, processes, after = sys.argv[1:]
options = preparing.PrepareOptions(
    sources=(source,), tokenizer=tokenizer, shard_tokens=20_000, held_out=0.05, pooling=0.03, clusters=2)
def watch(step, done, total):
    if step == "tokenizing" and done > int(after):
        os.kill(os.getpid(), signal.SIGKILL)
preparing.prepare(options, Path(out), processes=int(processes), watch=watch)
"""


@pytest.mark.parametrize("processes", [1, 2])
def test_after_kill_nine_the_same_command_gives_the_same_dataset(
    tmp_path: Path, lines: Path, tokenizer: Path, processes: int
) -> None:
    whole = make(tmp_path / "whole", lines, tokenizer=tokenizer, clusters=2)
    out = tmp_path / "set"
    environment = {**os.environ, "PYTHONPATH": str(Path(preparing.__file__).parents[2])}
    for after in (20_000, 90_000, 170_000):
        arguments = [str(lines), str(out), str(tokenizer), str(processes), str(after)]
        ended = subprocess.run([sys.executable, "-c", KILLED, *arguments], env=environment, timeout=100)
        assert ended.returncode == -signal.SIGKILL
        assert not (out / "dataset.json").exists()
        with pytest.raises(DataError, match="no whole dataset"):
            Dataset.open(out)
    # A torn last line and a torn shard, as a machine that lost power leaves them.
    with (out / ".prepare" / "journal.jsonl").open("ab") as journal:
        journal.write(b'{"finished": [')
    for shard in out.glob("*.bin"):
        with shard.open("ab") as file:
            file.write(b"rubbish")
    (out / "train-09999.bin").write_bytes(b"stray")
    again = make(out, lines, tokenizer=tokenizer, clusters=2, processes=processes)
    assert again == whole
    assert {one.name for one in out.iterdir()} == {one.name for one in (tmp_path / "whole").iterdir()}
    texts_of(out)


def test_a_begun_folder_is_not_continued_with_other_options(tmp_path: Path, lines: Path) -> None:
    source = tmp_path / "source.jsonl"
    shutil.copy(lines, source)

    class Stop(Exception):
        pass

    def stop(step: str, done: int, total: int) -> None:
        if step == "tokenizing":
            raise Stop

    options = PrepareOptions(sources=(str(source),), shard_tokens=20_000)
    with pytest.raises(Stop):
        prepare(options, tmp_path / "set", processes=1, watch=stop)
    with pytest.raises(DataError, match="other held_out.*begin again"):
        make(tmp_path / "set", source, pooling=0.005)
    source.write_bytes(source.read_bytes() + b'{"text": "one more"}\n')
    with pytest.raises(DataError, match="other sources"):
        prepare(options, tmp_path / "set", processes=1, watch=stop)


def test_finished_and_foreign_folders_are_left_alone(tmp_path: Path, lines: Path) -> None:
    make(tmp_path / "set", lines)
    with pytest.raises(DataError, match="finished dataset"):
        make(tmp_path / "set", lines)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("x")
    with pytest.raises(DataError, match="not empty"):
        make(tmp_path / "mine", lines)


def test_two_preparations_of_one_folder_exclude_each_other(tmp_path: Path, lines: Path) -> None:
    def second(step: str, done: int, total: int) -> None:
        with pytest.raises(UserError, match="another preparation"):
            make(tmp_path / "set", lines)

    options = PrepareOptions(sources=(str(lines),))
    prepare(options, tmp_path / "set", processes=1, watch=second)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_is_said_and_nothing_is_taken_for_whole(
    tmp_path: Path, lines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = make(tmp_path / "whole", lines)
    real = Path.open

    def open_full(path: Path, *arguments: Any, **named: Any) -> Any:
        target = Path("/dev/full") if path.name == "train-00002.bin" else path
        return real(target, *arguments, **named)

    monkeypatch.setattr(Path, "open", open_full)
    with pytest.raises(StorageError, match="No space left.*same command"):
        make(tmp_path / "set", lines)
    monkeypatch.setattr(Path, "open", real)
    assert not (tmp_path / "set" / "dataset.json").exists()
    assert make(tmp_path / "set", lines) == whole


BAD = {
    "an empty file": ("a.txt", b"", "is empty"),
    "a binary file": ("a.txt", b"\x89PNG\r\n\x1a\n\0\0" * 9, "not UTF-8"),
    "text with a NUL": ("a.txt", b"abc\0def" * 100, "NUL"),
    "latin-1 far inside": ("a.txt", b"word " * 60_000 + b"\xe9 " + b"word " * 9, r"byte 300000"),
    "a broken line": ("a.jsonl", b'{"text": "a"}\n{"text": ', "line 2 is not JSON"),
    "a deep line": ("a.jsonl", b"[" * 100_000, "line 1 is not JSON"),
    "no such field": ("a.jsonl", b'{"body": "a"}\n', r"no text in field 'text' \(it has body\).*--field"),
    "a number for text": ("a.jsonl", b'{"text": 3}\n', "--field"),
    "a cut gz": ("a.txt.gz", gzip.compress(b"word " * 50_000)[:-20], "truncated or damaged"),
    "a cut xz": ("a.txt.xz", lzma.compress(essay(1).encode() * 50)[:-20], "truncated or damaged"),
    "no gz at all": ("a.jsonl.gz", b"plain text", "truncated or damaged"),
    "no zst at all": ("a.jsonl.zst", b"plain text", "truncated or damaged"),
    "no parquet at all": ("a.parquet", b"PAR1 nothing PAR1", "cannot be read as parquet"),
    "one document": ("a.txt", b"a short note", "at least 3"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_source_is_refused_with_the_remedy(tmp_path: Path, case: str) -> None:
    name, content, complaint = BAD[case]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=complaint):
        make(tmp_path / "set", tmp_path / name)
    assert not (tmp_path / "set" / "dataset.json").exists()


def test_missing_and_empty_sources_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no file or folder"):
        make(tmp_path / "set", tmp_path / "nothing.txt")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no files to read"):
        make(tmp_path / "set", tmp_path / "empty")
    (tmp_path / "a.txt").write_text(essay(1))
    with pytest.raises(DataError, match="cannot read the tokenizer"):
        make(tmp_path / "set", tmp_path / "a.txt", tokenizer=tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(DataError, match="is no tokenizer.json"):
        make(tmp_path / "other", tmp_path / "a.txt", tokenizer=tmp_path / "bad.json")


def test_a_long_text_becomes_many_documents_cut_at_blank_lines(tmp_path: Path, tokenizer: Path) -> None:
    paragraphs = [essay(i, 60) for i in range(700)]
    (tmp_path / "book.txt").write_text("\n\n".join(paragraphs))
    make(tmp_path / "set", tmp_path / "book.txt", tokenizer=tokenizer)
    found = [text for texts in texts_of(tmp_path / "set").values() for text in texts]
    assert all(text.startswith("Essay") and len(text) <= 16 << 10 for text in found)
    assert sum(map(len, found)) == len("\n\n".join(paragraphs))
    make(tmp_path / "marked", tmp_path / "book.txt", tokenizer=tokenizer, document_start="Essay")
    assert sum(map(len, texts_of(tmp_path / "marked").values())) == 700


def test_a_packed_source_that_grows_is_read_in_pieces(tmp_path: Path) -> None:
    """40 MB of one line in 40 kB: refused or cut, never held whole."""
    (tmp_path / "bomb.jsonl.gz").write_bytes(gzip.compress(b" " * (40 << 20)))
    with pytest.raises(DataError, match="longer than"):
        make(tmp_path / "set", tmp_path / "bomb.jsonl.gz")


def test_reserved_text_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "MAX_RESERVED_BYTES", 5_000)
    reserve = Reserve(0.5)
    documents = [essay(i).encode() for i in range(100)]
    for document in documents:
        reserve.add(document_keys(document)[0], document)
    keys = sorted(document_keys(document)[0] for document in documents)
    kept = list(reserve.sketches())
    assert reserve.bytes <= 5_000
    assert kept == keys[: len(kept)]
    assert reserve.below == keys[len(kept)]


def test_special_tokens_in_a_document_are_plain_text(tokenizer: Path) -> None:
    made = FileTokenizer.open(tokenizer)
    text = b"before <|endoftext|> after"
    assert made.separator[0] not in made.encode(text).tolist()
    assert made.decode(made.encode(text)) == text


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_ten_gigabytes_are_prepared_in_the_memory_of_little_text() -> None:
    """Made up while it is read, so the disk holds no source; the shards take about 8 GB while it runs."""
    if shutil.disk_usage(tempfile.gettempdir()).free < 12e9:
        pytest.skip("less than 12 GB of disk")
    script = Path(__file__).parents[2] / "benchmarks" / "data.py"
    done = subprocess.run([sys.executable, script, "--synthetic", "10"], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode() + done.stdout.decode()
    found = json.loads(done.stdout)
    assert found["peak_mb"] <= 500
    assert sum(found["dataset"][split]["bytes"] for split in ("training", "pooling", "held_out")) > 9.5e9


def test_a_killed_tokenizing_process_is_named_and_can_be_closed(tmp_path: Path) -> None:
    process = EncoderProcess(tmp_path, tmp_path)
    process.process.kill()
    process.process.wait()
    with pytest.raises(BlocktrainError, match="a tokenizing process ended .exit code -9.*fewer --processes"):
        process.encode(Portion([b"x" * 1000], [0]))
    process.close()
