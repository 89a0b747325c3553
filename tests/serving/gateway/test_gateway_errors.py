from __future__ import annotations

import contextlib
import json
import re
import ssl
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from blocktrain.errors import UserError
from blocktrain.serving.gateway import main as gateway_main
from blocktrain.serving.gateway.app import GatewayConfig
from blocktrain.serving.gateway.limits import GatewayLimits, Keys
from blocktrain.serving.gateway.main import gateway_config
from tests.cli.servers import make_certificate
from tests.waiting import until

from .conftest import Served, serve_engine

OK = {"model": "tiny", "prompt": "x", "max_tokens": 1}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}

WRONG_COMPLETIONS: list[tuple[dict[str, Any], str | None, str | None]] = [
    ({"model": "gpt-9"}, "model", "model_not_found"),
    ({"model": ""}, "model", "invalid_value"),
    ({"model": 7}, "model", "invalid_value"),
    ({"temperature": -1}, "temperature", "invalid_value"),
    ({"temperature": 2.5}, "temperature", "invalid_value"),
    ({"temperature": "1"}, "temperature", "invalid_value"),
    ({"temperature": True}, "temperature", "invalid_value"),
    ({"top_p": 0}, "top_p", "invalid_value"),
    ({"top_p": 1.01}, "top_p", "invalid_value"),
    ({"n": 0}, "n", "invalid_value"),
    ({"n": 10**6}, "n", "invalid_value"),
    ({"n": 10**30}, "n", "invalid_value"),
    ({"n": 1.5}, "n", "invalid_value"),
    ({"prompt": ["x"] * 100, "n": 2}, "n", "invalid_value"),
    ({"max_tokens": -1}, "max_tokens", "invalid_value"),
    ({"max_tokens": 10**9}, "max_tokens", "invalid_value"),
    ({"prompt": None}, "prompt", "invalid_value"),
    ({"prompt": ""}, "prompt", "invalid_value"),
    ({"prompt": []}, "prompt", "invalid_value"),
    ({"prompt": ["a", ""]}, "prompt", "invalid_value"),
    ({"prompt": ["a", 1]}, "prompt", "invalid_value"),
    ({"prompt": {"text": "a"}}, "prompt", "invalid_value"),
    ({"prompt": [[1], []]}, "prompt", "invalid_value"),
    ({"prompt": [256]}, "prompt", "invalid_value"),
    ({"prompt": [-1]}, "prompt", "invalid_value"),
    ({"prompt": [2**70]}, "prompt", "invalid_value"),
    ({"prompt": [True]}, "prompt", "invalid_value"),
    ({"prompt": "x" * 97}, "prompt", "context_length_exceeded"),
    ({"prompt": "x" * 65_537, "max_tokens": 0}, "prompt", "invalid_value"),
    ({"prompt": "x" * 65_537, "overflow": "slide"}, "prompt", "invalid_value"),
    ({"prompt": "x" * 97, "overflow": "explode"}, "overflow", "invalid_value"),
    ({"prompt": "\ud800"}, "prompt", "invalid_value"),
    ({"seed": 2**63}, "seed", "invalid_value"),
    ({"seed": "a"}, "seed", "invalid_value"),
    ({"stop": ""}, "stop", "invalid_value"),
    ({"stop": ["a"] * 17}, "stop", "invalid_value"),
    ({"stop": "x" * 201}, "stop", "invalid_value"),
    ({"stop": 5}, "stop", "invalid_value"),
    ({"logprobs": 21}, "logprobs", "invalid_value"),
    ({"logprobs": True}, "logprobs", "invalid_value"),
    ({"suffix": "end"}, "suffix", "invalid_value"),
    ({"best_of": 2}, "best_of", "invalid_value"),
    ({"mode": "sweep"}, "mode", "invalid_value"),
    ({"mode": "fast"}, "mode", "invalid_value"),
    ({"passes": 2}, "passes", "invalid_value"),
    ({"passes": 17, "mode": "sweep"}, "passes", "invalid_value"),
    ({"draft_tokens": 33}, "draft_tokens", "invalid_value"),
    ({"presence_penalty": 2.5}, "presence_penalty", "invalid_value"),
    ({"repetition_penalty": 0}, "repetition_penalty", "invalid_value"),
    ({"logit_bias": {"50": 101}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"a": 1.0}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"256": 1.0}}, "logit_bias", "invalid_value"),
    ({"top_k": -2}, "top_k", "invalid_value"),
    ({"min_p": 1.5}, "min_p", "invalid_value"),
    ({"use_beam_search": True}, "use_beam_search", "invalid_value"),
    ({"guided_regex": "a+"}, "guided_regex", "unknown_parameter"),
    ({"response_format": {"type": "json_object"}}, "response_format", "unknown_parameter"),
    ({"logit_bias": {"\ud800": 1}}, "logit_bias", "invalid_value"),
    ({"stream": "yes"}, "stream", "invalid_value"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
    ({"colour": "red"}, "colour", "unknown_parameter"),
    ({"\ud800\n" * 100: 1}, None, None),
    ({"é\n" * 100: 1}, None, "unknown_parameter"),
    ({"stop": "a\ud800"}, "stop", "invalid_value"),
]

