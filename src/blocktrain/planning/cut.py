"""The decision of `blocktrain plan`: from machines and a model to the settings of a run, with the reasons.

Pure: no device, clock or network is asked. Memory is `training/memory.py`'s formula, operations are
`training/cost.py`'s, payloads are counted by `wire/codec.py`, what a worker fetches and how long a line takes
are the simulator's own functions, and a round is timed as the simulator's workers are
(tests/planning/test_plan.py runs both). Not in the times, as not in the simulator's: forming an update, and
merging it on the coordinator.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch

from blocktrain.client.snapshots import fetched_bytes
from blocktrain.codec_spec import CodecSpec
from blocktrain.config import PER_BLOCK, Recipe, SwarmConfig, resolve_recipe
from blocktrain.errors import UserError
from blocktrain.model.block import Block, num_parameters
from blocktrain.planning.machines import MachineGroup
from blocktrain.simulation.networks import transfer_seconds
from blocktrain.training.cost import BACKWARD_OVER_FORWARD, forward_flops_per_token, training_flops
from blocktrain.training.memory import largest_micro_batch, training_bytes
from blocktrain.training.setup import Setup
from blocktrain.training.snapshot import schema_of
from blocktrain.wire.codec import frame_length
from blocktrain.wording import counted
from blocktrain.worker.logic import may_step
from blocktrain.worker.watching import IDLE_WATCH_SECONDS

ENOUGH_COMPUTE = 0.8
"""Share of all machines' speed that a cut must be able to use; a cut that loses less is not worth another."""
MOST_WAITING = 0.05
MOST_IDLE = 0.5
CODECS = ("bits:4", "sign", "sparse:64")
"""By their loss, best first: at 12 rounds of 300 steps `sign` ended 0.013 nats above uncompressed and
`sparse:64` 0.188 (docs/history/2026-11-15.md, T7); `bits:4` with it in lockstep (docs/experiments.md, T4)."""
ROUND_STEPS = (30, 60, 100, 200, 300, 500)
"""30 are those of SparseLoCo and of Covenant-72B. Longer rounds wait less, and merge what has drifted further
apart."""
LATENCY_SECONDS = 0.1
MAX_LAYERS = 2048
"""A recipe may come from a stranger's coordinator, and each layer takes memory and time to look at."""
DAY_SECONDS = 86_400.0
TOKENS_PER_PARAMETER = 20
"""What compute-optimal training takes by the usual rule."""
RECOMPUTE_FACTOR = (2 + BACKWARD_OVER_FORWARD) / (1 + BACKWARD_OVER_FORWARD)
"""The forward pass runs twice."""


@dataclass(frozen=True)
class Cut:
    """One way to cut the layers, and which machines could train a block of it."""

    blocks: int
    layers_per_block: int
    block_parameters: int
    least_bytes: int
    """Device memory of a block with one sequence at a time and recomputing."""
    holders: tuple[MachineGroup, ...]
    compute_share: float
    """Of all machines' speed."""


@dataclass(frozen=True)
class Fit:
    """A block on each machine of a group."""

    group: MachineGroup
    micro_batch: int
    memory_bytes: int
    tokens_per_second: float


@dataclass(frozen=True)
class RoundTimes:
    """A round on each machine of a group."""

    fit: Fit
    compute_seconds: float
    up_seconds: float
    down_seconds: float
    period_seconds: float
    """From one update to the next, where nobody else is slower."""

    @property
    def waiting_share(self) -> float:
        return 1 - self.compute_seconds / self.period_seconds


@dataclass(frozen=True)
class RoundBytes:
    """Bytes of one worker in a round."""

    up: int
    down: int


