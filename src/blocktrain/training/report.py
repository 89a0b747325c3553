"""The report of a local run: its scores, what it cost and what it was made of; written and read as JSON.

The JSON keys are those of every report.json so far. Reading one refuses what is not a report; it does not
check numbers against one another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from blocktrain.errors import DataError
from blocktrain.model.pooling import Pooling
from blocktrain.training.evaluation import Score

Curve = list[tuple[int, float]]


@dataclass(frozen=True, kw_only=True)
class HeldOutScores:
    """Everything scored on the same held-out text."""

    blocks: list[Score]
    consensus: Score
    pooling: Pooling
    """Weights of the blocks in the consensus."""
    euler: Score | None
    """None where the objective does not compose by euler."""
    reference: Score | None
    bigram_ce: float
    scored_tokens: int
    bytes_per_token: float = 1.0
    """Of the held-out text; losses are per token, and comparable between runs per byte."""

    @property
    def gap(self) -> float | None:
        """From the best composed model to end-to-end training, in nats; None without a reference."""
        if self.reference is None:
            return None
        return (
            min(score.ce for score in (self.consensus, self.euler) if score is not None) - self.reference.ce
        )

    def composed(self) -> Iterator[tuple[str, Score]]:
        yield "consensus", self.consensus
        if self.euler is not None:
            yield "euler", self.euler

    def to_json(self) -> dict[str, Any]:
        composed: dict[str, dict[str, Any]] = {
            name: score.to_dict(self.bytes_per_token) for name, score in self.composed()
        }
        composed["consensus"]["weights"] = list(self.pooling.weights)
        if self.pooling.follows_text:
            composed["consensus"]["follows_text"] = self.pooling.how_it_follows
        return {
            "blocks": [score.to_dict(self.bytes_per_token) for score in self.blocks],
            "composed": composed,
            "reference": None if self.reference is None else self.reference.to_dict(self.bytes_per_token),
            "gap": self.gap,
            "bigram": {"ce": self.bigram_ce},
            "scored_tokens": self.scored_tokens,
            "bytes_per_token": self.bytes_per_token,
        }

    @classmethod
    def of_json(cls, report: Mapping[str, Any]) -> HeldOutScores:
        def score(found: Mapping[str, Any]) -> Score:
            return Score(float(found["ce"]), None if found.get("se") is None else float(found["se"]))

        composed, reference = report["composed"], report["reference"]
        return cls(
            blocks=[score(one) for one in report["blocks"]],
            consensus=score(composed["consensus"]),
            pooling=Pooling.read(composed["consensus"]["weights"], composed["consensus"].get("follows_text")),
            euler=score(composed["euler"]) if "euler" in composed else None,
            reference=None if reference is None else score(reference),
            bigram_ce=float(report["bigram"]["ce"]),
            scored_tokens=int(report["scored_tokens"]),
            bytes_per_token=float(report.get("bytes_per_token", 1.0)),
        )


@dataclass(frozen=True, kw_only=True)
class TrainingReport:
    scores: HeldOutScores
    name: str
    seed: int
    corpus_sha256: str
    tokens: Mapping[str, int]
    """`per_block` and `reference`: tokens each was trained on."""
    parameters: Mapping[str, int | None]
    """`blocks` (all), `block` (the first) and `reference`."""
    flops: Mapping[str, int | None]
    """`blocks` and `reference`: of the whole training."""
    peak_memory: Mapping[str, int | None]
    """Bytes of `block` (the largest) and `reference`."""
    memory_method: str
    """How the bytes were counted; machines without an allocator's count add up tensors."""
    seconds: Mapping[str, float]
    """By unit: `block 0`, …, `reference`."""
    curves: Mapping[str, Curve]
    """Training loss by unit: (step, cross entropy)."""
    recipe: Mapping[str, Any]
    versions: Mapping[str, str]
    sample: str

    def to_json(self) -> dict[str, Any]:
        return {
            **self.scores.to_json(),
            "name": self.name,
            "seed": self.seed,
            "corpus_sha256": self.corpus_sha256,
            "tokens": dict(self.tokens),
            "parameters": dict(self.parameters),
            "flops": dict(self.flops),
            "peak_memory_bytes": {**self.peak_memory, "method": self.memory_method},
            "seconds": dict(self.seconds),
            "curves": dict(self.curves),
            "recipe": dict(self.recipe),
            "versions": dict(self.versions),
            "sample": self.sample,
        }

    @classmethod
    def of_json(cls, report: Mapping[str, Any]) -> TrainingReport:
        try:
            memory = dict(report["peak_memory_bytes"])
            return cls(
                scores=HeldOutScores.of_json(report),
                name=str(report["name"]),
                seed=int(report["seed"]),
                corpus_sha256=str(report["corpus_sha256"]),
                tokens=dict(report["tokens"]),
                parameters=dict(report["parameters"]),
                flops=dict(report["flops"]),
                memory_method=str(memory.pop("method")),
                peak_memory=memory,
                seconds=dict(report["seconds"]),
                curves={
                    str(unit): [(int(step), float(ce)) for step, ce in curve]
                    for unit, curve in report["curves"].items()
                },
                recipe=dict(report["recipe"]),
                versions=dict(report["versions"]),
                sample=str(report["sample"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(
                f"expected the report.json of a `blocktrain train`, found none or a damaged one ({error!r}); "
                "make it again, or leave it out"
            ) from None
