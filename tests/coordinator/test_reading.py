"""What anybody may read: objects with ranges, events, status, metrics."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from rich.console import Console

from blocktrain.coordinator.http.downloads import byte_range
from blocktrain.coordinator.metrics import Metrics
from blocktrain.coordinator.operator_notes import end_to_end_reference
from blocktrain.coordinator.refusals import Refusal
from blocktrain.errors import UserError
from blocktrain.local.status_view import status_tables
from blocktrain.wire.messages import EvaluationState, LedgerAnswer, StatusAnswer, VerdictsAnswer
from tests.coordinator.conftest import Place, Running, tiny_recipe
from tests.coordinator.peer import Refused


def test_a_snapshot_can_be_fetched_in_pieces(place: Place) -> None:
    with place.serve(tiny_recipe()) as running:
        peer = running.peer(join=False)
        path = f"/v1/snapshots/{peer.run.blocks[0].initial_hash}"
        whole = peer.get(path)
        half = len(whole.content) // 2
        first = peer.get(path, {"Range": f"bytes=0-{half - 1}"})
        rest = peer.get(path, {"Range": f"bytes={half}-"})
        assert (whole.status_code, first.status_code, rest.status_code) == (200, 206, 206)
        assert first.content + rest.content == whole.content
        assert rest.headers["content-range"] == f"bytes {half}-{len(whole.content) - 1}/{len(whole.content)}"


def test_a_snapshot_the_client_has_is_not_sent_again(running: Running) -> None:
    peer = running.peer(join=False)
    path = f"/v1/snapshots/{peer.run.blocks[0].initial_hash}"
    etag = peer.get(path).headers["etag"]
    assert peer.get(path, {"If-None-Match": etag}).status_code == 304
    assert peer.get(path, {"If-Range": '"other"', "Range": "bytes=5-"}).status_code == 200


def test_an_impossible_range_is_refused(running: Running) -> None:
    peer = running.peer(join=False)
    for wanted in ("bytes=999999999-", "bytes=5-2", "bytes=-", "lines=1-2", "bytes=0-1,4-5"):
        with pytest.raises(Refused) as refused:
            peer.get(f"/v1/snapshots/{peer.run.blocks[0].initial_hash}", {"Range": wanted})
        assert (refused.value.status, refused.value.reason) == (416, "range_not_satisfiable")


def test_byte_ranges_mean_what_http_says() -> None:
    assert byte_range("", 10) == (0, 10)
    assert byte_range("bytes=2-4", 10) == (2, 5)
    assert byte_range("bytes=2-400", 10) == (2, 10)
    assert byte_range("bytes=-3", 10) == (7, 10)
    assert byte_range("bytes=-30", 10) == (0, 10)
    with pytest.raises(Refusal):
        byte_range("bytes=10-", 10)


def events(response: httpx2.Response) -> Iterator[dict[str, str]]:
    event: dict[str, str] = {}
    for line in response.iter_lines():
        if line and not line.startswith(":"):
            name, _, value = line.partition(": ")
            event[name] = value
        elif event:
            yield event
            event = {}


def test_events_tell_what_happens_and_resume_where_they_broke_off(running: Running) -> None:
    with httpx2.stream("GET", f"{running.url}/v1/events?since=0", timeout=10) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["x-accel-buffering"] == "no"
        stream = events(response)
        assert next(stream)["event"] == "run"
        peer = running.peer()
        joined = next(stream)
        assert (joined["event"], joined["id"]) == ("join", "1")
        assert json.loads(joined["data"])["body"]["worker_id"] == peer.identity.worker_id
    peer.lend()
    resume = {"Last-Event-ID": joined["id"]}
    with httpx2.stream("GET", f"{running.url}/v1/events", headers=resume, timeout=10) as response:
        assert next(events(response))["event"] == "assign"


def test_status_shows_blocks_workers_rounds_and_bytes(running: Running) -> None:
    peer = running.peer()
    assignment = peer.lend()
    peer.heartbeat(assignment, step=1)
    account = {"seconds_computing": 3.5, "up": {"payload": 7}}
    payload = peer.payload(0)
    peer.reveal(peer.commit(assignment, payload, account=account), payload)
    running.wait_for_version(0, 1)
    status = StatusAnswer.model_validate_json(peer.get("/v1/status").content)
    (worker,) = status.workers
    assert (worker.device, worker.block, worker.live, worker.accepted) == ("test", 0, True, 1)
    assert (worker.seconds_computing, worker.up.payload) == (3.5, 7)
    assert [block.head_version for block in status.blocks] == [1, 0]
    assert (status.participation, status.ages) == (1.0, {"0": 1})
    assert status.up.payload >= len(payload)
    assert (status.reports[0].on_time, status.reports[0].mean_loss) == (1, 2.0)


def test_status_shows_the_ledgers_head_and_what_full_checkpoints_would_have_moved(running: Running) -> None:
    peer = running.peer()
    peer.deliver(peer.lend())
    running.wait_for_version(0, 1)
    status = StatusAnswer.model_validate_json(peer.get("/v1/status").content)
    last = LedgerAnswer.model_validate_json(peer.get("/v1/ledger").content).entries[-1]
    assert (status.ledger_length, status.ledger_head) == (last.sequence + 1, last.entry_hash)
    assert status.full_checkpoint_bytes == 2 * 4 * peer.schema(0).num_values
    assert status.blocks[0].head_made == last.time
    assert (status.references, status.gateway) == ((), None)


def test_a_workers_label_is_shown_and_can_be_changed_by_joining_again(running: Running) -> None:
    peer = running.peer(join=False)
    for label in ("attic", "cellar (new)"):
        peer.join(label=label)
        assert running.coordinator.status().workers[0].label == label
        assert running.coordinator.workers.workers().workers[0].label == label


@pytest.mark.parametrize("label", ["<img src=x onerror=alert(1)>", "a" * 65, "line\nbreak", "\u202eoverride"])
def test_a_label_that_could_deceive_is_refused(running: Running, label: str) -> None:
    peer = running.peer(join=False)
    body = json.dumps({"corpus_sha256": peer.run.corpus_sha256, "label": label}).encode()
    answer = peer.send("POST", "/v1/join", body)
    assert (answer.status_code, answer.json()["error"]["reason"]) == (422, "invalid_message")


def test_the_latest_verdicts_of_everybody_are_public(running: Running) -> None:
    peers = [running.peer(), running.peer()]
    for block, peer in enumerate(peers):
        peer.deliver(peer.lend(prefer_block=block), seed=block)
        running.wait_for_version(block, 1)
    found = VerdictsAnswer.model_validate_json(peers[0].get("/v1/verdicts").content).verdicts
    assert [(one.worker_id, one.block, one.reason) for one in found] == [
        (peers[1].identity.worker_id, 1, "on_time"),
        (peers[0].identity.worker_id, 0, "on_time"),
    ]


def test_the_status_of_a_run_fits_a_terminal_of_80_columns_and_keeps_its_order(running: Running) -> None:
    peer, _ = running.peer(), running.peer()
    peer.heartbeat(peer.lend())
    status, shown = running.coordinator.status(), list[str]()
    # Who was seen last comes first in the answer, which changes at every look.
    for workers in (status.workers, status.workers[::-1]):
        screen = io.StringIO()
        Console(file=screen, width=80).print(status_tables(status.model_copy(update={"workers": workers})))
        shown.append(screen.getvalue())
    assert len(status.workers) == 2
    assert shown[0] == shown[1]
    (block,) = [line for line in shown[0].splitlines() if line.startswith("0 ")]
    assert block.split()[:4] == ["0", "0/4", "0/1", "1"]
    assert "block 0: " in shown[0]


@pytest.mark.parametrize(("versions", "told"), [((0, 0), False), ((1, 0), True)])
def test_the_status_says_where_a_score_is_of_older_rounds(
    running: Running, versions: tuple[int, int], told: bool
) -> None:
    scored = EvaluationState(
        time=1.0, versions=versions, scored_bytes=9, consensus_ce=2.0, euler_ce=None, block_ce=(2.0, 3.0),
        weights=(0.5, 0.5),
    )  # fmt: skip
    screen = io.StringIO()
    status = running.coordinator.status().model_copy(update={"evaluations": (scored,)})
    Console(file=screen, width=120).print(status_tables(status))
    assert ("(at rounds 1, 0, not the newest)" in screen.getvalue()) is told


def test_a_reference_is_a_number_or_the_report_of_a_run_on_the_same_text(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    report = {"corpus_sha256": "ab" * 32, "scored_tokens": 99, "tokens": {"reference": 7}}
    path.write_text(json.dumps({**report, "reference": {"ce": 1.25}}))
    found = end_to_end_reference(str(path), "ab" * 32)
    assert (found.ce, found.source) == (1.25, "report.json: 99 held-out tokens, after 7 training tokens")
    assert end_to_end_reference("1.5", "ab" * 32).ce == 1.5
    with pytest.raises(UserError, match="is about text abababababab"):
        end_to_end_reference(str(path), "cd" * 32)
    path.write_text(json.dumps({**report, "reference": None}))
    with pytest.raises(UserError, match="expected the report.json of a `blocktrain train`"):
        end_to_end_reference(str(path), "ab" * 32)


def test_metrics_count_verdicts_and_bytes(running: Running) -> None:
    peer = running.peer()
    peer.deliver(peer.lend())
    running.wait_for_version(0, 1)
    text = peer.get("/metrics").text
    assert 'blocktrain_verdicts_total{outcome="accepted",reason="on_time"} 1.0' in text
    assert 'blocktrain_block_version{block="0"} 1.0' in text
    assert "blocktrain_merge_seconds_count 1.0" in text
    assert 'blocktrain_requests_total{method="POST",route="/v1/assignments",status="200"} 1.0' in text


def test_the_loss_in_metrics_is_per_byte_with_that_per_token_beside_it(running: Running) -> None:
    status = running.coordinator.status()
    scored = EvaluationState(
        time=1.0, versions=(1,), scored_bytes=9, bytes_per_token=4.0, consensus_ce=6.0, euler_ce=None,
        block_ce=(6.0,), weights=(1.0,),
    )  # fmt: skip
    told = Metrics().text(status.model_copy(update={"evaluations": (scored,)}), 0.0).decode()
    assert "\nblocktrain_consensus_ce 1.5\n" in told
    assert "\nblocktrain_consensus_ce_per_token 6.0\n" in told


def test_the_assembled_model_is_scored_off_the_request_path(local: Place) -> None:
    with local.serve(tiny_recipe(blocks=2, rounds=1), scoring=True) as running:
        peer = running.peer()
        for block in range(2):
            peer.deliver(peer.lend(prefer_block=block))
            running.wait_for_version(block, 1)
        running.wait_for(lambda: any(one.euler_ce for one in running.coordinator.status().evaluations))
        final = running.coordinator.status().evaluations[-1]
        assert final.versions == (1, 1)
        assert 0 < final.consensus_ce < 10
        (bigram,) = running.coordinator.status().references
        assert bigram.name == "bigram counts"
        assert 0 < bigram.ce < 6
