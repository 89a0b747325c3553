"""From sources to a dataset, in two readings, with memory that does not grow with the text.

The first reading (`scan`) counts, chooses held-out and pooling documents by the hash of their text, remembers
sketches of these and a sample to cluster. The second cuts the documents into portions, has them encoded by
several processes, and appends each document to the open shard of its split, cluster and lane, in order.

The result depends on sources and options alone: not on the number of processes, nor on how often it was
stopped. A journal in `.prepare/` says how far the shards are good; after `kill -9` the same command cuts them
there and goes on. `dataset.json` is written last, so a folder with one is whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from heapq import heappop, heappush
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any

import numpy as np

from blocktrain.data.bpe import FileTokenizer
from blocktrain.data.clusters import SAMPLE_DOCUMENTS, Clustering, Counts, word_counts
from blocktrain.data.dataset import (
    BYTE_SEPARATOR,
    MANIFEST,
    MAX_CLUSTERS,
    MAX_SHARD_TOKENS,
    PREFIXES,
    SPLITS,
    TOKENIZER,
    Manifest,
    ShardEntry,
    SplitName,
    writing,
)
from blocktrain.data.portions import (
    HELD_OUT,
    LEFT_OUT,
    POOLING,
    SCAN,
    TRAINING,
    Encoded,
    Encoder,
    EncoderProcess,
    Portion,
    Scan,
    open_tokenizer,
)
from blocktrain.data.similarity import Hashes, SketchIndex, sketch
from blocktrain.data.sources import Reading, TextSource, find_sources, read_documents
from blocktrain.data.tokenizer import token_dtype
from blocktrain.errors import DataError
from blocktrain.files import locked_file, write_whole

WORK, PLAN, JOURNAL, LOCK = ".prepare", "plan.json", "journal.jsonl", "lock"
DEFAULT_SHARD_TOKENS = 1 << 22
"""8 MB of uint16: what a volunteer fetches for an assignment; 115 MB of documentation are 7 shards."""
PORTION_BYTES = 1 << 20
CHECKPOINT_BYTES = 32 << 20
"""Text between two lines of the journal: seconds of work to lose, and few enough calls of fsync."""
MAX_RESERVED_BYTES = 64 << 20
"""Held-out and pooling text together. Sketches of it cost 25 MB in each process, and more tells nothing new
about a model."""
MAX_LANES = 16
MAX_OPEN_SHARDS = 512
KEYS = 1 << 64

Watch = Callable[[str, int, int], None]
"""Hears the step's name, how much is done and how much there is to do (0 if nobody knows)."""


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    sources: tuple[str, ...]
    tokenizer: str = "byte"
    """`byte`, or the path of a tokenizer.json."""
    shard_tokens: int = DEFAULT_SHARD_TOKENS
    held_out: float = 0.01
    pooling: float = 0.005
    held_out_from: tuple[str, ...] = ()
    """Sources that are held out as a whole, in place of a share of the others."""
    clusters: int = 1
    field: str = "text"
    document_start: str | None = None
    max_bytes: int | None = None
    """Stop reading after so much text (held_out_from not counted)."""

    def __post_init__(self) -> None:
        for ok, problem in (
            (bool(self.sources), "no source; name a FILE, a FOLDER or hf:NAME"),
            (
                1024 <= self.shard_tokens <= MAX_SHARD_TOKENS // 2,
                f"--shard-tokens must be 1024 to {MAX_SHARD_TOKENS // 2}",
            ),
            (0 < self.held_out <= 0.5, "--held-out must be above 0 and at most 0.5"),
            (0 < self.pooling <= 0.5, "--pooling must be above 0 and at most 0.5"),
            (
                1 <= self.clusters <= min(MAX_CLUSTERS, MAX_OPEN_SHARDS),
                f"--clusters must be 1 to {MAX_OPEN_SHARDS}",
            ),
            (self.max_bytes is None or self.max_bytes > 0, "--max-bytes must be above 0"),
            (self.document_start != "", "--document-start is empty"),
        ):
            if not ok:
                raise DataError(problem)

    @property
    def reading(self) -> Reading:
        return Reading(field=self.field, document_start=self.document_start)


