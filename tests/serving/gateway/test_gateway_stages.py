"""The gateway over real stages on loopback: the same text, and what a client is told when one is gone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from blocktrain.errors import UserError
from blocktrain.serving.engine.fanout import when_blocks_are_lost
from blocktrain.serving.engine.remote import EngineConfig, RemoteEngine, StageRefusedError
from tests.waiting import PATIENCE_SECONDS, until

from .conftest import Served, cost_of, serve_engine, served_by, stages


def complete(served: Served, **fields: Any) -> openai.types.Completion:
    with served.openai() as client:
        answer = client.completions.create(model="tiny", prompt="The value ", seed=5, **fields)
    assert isinstance(answer, openai.types.Completion)
    return answer


def test_stages_give_the_text_of_one_process(checkpoint: Path, served: Served) -> None:
    with (
        stages(checkpoint, [0], [1, 2]) as running,
        served_by(checkpoint, [stage.address for stage in running]) as remote,
    ):
        for fields in ({"max_tokens": 40}, {"max_tokens": 24, "n": 3, "top_p": 0.9}):
            texts = [choice.text for choice in complete(remote, **fields).choices]
            assert texts == [choice.text for choice in complete(served, **fields).choices]
        rows = complete(remote, max_tokens=0, echo=True, logprobs=0).choices[0].logprobs
        local = complete(served, max_tokens=0, echo=True, logprobs=0).choices[0].logprobs
        assert rows is not None
        assert local is not None
        assert rows.token_logprobs
        assert local.token_logprobs
        assert rows.token_logprobs[1:] == pytest.approx(local.token_logprobs[1:], abs=1e-4)


def test_wire_bytes_are_reported(checkpoint: Path) -> None:
    with stages(checkpoint, [0, 1, 2]) as running, served_by(checkpoint, [running[0].address]) as remote:
        cost = cost_of(complete(remote, max_tokens=16))
        assert cost["wire_bytes_sent"] > 0
        assert cost["wire_bytes_received"] > cost["traversals"] * 256
        assert cost["scoring_traversals"] == 0


def test_scoring_an_echoed_prompt_is_part_of_the_cost(checkpoint: Path) -> None:
    with stages(checkpoint, [0, 1, 2]) as running, served_by(checkpoint, [running[0].address]) as remote:
        scored = cost_of(complete(remote, max_tokens=0, echo=True, logprobs=0))
        assert (scored["traversals"], scored["scoring_traversals"]) == (0, 1)
        assert scored["wire_bytes_received"] > 9 * 1024
        both = cost_of(complete(remote, max_tokens=4, n=2, echo=True, logprobs=0))
        assert both["scoring_traversals"] == 1
        assert both["bytes_per_traversal"] == pytest.approx(8 / both["traversals"], abs=1e-3)


def test_a_lost_stage_is_said_in_a_header(checkpoint: Path) -> None:
    with (
        stages(checkpoint, [0], [1], [2]) as running,
        served_by(checkpoint, [stage.address for stage in running]) as remote,
        remote.http() as client,
    ):
        running[1].kill()
        until("it says degraded", lambda: "degraded" in client.get("/readyz").json()["reason"])
        # Strangers may read this; why a stage is lost, and its address, are in the log.
        assert client.get("/readyz").json()["reason"] == "degraded: no stage serves blocks [1] now"
        body = {"model": "tiny", "prompt": "x", "max_tokens": 8}
        whole = client.post("/v1/completions", json=body)
        assert whole.headers["x-blocktrain-degraded"] == "without blocks 1"
        assert whole.json()["usage"]["blocktrain"]["degraded_blocks"] == [1]
        with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as stream:
            assert stream.headers["x-blocktrain-degraded"] == "without blocks 1"
        assert remote.metric("blocktrain_gateway_degraded_total") >= 1


def test_a_block_that_is_lost_on_the_way_makes_the_fingerprint_another(checkpoint: Path) -> None:
    fanout = replace(when_blocks_are_lost("degrade"), degrade_seconds=0.2)
    with stages(checkpoint, [0, 2], [1]) as running:
        config = EngineConfig(stages=[stage.address for stage in running], fanout=fanout)
        with serve_engine(RemoteEngine(checkpoint, config)) as served, served.openai() as client:
            prints: list[str | None] = []
            for chunk in client.completions.create(
                model="tiny", prompt="x", max_tokens=48, stream=True, extra_body={"mode": "ar"}
            ):
                if not prints:
                    running[1].kill()
                prints.append(chunk.system_fingerprint)
            assert prints[0] is not None
            assert set(prints) == {prints[0], f"{prints[0]}-without-1"}
            assert complete(served, max_tokens=4).system_fingerprint == f"{prints[0]}-without-1"


def test_a_gateway_may_fail_or_wait_where_a_block_is_lost(checkpoint: Path, served: Served) -> None:
    expected = complete(served, max_tokens=8).choices[0].text
    with stages(checkpoint, [0, 2], [1]) as running:
        quick = replace(when_blocks_are_lost("fail"), degrade_seconds=0.2)
        failing, waiting = (
            EngineConfig(stages=[stage.address for stage in running], fanout=fanout)
            for fanout in (quick, when_blocks_are_lost("wait"))
        )
        with (
            serve_engine(RemoteEngine(checkpoint, failing)) as strict,
            serve_engine(RemoteEngine(checkpoint, waiting)) as patient,
            ThreadPoolExecutor(1) as asking,
        ):
            running[1].kill()
            with pytest.raises(openai.InternalServerError, match=r"no stage serves blocks \[1\] now"):
                complete(strict, max_tokens=8)
            answer = asking.submit(complete, patient, max_tokens=8)
            with strict.http() as client:
                until("it says so", lambda: client.get("/readyz").status_code == 503)
            with stages(checkpoint, [1], port=running[1].address.port):
                assert answer.result(PATIENCE_SECONDS).choices[0].text == expected
    with pytest.raises(UserError, match="degrade, fail or wait, found 'no'"):
        when_blocks_are_lost("no")


def test_a_stream_waits_while_all_stages_are_away(checkpoint: Path, served: Served) -> None:
    expected = complete(served, max_tokens=48).choices[0].text
    with stages(checkpoint, [0, 2], [1]) as running:
        addresses = [stage.address for stage in running]
        config = EngineConfig(stages=addresses, fanout=when_blocks_are_lost("wait"))
        with serve_engine(RemoteEngine(checkpoint, config)) as patient, patient.openai() as client:
            stream = client.completions.create(
                model="tiny",
                prompt="The value ",
                seed=5,
                max_tokens=48,
                stream=True,
                extra_body={"mode": "ar"},
            )
            text = next(stream).choices[0].text
            for stage in running:
                stage.kill()
            with patient.http() as http:
                until("it says so", lambda: http.get("/readyz").status_code == 503)
            with (
                stages(checkpoint, [0, 2], port=addresses[0].port),
                stages(checkpoint, [1], port=addresses[1].port),
            ):
                text += "".join(chunk.choices[0].text for chunk in stream)
    assert text == expected


def test_a_block_nobody_serves_is_a_503_by_name(checkpoint: Path) -> None:
    with (
        stages(checkpoint, [0, 2]) as running,
        served_by(checkpoint, [running[0].address], seconds=0.5) as remote,
        remote.http() as client,
    ):
        ready = client.get("/readyz")
        assert (ready.status_code, ready.json()["ready"]) == (503, False)
        assert "block 1" in ready.json()["reason"]
        with pytest.raises(openai.InternalServerError, match="no stage serves block 1") as failure:
            complete(remote, max_tokens=4)
        assert (failure.value.status_code, failure.value.code) == (503, "stages_unavailable")
        assert failure.value.response.headers["retry-after"]


def test_two_stages_with_the_same_block_are_spares(checkpoint: Path, served: Served) -> None:
    with (
        stages(checkpoint, [0, 1, 2], [0, 1, 2]) as running,
        served_by(checkpoint, [stage.address for stage in running]) as remote,
    ):
        expected = complete(served, max_tokens=30).choices[0].text
        assert complete(remote, max_tokens=30).choices[0].text == expected
        running[0].kill()
        answer = complete(remote, max_tokens=30)
        assert answer.choices[0].text == expected
        assert cost_of(answer)["degraded_blocks"] == []
        running[1].kill()
        with pytest.raises(openai.InternalServerError) as failure:
            complete(remote, max_tokens=30)
        assert failure.value.message.endswith("no stage can be reached")


def test_a_stage_of_another_checkpoint_is_refused_by_name(checkpoint: Path, other_checkpoint: Path) -> None:
    with (
        stages(other_checkpoint, [0, 1, 2]) as running,
        pytest.raises(StageRefusedError, match=str(running[0].address)),
        served_by(checkpoint, [running[0].address]),
    ):
        pass
