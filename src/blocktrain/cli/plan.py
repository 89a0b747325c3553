"""`blocktrain plan`: which cut of a model suits some machines, what it takes and gives, and why."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blocktrain.cli.options import SetOption, to_stderr
from blocktrain.errors import UserError
from blocktrain.wording import counted

if TYPE_CHECKING:
    from blocktrain.config import Recipe
    from blocktrain.planning.cut import Plan

SIZES = {"": 1.0, "M": 1e6, "B": 1e9, "T": 1e12}
LARGE_VOCABULARY = 32768
"""Of a model whose text is not there yet: that of the shipped recipes for large models."""


def plan(
    recipe: Annotated[
        str | None, typer.Argument(help="A recipe file, or the name of one in recipes/, such as one-billion.")
    ] = None,
    parameters: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Instead of a recipe, a Llama of this size: 1B, 350M.")
    ] = None,
    machine: Annotated[
        list[str],
        typer.Option(
            metavar="'8x rtx-4090 up_mbit=30'", help="Equal machines, with any keys of a file; repeatable."
        ),
    ] = [],  # noqa: B006
    machines: Annotated[
        Path | None, typer.Option(help="A TOML or JSON file of machines, each under [[machines]].")
    ] = None,
    coordinator: Annotated[
        str | None,
        typer.Option(metavar="URL", help="The workers of this run, and its recipe where no other is named."),
    ] = None,
    vocabulary: Annotated[
        int | None, typer.Option(min=2, help="Tokens; default: of the recipe's text, or 32768.")
    ] = None,
    set_: SetOption = [],  # noqa: B006
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Say how to cut a model for some machines, what that takes and gives, and why. Nothing is trained.

    A setting given with --set stays as it is: --set model.blocks=4 --set swarm.codec=sign.
    """
    from blocktrain.config import find_recipe, load_recipe
    from blocktrain.planning.cut import flops_per_token, plan_run, recipe_of_size
    from blocktrain.planning.machines import groups_of_workers, parse_group, read_groups

    if recipe is not None and parameters is not None:
        raise UserError("give a recipe or --parameters, not both")
    if recipe is None and parameters is None and coordinator is None:
        raise UserError("give a recipe, --parameters such as 7B, or --coordinator to plan for its run")
    groups = [] if machines is None else read_groups(machines.expanduser())
    groups += [parse_group(one) for one in machine]
    model: Recipe | None = None
    if recipe is not None:
        model = load_recipe(find_recipe(recipe))
    elif parameters is not None:
        vocabulary = vocabulary or LARGE_VOCABULARY
        model = recipe_of_size(parsed_size(parameters), vocabulary)
    if coordinator is not None:
        from blocktrain.client.coordinator import public_client
        from blocktrain.client.run import run_setup

        with public_client(coordinator, report=to_stderr, attempts=2) as client:
            run, status = client.run(), client.status()
        running = run_setup(run.recipe, run.vocabulary)
        found = groups_of_workers(status.workers, flops_per_token(running.recipe, running.vocabulary))
        left_out = sum(worker.live for worker in status.workers) - sum(group.count for group in found)
        if left_out:
            to_stderr(f"left out {counted(left_out, 'worker')} without an update: the speed is not known yet")
        groups += found
        if not groups:
            raise UserError(
                f"nobody whose speed is known is at work at {client.url}; wait until updates have arrived, "
                "or name machines with --machine"
            )
        if model is None:
            model, vocabulary = running.recipe, vocabulary or running.vocabulary
    assert model is not None
    changed = with_cut(model, set_)
    fixed = {one.partition("=")[0].strip() for one in set_}
    made = plan_run(changed, groups, vocabulary or vocabulary_of(changed), fixed)
    if as_json:
        typer.echo(json.dumps(made.to_dict()))
    else:
        show(made)


def parsed_size(text: str) -> float:
    matched = re.fullmatch(r"(\d{1,6}(?:\.\d{1,6})?)([MBT]?)", text.strip().upper())
    if matched is None:
        raise UserError(
            f"--parameters: expected a number with M, B or T, as in 350M, 1.1B or 72B, found {text!r}"
        )
    return float(matched[1]) * SIZES[matched[2]]


