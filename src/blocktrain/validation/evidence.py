"""Evidence: does an update lower the loss of its block on text its worker did not choose?

The same windows, noise levels and noise are scored before and after applying the update (common random
numbers), so what is left is the update's own effect and its error is far below that of either loss. Three
kinds of window: *held-out* text (for a specialised block its own cluster and the rest, each for itself) and
*other* training text, which the worker was not lent, decide together; *assigned* text (the worker's own
batches) against *other* text tells work from copying. The draw follows from `evidence_seed`: the commit, and
a secret of the coordinator, so nobody can choose an update to fit it. Knows nothing of workers, rounds or
verdicts.

Covered: an update that is harmful, empty or noise, also where a hint would hide it: sigma is stratified over
the block's range for the share of windows that a recipe trains with hints. Not covered: harm that does not
show in mean cross entropy of this text (a backdoor, or harm to other text by a worker who has all of this).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from blake3 import blake3
from torch import Tensor

from blocktrain.config import ObjectiveConfig, Recipe
from blocktrain.model.block import Block, Hint
from blocktrain.model.noise import sample_sigma, training_interval
from blocktrain.model.objective import Objective
from blocktrain.training.frozen import logits_behind
from blocktrain.wire.messages import EvidenceReport, GainReport

FORWARDS_PER_STEP = 3
"""A training step costs about as much as this many forward passes of its batch, and one for every block
before it, which is frozen."""
FORWARDS_PER_WINDOW = 2
"""Before and after; a frozen block before the judged one runs once for both."""
GUARD_SHARE = 0.2
"""Part of the compute kept for the guard after the merge."""
WINDOW_PART = 4
"""A scored window is this part of the training context: gains of neighbouring tokens go together, so many
short windows give a smaller error than few long ones at equal compute."""
SHORTEST_WINDOW = 16
FEWEST_WINDOWS = 8
"""Fewest windows of each kind: with fewer no error can be estimated, whatever the budget."""
EARLY_STANDARD_ERRORS = 4.0
"""Standard errors of harm at which the test stops before its budget is spent; several looks, so a strict one.
Gains are measured to the end: updates are ranked by them."""
FINAL_STANDARD_ERRORS = 2.0
"""Standard errors that make a finding at the end."""


@dataclass(frozen=True)
class Budget:
    """Windows that may be scored; each costs `forwards` forward passes of `length` tokens."""

    length: int
    """Tokens of a scored window."""
    held_out: int
    assigned: int
    other: int
    guard: int
    """Windows for the guard of a merge, per merged update."""
    before: int = 0
    """Frozen blocks that run before the judged one, once for all that is compared."""
    behind: int = 0
    """Frozen blocks that run behind it, each time."""

    @property
    def forwards(self) -> int:
        return FORWARDS_PER_WINDOW * (1 + self.behind) + self.before

    def guard_windows(self, merged: int, candidates: int) -> int:
        """For `candidates` merges of these updates and their base, each one forward pass of every window."""
        return max(FEWEST_WINDOWS, self.forwards * merged * self.guard // self.guard_forwards(candidates))

    def guard_forwards(self, candidates: int) -> int:
        return (candidates + 1) * (1 + self.behind) + self.before


def training_tokens(recipe: Recipe, before: int = 0, behind: int = 0) -> int:
    """Cost of the work that one update stands for, in tokens of forward passes."""
    tokens = recipe.training.batch * recipe.model.context
    # A block behind runs forward twice and backward once, for the gradient of its input alone.
    return (FORWARDS_PER_STEP * (1 + behind) + before) * recipe.swarm.steps_per_round * tokens


def evidence_budget(recipe: Recipe, before: int = 0, behind: int = 0) -> Budget:
    """How many windows an update's compute pays for: 40 % held-out, 20 % assigned, 40 % other text."""
    # `trust.compute_share` of the work is the judges': a tenth by default, of which a fifth is the guard's.
    length = min(recipe.model.context, max(SHORTEST_WINDOW, recipe.model.context // WINDOW_PART))
    forwards = FORWARDS_PER_WINDOW * (1 + behind) + before
    work = training_tokens(recipe, before, behind)
    affordable = recipe.trust.compute_share * work / (forwards * length)
    judged = affordable * (1 - GUARD_SHARE)
    return Budget(
        length=length,
        held_out=max(FEWEST_WINDOWS, int(0.4 * judged)),
        assigned=max(FEWEST_WINDOWS, int(0.2 * judged)),
        other=max(FEWEST_WINDOWS, int(0.4 * judged)),
        guard=max(1, int(affordable * GUARD_SHARE)),
        before=before,
        behind=behind,
    )


def evidence_seed(secret: bytes, update_id: str, commit_hash: str) -> int:
    """A 63-bit seed that exists only after the commit and that nobody without the secret can foresee."""
    digest = blake3(f"evidence/{update_id}/{commit_hash}".encode(), key=secret).digest(length=8)
    return int.from_bytes(digest, "little") >> 1


# --- what was found ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gain:
    """Mean fall of the loss in nats per token over windows, with its standard error."""

    mean: float
    error: float
    windows: int

    @classmethod
    def of(cls, differences: Sequence[float]) -> Gain:
        count = len(differences)
        # fsum rounds once, whatever the order of the windows.
        mean = math.fsum(differences) / count
        variance = math.fsum((one - mean) ** 2 for one in differences) / max(1, count - 1)
        return cls(mean, math.sqrt(variance / count), count)

    def plus(self, other: Gain) -> Gain:
        """The sum of both, of windows that have nothing in common."""
        error = math.hypot(self.error, other.error)
        return Gain(self.mean + other.mean, error, self.windows + other.windows)

    def times(self, share: float) -> Gain:
        return Gain(share * self.mean, share * self.error, self.windows)

    def is_loss(self, standard_errors: float) -> bool:
        """True if the loss rose by more than this many standard errors, or is no longer a number."""
        return not math.isfinite(self.mean) or self.mean < -standard_errors * self.error

    @property
    def score(self) -> float:
        """In standard errors; bounded, so that it can be averaged and stored."""
        if not math.isfinite(self.mean):
            return -100.0
        if self.mean == 0.0:
            return 0.0
        return max(-100.0, min(100.0, self.mean / max(self.error, 1e-12)))


@dataclass(frozen=True)
class Evidence:
    held_out: Gain
    assigned: Gain
    other: Gain
    tokens: int
    """Tokens of forward passes that it took."""
    own: Gain | None = None
    """Of `held_out`, the windows of a specialised block's own cluster; None where blocks are alike."""
    rest: Gain | None = None
    """And those of other clusters."""

    @property
    def gain(self) -> Gain:
        """What the update is worth: the mean of its gains on held-out and on other text. Half of it cannot be
        had by knowing the held-out text."""
        return self.held_out.plus(self.other).times(0.5)

    @property
    def mark(self) -> int:
        """1 where the worker's own text gained more than other training text, -1 where less, 0 where they
        differ by less than one standard error: below that the sign is chance, and chance would
        outweigh what a worker that trains little can show."""
        difference = self.assigned.mean - self.other.mean
        error = math.hypot(self.assigned.error, self.other.error)
        return (difference > error) - (difference < -error) if math.isfinite(difference) else 0


def report_of(evidence: Evidence) -> EvidenceReport:
    """The evidence as a judge sends it. JSON has no NaN: a block that the update broke has absent numbers."""

    def told(gain: Gain) -> GainReport:
        if not (math.isfinite(gain.mean) and math.isfinite(gain.error)):
            return GainReport(mean=None, error=None, windows=gain.windows)
        return GainReport(**asdict(gain))

    return EvidenceReport(
        held_out=told(evidence.held_out),
        assigned=told(evidence.assigned),
        other=told(evidence.other),
        tokens=evidence.tokens,
        own=None if evidence.own is None else told(evidence.own),
        rest=None if evidence.rest is None else told(evidence.rest),
    )


def evidence_of(report: EvidenceReport) -> Evidence:
    def gain(told: GainReport) -> Gain:
        if told.mean is None or told.error is None:
            return Gain(math.nan, math.nan, told.windows)
        return Gain(told.mean, told.error, told.windows)

    return Evidence(
        gain(report.held_out),
        gain(report.assigned),
        gain(report.other),
        report.tokens,
        None if report.own is None else gain(report.own),
        None if report.rest is None else gain(report.rest),
    )


# --- drawing -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScoredWindows:
    """Context and target tokens, and the noised targets of those that get a hint: the first ones."""

    tokens_BT: Tensor
    targets_BT: Tensor
    hint: Hint | None = None
    upstream_BTD: Tensor | None = None
    """The features of the frozen blocks upstream, the same before and after."""

    def __len__(self) -> int:
        return self.tokens_BT.shape[0]


def stratified_sigma(
    config: ObjectiveConfig, num_blocks: int, block: int, count: int, generator: torch.Generator
) -> Tensor:
    """One draw from each of `count` equal shares of the block's noise, in random order."""
    # Sorted draws are the quantiles of the block's own noise: with plain draws a small budget would
    # often miss the ends of the range, where harm can hide.
    pool = sample_sigma(config, num_blocks, block, 64 * count, generator).sort().values
    low, high = training_interval(config, num_blocks, block)
    inside = torch.rand(count, generator=generator, device=generator.device)
    places = ((torch.arange(count, device=generator.device) + inside) * 64).long()
    order = torch.randperm(count, generator=generator, device=generator.device)
    return pool[places.clamp(max=len(pool) - 1)][order].clamp(low, high)


def with_hints(
    objective: Objective,
    block: int,
    tokens_BT: Tensor,
    targets_BT: Tensor,
    codebook_VD: Tensor,
    generator: torch.Generator,
) -> ScoredWindows:
    """Windows as the recipe trains them: the share with hints gets stratified noise, the rest none."""
    hinted = round(objective.config.hint_probability * len(tokens_BT))
    if not hinted:
        return ScoredWindows(tokens_BT, targets_BT)
    sigma_P = stratified_sigma(objective.config, objective.model.blocks, block, hinted, generator)
    e_PTD = F.embedding(targets_BT[:hinted], codebook_VD)
    eps_PTD = torch.randn(e_PTD.shape, generator=generator, device=e_PTD.device)
    return ScoredWindows(tokens_BT, targets_BT, Hint(e_PTD + sigma_P[:, None, None] * eps_PTD, sigma_P))


# --- scoring -------------------------------------------------------------------------------------------


@torch.no_grad()
def window_losses(
    block: Block, codebook_VD: Tensor, windows: ScoredWindows, behind: Sequence[Block] = ()
) -> list[float]:
    """Cross entropy of each window in nats per token, of the model that goes on with the parts `behind`."""
    output = block(windows.tokens_BT, codebook_VD, windows.hint, windows.upstream_BTD)
    logits_BTV = logits_behind(behind, output, windows.tokens_BT, codebook_VD)
    ce_BT = F.cross_entropy(
        logits_BTV.flatten(0, 1).float(), windows.targets_BT.flatten(), reduction="none"
    ).view(windows.targets_BT.shape)
    return [float(one) for one in ce_BT.double().mean(dim=1)]


Score = Callable[[int, int], list[float]]
"""Differences of windows [first, end) of a draw."""


def looks(budget: int) -> Iterator[int]:
    """How many windows have been scored at each look: doubling, ending with the whole budget."""
    count = min(budget, 2 * FEWEST_WINDOWS)
    while count < budget:
        yield count
        count *= 2
    yield budget


def sequential_gain(score: Score, budget: int) -> Gain:
    """The gain over the budget's windows, or over as many as it takes to be sure of harm."""
    differences: list[float] = []
    for count in looks(budget):
        differences += score(len(differences), count)
        gain = Gain.of(differences)
        # Harm can be plain after the first 16 windows; what helps is measured to the end, because the
        # guard ranks updates by their gain, and gains cut short when their sign was sure ranked badly.
        if gain.is_loss(EARLY_STANDARD_ERRORS):
            break
    return gain


@dataclass
class Cost:
    """What judges and guard have cost and what was judged, in tokens of forward passes; in /metrics."""

    judging: int = 0
    judged: int = 0
    updates: int = 0

    @property
    def share(self) -> float:
        return self.judging / self.judged if self.judged else 0.0
