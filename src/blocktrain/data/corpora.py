"""Where text comes from, and its split into training, pooling and held-out parts.

A corpus is named by a string: `builtin`, a file, a folder, or `hf:NAME[:CONFIG]`. Its hash covers every
byte and the split, so two machines agree on a hash only if they train and score on the same text.
Training draws from `train` alone; `pool` fits composition weights; `valid` is scored and never fitted.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from blocktrain.config import DataConfig, Recipe
from blocktrain.data.dataset import (
    BYTE_SEPARATOR,
    MANIFEST,
    PREFIXES,
    SPLITS,
    Dataset,
    Manifest,
    RunText,
    ShardEntry,
    SplitName,
    TokenArray,
    own_cluster,
)
from blocktrain.data.tokenizer import ByteTokenizer, Tokenizer, Tokens
from blocktrain.errors import DataError
from blocktrain.files import write_whole
from blocktrain.ids import CorpusHash

BUILTIN_BYTES = 12_000_000
TEXT_SUFFIXES = (".txt", ".md", ".rst", ".text", ".py", ".tex", ".csv", ".json", ".jsonl", ".html")
NOT_PROSE = ("test", "tests", "idle_test", "site-packages", "__pycache__", "lib2to3", "encodings")


class Corpus(RunText):
    """Plain text in memory, a token a byte."""

    def __init__(self, train: bytes, pool: bytes, valid: bytes, sha256: CorpusHash) -> None:
        self.train, self.pool, self.valid, self.sha256 = train, pool, valid, sha256
        self._parts: dict[SplitName, bytes] = {"training": train, "pooling": pool, "held_out": valid}
        # One shard for each part: workers that fetch the training shard draw the windows that we would.
        entries = {
            split: (
                ShardEntry(
                    name=f"{PREFIXES[split]}-00000.bin",
                    sha256=hashlib.sha256(part).hexdigest(),
                    tokens=len(part),
                    documents=1,
                    bytes=len(part),
                    cluster=0,
                ),
            )
            for split, part in self._parts.items()
        }
        self.manifest = Manifest(
            tokenizer="byte",
            vocabulary=ByteTokenizer.vocabulary,
            separator=BYTE_SEPARATOR,
            clusters=1,
            left_out=0,
            training=entries["training"],
            pooling=entries["pooling"],
            held_out=entries["held_out"],
        )

    def tokens(self, entry: ShardEntry) -> TokenArray:
        split = next(split for split in SPLITS if entry in self.manifest.split(split))
        return np.frombuffer(self._parts[split], np.uint8)

    def tokenizer(self) -> Tokenizer:
        return ByteTokenizer()

    def train_tokens(self) -> Tokens:
        return ByteTokenizer().encode(self.train)

    def write(self, folder: Path) -> Dataset:
        """As a dataset's folder, which a coordinator can serve; what is there already stays."""
        path = folder / MANIFEST
        if not path.exists() or path.read_bytes() != self.manifest.to_bytes():
            for split, part in self._parts.items():
                write_whole(folder / self.manifest.split(split)[0].name, part)
            write_whole(path, self.manifest.to_bytes())
        return Dataset(folder, self.manifest)


def open_text(recipe: Recipe) -> RunText:
    """The text that a recipe names, from this machine's disk."""
    text: RunText
    if recipe.data.dataset is not None:
        text = Dataset.open(Path(recipe.data.dataset).expanduser())
    else:
        text = load_corpus(recipe.data, recipe.evaluation.pooling_bytes)
    # Said where the text is opened first, and not by the first worker.
    own_cluster(text.manifest, recipe.model.blocks, recipe.data.own_share, None)
    missing = set(range(text.manifest.clusters)) - {entry.cluster for entry in text.manifest.pooling}
    if recipe.data.own_share and missing:
        # Of 600 documents three were pooling text, all of one kind: its block got a prior of 0.64 of 1.
        raise DataError(
            f"the weights of specialised blocks are fitted on pooling text of every cluster, and cluster "
            f"{min(missing)} has none; prepare the text with a larger --pooling"
        )
    return text


