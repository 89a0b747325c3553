"""The demo: everything once, on this machine: train by a swarm with an attacker in it, verify, serve, look.

It starts the same programs that machines of different owners run, as processes here, and wires them to
each other's addresses. What it prints at the end comes from the public API of the run, from replaying its
ledger, and from the gateway's own account of one answer.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import statistics
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from blocktrain.client.gateway import GatewayClient
from blocktrain.config import Recipe, find_recipe
from blocktrain.errors import StoppedError, UserError
from blocktrain.judge.ledger_check import open_source, verify_place
from blocktrain.local.assembly import save_final_checkpoint
from blocktrain.local.attacker import Attacker
from blocktrain.local.launcher import LaunchConfig, Launcher
from blocktrain.local.swarm import LocalSwarm, SwarmOptions, shown
from blocktrain.local.terminal import TrainingProgress, harmless
from blocktrain.tracking.curves import draw_swarm
from blocktrain.training.device import find_device
from blocktrain.training.evaluation import Evaluator
from blocktrain.training.local import LocalRun, versions
from blocktrain.training.setup import with_swarm_schedule
from blocktrain.training.storage import write_json
from blocktrain.wire.messages import StatusAnswer

WORKERS = 4
STAGES = 3
PROMPT = "The following "
SAMPLE_BYTES = 160
MARKER = "demo.json"
RESULTS = ("checkpoint", "state", "coordinator", "end-to-end", "logs")
FILES = ("report.json", "curves.png", "sample.txt", "run.json", "metrics.jsonl", "swarm.lock", MARKER)


def clear_earlier_demo(out: Path, name: str) -> None:
    """Remove what an earlier demo wrote, and nothing else."""

    def recipe_name(path: Path) -> str | None:
        try:
            return str(json.loads(path.read_text(encoding="utf-8"))["recipe"]["name"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    # Only a folder that says it is a demo: `--out .` must not cost anybody their work.
    if not any(recipe_name(out / marker) == name for marker in (MARKER, "run.json")):
        raise UserError(f"{out} is in use and holds no demo; choose another --out")
    for folder in (*(out / result for result in RESULTS), *out.glob("worker-*")):
        shutil.rmtree(folder, ignore_errors=True)
    for result in FILES:
        (out / result).unlink(missing_ok=True)


@dataclass
class Demo:
    recipe: Recipe
    out: Path
    device: str
    console: Console
    stop: threading.Event

    def run(self, *, once: bool) -> None:
        began = time.monotonic()
        model = self.recipe.model
        self.say(
            f"[bold]BlockTrain demo[/bold]: one small language model, cut into {model.blocks} blocks of "
            f"{model.layers_per_block} layers.\nEach block is trained alone, by workers that never see the "
            "others' gradients, activations or optimizer state;\nan attacker tries to spoil it; then the "
            "blocks are served together. Text: this Python's own documentation.\n"
            f"About three minutes on two cores ({os.cpu_count()} here).\n"
        )
        reference, curve = self.train_end_to_end()
        # The coordinator names the gateway on its dashboard before the gateway runs, so its port is
        # chosen now.
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = int(listener.getsockname()[1])
        options = ("--reference", f"{reference:.6f}", "--gateway", f"http://127.0.0.1:{port}")
        swarm = LocalSwarm(
            SwarmOptions(
                find_recipe("demo").absolute(),
                WORKERS,
                self.out,
                device=self.device,
                coordinator_options=options,
            ),
            self.console,
            self.stop,
        )
        launcher: Launcher | None = None
        try:
            trained = self.train_swarm(swarm)
            launcher = Launcher(
                LaunchConfig(
                    checkpoint=self.out / "checkpoint",
                    num_stages=STAGES,
                    logs=self.out / "logs",
                    port=port,
                    gateway_options=("--origin", swarm.url),
                )
            )
            served = self.serve(launcher)
            seconds = time.monotonic() - began
            summary = {**trained, **served, "reference_ce": reference, "seconds": seconds}
            summary["versions"] = versions(find_device(self.device))
            write_json(self.out / "report.json", summary)
            self.draw(summary, curve)
            table = Table(title="What happened", show_header=False, title_justify="left", pad_edge=False)
            table.add_column(style="bold", no_wrap=True)
            table.add_column(overflow="fold")
            for row in summary_rows(summary):
                table.add_row(*row)
            Console().print(table)
            self.say(f"{int(seconds) // 60} min {int(seconds) % 60} s in all. Everything is in {self.out}/\n")
            if not once:
                self.stay_up(swarm.url, served["gateway"], launcher)
        finally:
            if launcher is not None:
                launcher.end()
            swarm.close()

    def say(self, text: str) -> None:
        # A terminal breaks a long line inside words; rich breaks it between them. In a file lines stay whole.
        self.console.print(text, highlight=False, soft_wrap=not self.console.is_terminal)

    def train_end_to_end(self) -> tuple[float, list[tuple[int, float]]]:
        """The reference: the same layers in one piece, as many steps as each block gets; and its curve."""
        self.say("[bold]1. For comparison[/bold]: the same layers end to end, in one process.")
        recipe = with_swarm_schedule(self.recipe)
        with TrainingProgress(self.console) as progress:
            run = LocalRun(recipe, self.out / "end-to-end", find_device(self.device), progress, self.stop)
            # The swarm trains the blocks; here only the reference is of interest.
            run.units = [unit for unit in run.units if unit.index is None]
            try:
                run.train(resume=False)
            except StoppedError:
                raise StoppedError("stopped; the same command starts over") from None
        assert run.reference is not None
        table = run.codebook().detach()
        evaluator = Evaluator(run.objective, table, recipe.evaluation, seed=recipe.seed)
        valid = run.text.first_tokens("held_out", recipe.evaluation.max_bytes)
        return evaluator.score_one(run.reference.to(table.device).eval(), valid).ce, run.units[0].curve

    def train_swarm(self, swarm: LocalSwarm) -> dict[str, Any]:
        self.say(
            f"\n[bold]2. The same layers as {self.recipe.model.blocks} blocks[/bold], by {WORKERS} workers "
            "that know only a coordinator's address. An attacker joins too."
        )
        swarm.start()
        self.say(f"Dashboard: [bold]{swarm.url}/[/bold]")
        client = swarm.client()
        attacker = Attacker(swarm.url)

        def let_attacker_in(status: StatusAnswer) -> None:
            # It turns merged updates round, so there must be one before it can do harm.
            if not attacker.started and any(block.head_version > 0 for block in status.blocks):
                attacker.start()

        with shown(self.console) as show:
            swarm.watch(client, show, let_attacker_in)
        fate = attacker.end()
        swarm.end_workers()
        self.say("\n[bold]3. Composing and verifying[/bold]: the last snapshots, the ledger replayed.")
        # By the public routes, as any outsider would: a check inside the coordinator would prove nothing.
        with open_source(swarm.url) as source:
            final = save_final_checkpoint(source, self.out / "checkpoint")
        found = verify_place(swarm.url)
        if not found.ok:
            raise StoppedError(f"the ledger does not verify: {found.report.reason}")
        status = client.status()
        traffic = [one for worker in status.workers for one in (worker.up, worker.down)]
        # From the merge records and not from verdicts: an accepted update may still be left out by the guard.
        merged = [
            one.worker_id
            for block in status.blocks
            for record in client.merges(block.block, 0).merges
            for one in record.inputs
        ]
        scores = [{"rounds": list(one.versions), "ce": one.consensus_ce} for one in status.evaluations]
        return {
            "ce_per_round": scores,
            "bigram_ce": next((one.ce for one in status.references if one.name.startswith("bigram")), None),
            "bytes_moved": sum(sum(one.model_dump().values()) for one in traffic),
            "full_checkpoint_bytes": status.full_checkpoint_bytes,
            "updates": sum(worker.accepted + worker.late for worker in status.workers),
            "arrived": sum(
                worker.accepted + worker.late + worker.unused + worker.refused for worker in status.workers
            ),
            "attacker": {
                "sent": fate.sent,
                "merged": merged.count(fate.worker_id),
                "fate": fate.sentence(),
            },
            "final": final,
            "ledger": found.report.reason,
            "ledger_entries": found.report.entries,
            "merges": found.report.merges,
        }

    def serve(self, launcher: Launcher) -> dict[str, Any]:
        self.say(
            f"\n[bold]4. Serving[/bold]: {STAGES} stage processes and a gateway. A sample, as it comes:\n"
        )
        url = launcher.start(self.stop)
        text, usage = self.sample(url, "verify", show=True)
        # The same seed byte by byte: the demo shows that drafting changes the speed and not the text.
        plain, _ = self.sample(url, "ar", show=False)
        cost = usage["blocktrain"]
        (self.out / "sample.txt").write_text(PROMPT + text + "\n", encoding="utf-8")
        return {
            "gateway": url,
            "bytes_per_traversal": cost["bytes_per_traversal"],
            "traversals": cost["traversals"],
            "sample_bytes": cost["text_bytes"],
            "lossless": text == plain,
        }

    def sample(self, url: str, mode: str, *, show: bool) -> tuple[str, dict[str, Any]]:
        def print_part(part: str) -> None:
            if show:
                self.console.print(part, end="", markup=False, highlight=False, soft_wrap=True)

        text = ""
        usage: dict[str, Any] = {}
        print_part(PROMPT)
        with GatewayClient(url) as client:
            fields = {"model": client.model(), "prompt": PROMPT, "max_tokens": SAMPLE_BYTES, "seed": 1}
            for delta in client.complete({**fields, "temperature": 0.7, "mode": mode}):
                text += delta.text
                usage = dict(delta.usage or usage)
                print_part(harmless(delta.text))
        print_part("\n\n")
        return text, usage

    def draw(self, summary: dict[str, Any], curve: list[tuple[int, float]]) -> None:
        """curves.png: the composed model's loss as the run scored it, and at the end."""
        steps = self.recipe.swarm.steps_per_round
        points = [(steps * statistics.mean(one["rounds"]), one["ce"]) for one in summary["ce_per_round"]]
        points.append((self.recipe.swarm.total_steps, summary["final"]["consensus_ce"]))
        known = {"end to end": summary["reference_ce"], "bigram counts": summary["bigram_ce"]}
        references = {name: ce for name, ce in known.items() if ce is not None}
        draw_swarm(points, curve, references, self.out / "curves.png")

    def stay_up(self, dashboard: str, api: str, launcher: Launcher) -> None:
        body = json.dumps({"model": launcher.model, "prompt": "The ", "max_tokens": 64})
        self.say(
            f"Dashboard  {dashboard}/\nAPI        {api}/v1 (OpenAI-compatible), for instance\n"
            f"           curl {api}/v1/completions -H 'content-type: application/json' -d '{body}'\n"
            "Both stay up until Ctrl-C."
        )
        launcher.watch(self.stop)