@dataclass(frozen=True)
class Plan:
    recipe: Recipe
    """With the settings of the plan."""
    cut: Cut
    cuts: tuple[Cut, ...]
    """All that were looked at, fewest blocks first."""
    times: tuple[RoundTimes, ...]
    traffic: RoundBytes
    reasons: tuple[str, ...]
    was_unequal: bool = False
    """Whether the recipe's blocks had different layers; the plan's are equal."""

    @property
    def round_seconds(self) -> float:
        return deciding(self.times, self.recipe.swarm.deadline_quantile).period_seconds

    def idle_share(self, one: RoundTimes) -> float:
        """Of a machine's time: it waits for its line, or for slower ones."""
        return 1 - one.compute_seconds / max(one.period_seconds, self.round_seconds)

    @property
    def tokens_per_day(self) -> float:
        """Over all blocks. A machine that is faster than the round waits for it; a slower one misses some."""
        per_update = (
            self.recipe.swarm.steps_per_round * self.recipe.training.batch * self.recipe.model.context
        )
        period = self.round_seconds
        updates = sum(one.fit.group.count * min(1.0, period / one.period_seconds) for one in self.times)
        return updates * per_update * DAY_SECONDS / period

    @property
    def block_tokens_per_day(self) -> float:
        """What each block reads, with all its replicas: blocks learn nothing from what others read."""
        return self.tokens_per_day / self.cut.blocks

    @property
    def days_to_learn(self) -> float:
        """Until each block has read TOKENS_PER_PARAMETER tokens for each parameter of the whole model.

        That is what the same layers end to end would read, for as many operations. Per parameter of a block
        it would be fewer days by the number of blocks, and no comparison with any model of this size.
        """
        parameters = self.cut.blocks * self.cut.block_parameters
        return TOKENS_PER_PARAMETER * parameters / self.block_tokens_per_day

    @property
    def num_workers(self) -> int:
        return sum(one.fit.group.count for one in self.times)

    @property
    def rounds_per_day(self) -> float:
        return DAY_SECONDS / self.round_seconds

    @property
    def settings(self) -> dict[str, Any]:
        """What was decided, as `--set` takes it."""
        model, training, swarm = self.recipe.model, self.recipe.training, self.recipe.swarm
        return {
            **({"model.block_layers": "none"} if self.was_unequal else {}),
            "model.blocks": model.blocks,
            "model.layers_per_block": model.layers_per_block,
            "training.micro_batch": training.micro_batch,
            "training.recompute": training.recompute,
            "swarm.codec": swarm.codec,
            "swarm.steps_per_round": swarm.steps_per_round,
            "swarm.replicas": swarm.replicas,
        }

    def to_dict(self) -> dict[str, Any]:
        up, down, per_day = self.traffic.up, self.traffic.down, self.rounds_per_day
        return {
            "settings": self.settings,
            "block_parameters": self.cut.block_parameters,
            "workers": self.num_workers,
            "round_seconds": self.round_seconds,
            "bytes_per_round": {"up": up, "down": down},
            "bytes_per_day": {"up": up * per_day, "down": down * per_day},
            "coordinator_bytes_per_day": {
                "received": up * per_day * self.num_workers,
                "sent": down * per_day * self.num_workers,
            },
            "tokens_per_day": self.tokens_per_day,
            "block_tokens_per_day": self.block_tokens_per_day,
            "days_to_learn": self.days_to_learn,
            "cuts": [
                {
                    "blocks": cut.blocks,
                    "layers_per_block": cut.layers_per_block,
                    "block_parameters": cut.block_parameters,
                    "least_bytes": cut.least_bytes,
                    "machines": sum(group.count for group in cut.holders),
                    "compute_share": cut.compute_share,
                }
                for cut in self.cuts
            ],
            "machines": [
                {
                    "count": one.fit.group.count,
                    "device": one.fit.group.device,
                    "micro_batch": one.fit.micro_batch,
                    "memory_bytes": one.fit.memory_bytes,
                    "tokens_per_second": one.fit.tokens_per_second,
                    "compute_seconds": one.compute_seconds,
                    "up_seconds": one.up_seconds,
                    "down_seconds": one.down_seconds,
                    "idle_share": self.idle_share(one),
                }
                for one in self.times
            ],
            "reasons": list(self.reasons),
        }


def recipe_of_size(parameters: float, vocabulary: int) -> Recipe:
    """A Llama of about so many parameters in one block, in the usual proportions: width 128 times the layers,
    heads of 128 channels, a feed-forward layer of 8/3 of the width."""
    if not 1e7 <= parameters <= 1e13:
        raise UserError(f"--parameters must be between 10M and 10T, as in 7B; found {parameters:g}")
    # A layer has about 12 width^2 values, so a whole model of width / 128 layers 12 width^3 / 128.
    width = max(256, 256 * round((parameters * 128 / 12) ** (1 / 3) / 256))
    heads = width // 128
    model = {
        "family": "llama",
        "width": width,
        "heads": heads,
        "kv_heads": heads // 4 if heads % 4 == 0 else heads // 2,
        "feedforward_width": 64 * round(width * 8 / 3 / 64),
        "context": 2048,
        "blocks": 1,
        "layers_per_block": 1,
    }
    training = {"batch": 64, "momentum": "bfloat16", "micro_batch": "auto", "reference": False}
    name = f"{parameters / 1e9:g}b"
    one = resolve_recipe({"name": name, "model": model, "training": training})
    two = replace(one, model=replace(one.model, layers_per_block=2))
    first, second = (num_parameters(_on_paper(recipe, vocabulary)[1]) for recipe in (one, two))
    layers = max(1, round((parameters - first) / (second - first)) + 1)
    # A number with many divisors can be cut in many ways.
    layers = 4 * round(layers / 4) if layers >= 6 else layers
    return replace(one, model=replace(one.model, layers_per_block=layers))


