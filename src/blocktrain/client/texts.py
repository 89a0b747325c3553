"""The run's text from its coordinator: files by their hash, kept in the bounded cache, checked before use.

A worker fetches the training shards of its assignments and no others; a judge also held-out and pooling
shards. Covered: a download that breaks (it goes on where it stopped, also after a kill), a shard that is
flipped, cut or another one (refused by its hash and fetched again), a manifest of a stranger, a full disk.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from blocktrain.client.cache import BlobCache
from blocktrain.client.coordinator import CoordinatorClient
from blocktrain.client.traffic import Kind
from blocktrain.data.bpe import MAX_TOKENIZER_BYTES
from blocktrain.data.dataset import (
    MAX_MANIFEST_BYTES,
    RunText,
    ShardEntry,
    TokenArray,
    check_shard,
    checked_tokenizer,
    mapped,
    read_manifest,
)
from blocktrain.data.tokenizer import ByteTokenizer, Tokenizer
from blocktrain.errors import DataError, StorageError, WireError
from blocktrain.ids import CorpusHash
from blocktrain.wire.messages import RunAnswer

DOWNLOAD_ATTEMPTS = 3


class FetchedText(RunText):
    def __init__(
        self,
        client: CoordinatorClient,
        run: RunAnswer,
        cache: BlobCache,
        report: Callable[[str], None],
        *,
        judge: bool = False,
    ) -> None:
        """`judge`: the client's key may have held-out text too."""
        assert run.dataset is not None
        self._client, self._cache, self._report, self._judge = client, cache, report, judge
        self.sha256 = CorpusHash(run.corpus_sha256)
        content = client.fetch(f"/v1/data/{run.dataset}", MAX_MANIFEST_BYTES)
        if hashlib.sha256(content).hexdigest() != run.dataset:
            raise DataError("the coordinator served another manifest than it names; ask its operator")
        self.manifest = read_manifest(content, "the run's manifest")
        if self.manifest.vocabulary != run.vocabulary:
            raise DataError(
                f"the run is said to have {run.vocabulary} tokens, its manifest has "
                f"{self.manifest.vocabulary}; ask its operator"
            )
        self._checked: set[str] = set()
        # The next assignment's shards are fetched while the trainer may open one of its own.
        self._fetching = threading.Lock()

    def bring(self, files: Iterable[int]) -> None:
        """Have these training files on the disk before an assignment that draws from them begins."""
        for index in files:
            self.tokens(self.manifest.training[index])

    def tokens(self, entry: ShardEntry) -> TokenArray:
        def check(path: Path) -> None:
            check_shard(path, entry, self.manifest)

        path = self._file(entry.sha256, entry.tokens * self.manifest.dtype.itemsize, check)
        # A mapped file stays readable when the cache deletes it to make room.
        return mapped(path, entry, self.manifest)

    def tokenizer(self) -> Tokenizer:
        wanted = self.manifest.tokenizer
        if wanted == "byte":
            return ByteTokenizer()
        path = self._file(wanted, MAX_TOKENIZER_BYTES, lambda path: None)
        return checked_tokenizer(path, wanted)

    def _file(self, sha256: str, max_bytes: int, check: Callable[[Path], None]) -> Path:
        name = f"{sha256}.text"
        with self._fetching:
            path = self._cache.path(name)
            if path is not None and sha256 in self._checked:
                return path
            try:
                for _ in range(DOWNLOAD_ATTEMPTS):
                    if path is None:
                        target = self._cache.partial(name)
                        where = f"/v1/{'judge/' if self._judge else ''}data/{sha256}"
                        self._client.download(where, target, max_bytes, Kind.TEXT, signed=self._judge)
                        path = target
                    try:
                        check(path)
                    except DataError as error:
                        self._report(f"a file of the text is damaged ({error}); downloading it again")
                        self._cache.remove(name)
                        path = None
                        continue
                    self._checked.add(sha256)
                    if path.name != name:
                        path = self._cache.complete(name)
                    return path
            except OSError as error:
                raise StorageError(
                    f"cannot keep the run's text in {self._cache.folder}: {error.strerror or error}; free "
                    "some space or name another --data-dir: what is there is not fetched again"
                ) from None
        raise WireError(
            f"file {sha256[:12]} of the text came damaged {DOWNLOAD_ATTEMPTS} times; the coordinator, or "
            "something on the way to it, changes what it serves: ask its operator"
        )
