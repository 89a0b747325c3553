"""The recipe: one TOML file that describes a run, as frozen and checked dataclasses.

Knows the keys, their types and which combinations make sense; knows nothing of torch, files of text
or networks. Unknown keys are errors. Precedence: file < `BLOCKTRAIN_<SECTION>_<KEY>` < `--set`.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import os
import re
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from blocktrain.codec_spec import CodecSpec
from blocktrain.errors import RecipeError

ENVIRONMENT_PREFIX = "BLOCKTRAIN_"
MAX_CONTEXT = 1 << 20
"""A block's tables grow with the context, and a recipe may come from a stranger."""
MAX_WIDTH = 1 << 24
"""Of every side of a layer's matrices: their sizes then fit into 64 bits, whatever a recipe says."""
MAX_BLOCKS, MAX_LAYERS = 1 << 16, 1 << 12
"""Of a run, and of one block. A recipe may be a stranger's; with 10^8 layers `train` had not begun after
eight minutes, and SIGTERM did not end it."""
MAX_MIRRORS = 16
REMOVED_CHOICES = {
    (
        "objective.kind",
        "composed",
    ): ", which was removed: it was 0.039 nats behind at equal operations "
    "(docs/decisions/0008); use denoise, or commit 59aa936 to go on with such a run",
}
"""What to tell the owner of an old recipe."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise RecipeError(message)


def _refuse_settings(config: Any, keys: Iterable[str], told: str) -> None:
    """Settings that mean nothing here must not be set: who sets one believes that it does something."""
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    for key in keys:
        _require(getattr(config, key) == defaults[key], told.format(key))


ONLY_OURS = ("mixer", "condition_width", "convolution")
"""Settings of [model] that only the family `blocktrain` has, and those that it has not."""
ONLY_OTHERS = (
    "kv_heads",
    "head_width",
    "feedforward_width",
    "rope_theta",
    "rope_scaling",
    "norm_eps",
    "tied",
    "padded_vocabulary",
)
PER_BLOCK: Mapping[str, str] = {
    "block_layers": "layers_per_block",
    "block_widths": "width",
    "block_heads": "heads",
}
"""Lists of [model] with a number for each block, and the setting whose place they take."""
OTHER_FAMILIES_DEFAULTS: Mapping[str, Mapping[str, float]] = {
    # A plain causal model knows no hints, and its loss has no weight of 4 to clip for.
    "objective": {"hint_probability": 0.0},
    "training": {"clip_norm": 1.0},
}
"""What a recipe of another family than `blocktrain` has where it says nothing."""
SERIAL_DEFAULTS: Mapping[str, Mapping[str, float]] = {
    # Parts that train at the same time all correct the same error, so their moves add up to too much: from
    # scratch at 3e-3 that is 1.2 nats per byte where end to end is 0.68 (docs/decisions/0019).
    "training": {"matrix_lr": 3e-4, "other_lr": 3e-4, "reference": False},
}
"""What a recipe with `objective.kind = "serial"` has where it says nothing."""


class RopeScaling(typing.NamedTuple):
    """How Llama 3 stretches its rotary positions to a longer context: slow frequencies are divided by
    `factor`, fast ones kept, with a smooth passage between."""

    factor: float
    low_frequency: float
    high_frequency: float
    original_context: float

    @classmethod
    def parse(cls, text: str) -> RopeScaling:
        kind, _, numbers = text.partition(":")
        try:
            parsed = cls(*map(float, numbers.split(",")))
        except (ValueError, TypeError):
            parsed = cls(0, 0, 0, 0)
        _require(
            kind == "llama3"
            and all(math.isfinite(number) and number > 0 for number in parsed)
            and parsed.low_frequency < parsed.high_frequency,
            "model.rope_scaling must be llama3:FACTOR,LOW,HIGH,CONTEXT, numbers above 0 and LOW below HIGH, "
            f"as in llama3:8,1,4,8192; found {text!r}",
        )
        return parsed

    @property
    def text(self) -> str:
        """As a recipe has it, with every digit: a context of 1048576 has seven."""
        return "llama3:" + ",".join(str(int(one)) if one.is_integer() else repr(one) for one in self)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    family: Literal["blocktrain", "llama", "qwen3"] = "blocktrain"
    """What a block is made of. `blocktrain`: adaptive norms and short convolutions, trained to denoise;
    `llama` and `qwen3`: the layers of those models, a plain causal model that others can load."""
    width: int = 384
    """Size of the residual stream (d)."""
    heads: int = 6
    """Attention heads; must divide `width` into an even head width."""
    blocks: int = 4
    """Number of blocks (B), each trained alone."""
    layers_per_block: int = 3
    """Layers in one block (L_b); the end-to-end reference has the layers of all blocks."""
    block_layers: tuple[int, ...] | None = None
    """Layers of each block where they differ, as in [3, 3, 3, 12]; then `layers_per_block` does not count."""
    block_widths: tuple[int, ...] | None = None
    """Width of each block where they differ; needs `objective.codebook = "own"`, `llama` or `qwen3`, whose
    blocks have an output map of their own. The reference has `width`."""
    block_heads: tuple[int, ...] | None = None
    """Attention heads of each block where they differ."""
    context: int = 512
    """Tokens a block sees at once (T)."""
    feedforward: int = 4
    """Width of the feed-forward layer as a multiple of `width`."""
    mixer: Literal["attention", "none"] = "attention"
    """`none` leaves feed-forward layers only: the litepaper's MLP block."""
    condition_width: int = 64
    """Size of the vector that every norm's gain and shift are linear maps of."""
    convolution: int = 4
    """Taps of the causal depthwise convolution in front of each sub-layer; 0 for none."""
    kv_heads: int | None = None
    """Heads of keys and values (`llama`, `qwen3`), each shared by heads / kv_heads queries; None: `heads`."""
    head_width: int | None = None
    """Channels of a head (`llama`, `qwen3`); None: width / heads."""
    feedforward_width: int | None = None
    """Width of the gated feed-forward layer (`llama`, `qwen3`); None: feedforward * width."""
    rope_theta: float = 10000.0
    """Base of the rotary positions (`llama`, `qwen3`)."""
    rope_scaling: str | None = None
    """Rotary positions for a longer context (`llama`, `qwen3`), as in `llama3:8,1,4,8192`: factor, low and
    high frequency factor, context before."""
    norm_eps: float = 1e-6
    """What the norms add to the variance (`llama`, `qwen3`)."""
    tied: bool = False
    """Whether the output map is the embedding (`llama`, `qwen3`)."""
    padded_vocabulary: int | None = None
    """Rows of embedding and output map (`llama`, `qwen3`) where a model has more than its tokenizer has
    tokens; those beyond are never predicted."""

    def __post_init__(self) -> None:
        for key in ("width", "heads", "blocks", "layers_per_block", "context", "feedforward"):
            _require(getattr(self, key) >= 1, f"model.{key} must be at least 1, found {getattr(self, key)}")
        _require(
            self.head_width is None or (self.head_width >= 2 and self.head_width % 2 == 0),
            f"model.head_width must be even, for rotary embedding, and at least 2, found {self.head_width}",
        )
        _require(
            self.head_width is not None or self.width % (2 * self.heads) == 0,
            f"model.width ({self.width}) must be a multiple of twice model.heads ({self.heads}), so that "
            "rotary embedding can pair the channels of a head; change one of them",
        )
        _refuse_settings(
            self,
            ONLY_OURS if self.family != "blocktrain" else ONLY_OTHERS,
            f'"model.{{}}" does not apply to model.family = "{self.family}"; leave it out',
        )
        for key in ("kv_heads", "feedforward_width", "padded_vocabulary"):
            value = getattr(self, key)
            _require(value is None or value >= 1, f"model.{key} must be at least 1, found {value}")
        _require(
            self.heads % (self.kv_heads or self.heads) == 0,
            f"model.heads ({self.heads}) must be a multiple of model.kv_heads ({self.kv_heads})",
        )
        for told, value in (
            ("width", self.width),
            ("heads times the width of one", self.heads * self.channels_per_head),
            ("feed-forward width", self.feedforward_width or self.feedforward * self.width),
        ):
            _require(value <= MAX_WIDTH, f"model: {told} must be at most {MAX_WIDTH}, found {value}")
        for key, most in (("blocks", MAX_BLOCKS), ("layers_per_block", MAX_LAYERS)):
            value = getattr(self, key)
            _require(value <= most, f"model.{key} must be at most {most}, found {value}")
        _require(self.rope_theta > 1, f"model.rope_theta must be above 1, found {self.rope_theta}")
        _require(0 < self.norm_eps < 1, f"model.norm_eps must be between 0 and 1, found {self.norm_eps}")
        if self.rope_scaling is not None:
            RopeScaling.parse(self.rope_scaling)
        _require(
            self.context <= MAX_CONTEXT, f"model.context must be at most {MAX_CONTEXT}, found {self.context}"
        )
        _require(
            self.condition_width >= 2,
            f"model.condition_width must be at least 2, found {self.condition_width}",
        )
        _require(
            0 <= self.convolution <= 16,
            f"model.convolution must be between 0 and 16 taps, found {self.convolution}",
        )
        for key in PER_BLOCK:
            numbers = getattr(self, key)
            _require(
                numbers is None or len(numbers) == self.blocks,
                f"model.{key} must have a number for each of the {self.blocks} blocks (model.blocks), found "
                f"{0 if numbers is None else len(numbers)}",
            )
        if given := [key for key in PER_BLOCK if getattr(self, key) is not None]:
            for block in range(self.blocks):
                try:
                    self.of_block(block)
                except RecipeError as error:
                    raise RecipeError(f"block {block} of model.{' and '.join(given)}: {error}") from None

    @property
    def channels_per_head(self) -> int:
        return self.head_width or self.width // self.heads

    def of_block(self, block: int) -> ModelConfig:
        """The model as this one block has it: its own layers, width and heads, as if all were like it."""
        own: dict[str, Any] = {}
        for key, setting in PER_BLOCK.items():
            numbers = getattr(self, key)
            own |= {} if numbers is None else {setting: numbers[block], key: None}
        return dataclasses.replace(self, **own) if own else self

    def step_cost(self, block: int) -> float:
        """A step of this block costs as much as one of so many layers of `width`."""
        own = self.of_block(block)
        return own.layers_per_block * (own.width / self.width) ** 2

    def layers_before(self, block: int) -> int:
        """Layers of the blocks before this one; of `blocks`, those of all."""
        return sum(self.of_block(one).layers_per_block for one in range(block))


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    kind: Literal["denoise", "chain", "serial"] = "denoise"
    """`denoise`: the published block-local objective, blocks independent (plain cross entropy where the
    family knows no noise); `chain`: a serial model, in which a block takes the features of the frozen one
    before it as input; `serial`: parts of one deep model, as `import --parts` makes them, each trained
    with the exact loss through the frozen others."""
    hint_probability: float = 0.15
    """Share of sequences trained with a noised target; the rest see the null hint. 1 is the litepaper."""
    sweep_probability: float = 0.0
    """Share of sequences, of those with a noised target, whose context is unknown beyond a random prefix; for
    writing many tokens in one traversal (mode `sweep`), which also wants sigma_min of about 0.15."""
    sigma_min: float = 1.0
    """Lowest noise of the partition; the last block ends here."""
    sigma_max: float = 10.0
    """Highest noise; block 0 starts here."""
    sigma_data: float = 0.5
    """Scale of the data in the EDM preconditioning."""
    p_mean: float = -1.2
    """Mean of ln sigma before truncation."""
    p_std: float = 1.2
    """Standard deviation of ln sigma before truncation."""
    overlap: float = 0.1
    """How far each training interval is widened, as a share of its log-width, on both sides."""
    codebook: Literal["fixed", "learned", "own"] = "fixed"
    """`fixed`: seeded rows that nothing trains; `learned`: one table shared by all blocks; `own`: every block
    learns its output map and knows no hints, which large vocabularies need: after 400 steps with 16,384
    tokens 0.73 nats per byte instead of 1.05."""
    hint: Literal["edm", "bayes"] = "edm"
    """How a block reads its noised target z. `edm`: as published, c_in z in and c_skip z out. `bayes`: the
    expected target given z alone in, and z's own likelihood z E / sigma^2 in the logits, so that the block
    learns only what context adds. `sweep` needs that: with it, and attention both ways, its text had 4.87
    nats per byte by a judge, with neither 6.04 (docs/history/2026-11-15.md)."""
    loss: Literal["ce", "mse"] = "ce"
    """`mse` is the litepaper's embedding-regression ablation."""
    logit_scale: float = 12.0
    """Start of the learned scale g in front of the logits."""

    def __post_init__(self) -> None:
        _require(
            0 < self.sigma_min < self.sigma_max and math.isfinite(self.sigma_max),
            f"objective.sigma_min ({self.sigma_min}) must be above 0 and below objective.sigma_max "
            f"({self.sigma_max})",
        )
        _require(
            0.0 <= self.hint_probability <= 1.0,
            f"objective.hint_probability must be between 0 and 1, found {self.hint_probability}",
        )
        _require(
            0.0 <= self.sweep_probability <= self.hint_probability,
            f"objective.sweep_probability ({self.sweep_probability}) must be between 0 and "
            f"objective.hint_probability ({self.hint_probability}): unknown context leaves only the hint",
        )
        _require(
            self.sweep_probability == 0 or self.kind == "denoise",
            f'objective.sweep_probability needs objective.kind = "denoise", found {self.kind!r}',
        )
        _require(
            self.codebook != "own" or (self.hint_probability == 0 and self.loss == "ce"),
            'objective.codebook = "own" leaves no common targets that could be noised: set '
            'objective.hint_probability = 0 and objective.loss = "ce"',
        )
        _require(
            0.0 <= self.overlap < 1.0,
            f"objective.overlap must be at least 0 and below 1, found {self.overlap}",
        )
        for key in ("sigma_data", "p_std", "logit_scale"):
            _require(getattr(self, key) > 0, f"objective.{key} must be above 0, found {getattr(self, key)}")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    corpus: str = "builtin"
    """`builtin` (Python's own documentation and sources), a file, a folder, or `hf:NAME`."""
    dataset: str | None = None
    """Folder that `blocktrain data prepare` made; takes the place of corpus, tokenizer, valid_fraction and
    max_bytes."""
    own_share: float = 0.0
    """Share of a block's batches that comes from its own cluster of the dataset (`data prepare --clusters`),
    the rest from all text: blocks specialise, and the text so far chooses among them. 0: all blocks alike."""
    mirrors: str | None = None
    """Addresses of copies of the text's folder, separated by spaces; workers ask these first and the
    coordinator last. Leave the held-out and pooling shards out of a copy."""
    tokenizer: Literal["byte"] = "byte"
    """How text becomes tokens."""
    valid_fraction: float = 0.05
    """Share of the text held out at its end, where the corpus brings no split of its own."""
    max_bytes: int | None = None
    """Cut the training text here; None for all of it."""

    def __post_init__(self) -> None:
        _require(self.dataset != "", "data.dataset is empty; name a folder that `data prepare` made")
        _require(bool(self.corpus), "data.corpus is empty; name `builtin`, a file, a folder or hf:NAME")
        _require(0 <= self.own_share <= 1, f"data.own_share must be between 0 and 1, found {self.own_share}")
        for mirror in self.mirror_addresses:
            _require(
                re.fullmatch(r"https?://[!-~]+", mirror) is not None,
                f"data.mirrors: expected http:// or https:// addresses with spaces between, found {mirror!r}",
            )
        _require(len(self.mirror_addresses) <= MAX_MIRRORS, f"data.mirrors: at most {MAX_MIRRORS} addresses")
        _require(
            0 < self.valid_fraction <= 0.5,
            f"data.valid_fraction must be above 0 and at most 0.5, found {self.valid_fraction}",
        )
        _require(
            self.max_bytes is None or self.max_bytes > 0,
            f"data.max_bytes must be above 0, found {self.max_bytes}",
        )

    @property
    def mirror_addresses(self) -> list[str]:
        return (self.mirrors or "").split()


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    steps: int = 1000
    """Optimizer steps for each block, and for the reference."""
    batch: int = 64
    """Sequences per step; tokens per step is batch * model.context."""
    optimizer: Literal["muon", "adamw"] = "muon"
    """`muon`: Muon on the layers' matrices and AdamW on the rest; `adamw`: AdamW on everything."""
    matrix_lr: float = 3e-3
    """Learning rate of the layers' matrices."""
    other_lr: float = 3e-3
    """Learning rate of embeddings, norms, conditioning and the output map."""
    reference_matrix_lr: float | None = None
    """`matrix_lr` of the end-to-end reference; None for the same."""
    reference_other_lr: float | None = 1e-3
    """`other_lr` of the end-to-end reference; None for the same. 1e-3 was found at 12 layers and 1000 steps
    and is too low for small or short runs: `benchmarks/tune.py` finds the rates of both sides."""
    weight_decay: float = 0.1
    """Decoupled weight decay on the layers' matrices."""
    warmup_steps: int = 50
    """Steps of linear warm-up."""
    final_lr: float = 0.0
    """Learning rate at the end of the cosine, as a share of the peak."""
    clip_norm: float = 4.0
    """Gradient norm limit; the loss weight of the objective is about 4, so this is 1 for plain CE."""
    order: Literal["sequential", "turns"] = "sequential"
    """`sequential`: one block after another; `turns`: one step of each block in turn, where the frozen blocks
    of a `chain` or `serial` model are copies refreshed every `swarm.steps_per_round` steps, as in a swarm."""
    checkpoint_seconds: float = 60.0
    """How often training state is saved for --resume."""
    reference: bool = True
    """Also train the end-to-end reference of the same layers."""
    compile: bool | None = None
    """torch.compile; None means on CUDA only."""
    micro_batch: int | Literal["auto"] | None = None
    """Sequences of a batch that are on the device at once; their gradients add up to those of the batch, to
    rounding. None: all of it; `auto`: as many as fit into the memory of the device."""
    recompute: bool = False
    """Keep only the input of each layer for the backward pass and run the layer again there: about a third
    more operations, and a layer's activations in place of a block's."""
    momentum: Literal["float32", "bfloat16"] = "float32"
    """How Muon keeps its momentum; `bfloat16` saves 2 bytes per value of the layers' matrices."""
    frozen_host_bytes: int = 1 << 30
    """Host memory for the features of frozen blocks upstream (`objective.kind = "chain"` or `"serial"`); less
    of it means more trips of weights to the device, and the same result."""

    def __post_init__(self) -> None:
        for key in ("steps", "batch"):
            _require(
                getattr(self, key) >= 1, f"training.{key} must be at least 1, found {getattr(self, key)}"
            )
        for key in ("matrix_lr", "other_lr", "clip_norm", "checkpoint_seconds"):
            _require(getattr(self, key) > 0, f"training.{key} must be above 0, found {getattr(self, key)}")
        for key in ("reference_matrix_lr", "reference_other_lr"):
            rate = getattr(self, key)
            _require(rate is None or rate > 0, f"training.{key} must be above 0, found {rate}")
        _require(
            self.frozen_host_bytes >= 1,
            f"training.frozen_host_bytes must be at least 1, found {self.frozen_host_bytes}",
        )
        _require(
            self.micro_batch is None or self.micro_batch == "auto" or self.micro_batch >= 1,
            f"training.micro_batch must be at least 1, or `auto`, found {self.micro_batch}",
        )
        _require(
            self.momentum == "float32" or self.optimizer == "muon",
            'training.momentum = "bfloat16" is for training.optimizer = "muon"; AdamW keeps fp32',
        )
        _require(
            self.warmup_steps >= 0, f"training.warmup_steps must not be negative, found {self.warmup_steps}"
        )
        _require(0 <= self.final_lr <= 1, f"training.final_lr must be between 0 and 1, found {self.final_lr}")
        _require(
            self.weight_decay >= 0, f"training.weight_decay must not be negative, found {self.weight_decay}"
        )


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    max_bytes: int | None = None
    """Score only the first bytes of the held-out text, of each cluster its share; None for all of it."""
    noise_draws: int = 4
    """Independent noise draws for compositions that use noise."""
    batch: int = 64
    """Windows per forward pass."""
    pooling_bytes: int = 262144
    """Training-split text, never trained on, that consensus weights are fitted on."""
    sample_bytes: int = 400
    """Length of the text sample written with the report."""

    def __post_init__(self) -> None:
        for key in ("noise_draws", "batch"):
            _require(
                getattr(self, key) >= 1, f"evaluation.{key} must be at least 1, found {getattr(self, key)}"
            )
        _require(
            self.pooling_bytes >= 2,
            f"evaluation.pooling_bytes must be at least 2, found {self.pooling_bytes}",
        )
        _require(
            self.max_bytes is None or self.max_bytes > 1,
            f"evaluation.max_bytes must be above 1, found {self.max_bytes}",
        )
        _require(
            self.sample_bytes >= 0, f"evaluation.sample_bytes must not be negative, found {self.sample_bytes}"
        )


