"""Blobs on the worker's disk by name, bounded in size: snapshots, payloads, unfinished downloads.

A name is a hash, so a blob never changes. What is damaged is found by whoever reads it (it checks the
hash) and removed; the oldest used go first when the bound is reached. Files appear whole or not at all.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from blocktrain.errors import StorageError
from blocktrain.files import write_whole

PARTIAL_SUFFIX = ".partial"


class BlobCache:
    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder, self.max_bytes = folder, max_bytes

    def path(self, name: str) -> Path | None:
        """The blob's file, marked as used; None if it is not here."""
        path = self.folder / name
        try:
            # Last use and not last write: the snapshot that frozen blocks are read from stays, however old.
            os.utime(path)
        except FileNotFoundError:
            return None
        return path

    def read(self, name: str) -> bytes | None:
        path = self.path(name)
        return path.read_bytes() if path is not None else None

    def put(self, name: str, content: bytes) -> Path:
        """From any thread: two may put the same blob at the same time."""
        path = self.folder / name
        try:
            # Not durable: a blob is checked by its hash when it is read, and fetched again where it is torn.
            write_whole(path, content, durable=False)
        except OSError as error:
            raise StorageError(
                f"cannot write {path}: {error.strerror or error}; free some space or name another --data-dir"
            ) from None
        self.trim(keep=path)
        return path

    def partial(self, name: str) -> Path:
        """Where an unfinished download of `name` lies, from whatever byte it has reached."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return self.folder / (name + PARTIAL_SUFFIX)

    def complete(self, name: str) -> Path:
        path = self.folder / name
        os.replace(self.folder / (name + PARTIAL_SUFFIX), path)
        self.trim(keep=path)
        return path

    def remove(self, name: str) -> None:
        (self.folder / name).unlink(missing_ok=True)
        (self.folder / (name + PARTIAL_SUFFIX)).unlink(missing_ok=True)

    def trim(self, keep: Path) -> None:
        """Remove the least recently used until the bound holds; `keep` stays whatever its size."""
        entries = []
        for path in self.folder.iterdir():
            # Another thread may have renamed or removed it since the folder was listed.
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                entries.append((status.st_mtime_ns, status.st_size, path))
        total = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries):
            if total <= self.max_bytes:
                break
            if path != keep:
                path.unlink(missing_ok=True)
                total -= size
