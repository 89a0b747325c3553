"""The attacks of docs/threat-model.md as real clients of a real coordinator process, and what became of them.

*Refused* attacks have one round of a warm run and must leave the next snapshot byte-identical to that of the
run without them. *Tolerated* ones last some rounds; after none of these may held-out loss exceed that
of the same honest workers alone, without judge and guard, by more than 0.02 nats; where attackers know the
held-out text, loss on text of the same kind that is in no run may not. The table has the rise at
the end, seed by seed, and the largest of all rounds. Memory is the peak of the coordinator's resident memory
above that of a run in which as many updates are all honest.

    python benchmarks/attacks.py [--quick] [--only 3,16] [--seeds 41,42,43] [--rounds 4] [--jobs 2]
    python benchmarks/attacks.py --long [--size demo] [--only 25] [--rounds 100] [--steps 20] [--json REPORT]
    python benchmarks/attacks.py --rules [--only 3,23] [--rounds 100] [--steps 20]

`--quick` takes one seed and fewer rounds. A report (`--json`) keeps its rows of other attacks, so that it can
be made in pieces; each row names its commit. `--long` runs six of the lasting attacks for a whole schedule,
at the suite's size or that of the demo's blocks, and compares loss on fresh text after every round; runs that
REPORT has are not made again. `--rules` runs the lasting attacks against rules of the literature instead of
judge and guard, and prints by how much each lets the loss rise at the end and at most; it adds to its report
too, and claims nothing. Exit code 1 if anything is not as it should be.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, fields, replace
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from typing import Any

from provenance import write_report

from blocktrain.training.source import source_commit

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.adversaries.attacks import REFUSED, Entry, everybody_works, nobody, play  # noqa: E402
from tests.adversaries.campaigns import (  # noqa: E402
    HONEST_ROUNDS,
    TOLERANCE,
    Behaviour,
    Ending,
    campaign,
    colludes,
    copying_campaign,
    drifts,
    flips_signs,
    hides,
    knows_all_the_judge_scores,
    knows_held_out_text,
    merged_by,
    plants_backdoor,
    pleases_the_judge,
    reverses_the_mean,
    sends_noise,
    stale_campaign,
    stays_within_the_spread,
    undefended,
    works_little,
)
from tests.adversaries.clusters import (  # noqa: E402
    Poison,
    PoisonedEnding,
    poisoned_campaign,
    poisons_its_own_cluster,
    poisons_the_other_cluster,
)
from tests.adversaries.refining import (  # noqa: E402
    ATTACKERS,
    RefinedEnding,
    refined_campaign,
    trained_parts,
)
from tests.adversaries.rules import RULES  # noqa: E402
from tests.adversaries.swarm import (  # noqa: E402
    PATIENT_SECONDS,
    Settings,
    Warm,
    fresh_text,
    training_of,
    warmed_up,
)

MAX_GROWTH_MB = 64.0
FRESH_SEEDS = (41, 42, 43)
"""Not looked at while thresholds were chosen, except for `validation.ruling.ONE_TEXT_LESS`: 44, 45 and 46 are
fresh for that one."""
STALE_NUMBER, STALE_ROUNDS = 8, 6
POISON_NUMBER, SERIAL_NUMBER = 22, 26
COPIED_ROUNDS = 5


@dataclass
class Row:
    number: int
    attack: str
    happened: str
    loss: str
    """Against the run without attackers."""
    seconds: float
    growth_mb: float
    passed: bool
    notes: dict[str, Any] = field(default_factory=dict)

    def line(self) -> str:
        mark = "" if self.passed else "  **not as it should be**"
        return (
            f"| {self.number} | {self.attack} | {self.happened}{mark} | {self.loss} | {self.seconds:.1f} | "
            f"{self.growth_mb:.0f} |"
        )


HEADING = "| # | attack | what happened | held-out loss | seconds | MB |\n|---|---|---|---|---|---|"


# --- refused ------------------------------------------------------------------------------------------------


def refused_row(warm: Warm, entry: Entry, folder: Path, usual_mb: float) -> Row:
    begun = time.monotonic()
    scene, head, peak = play(warm, entry.attack, folder)
    growth = peak - usual_mb
    identical = head == warm.next_hash
    return Row(
        entry.number,
        entry.name,
        "; ".join(scene.happened),
        "next snapshot identical" if identical else "another snapshot",
        time.monotonic() - begun,
        growth,
        identical and not scene.surprises and growth < MAX_GROWTH_MB,
        {**scene.notes, "surprises": scene.surprises},
    )


def refused_rows(folder: Path, wanted: Callable[[int], bool]) -> Iterator[Row]:
    entries = [entry for entry in REFUSED if wanted(entry.number)]
    if not entries:
        return
    warm = warmed_up(folder)
    _, head, _ = play(warm, nobody, folder / "nobody")
    assert head == warm.next_hash, "two unattacked runs differ"
    usual_mb = play(warm, everybody_works, folder / "everybody")[2]
    for entry in entries:
        yield refused_row(warm, entry, folder / f"attack-{entry.number}", usual_mb)


# --- tolerated ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lasting:
    number: int
    name: str
    honest: int
    attackers: int
    behaviour: Behaviour
    quick: bool = True
    """Whether it is also part of the quick suite."""
    fresh: bool = False
    """Whether the loss is that of text in no run, and the attackers' first rounds are honest."""
    private: bool = False
    """Whether the judge has text that nobody else has."""
    solved: bool = True
    """False where docs/threat-model.md says that the loss may rise: the row then prints by how much."""


