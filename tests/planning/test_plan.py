"""A plan's numbers are the simulator's and the memory model's, and its choices follow from the machines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from blocktrain.config import Recipe, find_recipe, load_recipe, resolve_recipe
from blocktrain.errors import UserError
from blocktrain.planning import cut
from blocktrain.planning.cut import Plan, flops_per_token, plan_run, recipe_of_size
from blocktrain.planning.machines import MachineGroup
from blocktrain.simulation.networks import Network
from blocktrain.simulation.run import Scenario, Simulation
from blocktrain.training.memory import training_bytes
from blocktrain.training.setup import Setup

VOCABULARY = 32768
ROUNDS = 4


def machines(count: int = 8, memory_gb: float = 24.0, **changes: Any) -> MachineGroup:
    given = {"count": count, "device": "card", "memory_gb": memory_gb, "tflops": 80.0, **changes}
    return MachineGroup(**given)


def one_billion() -> Recipe:
    return load_recipe(find_recipe("one-billion"), environment={})


def simulated(tmp_path: Path, codec: str, up_mbit: float) -> tuple[dict[str, Any], Plan]:
    """A run of two blocks with two workers each, in virtual time, and the plan for the same machines."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{n} bottles hang on the wall, {n % 7} fall. " for n in range(400)))
    recipe = resolve_recipe(
        {
            "model": {"width": 16, "heads": 1, "blocks": 2, "layers_per_block": 1, "context": 16},
            "data": {"corpus": str(text)},
            "training": {"batch": 2, "warmup_steps": 1, "reference": False},
            "evaluation": {"max_bytes": 256, "pooling_bytes": 256, "noise_draws": 1},
            "swarm": {"steps_per_round": 2, "rounds": ROUNDS, "replicas": 2, "codec": codec},
        }
    )
    compute_seconds = 30.0
    tokens = recipe.swarm.steps_per_round * recipe.training.batch * recipe.model.context
    tflops = tokens / compute_seconds * flops_per_token(recipe, 256) / 1e12
    group = machines(4, tflops=tflops, up_mbit=up_mbit, down_mbit=2 * up_mbit)
    fixed = ("model.blocks", "swarm.codec", "swarm.steps_per_round", "training.recompute")
    plan = plan_run(recipe, [group], 256, fixed)
    network = Network(
        name="even",
        sentence="Equal machines and lines without weather.",
        deadline_seconds=1000.0,
        compute_seconds=compute_seconds,
        latency_seconds=cut.LATENCY_SECONDS,
        up_megabits=up_mbit,
        down_megabits=2 * up_mbit,
    )
    scenario = Scenario(
        recipe=recipe,
        network=network,
        policy="carry",
        stands_for=plan.cut.block_parameters,
        evaluate_every=100,
    )
    return Simulation(scenario).run(), plan


@pytest.mark.parametrize(("codec", "up_mbit"), [("sign", 1.0), ("sign", 0.002), ("dense", 0.05)])
def test_a_simulated_run_moves_the_bytes_and_takes_the_time_of_the_plan(
    codec: str, up_mbit: float, tmp_path: Path
) -> None:
    report, plan = simulated(tmp_path, codec, up_mbit)
    assert report["participation"] == 1.0
    assert report["bytes_up"] == plan.traffic.up * plan.num_workers * ROUNDS
    # Nobody fetches the last head: the run is over.
    assert report["bytes_down"] == pytest.approx(
        plan.traffic.down * plan.num_workers * (ROUNDS - 1), rel=0.01
    )
    # The last round ends with its upload.
    last = plan.times[0].compute_seconds + plan.times[0].up_seconds
    assert report["wall_seconds"] == pytest.approx(plan.round_seconds * (ROUNDS - 1) + last, rel=0.01)


