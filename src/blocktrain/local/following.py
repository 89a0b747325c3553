"""From a run to what serves it: its newest heads as checkpoints in a folder, again and again.

Each checkpoint is taken as `blocktrain checkpoint` takes it, checked against the run's signed ledger, and
named as the one to serve (`serving.versions`). What could not be had now is tried again later; what is served
goes on meanwhile.
"""

from __future__ import annotations

import json
import logging
import shutil
import threading
from pathlib import Path

from blocktrain.client.coordinator import public_client
from blocktrain.errors import BlocktrainError
from blocktrain.files import write_whole
from blocktrain.judge.ledger_check import open_source
from blocktrain.local.assembly import SavedModel, write_model
from blocktrain.serving.versions import VERSIONS, kept_checkpoints, publish

log = logging.getLogger(__name__)

FOLLOW_SECONDS = 10.0
"""How often a coordinator is asked for its heads."""
KEPT_CHECKPOINTS = 5
"""To roll back to; a stage that is slow to load may still read the one before the newest."""


class Follower:
    def __init__(self, coordinator: str, folder: Path) -> None:
        self.coordinator, self.folder = coordinator, folder
        self._heads: list[str] = []

    def look(self) -> SavedModel | None:
        """Take the newest model out of the run and have it served; None if it is the one taken last."""
        with public_client(self.coordinator) as client:
            status = client.status()
        # The votes' weights too: a new fit is another model of the same blocks.
        fitted = [repr(one.weights) for one in status.evaluations[-1:]]
        heads = [*(block.head_hash for block in status.blocks), *fitted]
        if heads == self._heads:
            return None
        kept = kept_checkpoints(self.folder)
        out = self.folder / f"{int(kept[-1].name) + 1 if kept else 1:06d}"
        # Left by a program that was killed while it wrote: without its versions it is no checkpoint.
        shutil.rmtree(out, ignore_errors=True)
        with open_source(self.coordinator) as source:
            found = write_model(source, out)
        # Last: a folder with this file is a whole checkpoint.
        write_whole(out / VERSIONS, json.dumps(list(found.versions)).encode())
        publish(out)
        self._heads = heads
        for old in kept_checkpoints(self.folder)[:-KEPT_CHECKPOINTS]:
            shutil.rmtree(old, ignore_errors=True)
        return found

    def run(self, stop: threading.Event) -> None:
        """Look again and again until `stop`."""
        complaint = ""
        while not stop.wait(FOLLOW_SECONDS):
            try:
                found, complaint = self.look(), ""
                if found is not None:
                    log.info("published model=%s", found)
            except (BlocktrainError, OSError) as error:
                if str(error) != complaint:
                    complaint = str(error)
                    log.warning("cannot follow coordinator=%s reason=%s", self.coordinator, error)