LASTING = (
    Lasting(3, "sign flip, 1 of 8", 7, 1, flips_signs, quick=False),
    Lasting(3, "sign flip, 3 of 8", 5, 3, flips_signs),
    Lasting(4, "noise of the same norm, 3 of 8", 5, 3, sends_noise),
    Lasting(16, "colluding majority, 5 of 8, in turns", 3, 5, colludes),
    Lasting(16, "colluding majority, 5 of 8, hiding", 3, 5, hides, quick=False),
    Lasting(17, "backdoor inside the norm bound, 3 of 8", 5, 3, plants_backdoor),
    Lasting(21, "pleasing the judge by training text, 3 of 8", 5, 3, pleases_the_judge, False, True),
    Lasting(21, "held-out text known, 3 of 8", 5, 3, knows_held_out_text, True, True),
    Lasting(21, "all known that a judge scores", 5, 3, knows_all_the_judge_scores, False, True, False, False),
    Lasting(21, "the same beside private text", 5, 3, knows_all_the_judge_scores, False, True, True),
    Lasting(23, "within the honest spread, 3 of 8", 5, 3, stays_within_the_spread, quick=False),
    Lasting(24, "the honest mean reversed, 3 of 8", 5, 3, reverses_the_mean, quick=False),
    Lasting(25, "a slow drift, 3 of 8", 5, 3, drifts, quick=False),
)


@dataclass(frozen=True)
class Run:
    """A campaign that needs nothing from another."""

    seed: int
    one: Lasting
    attacked: bool
    defended: bool = True

    @property
    def folder(self) -> str:
        """The same for all attacks on the same honest workers, as long as nobody attacks."""
        who = f"{self.one.number}-{self.one.behaviour.__name__}-{self.one.attackers}" if self.attacked else ""
        private = self.one.private and self.defended
        return f"{self.seed}-{self.one.honest}-{self.defended}-{self.one.fresh}-{private}-{who}"


def play_campaign(run: Run, folder: Path, rounds: int) -> tuple[Ending, float]:
    """And the seconds that it took."""
    begun, one, patient = time.monotonic(), run.one, PATIENT_SECONDS
    private = one.private and run.defended
    settings = Settings(seed=run.seed, steps=20, deadline=patient, lease=patient, private=private)
    if not run.defended:
        settings = undefended(settings)
    crowd = [one.behaviour] * one.attackers if run.attacked else ()
    scored = fresh_text() if one.fresh else None
    ending = campaign(
        folder / run.folder, settings, one.honest, rounds + HONEST_ROUNDS * one.fresh, crowd, scored
    )
    return ending, time.monotonic() - begun


def play_stale(seed: int, folder: Path) -> tuple[Ending, Ending, Ending, str, float]:
    """Undefended, defended, attacked, and what became of an update that is five rounds old."""
    begun = time.monotonic()
    settings = Settings(seed=seed, steps=20, deadline=120.0, replicas=3, lease=1.5)
    folder = folder / f"stale-{seed}"
    folder.mkdir()
    alone, _ = stale_campaign(folder / "alone", undefended(settings), STALE_ROUNDS, attacked=False)
    usual, _ = stale_campaign(folder / "usual", settings, STALE_ROUNDS, attacked=False)
    found, reason = stale_campaign(folder / "attacked", settings, STALE_ROUNDS, attacked=True)
    return alone, usual, found, reason, time.monotonic() - begun