def prepare(options: PrepareOptions, out: Path, *, processes: int, watch: Watch) -> Manifest:
    """Make the dataset, or go on where an earlier try with the same sources and options was stopped."""
    sources = find_sources(list(options.sources))
    sources += find_sources(list(options.held_out_from), held_out=True)
    if (out / MANIFEST).exists():
        raise DataError(
            f"{out} holds a finished dataset; choose another --out, or see it with `blocktrain data info`"
        )
    work = out / WORK
    if out.exists() and not work.exists() and any(out.iterdir()):
        raise DataError(f"{out} is not empty and holds no unfinished dataset; choose another --out")
    with writing(out):
        work.mkdir(parents=True, exist_ok=True)
    taken = f"another preparation is writing {out}; stop it, or choose another --out"
    with locked_file(work / LOCK, taken), writing(out):
        # The tokenizer is copied first: from here on a change of the user's file changes nothing.
        content = None if options.tokenizer == "byte" else _tokenizer_bytes(options.tokenizer)
        chosen = "byte" if content is None else hashlib.sha256(content).hexdigest()
        plan = {
            **asdict(options),
            "tokenizer": chosen,
            "sources": [source.fingerprint() for source in sources],
            "held_out_from": len(options.held_out_from),
        }
        _settle_plan(work / PLAN, plan, out)
        if content is not None:
            FileTokenizer(content, options.tokenizer)
            write_whole(out / TOKENIZER, content)
        if not (work / SCAN).exists():
            scan_sources(sources, options, watch).write(work)
        manifest = _write_shards(sources, options, out, chosen, processes, watch)
        write_whole(out / MANIFEST, manifest.to_bytes())
    shutil.rmtree(work, ignore_errors=True)
    return manifest


def _tokenizer_bytes(name: str) -> bytes:
    """A file, or else the tokenizer.json of a model on the Hub."""
    path = Path(name).expanduser()
    if not path.exists() and "/" in name and not name.endswith(".json"):
        try:
            from huggingface_hub import hf_hub_download
        except ImportError:
            raise DataError(f"no file {name}; for a name on the Hub: pip install 'blocktrain[hub]'") from None
        try:
            path = Path(hf_hub_download(name, TOKENIZER))
        except Exception as error:  # the library raises a dozen unrelated types
            raise DataError(f"no file {name}, and the Hub does not give its {TOKENIZER}: {error}") from None
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(
            f"cannot read the tokenizer {path}: {error.strerror}; name `byte`, a tokenizer.json or OWNER/NAME"
        ) from None


def _settle_plan(path: Path, plan: dict[str, Any], out: Path) -> None:
    """Write the plan, or check that it is the one that was begun here."""
    wanted = json.loads(json.dumps(plan))
    try:
        begun = json.loads(path.read_bytes())
    except FileNotFoundError:
        write_whole(path, json.dumps(plan, indent=1).encode())
        return
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is damaged ({error}); delete {out} and begin again") from None
    differing = [key for key in wanted if begun.get(key) != wanted[key]]
    if differing:
        raise DataError(
            f"{out} was begun with other {', '.join(differing)} (a changed file counts); delete it and begin "
            "again, or choose another --out"
        )


# --- the first reading --------------------------------------------------------------------------------------


def document_keys(document: bytes) -> tuple[int, int]:
    """Two numbers below 2^64 from the text alone: one chooses the split, one the lane and the sample to
    cluster. Equal documents have equal keys, so copies never come to lie in two splits."""
    digest = hashlib.sha256(document).digest()
    return int.from_bytes(digest[:8], "big"), int.from_bytes(digest[8:16], "big")


