"""`blocktrain judge`: a process that shares the coordinator's queue of updates to be scored.

Holds one task at a time. Killed, it delays only that task, until its lease ends; the coordinator never waits
for a judge. Learns payloads before they are merged, so its key must be trusted with them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from blocktrain.client.cache import BlobCache
from blocktrain.client.coordinator import CoordinatorClient, RequestRefused
from blocktrain.client.run import Layout, load_run_text, run_setup
from blocktrain.client.texts import FetchedText
from blocktrain.data.dataset import RunText
from blocktrain.errors import DataError
from blocktrain.training.setup import Setup
from blocktrain.training.snapshot import from_safetensors, max_snapshot_bytes
from blocktrain.training.update import Weights
from blocktrain.validation.evidence import report_of
from blocktrain.validation.scorer import Scorer
from blocktrain.wire.codec import decode
from blocktrain.wire.hashing import snapshot_hash
from blocktrain.wire.messages import JudgeTask, RunAnswer

KEPT_SNAPSHOTS = 4
"""Beside those of frozen blocks: the head and the base of the task, and of the one before."""
MAX_TEXT_BYTES = 4_000_000_000
"""Shards of the run's text on this disk; the ones used longest ago go first."""


class Judge:
    def __init__(
        self,
        client: CoordinatorClient,
        device: torch.device,
        corpus: str | None,
        held_out: str | None,
        say: Callable[[str], None],
    ) -> None:
        self._client, self._say, self._at_end = client, say, contextlib.ExitStack()
        run = client.run()
        client.audience = run.run_id
        setup = run_setup(run.recipe, run.vocabulary)
        recipe, text = setup.recipe, self._open_text(setup, run, corpus)
        if recipe.trust.private_text is not None and held_out is None:
            raise DataError(
                "this run is judged on private text: get it from the operator, and use --held-out"
            )
        trust = dataclasses.replace(recipe.trust, private_text=held_out)
        self._scorer = Scorer(dataclasses.replace(recipe, trust=trust), text, device)
        self._layouts = [Layout.of(layout) for layout in run.blocks]
        self._snapshots: dict[str, Weights] = {}

    def _open_text(self, setup: Setup, run: RunAnswer, corpus: str | None) -> RunText:
        if corpus is not None or run.dataset is None:
            return load_run_text(setup, run, corpus)
        # Gone at the end: held-out text should not lie around on a machine that stopped judging.
        folder = self._at_end.enter_context(tempfile.TemporaryDirectory(prefix="blocktrain-judge-"))
        cache = BlobCache(Path(folder), MAX_TEXT_BYTES)
        return FetchedText(self._client, run, cache, self._say, judge=True)

    def run(self, stop: threading.Event) -> None:
        with self._at_end:
            while not stop.is_set():
                answer = self._client.judge_lease()
                if isinstance(answer, JudgeTask):
                    self._judge(answer)
                else:
                    stop.wait(answer.seconds)

    def _judge(self, task: JudgeTask) -> None:
        layout = self._layouts[task.block]
        try:
            payload = self._client.judge_payload(task.update_id, layout.payload_bytes)
            decoded = decode(layout.codec, layout.schema, payload)
            # Scored beside the frozen blocks it was trained with.
            frozen = {one.block: self._snapshot(one.block, one.hash) for one in task.frozen}
            base = self._snapshot(task.block, task.head_hash)
            own_base = self._snapshot(task.block, task.base_hash)
            # The snapshots used longest ago go; a dict keeps the order in which they were put back.
            while len(self._snapshots) > KEPT_SNAPSHOTS + len(frozen):
                self._snapshots.pop(next(iter(self._snapshots)))
            evidence = self._scorer.judge(task, layout.codec, base, own_base, decoded, frozen)
            self._client.judge_report(task.update_id, report_of(evidence))
        except RequestRefused as refusal:
            # Another judge has the task by now, or the round is over: nothing is lost but our time.
            if refusal.reason != "lease_lost":
                raise
            self._say(f"lost update={task.update_id[:12]}: {refusal}")
            return
        gain = evidence.gain
        self._say(f"judged update={task.update_id[:12]} block={task.block} gain={gain.mean:+.4f}")

    def _snapshot(self, block: int, wanted: str) -> Weights:
        # Taken out and put back: the order of the dict is then the order of use.
        tensors = self._snapshots.pop(wanted, None)
        if tensors is None:
            schema = self._layouts[block].schema
            content = self._client.fetch(f"/v1/snapshots/{wanted}", max_snapshot_bytes(schema))
            tensors = from_safetensors(content, schema)
            if snapshot_hash(tensors) != wanted:
                raise DataError(f"the coordinator served another snapshot than {wanted}; do not judge for it")
        self._snapshots[wanted] = tensors
        return tensors