def play_poisoned(
    seed: int, folder: Path, rounds: int, poison: Poison
) -> tuple[float, PoisonedEnding, float]:
    """The rise on the cluster where it was largest, how it ended, and the seconds that it took."""
    begun = time.monotonic()
    here = folder / f"{poison.__name__}-{seed}"
    alone = poisoned_campaign(here / "alone", seed, rounds, 2, judge="off")
    found = poisoned_campaign(here / "attacked", seed, rounds, 2, poison)
    return found.worst_rise_over(alone), found, time.monotonic() - begun


def play_serial(
    seed: int, folder: Path, rounds: int
) -> tuple[RefinedEnding, RefinedEnding, RefinedEnding, float]:
    """Undefended and honest; the attackers undefended, and judged; and the seconds that it took."""
    begun, here = time.monotonic(), folder / f"serial-{seed}"
    here.mkdir()
    parts = trained_parts(here, seed)
    alone = refined_campaign(here / "alone", parts, seed, rounds, 2, judge="off")
    unjudged = refined_campaign(here / "unjudged", parts, seed, rounds, 2, ATTACKERS, judge="off")
    found = refined_campaign(here / "attacked", parts, seed, rounds, 2, ATTACKERS)
    return alone, unjudged, found, time.monotonic() - begun


class Campaigns:
    """Runs of several seeds, some at a time, with the unattacked ones made once."""

    def __init__(self, folder: Path, seeds: Sequence[int], rounds: int, pool: Executor) -> None:
        self.folder, self.seeds, self.rounds, self.pool = folder, seeds, rounds, pool
        self._begun: dict[str, Future[tuple[Ending, float]]] = {}

    def begin(self, run: Run) -> Future[tuple[Ending, float]]:
        if run.folder not in self._begun:
            self._begun[run.folder] = self.pool.submit(play_campaign, run, self.folder, self.rounds)
        return self._begun[run.folder]

    def row(self, one: Lasting) -> Callable[[], Row]:
        """Begins what the row needs; calling what it returns waits for that."""
        kinds = [(False, False), (False, True), (True, True)]
        begun = [[self.begin(Run(seed, one, *kind)) for seed in self.seeds] for kind in kinds]

        def wait() -> Row:
            done = [[future.result() for future in futures] for futures in begun]
            alone, usual, found = ([ending for ending, _ in runs] for runs in done)
            notes: dict[str, Any] = {
                "judging_share": max(ending.judging_share for ending in (*usual, *found)),
                "honest_rise": [judged.rise_over(plain) for judged, plain in zip(usual, alone, strict=True)],
                "honest_updates": one.honest * sum(len(ending.losses) for ending in found),
                "honest_refused": [sum(ending.honest_refused for ending in runs) for runs in (usual, found)],
            }
            if one.number == 17:
                notes |= self.residual(alone, found)
            seconds = sum(seconds for runs in done for _, seconds in runs)
            row = lasting_row(one.number, one.name, alone, usual, found, seconds, notes)
            if not one.solved:
                row.happened += "; **not solved**"
                row.passed = row.growth_mb < MAX_GROWTH_MB
            return row

        return wait

    def residual(self, alone: Sequence[Ending], found: Sequence[Ending]) -> dict[str, Any]:
        """Nats per byte of the planted phrase behind its trigger, without and with the attackers."""
        pairs = []
        for seed, clean, dirty in zip(self.seeds, alone, found, strict=True):
            training = training_of(Settings(seed=seed, steps=20), self.folder)
            pairs.append((clean.backdoor_loss(training), dirty.backdoor_loss(training)))
        return {"phrase_after_trigger": pairs}

    def stale_row(self) -> Callable[[], Row]:
        begun = [self.pool.submit(play_stale, seed, self.folder) for seed in self.seeds]

        def wait() -> Row:
            alone, usual, found, reasons, seconds = zip(*(future.result() for future in begun), strict=True)
            name = "stale base, 1 and 5 rounds"
            row = lasting_row(STALE_NUMBER, name, alone, usual, found, sum(seconds), {})
            row.happened = f"1 round: {row.happened}; 5 rounds: {', '.join(sorted(set(reasons)))}"
            row.passed = row.passed and set(reasons) == {"too_old"}
            return row

        return wait

    def poisoned_row(self, poison: Poison) -> Callable[[], Row]:
        """Two specialised blocks with two honest workers and an attacker each; the loss is that of the
        cluster where it rose most."""
        begun = [
            self.pool.submit(play_poisoned, seed, self.folder, self.rounds, poison) for seed in self.seeds
        ]

        def wait() -> Row:
            risen, found, seconds = zip(*(future.result() for future in begun), strict=True)
            verdicts = sum((ending.verdicts for ending in found), Counter[str]())
            honest = sum((ending.honest_refused for ending in found), Counter[str]())
            return Row(
                POISON_NUMBER,
                f"specialised blocks: {poison.__name__.replace('_', ' ')}, 1 of 3",
                ", ".join(f"{reason} {count}" for reason, count in verdicts.most_common()),
                f"at worst {max(risen):+.4f} on a cluster's text",
                sum(seconds),
                0.0,
                max(risen) <= TOLERANCE and "harmful" not in honest,
                {"risen": risen, "honest_refused": dict(honest)},
            )

        return wait

    def serial_row(self) -> Callable[[], Row]:
        """Two parts of a trained Llama with two honest workers and an attacker each."""
        begun = [self.pool.submit(play_serial, seed, self.folder, self.rounds) for seed in self.seeds]

        def wait() -> Row:
            alone, unjudged, found, seconds = zip(*(future.result() for future in begun), strict=True)
            risen, without = (
                [dirty.rise_over(clean) for dirty, clean in zip(endings, alone, strict=True)]
                for endings in (found, unjudged)
            )
            verdicts = sum((ending.verdicts for ending in found), Counter[str]())
            honest = sum((ending.honest_refused for ending in found), Counter[str]())
            told = ", ".join(f"{reason} {count}" for reason, count in verdicts.most_common())
            worst = max(map(max, risen))
            return Row(
                SERIAL_NUMBER,
                "a serial model: one reversed, one noise, 2 of 6",
                f"{told}; {sum(ending.merged for ending in found)} merged",
                f"{' '.join(f'{rises[-1]:+.4f}' for rises in risen)}; at worst {worst:+.4f}",
                sum(seconds),
                0.0,
                worst <= TOLERANCE,
                {"risen": risen, "risen_without_a_judge": without, "honest_refused": dict(honest)},
            )

        return wait