WRONG_CHATS: list[tuple[dict[str, Any], str | None, str | None]] = [
    ({"messages": []}, "messages", "invalid_value"),
    ({"messages": "hi"}, "messages", "invalid_value"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages", "invalid_value"),
    ({"messages": [{"role": "user"}]}, "messages", "missing_required_parameter"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", None),
    ({"messages": [{"role": "user", "content": "\udfff"}]}, "messages", "invalid_value"),
    ({"messages": [{"role": "user", "content": None}]}, "messages", "invalid_value"),
    ({"messages": [{"role": "user", "content": "x", "annotations": [1]}]}, "messages", "invalid_value"),
    ({"top_logprobs": 3}, "top_logprobs", "invalid_value"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
    ({"max_completion_tokens": 10**9}, "max_completion_tokens", "invalid_value"),
    ({"tools": [{"type": "function"}]}, "tools", "invalid_value"),
    ({"response_format": {"type": "json_object"}}, "response_format", "invalid_value"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format", "invalid_value"),
    ({"max_tokens": 0}, "max_tokens", "invalid_value"),
]


THEIR_WORDS = re.compile(
    r"function-|Value error|(Input|String|List) should|validation|pattern|Tokenize|\[key\]"
)
"""Of pydantic, and of the names of our own types."""


def short(value: object) -> str:
    return ascii(value)[:50]


def check_error(answer: Any, status: int, param: str | None, code: str | None) -> None:
    assert answer.status_code == status, answer.text
    assert set(answer.json()) == {"error"}
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert len(error["message"]) < 400
    assert THEIR_WORDS.search(error["message"]) is None
    assert param is None or error["param"] == param
    assert code is None or error["code"] == code


@pytest.mark.parametrize(("change", "param", "code"), WRONG_COMPLETIONS, ids=short)
def test_a_wrong_completion_is_refused_by_name(
    served: Served, change: dict[str, Any], param: str | None, code: str | None
) -> None:
    with served.http() as client:
        body = json.dumps({**OK, **change})
        answer = client.post(
            "/v1/completions", content=body.encode(), headers={"content-type": "application/json"}
        )
    check_error(answer, 404 if code == "model_not_found" else 400, param, code)


@pytest.mark.parametrize(("change", "param", "code"), WRONG_CHATS, ids=short)
def test_a_wrong_chat_is_refused_by_name(
    served: Served, change: dict[str, Any], param: str | None, code: str | None
) -> None:
    with served.http() as client:
        body = json.dumps({**CHAT, **change}).encode()
        answer = client.post(
            "/v1/chat/completions", content=body, headers={"content-type": "application/json"}
        )
    check_error(answer, 400, param, code)


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, "prompt", "you must provide prompt"),
        ({"prompt": "\ud800"}, "prompt", "prompt: the text holds half a surrogate pair"),
        ({"prompt": 5}, "prompt", "prompt: expected a string"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages", "messages.0.content: expected a text"),
        ({"messages": [{"role": "bot", "content": ""}]}, "messages", "messages.0.role: must be 'system'"),
    ],
)
def test_a_field_is_named_as_the_client_wrote_it(served: Served, body: Any, param: str, message: str) -> None:
    with served.http() as client:
        headers = {"content-type": "application/json"}
        answer = client.post("/tokenize", content=json.dumps(body).encode(), headers=headers)
    check_error(answer, 400, param, None)
    assert answer.json()["error"]["message"].startswith(message)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b'{"model": "tiny", "prompt": "\xff\xfe"}',
        b'{"model": "tiny", "prompt": "x", "temperature": NaN}',
        b'{"model": "tiny", "prompt": "x", "top_p": Infinity}',
        b'{"model": "tiny", "prompt": "x", "n": 1' + b"0" * 5000 + b"}",
        b'{"model": "tiny", "prompt": ' + b"[" * 20_000 + b"]" * 20_000 + b"}",
        b"\x00" * 64,
    ],
    ids=short,
)
@pytest.mark.parametrize("kind", ["application/json", "text/plain", None])
def test_a_body_that_is_no_json_object_is_refused(served: Served, body: bytes, kind: str | None) -> None:
    with served.http() as client:
        headers = {"content-type": kind} if kind else {}
        check_error(client.post("/v1/completions", content=body, headers=headers), 400, None, None)