@dataclass(frozen=True, kw_only=True)
class SwarmConfig:
    """How a run is spread over workers; used by `coordinator`, `worker`, `swarm` and `simulate` only."""

    steps_per_round: int = 30
    """Optimizer steps of one assignment (H)."""
    rounds: int = 50
    """Rounds of each block; the run ends when every block has had them."""
    replicas: int = 2
    """Workers wanted on each block; a round with fewer waits for its deadline."""
    codec: str = "sparse:64"
    """How updates travel: `sparse:K`, `sign` (1 bit per parameter), `bits:4`, `bits:8` or `dense`
    (uncompressed)."""
    error_feedback: float = 0.95
    """Share of what compression left out that is added to the next update (beta)."""
    outer_lr: float = 1.0
    """Step size of the merge (alpha)."""
    policy: Literal["carry", "drop"] = "carry"
    """`carry`: computed deadlines, late updates count at a decayed weight; `drop`: the litepaper's rule."""
    max_age: int = 3
    """Rounds by which an update may be late under `carry`; an older one is refused."""
    keep_snapshots: int | None = None
    """Newest snapshots of each block that stay stored, and the first; all where absent. A deleted one follows
    from the first and the updates, which stay. Not with `dense`."""
    age_decay: float = 0.5
    """Weight of an update for each round it is late."""
    deadline_quantile: float = 0.85
    """Share of arrivals that a computed deadline lets in."""
    deadline_slack: float = 1.2
    """Factor on that quantile, so that equal workers are not cut by their own jitter."""
    min_deadline_seconds: float = 2.0
    """No computed deadline is shorter."""
    max_deadline_seconds: float = 600.0
    """No computed deadline is longer; also the deadline before anything has arrived."""
    drop_deadline_seconds: float = 60.0
    """Fixed deadline (tau) of the policy `drop`."""
    lease_seconds: float = 30.0
    """A worker that sent nothing for this long is no longer waited for."""
    max_lead: int = 4
    """Rounds a worker may take its own block ahead of the stalest before it is moved there."""
    run_ahead: float = 0.25
    """Share of a round that a worker trains on from its own weights while the snapshot it should start from
    is still being merged; then it waits. Hides transfers; further ahead, updates go stale and the loss is
    worse (docs/history). 0 is lockstep, 1 never waits."""
    stand_in: float = 0.9
    """A worker alone on its block, where `replicas` are wanted, fills this share of its round's time with the
    steps of one who is away. 0: it waits for the deadline."""
    evaluate_every_seconds: float = 30.0
    """How often the assembled model is scored on held-out text."""

    def __post_init__(self) -> None:
        for key in ("steps_per_round", "rounds", "replicas", "max_lead"):
            _require(getattr(self, key) >= 1, f"swarm.{key} must be at least 1, found {getattr(self, key)}")
        CodecSpec.parse(self.codec)
        _require(
            0 <= self.error_feedback <= 1,
            f"swarm.error_feedback must be between 0 and 1, found {self.error_feedback}",
        )
        _require(
            0 < self.outer_lr <= 10, f"swarm.outer_lr must be above 0 and at most 10, found {self.outer_lr}"
        )
        if (kept := self.keep_snapshots) is not None:
            least = self.max_age + 2
            _require(
                kept >= least, f"swarm.keep_snapshots must be at least {least} (max_age + 2), found {kept}"
            )
            _require(self.codec != "dense", "swarm.keep_snapshots: late `dense` updates need old snapshots")
        _require(0 <= self.max_age <= 100, f"swarm.max_age must be between 0 and 100, found {self.max_age}")
        _require(
            0 < self.age_decay <= 1, f"swarm.age_decay must be above 0 and at most 1, found {self.age_decay}"
        )
        _require(
            0 < self.deadline_quantile <= 1,
            f"swarm.deadline_quantile must be above 0 and at most 1, found {self.deadline_quantile}",
        )
        _require(0 <= self.run_ahead <= 1, f"swarm.run_ahead must be between 0 and 1, found {self.run_ahead}")
        _require(0 <= self.stand_in <= 1, f"swarm.stand_in must be between 0 and 1, found {self.stand_in}")
        _require(
            self.deadline_slack >= 1, f"swarm.deadline_slack must be at least 1, found {self.deadline_slack}"
        )
        _require(
            0 < self.min_deadline_seconds <= self.max_deadline_seconds,
            "swarm.min_deadline_seconds must be above 0 and at most swarm.max_deadline_seconds",
        )
        for key in ("drop_deadline_seconds", "lease_seconds", "evaluate_every_seconds"):
            _require(getattr(self, key) > 0, f"swarm.{key} must be above 0, found {getattr(self, key)}")

    @property
    def total_steps(self) -> int:
        """Length of the learning-rate schedule; takes the place of training.steps in a swarm."""
        return self.rounds * self.steps_per_round


