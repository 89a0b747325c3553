"""Fields that clients and load generators send: supported, or ignored and said so."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import openai
import pytest

from blocktrain.data.tokenizer import ByteTokenizer, Tokens
from blocktrain.serving.gateway.app import LONG_TEXT
from blocktrain.serving.gateway.openai_messages import Ignored

from .conftest import Served, served_by, stages

PROMPT = "The function "
WISHES: list[dict[str, Any]] = [
    {"logit_bias": {"101": -100, "32": 1.5}},
    {"top_k": 5},
    {"min_p": 0.1, "top_p": 0.9},
    {"presence_penalty": 1.2, "frequency_penalty": 0.4},
    {"repetition_penalty": 1.3, "temperature": 0},
]


def write(client: openai.OpenAI, **fields: Any) -> Any:
    return client.completions.create(
        model="tiny", prompt=PROMPT, extra_body={"max_tokens": 40, "seed": 7, **fields}
    )


def test_no_wish_makes_the_text_depend_on_drafts_or_stages(checkpoint: Path, client: openai.OpenAI) -> None:
    plain = write(client).choices[0].text
    with (
        stages(checkpoint, [0], [1, 2]) as running,
        served_by(checkpoint, [stage.address for stage in running]) as served,
        served.openai() as remote,
    ):
        for wish in WISHES:
            whole = write(client, mode="ar", **wish).choices[0].text
            assert whole != plain
            assert write(client, draft_tokens=8, **wish).choices[0].text == whole
            assert write(remote, draft_tokens=8, **wish).choices[0].text == whole


def test_a_bias_forbids_and_forces_tokens(client: openai.OpenAI) -> None:
    forced = write(client, logit_bias={"113": 100}, max_tokens=8)
    assert forced.choices[0].text == "q" * 8
    forbidden = write(client, logit_bias={str(ord("e")): -100, str(ord(" ")): -100}, max_tokens=60)
    assert not set("e ") & set(forbidden.choices[0].text)


def test_one_candidate_is_greedy_and_no_limit_changes_nothing(client: openai.OpenAI) -> None:
    greedy = write(client, temperature=0).choices[0].text
    assert write(client, top_k=1).choices[0].text == greedy
    assert write(client, min_p=1.0).choices[0].text == greedy
    plain = write(client).choices[0].text
    neutral = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0}
    assert write(client, **neutral).choices[0].text == plain


def test_a_penalty_makes_a_greedy_text_repeat_less(client: openai.OpenAI) -> None:
    plain = write(client, temperature=0).choices[0].text
    varied = write(client, temperature=0, frequency_penalty=2.0).choices[0].text
    assert len(set(varied)) > len(set(plain))


def test_stop_sequences_wait_for_min_tokens(client: openai.OpenAI) -> None:
    plain = write(client, temperature=0).choices[0].text
    early = plain[2]
    assert write(client, temperature=0, stop=early).choices[0].text == plain[: plain.index(early)]
    late = write(client, temperature=0, stop=early, min_tokens=20).choices[0].text
    assert late == plain[: plain.find(early, 20) if early in plain[20:] else 40]
    assert write(client, temperature=0, stop=early, min_tokens=20, mode="ar").choices[0].text == late


def test_what_nobody_reads_is_named_in_a_header(served: Served) -> None:
    body = {"model": "tiny", "prompt": "x", "max_tokens": 1, "ignore_eos": True}
    with served.http() as client:
        for sent in ({"cache_prompt": True, "user": "me"}, dict.fromkeys(Ignored.model_fields, 1)):
            answer = client.post("/v1/completions", json={**body, **sent})
            assert answer.status_code == 200, answer.text
            assert set(answer.headers["x-blocktrain-ignored"].split(",")) == set(sent)
        assert "x-blocktrain-ignored" not in client.post("/v1/completions", json=body).headers


def test_usage_comes_with_every_chunk_where_it_is_asked_for(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(
        client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=20, seed=1, stream=True, stream_options=options
        )
    )
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage]
    assert len(counts) == len(chunks)
    assert counts == sorted(counts)
    assert counts[-1] == 20
    assert counts[0] < 20


def test_a_message_comes_back_as_the_client_got_it(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    first = client.chat.completions.create(model="tiny", messages=messages, max_tokens=4)
    returned: Any = {**first.choices[0].message.model_dump(), "annotations": [], "tool_calls": []}
    again = client.chat.completions.create(
        model="tiny", messages=[*messages, returned, {"role": "user", "content": "and"}], max_tokens=4
    )
    assert again.choices


def test_json_is_refused_with_the_reason(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="constrained"):
        client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "hi"}],
            response_format={"type": "json_object"},
        )


def test_texts_and_token_ids_may_be_prompts_of_one_request(client: openai.OpenAI) -> None:
    mixed: Any = ["The ", [84, 104, 101, 32]]
    answer = client.completions.create(model="tiny", prompt=mixed, max_tokens=8, seed=2)
    assert answer.choices[0].text == answer.choices[1].text
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 8


def test_tokens_are_counted_as_a_request_counts_them(served: Served, client: openai.OpenAI) -> None:
    with served.http() as http:
        text = http.post("/tokenize", json={"prompt": "é!", "return_token_strs": True}).json()
        assert text == {
            "count": 3,
            "max_model_len": 96,
            "tokens": [195, 169, 33],
            "token_strs": ["bytes:\\xc3", "bytes:\\xa9", "!"],
        }
        assert http.post("/detokenize", json={"tokens": text["tokens"]}).json() == {"prompt": "é!"}
        messages: list[Any] = [{"role": "user", "content": "What is a list?"}]
        counted = http.post("/tokenize", json={"model": "tiny", "messages": messages}).json()["count"]
        assert http.post("/detokenize", json={"tokens": [256]}).status_code == 400
        assert http.post("/tokenize", json={"model": "other", "prompt": "x"}).status_code == 404
    answer = client.chat.completions.create(model="tiny", messages=messages, max_tokens=1)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == counted


def test_long_texts_are_cut_into_tokens_beside_the_event_loop(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    encode = ByteTokenizer.encode

    def watched(tokenizer: ByteTokenizer, text: bytes) -> Tokens:
        threads.append(threading.current_thread().name)
        return encode(tokenizer, text)

    monkeypatch.setattr(ByteTokenizer, "encode", watched)
    with served.http() as http:
        text = "x" * LONG_TEXT
        assert http.post("/tokenize", json={"prompt": text}).json()["count"] == LONG_TEXT
        answer = http.post("/v1/completions", json={"model": "tiny", "prompt": text})
        assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert len(threads) == 2
    assert "gateway" not in threads


def test_an_answer_may_go_on_where_the_last_message_ends(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "A list "}]
    extra = {"continue_final_message": True, "add_generation_prompt": False}
    answer = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=8, seed=1, extra_body=extra
    )
    plain = client.completions.create(
        model="tiny",
        prompt="User: Hi\n\nAssistant: A list ",
        max_tokens=8,
        seed=1,
        stop=["\nUser:", "\nAssistant:"],
    )
    assert answer.choices[0].message.content == plain.choices[0].text
    with pytest.raises(openai.BadRequestError, match="exclude each other"):
        client.chat.completions.create(
            model="tiny", messages=messages, extra_body={**extra, "add_generation_prompt": True}
        )


def test_a_prompt_that_is_too_long_is_refused_in_openai_s_words(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length is 96 tokens") as refused:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x" * 200}])
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "messages")


def test_the_model_shows_its_template_and_health_has_its_usual_name(served: Served) -> None:
    with served.http() as http:
        card = http.get("/v1/models/tiny").json()
        assert card["chat_template"] == "User: {question}\n\nAssistant: "
        assert (card["max_model_len"], card["tokenizer"]) == (96, "byte")
        assert http.get("/health").status_code == 200