class Reserve:
    """Sketches of the documents with the smallest keys: those below `share` of all keys, fewer if that is
    more than MAX_RESERVED_BYTES of text, but always two."""

    def __init__(self, share: float) -> None:
        self.below = int(share * KEYS)
        self.bytes = 0
        self._kept: dict[int, tuple[int, Hashes]] = {}
        self._largest_first: list[int] = []
        self._few: list[tuple[int, Hashes]] = []
        """The two smallest keys that are not below, for a source of few documents."""

    def add(self, key: int, document: bytes) -> None:
        if key >= self.below:
            if len(self._few) < 2 or key < self._few[-1][0]:
                others = [one for one in self._few if one[0] != key]
                self._few = sorted([*others, (key, sketch(document))], key=lambda one: one[0])[:2]
        elif key not in self._kept:
            self._kept[key] = (len(document), sketch(document))
            heappush(self._largest_first, -key)
            self.bytes += len(document)
            while self.bytes > MAX_RESERVED_BYTES and len(self._kept) > 2:
                self.below = -heappop(self._largest_first)
                self.bytes -= self._kept.pop(self.below)[0]

    def sketches(self) -> dict[int, Hashes]:
        """By key, smallest first."""
        kept = {key: self._kept[key][1] for key in sorted(self._kept)}
        return kept if len(kept) >= 2 else {**kept, **dict(self._few)}


def scan_sources(sources: list[TextSource], options: PrepareOptions, watch: Watch) -> Scan:
    forced = bool(options.held_out_from)
    held_share = 0.0 if forced else options.held_out
    reserve = Reserve(held_share + options.pooling)
    held_sketches: list[Hashes] = []
    held_bytes = documents = text_bytes = 0
    keys_sum, sample_below = 0, KEYS
    sample: list[tuple[int, Counts]] = []
    for source, document in _all_documents(sources, options.reading, options.max_bytes, watch):
        documents += 1
        text_bytes += len(document)
        key, other = document_keys(document)
        keys_sum = (keys_sum + key) % KEYS
        if source.held_out:
            held_bytes += len(document)
            if held_bytes > MAX_RESERVED_BYTES:
                raise DataError(
                    f"--held-out-from has more than {MAX_RESERVED_BYTES} bytes of text; name less"
                )
            held_sketches.append(sketch(document))
            continue
        reserve.add(key, document)
        if options.clusters > 1 and other < sample_below:
            sample.append((other, word_counts(document)))
            # Cutting at twice the size keeps the smallest keys without a heap's cost per document.
            if len(sample) >= 2 * SAMPLE_DOCUMENTS:
                sample = sorted(sample, key=lambda one: one[0])[:SAMPLE_DOCUMENTS]
                sample_below = sample[-1][0]
    if documents < 3:
        raise DataError(
            f"found {documents} documents, expected at least 3 (to train on, to pool and to hold out); "
            "use more text, or say where documents begin with --document-start"
        )
    reserved = reserve.sketches()
    keys = list(reserved)
    pooling_below = reserve.below
    held_below = int(pooling_below * (held_share / (held_share + options.pooling)))
    # Few documents: the smallest key is held out and the largest reserved one pools, whatever the shares say.
    if not forced and keys[0] >= held_below:
        held_below = keys[0] + 1
    elif keys[-1] < held_below:
        held_below = keys[-1]
    pooled = [key for key in keys if key >= held_below]
    if not pooled or (not forced and keys[0] >= held_below):
        raise DataError(
            f"found {documents} documents, too few different ones for three splits; use more text"
        )
    pooling_below = max(pooling_below, pooled[0] + 1)
    held_sketches += [reserved[key] for key in keys if key < held_below]
    pool_sketches = [reserved[key] for key in keys if held_below <= key < pooling_below]
    clustering = None
    if options.clusters > 1:
        counts = np.array([one[1] for one in sorted(sample, key=lambda one: one[0])[:SAMPLE_DOCUMENTS]])
        clustering = Clustering.fit(counts, options.clusters)
    return Scan(
        held_below, pooling_below, len(held_sketches), documents, text_bytes, keys_sum,
        SketchIndex.of([*held_sketches, *pool_sketches]), clustering,
    )  # fmt: skip


