"""Attackers that stay: with them the loss is what it is without them, and honest weakness is no crime."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from blocktrain.data.dataset import read_manifest
from tests.adversaries.campaigns import (
    HONEST_ROUNDS,
    TOLERANCE,
    Behaviour,
    Ending,
    campaign,
    colludes,
    copying_campaign,
    flips_signs,
    hides,
    knows_all_the_judge_scores,
    knows_held_out_text,
    plants_backdoor,
    pleases_the_judge,
    sends_noise,
    stale_campaign,
    undefended,
    works_little,
)
from tests.adversaries.clusters import (
    Poison,
    poisoned_campaign,
    poisons_its_own_cluster,
    poisons_the_other_cluster,
)
from tests.adversaries.refining import ATTACKERS, refined_campaign, trained_parts
from tests.adversaries.swarm import PATIENT_SECONDS, Settings, fresh_text, swarm, training_of

ROUNDS = 2
COLLUDING_ROUNDS = 3
"""They hide in the second and push in the third."""
SETTINGS = Settings(seed=11, steps=20, deadline=PATIENT_SECONDS, lease=PATIENT_SECONDS)
"""Rounds end when everybody has delivered; a slow machine changes nothing."""
SHORT = dataclasses.replace(SETTINGS, steps=12, batch=16)
"""A third of the work, and enough to see harm: without a judge sign flippers raise the loss by 0.62 and 1.00
here, colluders by 1.02 to 1.57."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("campaigns")


@pytest.fixture(scope="module")
def five_honest(folder: Path) -> Ending:
    return campaign(folder / "five", undefended(SHORT), 5, ROUNDS)


@pytest.fixture(scope="module")
def three_honest(folder: Path) -> Ending:
    return campaign(folder / "three", undefended(SHORT), 3, COLLUDING_ROUNDS)


@pytest.fixture(scope="module")
def backdoored(folder: Path) -> Ending:
    return campaign(folder / "backdoor", SHORT, 5, ROUNDS, [plants_backdoor] * 3)


def test_judging_and_guarding_cost_at_most_a_tenth_of_what_they_judge(backdoored: Ending) -> None:
    """Where nothing is refused early they cost most."""
    print(f"judging and guarding cost {backdoored.judging_share:.1%} of the compute they judged")
    assert 0 < backdoored.judging_share <= 0.1


@pytest.mark.slow  # a check of the method: what the other losses are held against
def test_without_a_judge_equal_runs_are_equal(folder: Path, three_honest: Ending) -> None:
    again = campaign(folder / "again", undefended(SHORT), 3, COLLUDING_ROUNDS)
    assert again.losses == pytest.approx(three_honest.losses, abs=TOLERANCE / 20), "but for the order of sums"


def test_three_sign_flippers_of_eight_do_not_raise_the_loss(folder: Path, five_honest: Ending) -> None:
    found = campaign(folder / "flips", SHORT, 5, ROUNDS, [flips_signs] * 3)
    assert found.merged == 0
    assert set(found.verdicts) == {"harmful"}
    assert max(found.rise_over(five_honest)) <= TOLERANCE


@pytest.mark.slow  # the verdicts alone: tests/trust/test_judged_updates.py
def test_noise_of_three_of_eight_does_not_raise_the_loss(folder: Path, five_honest: Ending) -> None:
    found = campaign(folder / "noise", SHORT, 5, ROUNDS, [sends_noise] * 3)
    assert max(found.rise_over(five_honest)) <= TOLERANCE


def test_five_colluders_of_eight_do_not_raise_the_loss(folder: Path, three_honest: Ending) -> None:
    found = campaign(folder / "colluders", SHORT, 3, COLLUDING_ROUNDS, [colludes] * 5)
    assert max(found.rise_over(three_honest)) <= TOLERANCE
    assert found.honest_refused == 0
    for scales in found.scales:
        assert sum(scale == 1.0 for scale in scales) * 2 >= len(scales), "clipped by who is not merged"


@pytest.mark.slow  # the decision alone: tests/validation/test_reputation_and_rulings.py
def test_five_who_hide_in_every_round_do_not_raise_the_loss(folder: Path) -> None:
    alone = campaign(folder / "three for long", undefended(SETTINGS), 3, 6)
    found = campaign(folder / "hidden", SETTINGS, 3, 6, [hides] * 5)
    assert max(found.rise_over(alone)) <= TOLERANCE
    assert found.honest_refused == 0


def test_a_backdoor_passes_and_shows_only_behind_its_trigger(
    folder: Path, five_honest: Ending, backdoored: Ending
) -> None:
    """Attack 17 is not solved: this holds what the threat model says of it."""
    training = training_of(SHORT, folder)
    assert max(backdoored.rise_over(five_honest)) <= TOLERANCE
    assert backdoored.merged > 0
    assert backdoored.backdoor_loss(training) < five_honest.backdoor_loss(training)


@pytest.mark.slow  # the verdicts alone: tests/coordinator/test_life_of_an_update.py
def test_stale_updates_count_less_or_not_at_all_and_do_not_raise_the_loss(folder: Path) -> None:
    settings = Settings(seed=11, steps=20, deadline=120.0, replicas=3, lease=1.5)
    alone, _ = stale_campaign(folder / "alone", undefended(settings), 6, attacked=False)
    found, reason = stale_campaign(folder / "stale", settings, 6, attacked=True)
    assert reason == "too_old"
    assert set(found.verdicts) <= {"carried", "no_gain", "harmful", "probation"}
    assert max(found.rise_over(alone)) <= TOLERANCE


