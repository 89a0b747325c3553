"""The ranks of a worker that do not lead: they do what rank 0 says and speak to nobody else."""

from __future__ import annotations

from blocktrain.client.run import run_setup
from blocktrain.training.ranks import Ranks
from blocktrain.worker.training import LocalTraining

ACTS = frozenset(
    {"place", "load_optimizer", "freeze", "schedule", "train", "move", "weights", "optimizer_state"}
)
"""Methods of `LocalTraining` that all ranks do."""


def follow(ranks: Ranks) -> None:
    """Until rank 0 says that it leaves; RankError when it is gone without a word."""
    training: LocalTraining | None = None
    while True:
        with ranks.together():
            act, values = ranks.hear()
        if act == "end":
            return
        if act == "join":
            setup = run_setup(values["recipe"], values["vocabulary"])
            ranks = ranks.sharing(values["sharded"])
            codebook = setup.codebook().to(ranks.device)
            training = LocalTraining(setup, None, codebook, ranks.device, ranks)
        else:
            assert training is not None
            assert act in ACTS, act
            getattr(training, act)(**values)
