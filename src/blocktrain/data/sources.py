"""Documents out of files: text, folders, jsonl, parquet, all of them plain or compressed, and `hf:NAME`.

Everything streams: a document is in memory, a file never is. A document is a text file, a line of jsonl, a
row of parquet or of a Hugging Face dataset; a long text file has many (`Reading`).

Covered: truncated or damaged archives, text that is not UTF-8, binary files, lines and rows of any length,
missing fields, a packed file that unpacks to much more: each is one error with the file and what to do, and
no more than MAX_DOCUMENT_BYTES are held for it. Not covered: pyarrow decodes parquet, and `datasets` what it
downloads; name only files and datasets of people you trust.
"""

from __future__ import annotations

import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from blocktrain.data.corpora import TEXT_SUFFIXES
from blocktrain.errors import DataError

MAX_DOCUMENT_BYTES = 16 << 20
"""A longer line or row is refused: it would have to be held whole, to stay in one split."""
WHOLE_FILE_BYTES = 64 << 10
PIECE_BYTES = 16 << 10
"""A text file longer than WHOLE_FILE_BYTES is taken as many documents of about this length: four contexts of
1,024 tokens, and 70 documents in a megabyte to choose held-out ones from."""
CHUNK_BYTES = 1 << 20
LINES_SUFFIXES = (".jsonl", ".ndjson")
PACKED_SUFFIXES = (".gz", ".zst", ".xz")


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How files become documents."""

    field: str = "text"
    """Where a jsonl object or a row has its text."""
    document_start: str | None = None
    """Text files: a document begins wherever this stands; None cuts long files at blank lines."""


@dataclass(frozen=True)
class TextSource:
    """One file or one Hugging Face dataset, in the order in which its documents count."""

    name: str
    path: Path | None
    held_out: bool = False
    """All of it is held-out text, whatever its hash."""

    @property
    def size(self) -> int:
        """Bytes on disk, packed or not; 0 for a dataset that comes over the network."""
        return self.path.stat().st_size if self.path is not None else 0

    def fingerprint(self) -> list[str | int]:
        """What must not change between a stopped preparation and its continuation."""
        if self.path is None:
            return [self.name, 0, 0, self.held_out]
        status = self.path.stat()
        return [self.name, status.st_size, status.st_mtime_ns, self.held_out]


def find_sources(names: list[str], *, held_out: bool = False) -> list[TextSource]:
    """The files behind names of files, folders and datasets. Files of a folder are sorted by their path in
    it, so the order is the same on every machine."""
    found: list[TextSource] = []
    for name in names:
        if name.startswith("hf:"):
            found.append(TextSource(name, None, held_out))
            continue
        path = Path(name).expanduser()
        if path.is_dir():
            inside = [one for one in path.rglob("*") if one.is_file() and _format(one) is not None]
            if not inside:
                known = ", ".join([*TEXT_SUFFIXES, *LINES_SUFFIXES[1:], ".parquet"])
                raise DataError(
                    f"{path} has no files to read ({known}, each also with {', '.join(PACKED_SUFFIXES)})"
                )
            ordered = sorted(inside, key=lambda one: one.relative_to(path).as_posix())
            found += [TextSource(str(one), one, held_out) for one in ordered]
        elif path.is_file():
            found.append(TextSource(str(path), path, held_out))
        elif path.exists():
            raise DataError(f"{path} is neither a file nor a folder; expected text, jsonl or parquet")
        else:
            raise DataError(f"no file or folder at {path}; a source is a FILE, a FOLDER or hf:NAME")
    return found


def read_documents(
    source: TextSource, reading: Reading, watch: Callable[[int], None] | None = None
) -> Iterator[bytes]:
    """The source's documents as UTF-8, none of them empty, always the same ones in the same order. `watch`
    hears how many bytes of the file on disk were read so far."""
    if source.path is None:
        documents = _hugging_face_rows(source.name.removeprefix("hf:"), reading.field)
    elif _format(source.path) == "parquet":
        documents = _parquet_rows(source.path, reading.field, watch)
    else:
        documents = _stream_documents(source.path, reading, watch)
    for document in documents:
        if len(document) > MAX_DOCUMENT_BYTES:
            raise DataError(
                f"{source.name} has a document of {len(document)} bytes, at most {MAX_DOCUMENT_BYTES} are "
                "taken; cut it into shorter ones"
            )
        if document.strip():
            yield document


def _format(path: Path) -> str | None:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in PACKED_SUFFIXES:
        suffixes.pop()
    last = suffixes[-1] if suffixes else ""
    if last in LINES_SUFFIXES:
        return "jsonl"
    return "parquet" if last == ".parquet" else "text" if last in TEXT_SUFFIXES else None


def _stream_documents(path: Path, reading: Reading, watch: Callable[[int], None] | None) -> Iterator[bytes]:
    """Documents of a text or jsonl file, unpacked on the way."""
    try:
        with path.open("rb") as raw, _unpacked(raw, path) as stream:
            told = (lambda: watch(raw.tell())) if watch is not None else (lambda: None)
            if _format(path) == "jsonl":
                yield from _lines(stream, path, reading.field, told)
            else:
                yield from _texts(stream, path, reading.document_start, told)
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
        raise DataError(f"{path} is truncated or damaged: {error}; fetch it again") from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from None


@contextmanager
def _unpacked(raw: IO[bytes], path: Path) -> Iterator[IO[bytes]]:
    suffix = path.suffix.lower()
    if suffix == ".gz":
        with gzip.GzipFile(fileobj=raw) as unpacked:
            yield unpacked  # type: ignore[misc]
    elif suffix == ".xz":
        with lzma.LZMAFile(raw) as stream:
            yield stream
    elif suffix == ".zst":
        try:
            import zstandard
        except ImportError:
            raise DataError("zst files need the extra: pip install 'blocktrain[data]'") from None
        try:
            # The window is bounded, or a file of a few bytes could ask for 2 GB.
            yield io.BufferedReader(
                zstandard.ZstdDecompressor(max_window_size=128 << 20).stream_reader(
                    raw, read_across_frames=True, closefd=False
                )
            )
        except zstandard.ZstdError as error:
            raise DataError(f"{path} is truncated or damaged: {error}; fetch it again") from None
    else:
        yield raw


def _texts(stream: IO[bytes], path: Path, start: str | None, told: Callable[[], None]) -> Iterator[bytes]:
    """A text file's documents. A file of up to WHOLE_FILE_BYTES is one; a longer one is cut before each
    `start`, or else at the last blank line (or line end, or character) within PIECE_BYTES."""
    mark = start.encode() if start is not None else None
    buffer, offset, is_long, ended = b"", 0, False, False

    def checked(piece: bytes) -> bytes:
        try:
            piece.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{path} is not UTF-8 text (byte {offset + error.start}); convert it first"
            ) from None
        if b"\0" in piece:
            raise DataError(f"{path} holds NUL bytes, so it is not text; expected UTF-8 text")
        return piece

    while not ended:
        chunk = stream.read(CHUNK_BYTES)
        ended = not chunk
        buffer += chunk
        told()
        is_long = is_long or len(buffer) > WHOLE_FILE_BYTES
        position = 0  # where the next document begins in the buffer
        while position < len(buffer):
            if mark is not None:
                end = buffer.find(mark, position + 1)
                if end < 0 and len(buffer) - position > MAX_DOCUMENT_BYTES:
                    raise DataError(
                        f"{path} has no {start!r} within {MAX_DOCUMENT_BYTES} bytes; "
                        "choose another --document-start"
                    )
            elif is_long and len(buffer) - position > PIECE_BYTES:
                end = _cut(buffer, position, position + PIECE_BYTES)
            else:
                end = -1
            if end < 0:
                if not ended:
                    break
                end = len(buffer)
            yield checked(buffer[position:end])
            offset += end - position
            position = end
        buffer = buffer[position:]
    if offset == 0:
        raise DataError(f"{path} is empty; expected UTF-8 text")


def _cut(buffer: bytes, start: int, limit: int) -> int:
    """The best place to cut in (start, limit]: behind a blank line, behind a line, before a character."""
    for end in (b"\n\n", b"\n"):
        # A cut in the first quarter would make crumbs where paragraphs are long.
        found = buffer.rfind(end, start + PIECE_BYTES // 4, limit)
        if found >= 0:
            return found + len(end)
    while limit > start + 1 and buffer[limit] & 0xC0 == 0x80 and limit > start + PIECE_BYTES - 4:
        limit -= 1
    return limit


def _lines(stream: IO[bytes], path: Path, field: str, told: Callable[[], None]) -> Iterator[bytes]:
    number = 0
    while line := stream.readline(2 * MAX_DOCUMENT_BYTES):
        number += 1
        told()
        if len(line) >= 2 * MAX_DOCUMENT_BYTES:
            raise DataError(
                f"{path} line {number} is longer than {2 * MAX_DOCUMENT_BYTES} bytes; cut it shorter"
            )
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path} line {number} is not JSON ({error}); repair or remove it") from None
        if not isinstance(row, dict) or not isinstance(row.get(field), str):
            known = (
                ", ".join(list(row)[:8]) if isinstance(row, dict) else f"no object but {type(row).__name__}"
            )
            raise DataError(
                f"{path} line {number} has no text in field {field!r} (it has {known}); name one with --field"
            )
        yield row[field].encode("utf-8", "replace")
    if number == 0:
        raise DataError(f"{path} is empty; expected JSON lines")


def _parquet_rows(path: Path, field: str, watch: Callable[[int], None] | None) -> Iterator[bytes]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError("parquet files need the extra: pip install 'blocktrain[data]'") from None
    try:
        with path.open("rb") as raw, pyarrow.parquet.ParquetFile(raw, buffer_size=CHUNK_BYTES) as file:
            kind = file.schema_arrow.field(field).type if field in file.schema_arrow.names else None
            if kind is None or not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
                known = ", ".join(file.schema_arrow.names[:8])
                raise DataError(
                    f"{path} has no text column {field!r} (it has {known}); name one with --field"
                )
            for batch in file.iter_batches(batch_size=256, columns=[field], use_threads=False):
                if watch is not None:
                    watch(raw.tell())
                for value in batch.column(0):
                    yield (value.as_py() or "").encode("utf-8", "replace")
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as parquet: {error}; fetch it again") from None


def _hugging_face_rows(name: str, field: str) -> Iterator[bytes]:
    """Rows of the split `train` of NAME[:CONFIG], as they come over the network."""
    try:
        from datasets import load_dataset
    except ImportError:
        raise DataError("hf: sources need the extra: pip install 'blocktrain[datasets]'") from None
    name, _, configuration = name.partition(":")
    try:
        rows: Any = load_dataset(name, configuration or None, split="train", streaming=True)
        for row in rows:
            if not isinstance(row.get(field), str):
                raise DataError(
                    f"hf:{name} has no text in field {field!r} (it has {', '.join(row)}); use --field"
                )
            yield row[field].encode("utf-8", "replace")
    except DataError:
        raise
    except Exception as error:  # the library raises a dozen unrelated types
        raise DataError(f"cannot read dataset {name!r} from Hugging Face: {error}") from None
