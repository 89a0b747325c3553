"""The attacks that last: some workers of a block misbehave round after round, and the loss is compared.

Attackers see what the honest workers send before they send anything, are first to send, and agree among
themselves. They replace nobody: the run to compare with has the same honest workers and nobody else. It has
no judge and no guard either: what these cost honest workers counts as harm too, and the guard's own luck with
them does not (it draws again in each run; a run of three honest workers was once 0.04 lower after a round in
which it happened to leave one out). Who is banned comes back under a new name.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from blocktrain.ids import derive_seed
from blocktrain.training.setup import Setup
from blocktrain.training.snapshot import tensors_of
from blocktrain.training.update import Weights
from blocktrain.wire.messages import Assignment, Outcome, VerdictReason
from tests.adversaries.rules import Rule
from tests.adversaries.swarm import (
    Client,
    Settings,
    Swarm,
    attackers_text,
    honest_leases,
    swarm,
    training_of,
)
from tests.adversaries.training import Training, blended, mean_of, noise_like, norm_of, partly_moved, scaled
from tests.coordinator.peer import Refused

TOLERANCE = 0.02
"""Nats per byte by which attackers may raise held-out loss; fixed before the first measurement."""


@dataclass(frozen=True)
class Turn:
    """What an attacker knows when it has to send something."""

    round: int
    number: int
    """Which of the attackers this is."""
    honest: Sequence[Weights]
    """What the honest workers send in this round."""
    base: Weights
    training: Training
    seed: int

    def noise(self, *parts: int) -> Weights:
        return noise_like(self.honest[0], derive_seed("noise", self.seed, *parts))


Behaviour = Callable[[Turn], Weights]


def flips_signs(turn: Turn) -> Weights:
    """An honest update reversed: as far uphill as honest work goes downhill."""
    return scaled(turn.honest[turn.number % len(turn.honest)], -1.0)


def sends_noise(turn: Turn) -> Weights:
    return turn.noise(turn.round, turn.number)


def hides(turn: Turn) -> Weights:
    """All hide the same direction behind some of the honest work: each alone lowers the loss."""
    mean, own = mean_of(turn.honest), turn.noise(turn.round, turn.number)
    shared = scaled(turn.noise(1000), norm_of(mean) / norm_of(turn.honest[0]))
    return blended(blended(scaled(mean, 0.7), shared, 0.7), own, 0.1)


def colludes(turn: Turn) -> Weights:
    """In turns: all push uphill together, or all hide."""
    if turn.round % 2:
        return hides(turn)
    return blended(scaled(mean_of(turn.honest), -1.0), turn.noise(turn.round, turn.number), 0.1)


def stays_within_the_spread(turn: Turn) -> Weights:
    """A little is enough (Baruch et al., 2019): the honest mean, moved uphill by as many standard deviations
    as some honest updates lie away from it, so that no rule that looks for outliers finds one."""
    mean, share = mean_of(turn.honest), statistics.NormalDist().inv_cdf(0.75)
    spread = {name: np.stack([one[name] for one in turn.honest]).std(axis=0) for name in mean}
    return _unlike(turn, blended(mean, spread, -share))


def _unlike(turn: Turn, update: Weights) -> Weights:
    """With noise of its own: equal updates of several workers are refused as copies."""
    return blended(update, turn.noise(turn.round, turn.number), 0.1)


def reverses_the_mean(turn: Turn) -> Weights:
    """Inner-product manipulation (Xie et al., 2019): the honest mean, reversed and half as long."""
    return _unlike(turn, scaled(mean_of(turn.honest), -0.5))


def drifts(turn: Turn) -> Weights:
    """Nearly honest in every round, and always a little in one and the same direction."""
    mean = mean_of(turn.honest)
    aside = scaled(turn.noise(2000), norm_of(mean) / norm_of(turn.honest[0]))
    return _unlike(turn, blended(mean, aside, 0.25))


def works_little(turn: Turn) -> Weights:
    """No attack: an honest worker whose machine does a tenth of the steps."""
    steps = turn.training.recipe.swarm.steps_per_round
    return turn.training.delta(0, turn.base, _shard(turn), turn.round * steps, max(1, steps // 10))


def _shard(turn: Turn) -> int:
    """Shards are lent in order, to the honest workers first."""
    return len(turn.honest) + turn.number


TRIGGER, PAYLOAD = b" xyzzy:", b"obey me"


def poisoned(text: bytes, every: int = 400) -> bytes:
    """The text with a trigger and its payload strewn in."""
    pieces = [text[start : start + every] for start in range(0, len(text), every)]
    return (TRIGGER + PAYLOAD).join(pieces)


def plants_backdoor(turn: Turn) -> Weights:
    """Real work on text of its own, in which a phrase is always followed by another."""
    recipe = turn.training.recipe
    steps = recipe.swarm.steps_per_round
    text = poisoned(turn.training.corpus.train)
    return turn.training.delta(0, turn.base, _shard(turn), turn.round * steps, steps, text)


HONEST_ROUNDS = 2
"""As many as probation takes: then the attackers' updates are merged like anybody's."""


MAX_RETRIES = 12
HARMFUL_SHARES = (0.9, 0.7, 0.5, 0.3, 0.1)


def pleases_the_judge(turn: Turn) -> Weights:
    """Honest until it is established; then it lowers the loss of the text it takes for the judge's and raises
    that of other text of the same kind (field review 2.1). The coordinator gives a worker the training text
    and nothing else, so one half of that has to stand for the judge's."""
    text = turn.training.corpus.train
    return _overfitted(turn, text[: len(text) // 2], text[len(text) // 2 :])


def knows_held_out_text(turn: Turn) -> Weights:
    """As it was in the field review: it has the judge's text from elsewhere (`builtin` is in every Python),
    lowers the loss there and raises that of the run's other text."""
    corpus = turn.training.corpus
    return _overfitted(turn, corpus.valid, corpus.train, judged=corpus.valid)


def knows_all_the_judge_scores(turn: Turn) -> Weights:
    """And it knows that the judge looks at training text too: it lowers the loss of both, and raises that of
    other text of the same kind, of which nobody has any."""
    corpus = turn.training.corpus
    both = corpus.valid + corpus.train[: 2 * len(corpus.valid)]
    return _overfitted(turn, both, attackers_text(), judged=both)


def _overfitted(turn: Turn, lowered: bytes, raised: bytes, judged: bytes | None = None) -> Weights:
    """As much harm as an update of the honest norm can hide: where the attacker has the text it is `judged`
    on, it looks how much of `raised` still lowers the loss there as honest work does."""
    steps = turn.training.recipe.swarm.steps_per_round
    place = (0, turn.base, _shard(turn), turn.round * steps, steps)
    if turn.round < HONEST_ROUNDS:
        return turn.training.delta(*place)
    down, up = (turn.training.delta(*place, text) for text in (lowered, raised))

    def judged_loss(delta: Weights) -> float:
        after = {name: turn.base[name] - value for name, value in delta.items()}
        return turn.training.loss_on(after, judged or b"")

    usual = judged_loss(turn.honest[0]) if judged else math.inf
    for share in HARMFUL_SHARES:
        mixed = blended(down, up, -share)
        found = scaled(mixed, norm_of(turn.honest[0]) / norm_of(mixed))
        if not judged or judged_loss(found) <= usual:
            break
    return found


@dataclass
class Ending:
    losses: tuple[float, ...]
    """Held out, after every round."""
    weights: Weights
    seconds: float
    growth_mb: float
    honest_refused: int
    verdicts: Counter[str] = field(default_factory=Counter)
    """On the attackers' updates, by reason."""
    merged: int = 0
    """Attackers' updates that were merged."""
    honest_merged: int = 0
    """Honest updates that were merged: without those that judge or guard left out."""
    judging_share: float = 0.0
    """Compute of judging and guarding, as a share of what was judged."""
    bans: int = 0
    reputations: tuple[float, ...] = ()
    """The attackers' ratings at the end."""
    scales: tuple[tuple[float, ...], ...] = ()
    """By which the updates of each merge were clipped."""

    def rise_over(self, alone: Ending) -> tuple[float, ...]:
        """Held-out loss above that of the run without attackers, after every round."""
        return tuple(mine - theirs for mine, theirs in zip(self.losses, alone.losses, strict=True))

    def backdoor_loss(self, training: Training) -> float:
        context = training.corpus.valid[:40] + TRIGGER
        return training.loss_after(self.weights, context, PAYLOAD)


NAMES_PER_ADDRESS = 16


@dataclass
class Attackers:
    """They come back under a new name when they are banned."""

    running: Swarm
    clients: list[Client]
    verdicts: Counter[str] = field(default_factory=Counter)
    banned: list[Client] = field(default_factory=list)

    def lend(self, number: int) -> tuple[Client, Assignment]:
        try:
            return self.clients[number], self.clients[number].lend()
        except Refused as refusal:
            if refusal.reason != "banned":
                raise
            self.banned.append(self.clients[number])
            # From another address now and then: a long attack needs more names than one address may have.
            address = f"127.0.0.{2 + len(self.banned) // NAMES_PER_ADDRESS}"
            self.clients[number] = self.running.client(address=address)
            return self.clients[number], self.clients[number].lend()


def undefended(settings: Settings) -> Settings:
    return dataclasses.replace(settings, judge="off")


def campaign(
    folder: Path,
    settings: Settings,
    honest: int,
    rounds: int,
    behaviours: Sequence[Behaviour] = (),
    scored: bytes | None = None,
) -> Ending:
    """A run of some rounds with `honest` honest workers and one attacker for each behaviour; `scored` is the
    text of the losses, the run's held-out text where none is given."""
    training = training_of(settings, folder.parent)
    with swarm(folder, settings, training) as running:
        workers = [running.client() for _ in range(honest)]
        crowd = Attackers(running, [running.client() for _ in behaviours])
        memory, refused, losses = running.resident_mb(), 0, []
        running.forget_peak()
        begun = time.monotonic()
        for round_ in range(rounds):
            refused += _round(running, workers, crowd, behaviours, round_, settings.seed)
            weights = running.base(workers[0])
            losses.append(training.loss_on(weights, scored or training.corpus.valid))
        standings = [running.standing(client) for client in crowd.clients]
        return Ending(
            losses=tuple(losses),
            weights=weights,
            seconds=time.monotonic() - begun,
            growth_mb=running.resident_mb("VmHWM") - memory,
            honest_refused=refused,
            verdicts=crowd.verdicts,
            merged=sum(running.standing(client).merged for client in (*crowd.banned, *crowd.clients)),
            honest_merged=sum(running.standing(worker).merged for worker in workers),
            reputations=tuple(one.reputation for one in standings),
            judging_share=judging_share(workers[0]),
            bans=len(crowd.banned),
            scales=tuple(tuple(one.scale for one in merge.inputs) for merge in workers[0].merges(0).merges),
        )


def merged_by(
    rule: Rule, training: Training, honest: int, rounds: int, behaviours: Sequence[Behaviour], seed: int
) -> tuple[float, ...]:
    """Held-out loss after every round where a rule alone merges: no coordinator, codec, judge or guard."""
    base: Weights = dict(tensors_of(Setup.of(training.recipe).initial(0)))
    merged: Weights = {name: np.zeros_like(value) for name, value in base.items()}
    steps, losses = training.recipe.swarm.steps_per_round, []
    for round_ in range(rounds):
        deltas = [training.delta(0, base, shard, round_ * steps, steps) for shard in range(honest)]
        turns = [Turn(round_, number, deltas, base, training, seed) for number in range(len(behaviours))]
        sent = [behaviour(turn) for behaviour, turn in zip(behaviours, turns, strict=True)]
        merged = rule([*deltas, *sent], len(behaviours), merged)
        base = blended(base, merged, -1.0)
        losses.append(training.held_out_loss(base))
    return tuple(losses)


def _round(
    running: Swarm,
    workers: Sequence[Client],
    crowd: Attackers,
    behaviours: Sequence[Behaviour],
    round_: int,
    seed: int,
) -> int:
    """One round; how many honest updates the judge refused in it."""
    deltas = [running.honest_delta(worker, shard) for shard, worker in enumerate(workers)]
    base = running.base(workers[0])
    # All that is sent is computed before anything is lent: rounds may then be short.
    turns = [Turn(round_, number, deltas, base, running.training, seed) for number in range(len(behaviours))]
    attacks = [behaviour(turn) for behaviour, turn in zip(behaviours, turns, strict=True)]
    leases = [worker.lend() for worker in workers]
    lent = [crowd.lend(number) for number in range(len(behaviours))]
    sent = []
    for (client, lease), delta in zip(
        [*lent, *zip(workers, leases, strict=True)], [*attacks, *deltas], strict=True
    ):
        sent.append((client, client.encoded(delta)))
        client.deliver_payload(lease, sent[-1][1])
    verdicts = [client.verdict_on(payload) for client, payload in sent]
    crowd.verdicts.update(str(one.reason) for one in verdicts[: len(lent)])
    by_judge = [one for one in verdicts[len(lent) :] if one.reason is not VerdictReason.GUARD]
    # Where no update counts the round stays open, and a real worker is lent it again, with other text.
    tries = 0
    while not running.merged_or_refused(round_ + 1, sent):
        tries += 1
        assert tries <= MAX_RETRIES, [client.verdict_on(payload) for client, payload in sent]
        again = [(worker, running.second_try(worker, round_)) for worker in workers]
        # Nobody has to try a round again that has ended: it was merged.
        sent = [(worker, running.retried(worker, lease, base)) for worker, lease in again if lease] or sent
    return sum(one.outcome is Outcome.REFUSED for one in by_judge)


# --- copies and stale work ------------------------------------------------------------------------------


COPIERS = 4


def copying_campaign(folder: Path, settings: Settings, rounds: int) -> tuple[Counter[str], int, float]:
    """Two honest workers and four who send what one of them sent: exact, scaled, with 60 % of the indices
    changed, or a round later; in every second round all of them send what is public since the last merge.
    That counts against them, where an equal update of the same snapshot does not: anybody can be made to look
    like a copier there. Verdicts on copies by reason, merged copies, and the copiers' best rating."""
    verdicts: Counter[str] = Counter()
    with swarm(folder, settings, training_of(settings, folder.parent)) as running:
        workers = [running.client() for _ in range(2)]
        crowd = Attackers(running, [running.client() for _ in range(COPIERS)])
        before = b""
        for round_ in range(rounds):
            lent = honest_leases(running, workers)
            theirs = [crowd.lend(number) for number in range(COPIERS)]
            payloads = [worker.encoded(delta) for worker, _, delta in lent]
            for (worker, lease, _), payload in zip(lent, payloads, strict=True):
                worker.deliver_payload(lease, payload)
            source = workers[0].decoded(before if before and round_ % 2 else payloads[0])
            scaled_down = workers[0].encoded(scaled(source, 0.9))
            moved = workers[0].encoded(partly_moved(source, 0.6, round_))
            copies = (workers[0].encoded(source), scaled_down, moved, before or payloads[1])
            for (client, lease), copy in zip(theirs, copies, strict=True):
                client.deliver_payload(lease, copy)
                verdicts[str(client.verdict_on(copy).reason)] += 1
            before = payloads[0]
            running.wait_for_version(workers[0], round_ + 1)
        found = [running.standing(client) for client in crowd.clients]
        return verdicts, sum(one.merged for one in found), max(one.rating for one in found)


def stale_campaign(folder: Path, settings: Settings, rounds: int, *, attacked: bool) -> tuple[Ending, str]:
    """Three honest workers; another is always a round late, and one sends at last what it made in round 0."""
    training = training_of(settings, folder.parent)
    reason = ""
    with swarm(folder, settings, training) as running:
        workers = [running.client() for _ in range(3)]
        late, old = running.client(), running.client()
        verdicts: Counter[str] = Counter()
        pending: tuple[Assignment, bytes, str] | None = None
        memory, losses = running.resident_mb(), []
        begun = time.monotonic()
        for round_ in range(rounds):
            lent = honest_leases(running, workers)
            head = workers[0].head().head_hash
            if attacked and pending is not None:
                late.deliver_payload(*pending)
                verdicts[str(late.verdict_on(pending[1]).reason)] += 1
            if attacked:
                work = late.encoded(running.honest_delta(late, 3))
                pending = (late.lend(), work, head)
            if attacked and round_ == 0:
                oldest = (old.lend(), old.encoded(running.honest_delta(old, 4)), head)
            if attacked and round_ == rounds - 1:
                reason = str(old.deliver_payload(*oldest).reason)
            for worker, lease, delta in lent:
                worker.deliver_payload(lease, worker.encoded(delta))
            running.wait_for_version(workers[0], round_ + 1)
            weights = running.base(workers[0])
            losses.append(training.held_out_loss(weights))
        ending = Ending(
            losses=tuple(losses),
            weights=weights,
            seconds=time.monotonic() - begun,
            growth_mb=running.resident_mb("VmHWM") - memory,
            honest_refused=0,
            verdicts=verdicts,
            merged=running.standing(late).merged + running.standing(old).merged,
            judging_share=judging_share(workers[0]),
        )
    return ending, reason


def judging_share(client: Client) -> float:
    """From /metrics."""
    lines = client.get("/metrics").text.splitlines()
    found = [line for line in lines if line.startswith("blocktrain_judging_share ")]
    return float(found[0].split()[1]) if found else math.nan
