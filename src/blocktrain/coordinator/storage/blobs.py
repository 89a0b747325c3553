"""Snapshots and payloads as objects named by their hash: in a folder, in S3, or in memory.

A key is made from hex only, so no peer can choose a path. An object is written whole before any row
points to it, and never changed afterwards. On S3 a worker uploads to `uploads/` by presigned URL; the
object gets its lasting name only after the coordinator has read it and its hash was right.

Covered: partial writes, missing objects, storage that does not answer. Not covered: an operator who edits
the folder or bucket by hand (`blocktrain ledger verify` finds that).
"""

from __future__ import annotations

import math
import os
import secrets
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime, timedelta
from itertools import chain
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

import numpy as np
import obstore
from obstore.exceptions import BaseError
from obstore.store import LocalStore, MemoryStore, ObjectStore, S3Store

from blocktrain.errors import StorageError, UserError
from blocktrain.wire.byte_source import PIECE_BYTES, ByteSource, FileBytes, file_source, pieces
from blocktrain.wire.messages import MAX_UPLOAD_PARTS

CHUNK_BYTES = 1 << 20
PRESIGNED_SECONDS = 900
REQUEST_TIMEOUT = "60s"
DRAFTS = "drafts"
PART_BYTES = 16 << 20
"""What is sent again when a line breaks: 7 s at 20 Mbit/s, where a payload of 2 GB takes 13 minutes."""


def snapshot_key(snapshot_hash: str) -> str:
    return f"snapshots/{snapshot_hash}.safetensors"


def payload_key(payload_hash: str) -> str:
    return f"payloads/{payload_hash}"


def text_key(sha256: str) -> str:
    return f"text/{sha256}"


def upload_key(update_id: str) -> str:
    return f"uploads/{update_id}"


def part_lengths(update_id: str, payload_bytes: int) -> dict[str, int]:
    """Key and bytes of each object that a large payload is uploaded as; none for one that is sent whole."""
    each = max(PART_BYTES, math.ceil(payload_bytes / MAX_UPLOAD_PARTS))
    if payload_bytes <= each:
        return {}
    starts = range(0, payload_bytes, each)
    return {f"{upload_key(update_id)}/{i}": min(each, payload_bytes - at) for i, at in enumerate(starts)}


class BlobMissing(StorageError):
    """An object that a row names is not there."""