def summary_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    final, reference = summary["final"]["consensus_ce"], summary["reference_ce"]
    scores = [f"{min(one['rounds'])}: {one['ce']:.3f}" for one in thinned(summary["ce_per_round"], 8)]
    bigram = f", bigram counts {summary['bigram_ce']:.3f}" if summary["bigram_ce"] is not None else ""
    moved, full = summary["bytes_moved"], summary["full_checkpoint_bytes"]
    attacker = summary["attacker"]
    merged = "none of it was merged" if not attacker["merged"] else f"{attacker['merged']} got merged"
    same = "the same text as byte by byte" if summary["lossless"] else "NOT the text of byte by byte"
    return [
        (
            "loss by round",
            f"{', '.join(scores)} (of the slowest block; nats per byte on held-out text, lower is better)",
        ),
        ("in the end", f"{final:.3f} composed; end to end with the same steps {reference:.3f}{bigram}"),
        (
            "traffic",
            f"{moved / 1e6:.1f} MB for {summary['arrived']} updates, {summary['updates']} of which counted; "
            f"all as full checkpoints {full / 1e6:.1f} MB ({full / max(1, moved):.0f} times as much)",
        ),
        ("attacker", f"{attacker['fate']}; {merged}"),
        (
            "verified",
            f"{summary['ledger_entries']} ledger entries, {summary['merges']} merges replayed: "
            f"{summary['ledger']}",
        ),
        (
            "serving",
            f"{summary['bytes_per_traversal']:.1f} bytes of text per traversal of the {STAGES} stages "
            f"({summary['sample_bytes']} bytes in {summary['traversals']}), {same}",
        ),
    ]


def thinned(values: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """At most `count` of them, the first and the last included."""
    if len(values) <= count:
        return values
    return [values[round(i * (len(values) - 1) / (count - 1))] for i in range(count)]
