"""A swarm so small that a whole simulated run takes a second."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from blocktrain.config import Recipe
from blocktrain.simulation.networks import Network
from blocktrain.simulation.run import Scenario

TINY: dict[str, Any] = {
    "name": "tiny",
    "model": {"width": 16, "heads": 1, "blocks": 2, "layers_per_block": 1, "context": 16},
    "training": {"batch": 2, "warmup_steps": 1, "reference": False},
    "evaluation": {"max_bytes": 256, "pooling_bytes": 256, "noise_draws": 1},
    "swarm": {"steps_per_round": 2, "rounds": 4, "replicas": 2, "codec": "dense"},
}

MakeRecipe = Callable[..., Recipe]
MakeScenario = Callable[..., Scenario]

LATE = Network(
    name="late",
    sentence="Lines so unequal that most updates miss the litepaper's deadline.",
    deadline_seconds=100.0,
    latency_seconds=0.1,
    up_megabits=20.0,
    down_megabits=100.0,
    link_spread=1.0,
    link_jitter=1.0,
)