def _on_paper(recipe: Recipe, vocabulary: int) -> tuple[Setup, Block]:
    """The parts of a recipe, and a block that has shapes and no values."""
    setup = Setup.of_swarm(recipe, vocabulary)
    with torch.device("meta"):
        return setup, setup.objective.build(recipe.model.blocks - 1, seed=0)


def total_layers(recipe: Recipe) -> int:
    """Layers of the whole model, which a plan may cut in another way."""
    unequal = [key for key in PER_BLOCK if key != "block_layers" and getattr(recipe.model, key) is not None]
    if unequal:
        raise UserError(f"a plan cuts a model into equal blocks; leave out model.{unequal[0]}")
    # Elsewhere a worker also fetches and runs frozen blocks, which no number here counts.
    if recipe.objective.kind != "denoise":
        raise UserError(
            f'a plan is for independent blocks (objective.kind = "denoise"), found {recipe.objective.kind!r}'
        )
    model = recipe.model
    # A product where it is one: a stranger's recipe may have a billion blocks.
    layers = model.blocks * model.layers_per_block if model.block_layers is None else sum(model.block_layers)
    if layers > MAX_LAYERS:
        raise UserError(f"expected a model of at most {MAX_LAYERS} layers, found {layers}")
    return layers


def flops_per_token(recipe: Recipe, vocabulary: int) -> float:
    """Operations of training a block on one token."""
    total_layers(recipe)
    if recipe.model.block_layers is not None:
        raise UserError("the speed of workers is not known where blocks differ (model.block_layers)")
    setup, block = _on_paper(recipe, vocabulary)
    forward = forward_flops_per_token(recipe.model, block, setup.vocabulary)
    return training_flops(forward, 0, 1) * (RECOMPUTE_FACTOR if recipe.training.recompute else 1)


def plan_run(
    recipe: Recipe, groups: Sequence[MachineGroup], vocabulary: int, fixed: Collection[str] = ()
) -> Plan:
    """How to train this recipe's model on these machines, and why so. Settings named in `fixed` stay."""
    if not groups:
        raise UserError("no machines to plan for; name some with --machine, --machines or --coordinator")
    layers, unequal = total_layers(recipe), recipe.model.block_layers is not None
    if unequal:
        if "model.block_layers" in fixed:
            raise UserError("a plan cuts a model into equal blocks; leave out model.block_layers")
        whole = replace(recipe.model, blocks=1, layers_per_block=layers, block_layers=None)
        recipe = replace(recipe, model=whole)
    cuts = possible_cuts(recipe, groups, vocabulary, fixed)
    cut, reasons = choose_cut(cuts, groups)
    model = replace(recipe.model, blocks=cut.blocks, layers_per_block=cut.layers_per_block)
    recipe = replace(recipe, model=model)
    fits, recompute, why = fit_holders(recipe, cut, vocabulary, fixed)
    micro_batch = recipe.training.micro_batch if "training.micro_batch" in fixed else "auto"
    training = replace(recipe.training, recompute=recompute, micro_batch=micro_batch)
    recipe = replace(recipe, training=training)
    plan = choose_round(recipe, cuts, cut, fits, vocabulary, fixed, (*reasons, *why))
    return replace(plan, was_unequal=unequal)


