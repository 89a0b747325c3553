"""Blobs on the disk by name, bounded in size: snapshots, payloads, text, unfinished downloads.

A name is a hash, so a blob never changes. What is damaged is found by its reader (which checks the
hash) and removed; the oldest used go first when the bound is reached. Files appear whole or not at all.

A worker's bound is for everything it writes, so that no coordinator can fill its disk: the cache counts the
folders of all runs in the worker's data folder, and training state asks it for room too.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from blocktrain.errors import StorageError
from blocktrain.files import is_locked, write_whole

PARTIAL_SUFFIX = ".partial"
LOCK_FILE = "lock"
RUN_FOLDER = re.compile("[0-9a-f]{16}")
STATE_SUFFIXES = (".optimizer", ".feedback")


class BlobCache:
    def __init__(self, folder: Path, max_bytes: int, data_dir: Path | None = None) -> None:
        """`data_dir`: a worker's data folder, whose run folders all count, and what does not fit is refused;
        without it the blobs alone count, and the newest is kept whatever its size."""
        self.folder, self.max_bytes, self.data_dir = folder, max_bytes, data_dir
        self._writing = threading.RLock()
        self._expected: dict[Path, int] = {}
        """Downloads under way, and how long each may become."""

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
            with self.room(len(content)):
                # Not durable: a blob is checked by its hash when it is read, and fetched again where it is
                # torn.
                write_whole(path, content, durable=False)
        except OSError as error:
            raise StorageError(
                f"cannot write {path}: {error.strerror or error}; free some space or name another --data-dir"
            ) from None
        return path

    def partial(self, name: str, max_bytes: int) -> Path:
        """Where a download of `name` goes on, from whatever byte it has reached; there is room for all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / (name + PARTIAL_SUFFIX)
        begun = path.stat().st_size if path.exists() else 0
        with self.room(max(0, max_bytes - begun), keep=path):
            self._expected[path] = max_bytes
        return path

    def complete(self, name: str) -> Path:
        path = self.folder / name
        partial = self.folder / (name + PARTIAL_SUFFIX)
        with self._writing:
            os.replace(partial, path)
            self._expected.pop(partial, None)
        return path

    def remove(self, name: str) -> None:
        """Also a download of it that is given up."""
        (self.folder / name).unlink(missing_ok=True)
        partial = self.folder / (name + PARTIAL_SUFFIX)
        partial.unlink(missing_ok=True)
        self._expected.pop(partial, None)

    @contextmanager
    def room(self, num_bytes: int, keep: Path | None = None) -> Iterator[None]:
        """Remove the least recently used files until so many bytes fit; while the body writes them, nobody
        else takes the room."""
        with self._writing:
            used = dict(self._expected)
            ages: list[tuple[int, Path]] = []
            for path in self._files():
                # Another thread may have renamed or removed it since the folder was listed.
                with suppress(FileNotFoundError):
                    status = path.stat()
                    used[path] = max(status.st_size, self._expected.get(path, 0))
                    ages.append((status.st_mtime_ns, path))
            total = sum(used.values())
            for _, path in sorted(ages):
                if total + num_bytes <= self.max_bytes:
                    break
                if path != keep and path not in self._expected and self._may_go(path):
                    path.unlink(missing_ok=True)
                    total -= used[path]
            if self.data_dir is not None and total + num_bytes > self.max_bytes:
                raise StorageError(
                    f"{num_bytes / 1e6:.1f} MB more do not fit into {self.data_dir}: --cache-gb allows "
                    f"{self.max_bytes / 1e9:g} GB in all, and {total / 1e6:.1f} MB are in use; name a larger "
                    "--cache-gb"
                )
            yield

    def _files(self) -> Iterator[Path]:
        """All files that count."""
        if self.data_dir is None:
            yield from self.folder.iterdir() if self.folder.exists() else ()
            return
        for run in self.data_dir.iterdir() if self.data_dir.exists() else ():
            # Exactly what a worker makes: nothing else in a folder that a person named is ours to remove.
            if RUN_FOLDER.fullmatch(run.name) and (run / LOCK_FILE).exists():
                yield from (path for path in run.rglob("*") if path.is_file())

    def _may_go(self, path: Path) -> bool:
        """Blobs may, and state that was used longest ago: of other runs and blocks, as a rule. A worker that
        comes back to such a block begins it without, as a newcomer does. Of the present run the receipts and
        some names stay, and of a run that another worker is in, everything."""
        if path.parent == self.folder or self.data_dir is None:
            return True
        run = self.data_dir / path.relative_to(self.data_dir).parts[0]
        if run == self.folder.parent:
            return path.suffix in STATE_SUFFIXES
        return path.name != LOCK_FILE and not is_locked(run / LOCK_FILE)