def test_neutral_fields_of_openai_are_accepted(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="tiny",
        prompt="x",
        max_tokens=1,
        presence_penalty=0,
        frequency_penalty=0.0,
        logit_bias={},
        best_of=1,
        user="me",
        suffix="",
    )
    assert answer.choices


def test_an_unknown_route_and_method_have_the_error_shape(served: Served) -> None:
    with served.http() as client:
        check_error(client.get("/v1/engines"), 404, None, "unknown_url")
        check_error(client.get("/v1/completions"), 405, None, "method_not_allowed")
        assert client.get("/v1/completions").headers["allow"] == "POST"
        check_error(client.get("/v1/models/other"), 404, "model", "model_not_found")


def test_the_clients_error_classes_fit(served: Served, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-9", prompt="x")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="tiny", prompt="x", temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="tiny", prompt=[999], stream=True)


def test_a_body_beyond_the_limit_is_refused_without_reading_it(engine_of: Any) -> None:
    config = GatewayConfig(limits=GatewayLimits(max_body_bytes=1000))
    with serve_engine(engine_of(), config) as served, served.http() as client:
        declared = client.post("/v1/completions", json={**OK, "prompt": "x" * 2000})
        check_error(declared, 413, None, "request_too_large")

        def pieces() -> Any:
            for _ in range(40):
                yield b" " * 100

        undeclared = client.post("/v1/completions", content=pieces())
        check_error(undeclared, 413, None, "request_too_large")
        assert client.post("/v1/completions", json=OK).status_code == 200


def test_keys_open_the_door_and_nothing_else_does(engine_of: Any) -> None:
    config = GatewayConfig(keys=Keys([("alice", "sk-alice-1")]))
    with serve_engine(engine_of(), config) as served:
        assert served.openai("sk-alice-1").models.list().data
        with pytest.raises(openai.AuthenticationError) as refusal:
            served.openai("sk-mallory").models.list()
        assert refusal.value.code == "invalid_api_key"
        with served.http() as client:
            for header in ({}, {"authorization": "Basic sk-alice-1"}, {"authorization": "Bearer"}):
                answer = client.post("/v1/completions", json=OK, headers=header)
                check_error(answer, 401, None, "invalid_api_key")
                assert answer.headers["www-authenticate"] == "Bearer"
            for open_to_all in ("/healthz", "/readyz", "/metrics"):
                assert client.get(open_to_all).status_code == 200


def test_a_rate_beyond_the_limit_is_429_with_retry_after(engine_of: Any) -> None:
    config = GatewayConfig(
        limits=GatewayLimits(requests_per_minute=2), keys=Keys([("a", "sk-aaaaaaaa"), ("b", "sk-bbbbbbbb")])
    )
    with serve_engine(engine_of(), config) as served:
        first, second = served.openai("sk-aaaaaaaa"), served.openai("sk-bbbbbbbb")
        for _ in range(2):
            first.models.list()
        with pytest.raises(openai.RateLimitError) as refusal:
            first.models.list()
        assert 1 <= int(refusal.value.response.headers["retry-after"]) <= 60
        assert second.models.list().data
        assert served.metric("blocktrain_gateway_refusals_total") == 1


def test_a_browser_may_call_from_a_named_page_only(engine_of: Any) -> None:
    config = GatewayConfig(keys=Keys([("a", "sk-aaaaaaaa")]), origins=("http://dashboard:8080",))
    asked = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization, x-stainless-lang",
    }
    with serve_engine(engine_of(), config) as served, served.http() as client:
        allowed = client.options("/v1/completions", headers={"origin": "http://dashboard:8080", **asked})
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == "http://dashboard:8080"
        refused = client.options("/v1/completions", headers={"origin": "http://elsewhere", **asked})
        assert "access-control-allow-origin" not in refused.headers


