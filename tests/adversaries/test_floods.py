"""Attacks of the field review that cost the coordinator disk, ledger, time or connections.

The attacks succeeded at commit 59aa936. Time is moved by hand; the coordinator is a real one on a free port.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import resource
import select
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import numpy as np
import pytest

from blocktrain import connections
from blocktrain.connections import LogRate
from blocktrain.coordinator.decisions.rounds import round_seconds
from blocktrain.coordinator.decisions.scheduling import (
    GIVEN_UP_SECONDS,
    MAX_GIVEN_UP,
    pause_after_giving_up,
)
from blocktrain.coordinator.main import Tls
from blocktrain.coordinator.refusals import Refusal
from blocktrain.coordinator.service import opened
from blocktrain.coordinator.storage.store import LedgerRow
from blocktrain.validation.duplicates import Likeness
from blocktrain.validation.ruling import Mark, duplicate_ruling
from blocktrain.wire.hashing import content_hash
from blocktrain.wire.identity import Identity
from blocktrain.wire.messages import Wait
from tests.adversaries.attacks import head, status_of
from tests.coordinator.background import listening
from tests.coordinator.conftest import CORPUS, Running, served, tiny_recipe
from tests.coordinator.peer import Peer, Refused
from tests.trust.kit import Trainer, judged, judged_recipe


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    with served(tmp_path, tiny_recipe(replicas=2)) as found:
        yield found


def connected(url: str, source: str = "127.0.0.1") -> socket.socket:
    address = urlsplit(url)
    return socket.create_connection((address.hostname, address.port), timeout=30, source_address=(source, 0))


def stored(tmp_path: Path) -> set[str]:
    folder = tmp_path / "blobs" / "payloads"
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


def ledger_length(running: Running) -> int:
    with running.coordinator.resources.store.read() as session:
        return session.query(LedgerRow).count()


# --- 2.2: the disk ----------------------------------------------------------------------------------------


def test_a_payload_whose_commit_was_given_up_meanwhile_is_not_stored(
    running: Running, tmp_path: Path
) -> None:
    """All but the last byte, a new assignment, the last byte: 97 GB an hour of one newcomer."""
    peer = running.peer()
    lease, payload = peer.lend(), peer.payload(0)
    peer.commit(lease, payload)
    # The two moments of one PUT: when its head has come, and when its last byte has.
    updates, name = running.coordinator.updates, content_hash(payload)
    expected = updates.expect(peer.identity.worker_id, name, len(payload))
    peer.ask()
    with pytest.raises(Refusal) as refused:
        updates.reveal(expected, np.frombuffer(payload, np.uint8), name)
    assert refused.value.body.reason == "not_committed"
    assert not stored(tmp_path)


def test_a_refused_payload_is_deleted(running: Running, tmp_path: Path) -> None:
    peer = running.peer()
    lease, payload = peer.lend(), peer.payload(0)
    refused = b"\xff" * len(payload)
    assert peer.reveal(peer.commit(lease, refused), refused).outcome == "refused"
    running.wait_for(lambda: content_hash(refused) not in stored(tmp_path))


def test_what_one_worker_gives_up_another_keeps(running: Running, tmp_path: Path) -> None:
    """The same bytes under two names: the one that counts keeps them."""
    first, second = running.peer(), running.peer()
    lease, payload = first.lend(), first.payload(0)
    first.reveal(first.commit(lease, payload), payload)
    # Anybody can promise the hash of a public payload, and give the promise up again.
    second.commit(second.lend(), payload)
    second.ask()
    unneeded = running.coordinator.resources.unneeded
    unneeded.add(content_hash(payload))
    unneeded.delete_next()
    assert content_hash(payload) in stored(tmp_path)


def test_a_worker_has_few_bodies_on_their_way_at_once(running: Running) -> None:
    """Each is a file of a whole payload, for as long as its body may take."""
    peer = running.peer()
    lease, payload = peer.lend(), peer.payload(0)
    peer.commit(lease, payload)
    path, answers = f"/v1/updates/{content_hash(payload)}", []
    with contextlib.ExitStack() as sockets:
        for _ in range(5):
            connection = sockets.enter_context(connected(running.url))
            headers = {**peer.headers("PUT", path, payload), "Content-Length": str(len(payload))}
            connection.sendall(head("PUT", path, headers) + payload[:-1])
            answers.append(connection)
        # Whichever came fifth is told so at once; the others still wait for their last byte.
        ready, _, _ = select.select(answers, [], [], 20)
        assert [status_of(one.recv(65536)) for one in ready] == ["503"]


# --- 2.3: the ledger --------------------------------------------------------------------------------------


def test_who_only_hands_back_is_told_to_wait_and_the_ledger_stops_growing(running: Running) -> None:
    peer = running.peer()
    for _ in range(MAX_GIVEN_UP):
        peer.hand_back(peer.lend())
    length = ledger_length(running)
    answer = peer.ask()
    assert isinstance(answer, Wait)
    assert "gave up" in answer.reason
    assert 0 < answer.seconds <= GIVEN_UP_SECONDS
    assert ledger_length(running) == length
    assert running.peer().lend(), "others are lent to as before"
    running.advance(GIVEN_UP_SECONDS + 1)
    assert peer.lend()


def test_commits_without_payloads_are_slowed_as_well(running: Running) -> None:
    peer = running.peer()
    for number in range(MAX_GIVEN_UP):
        lease = peer.lend()
        peer.commit(lease, peer.payload(lease.block, number))
    assert isinstance(peer.ask(), Wait)


def test_giving_up_too_much_is_a_bad_mark_and_in_the_end_a_ban(tmp_path: Path) -> None:
    recipe = tiny_recipe()
    trust = dataclasses.replace(recipe.trust, judge="external")
    with served(tmp_path, dataclasses.replace(recipe, trust=trust)) as running:
        peer = running.peer()

        def rating() -> float:
            return running.coordinator.workers.worker(peer.identity.worker_id).worker.rating

        for _ in range(MAX_GIVEN_UP - 1):
            peer.hand_back(peer.lend())
        assert rating() == 0.5, "a machine that restarts a few times has done nothing wrong"

        def goes_on() -> None:
            for _ in range(200):
                answer = peer.ask()
                if isinstance(answer, Wait):
                    running.advance(answer.seconds + 1)
                else:
                    peer.hand_back(answer)

        with pytest.raises(Refused) as refused:
            goes_on()
        assert refused.value.reason == "banned"


def test_the_wait_ends_when_the_oldest_of_those_given_up_is_old_enough() -> None:
    lent = [float(at) for at in range(MAX_GIVEN_UP)]
    pause = pause_after_giving_up(lent, 100.0)
    assert pause is not None
    assert pause.seconds == GIVEN_UP_SECONDS - 100
    assert pause_after_giving_up(lent[1:], 100.0) is None
    assert pause_after_giving_up(lent, GIVEN_UP_SECONDS + 1) is None


# --- 2.6: deadlines ---------------------------------------------------------------------------------------


def test_updates_that_do_not_count_do_not_move_a_deadline(tmp_path: Path) -> None:
    """Refused ones that come at once, or minutes late, leave it where honest arrivals put it."""
    with served(tmp_path, tiny_recipe(blocks=1, replicas=1, rounds=20)) as running:
        honest = running.peer()

        def round_() -> None:
            lease = honest.lend()
            running.advance(10)
            honest.deliver(lease, seed=lease.round)
            running.wait_for_version(0, lease.round + 1)

        for _ in range(4):
            round_()
        begun, expected = running.clock.now, 0.0
        for seconds in (0.0, 300.0):
            lease = honest.lend()
            expected = expected or (honest.heartbeat(lease).deadline or 0.0) - begun
            crowd = [running.peer() for _ in range(6)]
            bad = b"\xff" * len(honest.payload(0))
            promises = [one.commit(one.lend(), bad) for one in crowd]
            if not seconds:
                assert {one.reveal(promises[0], bad).outcome for one in crowd} == {"refused"}
            running.advance(10)
            honest.deliver(lease, seed=lease.round)
            running.advance(31)  # nobody waits for the crowd any longer
            running.wait_for_version(0, lease.round + 1)
            if seconds:
                running.advance(seconds)
                assert {one.reveal(promises[0], bad).outcome for one in crowd} == {"refused"}
            begun, lease = running.clock.now, honest.lend()
            found = (honest.heartbeat(lease).deadline or 0.0) - begun
            assert found == pytest.approx(expected), f"bent by updates that came after {seconds} s"
            honest.hand_back(lease)


def test_a_deadline_moves_by_a_factor_of_two_a_round_at_most() -> None:
    swarm = tiny_recipe(max_deadline_seconds=600.0, min_deadline_seconds=1.0).swarm
    before = [10.0] * 20
    usual = round_seconds(before, (), swarm)[0]
    for offset, bound in ((400.0, usual * 2), (0.1, usual / 2)):
        seconds, reason = round_seconds([offset] * 32, (), swarm, before)
        assert seconds == pytest.approx(bound)
        assert "held to" in reason


# --- 2.7 and 2.10: framing --------------------------------------------------------------------------------


@pytest.mark.parametrize(("same_base", "mark"), [(True, Mark.NEUTRAL), (False, Mark.BAD)])
def test_an_equal_update_counts_against_its_worker_only_from_another_snapshot(
    same_base: bool, mark: Mark
) -> None:
    """Shards are public and training is deterministic, so anybody can repeat a slow worker's step first."""
    found = duplicate_ruling("ab" * 32, Likeness(1000, 1.0), same_base=same_base)
    assert found is not None
    assert found.mark is mark
    assert ("depends on others" in found.sentence) is same_base