class Blobs:
    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self.shared = isinstance(store, S3Store)
        """Whether workers can reach the objects by presigned URL."""
        self._folder = store.prefix if isinstance(store, LocalStore) else None

    @classmethod
    def from_url(cls, url: str) -> Blobs:
        """A folder, `file://FOLDER`, `s3://BUCKET/PREFIX` (with the usual AWS_* variables) or `memory://`."""
        scheme = urlsplit(url).scheme
        if scheme in ("s3", "s3a"):
            # Without TLS only where the operator's own endpoint says http://, as a local MinIO does.
            plain = os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://")
            options = {"timeout": REQUEST_TIMEOUT, "connect_timeout": "10s", "allow_http": plain}
            retries = {"max_retries": 4, "retry_timeout": timedelta(seconds=60)}
            return cls(S3Store.from_url(url, client_options=options, retry_config=retries))  # type: ignore[arg-type]
        if scheme == "memory":
            return cls(MemoryStore())
        if scheme not in ("", "file"):
            raise UserError(f"blobs {url!r}: expected a folder, s3://BUCKET/PREFIX or memory://")
        folder = Path(urlsplit(url).path if scheme == "file" else url).absolute()
        with _translated(str(folder)):
            folder.mkdir(parents=True, exist_ok=True)
            return cls(LocalStore(folder))

    def put(self, key: str, content: bytes | memoryview) -> None:
        with _translated(key):
            # In one piece: an object appears whole or not at all, in a folder (renamed) and on S3 alike.
            obstore.put(self._store, key, content, use_multipart=False)
            self._flush(key)

    def _flush(self, key: str) -> None:
        # To the disk, not just to the kernel: the row that will name the object is flushed too.
        if self._folder is not None:
            with open(self._folder / key, "rb+") as file:
                os.fsync(file.fileno())

    def put_source(self, key: str, source: ByteSource) -> None:
        """In pieces: a payload may be as large as its block. It appears whole or not at all, as by `put`."""
        if len(source) <= PIECE_BYTES:
            return self.put(key, source[0 : len(source)].data)
        with _translated(key):
            obstore.put(self._store, key, pieces(source))
            self._flush(key)
        return None

    @contextmanager
    def draft(self) -> Iterator[IO[bytes]]:
        """A file to write a large object into before it has its name; gone afterwards, unless published."""
        if self._folder is None:
            with tempfile.TemporaryFile() as file:
                yield file
            return
        # Beside the objects, so that publishing is a rename and not a copy.
        path = self._folder / DRAFTS / secrets.token_hex(8)
        with _translated("a draft"):
            path.parent.mkdir(exist_ok=True)
            draft = path.open("x+b")
        try:
            with draft:
                yield draft
        finally:
            path.unlink(missing_ok=True)

    def publish(self, key: str, draft: IO[bytes]) -> None:
        draft.flush()
        if self._folder is None:
            return self.put_source(key, FileBytes(draft))
        with _translated(key):
            os.fsync(draft.fileno())
            (self._folder / key).parent.mkdir(exist_ok=True)
            os.replace(draft.name, self._folder / key)
        return None

    def put_file(self, key: str, path: Path) -> None:
        """In pieces: a shard of a dataset may be larger than memory."""
        with _translated(key):
            obstore.put(self._store, key, path)

    def get(self, key: str) -> bytes:
        with _translated(key):
            return bytes(obstore.get(self._store, key).bytes())

    def get_range(self, key: str, start: int, end: int) -> bytes:
        """Bytes start..end (end not included)."""
        with _translated(key):
            return bytes(obstore.get_range(self._store, key, start=start, end=end))

    @contextmanager
    def opened(self, key: str, max_bytes: int | None = None) -> Iterator[ByteSource]:
        """The object, to be read where it is needed; what lies on another machine is fetched to disk first,
        and no longer than a little over `max_bytes`: an upload can grow after its size was asked for."""
        if isinstance(self._store, MemoryStore):
            yield np.frombuffer(self.get(key), np.uint8)
            return
        if self._folder is None:
            with self.joined([key], max_bytes) as source:
                yield source
            return
        with ExitStack() as stack:
            with _translated(key):
                file = stack.enter_context(open(self._folder / key, "rb"))
            yield file_source(file)

    @contextmanager
    def joined(self, keys: Sequence[str], max_bytes: int | None = None) -> Iterator[ByteSource]:
        """Objects of another machine one after the other, fetched to disk as by `opened`."""
        with ExitStack() as stack:
            with _translated(keys[0]):
                file = stack.enter_context(tempfile.TemporaryFile())
                for piece in chain.from_iterable(map(self.pieces, keys)):
                    file.write(piece)
                    if max_bytes is not None and file.tell() > max_bytes:
                        break
            yield file_source(file)

    def size(self, key: str) -> int | None:
        """Bytes of the object, or None where there is none."""
        try:
            with _translated(key):
                return obstore.head(self._store, key)["size"]
        except BlobMissing:
            return None

    def sizes(self, prefix: str) -> dict[str, int]:
        """Bytes of each object whose key begins so."""
        with _translated(prefix):
            listed = chain.from_iterable(obstore.list(self._store, prefix))
            return {found["path"]: found["size"] for found in listed}

    async def stream(self, key: str, start: int, end: int) -> AsyncIterator[bytes]:
        """Bytes start..end (end not included) in pieces."""
        with _translated(key):
            found = await obstore.get_async(self._store, key, options={"range": (start, end)})
            async for piece in found.stream(min_chunk_size=CHUNK_BYTES):
                yield bytes(piece)

    def pieces(self, key: str) -> Iterator[bytes]:
        with _translated(key):
            for piece in obstore.get(self._store, key).stream(min_chunk_size=CHUNK_BYTES):
                yield bytes(piece)

    def delete(self, key: str) -> None:
        """Safe to repeat."""
        try:
            with _translated(key):
                obstore.delete(self._store, key)
        except BlobMissing:
            pass

    def delete_older(self, prefix: str, before: datetime) -> None:
        """Parts of one upload go together, by the age of the newest: on a slow line they come for hours."""
        newest: dict[str, datetime] = {}
        with _translated(prefix):
            listed = list(chain.from_iterable(obstore.list(self._store, prefix)))
            whole = [found["path"].removeprefix(prefix).partition("/")[0] for found in listed]
            for name, found in zip(whole, listed, strict=True):
                newest[name] = max(found["last_modified"], newest.get(name, found["last_modified"]))
            for name, found in zip(whole, listed, strict=True):
                if newest[name] < before:
                    obstore.delete(self._store, found["path"])

    def presigned_put(self, key: str) -> str:
        return self._sign("PUT", key)

    def presigned_get(self, key: str) -> str:
        return self._sign("GET", key)

    def _sign(self, method: str, key: str) -> str:
        assert self.shared, "only shared stores presign"
        with _translated(key):
            lifetime = timedelta(seconds=PRESIGNED_SECONDS)
            return obstore.sign(self._store, method, key, expires_in=lifetime)  # type: ignore[call-overload,no-any-return]


@contextmanager
def _translated(what: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise BlobMissing(f"{what} is not in the blob store; was the folder or bucket changed?") from None
    except (OSError, BaseError) as error:
        # obstore adds pages of request details below the first line.
        first_line = str(error).partition("\n")[0]
        raise StorageError(f"the blob store does not answer for {what}: {first_line}") from error