@pytest.mark.slow  # the verdicts alone: test_attacks.py [6-copying], tests/validation/test_duplicates.py
def test_copying_earns_no_credit_within_twenty_verdicts(folder: Path) -> None:
    verdicts, merged, rating = copying_campaign(folder / "copies", SETTINGS, rounds=5)
    assert verdicts == {"duplicate": 20}
    assert merged == 0
    assert rating < 0.5


def test_an_honest_worker_with_a_tenth_of_the_steps_keeps_a_positive_reputation(folder: Path) -> None:
    found = campaign(folder / "weak", SHORT, 2, 4, [works_little])
    assert found.reputations[0] > 0
    assert found.bans == 0


# --- attackers who want the held-out text ---------------------------------------------------------------


def harm_to_fresh_text(folder: Path, behaviour: Behaviour, *, private: bool) -> tuple[float, ...]:
    """Two of five, established, with the default settings: the rise over honest workers alone."""
    rounds = HONEST_ROUNDS + 2
    alone = campaign(folder / "alone", undefended(SETTINGS), 3, rounds, scored=fresh_text())
    settings = dataclasses.replace(SETTINGS, private=private)
    found = campaign(folder / "please", settings, 3, rounds, [behaviour] * 2, fresh_text())
    print(f"rise on fresh text {found.rise_over(alone)}, merged {found.merged}, {dict(found.verdicts)}")
    return found.rise_over(alone)


@pytest.mark.slow  # the ruling that holds them back: tests/validation/test_reputation_and_rulings.py
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("behaviour", "private"),
    [(knows_held_out_text, False), (pleases_the_judge, False), (knows_all_the_judge_scores, True)],
)
def test_workers_who_please_the_judge_do_no_harm_to_fresh_text(
    tmp_path: Path, behaviour: Behaviour, private: bool
) -> None:
    assert max(harm_to_fresh_text(tmp_path, behaviour, private=private)) <= TOLERANCE


def test_a_worker_can_fetch_the_training_text_and_nothing_of_the_judge_s(folder: Path) -> None:
    settings = dataclasses.replace(SETTINGS, private=True)
    with swarm(folder / "fetch", settings, training_of(settings, folder)) as running:
        client = running.client()
        assert client.run.recipe["trust"]["private_text"] == f"{folder}/fetch/private.txt", (
            "the path is known"
        )
        manifest = read_manifest(client.get(f"/v1/data/{client.run.dataset}").content)
        assert client.get(f"/v1/data/{manifest.training[0].sha256}").content == running.training.corpus.train
        for entry in (*manifest.held_out, *manifest.pooling):
            for path in (f"/v1/data/{entry.sha256}", f"/v1/judge/data/{entry.sha256}"):
                answer = client.send("GET", path)
                assert (answer.status_code, answer.json()["error"]["reason"]) == (403, "not_judge")


@pytest.mark.slow  # the judge's ruling on such updates: tests/validation/test_specialists.py
@pytest.mark.parametrize("poison", [poisons_its_own_cluster, poisons_the_other_cluster])
def test_who_poisons_one_cluster_of_a_specialised_run_raises_no_loss(tmp_path: Path, poison: Poison) -> None:
    alone = poisoned_campaign(tmp_path / "alone", 1, ROUNDS, 2, judge="off")
    found = poisoned_campaign(tmp_path / "attacked", 1, ROUNDS, 2, poison)
    assert found.worst_rise_over(alone) <= TOLERANCE
    assert found.verdicts["harmful"] > 0
    # At home nothing passes; elsewhere little does, and the block has little say there.
    assert poison is poisons_the_other_cluster or set(found.verdicts) == {"harmful"}
    assert "harmful" not in found.honest_refused


# --- a trained model in serial parts ---------------------------------------------------------------------


def test_who_reverses_or_blurs_a_part_of_a_trained_model_does_it_little_harm(tmp_path: Path) -> None:
    parts = trained_parts(tmp_path, 11, steps=60)
    alone = refined_campaign(tmp_path / "alone", parts, 11, ROUNDS, 1, judge="off")
    harmed = refined_campaign(tmp_path / "unjudged", parts, 11, ROUNDS, 1, ATTACKERS, judge="off")
    found = refined_campaign(tmp_path / "judged", parts, 11, ROUNDS, 1, ATTACKERS)
    print(f"rise {found.rise_over(alone)}, without a judge {harmed.rise_over(alone)}, {found.verdicts}")
    assert alone.losses[-1] < alone.losses[0]
    assert harmed.rise_over(alone)[-1] > TOLERANCE, "they do harm where nobody looks"
    # Noise counts now and then (attack 26 in docs/experiments.md): 0.028 with both rounds of it, and 0.071
    # without a judge.
    most = harmed.rise_over(alone)[-1] / 2 if found.merged else TOLERANCE
    assert max(found.rise_over(alone)) <= most
    assert found.verdicts["harmful"] >= ROUNDS, "all that was reversed"
    assert not found.honest_refused
