"""Who gets in: stamps, invitations, lists; and how many from one place."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from blocktrain.coordinator.admission import listed_ids, network_of
from blocktrain.wire.identity import Identity, load_or_create
from blocktrain.wire.messages import BanRequest
from blocktrain.wire.tokens import (
    challenge,
    find_stamp,
    is_challenge,
    is_stamp,
    make_invite,
    read_invite,
    secret_of,
)
from tests.coordinator.conftest import Running
from tests.coordinator.peer import Refused
from tests.trust.kit import judged, judged_recipe, operator, stranger

NOW = 1_800_000_000.0
SECRET = bytes(range(32))


def test_a_stamp_is_for_one_worker_one_run_and_two_hours() -> None:
    asked = challenge(SECRET, "run", "worker", NOW)
    assert is_challenge(SECRET, "run", "worker", asked, NOW + 3599)
    assert not is_challenge(SECRET, "run", "worker", asked, NOW + 7300)
    assert not is_challenge(SECRET, "run", "other", asked, NOW)
    assert not is_challenge(SECRET, "other", "worker", asked, NOW)
    stamp = find_stamp(asked, 10)
    assert is_stamp(asked, stamp, 10)
    assert not all(is_stamp(challenge(SECRET, "run", str(n), NOW), stamp, 10) for n in range(3))


def test_checking_a_stamp_takes_microseconds() -> None:
    asked = challenge(SECRET, "run", "worker", NOW)
    begun = time.thread_time()
    for _ in range(1000):
        is_challenge(SECRET, "run", "worker", asked, NOW) and is_stamp(asked, "00" * 8, 20)
    assert time.thread_time() - begun < 0.5


def test_secrets_follow_from_the_key_and_the_purpose() -> None:
    identity = Identity.generate()
    assert secret_of(identity, "a") == secret_of(identity, "a") != secret_of(identity, "b")
    assert secret_of(identity, "a") != secret_of(Identity.generate(), "a")


def test_invitations_are_the_coordinator_s_and_end() -> None:
    identity = Identity.generate()
    token = make_invite(identity, NOW + 10)
    assert read_invite(identity.public_key, token, NOW) is not None
    assert read_invite(identity.public_key, token, NOW + 11) is None
    assert read_invite(Identity.generate().public_key, token, NOW) is None
    for damaged in ("", ".", "a.b", token[:-3], token + "A" * 600, token.replace(".", ""), "é.é"):
        assert read_invite(identity.public_key, damaged, NOW) is None


def test_networks_are_counted_by_address_or_by_ipv6_64() -> None:
    assert network_of("10.0.0.1", SECRET) != network_of("10.0.0.2", SECRET)
    assert network_of("::ffff:10.0.0.1", SECRET) == network_of("10.0.0.1", SECRET)
    assert network_of("2001:db8::1", SECRET) == network_of("2001:db8::2%eth0", SECRET)
    assert network_of("2001:db8::1", SECRET) != network_of("2001:db8:0:1::1", SECRET)
    assert network_of("not an address", SECRET)


def refusal(running: Running, **join: object) -> str:
    peer = stranger(running)
    with pytest.raises(Refused) as found:
        peer.join(**join)
    return str(found.value.reason)


def test_an_open_run_asks_for_a_stamp_once(tmp_path: Path) -> None:
    with judged(tmp_path, judged_recipe(stamp_bits=8, judge="off")) as running:
        assert refusal(running) == "stamp_required"
        peer = stranger(running)
        asked = peer.get(f"/v1/challenge/{peer.identity.worker_id}").json()
        assert asked["bits"] == 8
        stamp = find_stamp(asked["challenge"], asked["bits"])
        assert refusal(running, challenge=asked["challenge"], stamp=stamp) == "stamp_required"
        first = peer.join(challenge=asked["challenge"], stamp=stamp)
        assert peer.join() == first


def test_an_invitation_is_used_once(tmp_path: Path) -> None:
    with judged(tmp_path, judged_recipe(admission="invite", judge="off")) as running:
        token = make_invite(load_or_create(tmp_path / "coordinator.key"), running.clock() + 60)
        assert refusal(running) == "invite_required"
        assert (
            refusal(running, invite=make_invite(Identity.generate(), running.clock() + 60))
            == "invite_required"
        )
        stranger(running).join(invite=token)
        assert refusal(running, invite=token) == "invite_required"


def test_a_list_lets_in_only_who_is_on_it(tmp_path: Path) -> None:
    with judged(tmp_path, judged_recipe(admission="allowlist", judge="off")) as running:
        assert refusal(running) == "not_listed"
        friend = stranger(running)
        (tmp_path / "allowlist.txt").write_text(f"# friends\n{friend.identity.worker_id}  # Ada\n\n")
        assert listed_ids(tmp_path / "allowlist.txt") == {friend.identity.worker_id}
        friend.join()


def test_one_address_holds_a_bounded_number_of_identities(tmp_path: Path) -> None:
    with judged(tmp_path, judged_recipe(max_workers_per_address=3, judge="off")) as running:
        peers = [running.peer() for _ in range(3)]
        assert refusal(running) == "address_full"
        peers[0].join()


def test_a_full_block_makes_workers_wait(tmp_path: Path) -> None:
    with judged(tmp_path, judged_recipe(max_workers_per_block=1, judge="off")) as running:
        running.peer().lend()
        answer = running.peer().ask()
        assert answer.kind == "wait"
        assert "seats" in answer.reason


def test_only_the_operator_bans_and_removes(tmp_path: Path) -> None:
    with judged(tmp_path, judged_recipe(judge="off")) as running:
        victim, boss = running.peer(), operator(running, tmp_path)
        path = f"/v1/workers/{victim.identity.worker_id}"
        ban = BanRequest(reason="sends noise", seconds=60)
        with pytest.raises(Refused) as found:
            victim.call("POST", f"{path}/ban", ban)
        assert found.value.reason == "not_operator"
        boss.call("POST", f"{path}/ban", ban)
        with pytest.raises(Refused) as found:
            victim.lend()
        assert found.value.reason == "banned"
        assert "sends noise" in found.value.message
        with pytest.raises(Refused):
            victim.join()
        running.advance(61)
        victim.lend()
        boss.call("DELETE", path)
        with pytest.raises(Refused) as found:
            victim.lend()
        assert found.value.reason == "not_joined"
        victim.join()
        victim.lend()


def test_a_ban_takes_back_what_waits_for_a_merge(tmp_path: Path) -> None:
    recipe = judged_recipe({"replicas": 2, "max_deadline_seconds": 100.0}, judge="off")
    with judged(tmp_path, recipe) as running:
        victim, boss = running.peer(), operator(running, tmp_path)
        assert victim.deliver(victim.lend()).outcome == "accepted"
        path = f"/v1/workers/{victim.identity.worker_id}"
        boss.call("POST", f"{path}/ban", BanRequest(reason="stolen key", seconds=60))
        assert victim.get(path).json()["verdicts"][0]["reason"] == "removed"
        assert victim.block(0).round.accepted == 0
