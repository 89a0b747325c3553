"""What a coordinator says of its run, checked before use: recipe, text and block layouts.

A recipe comes from a stranger: a file, folder or dataset that it names is opened only where the person at
this machine named it too.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blocktrain.codec_spec import CodecSpec
from blocktrain.config import resolve_recipe
from blocktrain.data.corpora import load_corpus
from blocktrain.data.dataset import MANIFEST, Dataset, RunText
from blocktrain.errors import DataError, RecipeError
from blocktrain.training.setup import Setup
from blocktrain.wire.codec import Schema
from blocktrain.wire.messages import BlockLayout, RunAnswer


@dataclass(frozen=True)
class Layout:
    """What every frame and snapshot of a block looks like."""

    block: int
    codec: CodecSpec
    schema: Schema
    payload_bytes: int
    initial_hash: str

    @classmethod
    def of(cls, layout: BlockLayout) -> Layout:
        schema = Schema(tuple((tensor.name, tensor.shape) for tensor in layout.tensors))
        codec = CodecSpec.parse(layout.codec)
        return cls(layout.block, codec, schema, layout.payload_bytes, layout.initial_hash)


def run_setup(recipe: dict[str, Any], vocabulary: int = 256) -> Setup:
    """The parts that a run's recipe describes."""
    try:
        return Setup.of_swarm(resolve_recipe(recipe), vocabulary)
    except RecipeError as error:
        raise RecipeError(
            f"cannot use the run's recipe ({error}); it may be of another version of blocktrain: use the "
            "coordinator's"
        ) from None


def load_run_text(setup: Setup, run: RunAnswer, path: str | None) -> RunText:
    """The run's text from this machine, or an explanation of how it differs."""
    recipe = setup.recipe
    if path is not None and (Path(path).expanduser() / MANIFEST).exists():
        dataset = Dataset.open(Path(path).expanduser())
        if dataset.sha256 != run.corpus_sha256:
            raise DataError(
                f"{path} is dataset {dataset.sha256[:16]}…, the run trains on {run.corpus_sha256[:16]}…; "
                "leave out --corpus to fetch the run's own"
            )
        return dataset
    # A coordinator could name ~/.ssh/id_ed25519 as its text, and what a model has trained on can be read out
    # of it.
    if path is None and recipe.data.corpus != "builtin":
        raise DataError(
            f"this run trains on text that its coordinator calls {recipe.data.corpus!r}; a worker opens no "
            "file that a stranger names: get the same text from its operator, and say where it is here "
            "with --corpus PATH (or --corpus hf:NAME)"
        )
    data = recipe.data if path is None else dataclasses.replace(recipe.data, corpus=path)
    corpus = load_corpus(data, recipe.evaluation.pooling_bytes)
    # Updates from other text could be judged harmful, and a worker banned for an honest mistake.
    if corpus.sha256 != run.corpus_sha256:
        builtin = "; the builtin text differs between Python versions" if data.corpus == "builtin" else ""
        raise DataError(
            f"this machine's text is not the run's: expected sha256 {run.corpus_sha256[:16]}…, found "
            f"{corpus.sha256[:16]}… in {data.corpus!r} ({len(corpus.train)} training bytes){builtin}. Get "
            "the same files from the operator of the run and name them with --corpus"
        )
    return corpus