def sampled_documents(
    sources: list[TextSource], reading: Reading, max_bytes: int, watch: Watch
) -> list[bytes]:
    """Up to `max_bytes` of documents, those with the smallest keys: spread over all sources, and the same on
    every machine."""
    kept: list[tuple[int, bytes]] = []  # a heap with the largest key first
    size = 0
    for _, document in _all_documents(sources, reading, None, watch):
        heappush(kept, (-document_keys(document)[1], document))
        size += len(document)
        while size > max_bytes and len(kept) > 1:
            size -= len(heappop(kept)[1])
    if not kept:
        raise DataError("the sources have no text; name others")
    return [document for _, document in sorted(kept, reverse=True)]


def _all_documents(
    sources: list[TextSource], reading: Reading, max_bytes: int | None, watch: Watch | None
) -> Iterator[tuple[TextSource, bytes]]:
    """Every document with its source; `watch` hears how much of the files on disk is read."""
    left = max_bytes
    on_disk, before = sum(source.size for source in sources), 0
    for source in sources:
        if left is not None and left <= 0 and not source.held_out:
            continue

        def told(read: int, before: int = before) -> None:
            if watch is not None:
                watch("reading", before + read, on_disk)

        for document in read_documents(source, reading, told):
            yield source, document
            if left is not None and not source.held_out:
                left -= len(document)
                if left <= 0:
                    break
        before += source.size


# --- the second reading -------------------------------------------------------------------------------------


@dataclass
class OpenShard:
    """A shard that is being appended to."""

    key: tuple[int, int, int]
    """Split, cluster, lane."""
    name: str
    tokens: int
    documents: int
    text_bytes: int
    file: IO[bytes]
    digest: Any

    def entry(self) -> ShardEntry:
        return ShardEntry(
            name=self.name, sha256=self.digest.hexdigest(), tokens=self.tokens, documents=self.documents,
            bytes=self.text_bytes, cluster=self.key[1],
        )  # fmt: skip

    def state(self) -> list[Any]:
        return [*self.key, self.name, self.tokens, self.documents, self.text_bytes]


