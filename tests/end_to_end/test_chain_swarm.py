"""A swarm whose blocks hear the blocks before them: real programs, snapshots named, fetched and judged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from swarm_kit import Coordinator, Kit, tiny_recipe

from blocktrain.cli.assembly import save_final_checkpoint
from blocktrain.config import Recipe
from blocktrain.wire.messages import LedgerEntry

CHAIN = {"kind": "chain", "hint_probability": 0.0}
SWARM = {"codec": "sparse:64", "steps_per_round": 10, "rounds": 4, "replicas": 1}


def chain_recipe(text: Path, blocks: int = 3, swarm: dict[str, Any] | None = None, **trust: Any) -> Recipe:
    return tiny_recipe(
        text,
        objective=CHAIN,
        model={"blocks": blocks},
        training={"batch": 8, "warmup_steps": 2, "reference": False},
        swarm={**SWARM, **(swarm or {})},
        trust={"judge": "off", "stamp_bits": 0, **trust},
    )


def named_by_assignments(entries: list[LedgerEntry]) -> dict[str, list[dict[str, Any]]]:
    """Frozen snapshots by assignment, each checked to have been published before."""
    published = {(layout["block"], 0, layout["initial_hash"]) for layout in entries[0].body["blocks"]}
    named: dict[str, list[dict[str, Any]]] = {}
    for entry in entries:
        if entry.kind == "snapshot":
            published.add((entry.body["block"], entry.body["version"], entry.body["hash"]))
        if entry.kind == "assign":
            frozen = entry.body.get("frozen", [])
            assert [one["block"] for one in frozen] == list(range(entry.body["block"]))
            assert all((one["block"], one["version"], one["hash"]) in published for one in frozen)
            named[entry.body["assignment_id"]] = frozen
    return named


def test_a_judged_chain_of_three_blocks_trains_to_its_end_and_composes(kit: Kit, text: Path) -> None:
    recipe = chain_recipe(text, judge="coordinator", probation_verdicts=0)
    coordinator = Coordinator(kit, recipe).start()
    for number in range(2):
        kit.worker(coordinator.url, f"worker-{number}")
    status = coordinator.finished(120)
    entries = coordinator.ledger()
    named = named_by_assignments(entries)
    committed = [entry.body for entry in entries if entry.kind == "commit"]
    assert len(committed) >= 12
    versions = {one["version"] for frozen in named.values() for one in frozen}
    assert max(versions) >= 1, "later blocks follow the earlier ones as they move"
    assert coordinator.verify().merges == 12

    scores = save_final_checkpoint(coordinator.client(), status, kit.folder / "checkpoint")
    assert scores["consensus_ce"] < scores["block_ce"][0]
