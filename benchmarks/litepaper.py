"""The litepaper's tables, theirs beside ours.

    python benchmarks/litepaper.py --table T1|T2|T3 [--quick] [--device cuda] [--corpus PATH] [--jobs 4]
    python benchmarks/litepaper.py --table T4|T5 [--quick] [--seeds 0,1] [--jobs 2]
    python benchmarks/litepaper.py --table T6|T7 [--quick] [--device cuda] [--corpus PATH] [--codecs sign]

T1      noise ranges, MLP blocks. T2: from the MSE denoiser to transformer blocks, and end to end; with noise
        shared out by equal progress beside equal mass. T3: twelve layers cut in four ways (noise_tables.py).
T4, T5  one swarm on seven virtual networks, through `blocktrain.simulation`: real training steps under a
        virtual clock, with the litepaper's rule (`drop`) and ours (`carry`).
T6      one process beside six workers, two replicas per block, the same tokens per block; in the recipe's 96
        rounds and in the litepaper's 32.
T7      three workers through real HTTP, one per block, 12 rounds of 300 steps; and the same blocks trained
        alone and uploaded once.
T6 and T7 start the real programs (`blocktrain coordinator`, `blocktrain worker`) on this machine; bytes are
counted on the workers' sockets, both directions, headers included.

Progress goes to stderr, the table and the line for docs/experiments.md to stdout, all numbers to
OUT/TABLE-*.json. --quick is a tiny shape that ends within a minute on two idle cores, to see that it works;
it claims nothing. What was cut off goes on with the same command. Without --quick the exit code is 1
where a claim of the table fails: T1 to T3, the litepaper's order of the rows; T4 and T5, `carry` within
NEAR_LOCKSTEP of lockstep and sooner than `drop`; T6, six workers within NEAR_ONE_PROCESS of one process; T7,
less traffic than the litepaper for every codec, and a lower loss by its own composition with `sign`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import noise_tables
import numpy as np
import torch
from numpy.typing import NDArray
from provenance import check_claims, provenance, write_report
from rich.console import Console

from blocktrain.codec_spec import CodecSpec
from blocktrain.config import find_recipe, load_recipe
from blocktrain.local.swarm import SwarmOptions, run_swarm
from blocktrain.simulation.networks import NETWORKS, Network
from blocktrain.simulation.run import Policy, Scenario, Simulation
from blocktrain.training.device import find_device
from blocktrain.training.local import LocalRun, Silent
from blocktrain.training.source import source_commit
from blocktrain.training.update import decoded_delta, difference, encode_update
from blocktrain.wire.codec import Schema, Tensors

Table = tuple[list[str], dict[str, bool]]
"""Lines to print, and what they claim."""
CONSOLE = Console(stderr=True, highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class Options:
    table: str
    device: str
    corpus: str | None
    codecs: tuple[str, ...]
    seeds: tuple[int, ...]
    jobs: int
    quick: bool
    settings: tuple[str, ...]
    out: Path

    def overrides(self, *more: str) -> list[str]:
        """Settings over a shipped recipe; what was given on the command line comes last."""
        return [*more, *_corpus(self.corpus), *self.settings]


def _corpus(name: str | None) -> list[str]:
    """A path is made absolute, as the programs run elsewhere; `builtin` and hf:NAME are left alone."""
    if name is None:
        return []
    path = Path(name).expanduser()
    return [f"data.corpus={path.absolute() if path.exists() else name}"]


# --- T1 to T3: blocks and noise, in one process

QUICK_BLOCKS = (
    *("model.width=32", "model.heads=2", "model.context=32"),
    *("training.steps=10", "training.batch=4", "data.max_bytes=400000"),
    *("evaluation.max_bytes=4096", "evaluation.pooling_bytes=4096", "evaluation.noise_draws=1"),
)


def noise_ranges(options: Options) -> Table:
    found = _train_rows(options, noise_tables.T1)
    return noise_tables.noise_range_lines(found), dict(noise_tables.noise_range_claims(found))


def progression(options: Options) -> Table:
    found = _train_rows(options, noise_tables.T2)
    published = next(one for one in found if one.row.theirs == 1.359)
    # Only after the first run is known what it found hard.
    row = noise_tables.adapted(published)
    adapted = [] if row is None else _train_rows(options, [row])
    lines = [
        *noise_tables.progression_lines([*found, *adapted]),
        "",
        f"Noise edges at equal probability mass: {_numbers(published.edges)}; at equal progress: "
        f"{_numbers(noise_tables.equal_progress(published.noise_curve, 3))}"
        f"{'' if adapted else ', which no normal distribution of ln sigma gives: not trained'}.",
    ]
    return lines, dict(noise_tables.progression_claims(found))


def cuts(options: Options) -> Table:
    found = _train_rows(options, noise_tables.T3)
    return noise_tables.cut_lines(found), dict(noise_tables.cut_claims(found))


def _train_rows(options: Options, rows: Sequence[noise_tables.Row]) -> list[noise_tables.Trained]:
    settings = options.overrides(*(QUICK_BLOCKS if options.quick else ()))
    began = time.monotonic()

    def write(found: list[noise_tables.Trained]) -> None:
        _write(options, "one-process", noise_tables.numbers_of(found), settings)
        one = found[-1]
        CONSOLE.print(
            f"{time.monotonic() - began:.0f} s {one.row.name}: ce={one.ce:.4f} "
            f"consensus={one.consensus:.4f} {one.seconds:.0f}s"
        )

    known = [noise_tables.trained_of(row) for row in _rows_before(options, "one-process", settings)]
    return noise_tables.train_all(rows, settings, options.device, options.jobs, known, write)


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.3g}" for value in values)


# --- T4 and T5: asynchrony


@dataclass(frozen=True)
class Theirs:
    """What the litepaper prints for a network."""

    participation: str
    ce: float


THEIRS = {
    "lockstep": Theirs("100 %", 1.910),
    "wan-tight": Theirs("22 %", 2.290),
    "wan-mid": Theirs("61 %", 2.160),
    "wan-loose": Theirs("86 %", 1.913),
}
NETWORKS_OF = {
    "T4": ("lockstep", "mild", "edge-mid", "bad-edge"),
    "T5": ("lockstep", "wan-tight", "wan-mid", "wan-loose"),
}
VARIANTS: tuple[tuple[Policy, str], ...] = (("drop", "dense"), ("drop", "bits:4"), ("carry", "bits:4"))
"""Their rule and bytes; their rule with four bits per parameter; our rule with the same."""
QUICK_SIMULATION = (
    "swarm.rounds=4",
    "swarm.steps_per_round=3",
    "model.width=32",
    "evaluation.max_bytes=8192",
)

NEAR_LOCKSTEP, NEAR_ONE_PROCESS = 0.02, 0.02
THEIR_CE, THEIR_GB = 1.811, 15.22
"""T7 of the litepaper: `euler` from noise, three hosts."""

Run = tuple[str, Policy, str, int]
"""Network, policy, codec and seed."""


def simulate(run: Run, settings: Sequence[str], device: str) -> dict[str, Any]:
    network, policy, codec, seed = run
    torch.set_num_threads(1)
    recipe = load_recipe(find_recipe("asynchrony"), [*settings, f"swarm.codec={codec}"])
    scenario = Scenario(
        recipe=recipe,
        network=NETWORKS[network],
        policy=policy,
        seed=seed,
        evaluate_every=max(1, recipe.swarm.rounds // 4),
        device=find_device(device),
    )
    return Simulation(scenario).run()


def asynchrony(options: Options) -> Table:
    seeds = options.seeds[:1] if options.quick else options.seeds
    runs: list[Run] = [
        (network, policy, codec, seed)
        for network in NETWORKS_OF[options.table]
        for policy, codec in VARIANTS
        for seed in seeds
    ]
    settings = options.overrides(*(QUICK_SIMULATION if options.quick else ()))
    distinct = list(dict.fromkeys(map(_as_simulated, runs)))
    found = _simulate_all(distinct, settings, options)
    reports = {run: found[_as_simulated(run)] for run in runs}
    return _asynchrony_table(options.table, seeds, reports), _asynchrony_claims(options.table, seeds, reports)


def _asynchrony_claims(
    table: str, seeds: Sequence[int], reports: dict[Run, dict[str, Any]]
) -> dict[str, bool]:
    claims = {}
    for network in NETWORKS_OF[table]:
        for seed, lockstep in zip(seeds, _lockstep(reports, seeds), strict=True):
            carry = reports[network, "carry", "bits:4", seed]
            claims[f"{network}, seed {seed}: carry within {NEAR_LOCKSTEP} of lockstep"] = (
                carry["final_ce"] <= lockstep + NEAR_LOCKSTEP
            )
            for codec in ("dense", "bits:4"):
                sooner = carry["wall_seconds"] < reports[network, "drop", codec, seed]["wall_seconds"]
                claims[f"{network}, seed {seed}: carry is sooner than drop, {codec}"] = sooner
    return claims


def _as_simulated(run: Run) -> Run:
    """Under `carry` networks that differ only in the litepaper's deadline are one and the same."""
    network, policy, codec, seed = run
    if policy == "drop":
        return run
    twin = next(name for name in NETWORKS if _without_deadline(name) == _without_deadline(network))
    return twin, policy, codec, seed


