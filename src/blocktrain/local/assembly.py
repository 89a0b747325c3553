"""The model of a run as a checkpoint: in the middle of it or at its end, from an address or a data folder."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from blocktrain.client.run import run_setup
from blocktrain.coordinator.storage.ledger import VerificationReport, verify_ledger
from blocktrain.data.corpora import open_text
from blocktrain.data.tokenizer import Tokenizer
from blocktrain.errors import CheckpointError, UserError, WireError
from blocktrain.ids import CorpusHash
from blocktrain.judge.ledger_check import Source, is_data_folder, open_source
from blocktrain.model.block import Block
from blocktrain.model.pooling import Pooling
from blocktrain.training.checkpoint import save_checkpoint, write_checkpoint
from blocktrain.training.evaluation import Evaluator
from blocktrain.training.setup import Setup, with_swarm_schedule
from blocktrain.training.snapshot import from_safetensors, load_into, schema_of
from blocktrain.wire.hashing import snapshot_hash


@dataclass(frozen=True)
class SavedModel:
    """What a checkpoint of a run was made of."""

    name: str
    run_id: str
    versions: tuple[int, ...]
    """Of each block: merges in it."""
    rounds: int
    scored: bool
    """Whether the coordinator had scored the model, and so fitted the weights of its blocks' votes."""

    def __str__(self) -> str:
        where = f"{self.name} (run {self.run_id[:12]}), rounds {', '.join(map(str, self.versions))} "
        votes = "" if self.scored else "; not scored yet, so every block has the same vote"
        return f"{where}of {self.rounds}, as its ledger says{votes}"


def checked_run(source: Source, tokenizer: Tokenizer) -> tuple[Setup, VerificationReport]:
    """What a run's signed ledger says of its recipe and its newest snapshots.

    The merges are not done again: `blocktrain ledger verify` does that, and fetches every payload for it.
    """
    report = verify_ledger(source.entries, None, source.snapshot)
    if not source.entries or not report.ok:
        reason = report.reason if source.entries else "it is empty"
        raise WireError(f"the ledger of {source.name} does not verify: {reason}; do not use its model")
    setup = run_setup(source.recipe(), tokenizer.vocabulary)
    count = setup.recipe.model.blocks
    if sorted(report.heads) != list(range(count)):
        raise WireError(f"the ledger of {source.name} has {len(report.heads)} blocks, its recipe {count}")
    return setup, report


def head_blocks(source: Source, setup: Setup, report: VerificationReport) -> Iterator[Block]:
    """The blocks at these heads, each checked against its hash and loaded when it is asked for."""
    for index, wanted in sorted(report.heads.items()):
        block = setup.initial(index)
        tensors = from_safetensors(source.snapshot(wanted), schema_of(block))
        if snapshot_hash(tensors) != wanted:
            raise WireError(
                f"{source.name} gave other weights of block {index} than its ledger names; do not use them"
            )
        load_into(block, tensors)
        yield block


def write_model(source: Source, out: Path) -> SavedModel:
    """The newest snapshots of a run as a checkpoint."""
    tokenizer = source.tokenizer()
    setup, report = checked_run(source, tokenizer)
    recipe, count = with_swarm_schedule(setup.recipe), setup.recipe.model.blocks
    # Equal votes cost 0.0005 nats on the demo model (docs/decisions/0003), so a run that was never scored
    # has a model all the same; the text that the votes are fitted on need not be on this machine.
    evaluation = source.evaluation()
    scored = evaluation is not None and len(evaluation.weights) == count
    pooling = Pooling((1 / count,) * count)
    if evaluation is not None and scored:
        pooling = Pooling(evaluation.weights, evaluation.decays, evaluation.taus)
    first, weights = source.entries[0].body, (b.state_dict() for b in head_blocks(source, setup, report))
    corpus, table = CorpusHash(str(first["corpus_sha256"])), setup.codebook()().detach()
    write_checkpoint(out, recipe, corpus, weights, table, pooling, tokenizer)
    versions = tuple(report.versions[index] for index in range(count))
    return SavedModel(recipe.name, str(first["run_id"]), versions, recipe.swarm.rounds, scored)


@contextlib.contextmanager
def checkpoint_at(place: str, tell: Callable[[str], None]) -> Iterator[Path]:
    """A checkpoint folder as it is; or the model of a coordinator's address or data folder, written to a
    temporary one that is removed at the end."""
    folder = Path(place).expanduser()
    if "://" not in place and not is_data_folder(folder):
        if not folder.is_dir():
            raise CheckpointError(
                f"no checkpoint folder at {place}; expected a folder with config.json, a coordinator's "
                "--data-dir, or its address http(s)://HOST[:PORT]"
            )
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="blocktrain-model-") as temporary:
        out = Path(temporary) / "checkpoint"
        with open_source(place) as source:
            tell(f"took {write_model(source, out)}")
        yield out


def save_model(place: str, out: Path) -> SavedModel:
    """The model of an address or data folder, in a new folder that stays."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--to {out} already exists; choose a new folder, or remove it")
    if "://" not in place and (Path(place).expanduser() / "config.json").exists():
        raise UserError(f"{place} is a checkpoint already: use it as it is, or copy the folder")
    with open_source(place) as source:
        return write_model(source, out)


def save_final_checkpoint(source: Source, out: Path) -> dict[str, Any]:
    """Write the checkpoint of a finished run, its votes fitted here; returns its scores on the whole held-out
    text, which must be on this machine."""
    tokenizer = source.tokenizer()
    setup, report = checked_run(source, tokenizer)
    recipe, text = setup.recipe, open_text(setup.recipe)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    blocks = [block.to(device).eval() for block in head_blocks(source, setup, report)]
    table = setup.codebook()().detach().to(device)
    evaluator = Evaluator(setup.objective, table, recipe.evaluation, seed=recipe.seed)
    # On the pooling text, as in a local run: the scores of both compare.
    pooling = evaluator.fit_pooling(
        blocks,
        text.first_tokens("pooling", recipe.evaluation.pooling_bytes),
        follow_text=recipe.data.own_share > 0,
    )
    valid = text.first_tokens("held_out", recipe.evaluation.max_bytes)
    scores = evaluator.score(blocks, pooling, valid, euler=setup.objective.composes_by_euler)
    recipe, cpu = with_swarm_schedule(recipe), [block.cpu() for block in blocks]
    save_checkpoint(out, recipe, text.sha256, cpu, table.cpu(), pooling, tokenizer)
    return {
        "versions": [report.versions[index] for index in range(len(blocks))],
        "consensus_ce": scores.consensus.ce,
        "euler_ce": None if scores.euler is None else scores.euler.ce,
        "block_ce": [score.ce for score in scores.blocks],
        "weights": list(pooling.weights),
        "scored_tokens": len(valid) - 1,
        "bytes_per_token": text.manifest.bytes_per_token("held_out"),
    }