def test_what_each_key_used_is_counted_and_logged(engine_of: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "blocktrain.serving.gateway")
    config = GatewayConfig(keys=Keys([("alice", "sk-aaaaaaaa"), ("bob", "sk-bbbbbbbb")]))
    with serve_engine(engine_of(), config) as served:
        answer = served.openai("sk-aaaaaaaa").completions.create(model="tiny", prompt="The ", max_tokens=5)
        with served.http() as client:
            page = client.get("/metrics").text
    assert 'blocktrain_gateway_key_answers_total{key="alice"} 1.0' in page
    assert 'blocktrain_gateway_key_tokens_total{key="alice",kind="prompt"} 4.0' in page
    assert 'blocktrain_gateway_key_tokens_total{key="alice",kind="completion"} 5.0' in page
    assert "bob" not in page
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("answered")]
    assert len(lines) == 1
    assert (
        f"id={answer.id} caller=alice model=tiny mode=verify prompt_tokens=4 completion_tokens=5" in lines[0]
    )
    assert lines[0].endswith("end=complete")


def test_a_key_whose_quota_is_used_up_is_refused_until_the_next_day(engine_of: Any) -> None:
    keys = Keys([("alice", "sk-aaaaaaaa"), ("bob", "sk-bbbbbbbb")], {"alice": 10})
    with serve_engine(engine_of(), GatewayConfig(keys=keys)) as served:
        alice, bob = served.openai("sk-aaaaaaaa"), served.openai("sk-bbbbbbbb")
        for _ in range(2):  # 4 and 5 tokens, so the second answer begins within the quota
            assert alice.completions.create(model="tiny", prompt="The ", max_tokens=5).choices
        with pytest.raises(openai.RateLimitError, match="10 tokens of this day") as refusal:
            alice.completions.create(model="tiny", prompt="The ", max_tokens=5, stream=True)
        assert refusal.value.code == "insufficient_quota"
        assert 0 < int(refusal.value.response.headers["retry-after"]) <= 86_400
        assert alice.models.list().data
        assert bob.completions.create(model="tiny", prompt="The ", max_tokens=5).choices