class ShardWriter:
    """The shards so far, finished and open, and the journal that says how far they are good."""

    def __init__(self, out: Path, dtype: np.dtype[Any], shard_tokens: int) -> None:
        self.out, self.dtype, self.shard_tokens = out, dtype, shard_tokens
        self.finished: list[tuple[int, ShardEntry]] = []
        self.told = 0  # finished shards that are in the journal
        self.open: dict[tuple[int, int, int], OpenShard] = {}
        self.counts = [0, 0, 0]
        self.documents = 0
        """Documents taken from the sources, those left out included."""
        self.left_out = 0
        self.text_bytes = 0
        self._resume()
        self.journal = (out / WORK / JOURNAL).open("ab")

    def _resume(self) -> None:
        """Take up what the journal vouches for; cut or delete the rest."""
        path = self.out / WORK / JOURNAL
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        good, last = 0, None
        for line in lines:
            try:
                last = json.loads(line) if line.endswith(b"\n") else None
            except ValueError:
                last = None
            if last is None:  # a torn last line: the checkpoint before it counts
                break
            good += len(line)
            self.finished += [(split, ShardEntry(**entry)) for split, entry in last["finished"]]
            state = last
        if good == 0:
            state = {"open": [], "counts": [0, 0, 0], "documents": 0, "left_out": 0, "text_bytes": 0}
        if path.exists():
            os.truncate(path, good)
        self.told = len(self.finished)
        self.counts, self.documents = state["counts"], state["documents"]
        self.left_out, self.text_bytes = state["left_out"], state["text_bytes"]
        known = {entry.name for _, entry in self.finished} | {one[3] for one in state["open"]}
        for stray in self.out.glob("*.bin"):
            if stray.name not in known:
                stray.unlink()
        for split, cluster, lane, name, tokens, documents, size in state["open"]:
            path, length = self.out / name, tokens * self.dtype.itemsize
            if not path.exists() or path.stat().st_size < length:
                raise DataError(f"{path} is shorter than the journal says; delete {self.out} and begin again")
            os.truncate(path, length)
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256")
            key = (split, cluster, lane)
            self.open[key] = OpenShard(key, name, tokens, documents, size, path.open("ab"), digest)

    def append(self, key: tuple[int, int, int], tokens: memoryview, text_bytes: int) -> None:
        shard = self.open.get(key)
        if shard is None:
            split: SplitName = SPLITS[key[0]]
            name = f"{PREFIXES[split]}-{self.counts[key[0]]:05d}.bin"
            self.counts[key[0]] += 1
            file = (self.out / name).open("wb")
            shard = self.open[key] = OpenShard(key, name, 0, 0, 0, file, hashlib.sha256())
        shard.file.write(tokens)
        shard.digest.update(tokens)
        shard.tokens += len(tokens) // self.dtype.itemsize
        shard.documents += 1
        shard.text_bytes += text_bytes
        if shard.tokens >= self.shard_tokens:  # behind a whole document, so a shard may be a little longer
            self._finish(self.open.pop(key))

    def _finish(self, shard: OpenShard) -> None:
        _sync(shard.file)
        shard.file.close()
        self.finished.append((shard.key[0], shard.entry()))

    def checkpoint(self) -> None:
        """Everything up to here is on the disk before the journal says so."""
        for shard in self.open.values():
            _sync(shard.file)
        line = {
            "finished": [(split, vars(entry)) for split, entry in self.finished[self.told :]],
            "open": [shard.state() for shard in self.open.values()],
            "counts": self.counts,
            "documents": self.documents,
            "left_out": self.left_out,
            "text_bytes": self.text_bytes,
        }
        self.journal.write(json.dumps(line).encode() + b"\n")
        _sync(self.journal)
        self.told = len(self.finished)

    def finish(self) -> dict[str, tuple[ShardEntry, ...]]:
        for key in sorted(self.open):
            self._finish(self.open[key])
        self.open.clear()
        return {
            name: tuple(sorted((e for split, e in self.finished if split == number), key=lambda e: e.name))
            for number, name in enumerate(SPLITS)
        }

    def close(self) -> None:
        for shard in self.open.values():
            with suppress(OSError):
                shard.file.close()
        with suppress(OSError):
            self.journal.close()


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _write_shards(
    sources: list[TextSource], options: PrepareOptions, out: Path, chosen: str, processes: int, watch: Watch
) -> Manifest:
    work = out / WORK
    scan = Scan.read(work)
    tokenizer = open_tokenizer(out, chosen)
    vocabulary = tokenizer.vocabulary
    separator = tokenizer.separator if isinstance(tokenizer, FileTokenizer) else BYTE_SEPARATOR
    dtype = token_dtype(vocabulary)
    # Neighbours in the sources go to different lanes, so that a shard is a mixture even where a folder is
    # sorted. No more lanes than whole shards are to be expected: 4 bytes are about one token.
    expected = scan.text_bytes // (4 * options.shard_tokens * options.clusters)
    lanes = max(1, min(MAX_LANES, expected, MAX_OPEN_SHARDS // options.clusters))
    with ExitStack() as stack:
        writer = ShardWriter(out, dtype, options.shard_tokens)
        stack.callback(writer.close)
        done_bytes = writer.text_bytes
        next_checkpoint = done_bytes + CHECKPOINT_BYTES
        found = Found()
        portions = _portions(sources, options, scan, found, skip=writer.documents)
        for portion, lane_keys, encoded in _in_order(portions, scan, tokenizer, out, processes, stack):
            view, start = memoryview(encoded.tokens), 0
            for document, split, lane_key, label, size in zip(
                portion.documents, portion.splits, lane_keys, encoded.labels, encoded.sizes, strict=True
            ):
                if label == LEFT_OUT:
                    writer.left_out += 1
                else:
                    # Held-out and pooling text is scored as a whole, so it needs no lanes.
                    lane = lane_key % lanes if split == TRAINING else 0
                    writer.append((split, label, lane), view[start : start + size], len(document))
                start += size
                done_bytes += len(document)
            writer.documents += len(portion.documents)
            writer.text_bytes = done_bytes
            if done_bytes >= next_checkpoint:
                writer.checkpoint()
                next_checkpoint = done_bytes + CHECKPOINT_BYTES
            watch("tokenizing", done_bytes, scan.text_bytes)
        if (found.documents, found.keys_sum) != (scan.documents, scan.keys_sum):
            raise DataError(
                f"the sources had {scan.documents} documents at first and {found.documents} now, or "
                f"others; delete {out} and begin again"
            )
        splits = writer.finish()
    for name in SPLITS:
        if not splits[name]:
            raise DataError(
                f"no document is left for {name}: {scan.documents} documents, {writer.left_out} of them "
                "near-duplicates of held-out or pooling ones; use more text or other shares"
            )
    return Manifest(
        tokenizer=chosen, vocabulary=vocabulary, separator=tuple(separator), clusters=options.clusters,
        left_out=writer.left_out, **splits,
    )  # fmt: skip


@dataclass
class Found:
    """What the second reading saw, to be held against the first."""

    documents: int = 0
    keys_sum: int = 0


def _portions(
    sources: list[TextSource], options: PrepareOptions, scan: Scan, found: Found, *, skip: int
) -> Iterator[tuple[Portion, list[int]]]:
    """Documents in portions with their splits, and the number that chooses each one's lane; without the first
    `skip` documents, which an earlier try has written."""
    documents: list[bytes] = []
    splits: list[int] = []
    lanes: list[int] = []
    size = 0
    for source, document in _all_documents(sources, options.reading, options.max_bytes, None):
        key, other = document_keys(document)
        found.documents += 1
        found.keys_sum = (found.keys_sum + key) % KEYS
        if found.documents <= skip:
            continue
        split = HELD_OUT if source.held_out or key < scan.held_out_below else TRAINING
        if split == TRAINING and key < scan.pooling_below:
            split = POOLING
        documents.append(document)
        splits.append(split)
        lanes.append(other)
        size += len(document)
        if size >= PORTION_BYTES:
            yield Portion(documents, splits), lanes
            documents, splits, lanes, size = [], [], [], 0
    if documents:
        yield Portion(documents, splits), lanes


def _in_order(
    portions: Iterator[tuple[Portion, list[int]]],
    scan: Scan,
    tokenizer: Any,
    out: Path,
    processes: int,
    stack: ExitStack,
) -> Iterator[tuple[Portion, list[int], Encoded]]:
    """Each portion with what it became, in order, a few of them ahead in other processes."""
    if processes == 1:
        encoder = Encoder(scan, tokenizer)
        for portion, lanes in portions:
            yield portion, lanes, encoder.encode(portion)
        return
    idle: SimpleQueue[EncoderProcess] = SimpleQueue()
    pool = stack.enter_context(ThreadPoolExecutor(processes))
    for _ in range(processes):
        process = EncoderProcess(out, out / WORK)
        stack.callback(process.close)
        idle.put(process)

    def encode(portion: Portion) -> Encoded:
        process = idle.get()
        try:
            return process.encode(portion)
        finally:
            idle.put(process)

    # Two waiting portions a process keep all of them busy while the oldest is written; more only cost memory.
    ahead: deque[tuple[Portion, list[int], Future[Encoded]]] = deque()
    for portion, lanes in portions:
        ahead.append((portion, lanes, pool.submit(encode, portion)))
        if len(ahead) >= 2 * processes:
            first, first_lanes, future = ahead.popleft()
            yield first, first_lanes, future.result()
    while ahead:
        first, first_lanes, future = ahead.popleft()
        yield first, first_lanes, future.result()
