"""The run's text as others may have it: training shards for anybody, held-out and pooling shards for judges.

Everything goes by its hash, so nobody can name a path. Files are served from the dataset's own folder, never
copied; only where blobs lie in S3 the public ones are put there too, once, for presigned addresses. Plain
text, `builtin` too, is written as a dataset into the coordinator's folder at start.
"""

from __future__ import annotations

import logging
from pathlib import Path

from blocktrain.coordinator.refusals import Refusal
from blocktrain.coordinator.storage.blobs import Blobs, text_key
from blocktrain.data.corpora import Corpus
from blocktrain.data.dataset import MANIFEST, MAX_SHARD_TOKENS, TOKENIZER, Dataset, RunText
from blocktrain.wire.messages import ErrorReason

log = logging.getLogger(__name__)

TEXT_FOLDER = "text"


class PublishedText:
    def __init__(self, dataset: Dataset, shared: Blobs | None) -> None:
        manifest = dataset.manifest
        self.identity = manifest.identity
        self.shared = shared
        """Where workers can fetch public files from by presigned address."""
        self.files = Blobs.from_url(str(dataset.folder))
        self._public = {self.identity: MANIFEST} | {one.sha256: one.name for one in manifest.training}
        if manifest.tokenizer != "byte":
            self._public[manifest.tokenizer] = TOKENIZER
        self._hidden = {one.sha256: one.name for one in (*manifest.held_out, *manifest.pooling)}
        for digest, name in self._public.items() if shared is not None else ():
            assert shared is not None
            if shared.size(text_key(digest)) != self.files.size(name):
                log.info("uploading %s", name)
                shared.put_file(text_key(digest), dataset.folder / name)

    def tokenizer(self) -> bytes | None:
        """The tokenizer's file; None where the text is bytes."""
        return self.files.get(TOKENIZER) if TOKENIZER in self._public.values() else None

    def name(self, sha256: str, *, judge: bool) -> str:
        """The file with this hash; who is no judge gets no held-out or pooling shard."""
        found = self._public.get(sha256) or (self._hidden.get(sha256) if judge else None)
        if found is None and sha256 in self._hidden:
            raise Refusal(
                ErrorReason.NOT_JUDGE,
                "held-out text is for judges only",
                "workers train on the shards of `training`",
            )
        if found is None:
            raise Refusal(ErrorReason.NOT_FOUND, f"the run's text has no file {sha256}")
        return found


def publish(text: RunText, data_dir: Path, blobs: Blobs) -> PublishedText | None:
    """None for plain text that is too long for one shard: its workers bring their own copy."""
    if isinstance(text, Corpus):
        if len(text.train) > MAX_SHARD_TOKENS:
            log.warning("text of %d bytes is not served; use `blocktrain data prepare`", len(text.train))
            return None
        text = text.write(data_dir / TEXT_FOLDER)
    assert isinstance(text, Dataset)
    return PublishedText(text, blobs if blobs.shared else None)