def _without_deadline(name: str) -> Network:
    return dataclasses.replace(NETWORKS[name], name="", sentence="", deadline_seconds=1.0)


def _simulate_all(
    runs: Sequence[Run], settings: Sequence[str], options: Options
) -> dict[Run, dict[str, Any]]:
    before = _rows_before(options, "simulations", settings)
    reports = {(row["network"], row["policy"], row["codec"], row["seed"]): row for row in before}
    started = time.monotonic()
    with ProcessPoolExecutor(options.jobs) as pool:
        waiting = {
            pool.submit(simulate, run, settings, options.device): run for run in runs if run not in reports
        }
        for future in as_completed(waiting):
            run, report = waiting[future], future.result()
            reports[run] = report
            # After each: a call that is cut off leaves what it has, and the same call goes on with the rest.
            _write(options, "simulations", list(reports.values()), settings)
            CONSOLE.print(
                f"{len(reports)}/{len(runs)} {' '.join(map(str, run))} ce={report['final_ce']:.4f} "
                f"participation={report['participation']:.0%} virtual={report['wall_seconds']:.0f}s "
                f"after {time.monotonic() - started:.0f}s"
            )
    return reports


def _asynchrony_table(table: str, seeds: Sequence[int], reports: dict[Run, dict[str, Any]]) -> list[str]:
    lines = [
        "| network | rule, updates | participation | CE | above lockstep, by seed | virtual wall | traffic |",
        "|---|---|---|---|---|---|---|",
    ]
    for network in NETWORKS_OF[table]:
        lines.append(_theirs(network))
        for policy, codec in VARIANTS:
            runs = [reports[network, policy, codec, seed] for seed in seeds]
            lines.append(_ours(f"| | `{policy}`, {codec}", runs, _lockstep(reports, seeds)))
    return [
        *lines,
        "",
        f"Seeds {', '.join(map(str, seeds))}; CE, wall and traffic are means, the differences are paired "
        "with the uncompressed lockstep run of the same seed. Participation counts updates on time.",
    ]


