"""The simulator's rounds add up as those of Covenant-72B did (arXiv 2603.08163)."""

from __future__ import annotations

from pathlib import Path

import pytest

from blocktrain.codec_spec import CodecSpec
from blocktrain.config import resolve_recipe
from blocktrain.simulation.networks import Network
from blocktrain.simulation.run import Scenario, Simulation
from blocktrain.training.setup import Setup
from blocktrain.training.snapshot import schema_of
from blocktrain.wire.codec import frame_length

PEERS = 20
PAYLOAD_BYTES = 4 * 72e9 / 146
"""72 B parameters, compressed 146 times against fp32."""
EXCHANGE_SECONDS, COMPUTING_SHARE = 70.0, 0.945
ROUND_SECONDS = EXCHANGE_SECONDS / (1 - COMPUTING_SHARE)
LINE_MEGABITS = PEERS * PAYLOAD_BYTES * 8 / 1e6 / EXCHANGE_SECONDS
"""Not published: what carries one payload up and the 19 others down in the published time, 4.5 Gbit/s."""


def test_rounds_in_lockstep_take_the_published_time(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("".join(f"{n} bottles hang on the wall. " for n in range(400)))
    recipe = resolve_recipe(
        {
            "model": {
                "family": "llama",
                **{"width": 64, "heads": 1, "blocks": 1, "layers_per_block": 1, "context": 8},
            },
            "data": {"corpus": str(tmp_path / "text.txt")},
            "training": {"batch": 1, "warmup_steps": 1, "reference": False},
            "evaluation": {"max_bytes": 64, "pooling_bytes": 64, "noise_draws": 1},
            "swarm": {
                **{"steps_per_round": 1, "rounds": 2, "replicas": PEERS, "codec": "sparse:64"},
                **{"run_ahead": 0.0, "max_deadline_seconds": 7200.0},
            },
        }
    )
    schema = schema_of(Setup.of_swarm(recipe, 256).initial(0))
    stands_for = PAYLOAD_BYTES / frame_length(CodecSpec.parse("sparse:64"), schema) * schema.num_values
    network = Network(
        name="covenant",
        sentence="Twenty equal peers with fast lines.",
        deadline_seconds=7200.0,
        compute_seconds=COMPUTING_SHARE * ROUND_SECONDS,
        latency_seconds=0.1,
        up_megabits=LINE_MEGABITS,
        down_megabits=LINE_MEGABITS,
    )
    scenario = Scenario(recipe=recipe, network=network, policy="carry", stands_for=round(stands_for))
    report = Simulation(scenario).run()
    assert report["participation"] == 1.0
    # Nobody fetches the last head: the run is over.
    assert report["bytes_up"] == pytest.approx(2 * PEERS * PAYLOAD_BYTES, rel=0.01)
    assert report["bytes_down"] == pytest.approx(PEERS * (PEERS - 1) * PAYLOAD_BYTES, rel=0.01)
    up_seconds = PAYLOAD_BYTES * 8 / 1e6 / LINE_MEGABITS
    round_seconds = report["wall_seconds"] - network.compute_seconds - up_seconds
    assert round_seconds == pytest.approx(ROUND_SECONDS, rel=0.1)
    assert network.compute_seconds / round_seconds == pytest.approx(COMPUTING_SHARE, rel=0.1)