def test_memory_is_that_of_the_memory_model() -> None:
    plan = plan_run(one_billion(), [machines()], VOCABULARY)
    [fit] = [one.fit for one in plan.times]
    objective = Setup.of(plan.recipe, VOCABULARY).objective
    assert fit.memory_bytes == training_bytes(plan.recipe, objective, "cuda", micro_batch=fit.micro_batch)
    assert fit.memory_bytes <= 0.9 * fit.group.memory_bytes


def test_the_fewest_blocks_that_most_machines_hold_are_chosen() -> None:
    recipe = one_billion()
    large = plan_run(recipe, [machines(memory_gb=80)], VOCABULARY)
    assert large.recipe.model.blocks == 1
    assert large.recipe.model.layers_per_block == 16
    assert large.recipe.swarm.replicas == 8
    mixed = plan_run(recipe, [machines(2, 80), machines(20, 10)], VOCABULARY)
    assert mixed.recipe.model.blocks > 1
    assert mixed.cut.compute_share == 1.0
    # One strong machine alone has nine tenths of the speed: the others are left out.
    strong = plan_run(recipe, [machines(1, 80, tflops=800), machines(1, 6)], VOCABULARY)
    assert strong.recipe.model.blocks == 1
    assert strong.num_workers == 1
    assert "1 of 2 machines" in strong.reasons[0]


def test_no_recomputing_where_memory_is_plenty() -> None:
    assert not plan_run(one_billion(), [machines(memory_gb=80)], VOCABULARY).recipe.training.recompute
    small = plan_run(one_billion(), [machines(memory_gb=18)], VOCABULARY, ("model.blocks",))
    tiny = plan_run(one_billion(), [machines(memory_gb=5)], VOCABULARY, ("model.blocks",))
    assert not small.recipe.training.recompute
    assert tiny.recipe.training.recompute
    assert any("without training.recompute" in one for one in tiny.reasons)


def test_a_slower_line_gets_a_smaller_codec_and_then_a_longer_round() -> None:
    recipe = one_billion()
    lines = [
        plan_run(recipe, [machines(up_mbit=up, down_mbit=up)], VOCABULARY, ("model.blocks",))
        for up in (1000, 30, 3, 0.5)
    ]
    payloads = [plan.traffic.up for plan in lines]
    steps = [plan.recipe.swarm.steps_per_round for plan in lines]
    assert payloads == sorted(payloads, reverse=True)
    assert steps == sorted(steps)
    assert payloads[0] > payloads[-1]
    assert steps[0] == 30 < steps[-1]
    assert lines[0].recipe.swarm.codec == "bits:4"


def test_a_setting_that_is_given_stays() -> None:
    recipe = one_billion()
    recipe = replace(recipe, model=replace(recipe.model, blocks=8, layers_per_block=2))
    recipe = replace(recipe, swarm=replace(recipe.swarm, codec="dense", steps_per_round=45, replicas=3))
    recipe = replace(recipe, training=replace(recipe.training, micro_batch=4, recompute=True))
    everything = plan_run(recipe, [machines(memory_gb=80)], VOCABULARY).settings
    plan = plan_run(recipe, [machines(memory_gb=80)], VOCABULARY, set(everything))
    assert plan.settings == {
        "model.blocks": 8,
        "model.layers_per_block": 2,
        "training.micro_batch": 4,
        "training.recompute": True,
        "swarm.codec": "dense",
        "swarm.steps_per_round": 45,
        "swarm.replicas": 3,
    }
    assert all(everything[key] != value for key, value in plan.settings.items())


def test_machines_that_do_not_match_are_named() -> None:
    groups = [machines(19), machines(1, tflops=8), machines(2, tflops=800, device="fast")]
    plan = plan_run(one_billion(), groups, VOCABULARY, ("model.blocks",))
    told = "\n".join(plan.reasons)
    assert "come late and count less" in told
    assert "2 x fast are faster than the round" in told


