"""The run's text from its mirrors and its coordinator: files kept in the bounded cache, checked before use.

A worker fetches the training shards of its assignments and no others; a judge also held-out and pooling
shards. Covered: a download that breaks (it goes on where it stopped, also after a kill), a shard that is
flipped, cut or another one (refused by its hash and fetched again elsewhere), a mirror that serves something
else, a manifest of a stranger, a full disk. Not covered: a mirror so slow that the work waits for it.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from blocktrain.client.cache import BlobCache
from blocktrain.client.coordinator import CoordinatorClient
from blocktrain.client.places import ForbiddenPlace
from blocktrain.client.run import run_setup
from blocktrain.client.traffic import Kind
from blocktrain.data.bpe import MAX_TOKENIZER_BYTES
from blocktrain.data.dataset import (
    MAX_MANIFEST_BYTES,
    TOKENIZER,
    Manifest,
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


def fetched_manifest(client: CoordinatorClient, run: RunAnswer) -> Manifest:
    content = client.fetch(f"/v1/data/{run.dataset}", MAX_MANIFEST_BYTES)
    if hashlib.sha256(content).hexdigest() != run.dataset:
        raise DataError("the coordinator served another manifest than it names; ask its operator")
    manifest = read_manifest(content, "the run's manifest")
    if manifest.vocabulary != run.vocabulary:
        raise DataError(
            f"the run is said to have {run.vocabulary} tokens, its manifest has "
            f"{manifest.vocabulary}; ask its operator"
        )
    return manifest


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
        self.manifest = fetched_manifest(client, run)
        # Held-out text is on no mirror, and what a judge reads must not depend on one.
        data = run_setup(run.recipe, run.vocabulary).recipe.data
        self._mirrors = [] if judge else data.mirror_addresses
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

        path = self._file(entry.sha256, entry.name, entry.tokens * self.manifest.dtype.itemsize, check)
        # A mapped file stays readable when the cache deletes it to make room.
        return mapped(path, entry, self.manifest)

    def tokenizer(self) -> Tokenizer:
        wanted = self.manifest.tokenizer
        if wanted == "byte":
            return ByteTokenizer()

        def check(path: Path) -> None:
            checked_tokenizer(path, wanted)

        return checked_tokenizer(self._file(wanted, TOKENIZER, MAX_TOKENIZER_BYTES, check), wanted)

    def _file(self, sha256: str, published: str, max_bytes: int, check: Callable[[Path], None]) -> Path:
        """A checked file in the cache; `published` is its name in the dataset's folder and its mirrors."""
        name = f"{sha256}.text"
        with self._fetching:
            path = self._cache.path(name)
            if path is not None and sha256 in self._checked:
                return path
            # Mirrors in an order that differs from file to file, so that each has its share of the work.
            first = int(sha256[:8], 16) % max(1, len(self._mirrors))
            mirrors = [*self._mirrors[first:], *self._mirrors[:first]]
            try:
                for mirror in [*mirrors, *[None] * DOWNLOAD_ATTEMPTS]:
                    liar = None
                    if path is None:
                        target = self._cache.partial(name, max_bytes)
                        # Only who sent every byte: what another began and broke off may be what is wrong.
                        if not target.exists() or not target.stat().st_size:
                            liar = mirror
                        if mirror is None:
                            where = f"/v1/{'judge/' if self._judge else ''}data/{sha256}"
                            self._client.download(where, target, max_bytes, Kind.TEXT, signed=self._judge)
                        else:
                            where = f"{mirror.rstrip('/')}/{published}"
                            try:
                                self._client.download_from_mirror(where, target, max_bytes)
                            except ForbiddenPlace as error:
                                self._report(f"not asking mirror {mirror} ({error})")
                                self._mirrors.remove(mirror)
                                continue
                            except WireError as error:
                                self._report(f"cannot use a mirror ({error}); asking elsewhere")
                                continue
                        path = target
                    try:
                        check(path)
                    except DataError as error:
                        self._report(
                            f"a file of the text is damaged ({error}); downloading it again"
                            if liar is None
                            else f"mirror {liar} serves something else ({error}); not asking it again"
                        )
                        self._cache.remove(name)
                        path = None
                        if liar in self._mirrors:
                            self._mirrors.remove(liar)
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
