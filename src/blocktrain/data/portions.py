"""A portion of documents to tokens: the part of preparing that uses processors, in processes of its own.

    python -m blocktrain.data.portions OUT WORK    (started by prepare; portions on stdin, answers on stdout)

Processes and not threads, because most of the work is Python's own; pipes and no pickle. What a portion
becomes depends on the portion and the scan alone, so any number of processes gives the same bytes. A process
ends when its stdin does, so none outlives a preparation that was killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save

import blocktrain
from blocktrain.data.bpe import FileTokenizer
from blocktrain.data.clusters import Clustering, word_counts
from blocktrain.data.dataset import BYTE_SEPARATOR, TOKENIZER
from blocktrain.data.similarity import SketchIndex, sketch
from blocktrain.data.tokenizer import ByteTokenizer
from blocktrain.errors import BlocktrainError, DataError
from blocktrain.files import write_whole

SCAN = "scan.safetensors"
TRAINING, POOLING, HELD_OUT = 0, 1, 2
"""Splits by the number they have on the way, in the order of dataset.SPLITS."""
LEFT_OUT = -1
_LENGTHS = struct.Struct("<II")


@dataclass(frozen=True)
class Scan:
    """What the first reading of the sources found; the second needs all of it."""

    held_out_below: int
    """A document is held out if its key is below this."""
    pooling_below: int
    held_out_sketches: int
    """How many of the index's documents are held-out ones; the rest are pooling ones."""
    documents: int
    text_bytes: int
    keys_sum: int
    """Over all documents, modulo 2^64: the second reading must find the same ones."""
    index: SketchIndex
    clustering: Clustering | None

    def write(self, folder: Path) -> None:
        arrays: dict[str, Any] = {
            "hashes": self.index.hashes,
            "owners": self.index.owners,
            "sizes": self.index.sizes,
        }
        if self.clustering is not None:
            arrays |= {"weights": self.clustering.weights, "centroids": self.clustering.centroids}
        numbers = {
            name: str(getattr(self, name))
            for name in (
                "held_out_below",
                "pooling_below",
                "held_out_sketches",
                "documents",
                "text_bytes",
                "keys_sum",
            )
        }
        write_whole(folder / SCAN, save(arrays, numbers))

    @classmethod
    def read(cls, folder: Path) -> Scan:
        with safe_open(str(folder / SCAN), framework="numpy") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            numbers = {name: int(value) for name, value in file.metadata().items()}
        index = SketchIndex(arrays["hashes"], arrays["owners"], arrays["sizes"])
        fitted = Clustering(arrays["weights"], arrays["centroids"]) if "weights" in arrays else None
        return cls(**numbers, index=index, clustering=fitted)


@dataclass(frozen=True)
class Portion:
    documents: list[bytes]
    splits: list[int]
    """One of TRAINING, POOLING, HELD_OUT for each document."""


@dataclass(frozen=True)
class Encoded:
    labels: list[int]
    """Each document's cluster, or LEFT_OUT."""
    sizes: list[int]
    """Bytes of each document's tokens, separator included; 0 if left out."""
    tokens: bytes


class Encoder:
    """Portions to tokens in this process."""

    def __init__(self, scan: Scan, tokenizer: FileTokenizer | ByteTokenizer) -> None:
        self.scan, self.tokenizer = scan, tokenizer
        if isinstance(tokenizer, FileTokenizer):
            self.separator = np.array(tokenizer.separator, tokenizer.dtype).tobytes()
        else:
            self.separator = bytes(BYTE_SEPARATOR)

    def encode(self, portion: Portion) -> Encoded:
        labels = []
        for document, split in zip(portion.documents, portion.splits, strict=True):
            label = 0
            # Pooling text must not repeat held-out text; training text must repeat neither.
            among = self.scan.held_out_sketches if split == POOLING else None
            if split != HELD_OUT and self.scan.index.has_near_duplicate(sketch(document), among=among):
                label = LEFT_OUT
            elif self.scan.clustering is not None:
                label = self.scan.clustering.label(word_counts(document))
            labels.append(label)
        kept = [doc for doc, label in zip(portion.documents, labels, strict=True) if label != LEFT_OUT]
        if isinstance(self.tokenizer, FileTokenizer):
            encoded = iter(self.tokenizer.encode_documents([document.decode() for document in kept]))
        else:
            encoded = iter(kept)
        parts = [b"" if label == LEFT_OUT else next(encoded) + self.separator for label in labels]
        return Encoded(labels, [len(part) for part in parts], b"".join(parts))


class EncoderProcess:
    """An Encoder in another process; one portion at a time."""

    def __init__(self, out: Path, work: Path) -> None:
        path = os.pathsep.join([str(Path(blocktrain.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
        environment = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "blocktrain.data.portions", str(out), str(work)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **environment},
        )

    def encode(self, portion: Portion) -> Encoded:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        header = {"sizes": [len(one) for one in portion.documents], "splits": portion.splits}
        try:
            _send(self.process.stdin, header, b"".join(portion.documents))
            answer = _receive(self.process.stdout)
        except OSError:
            answer = None
        if answer is None:
            raise BlocktrainError(
                f"a tokenizing process ended (exit code {self.process.wait()}), perhaps for want of memory; "
                "run the same command again, with fewer --processes"
            )
        told, tokens = answer
        return Encoded(told["labels"], told["sizes"], tokens)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                # Half a portion may wait in it for a killed process; that raises, and would hide why.
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def _send(pipe: IO[bytes], header: dict[str, list[int]], body: bytes) -> None:
    packed = json.dumps(header).encode()
    pipe.write(_LENGTHS.pack(len(packed), len(body)) + packed)
    pipe.write(body)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> tuple[dict[str, list[int]], bytes] | None:
    lengths = pipe.read(_LENGTHS.size)
    if len(lengths) < _LENGTHS.size:
        return None
    header_length, body_length = _LENGTHS.unpack(lengths)
    header, body = pipe.read(header_length), pipe.read(body_length)
    return (json.loads(header), body) if len(body) == body_length else None


def open_tokenizer(out: Path, kind: str) -> FileTokenizer | ByteTokenizer:
    return ByteTokenizer() if kind == "byte" else FileTokenizer.open(out / TOKENIZER)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then closes the pipe
    out, work = map(Path, sys.argv[1:])
    encoder = Encoder(Scan.read(work), open_tokenizer(out, "file" if (out / TOKENIZER).exists() else "byte"))
    while (received := _receive(sys.stdin.buffer)) is not None:
        header, body = received
        ends = np.cumsum([0, *header["sizes"]]).tolist()
        documents = [body[a:b] for a, b in zip(ends, ends[1:], strict=False)]
        done = encoder.encode(Portion(documents, header["splits"]))
        try:
            _send(sys.stdout.buffer, {"labels": done.labels, "sizes": done.sizes}, done.tokens)
        except BrokenPipeError:
            os._exit(0)  # the parent is gone


if __name__ == "__main__":
    try:
        main()
    except DataError as error:
        sys.exit(f"blocktrain: {error}")