def lasting_row(
    number: int,
    name: str,
    alone: Sequence[Ending],
    usual: Sequence[Ending],
    found: Sequence[Ending],
    seconds: float,
    notes: dict[str, Any],
) -> Row:
    risen = [dirty.rise_over(clean) for clean, dirty in zip(alone, found, strict=True)]
    worst = max(map(max, risen))
    growth = max(dirty.growth_mb - clean.growth_mb for clean, dirty in zip(usual, found, strict=True))
    verdicts = sum((ending.verdicts for ending in found), Counter[str]())
    told = ", ".join(f"{reason} {count}" for reason, count in verdicts.most_common())
    return Row(
        number,
        name,
        f"{told}; {sum(ending.merged for ending in found)} merged",
        f"{' '.join(f'{one[-1]:+.4f}' for one in risen)}; at worst {worst:+.4f}",
        seconds,
        growth,
        worst <= TOLERANCE and growth < MAX_GROWTH_MB,
        {**notes, "risen": risen},
    )


def lasting_rows(runs: Campaigns, wanted: Callable[[int], bool], quick: bool) -> Iterator[Row]:
    waits = [runs.row(one) for one in LASTING if wanted(one.number) and (one.quick or not quick)]
    if wanted(STALE_NUMBER):
        waits.append(runs.stale_row())
    if wanted(POISON_NUMBER):
        waits += [
            runs.poisoned_row(poison) for poison in (poisons_its_own_cluster, poisons_the_other_cluster)
        ]
    if wanted(SERIAL_NUMBER):
        waits.append(runs.serial_row())
    for wait in waits:
        yield wait()


@dataclass(frozen=True)
class RuleRun:
    """One run in which a rule alone merges; with nobody but honest workers where `attack` is empty."""

    rule: str
    seed: int
    rounds: int
    steps: int
    honest: int
    attack: str = ""
    attackers: int = 0


