"""Held-out loss of the assembled model, in a thread of its own with a low priority.

Scores a fixed slice of the held-out text whenever some block has moved on, and once more, with the
published composition too, when the run has finished. Reads snapshots, writes one row; requests never wait
for it.
"""

from __future__ import annotations

import logging
import math
import time

import numpy as np
import torch
from sqlalchemy import func, select
from sqlalchemy.exc import IntegrityError
from torch import Tensor

from blocktrain.coordinator.operator_notes import Display
from blocktrain.coordinator.resources import Resources
from blocktrain.coordinator.storage.store import BlockRow, EvaluationRow
from blocktrain.data.dataset import RunText
from blocktrain.data.tokenizer import Tokenizer, Tokens
from blocktrain.model.block import Block
from blocktrain.training.evaluation import Evaluator, bigram_cross_entropy
from blocktrain.training.setup import Setup
from blocktrain.training.snapshot import load_into
from blocktrain.wire.hashing import canonical_json
from blocktrain.wire.messages import EvaluationState, ReferenceState, SpokenPiece

log = logging.getLogger(__name__)

MAX_SCORED_BYTES = 65_536
"""A coordinator often has no accelerator: enough text for a curve, not for a paper."""
MAX_POOLING_BYTES = 16_384
MAX_COUNTED_BYTES = 128 << 20
"""Training text that bigrams are counted in."""


MAX_SAMPLE_TOKENS = 400


def sample_of_each_cluster(text: RunText, count: int) -> Tokens:
    """The beginnings of the first training shard of each cluster: text that anybody may see."""
    first = {entry.cluster: entry for entry in reversed(text.manifest.training)}
    entries = [first[cluster] for cluster in sorted(first)]
    return np.concatenate(
        [text.tokens(one)[: max(2, count // len(entries))].astype(np.int64) for one in entries]
    )


def who_speaks(weights_BT: Tensor, tokens: Tokens, tokenizer: Tokenizer) -> tuple[SpokenPiece, ...]:
    """Runs of tokens in which the same block has the most say; the first token, which nothing predicts, goes
    with the second."""
    loudest = weights_BT.argmax(dim=0)[:-1].tolist()
    pieces, first = [], 0
    for at in range(1, len(loudest) + 1):
        if at == len(loudest) or loudest[at] != loudest[first]:
            said = tokens[first + 1 if first else 0 : at + 1].tolist()
            text = tokenizer.decode(said).decode("utf-8", errors="replace")
            weight = float(weights_BT[loudest[first], first:at].mean())
            pieces.append(SpokenPiece(block=loudest[first], weight=min(1.0, weight), text=text))
            first = at
    return tuple(pieces)


class Scoring:
    def __init__(self, resources: Resources, text: RunText, display: Display) -> None:
        recipe = resources.run.recipe
        self._resources, self._every = resources, recipe.swarm.evaluate_every_seconds
        self._text, self._display, self._tokenizer = text, display, text.tokenizer()
        self._next_look = 0.0
        """In seconds of this process's own clock: how often to look is no matter of the run's time."""
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        setup = Setup.of(recipe, text.manifest.vocabulary)
        self._objective = setup.objective
        codebook = setup.codebook().to(device)
        self._evaluator = Evaluator(self._objective, codebook(), recipe.evaluation, seed=recipe.seed)
        limit = min(recipe.evaluation.max_bytes or MAX_SCORED_BYTES, MAX_SCORED_BYTES)
        self._held_out = text.first_tokens("held_out", limit)
        self._pool = text.first_tokens("pooling", MAX_POOLING_BYTES)
        self._sample = sample_of_each_cluster(text, min(recipe.model.context, MAX_SAMPLE_TOKENS))
        self._setup, self._device = setup, device
        self._blocks: list[Block] = []
        """Built for the first score: a coordinator that scores nothing has no model in memory."""

    def score_due(self) -> bool:
        """Score the heads if enough time has passed since the last look, and at once when the run has ended;
        whether anything was scored."""
        if self._display.bigram is None:
            # The least that a model must beat, on the text it is scored on.
            train = self._text.first_tokens("training", MAX_COUNTED_BYTES)
            count = len(self._held_out)
            ce = bigram_cross_entropy(train, self._held_out, self._objective.vocabulary)
            source = f"counts of the training text, on the same {count} held-out tokens as the run"
            self._display.bigram = ReferenceState(name="bigram counts", ce=ce, source=source)
        with self._resources.store.read() as session:
            slowest = session.scalar(select(func.min(BlockRow.version)))
        finished = slowest is not None and slowest >= self._resources.run.swarm.rounds
        if time.monotonic() < self._next_look and not finished:
            return False
        self._next_look = time.monotonic() + self._every
        return self.score_if_new() is not None

    def score_if_new(self) -> EvaluationState | None:
        """Score the heads, unless they have been scored or are initial weights that nobody trained."""
        with self._resources.store.read() as session:
            columns = select(BlockRow.version, BlockRow.head_hash).order_by(BlockRow.block)
            heads = session.execute(columns).all()
            versions = canonical_json([version for version, _ in heads]).decode()
            known = session.get(EvaluationRow, versions) is not None
        # The parts of a serial model were trained before: without their score a run that diverges from its
        # first merge on would have nothing to be compared with.
        untrained = not any(version for version, _ in heads) and not self._objective.is_serial
        if known or untrained:
            return None
        if not self._blocks:
            blocks = range(len(heads))
            self._blocks = [self._setup.initial(block).to(self._device).eval() for block in blocks]
        for index, (block, (_, digest)) in enumerate(zip(self._blocks, heads, strict=True)):
            load_into(block, self._resources.weights.snapshot(index, digest))
        # The published composition costs many passes: it is scored once, at the end.
        finished = min(version for version, _ in heads) >= self._resources.run.swarm.rounds
        euler = finished and self._objective.composes_by_euler
        special = self._resources.run.recipe.data.own_share > 0
        pooling = self._evaluator.fit_pooling(self._blocks, self._pool, follow_text=special)
        found = self._evaluator.score(self._blocks, pooling, self._held_out, euler=euler)
        if special:
            weights_BT = self._evaluator.weights_over(self._blocks, pooling, self._sample)
            self._display.speaking = who_speaks(weights_BT, self._sample, self._tokenizer)
        per_token = self._text.manifest.bytes_per_token("held_out")
        state = EvaluationState(
            time=self._resources.clock(),
            versions=tuple(version for version, _ in heads),
            scored_bytes=round(len(self._held_out) * per_token),
            bytes_per_token=per_token,
            consensus_ce=found.consensus.ce,
            euler_ce=None if found.euler is None else found.euler.ce,
            block_ce=tuple(score.ce for score in found.blocks),
            weights=pooling.weights,
            decays=pooling.decays,
            taus=pooling.taus,
        )
        try:
            with self._resources.store.write() as session:
                record = state.model_dump_json()
                loss = state.consensus_ce if math.isfinite(state.consensus_ce) else None
                session.add(
                    EvaluationRow(versions=versions, time=state.time, consensus_ce=loss, record=record)
                )
        except IntegrityError:
            return state  # another process scored the same heads
        log.info("scored consensus_ce=%.4f versions=%s", state.consensus_ce, versions)
        self._resources.changes.notify()
        return state
