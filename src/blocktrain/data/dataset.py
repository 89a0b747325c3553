"""A prepared dataset: `dataset.json`, shards of tokens beside it, and the tokenizer's file.

The manifest lists the shards of three splits: `training` goes to workers, `pooling` fits composition weights,
`held_out` is scored and never fitted. The SHA-256 of the manifest's bytes is the dataset's identity; it
covers the hash of every shard and of the tokenizer. A shard is little-endian uint8, uint16 or uint32, one
whole document after another, each followed by the separator. `docs/data.md` has the format.

Covered, with manifest and shards from a stranger: sizes and names are checked before anything is allocated
or opened, a name cannot leave its folder, one shard cannot be in two splits, a shard of another length or
hash or with a token beyond the vocabulary is refused. Not covered: what the text says.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from blocktrain.data.bpe import FileTokenizer, read_tokenizer_file
from blocktrain.data.tokenizer import ByteTokenizer, Tokenizer, Tokens, token_dtype
from blocktrain.errors import DataError, StorageError
from blocktrain.ids import CorpusHash

MANIFEST, TOKENIZER = "dataset.json", "tokenizer.json"
FORMAT, VERSION = "blocktrain-dataset", 1
MAX_MANIFEST_BYTES = 32 << 20
MAX_SHARDS = 100_000
"""With the default length of a shard, 400 billion tokens."""
MAX_SHARD_TOKENS = 1 << 30
MAX_VOCABULARY = 1 << 24
MAX_CLUSTERS = 4096
CHECKED_BYTES = 4 << 20
BYTE_SEPARATOR = (10, 10)
"""Two line feeds: 256 bytes leave no token free, and text files are joined by a blank line anyway."""

SplitName = Literal["training", "pooling", "held_out"]
SPLITS: tuple[SplitName, ...] = get_args(SplitName)
PREFIXES: Mapping[SplitName, str] = {"training": "train", "pooling": "pool", "held_out": "held"}
_HASH = re.compile("[0-9a-f]{64}")

TokenArray = NDArray[np.uint8] | NDArray[np.uint16] | NDArray[np.uint32]


@dataclass(frozen=True, kw_only=True)
class ShardEntry:
    name: str
    sha256: str
    tokens: int
    """Separators included."""
    documents: int
    bytes: int
    """UTF-8 bytes of the documents, so that loss per token becomes loss per byte."""
    cluster: int
    """0 where documents were not clustered."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    tokenizer: str
    """`byte`, or the SHA-256 of tokenizer.json."""
    vocabulary: int
    separator: tuple[int, ...]
    clusters: int
    left_out: int
    """Documents that are in no split, as near-duplicates of held-out or pooling ones."""
    training: tuple[ShardEntry, ...]
    pooling: tuple[ShardEntry, ...]
    held_out: tuple[ShardEntry, ...]

    @property
    def dtype(self) -> np.dtype[Any]:
        return token_dtype(self.vocabulary)

    @property
    def identity(self) -> CorpusHash:
        return CorpusHash(hashlib.sha256(self.to_bytes()).hexdigest())

    def split(self, name: SplitName) -> tuple[ShardEntry, ...]:
        entries: tuple[ShardEntry, ...] = getattr(self, name)
        return entries

    def tokens(self, split: SplitName) -> int:
        return sum(entry.tokens for entry in self.split(split))

    def bytes_per_token(self, split: SplitName) -> float:
        """What a loss per token is divided by, to compare runs of different tokenizers."""
        return sum(entry.bytes for entry in self.split(split)) / self.tokens(split)

    def to_bytes(self) -> bytes:
        """The one form a manifest has: sorted keys, ASCII, one shard a line."""
        value: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "tokenizer": self.tokenizer,
            "vocabulary": self.vocabulary,
            "dtype": str(self.dtype.name),
            "separator": list(self.separator),
            "clusters": self.clusters,
            "left_out": self.left_out,
        }
        lines = [f"{json.dumps(key)}: {json.dumps(value[key])}" for key in sorted(value)]
        for name in SPLITS:
            rows = ",\n".join(json.dumps(vars(entry), sort_keys=True) for entry in self.split(name))
            lines.append(f'"{name}": [\n{rows}\n]')
        return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def read_manifest(content: bytes, origin: str = MANIFEST) -> Manifest:
    """A manifest out of bytes that anybody may have written."""

    def refused(problem: str) -> DataError:
        return DataError(f"{origin} {problem}; fetch it again, or make it with `blocktrain data prepare`")

    def count(value: Any, what: str, low: int, high: int) -> int:
        if type(value) is not int or not low <= value <= high:
            raise refused(f"has {what} {str(value)[:40]!r}, expected a whole number from {low} to {high}")
        return value

    def shape(value: Any, what: str, keys: Iterable[str]) -> dict[str, Any]:
        if not isinstance(value, dict) or value.keys() != set(keys):
            raise refused(f"has {what} with other keys than {', '.join(sorted(keys))}")
        return value

    if len(content) > MAX_MANIFEST_BYTES:
        raise refused(f"has {len(content)} bytes, at most {MAX_MANIFEST_BYTES} are read")
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise refused(f"is not JSON ({str(error)[:80]})") from None
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise refused(f"is not a {FORMAT}")
    if value.get("version") != VERSION:
        raise refused(f"is of version {str(value.get('version'))[:20]}, this program reads {VERSION}")
    kept = ("tokenizer", "vocabulary", "separator", "clusters", "left_out")
    shape(value, "an object", ("format", "version", "dtype", *kept, *SPLITS))
    tokenizer = value["tokenizer"]
    if not isinstance(tokenizer, str) or (tokenizer != "byte" and not _HASH.fullmatch(tokenizer)):
        raise refused("names a tokenizer that is neither `byte` nor a SHA-256")
    vocabulary = count(value["vocabulary"], "vocabulary", 2, MAX_VOCABULARY)
    if tokenizer == "byte" and vocabulary != ByteTokenizer.vocabulary:
        raise refused(f"has vocabulary {vocabulary} for bytes, expected {ByteTokenizer.vocabulary}")
    separator = value["separator"]
    if not isinstance(separator, list) or len(separator) > 16:
        raise refused("has a separator that is no list of at most 16 tokens")
    clusters = count(value["clusters"], "clusters", 1, MAX_CLUSTERS)

    splits: dict[str, tuple[ShardEntry, ...]] = {}
    names: set[str] = set()
    hashes: set[str] = set()
    for split in SPLITS:
        rows = value[split]
        if not isinstance(rows, list) or not 0 < len(rows) <= MAX_SHARDS:
            raise refused(f"has {split} that is no list of 1 to {MAX_SHARDS} shards")
        entries = []
        for row in rows:
            shape(row, f"a shard of {split}", ShardEntry.__annotations__)
            name, sha256 = row["name"], row["sha256"]
            # Exactly what prepare writes: no separators, no dots, nothing a file system reads in its own way.
            if not isinstance(name, str) or not re.fullmatch(rf"{PREFIXES[split]}-[0-9]{{5,6}}\.bin", name):
                raise refused(f"has the shard name {str(name)[:60]!r}, expected {PREFIXES[split]}-00000.bin")
            if not isinstance(sha256, str) or not _HASH.fullmatch(sha256):
                raise refused(f"has no SHA-256 for {name}")
            if name in names or sha256 in hashes:
                raise refused(f"lists {name} or its content twice")
            names.add(name)
            hashes.add(sha256)
            entries.append(
                ShardEntry(
                    name=name,
                    sha256=sha256,
                    tokens=count(row["tokens"], f"tokens of {name}", 1, MAX_SHARD_TOKENS),
                    documents=count(row["documents"], f"documents of {name}", 1, row["tokens"]),
                    bytes=count(row["bytes"], f"bytes of {name}", 1, MAX_SHARD_TOKENS * 64),
                    cluster=count(row["cluster"], f"cluster of {name}", 0, clusters - 1),
                )
            )
        splits[split] = tuple(entries)
    manifest = Manifest(
        tokenizer=tokenizer,
        vocabulary=vocabulary,
        separator=tuple(count(one, "separator", 0, vocabulary - 1) for one in separator),
        clusters=clusters,
        left_out=count(value["left_out"], "left_out", 0, 1 << 53),
        **splits,
    )
    # One value, one identity: a form with other spaces, order or dtype would have another hash.
    if manifest.to_bytes() != content:
        raise refused("is not written as `data prepare` writes it")
    return manifest