def test_a_worker_whose_step_another_repeats_first_keeps_its_rating(tmp_path: Path) -> None:
    """The ledger names the victim's shard; the framer trains it and reveals before the victim commits."""
    recipe = judged_recipe({"replicas": 3, "max_deadline_seconds": 100.0})
    with judged(tmp_path, recipe) as running:
        victim, framer = Trainer(running, recipe), Trainer(running, recipe)
        lease = victim.peer.lend()
        delta = victim.train(lease)
        framer.send(framer.peer.lend(), delta)
        verdict = victim.send(lease, delta)
        assert verdict.reason == "duplicate"
        assert "depends on others" in verdict.sentence
        shown = running.coordinator.workers.worker(victim.peer.identity.worker_id)
        assert shown.worker.rating == 0.5
        assert shown.worker.ban is None


# --- 2.8 and 2.9: connections -----------------------------------------------------------------------------


def test_slow_bodies_of_strangers_keep_no_newcomer_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Signed by fresh keys that never join, from three addresses, as many as the server has places."""
    monkeypatch.setattr(connections, "MAX_PER_NETWORK", 8)
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 24)
    with served(tmp_path, tiny_recipe()) as running, contextlib.ExitStack() as sockets:
        stranger = Peer(running.url, running.clock)
        body = b'{"corpus_sha256": "' + b"ab" * 32 + b'"}'
        for number in range(48):
            stranger.identity = Identity.generate()
            headers = {**stranger.headers("POST", "/v1/join", body), "Content-Length": str(len(body))}
            slow = sockets.enter_context(connected(running.url, f"127.0.0.{2 + number % 3}"))
            with contextlib.suppress(ConnectionResetError, BrokenPipeError):
                slow.sendall(head("POST", "/v1/join", headers) + body[:3])
        stranger.close()
        for _ in range(10):
            assert running.peer().lend() is not None


@pytest.fixture
def certificate(tmp_path: Path) -> Tls:
    found = Tls(tmp_path / "cert.pem", tmp_path / "key.pem")
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=x"
    files = ["-addext", "subjectAltName=IP:127.0.0.1"]
    files += ["-out", str(found.certificate), "-keyout", str(found.key)]
    subprocess.run([*command.split(), *files], check=True, capture_output=True)
    return found


@contextlib.contextmanager
def served_with_tls(folder: Path, tls: Tls) -> Iterator[str]:
    with (
        opened(tiny_recipe(), CORPUS, folder, scoring=False) as coordinator,
        listening(coordinator, tls) as url,
    ):
        yield url


def test_sockets_that_never_begin_tls_are_counted_and_closed(
    tmp_path: Path, certificate: Tls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MAX_PER_NETWORK", 8)
    monkeypatch.setattr(connections, "HANDSHAKE_SECONDS", 0.5)
    trusted = ssl.create_default_context(cafile=str(certificate.certificate))
    with served_with_tls(tmp_path / "run", certificate) as url, contextlib.ExitStack() as sockets:
        silent = [sockets.enter_context(connected(url)) for _ in range(20)]
        # The first made room for later ones; the last were closed by the time limit.
        for one in silent:
            with contextlib.suppress(ConnectionResetError):
                assert one.recv(1) == b""
        with httpx2.Client(verify=trusted) as client:
            assert client.get(f"{url}/healthz").status_code == 200


def test_what_is_no_tls_is_closed_and_the_server_goes_on(tmp_path: Path, certificate: Tls) -> None:
    trusted = ssl.create_default_context(cafile=str(certificate.certificate))
    with served_with_tls(tmp_path / "run", certificate) as url:
        with connected(url) as plain, contextlib.suppress(ConnectionResetError):
            plain.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"200" not in plain.recv(65536)
        with httpx2.Client(verify=trusted) as client:
            for _ in range(3):
                assert client.get(f"{url}/v1/run").status_code == 200


def test_one_message_of_asyncio_is_logged_a_few_times_a_minute() -> None:
    now = 0.0
    rate = LogRate(logging.ERROR, lambda: now)

    def shown(level: int, count: int) -> list[str]:
        words = "socket.accept() out of system"
        records = [logging.LogRecord("asyncio", level, "", 0, words, (), None) for _ in range(count)]
        return [record.getMessage() for record in records if rate.filter(record)]

    errors = shown(logging.ERROR, 1000)
    assert len(errors) == connections.LOGGED_PER_MINUTE
    assert errors[-1].endswith("(more of these are left out until the next minute)")
    assert len(shown(logging.INFO, 1000)) == 1000
    now = 61.0
    assert shown(logging.ERROR, 1) == ["socket.accept() out of system"]


def test_a_server_asks_for_descriptors_for_all_its_connections() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1024), hard))
        room = connections.max_connections()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= room + connections.OTHER_FILES
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