def _lockstep(reports: dict[Run, dict[str, Any]], seeds: Sequence[int]) -> list[float]:
    """Nothing compressed and nobody late: what everything is measured against."""
    return [float(reports["lockstep", "drop", "dense", seed]["final_ce"]) for seed in seeds]


def _theirs(network: str) -> str:
    theirs, lockstep = THEIRS.get(network), THEIRS["lockstep"].ce
    if theirs is None:
        return f"| {network} | theirs: no number known | | | | | |"
    gap = f"{theirs.ce - lockstep:+.3f}"
    return f"| {network} | theirs | {theirs.participation} | {theirs.ce:.3f} | {gap} | | |"


def _ours(head: str, reports: Sequence[dict[str, Any]], lockstep: Sequence[float]) -> str:
    def mean(key: str) -> float:
        return statistics.mean(float(report[key]) for report in reports)

    gaps = [report["final_ce"] - reference for report, reference in zip(reports, lockstep, strict=True)]
    traffic = (mean("bytes_up") + mean("bytes_down")) / 1e9
    return (
        f"{head} | {mean('participation'):.0%} | {mean('final_ce'):.3f} | "
        f"{', '.join(f'{gap:+.3f}' for gap in gaps)} | {mean('wall_seconds'):.0f} s | {traffic:.1f} GB |"
    )