class RunText(ABC):
    """What a run trains on and is scored on: a manifest, and its shards when they are asked for.

    Three kinds: a folder that was prepared (`Dataset`), plain text in memory (`Corpus`), and what a worker
    fetches from its coordinator (`FetchedText`).
    """

    manifest: Manifest
    sha256: CorpusHash
    """The text's name in ledgers and checkpoints; batches are drawn by it. The manifest's identity, but for
    plain text, which had a hash before there were manifests."""

    @abstractmethod
    def tokens(self, entry: ShardEntry) -> TokenArray:
        """A shard's tokens; mapped, if they lie in a file."""

    @abstractmethod
    def tokenizer(self) -> Tokenizer: ...

    def first_tokens(self, split: SplitName, max_bytes: int | None = None) -> Tokens:
        """Tokens from the beginning of a split, in memory: all, or as many as about `max_bytes` have, of each
        cluster in proportion to what the split has of it."""
        total = limit = self.manifest.tokens(split)
        if max_bytes is not None:
            limit = min(limit, math.ceil(max_bytes / self.manifest.bytes_per_token(split)))
        # A shard holds one cluster: the first bytes alone would be text of the first cluster, and pooling
        # weights fitted on that would hardly hear the specialists of the others (3 of 100 for one of three).
        entries, left = self.manifest.split(split), [0] * self.manifest.clusters
        for entry in entries:
            left[entry.cluster] += entry.tokens
        left = [-(-limit * tokens // total) for tokens in left]
        parts: list[Tokens] = []
        for entry in entries:
            if left[entry.cluster] > 0:
                parts.append(self.tokens(entry)[: left[entry.cluster]].astype(np.int64))
                left[entry.cluster] -= len(parts[-1])
        return np.concatenate(parts)


class Windows:
    """Runs of tokens to choose from, each inside one of some files; every start is equally likely."""

    def __init__(self, files: Sequence[TokenArray], context: int) -> None:
        self.files = files
        self.ends = np.cumsum([max(0, len(tokens) - context) for tokens in files])
        self.choices = int(self.ends[-1])

    def cut(self, starts: Tokens, length: int) -> NDArray[np.int32]:
        rows = np.empty((len(starts), length), np.int32)
        reach, files = np.arange(length), np.searchsorted(self.ends, starts, "right")
        for file in np.unique(files).tolist():
            here = np.flatnonzero(files == file)
            firsts = starts[here] - (self.ends[file - 1] if file else 0)
            # `take` reads the disk without the interpreter's lock, which a loop over the rows held for 0.3 ms
            # of a step, and the thread that feeds a GPU waited for it.
            rows[here] = np.take(self.files[file], firsts[:, None] + reach)
        return rows


class Dataset(RunText):
    """A folder with a manifest. Shards are opened when they are asked for and never read whole."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest, self.sha256 = folder, manifest, manifest.identity

    @classmethod
    def open(cls, folder: Path) -> Dataset:
        path = folder / MANIFEST
        try:
            if path.stat().st_size > MAX_MANIFEST_BYTES:
                raise DataError(f"{path} is longer than any manifest ({MAX_MANIFEST_BYTES} bytes)")
            return cls(folder, read_manifest(path.read_bytes(), str(path)))
        except FileNotFoundError:
            raise DataError(
                f"{folder} has no {MANIFEST}, so it is no whole dataset; make one with "
                "`blocktrain data prepare`"
            ) from None
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}") from None

    def tokens(self, entry: ShardEntry) -> TokenArray:
        """Mapped: pages are read when they are used and may be dropped again."""
        return mapped(self.folder / entry.name, entry, self.manifest)

    def tokenizer(self) -> ByteTokenizer | FileTokenizer:
        if self.manifest.tokenizer == "byte":
            return ByteTokenizer()
        return checked_tokenizer(self.folder / TOKENIZER, self.manifest.tokenizer)


def checked_tokenizer(path: Path, sha256: str) -> FileTokenizer:
    content = read_tokenizer_file(path)
    # Before anything parses it: a mirror may have sent it.
    if (found := hashlib.sha256(content).hexdigest()) != sha256:
        raise DataError(
            f"{path} changed: expected sha256 {sha256[:16]}…, found {found[:16]}…; the tokens would mean "
            "something else; put the old file back"
        )
    return FileTokenizer(content, str(path))


def mapped(path: Path, entry: ShardEntry, manifest: Manifest) -> TokenArray:
    _check_size(path, entry, manifest)
    return np.memmap(path, manifest.dtype, mode="r", shape=(entry.tokens,))


def _check_size(path: Path, entry: ShardEntry, manifest: Manifest) -> None:
    """Before a byte of it is mapped or hashed."""
    expected = entry.tokens * manifest.dtype.itemsize
    try:
        found = path.stat().st_size
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; fetch it again") from None
    if found != expected:
        raise DataError(
            f"{path} is truncated or not this shard: expected {expected} bytes, found {found}; fetch it again"
        )


def check_shard(path: Path, entry: ShardEntry, manifest: Manifest) -> None:
    """Refuse a shard that is not the manifest's, or whose tokens no model of this vocabulary can take."""
    _check_size(path, entry, manifest)
    digest, highest = hashlib.sha256(), 0
    try:
        with path.open("rb") as file:
            while chunk := file.read(CHECKED_BYTES):
                digest.update(chunk)
                highest = max(highest, int(np.frombuffer(chunk, manifest.dtype).max()))
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {path}: {error}; fetch it again") from None
    if digest.hexdigest() != entry.sha256:
        raise DataError(
            f"{path} is damaged: expected sha256 {entry.sha256[:16]}…, found {digest.hexdigest()[:16]}…; "
            "fetch it again"
        )
    if highest >= manifest.vocabulary:
        raise DataError(
            f"{path} has token {highest}, the vocabulary has {manifest.vocabulary}; its maker "
            "must prepare it again"
        )


def own_cluster(manifest: Manifest, num_blocks: int, own_share: float, block: int | None) -> int | None:
    """The cluster that a block draws its own share of batches from; None where it draws from all text."""
    if not own_share:
        return None
    clusters = manifest.clusters
    if clusters < 2 or num_blocks % clusters:
        found = "was prepared without clusters" if clusters < 2 else f"has {clusters} clusters"
        raise DataError(
            f"data.own_share = {own_share:g} gives each of the {num_blocks} blocks a cluster of its own, and "
            f"the text {found}; prepare it with `blocktrain data prepare --clusters {num_blocks}`, or set "
            "data.own_share=0"
        )
    return None if block is None else block % clusters


def shard_files(
    manifest: Manifest,
    seed: int,
    shard: int,
    *,
    context: int,
    spread: int = 2,
    cluster: int | None = None,
    turn: int = 0,
) -> tuple[int, ...]:
    """Which training files a shard draws its windows from in one of its turns (`batches.Drawing`): `spread`
    of them, by hash, all if there are not more. A worker fetches these and no others."""
    usable = [
        index
        for index, entry in enumerate(manifest.training)
        if entry.tokens > context and cluster in (None, entry.cluster)
    ]
    if not usable:
        kind = "" if cluster is None else f" of cluster {cluster}"
        raise DataError(
            f"no training shard{kind} is longer than a window of {context + 1} tokens; use more text"
        )
    # The first turn has the key of before there were turns: runs that were begun then go on with their text.
    key = f"blocktrain-files/{manifest.identity}/{seed}/{shard}/{cluster}" + (f"/{turn}" if turn else "")
    raw = np.frombuffer(hashlib.shake_128(key.encode()).digest(8 * spread), dtype="<u8")
    chosen: list[int] = []
    for number in raw.tolist()[: len(usable)]:
        chosen.append(usable.pop(number % len(usable)))
    return tuple(sorted(chosen))


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Say what to do where the disk is full or the folder is not ours."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"cannot write {path}: {error.strerror or error}; free some space or choose another --out, then "
            "run the same command again"
        ) from error


def total(entries: Sequence[ShardEntry]) -> tuple[int, int, int]:
    """Tokens, documents and bytes of some shards."""
    return sum(e.tokens for e in entries), sum(e.documents for e in entries), sum(e.bytes for e in entries)
