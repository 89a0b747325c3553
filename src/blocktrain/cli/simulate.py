"""The verb `simulate`: a swarm on a virtual network, real training in virtual time."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated

import typer

from blocktrain.cli.options import DeviceOption, RecipeArgument, SetOption
from blocktrain.config import find_recipe, load_recipe
from blocktrain.simulation.networks import NETWORKS


class NetworkName(StrEnum):
    """The names of `NETWORKS`, spelt out because the command line needs a type."""

    LOCKSTEP = "lockstep"
    MILD = "mild"
    WAN_TIGHT = "wan-tight"
    WAN_MID = "wan-mid"
    WAN_LOOSE = "wan-loose"
    EDGE_MID = "edge-mid"
    BAD_EDGE = "bad-edge"


class PolicyName(StrEnum):
    DROP = "drop"
    CARRY = "carry"


def simulate(
    recipe: RecipeArgument,
    network: Annotated[
        NetworkName,
        typer.Option(help=" ".join(f"{one.name}: {one.sentence}" for one in NETWORKS.values())),
    ],
    policy: Annotated[
        PolicyName,
        typer.Option(help="drop: the litepaper's fixed deadline, late work is lost. carry: ours."),
    ] = PolicyName.CARRY,
    seed: Annotated[int, typer.Option(min=0, help="Of the network's weather and of the training.")] = 0,
    judge: Annotated[
        bool,
        typer.Option(
            "--judge", help="Judge updates and guard merges as the recipe's [trust] says; else all count."
        ),
    ] = False,
    evaluate_every: Annotated[int, typer.Option(min=1, help="Rounds between two scores.")] = 1,
    device: DeviceOption = "cpu",
    set_: SetOption = [],  # noqa: B006
    as_json: Annotated[bool, typer.Option("--json", help="Print the report on stdout.")] = False,
) -> None:
    """Train a small swarm in virtual time: how a network and a policy change the loss."""
    from rich.console import Console

    from blocktrain.local.status_view import simulation_table
    from blocktrain.simulation.run import Scenario, ScoredRound, Simulation
    from blocktrain.training.device import find_device

    scenario = Scenario(
        recipe=load_recipe(find_recipe(recipe), set_),
        network=NETWORKS[network.value],
        policy=policy.value,
        seed=seed,
        evaluate_every=evaluate_every,
        device=find_device(device),
        judged=judge,
    )
    # Progress on stderr, so that `--json > report.json` holds the report alone.
    console = Console(stderr=True)
    console.print(f"{scenario.network.name}: {scenario.network.sentence}", highlight=False)

    def show(scored: ScoredRound) -> None:
        rounds = scenario.swarm.rounds
        console.print(
            f"  round={scored.round}/{rounds} virtual={scored.seconds:.0f}s ce={scored.ce:.4f}",
            highlight=False,
        )

    report = Simulation(scenario, show).run()
    if as_json:
        typer.echo(json.dumps(report))
    else:
        Console().print(simulation_table(report))