# --- T6: six workers beside one process

QUICK_SWARM = (
    "model.width=32",
    "model.heads=2",
    "model.layers_per_block=1",
    "model.context=32",
    "training.batch=4",
    "data.max_bytes=400000",
    "evaluation.max_bytes=8192",
    "evaluation.pooling_bytes=4096",
    "swarm.rounds=3",
    "swarm.steps_per_round=4",
)


def six_workers(options: Options) -> Table:
    recipe = load_recipe(find_recipe("swarm-t6"), _swarm_settings(options))
    fine = f"{recipe.swarm.rounds} rounds of {recipe.swarm.steps_per_round}"
    rounds, steps = max(1, recipe.swarm.rounds // 3), recipe.swarm.steps_per_round * 3
    coarse = f"{rounds} rounds of {steps}"
    found = _all_rows(
        options,
        {
            "one process": (_one_process, ()),
            fine: (_in_a_swarm, ()),
            # As many rounds as the litepaper has: 32 where the recipe has 96.
            coarse: (
                _in_a_swarm,
                (f"swarm.rounds={rounds}", f"swarm.steps_per_round={steps}", "swarm.outer_lr=1"),
            ),
        },
    )
    single = found["one process"]["consensus"]
    tokens = recipe.swarm.total_steps * recipe.training.batch * recipe.swarm.replicas * recipe.model.context
    lines = [
        "| | theirs | ours | above one process | workers' traffic | operator's download | participation |",
        "|---|---|---|---|---|---|---|",
        f"| one process | 1.359 | {single:.4f} | | | | |",
        *(
            f"| six workers, {recipe.swarm.codec}, {name} steps | {theirs} | {row['consensus']:.4f} | "
            f"{row['consensus'] - single:+.4f} | {_traffic(row)} | {_percent(row['participation'])} |"
            for name, theirs, row in ((coarse, "1.385", found[coarse]), (fine, "", found[fine]))
        ),
        "",
        f"Theirs is 0.026 above. {tokens:,} tokens per block in all rows: {recipe.swarm.total_steps} steps, "
        f"of batch {recipe.training.batch} on each of {recipe.swarm.replicas} replicas, and of batch "
        f"{recipe.training.batch * recipe.swarm.replicas} in the one process.",
    ]
    near = found[fine]["consensus"] <= single + NEAR_ONE_PROCESS
    return lines, {f"six workers within {NEAR_ONE_PROCESS} of one process": near}


# --- T7: three workers over HTTP

UPLOADS = ("dense", "bf16", "bits:8")
"""How a block that was trained alone is sent, once: fp32, half of that, or the change in 8 bits."""


def over_http(options: Options) -> Table:
    recipe = load_recipe(find_recipe("swarm-t7"), _swarm_settings(options))
    swarms = {codec: (_in_a_swarm, (f"swarm.codec={codec}",)) for codec in options.codecs}
    found = _all_rows(options, {**swarms, "alone": (_upload_once, ())})
    claims = {
        f"{codec} moves less than {THEIR_GB} GB": found[codec]["workers_bytes"] < THEIR_GB * 1e9
        for codec in options.codecs
    }
    if "sign" in found:
        euler = found["sign"]["euler"]
        claims[f"sign: euler below the litepaper's {THEIR_CE}"] = euler is not None and euler < THEIR_CE
    uploads = {
        f"trained alone, uploaded once in {upload['form']}": upload for upload in found["alone"]["uploads"]
    }
    lines = [
        "| updates | consensus | euler | workers' traffic | operator's download | participation |",
        "|---|---|---|---|---|---|",
        f"| theirs, three hosts | - | {THEIR_CE} (from 5.580) | {THEIR_GB} GB | - | 100 % |",
        *(
            f"| ours, {name} | {row['consensus']:.4f} | "
            f"{'-' if row['euler'] is None else format(row['euler'], '.4f')} | {_traffic(row)} | "
            f"{_percent(row['participation'])} |"
            for name, row in ({codec: found[codec] for codec in options.codecs} | uploads).items()
        ),
        "",
        f"{recipe.model.blocks} workers, {recipe.swarm.rounds} rounds of {recipe.swarm.steps_per_round} "
        f"steps, {recipe.training.batch * recipe.model.context} tokens per step and block, width "
        f"{recipe.model.width}, {recipe.model.layers_per_block} layers per block. Traffic: all bytes on the "
        "workers' sockets, both directions; operator's download: what the coordinator sent as snapshots. A "
        "block that is uploaded once is the operator's then: its payload, without headers.",
    ]
    return lines, claims


# --- T6 and T7: rows, each in a process of its own

Train = Callable[[Options, str, tuple[str, ...]], dict[str, Any]]


def _swarm_settings(options: Options) -> list[str]:
    return options.overrides(*(QUICK_SWARM if options.quick else ()))


def _all_rows(options: Options, rows: dict[str, tuple[Train, tuple[str, ...]]]) -> dict[str, dict[str, Any]]:
    settings = _swarm_settings(options)
    found = {row["row"]: row for row in _rows_before(options, "rows", settings)}
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        waiting = [
            pool.submit(train, options, name, more)
            for name, (train, more) in rows.items()
            if name not in found
        ]
        for future in as_completed(waiting):
            row = future.result()
            found[row["row"]] = row
            _write(options, "rows", list(found.values()), settings)
            CONSOLE.print(f"{row['row']}: consensus={row['consensus']:.4f} after {row['seconds']:.0f}s")
    return found


def _in_a_swarm(options: Options, name: str, more: tuple[str, ...]) -> dict[str, Any]:
    recipe = f"swarm-{options.table.lower()}"
    settings = [*_swarm_settings(options), *more]
    swarm = load_recipe(find_recipe(recipe), settings)
    out = _fresh(options.out / name.replace(":", "-").replace(" ", "-"))
    workers = swarm.model.blocks * swarm.swarm.replicas
    found = run_swarm(
        SwarmOptions(find_recipe(recipe).absolute(), workers, out, tuple(settings), options.device),
        CONSOLE,
        threading.Event(),
    )
    return {
        "row": name,
        "consensus": float(found["final"]["consensus_ce"]),
        "euler": found["final"]["euler_ce"],
        "workers_bytes": found["bytes_total"],
        "operator_bytes": found["coordinator"]["sent"].get("snapshot", 0),
        "participation": found["participation"],
        "seconds": found["wall_seconds"],
    }


def _trained_here(options: Options, out: Path) -> LocalRun:
    """All blocks in one process, each step on as many sequences as all replicas see."""
    recipe = load_recipe(find_recipe(f"swarm-{options.table.lower()}"), _swarm_settings(options))
    training = dataclasses.replace(
        recipe.training,
        steps=recipe.swarm.total_steps,
        batch=recipe.training.batch * recipe.swarm.replicas,
        reference=False,
    )
    recipe = dataclasses.replace(recipe, training=training)
    run = LocalRun(recipe, _fresh(out), find_device(options.device), Silent())
    run.train(resume=False)
    return run


def _one_process(options: Options, name: str, _: tuple[str, ...]) -> dict[str, Any]:
    started = time.monotonic()
    scores = _trained_here(options, options.out / "one-process").evaluate()
    return {
        "row": name,
        "consensus": scores.consensus.ce,
        "euler": None if scores.euler is None else scores.euler.ce,
        "seconds": time.monotonic() - started,
    }


def _upload_once(options: Options, name: str, _: tuple[str, ...]) -> dict[str, Any]:
    """What a swarm in which nobody merges with anybody must be compared with."""
    started = time.monotonic()
    run = _trained_here(options, options.out / name)
    trained = [arrays_of(block) for block in run.blocks]
    uploads = []
    for form in UPLOADS:
        num_bytes = 0
        for index, (block, local) in enumerate(zip(run.blocks, trained, strict=True)):
            sent, arrived = uploaded(form, arrays_of(run.setup.initial(index)), local)
            block.load_state_dict({key: torch.from_numpy(value) for key, value in arrived.items()})
            num_bytes += sent
        scores = run.evaluate()
        euler = None if scores.euler is None else scores.euler.ce
        uploads.append(
            {
                "form": form,
                "consensus": scores.consensus.ce,
                "euler": euler,
                "workers_bytes": num_bytes,
                "operator_bytes": 0,
                "participation": None,
            }
        )
    seconds = time.monotonic() - started
    return {"row": name, "consensus": uploads[0]["consensus"], "uploads": uploads, "seconds": seconds}


def arrays_of(block: torch.nn.Module) -> dict[str, NDArray[np.float32]]:
    return {key: np.array(value.detach().cpu(), np.float32) for key, value in block.state_dict().items()}


def uploaded(form: str, base: Tensors, local: Tensors) -> tuple[int, dict[str, NDArray[np.float32]]]:
    """Bytes of a block's only upload, and the weights that arrive. The receiver has `base`, from the seed."""
    if form == "bf16":
        halves = {key: torch.from_numpy(np.array(value)).bfloat16() for key, value in local.items()}
        sizes = (half.numel() * half.element_size() for half in halves.values())
        return sum(sizes), {key: half.float().numpy() for key, half in halves.items()}
    codec, schema = CodecSpec.parse(form), Schema.of(base)
    sent = encode_update(codec, schema, base=base, origin=base, local=local, feedback=None, beta=0.0)
    return len(sent.payload), difference(base, decoded_delta(codec, schema, sent.payload, base))


def _traffic(row: dict[str, Any]) -> str:
    return f"{row['workers_bytes'] / 1e6:,.2f} MB | {row['operator_bytes'] / 1e6:,.2f} MB"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


# --- all tables

TABLES: dict[str, Callable[[Options], Table]] = {
    "T1": noise_ranges,
    "T2": progression,
    "T3": cuts,
    "T4": asynchrony,
    "T5": asynchrony,
    "T6": six_workers,
    "T7": over_http,
}


def _write(
    options: Options, name: str, numbers: dict[str, Any] | list[Any], settings: Sequence[str] = ()
) -> None:
    seeds = options.seeds if options.table in NETWORKS_OF else ()
    if isinstance(numbers, list):
        numbers = {"settings": _told(settings), "rows": numbers}
    write_report(options.out / f"{options.table}-{name}.json", options.table.lower(), numbers, seeds)


def _told(settings: Sequence[str]) -> list[str]:
    """Without the folders of this machine."""
    parts = (setting.partition("=") for setting in settings)
    return [f"{key}={Path(value).name if value.startswith('/') else value}" for key, _, value in parts]


def _rows_before(options: Options, name: str, settings: Sequence[str]) -> list[Any]:
    """What an earlier call of the same code and settings left; none where it was another."""
    path = options.out / f"{options.table}-{name}.json"
    report = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if report.get("settings") != _told(settings):
        return []
    return list(report["rows"]) if report["provenance"]["commit"] == source_commit() else []


def _fresh(folder: Path) -> Path:
    """A folder of an earlier run of this table is replaced."""
    shutil.rmtree(folder, ignore_errors=True)
    return folder


def parse(arguments: Sequence[str]) -> Options:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", required=True, choices=TABLES)
    parser.add_argument("--device", default="cpu", help="cpu, cuda or auto; all workers share it")
    parser.add_argument("--corpus", help="file or folder with the text; default: the recipe's")
    parser.add_argument("--codecs", default="sparse:64,sign,dense", help="T7: which runs to make")
    parser.add_argument("--seeds", default="0,1", help="T4, T5: runs to average over")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--quick", action="store_true", help="a tiny shape, under a minute")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--out", type=Path, help="folder for checkpoints, logs and numbers")
    found = parser.parse_args(arguments)
    out = (found.out or Path("runs") / f"litepaper-{found.table}").absolute()
    return Options(
        table=found.table,
        device=found.device,
        corpus=found.corpus or ("builtin" if found.quick else None),
        codecs=tuple(found.codecs.split(",")),
        seeds=tuple(int(seed) for seed in found.seeds.split(",")),
        jobs=found.jobs,
        quick=found.quick,
        settings=tuple(found.set),
        out=out,
    )


def main() -> int:
    options = parse(sys.argv[1:])
    options.out.mkdir(parents=True, exist_ok=True)
    lines, claims = TABLES[options.table](options)
    made = provenance(options.table.lower())
    versions = ", ".join(f"{name} {version}" for name, version in made.versions.items())
    by = f"`{made.command}`; {made.hardware}; {versions}; commit {made.commit}; {made.date}."
    print("\n".join(["", *lines, "", by]))
    return 0 if options.quick else check_claims(claims)


if __name__ == "__main__":
    sys.exit(main())
