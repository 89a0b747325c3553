"""What runs of 1, 7 and 72 billion parameters would take, from what was measured here: docs/scale.md.

    python benchmarks/scale.py

Nothing is trained. Memory, round and traffic are `blocktrain plan`'s; the load of coordinator and judges is
scaled from the constants below, each a number that a program printed. Prices are assumptions of 2026.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from provenance import write_report

from blocktrain.planning.cut import Plan, plan_run, recipe_of_size
from blocktrain.planning.machines import CARDS, SUSTAINED_SHARE, MachineGroup

VOCABULARY = 32_768
REQUEST_SECONDS = 0.0313
"""Processor time of a coordinator for all requests of an update (benchmarks/fleet.py, d335207)."""
MERGE_SECONDS = 14.8 / (4 * 1.047e9)
"""Processor time for one value of one update, `sign` (benchmarks/merge.py, four updates of 1.05 B, 91a05f7,
docs/history/2026-11-16.md)."""
MERGE_WALL_SECONDS = 11.1 / (4 * 1.047e9)
"""From the start of the last reveal to the snapshot, on two cores, in the same run."""
JUDGE_SHARE = 0.099
"""Of the compute that is judged, the most in the suite of attacks (docs/experiments.md)."""
EGRESS_DOLLARS_PER_GB = 0.09


@dataclass(frozen=True)
class Case:
    billions: int
    group: MachineGroup
    dollars_per_hour: float
    """Of one machine of the group."""


def cards(count: int, name: str, up: float, down: float, *, each: int = 1) -> MachineGroup:
    card = CARDS[name]
    return MachineGroup(
        count=count,
        device=name if each == 1 else f"{each}x {name}",
        memory_gb=each * card.memory_gb,
        tflops=each * SUSTAINED_SHARE * card.peak_tflops,
        up_mbit=up,
        down_mbit=down,
    )


CASES = (
    Case(1, cards(16, "rtx-4090", 30, 100), 0.4),
    Case(7, cards(64, "rtx-4090", 30, 100), 0.4),
    Case(7, cards(32, "h100", 200, 500), 2.5),
    Case(72, cards(160, "h200", 500, 1000), 3.5),
    Case(72, cards(20, "b200", 1000, 4000, each=8), 44.0),
)


def row(case: Case, plan: Plan) -> dict[str, Any]:
    swarm, cut, workers = plan.recipe.swarm, plan.cut, plan.num_workers
    updates_per_second = workers / plan.round_seconds
    days = plan.days_to_learn
    egress_gb = plan.traffic.down * workers * plan.rounds_per_day * days / 1e9
    return {
        "billions": case.billions,
        "machines": f"{case.group.count} x {case.group.device}",
        "blocks": cut.blocks,
        "block_parameters": cut.block_parameters,
        "memory_gb": plan.times[0].fit.memory_bytes / 1e9,
        "codec": swarm.codec,
        "steps_per_round": swarm.steps_per_round,
        "batch": plan.recipe.training.batch,
        "round_seconds": plan.round_seconds,
        "up_gb": plan.traffic.up / 1e9,
        "down_gb": plan.traffic.down / 1e9,
        "tokens_per_day_billions": plan.tokens_per_day / 1e9,
        "block_tokens_per_day_billions": plan.block_tokens_per_day / 1e9,
        "days": days,
        "days_per_block_parameter": days / cut.blocks,
        "egress_tb": egress_gb / 1e3,
        "updates_per_second": updates_per_second,
        "request_cores": updates_per_second * REQUEST_SECONDS,
        "merge_cores": updates_per_second * MERGE_SECONDS * cut.block_parameters,
        "merge_seconds": swarm.replicas * cut.block_parameters * MERGE_WALL_SECONDS,
        "judge_machines": JUDGE_SHARE * workers,
        "machine_dollars": case.group.count * case.dollars_per_hour * 24 * days,
        "judge_dollars": JUDGE_SHARE * workers * case.dollars_per_hour * 24 * days,
        "egress_dollars": egress_gb * EGRESS_DOLLARS_PER_GB,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="also write the rows here")
    options = parser.parse_args()
    rows = []
    for case in CASES:
        recipe = recipe_of_size(case.billions * 1e9, VOCABULARY)
        rows.append(row(case, plan_run(recipe, [case.group], VOCABULARY)))
    for key in rows[0]:
        shown = (f"{one[key]:,.3g}" if isinstance(one[key], float) else str(one[key]) for one in rows)
        print(f"{key:24}", *(f"{text:>16}" for text in shown))
    write_report(options.json, "scale", {"rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