def test_a_restart_does_not_give_a_quota_back(engine_of: Any, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("alice = sk-aaaaaaaa tokens_per_day=9\n")
    statuses = []
    for _ in range(2):
        with serve_engine(engine_of(), gateway_config(file, [], "refuse", [])) as served:
            with served.http(headers={"authorization": "Bearer sk-aaaaaaaa"}) as alice:
                answer = alice.post("/v1/completions", json={**OK, "prompt": "The ", "max_tokens": 5})
            statuses.append(answer.status_code)
    assert statuses == [200, 429]


def test_a_gateway_speaks_https_where_it_has_a_certificate(engine_of: Any, tmp_path: Path) -> None:
    files = make_certificate(tmp_path, days_left=1)
    config = gateway_config(None, [], "refuse", [], tls_cert=files.certificate, tls_key=files.key)
    with serve_engine(engine_of(), config) as served:
        assert served.url.startswith("https://")
        trusted = ssl.create_default_context(cafile=files.certificate)
        with served.http(verify=trusted) as client:
            with client.stream("POST", "/v1/completions", json={**OK, "stream": True}) as stream:
                assert list(stream.iter_lines())[-2] == "data: [DONE]"
            assert client.get("/nope").json()["error"]["code"] == "unknown_url"
    with pytest.raises(UserError, match="go together"):
        gateway_config(None, [], "refuse", [], tls_cert=files.certificate)


def test_a_forwarded_address_does_not_evade_the_rate(engine_of: Any) -> None:
    config = GatewayConfig(limits=GatewayLimits(requests_per_minute=2))
    with serve_engine(engine_of(), config) as served, served.http() as client:
        answers = [
            client.get("/v1/models", headers={"x-forwarded-for": f"10.0.{i}.1"}).status_code for i in range(3)
        ]
        assert answers == [200, 200, 429]


@pytest.mark.parametrize("route", ["embeddings", "messages"])
def test_routes_of_other_servers_are_a_404_that_says_so(served: Served, route: str) -> None:
    with served.http() as client:
        answer = client.post(f"/v1/{route}", json={"model": "tiny", "input": "x"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_url")


def test_head_is_answered_as_get_without_a_body(served: Served) -> None:
    with served.http() as client:
        for path in ("/healthz", "/readyz", "/v1/models", "/metrics"):
            answer = client.head(path)
            assert answer.status_code == 200
            assert answer.content == b""
        assert client.head("/v1/completions").status_code == 405


@pytest.mark.parametrize(
    ("route", "asked"),
    [
        ("completions", {"prompt": "x", "max_tokens": 16384}),
        ("responses", {"input": "x", "max_output_tokens": 16384}),
    ],
)
def test_a_stream_that_a_stop_cuts_off_ends_with_an_error_event(
    engine_of: Any, monkeypatch: pytest.MonkeyPatch, route: str, asked: dict[str, Any]
) -> None:
    monkeypatch.setattr(gateway_main, "SHUTDOWN_SECONDS", 0.2)
    body = {"model": "tiny", "mode": "ar", "stream": True, **asked}
    with contextlib.ExitStack() as reading:
        with serve_engine(engine_of()) as served:
            client = reading.enter_context(served.http())
            stream = reading.enter_context(client.stream("POST", f"/v1/{route}", json=body))
            events = (
                line.removeprefix("data: ") for line in stream.iter_lines() if line.startswith("data: ")
            )
            assert "error" not in json.loads(next(events))
        # Told to stop while the answer is under way.
        last = json.loads(list(events)[-1])
    assert last.get("error", last)["code"] == "service_unavailable"
    assert "stopping" in last.get("error", last)["message"]


def test_an_answer_that_a_stop_cuts_off_is_a_503(engine_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_main, "SHUTDOWN_SECONDS", 0.2)
    body = {"model": "tiny", "prompt": "x", "max_tokens": 16384, "mode": "ar"}
    with ThreadPoolExecutor(1) as waiting, contextlib.ExitStack() as asking:
        with serve_engine(engine_of()) as served:
            client = asking.enter_context(served.http())
            answer = waiting.submit(client.post, "/v1/completions", json=body)
            until("it is being written", lambda: served.metric("blocktrain_gateway_active_generations") == 1)
        refusal = answer.result()
    assert (refusal.status_code, refusal.json()["error"]["code"]) == (503, "service_unavailable")