def test_more_machines_give_more_tokens_and_a_day_adds_up() -> None:
    few, many = (
        plan_run(one_billion(), [machines(count)], VOCABULARY, ("model.blocks",)) for count in (4, 8)
    )
    assert many.tokens_per_day == pytest.approx(2 * few.tokens_per_day, rel=0.05)
    written = few.to_dict()
    assert written["bytes_per_day"]["up"] == pytest.approx(few.traffic.up * few.rounds_per_day)
    assert written["coordinator_bytes_per_day"]["received"] == pytest.approx(
        4 * written["bytes_per_day"]["up"]
    )


def test_days_are_for_what_each_block_reads_of_tokens_per_parameter_of_the_whole_model() -> None:
    """Four blocks read a quarter of all tokens each, and must read as much as one block that is the model."""
    fixed = ("model.blocks", "swarm.steps_per_round", "swarm.codec")
    model = one_billion().model
    cut_models = [replace(model, blocks=blocks, layers_per_block=16 // blocks) for blocks in (1, 4)]
    plans = [
        plan_run(replace(one_billion(), model=one), [machines(8, 80)], VOCABULARY, fixed)
        for one in cut_models
    ]
    for plan in plans:
        blocks, parameters = plan.cut.blocks, plan.cut.block_parameters
        assert plan.block_tokens_per_day == pytest.approx(plan.tokens_per_day / blocks)
        assert plan.days_to_learn * plan.block_tokens_per_day == pytest.approx(20 * blocks * parameters)
        assert plan.to_dict()["days_to_learn"] == plan.days_to_learn
    # The blocks' own embeddings aside, as many operations as one block that is the whole model.
    assert plans[1].days_to_learn == pytest.approx(plans[0].days_to_learn, rel=0.5)


@pytest.mark.parametrize("billions", [0.124, 7.0])
def test_a_size_becomes_a_model_of_about_that_size(billions: float) -> None:
    recipe = recipe_of_size(1e9 * billions, VOCABULARY)
    plan = plan_run(recipe, [machines(memory_gb=2000)], VOCABULARY, ("model.blocks",))
    assert plan.cut.block_parameters == pytest.approx(1e9 * billions, rel=0.12)


def test_what_no_machine_holds_is_an_error_with_a_remedy() -> None:
    with pytest.raises(UserError, match=r"needs .* GB .* has 1 GB; use larger devices"):
        plan_run(one_billion(), [machines(memory_gb=1)], VOCABULARY)
    with pytest.raises(UserError, match="no machines"):
        plan_run(one_billion(), [], VOCABULARY)
    deep = replace(one_billion().model, blocks=1, layers_per_block=4096)
    with pytest.raises(UserError, match="at most 2048 layers"):
        plan_run(replace(one_billion(), model=deep), [machines()], VOCABULARY)


def test_a_recipe_with_unequal_blocks_is_cut_anew() -> None:
    recipe = one_billion()
    unequal = replace(recipe, model=replace(recipe.model, block_layers=(2, 2, 4, 8)))
    plan = plan_run(unequal, [machines()], VOCABULARY)
    assert plan.settings == {
        "model.block_layers": "none",
        **plan_run(recipe, [machines()], VOCABULARY).settings,
    }
    with pytest.raises(UserError, match="leave out model.block_layers"):
        plan_run(unequal, [machines()], VOCABULARY, ("model.block_layers",))
    with pytest.raises(UserError, match="not known where blocks differ"):
        flops_per_token(unequal, VOCABULARY)


def test_a_serial_model_is_not_planned_as_if_its_parts_were_independent() -> None:
    serial = resolve_recipe(one_billion().to_dict(), ["model.tied=false", "objective.kind=serial"])
    with pytest.raises(UserError, match="a plan is for independent blocks"):
        plan_run(serial, [machines()], VOCABULARY)


def test_a_round_of_a_billion_steps_is_planned_at_once() -> None:
    recipe = replace(one_billion(), swarm=replace(one_billion().swarm, steps_per_round=10**9))
    plan = plan_run(recipe, [machines()], VOCABULARY, ("swarm.steps_per_round",))
    assert plan.times[0].waiting_share == 0
