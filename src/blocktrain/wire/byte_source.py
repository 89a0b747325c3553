"""Bytes that are read where they are needed: an array, or a file that is too large for memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import IO, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from blocktrain.errors import StorageError

PIECE_BYTES: Final = 1 << 20
SMALL_BYTES: Final = 1 << 16
"""What is no longer than this is held in memory, as a socket's buffer holds as much anyway. A small payload
is decoded in some forty reads, and each of a file lets another thread have the interpreter."""


class ByteSource(Protocol):
    """What a one-dimensional array of bytes can do, too."""

    def __len__(self) -> int: ...
    def __getitem__(self, span: slice, /) -> NDArray[np.uint8]: ...


class FileBytes:
    """An open file as a source. It is read at an offset, so that several threads may read it at once."""

    def __init__(self, file: IO[bytes]) -> None:
        file.flush()
        self._file = file
        self._length = os.fstat(file.fileno()).st_size

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, span: slice, /) -> NDArray[np.uint8]:
        start, stop, _ = span.indices(self._length)
        found = os.pread(self._file.fileno(), max(0, stop - start), start)
        if len(found) != max(0, stop - start):
            raise StorageError(f"a file of {self._length} bytes got shorter while it was read")
        return np.frombuffer(found, np.uint8)


def file_source(file: IO[bytes]) -> ByteSource:
    source = FileBytes(file)
    return source if len(source) > SMALL_BYTES else source[0:SMALL_BYTES]


def pieces(source: ByteSource) -> Iterator[memoryview]:
    for start in range(0, len(source), PIECE_BYTES):
        yield source[start : start + PIECE_BYTES].data
