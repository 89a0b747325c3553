"""The one way this project writes a file, and the one lock on a folder.

A crash, a kill or a full disk leaves the old file or the new one, never a torn one. Errors are OSErrors,
as only the caller knows what to tell the operator. Not covered: network mounts that lie about fsync.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from blocktrain.errors import StorageError, UserError

# What os.link says on file systems without hard links (exFAT, Google Drive, some network mounts).
_NO_HARD_LINKS = {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK, errno.EACCES, errno.EINVAL}


def write_whole(path: Path, content: bytes | memoryview, *, durable: bool = True) -> None:
    """Make or replace a file; any number of threads and processes may do so at once, the last one stays.

    `durable` waits for the disk. Without it a power cut may leave an empty file, which is enough for what is
    checked by hash when it is read again.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = _draft(path)
    try:
        _write_new(draft, content, 0o666, durable=durable)
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def create_private(path: Path, content: bytes) -> None:
    """Make a file that only its owner may read; where another process was first, its file stays."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = _draft(path)
    try:
        _write_new(draft, content, 0o600)
        # A link, unlike a rename, fails where the name is taken: two processes that start at once must
        # not each go on with a key of their own.
        os.link(draft, path)
    except FileExistsError:
        pass
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS or not draft.exists():
            raise
        # The second best: the name is still taken by one alone, but a kill in here leaves a torn file.
        with suppress(FileExistsError):
            _write_new(path, content, 0o600)
    finally:
        draft.unlink(missing_ok=True)


def _draft(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")


def _write_new(path: Path, content: bytes | memoryview, mode: int, *, durable: bool = True) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    with os.fdopen(os.open(path, flags, mode), "wb") as file:
        file.write(content)
        file.flush()
        if durable:
            os.fsync(file.fileno())


@contextmanager
def locked_file(path: Path, taken: str) -> Iterator[None]:
    """Keep other processes out while the body runs; `taken` is what the second one is told. The lock ends
    with the process, however it ends, so a kill leaves nothing to clean up."""
    try:
        import fcntl
    except ImportError:  # Windows: nobody is kept out
        yield
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("wb")
    except OSError as error:
        raise StorageError(f"cannot use {path.parent}: {error.strerror}; name another folder") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(taken) from None
        yield


def is_locked(path: Path) -> bool:
    """Whether some process is inside `locked_file` of this path; False where the system cannot tell."""
    try:
        import fcntl

        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (ImportError, OSError):
        return False
    return False


@contextmanager
def explained_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        remedy = "choose another folder"
        if error.errno in (None, errno.ENOSPC, errno.EDQUOT, errno.EFBIG):  # None: of safetensors
            remedy = f"free some space or {remedy}, then run it again (`train` goes on with --resume)"
        raise StorageError(f"cannot write {path}: {error.strerror or error}; {remedy}") from error
