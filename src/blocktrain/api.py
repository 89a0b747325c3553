"""BlockTrain for a Python program: recipe, train, load, evaluate, generate (docs/python.md).

The verbs of the same names are these functions with a terminal around them. Nothing here writes to the
terminal or touches signals; what goes wrong is a `BlocktrainError` with the verb's own sentence.
"""

from __future__ import annotations

import codecs
import dataclasses
import json
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blocktrain.client.gateway import GatewayClient
from blocktrain.config import Recipe, find_recipe, load_recipe
from blocktrain.errors import DataError, UserError
from blocktrain.model.generation import LocalModel
from blocktrain.model.generation import generate as generate_tokens
from blocktrain.tracking.trackers import RecordedSteps, TrackerName, recording
from blocktrain.training.checkpoint import Checkpoint, load_checkpoint
from blocktrain.training.device import find_device
from blocktrain.training.evaluation import Evaluator, Score
from blocktrain.training.local import LocalRun, Observer, Silent
from blocktrain.training.report import TrainingReport

log = logging.getLogger(__name__)


def recipe(name: str | os.PathLike[str], settings: Mapping[str, Any] | None = None) -> Recipe:
    """A recipe file, or a shipped one by name, with settings such as {"training.steps": 50} changed.

    `BLOCKTRAIN_*` variables count as for the verbs; docs/recipe.md has every key.
    """
    overrides = [
        f"{key}={'none' if value is None else json.dumps(value, ensure_ascii=False, default=os.fspath)}"
        for key, value in (settings or {}).items()
    ]
    return load_recipe(find_recipe(os.fspath(name)), overrides)


def train(
    recipe: Recipe,
    out: str | os.PathLike[str],
    *,
    device: str = "auto",
    resume: bool = False,
    start: str | os.PathLike[str] | None = None,
    observer: Observer | None = None,
    stop: threading.Event | None = None,
    track: Sequence[TrackerName] = (),
) -> TrainingReport:
    """Train every block alone, then the end-to-end reference; checkpoint, report and metrics go to `out`.

    `start` is a checkpoint folder to begin from instead of the seed. `resume` goes on with the run in `out`.
    """
    folder, chosen = Path(out), find_device(device)
    with recording(folder, track, recipe.name, recipe.to_dict()) as recorder:
        watched = RecordedSteps(observer or Silent(), recorder)
        run = LocalRun(recipe, folder, chosen, watched, stop, None if start is None else Path(start))
        # A run that was finished and scored before is not scored again: minutes to say the same once more.
        known = None if run.train(resume=resume) else run.reported()
        if known is not None:
            watched.message(f"{out} is finished: these are its scores; more training.steps go on from here")
            return known
        report = run.finish()
        recorder.report(report)
    return report


def load(
    place: str | os.PathLike[str], *, device: str = "auto", tell: Callable[[str], None] = log.info
) -> Checkpoint:
    """The model of a checkpoint folder, or the newest one of a run by its coordinator's address or data
    folder; `tell` then gets a line about which rounds it has."""
    with model_folder(os.fspath(place), tell) as folder:
        return load_checkpoint(folder, find_device(device))


@contextmanager
def model_folder(place: str, tell: Callable[[str], None]) -> Iterator[Path]:
    """The checkpoint folder at a place, or the newest model of the run there."""
    folder = Path(place).expanduser()
    if (folder / "config.json").exists():
        yield folder
        return
    from blocktrain.local.assembly import checkpoint_at  # a plain checkpoint needs no database: 1 s of CPU

    with checkpoint_at(place, tell) as found:
        yield found


@dataclass(frozen=True)
class TextScores:
    """Cross entropy of one text, in nats per token."""

    consensus: Score
    euler: Score | None
    """None where the objective does not compose by euler."""
    blocks: list[Score]
    """Of each alone; none of a serial model, whose parts predict nothing alone."""
    num_bytes: int
    text_tokens: int
    """Without what the tokenizer puts in front of a text. That has no bytes, and behind it the first token of
    the text is scored, too."""
    scored_tokens: int
    stride: int
    """Tokens of a window; every token is scored once."""

    @property
    def bytes_per_token(self) -> float:
        return self.num_bytes / self.text_tokens

    def to_dict(self) -> dict[str, Any]:
        composed = {"consensus": self.consensus, "euler": self.euler}
        return {
            "composed": {
                name: score.to_dict(self.bytes_per_token)
                for name, score in composed.items()
                if score is not None
            },
            "blocks": [score.to_dict(self.bytes_per_token) for score in self.blocks],
            "bytes": self.num_bytes,
            "scored_tokens": self.scored_tokens,
            "stride": self.stride,
        }


def evaluate(model: Checkpoint, text: str | bytes, *, draws: int | None = None) -> TextScores:
    """Score a text with each block and both compositions; `draws` is how often euler's noise is drawn."""
    content = text.encode() if isinstance(text, str) else text
    if len(content) < 2:
        raise DataError(f"the text has {len(content)} byte(s); scoring needs at least 2: give a longer one")
    config = model.recipe.evaluation
    config = dataclasses.replace(config, noise_draws=draws or config.noise_draws)
    evaluator = Evaluator(model.objective, model.codebook_VD, config, seed=model.recipe.seed)
    tokens = model.tokenizer.encode(content)
    euler = model.objective.composes_by_euler
    scores = evaluator.score(model.blocks, model.pooling, tokens, euler=euler)
    return TextScores(
        consensus=scores.consensus,
        euler=scores.euler,
        blocks=[] if model.objective.is_serial else scores.blocks,
        num_bytes=len(content),
        text_tokens=len(tokens) - len(model.tokenizer.front),
        scored_tokens=len(tokens) - 1,
        stride=model.recipe.model.context,
    )


def generate(
    model: Checkpoint | GatewayClient,
    prompt: str,
    *,
    max_tokens: int = 256,
    seed: int = 0,
    temperature: float = 0.8,
    top_p: float = 1.0,
) -> str:
    """The text that follows a prompt; the same seed gives the same text, here and from a gateway."""
    pieces = stream(model, prompt, max_tokens=max_tokens, seed=seed, temperature=temperature, top_p=top_p)
    return "".join(pieces)


def stream(
    model: Checkpoint | GatewayClient,
    prompt: str,
    *,
    max_tokens: int = 256,
    seed: int = 0,
    temperature: float = 0.8,
    top_p: float = 1.0,
) -> Iterator[str]:
    """The same text piece by piece, as it comes."""
    if not prompt:
        raise UserError("the prompt is empty; give at least one character")
    sampling = {"seed": seed, "temperature": temperature, "top_p": top_p}
    if isinstance(model, GatewayClient):
        fields = {"model": model.model(), "prompt": prompt, "max_tokens": max_tokens, "overflow": "slide"}
        for delta in model.complete(fields | sampling):
            yield delta.text
        return
    local = LocalModel(model.objective, model.blocks, model.codebook_VD, model.pooling)
    tokens = model.tokenizer.encode(prompt.encode()).tolist()
    # A token may be half a character.
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for token in generate_tokens(
        local, tokens, max_tokens=max_tokens, seed=seed, temperature=temperature, top_p=top_p
    ):
        yield decoder.decode(model.tokenizer.decode([token]))
    yield decoder.decode(b"", final=True)