@dataclass(frozen=True, kw_only=True)
class TrustConfig:
    """Who may join and what an update must show before it counts; used by the coordinator and its judges."""

    admission: Literal["open", "invite", "allowlist"] = "open"
    """`open`: a proof-of-work stamp; `invite`: a token from `blocktrain invite`, used once; `allowlist`: ids
    in allowlist.txt of the coordinator's data folder."""
    stamp_bits: int = 20
    """Leading zero bits of the stamp of an `open` run; 20 is about 0.7 s of one core in Python, and each bit
    more doubles it. 0 for none."""
    judge: Literal["coordinator", "external", "off"] = "coordinator"
    """Who scores updates: a thread of the coordinator (other judges may help), `blocktrain judge` processes
    only, or nobody: then every well-formed update counts."""
    guard: bool = True
    """Compare the loss of held-out and training text before and after each merge, and leave out the updates
    that make it worse."""
    private_text: str | None = None
    """File of text that only coordinator and judges have, of the kind the model is for; it takes the place of
    the run's held-out text in judging. None takes that held-out text, which is not served to workers but may
    be public elsewhere."""
    compute_share: float = 0.1
    """Compute of judging as a share of the compute it judges; the number of scored windows follows."""
    norm_low: float = 0.1
    """An update with a norm below this many running medians is refused."""
    norm_high: float = 10.0
    """An update with a norm above this many running medians is refused."""
    probation_verdicts: int = 3
    """Good verdicts before a newcomer's updates are merged, where established workers are at the block."""
    judge_lease_seconds: float = 20.0
    """A judge that has not answered for this long loses the update to another."""
    judge_patience_seconds: float = 120.0
    """How long a round waits for a verdict; an update judged later counts as late."""
    max_workers_per_address: int = 32
    """Identities admitted from one IPv4 address or IPv6 /64; below the seats of a block, so that no address
    can take them all."""
    max_workers_per_block: int = 64
    """Seats of one block; further workers are sent elsewhere or wait."""
    ban_below: float = 0.2
    """A worker whose rating falls below this, after enough verdicts, is banned for `ban_seconds`."""
    ban_seconds: float = 3600.0
    """Length of such a ban."""

    def __post_init__(self) -> None:
        _require(
            0 <= self.stamp_bits <= 32, f"trust.stamp_bits must be between 0 and 32, found {self.stamp_bits}"
        )
        _require(
            0 < self.compute_share <= 1,
            f"trust.compute_share must be above 0 and at most 1, found {self.compute_share}",
        )
        _require(
            0 <= self.norm_low < 1 < self.norm_high,
            "trust.norm_low must be below 1 and trust.norm_high above",
        )
        _require(
            self.probation_verdicts >= 0,
            f"trust.probation_verdicts must not be negative, found {self.probation_verdicts}",
        )
        _require(
            0 <= self.ban_below < 0.5,
            f"trust.ban_below must be at least 0 and below 0.5, found {self.ban_below}",
        )
        for key in ("max_workers_per_address", "max_workers_per_block"):
            _require(getattr(self, key) >= 1, f"trust.{key} must be at least 1, found {getattr(self, key)}")
        for key in ("judge_lease_seconds", "judge_patience_seconds", "ban_seconds"):
            _require(getattr(self, key) > 0, f"trust.{key} must be above 0, found {getattr(self, key)}")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    name: str = "run"
    """Shown in reports."""
    seed: int = 0
    """Everything random is derived from it."""
    model: ModelConfig = field(default_factory=ModelConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    swarm: SwarmConfig = field(default_factory=SwarmConfig)
    trust: TrustConfig = field(default_factory=TrustConfig)

    def __post_init__(self) -> None:
        _require(0 <= self.seed < 2**63, f"seed must be at least 0 and below 2^63, found {self.seed}")
        _require(
            self.objective.codebook != "learned" or self.training.order == "turns",
            'objective.codebook = "learned" shares one table between the blocks, so they must train side '
            'by side: set training.order = "turns", or objective.codebook = "fixed"',
        )
        if self.model.family == "blocktrain":
            _require(
                self.objective.kind != "serial",
                'objective.kind = "serial" needs model.family = "llama" or "qwen3"',
            )
        else:
            _require(
                self.objective.kind != "chain" and self.objective.hint_probability == 0,
                f'model.family = "{self.model.family}" is trained by plain cross entropy: it knows no '
                "hints and takes no block's features beside its own; set objective.hint_probability = 0 and "
                'objective.kind = "denoise"',
            )
            keys = {one.name for one in dataclasses.fields(ObjectiveConfig)} - {"kind", "hint_probability"}
            _require(
                not (self.model.tied and self.objective.kind == "serial" and self.model.blocks > 1),
                'objective.kind = "serial": the first and the last part cannot share one matrix; set '
                "model.tied = false",
            )
            _refuse_settings(
                self.objective,
                sorted(keys),
                f'"objective.{{}}" does not apply to model.family = "{self.model.family}", which is trained '
                "by plain cross entropy; leave it out",
            )
        # Blocks of other widths share no vectors: neither the rows of a codebook nor features.
        _require(
            self.model.block_widths is None
            or self.model.family != "blocktrain"
            or self.objective.codebook == "own",
            "model.block_widths needs blocks with an output map of their own: set objective.codebook = "
            f'"own", or leave it out and give the blocks other layers; found {self.objective.codebook!r}',
        )
        _require(
            self.model.block_widths is None or self.objective.kind == "denoise",
            f"objective.kind = {self.objective.kind!r} hands features from block to block, which must then "
            "have one width: leave model.block_widths out",
        )
        _require(
            self.model.block_heads is None or self.objective.kind != "serial",
            'objective.kind = "serial" makes one model of its parts, which has the same heads in every '
            "layer: leave model.block_heads out",
        )
        _require(
            self.training.batch > 1 or self.objective.hint_probability in (0.0, 1.0),
            f"objective.hint_probability = {self.objective.hint_probability} needs sequences with a hint and "
            "without one in every batch: set training.batch to 2 or more, or the probability to 0 or 1",
        )

        # A serial model needs all its blocks for every text, and a sweep refines one text in all of them.
        _require(
            self.data.own_share == 0
            or (self.objective.kind == "denoise" and self.objective.sweep_probability == 0),
            f"data.own_share = {self.data.own_share:g} makes blocks that know different texts, and "
            f"objective.kind = {self.objective.kind!r} with objective.sweep_probability = "
            f"{self.objective.sweep_probability:g} has each go on from what another made of the same text: "
            'use objective.kind = "denoise" without sweep, or data.own_share = 0',
        )

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def changed_settings(stored: dict[str, Any], recipe: Recipe) -> dict[str, tuple[Any, Any]]:
    """The dotted settings in which a recipe differs from one that was stored: (stored, now).

    A setting that did not exist when the recipe was stored counts as its default, so that runs of older
    versions still open.
    """

    def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in values.items():
            found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
        return found

    # Both through JSON, where a tuple is a list.
    old, new = (flat(json.loads(json.dumps(one))) for one in (with_defaults(stored), recipe.to_dict()))
    return {
        key: (old.get(key), new.get(key))
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    }


CHANGEABLE: Mapping[str, str] = {
    "name": "shown on pages and in reports",
    "data.mirrors": "where workers that start from now on fetch the text",
    "training.reference_matrix_lr": "nothing here: a swarm trains no reference",
    "training.reference_other_lr": "nothing here: a swarm trains no reference",
    "swarm.rounds": "more: the run goes on; fewer: it ends earlier, or at once",
    "swarm.replicas": "how many updates a round waits for, from the next round on",
    "swarm.policy": "what becomes of late updates, from the next round on",
    "swarm.keep_snapshots": "which old snapshots are deleted, from the next merge on",
    "swarm.age_decay": "weight of updates that arrive late from now on",
    "swarm.deadline_quantile": "deadlines from the next round on",
    "swarm.deadline_slack": "deadlines from the next round on",
    "swarm.min_deadline_seconds": "deadlines from the next round on",
    "swarm.max_deadline_seconds": "deadlines from the next round on",
    "swarm.drop_deadline_seconds": "deadlines from the next round on",
    "swarm.lease_seconds": "how long a silent worker is waited for",
    "swarm.max_lead": "when a worker is sent to a block that is behind",
    "swarm.stand_in": "how much of its time a lone worker fills with an absent one's steps",
    "swarm.evaluate_every_seconds": "how often the model is scored",
    "trust.admission": "who may join from now on; who has joined stays",
    "trust.stamp_bits": "the stamp of workers that join from now on",
    "trust.judge": "who judges from now on",
    "trust.guard": "whether merges from now on are guarded",
    "trust.compute_share": "how much text an update is scored on",
    "trust.norm_low": "which updates are refused from now on",
    "trust.norm_high": "which updates are refused from now on",
    "trust.probation_verdicts": "how long newcomers are on probation",
    "trust.judge_lease_seconds": "how long a silent judge keeps an update",
    "trust.judge_patience_seconds": "how long a round waits for a verdict",
    "trust.max_workers_per_address": "how many may join from one address from now on",
    "trust.max_workers_per_block": "seats of a block; who sits there stays",
    "trust.ban_below": "when a worker is banned from now on",
    "trust.ban_seconds": "length of bans from now on",
}
"""Settings that may differ when a coordinator is started again on its run, and what changing them does.

Only the coordinator reads these (new workers the mirrors too). Everything else is either in weights and
ledger already, or was read by workers when they joined."""

FIXED: Mapping[str, str] = {
    "seed": "first weights and codebook were drawn from it",
    "model": "the weights have that shape",
    "objective": "the weights were trained for that",
    "data": "every worker has that text and vocabulary",
    "training": "workers that have joined train with it",
    "evaluation": "scores before and after could not be compared",
    "swarm": "workers that have joined, and the updates in the ledger, depend on it",
    "trust": "judges that have begun use it",
}
"""Why the other settings, by section, may not change in a run."""


def refused_changes(changed: Mapping[str, tuple[Any, Any]]) -> list[str]:
    """A sentence for each changed setting that a run does not take."""
    return [
        f"{key} was {old!r} and is {new!r} ({FIXED[key.split('.')[0]]})"
        for key, (old, new) in changed.items()
        if key not in CHANGEABLE
    ]


def with_settings(recipe: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe as it is written down, with dotted settings put in; the given one stays as it is."""
    result: dict[str, Any] = json.loads(json.dumps(recipe))
    for dotted, value in settings.items():
        *sections, key = dotted.split(".")
        target = result
        for section in sections:
            target = target.setdefault(section, {})
        target[key] = value
    return result


# A wheel has the recipes beside this file, a source checkout at its top.
PACKAGED_RECIPES = Path(__file__).parent / "recipes"
SOURCE_RECIPES = Path(__file__).parents[2] / "recipes"


def shipped_recipes() -> dict[str, Path]:
    """Recipes that come with the program, by name."""
    files = [*SOURCE_RECIPES.glob("*.toml"), *PACKAGED_RECIPES.glob("*.toml")]
    return {path.stem: path for path in sorted(files, key=lambda path: path.stem)}


def find_recipe(name: str) -> Path:
    """A file as given, or a shipped recipe by name."""
    path, shipped = Path(name).expanduser(), shipped_recipes()
    if path.is_file():
        return path
    if name.removesuffix(".toml") in shipped:
        return shipped[name.removesuffix(".toml")]
    raise RecipeError(
        f"no recipe file {name}, and no shipped recipe of that name{did_you_mean(name, shipped)} "
        f"({', '.join(shipped)})"
    )


def load_recipe(
    path: Path, overrides: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Recipe:
    """The resolved recipe of a TOML file, the environment and `section.key=value` overrides."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RecipeError(f"no recipe at {path}; the shipped ones are in recipes/") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"cannot read recipe {path}: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"{path} is not valid TOML: {error}") from None
    return resolve_recipe(values, overrides, os.environ if environment is None else environment)


def resolve_recipe(
    values: dict[str, Any], overrides: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Recipe:
    _require(isinstance(values, dict), f"recipe: expected a table, found {values!r}")
    # A copy: the caller's values are also what is stored with the run.
    merged = {key: dict(value) if isinstance(value, dict) else value for key, value in values.items()}
    # The file first, then the environment, then flags: the nearer to the person who types, the stronger.
    for dotted, text in _environment_overrides(environment or {}):
        _assign(merged, dotted, text)
    for override in overrides:
        dotted, equals, text = override.partition("=")
        dotted = dotted.strip()
        _require(bool(equals and dotted), f"--set {override!r}: expected section.key=value")
        _assign(merged, dotted, text.strip())

    def chosen(section: str, key: str) -> str | None:
        values = merged.get(section)
        return str(values[key]) if isinstance(values, dict) and key in values else None

    kinds = [OTHER_FAMILIES_DEFAULTS] if chosen("model", "family") not in (None, "blocktrain") else []
    kinds += [SERIAL_DEFAULTS] if chosen("objective", "kind") == "serial" else []
    for section, defaults in (item for kind in kinds for item in kind.items()):
        given = merged.get(section, {})
        merged[section] = {**defaults, **given} if isinstance(given, dict) else given
    recipe = _build(Recipe, merged, "")
    assert isinstance(recipe, Recipe)
    return recipe


def with_defaults(stored: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe as it was written down, with today's defaults for the keys that it was written without; as it
    is where a newer version wrote it."""
    try:
        return resolve_recipe(dict(stored)).to_dict()
    # A newer version's recipe is compared as it is: its unknown keys then show up as differences.
    except RecipeError:
        return dict(stored)


def _environment_overrides(environment: Mapping[str, str]) -> list[tuple[str, str]]:
    sections = typing.get_type_hints(Recipe)
    del sections["name"], sections["seed"]
    found = []
    for variable, text in sorted(environment.items()):
        # Sections have no underscore in their names, so the first one ends the section.
        section, _, key = variable.removeprefix(ENVIRONMENT_PREFIX).lower().partition("_")
        if variable.startswith(ENVIRONMENT_PREFIX) and section in sections and key:
            known = [f.name for f in dataclasses.fields(sections[section])]
            told = f"the variable {variable} names no key of a recipe: [{section}] has no {key}"
            _require(key in known, told + did_you_mean(key, known))
            found.append((f"{section}.{key}", text))
        elif variable == f"{ENVIRONMENT_PREFIX}SEED":
            found.append(("seed", text))
    return found


def _assign(values: dict[str, Any], dotted: str, text: str) -> None:
    *sections, key = dotted.split(".")
    target = values
    for section in sections:
        nested = target.setdefault(section, {})
        _require(isinstance(nested, dict), f"{dotted}: {section} is a value, not a section")
        target = nested
    target[key] = _Text(text)


@dataclass(frozen=True)
class _Text:
    """A value from the environment or a flag, whose type is known only where it lands."""

    text: str

    def parsed(self, hint: Any) -> Any:
        """TOML where it is TOML; words need no quotes, and `none` is a word where words are expected."""
        try:
            value = tomllib.loads(f"value = {self.text}")["value"]
        except tomllib.TOMLDecodeError:
            value = self.text
        if hint is str or typing.get_origin(hint) is Literal:
            return value if isinstance(value, str) else self.text
        return None if self.text.lower() == "none" else value

    def __repr__(self) -> str:
        return self.text


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean X?` where something known is close, nothing otherwise."""
    close = difflib.get_close_matches(word, list(known), 1)
    return f"; did you mean {close[0]}?" if close else ""


def _build(kind: type[Any], values: Any, where: str) -> Any:
    _require(isinstance(values, dict), f"{where.rstrip('.') or 'recipe'}: expected a table, found {values!r}")
    hints = typing.get_type_hints(kind)
    # A misspelt key that is ignored costs a day of training with a default.
    unknown = sorted(set(values) - set(hints))
    _require(
        not unknown,
        f"unknown recipe key {', '.join(where + key for key in unknown)}; known here: {', '.join(hints)}"
        + (did_you_mean(unknown[0], hints) if unknown else ""),
    )
    return kind(**{key: _coerce(hints[key], value, where + key) for key, value in values.items()})


def _coerce(hint: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(hint):
        assert isinstance(hint, type)
        return _build(hint, value, where + ".")
    if isinstance(value, _Text):
        value = value.parsed(hint)
    if typing.get_origin(hint) is Literal:
        choices = typing.get_args(hint)
        told = f"{where} must be one of {', '.join(map(str, choices))}; found {value!r}"
        _require(value in choices, told + REMOVED_CHOICES.get((where, value), ""))
        return value
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        if value in (None, "none"):  # TOML has no null, and a key left out may have another default
            return None
        words = [arm for arm in typing.get_args(hint) if typing.get_origin(arm) is Literal]
        if any(value in typing.get_args(arm) for arm in words):
            return value
        (hint,) = (arm for arm in typing.get_args(hint) if arm is not type(None) and arm not in words)
    if hint == tuple[int, ...]:
        _require(
            isinstance(value, list | tuple)
            and all(isinstance(one, int) and not isinstance(one, bool) for one in value),
            f"{where} must be a list of integers such as [3, 3, 12], found {value!r}",
        )
        return tuple(value)
    # `lr = 1` in TOML is an int and means 1.0; a bool is an int in Python and means neither.
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    exact = isinstance(value, hint) and (hint is bool or not isinstance(value, bool))
    _require(exact, f"{where} must be {hint.__name__}, found {value!r}")
    # TOML has `nan` and `inf`; no setting has a use for them, and comparisons with NaN pass every range
    # check.
    _require(hint is not float or math.isfinite(value), f"{where} must be finite, found {value!r}")
    return value
