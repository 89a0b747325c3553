from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from blocktrain.config import Recipe, resolve_recipe
from blocktrain.simulation.networks import NETWORKS, Network
from blocktrain.simulation.run import Scenario
from tests.simulation.simulation_kit import TINY, MakeRecipe, MakeScenario


@pytest.fixture
def make_recipe(tmp_path: Path) -> MakeRecipe:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{n} bottles hang on the wall, {n % 7} fall. " for n in range(400)))

    def make(**sections: dict[str, Any]) -> Recipe:
        values = {**TINY, "data": {"corpus": str(text)}}
        for section, changes in sections.items():
            values[section] = {**values.get(section, {}), **changes}
        return resolve_recipe(values)

    return make


@pytest.fixture
def make_scenario(make_recipe: MakeRecipe) -> MakeScenario:
    def make(network: str | Network, policy: str, seed: int = 0, **sections: dict[str, Any]) -> Scenario:
        chosen = NETWORKS[network] if isinstance(network, str) else network
        scenario = Scenario(recipe=make_recipe(**sections), network=chosen, policy="carry", seed=seed)
        return dataclasses.replace(scenario, policy=policy, evaluate_every=100)  # type: ignore[arg-type]

    return make
