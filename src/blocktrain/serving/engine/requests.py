"""What is asked of an engine and what comes back: requests in, chunks of tokens out.

Knows nothing of HTTP, sockets or torch. Every engine gives the same tokens for the same request.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Literal

from blocktrain.data.tokenizer import Tokenizer
from blocktrain.errors import BlocktrainError, UserError
from blocktrain.model.sampling import Sampler, Sampling
from blocktrain.wire.frame_metadata import MAX_PASSES

Mode = Literal["ar", "verify", "sweep"]
"""How text is written; `TextEngine.generate` has the writer of each."""

MAX_DRAFT_TOKENS = 32
MAX_TOP_LOGPROBS = 256


class RequestError(UserError):
    """A request that cannot be served as written; the client can mend it."""


class ServingError(BlocktrainError):
    """The service could not answer; the request itself was fine."""


class StagesUnavailableError(ServingError):
    """No stage answers for some block, and too few blocks are left to go on."""


class DeadlineError(ServingError):
    """The request's deadline passed before its text was complete."""


@dataclass(frozen=True)
class GenerationRequest(Sampling):
    """Same seed, same text: in `ar` and `verify`, any draft length, any retry or failover; in `sweep` for the
    same number of passes."""

    prompt: list[int]
    """Token ids, at least one; a prompt longer than the context is seen from its tail."""
    max_tokens: int
    mode: Mode = "verify"
    draft_tokens: int | None = None
    """Tokens drafted per traversal in `verify`; None lets the engine adapt it."""
    passes: int = 1
    """In `sweep`, steps that each block refines the new tokens by; the network sees one traversal."""
    logprobs: int | None = None
    """Top-n log-probs reported with every token; 0 for the token's own alone, None for none."""
    deadline_seconds: float = 60.0
    """Counted from when the first chunk is asked for."""

    def sampler(self, model: ModelInfo) -> Sampler:
        wishes = {wish.name: getattr(self, wish.name) for wish in fields(Sampling)}
        return Sampler(**wishes, prompt_tokens=len(self.prompt), end=model.tokenizer.end)

    def check(self, model: ModelInfo) -> None:
        """Raise RequestError with a sentence for the first thing that is wrong."""
        vocabulary = model.vocabulary
        most_logprobs = min(vocabulary, MAX_TOP_LOGPROBS)
        if not self.prompt:
            raise RequestError("prompt is empty; expected at least one token")
        if not all(0 <= token < vocabulary for token in self.prompt):
            raise RequestError(f"prompt holds token ids outside 0..{vocabulary - 1}")
        if self.max_tokens < 0:
            raise RequestError(f"max_tokens must not be negative, found {self.max_tokens}")
        # Infinity is not negative either, so finite is asked for too.
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise RequestError(f"temperature must be finite and not negative, found {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise RequestError(f"top_p must be in (0, 1], found {self.top_p}")
        if self.top_k is not None and self.top_k < 1:
            raise RequestError(f"top_k must be at least 1, found {self.top_k}; leave it out for all tokens")
        if not 0 <= self.min_p <= 1:
            raise RequestError(f"min_p must be in [0, 1], found {self.min_p}")
        if not all(0 <= token < vocabulary for token, _ in self.logit_bias):
            raise RequestError(f"logit_bias names token ids outside 0..{vocabulary - 1}")
        nats = [self.presence_penalty, self.frequency_penalty, *(value for _, value in self.logit_bias)]
        if not all(map(math.isfinite, nats)) or not 0 < self.repetition_penalty < math.inf:
            raise RequestError("penalties and biases must be finite, and repetition_penalty above 0")
        if self.mode == "sweep" and self.reads_text:
            raise RequestError(
                "penalties look at the text so far, and sweep chooses all tokens at once; use ar or verify"
            )
        if self.mode not in model.modes:
            remedy = "; train with objective.sweep_probability for it" if self.mode == "sweep" else ""
            offered = ", ".join(model.modes) + remedy
            raise RequestError(f"mode {self.mode} is not offered by {model.name!r}, which has {offered}")
        if not 1 <= self.passes <= MAX_PASSES:
            raise RequestError(f"passes must be between 1 and {MAX_PASSES}, found {self.passes}")
        # Said rather than ignored: a client that sends it expects another text.
        if self.passes != 1 and self.mode != "sweep":
            raise RequestError(f"passes are for mode sweep, found {self.passes} in {self.mode}")
        if not 0 <= (self.draft_tokens or 0) <= MAX_DRAFT_TOKENS:
            expected = f"between 0 and {MAX_DRAFT_TOKENS}"
            raise RequestError(f"draft_tokens must be {expected}, found {self.draft_tokens}")
        if not 0 <= (self.logprobs or 0) <= most_logprobs:
            raise RequestError(f"logprobs must be between 0 and {most_logprobs}, found {self.logprobs}")
        # Written so that NaN is refused too.
        if not self.deadline_seconds > 0:
            raise RequestError("deadline_seconds must be above 0")


@dataclass(frozen=True)
class TokenLogprob:
    """The model's own log-prob (temperature 1, no top-p) of a token, and the most likely ones there."""

    token: int
    logprob: float
    top: list[tuple[int, float]]
    weights: list[float] = field(default_factory=list)
    """What each block counted for where the token was chosen; none in `sweep`, where blocks take turns."""


@dataclass(frozen=True)
class Chunk:
    """The tokens of one traversal: one in `ar`, accepted + 1 in `verify`."""

    tokens: list[int]
    logprobs: list[TokenLogprob] | None = None


@dataclass
class GenerationStats:
    """What a generation has cost so far; complete once its chunks are exhausted."""

    traversals: int = 0
    """Round trips to the stages, exact passes included."""
    exact_passes: int = 0
    """Traversals spent on settling a near tie in float64, see `model.sampling`."""
    second_questions: int = 0
    """Traversals asked again for whole rows, because the best tokens alone could not settle a choice."""
    scoring_traversals: int = 0
    """Round trips that scored a given text; not among `traversals`."""
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    wire_bytes_sent: int = 0
    wire_bytes_received: int = 0
    retries: int = 0
    degraded_blocks: list[int] = field(default_factory=list)
    """Blocks left out of at least one traversal because nothing served them in time."""
    seconds: float = 0.0


@dataclass(frozen=True)
class ModelInfo:
    name: str
    model_hash: str
    vocabulary: int
    context: int
    num_blocks: int
    tokenizer: Tokenizer
    trained_for_sweep: bool = False
    versions: tuple[int, ...] = ()
    """Merges in each block, where the model was taken from a run."""

    @property
    def modes(self) -> tuple[Mode, ...]:
        return ("ar", "verify", "sweep") if self.trained_for_sweep else ("ar", "verify")