def load_corpus(config: DataConfig, pool_bytes: int) -> Corpus:
    train, valid = _read(config)
    if valid is None:
        held_out = max(1, round(len(train) * config.valid_fraction))
        train, valid = train[:-held_out], train[-held_out:]
    if config.max_bytes is not None:
        train = train[: config.max_bytes]
    # The pool comes from training text, not from held-out text: weights fitted there would flatter scores.
    pool_bytes = min(pool_bytes, len(train) // 10)
    train, pool = train[: len(train) - pool_bytes], train[len(train) - pool_bytes :]
    if min(len(pool), len(valid)) < 2:
        raise DataError(
            f"the text of {config.corpus} is too short: {len(train)} bytes to train on, {len(pool)} to fit "
            f"pooling weights on, {len(valid)} to score; the last two need at least 2 each; use more text"
        )
    # With each part's length: the same bytes split elsewhere are another corpus.
    digest = hashlib.sha256()
    for part in (train, pool, valid):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return Corpus(train, pool, valid, CorpusHash(digest.hexdigest()))


def _read(config: DataConfig) -> tuple[bytes, bytes | None]:
    if config.corpus == "builtin":
        return builtin_text(), None
    if config.corpus.startswith("hf:"):
        return _hugging_face(config.corpus.removeprefix("hf:"))
    path = Path(config.corpus).expanduser()
    if path.is_dir():
        return _folder(path)
    return read_text(path), None


def read_text(
    path: Path, hint: str = "a run's text is named by --set data.corpus=FILE, FOLDER, hf:NAME or builtin"
) -> bytes:
    try:
        if path.exists() and not path.is_file():
            raise DataError(f"{path} is not a file; expected UTF-8 text")
        text = path.read_bytes()
    except FileNotFoundError:
        raise DataError(f"no text at {path}; {hint}") from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    if not text:
        raise DataError(f"{path} is empty; expected UTF-8 text")
    try:
        text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text (byte {error.start}); convert it first") from None
    if b"\0" in text:
        raise DataError(f"{path} holds NUL bytes, so it is not text; expected UTF-8 text")
    return text


def _folder(path: Path) -> tuple[bytes, bytes | None]:
    """A folder with train.txt and valid.txt brings its own split; otherwise all its text, in order."""
    if (path / MANIFEST).exists():
        raise DataError(f"{path} is a prepared dataset; name it with --set data.dataset={path}")
    train, valid = path / "train.txt", path / "valid.txt"
    if train.is_file() and valid.is_file():
        return read_text(train), read_text(valid)
    files = sorted(f for f in path.rglob("*") if f.is_file() and f.suffix.lower() in TEXT_SUFFIXES)
    if not files:
        raise DataError(f"{path} has no text files ({', '.join(TEXT_SUFFIXES)})")
    texts = [read_text(f) for f in files if f.stat().st_size]
    if not texts:
        raise DataError(f"all text files in {path} are empty")
    return b"\n\n".join(texts), None


def builtin_text() -> bytes:
    """The running Python's language reference, then the sources of its standard library."""
    root = Path(sysconfig.get_paths()["stdlib"])
    parts = [_topics_text()]
    size = len(parts[0])
    for source in _prose_sources(root) if root.is_dir() else ():
        if size >= BUILTIN_BYTES:
            break
        if source != root / "pydoc_data" / "topics.py":
            parts.append(source.read_bytes())
            size += len(parts[-1])
    text = b"\n\n".join(parts)[:BUILTIN_BYTES]
    if len(text) < 500_000:
        raise DataError(f"this Python has little of its standard library at {root}; use data.corpus=FILE")
    return text


def _topics_text() -> bytes:
    try:
        from pydoc_data import topics
    except ImportError:
        raise DataError("this Python comes without its own documentation; use data.corpus=FILE") from None
    return "\n\n".join(topics.topics[name] for name in sorted(topics.topics)).encode()


def _prose_sources(folder: Path) -> Iterator[Path]:
    """In the order of their paths. Folders that are left out are not entered: site-packages may hold many
    files, and listing 13,353 took every program that reads this text 0.45 s of processor time."""
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.name in NOT_PROSE or entry.name.startswith("test_"):
            continue
        if entry.is_dir() and not entry.is_symlink():
            yield from _prose_sources(entry)
        elif entry.name.endswith(".py"):
            yield entry


def _hugging_face(name: str) -> tuple[bytes, bytes | None]:
    try:
        from datasets import load_dataset
    except ImportError:
        raise DataError(
            "hf: corpora need the extra: pip install 'blocktrain[datasets]', or pip install -e "
            "'.[datasets]' in the source folder"
        ) from None
    name, _, configuration = name.partition(":")
    try:
        splits = load_dataset(name, configuration or None)
    except Exception as error:  # the library raises a dozen unrelated types
        raise DataError(f"cannot load dataset {name!r} from Hugging Face: {error}") from None
    joined = {split: "\n".join(rows["text"]).encode() for split, rows in splits.items()}
    if "train" not in joined:
        raise DataError(f"dataset {name!r} has no split named train; it has {', '.join(joined)}")
    return joined["train"], joined.get("validation")