def possible_cuts(
    recipe: Recipe, groups: Sequence[MachineGroup], vocabulary: int, fixed: Collection[str]
) -> tuple[Cut, ...]:
    """Every number of blocks that divides the layers, fewest first, with the machines that hold one."""
    layers = total_layers(recipe)
    counts = [one for one in range(1, layers + 1) if layers % one == 0]
    found = []
    given = not {"model.blocks", "model.layers_per_block"}.isdisjoint(fixed)
    for blocks in [recipe.model.blocks] if given else counts:
        model = replace(recipe.model, blocks=blocks, layers_per_block=layers // blocks)
        least = replace(recipe, model=model, training=replace(recipe.training, recompute=True))
        setup, block = _on_paper(least, vocabulary)
        holders = tuple(
            group
            for group in groups
            if largest_micro_batch(least, setup.objective, group.device_type, group.memory_bytes, most=1)
        )
        found.append(
            Cut(
                blocks=blocks,
                layers_per_block=layers // blocks,
                block_parameters=num_parameters(block),
                least_bytes=training_bytes(least, setup.objective, "cuda", micro_batch=1),
                holders=holders,
                compute_share=sum(one.compute for one in holders) / sum(one.compute for one in groups),
            )
        )
    return tuple(found)


def choose_cut(cuts: Sequence[Cut], groups: Sequence[MachineGroup]) -> tuple[Cut, list[str]]:
    """As few blocks as most of the machines' speed can be used for."""
    # Independent blocks are pooled, not stacked: on WikiText-2 four of 3 layers ended 0.019 nats behind 12
    # layers end to end at equal operations (docs/results/gap-wikitext-2.json), and each has an embedding and
    # an output map of its own.
    held = [cut for cut in cuts if cut.holders]
    if not held:
        largest = max(groups, key=lambda group: group.memory_gb)
        raise UserError(
            f"the smallest block ({cuts[-1].layers_per_block} layers) needs {cuts[-1].least_bytes / 1e9:.1f} "
            f"GB with one sequence at a time, and the largest device ({largest.device}) has "
            f"{largest.memory_gb:g} GB; use larger devices, a smaller model.width or a shorter model.context"
        )
    enough = [cut for cut in held if cut.compute_share >= ENOUGH_COMPUTE]
    chosen = enough[0] if enough else max(held, key=lambda one: (one.compute_share, -one.blocks))
    machines, workers = (sum(one.count for one in some) for some in (groups, chosen.holders))
    reasons = [
        f"{counted(cut.blocks, 'block')} of {counted(cut.layers_per_block, 'layer')}: at least "
        f"{cut.least_bytes / 1e9:.1f} GB, which {sum(one.count for one in cut.holders)} of {machines} "
        f"machines have, with {cut.compute_share:.0%} of all speed"
        for cut in cuts[: cuts.index(chosen) + 1]
    ]
    if len(cuts) > 1:
        rule = f"the fewest for {ENOUGH_COMPUTE:.0%} of all speed" if enough else "the most speed"
        reasons.append(f"so {counted(chosen.blocks, 'block')}: {rule}; a deeper block learns more")
    if workers < chosen.blocks:
        reasons.append(f"{workers} machines for {chosen.blocks} blocks take turns, and fetch a block at each")
    return chosen, reasons


def fit_holders(
    recipe: Recipe, cut: Cut, vocabulary: int, fixed: Collection[str]
) -> tuple[list[Fit], bool, list[str]]:
    """What a block takes on each machine that holds one, and whether all must recompute for it."""
    given, objective = recipe.training.micro_batch, Setup.of_swarm(recipe, vocabulary).objective
    most = given if "training.micro_batch" in fixed and isinstance(given, int) else recipe.training.batch
    reasons = []
    # Recomputing costs a third more operations: only where somebody could not train without.
    for recompute in [recipe.training.recompute] if "training.recompute" in fixed else [False, True]:
        tried = replace(recipe, training=replace(recipe.training, recompute=recompute))
        sizes = [
            largest_micro_batch(tried, objective, group.device_type, group.memory_bytes, most=most)
            for group in cut.holders
        ]
        if None not in sizes:
            break
        small = cut.holders[sizes.index(None)]
        reasons = [f"without training.recompute a block does not fit into {small.memory_gb:g} GB"]
    rate = 1e12 / flops_per_token(tried, vocabulary)
    fits = [
        Fit(
            group=group,
            micro_batch=size,
            memory_bytes=training_bytes(tried, objective, group.device_type, micro_batch=size),
            tokens_per_second=group.tflops * rate,
        )
        for group, size in zip(cut.holders, sizes, strict=True)
        if size is not None
    ]
    if not fits:
        raise UserError("with training.recompute=false a block fits into none of the machines; leave it out")
    return fits, recompute, reasons


def choose_round(
    recipe: Recipe,
    cuts: tuple[Cut, ...],
    cut: Cut,
    fits: Sequence[Fit],
    vocabulary: int,
    fixed: Collection[str],
    reasons: Sequence[str],
) -> Plan:
    """The shortest round, and in it the best codec, with which machines rarely wait for their lines."""
    replicas = max(1, sum(fit.group.count for fit in fits) // cut.blocks)
    replicas = recipe.swarm.replicas if "swarm.replicas" in fixed else replicas
    schema = schema_of(_on_paper(recipe, vocabulary)[1])
    plans = []
    for steps in [recipe.swarm.steps_per_round] if "swarm.steps_per_round" in fixed else ROUND_STEPS:
        for codec in [recipe.swarm.codec] if "swarm.codec" in fixed else CODECS:
            swarm = replace(recipe.swarm, steps_per_round=steps, codec=codec, replicas=replicas)
            payload = frame_length(CodecSpec.parse(codec), schema)
            down = fetched_bytes(
                merges=1,
                payloads=replicas - 1,
                payload_bytes=payload,
                snapshot_bytes=4 * cut.block_parameters,
            )
            traffic = RoundBytes(payload, round(down))
            tokens_per_step = recipe.training.batch * recipe.model.context
            times = tuple(times_of(fit, tokens_per_step, traffic, swarm) for fit in fits)
            plans.append(Plan(replace(recipe, swarm=swarm), cut, cuts, times, traffic, ()))

    def waiting(plan: Plan) -> float:
        return deciding(plan.times, recipe.swarm.deadline_quantile).waiting_share

    # Where all wait, the one that waits least: too slow a line is no reason for no plan.
    plan = next((one for one in plans if waiting(one) <= MOST_WAITING), min(plans, key=waiting))
    slow = deciding(plan.times, recipe.swarm.deadline_quantile)
    because = (
        f"{plan.recipe.swarm.codec}, {plan.recipe.swarm.steps_per_round} steps a round: "
        f"{slow.fit.group.device} computes {slow.compute_seconds:,.0f} s, sends {slow.up_seconds:,.0f} s and "
        f"fetches {slow.down_seconds:,.0f} s; it may train on for {recipe.swarm.run_ahead:.0%} of a round "
        f"meanwhile, and waits {slow.waiting_share:.0%} of the time"
    )
    late = [
        f"{one.fit.group.count} x {one.fit.group.device} take {one.period_seconds:,.0f} s for a round of "
        f"{plan.round_seconds:,.0f} s: their updates come late and count less"
        for one in plan.times
        if one.period_seconds > plan.round_seconds
    ]
    idle = [
        f"{one.fit.group.count} x {one.fit.group.device} are faster than the round, and wait "
        f"{plan.idle_share(one):.0%} of the time: plan a run of their own for them"
        for one in plan.times
        if one.period_seconds < plan.round_seconds and plan.idle_share(one) > MOST_IDLE
    ]
    return replace(plan, reasons=(*reasons, because, *late, *idle))


def times_of(fit: Fit, tokens_per_step: int, traffic: RoundBytes, swarm: SwarmConfig) -> RoundTimes:
    """The times of a round, as a simulated worker has them on a line without weather."""
    steps = swarm.steps_per_round
    step = tokens_per_step / fit.tokens_per_second
    # Searched and not counted: a round may be set to a billion steps.
    ahead = bisect_left(
        range(steps),
        True,
        key=lambda one: not may_step(step=one, steps=steps, version=0, round_=1, run_ahead=swarm.run_ahead),
    )
    # Commit and reveal, then the look that finds the new head, then what it takes to build it.
    up = 2 * LATENCY_SECONDS + transfer_seconds(traffic.up, fit.group.up_mbit)
    down = LATENCY_SECONDS + transfer_seconds(traffic.down, fit.group.down_mbit)
    waiting = max(0.0, up + IDLE_WATCH_SECONDS + down - ahead * step)
    return RoundTimes(fit, steps * step, up, down, steps * step + waiting)


def deciding(times: Sequence[RoundTimes], quantile: float) -> RoundTimes:
    """The machine that a computed deadline just lets in: this share of all are as fast, or faster."""
    ordered = sorted(times, key=lambda one: one.period_seconds)
    wanted = quantile * sum(one.fit.group.count for one in times)
    counted = accumulate(one.fit.group.count for one in ordered)
    return next(one for one, count in zip(ordered, counted, strict=True) if count >= wanted)
