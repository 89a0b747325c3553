"""A swarm of chained blocks: real programs, snapshots named, fetched and judged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from blocktrain.config import Recipe
from blocktrain.judge.ledger_check import open_source
from blocktrain.local.assembly import save_final_checkpoint
from blocktrain.wire.messages import LedgerEntry
from tests.end_to_end.swarm_kit import Coordinator, Kit, Program, tiny_recipe
from tests.waiting import until

CHAIN = {"kind": "chain", "hint_probability": 0.5}
SWARM = {
    "codec": "sparse:64",
    "steps_per_round": 20,
    "rounds": 2,
    "replicas": 1,
    "max_deadline_seconds": 10.0,
}


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


def test_a_chain_of_three_blocks_trains_to_its_end_and_composes(kit: Kit, text: Path) -> None:
    recipe = chain_recipe(text, swarm={"codec": "dense", "steps_per_round": 8, "rounds": 3})
    coordinator = Coordinator(kit, recipe).start()
    for number in range(2):
        kit.worker(coordinator.url, f"worker-{number}")
    coordinator.finished()
    entries = coordinator.ledger()
    named = named_by_assignments(entries)
    committed = [entry.body for entry in entries if entry.kind == "commit"]
    assert len(committed) >= 9
    versions = {one["version"] for frozen in named.values() for one in frozen}
    assert max(versions) >= 1, "later blocks follow the earlier ones as they move"
    assert coordinator.verify().merges == 9

    with open_source(coordinator.url) as source:
        scores = save_final_checkpoint(source, kit.folder / "checkpoint")
    assert scores["consensus_ce"] < scores["block_ce"][0]
    assert scores["euler_ce"] is None, "blocks that take others' output as input do not compose by euler"


def said(program: Program, text: str) -> bool:
    return text in program.text()


def test_a_killed_worker_of_a_chain_goes_on_and_a_judge_elsewhere_has_the_frozen_blocks(
    kit: Kit, text: Path
) -> None:
    recipe = chain_recipe(text, 2, judge="external", probation_verdicts=0, guard=False)
    coordinator = Coordinator(kit, recipe).start()
    key = ["--key", str(coordinator.data_dir / "coordinator.key"), "--corpus", str(text)]
    judge = kit.start("judge", ["judge", "--coordinator", coordinator.url, *key])
    victim = kit.worker(coordinator.url)
    until("it trains the second block beside a trained first one", lambda: beside_trained(coordinator))
    victim.kill()
    again = kit.worker(coordinator.url)
    coordinator.finished()
    until("the worker ends", lambda: not again.running)
    assert judge.running, judge.text()
    assert said(judge, "block=1")
    named_by_assignments(coordinator.ledger())
    assert coordinator.verify().merges == 4
    report = json.loads(next((kit.folder / "worker").glob("*/report.json")).read_text())
    assert report["down"]["snapshot"] == 0, "payloads are enough to follow the frozen block"


def beside_trained(coordinator: Coordinator) -> bool:
    entries = [entry.body for entry in coordinator.ledger() if entry.kind == "assign"]
    return any(one["version"] > 0 for body in entries for one in body.get("frozen", []))