def with_cut(recipe: Recipe, changes: list[str]) -> Recipe:
    """The recipe with these settings. A setting of the number of blocks cuts the same model in another
    way; elsewhere it makes another model."""
    from blocktrain.config import resolve_recipe
    from blocktrain.planning.cut import total_layers

    changed = resolve_recipe(recipe.to_dict(), changes)
    keys = {one.partition("=")[0].strip() for one in changes}
    if "model.blocks" in keys and "model.layers_per_block" not in keys:
        layers, blocks = total_layers(recipe), changed.model.blocks
        if layers % blocks:
            raise UserError(f"model.blocks={blocks} does not divide the {layers} layers of {recipe.name}")
        changed = resolve_recipe(recipe.to_dict(), [*changes, f"model.layers_per_block={layers // blocks}"])
    return changed


def vocabulary_of(recipe: Recipe) -> int:
    """Of the text that the recipe names, where that is here."""
    from blocktrain.data.dataset import MANIFEST, Dataset
    from blocktrain.data.tokenizer import ByteTokenizer

    if recipe.data.dataset is None:
        return ByteTokenizer.vocabulary
    folder = Path(recipe.data.dataset).expanduser()
    return Dataset.open(folder).manifest.vocabulary if (folder / MANIFEST).exists() else LARGE_VOCABULARY


def show(plan: Plan) -> None:
    from rich.console import Console
    from rich.table import Table

    from blocktrain.planning.cut import TOKENS_PER_PARAMETER

    console = Console(highlight=False, soft_wrap=True)
    model, swarm, cut = plan.recipe.model, plan.recipe.swarm, plan.cut
    up, down, per_day = plan.traffic.up, plan.traffic.down, plan.rounds_per_day
    console.print(
        f"{plan.recipe.name}: {model.blocks * cut.block_parameters / 1e9:.2f} B parameters, "
        f"{model.blocks * model.layers_per_block} layers of width {model.width}, context {model.context}"
    )
    table = Table("", "", show_header=False, box=None)
    for name, value in (
        (
            "blocks",
            f"{model.blocks}, of {model.layers_per_block} layers ({cut.block_parameters / 1e9:.2f} B)",
        ),
        ("workers", f"{plan.num_workers}, {swarm.replicas} for each block"),
        ("codec", f"{swarm.codec}, {swarm.steps_per_round} steps a round"),
        ("round", f"{plan.round_seconds:,.0f} s, {per_day:,.1f} a day"),
        ("traffic of a worker", f"{up / 1e6:,.1f} MB up and {down / 1e6:,.1f} MB down a round"),
        ("", f"{up * per_day / 1e9:,.2f} GB up and {down * per_day / 1e9:,.2f} GB down a day"),
        (
            "tokens a day",
            f"{plan.block_tokens_per_day / 1e9:,.3f} B that each block reads "
            f"({plan.tokens_per_day / 1e9:,.3f} B in all)",
        ),
        (
            "days",
            f"{plan.days_to_learn:,.1f} until each block has read {TOKENS_PER_PARAMETER} per model parameter",
        ),
    ):
        table.add_row(name, value)
    console.print(table)
    table = Table("", "at once", "memory", "tokens/s", "computes", "sends", "fetches", "idle", box=None)
    for one in plan.times:
        table.add_row(
            f"{one.fit.group.count} x {one.fit.group.device}",
            str(one.fit.micro_batch),
            f"{one.fit.memory_bytes / 1e9:.1f} of {one.fit.group.memory_gb:g} GB",
            f"{one.fit.tokens_per_second:,.0f}",
            *(f"{seconds:,.0f} s" for seconds in (one.compute_seconds, one.up_seconds, one.down_seconds)),
            f"{plan.idle_share(one):.0%}",
        )
    console.print(table)
    for reason in plan.reasons:
        console.print(f"- {reason}", markup=False)
    console.print(
        " ".join(f"--set {key}={str(value).lower()}" for key, value in plan.settings.items()), markup=False
    )