def play_rule(run: RuleRun) -> dict[str, Any]:
    """In a process of its own; what is kept of it in a report."""
    behaviours = {one.behaviour.__name__: one.behaviour for one in LASTING}
    crowd = [behaviours[run.attack]] * run.attackers if run.attack else []
    with tempfile.TemporaryDirectory() as name:
        rounds = max(run.rounds, Settings.rounds)
        settings = Settings(seed=run.seed, steps=run.steps, rounds=rounds, batch=LONG_BATCH)
        training = training_of(settings, Path(name))
        losses = merged_by(RULES[run.rule], training, run.honest, run.rounds, crowd, run.seed)
    return {**asdict(run), "losses": losses, "commit": source_commit() or ""}


def rises_of(runs: Sequence[dict[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """By attack and rule, the worst seed: by how much the loss is higher than that of the honest workers'
    mean at the end, and at most after any round."""
    parts = [part.name for part in fields(RuleRun)]
    known = {RuleRun(**{part: kept[part] for part in parts}): kept["losses"] for kept in runs}
    named = {(one.behaviour.__name__, one.attackers): one.name for one in LASTING}
    found: dict[str, dict[str, dict[str, float]]] = {}
    for run, losses in known.items():
        alone = known.get(replace(run, rule="mean", attack="", attackers=0))
        if not run.attack or alone is None:
            continue
        risen = [mine - theirs for mine, theirs in zip(losses, alone, strict=True)]
        row = found.setdefault(named[run.attack, run.attackers], {})
        before = row.get(run.rule, {"last": -math.inf, "worst": -math.inf})
        row[run.rule] = {"last": max(before["last"], risen[-1]), "worst": max(before["worst"], *risen)}
    return found


def run_rules(
    options: argparse.Namespace, seeds: Sequence[int], rounds: int, chosen: Sequence[Lasting]
) -> int:
    steps, wanted = options.steps or 20, []
    for seed in seeds:
        for one in chosen:
            alone = RuleRun("mean", seed, rounds, steps, one.honest)
            attacked = replace(alone, attack=one.behaviour.__name__, attackers=one.attackers)
            wanted += [alone, *(replace(attacked, rule=rule) for rule in RULES)]
    kept = kept_runs(options.json)
    parts = [part.name for part in fields(RuleRun)]
    known = {RuleRun(**{part: one[part] for part in parts}) for one in kept}
    left = [run for run in dict.fromkeys(wanted) if run not in known]
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        for future in as_completed([pool.submit(play_rule, run) for run in left]):
            kept.append(future.result())
            told = {"rounds": rounds, "steps": steps, "runs": kept, "rises": rises_of(kept)}
            write_report(options.json, "rules", told, seeds)
    print(f"| attack, {rounds} rounds | {' | '.join(RULES)} |\n|---|{'---|' * len(RULES)}", flush=True)
    for name, row in rises_of(
        [one for one in kept if (one["rounds"], one["steps"]) == (rounds, steps)]
    ).items():
        shown = (
            f"{row[rule]['last']:+.4f} ({row[rule]['worst']:+.4f})" if rule in row else "" for rule in RULES
        )
        print(f"| {name} | {' | '.join(shown)} |", flush=True)
    return 0


# --- for a hundred rounds -----------------------------------------------------------------------------------


LONG_ROUNDS, LONG_STEPS = 100, 20
LONG = tuple(
    one
    for behaviour in (
        drifts,
        stays_within_the_spread,
        reverses_the_mean,
        plants_backdoor,
        knows_held_out_text,
        flips_signs,
    )
    for one in LASTING
    if one.behaviour is behaviour and one.attackers == 3
)
HONEST, ATTACKERS_OF_A_LONG_RUN = 3, 2
LONG_BATCH = 32
LONG_SHORTEST_SECONDS = 5.0
"""Of a round that may be tried again: its updates take a second where nothing else runs."""
SCORED_BYTES = 16_384
"""Of fresh text, after every round."""


@dataclass(frozen=True)
class LongRun:
    """One run of a whole schedule, with nobody but honest workers where `attack` is empty."""

    size: str
    seed: int
    rounds: int
    steps: int
    honest: int
    judged: bool = True
    attack: str = ""
    attackers: int = 0


def play_long(run: LongRun) -> dict[str, Any]:
    """In a process of its own; what is kept of it in a report."""
    begun, behaviours = time.monotonic(), {one.behaviour.__name__: one.behaviour for one in LONG}
    settings = Settings(
        seed=run.seed,
        steps=run.steps,
        batch=LONG_BATCH if run.size == "suite" else 16,
        deadline=PATIENT_SECONDS,
        lease=PATIENT_SECONDS,
        rounds=run.rounds,
        size=run.size,
        shortest=LONG_SHORTEST_SECONDS,
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ending = campaign(
            folder / "run",
            settings if run.judged else undefended(settings),
            run.honest,
            run.rounds,
            [behaviours[run.attack]] * run.attackers if run.attack else (),
            fresh_text()[:SCORED_BYTES],
        )
        phrase = ending.backdoor_loss(training_of(settings, folder))
    return {
        **asdict(run),
        "losses": ending.losses,
        "verdicts": dict(ending.verdicts),
        "merged": ending.merged,
        "bans": ending.bans,
        "honest_refused": ending.honest_refused,
        "honest_merged": ending.honest_merged,
        "phrase_after_trigger": phrase,
        "judging_share": ending.judging_share,
        "growth_mb": ending.growth_mb,
        "seconds": time.monotonic() - begun,
        "commit": source_commit() or "",
    }


def key_of(kept: dict[str, Any]) -> LongRun:
    return LongRun(**{part.name: kept[part.name] for part in fields(LongRun)})


def later_half(rises: Sequence[float]) -> float:
    """The mean over the later half of all rounds."""
    return mean(rises[len(rises) // 2 :])


def long_rows(runs: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """A row for each attack of which there are whole runs: by how much the loss on fresh text is higher than
    that of the same honest workers alone, who are neither judged nor guarded."""
    known = {key_of(one): one for one in runs}
    tables: dict[tuple[Lasting, LongRun], list[tuple[dict[str, Any], ...]]] = {}
    for run, found in known.items():
        honest = replace(run, attack="", attackers=0)
        alone, judged = known.get(replace(honest, judged=False)), known.get(honest)
        if run.attack and alone and judged:
            [one] = [one for one in LONG if one.behaviour.__name__ == run.attack]
            tables.setdefault((one, replace(run, seed=0)), []).append((alone, judged, found))
    for (one, run), seeds in tables.items():
        risen = [
            [mine - theirs for mine, theirs in zip(found["losses"], alone["losses"], strict=True)]
            for alone, _, found in seeds
        ]
        worst = max(map(max, risen))
        verdicts = sum((Counter(found["verdicts"]) for *_, found in seeds), Counter[str]())
        told = ", ".join(f"{reason} {count}" for reason, count in verdicts.most_common())
        growth = max(found["growth_mb"] - judged["growth_mb"] for _, judged, found in seeds)
        crowd = f"{run.attackers} of {run.honest + run.attackers}"
        yield {
            "number": one.number,
            "attack": f"{one.name.partition(', 3 of')[0]}, {crowd}",
            "size": run.size,
            "rounds": run.rounds,
            "steps": run.steps,
            "seeds": [found["seed"] for *_, found in seeds],
            "happened": f"{told}; {sum(found['merged'] for *_, found in seeds)} merged",
            "loss": f"{' '.join(f'{rises[-1]:+.4f}' for rises in risen)}; at worst {worst:+.4f}",
            "last": [rises[-1] for rises in risen],
            "worst": [max(rises) for rises in risen],
            # Single rounds of two runs differ by chance; half of all say more about harm that lasts.
            "late": [later_half(rises) for rises in risen],
            "honest_late": [
                later_half(
                    [mine - theirs for mine, theirs in zip(judged["losses"], alone["losses"], strict=True)]
                )
                for alone, judged, _ in seeds
            ],
            "worst_round": [rises.index(max(rises)) + 1 for rises in risen],
            "honest_rise": [judged["losses"][-1] - alone["losses"][-1] for alone, judged, _ in seeds],
            "honest_refused": [
                [judged["honest_refused"], found["honest_refused"]] for _, judged, found in seeds
            ],
            "honest_merged": [
                [judged["honest_merged"], found["honest_merged"]] for _, judged, found in seeds
            ],
            "phrase_after_trigger": [
                [alone["phrase_after_trigger"], found["phrase_after_trigger"]] for alone, _, found in seeds
            ],
            "growth_mb": growth,
            "seconds": sum(found["seconds"] for *_, found in seeds),
            "passed": worst <= TOLERANCE and growth < MAX_GROWTH_MB,
            "commits": sorted({part["commit"] for parts in seeds for part in parts}),
        }


def kept_runs(report: Path | None) -> list[dict[str, Any]]:
    if report is None or not report.exists():
        return []
    runs: list[dict[str, Any]] = json.loads(report.read_text(encoding="utf-8")).get("runs", [])
    return runs


def write_long(report: Path | None, kept: Sequence[dict[str, Any]]) -> None:
    seeds = sorted({one["seed"] for one in kept})
    write_report(report, "long attacks", {"runs": kept, "rows": list(long_rows(kept))}, seeds)


def run_long(options: argparse.Namespace, seeds: Sequence[int], chosen: Sequence[Lasting]) -> int:
    rounds, steps = options.rounds or LONG_ROUNDS, options.steps or LONG_STEPS
    wanted, attackers = [], ATTACKERS_OF_A_LONG_RUN
    for seed in seeds:
        alone = LongRun(options.size, seed, rounds, steps, HONEST)
        attacked = [replace(alone, attack=one.behaviour.__name__, attackers=attackers) for one in chosen]
        wanted += [*([] if options.attacked else (replace(alone, judged=False), alone)), *attacked]
    kept = kept_runs(options.json)
    known = {key_of(one) for one in kept}
    failed = False
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        playing = {pool.submit(play_long, run): run for run in wanted if run not in known}
        for future in as_completed(playing):
            if error := future.exception():
                # The other runs have taken an hour too.
                failed = True
                print(f"{playing[future]} failed: {error!r}", file=sys.stderr, flush=True)
                continue
            played = future.result()
            print(f"{key_of(played)}: {played['seconds']:.0f} s", file=sys.stderr, flush=True)
            # Read again: another call may have added its runs meanwhile.
            kept = [one for one in kept_runs(options.json) or kept if key_of(one) != key_of(played)] + [
                played
            ]
            write_long(options.json, kept)
    write_long(options.json, kept)
    print("| # | attack | what happened | fresh text | round of the worst | later half | honest refused |")
    print("|---|---|---|---|---|---|---|")
    rows = [
        row
        for row in long_rows(kept)
        if (row["size"], row["rounds"], row["steps"]) == (options.size, rounds, steps)
    ]
    for row in rows:
        mark = "" if row["passed"] else "  **not as it should be**"
        print(
            f"| {row['number']} | {row['attack']} | {row['happened']}{mark} | {row['loss']} | "
            f"{row['worst_round']} | {' '.join(f'{rise:+.4f}' for rise in row['late'])} | "
            f"{row['honest_refused']} |"
        )
    return int(failed or not all(row["passed"] for row in rows))


# --- what else the suite measures ---------------------------------------------------------------------------


def asides(folder: Path, seed: int) -> Iterator[tuple[str, bool]]:
    """Sentences below the table, and whether each is as it should be."""
    settings = Settings(seed=seed, steps=20, deadline=PATIENT_SECONDS, lease=PATIENT_SECONDS)
    verdicts, merged, rating = copying_campaign(folder / "copies", settings, COPIED_ROUNDS)
    told = ", ".join(f"{reason} {count}" for reason, count in verdicts.items())
    yield (
        f"copies of {verdicts.total()} updates: {told}; {merged} merged, best rating {rating:.2f}",
        merged == 0,
    )
    weak = campaign(folder / "weak", settings, 2, 6, [works_little])
    told = ", ".join(f"{reason} {count}" for reason, count in weak.verdicts.items())
    sentence = f"an honest worker with a tenth of the steps: {told}; reputation {weak.reputations[0]:.2f}"
    yield sentence, weak.reputations[0] > 0


def note_lines(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        if without := row.notes.get("risen_without_a_judge"):
            ends = ", ".join(f"{rises[-1]:+.4f}" for rises in without)
            yield f"{row.attack}: without a judge and a guard it ends {ends} higher"
        if seconds := row.notes.get("honest_join_seconds"):
            yield f"an honest worker among 1,000 identities joined in {seconds:.2f} s"
        if row.number == 14:
            yield f"an honest round beside 500 slow sockets took {row.notes['round_seconds']:.2f} s"
        if pairs := row.notes.get("phrase_after_trigger"):
            told = ", ".join(f"{clean:.2f} -> {dirty:.2f}" for clean, dirty in pairs)
            yield f"nats per byte of the planted phrase behind its trigger, without and with: {told}"
        if rises := row.notes.get("honest_rise"):
            least, most = min(map(min, rises)), max(map(max, rises))
            yield f"{row.attack}: judged and guarded, its honest workers alone: {least:+.4f} to {most:+.4f}"
            updates, (alone, beside) = row.notes["honest_updates"], row.notes["honest_refused"]
            refused = f"the judge refused {alone} of {updates} honest updates, {beside} beside the attackers"
            yield f"{row.attack}: {refused}"
    if shares := [row.notes["judging_share"] for row in rows if "judging_share" in row.notes]:
        yield f"judging and guarding cost at most {max(shares):.1%} of the compute they judged"


def write_rows(report: Path | None, rows: Sequence[Row], seeds: Sequence[int]) -> None:
    """Beside the rows of other attacks that the report has, each with the commit that made it."""
    told = {(row.number, row.attack): {**asdict(row), "commit": source_commit() or ""} for row in rows}
    if report is not None and report.exists():
        before = json.loads(report.read_text(encoding="utf-8"))
        made_by = before["provenance"]["commit"]
        known = {(one["number"], one["attack"]): {"commit": made_by, **one} for one in before["rows"]}
        told = {**known, **told}
        seeds = sorted({*before["provenance"]["seeds"], *seeds})
    write_report(report, "attacks", list(told.values()), seeds)


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="One seed, fewer rounds.")
    parser.add_argument(
        "--only", type=lambda text: set(map(int, text.split(","))), help="Numbers of attacks."
    )
    parser.add_argument("--seeds", type=lambda text: tuple(map(int, text.split(","))), default=FRESH_SEEDS)
    parser.add_argument("--rounds", type=int, help="Rounds of the attacks that last.")
    parser.add_argument("--jobs", type=int, default=1, help="Attacks that last, and rules: runs at a time.")
    parser.add_argument("--long", action="store_true", help="Six attacks for a whole schedule.")
    parser.add_argument(
        "--size", choices=("suite", "demo"), default="suite", help="With --long: of the block."
    )
    parser.add_argument(
        "--attacked", action="store_true", help="With --long: not the honest runs, which another call makes."
    )
    parser.add_argument("--steps", type=int, help="Steps of a round, with --long and --rules.")
    parser.add_argument("--rules", action="store_true", help="Rules of the literature instead of the judge.")
    parser.add_argument("--json", type=Path, help="Add everything to this report.")
    options = parser.parse_args(arguments)
    known = {entry.number for entry in (*REFUSED, *LASTING)} | {STALE_NUMBER, POISON_NUMBER, SERIAL_NUMBER}
    if unknown := sorted((options.only or set()) - known):
        parser.error(f"no attack has number {unknown}; there are {sorted(known)}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = options_of(arguments)
    seeds, rounds = (options.seeds[:1], 3) if options.quick else (options.seeds, 4)
    rounds = options.rounds or rounds

    def wanted(number: int) -> bool:
        return options.only is None or number in options.only

    if options.long:
        return run_long(options, options.seeds, [one for one in LONG if wanted(one.number)])
    if options.rules:
        chosen = [one for one in LASTING if wanted(one.number) and not one.fresh]
        return run_rules(options, seeds, rounds, chosen)
    begun, rows, failures = time.monotonic(), [], 0
    print(HEADING, flush=True)
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name, part) for part in ("refused", "lasting", "asides")]
        for folder in folders:
            folder.mkdir()
        for row in refused_rows(folders[0], wanted):
            print(row.line(), flush=True)
            rows.append(row)
        with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
            for row in lasting_rows(Campaigns(folders[1], seeds, rounds, pool), wanted, options.quick):
                print(row.line(), flush=True)
                rows.append(row)
        print()
        for line in note_lines(rows):
            print(f"- {line}")
        for sentence, passed in asides(folders[2], seeds[0]) if options.only is None else ():
            print(f"- {sentence}{'' if passed else '  **not as it should be**'}", flush=True)
            failures += not passed
    failures += sum(not row.passed for row in rows)
    print(f"- {len(rows)} rows, {failures} not as they should be, {time.monotonic() - begun:.0f} s in all")
    for row in rows:
        for surprise in row.notes.get("surprises", ()):
            print(f"  {row.number}: {surprise}")
    write_rows(options.json, rows, seeds)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
