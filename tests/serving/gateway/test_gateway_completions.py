from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from blocktrain.model.generation import LocalModel, generate
from blocktrain.training.checkpoint import load_checkpoint
from blocktrain.training.evaluation import Evaluator

from .conftest import Served

PROMPT = "The function returns "


def complete(client: openai.OpenAI, prompt: Any = PROMPT, **fields: Any) -> Any:
    extra = {name: fields.pop(name) for name in ("mode", "draft_tokens", "overflow") if name in fields}
    settings = {"max_tokens": 32, "seed": 7, **fields}
    return client.completions.create(model="tiny", prompt=prompt, extra_body=extra, **settings)


def local_text(checkpoint: Path, prompt: str, max_tokens: int, **sampling: Any) -> str:
    loaded = load_checkpoint(checkpoint, torch.device("cpu"))
    model = LocalModel(loaded.objective, loaded.blocks, loaded.codebook_VD, loaded.pooling)
    tokens = list(generate(model, list(prompt.encode()), max_tokens=max_tokens, **sampling))
    return bytes(tokens).decode("utf-8", "replace")


def test_the_model_is_listed(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.owned_by) == ("tiny", "blocktrain")
    assert client.models.retrieve("tiny") == model


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("mode", ["ar", "verify"])
def test_served_text_is_the_local_text(
    client: openai.OpenAI, checkpoint: Path, mode: str, temperature: float
) -> None:
    answer = complete(client, mode=mode, temperature=temperature)
    expected = local_text(checkpoint, PROMPT, 32, seed=7, temperature=temperature)
    assert answer.choices[0].text == expected
    assert answer.choices[0].finish_reason == "length"


def test_usage_counts_tokens_traversals_and_bytes(served: Served) -> None:
    with served.http() as client:
        body = {
            "model": "tiny",
            "prompt": PROMPT,
            "max_tokens": 32,
            "seed": 7,
            "temperature": 0,
            "mode": "ar",
        }
        answer = client.post("/v1/completions", json=body)
    usage = answer.json()["usage"]
    assert usage["prompt_tokens"] == len(PROMPT)
    assert (usage["completion_tokens"], usage["total_tokens"]) == (32, 32 + len(PROMPT))
    cost = usage["blocktrain"]
    assert cost["text_bytes"] == 32
    assert cost["traversals"] >= 32
    assert cost["bytes_per_traversal"] == pytest.approx(32 / cost["traversals"], abs=1e-3)
    assert answer.headers["x-blocktrain-traversals"] == str(cost["traversals"])
    assert answer.headers["x-blocktrain-mode"] == "ar"
    assert answer.headers["x-blocktrain-seed"] == "7"
    assert answer.headers["x-request-id"] == answer.json()["id"]
    assert "x-blocktrain-degraded" not in answer.headers


def test_verify_takes_fewer_traversals_than_ar(client: openai.OpenAI) -> None:
    costs = {
        mode: complete(client, mode=mode, temperature=0, max_tokens=48).usage.model_extra["blocktrain"]
        for mode in ("ar", "verify")
    }
    assert costs["verify"]["traversals"] < costs["ar"]["traversals"]
    assert costs["verify"]["bytes_per_traversal"] > 1


@pytest.mark.parametrize("draft_tokens", [0, 1, 5, 32])
def test_the_text_does_not_depend_on_the_draft_length(client: openai.OpenAI, draft_tokens: int) -> None:
    assert complete(client, draft_tokens=draft_tokens).choices[0].text == complete(client).choices[0].text


def test_a_seed_reproduces_and_no_seed_does_not(client: openai.OpenAI) -> None:
    assert complete(client).choices[0].text == complete(client).choices[0].text
    texts = {complete(client, seed=None).choices[0].text for _ in range(2)}
    assert len(texts) == 2


def test_a_negative_seed_is_a_seed(client: openai.OpenAI) -> None:
    assert complete(client, seed=-3).choices[0].text == complete(client, seed=-3).choices[0].text


def test_n_choices_differ_and_the_first_is_that_of_n_1(client: openai.OpenAI) -> None:
    answer = complete(client, n=3)
    texts = [choice.text for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert texts[0] == complete(client).choices[0].text
    assert answer.usage.prompt_tokens == len(PROMPT)
    assert answer.usage.completion_tokens == 96


def test_a_list_of_prompts_gives_what_each_alone_gives(client: openai.OpenAI) -> None:
    prompts = ["def ", "class ", "import "]
    together = [choice.text for choice in complete(client, prompts, n=2).choices]
    alone = [choice.text for prompt in prompts for choice in complete(client, prompt, n=2).choices]
    assert together == alone


def test_token_ids_are_bytes(client: openai.OpenAI) -> None:
    expected = complete(client).choices[0].text
    ids = list(PROMPT.encode())
    assert complete(client, ids).choices[0].text == expected
    assert [c.text for c in complete(client, [ids, ids]).choices] == [expected, expected]


def test_token_ids_may_be_bytes_that_are_not_text(client: openai.OpenAI) -> None:
    answer = complete(client, [0xFF, 0xE2, 0x28], max_tokens=4, echo=True)
    assert answer.choices[0].text.startswith("\ufffd\ufffd(")


def test_a_stop_sequence_ends_the_text_wherever_chunks_end(client: openai.OpenAI) -> None:
    whole = complete(client, max_tokens=48, temperature=0).choices[0].text
    for start in range(4, 30, 5):
        stop = whole[start : start + 3]
        expected = whole[: whole.index(stop)]
        for draft_tokens in (0, 3, 8):
            answer = complete(
                client, max_tokens=48, temperature=0, stop=[stop, "never"], draft_tokens=draft_tokens
            )
            assert answer.choices[0].text == expected
            assert answer.choices[0].finish_reason == "stop"
            assert answer.usage.completion_tokens == len(expected.encode())


def test_streamed_stop_shows_nothing_of_the_stop_sequence(client: openai.OpenAI) -> None:
    whole = complete(client, max_tokens=48, temperature=0).choices[0].text
    stop = whole[10:16]
    chunks = list(complete(client, max_tokens=48, temperature=0, stop=stop, stream=True, mode="ar"))
    text = "".join(chunk.choices[0].text for chunk in chunks)
    assert text == whole[: whole.index(stop)]
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_a_stream_has_one_chunk_per_traversal_and_ends_with_done(served: Served) -> None:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 40, "seed": 7, "stream": True}
    body["stream_options"] = {"include_usage": True}
    with served.http() as client, client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["x-blocktrain-mode"] == "verify"
        lines = [line for line in answer.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    *chunks, last = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert last["choices"] == []
    assert all(chunk["usage"] is None for chunk in chunks)
    cost = last["usage"]["blocktrain"]
    # One more for the reason of the end; near ties take a traversal more.
    assert len(chunks) - 1 == pytest.approx(cost["traversals"], abs=2)
    assert chunks[-1]["choices"][0]["text"] == ""
    assert len(chunks) < 40
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + [
        "length"
    ]
    whole = client_text(served, {**body, "stream": False, "stream_options": None})
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole


def client_text(served: Served, body: dict[str, Any]) -> str:
    with served.http() as client:
        return str(client.post("/v1/completions", json=body).json()["choices"][0]["text"])


def test_streamed_choices_interleave_and_give_the_same_texts(client: openai.OpenAI) -> None:
    texts = ["", "", ""]
    for chunk in complete(client, n=3, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in complete(client, n=3).choices]


def test_logprobs_have_openai_shape(client: openai.OpenAI) -> None:
    answer = complete(client, max_tokens=12, logprobs=3, temperature=0)
    choice = answer.choices[0]
    rows = choice.logprobs
    assert (
        len(rows.tokens) == len(rows.token_logprobs) == len(rows.top_logprobs) == len(rows.text_offset) == 12
    )
    assert "".join(rows.tokens) == choice.text
    for token, logprob, top in zip(rows.tokens, rows.token_logprobs, rows.top_logprobs, strict=True):
        assert len(top) == 3
        assert top[token] == logprob == max(top.values())
        assert logprob < 0
    assert complete(client, max_tokens=2, logprobs=0).choices[0].logprobs.top_logprobs is None


def test_echo_gives_the_prompt_back(client: openai.OpenAI) -> None:
    plain = complete(client).choices[0].text
    assert complete(client, echo=True).choices[0].text == PROMPT + plain
    chunks = list(complete(client, echo=True, stream=True))
    assert chunks[0].choices[0].text == PROMPT
    assert "".join(chunk.choices[0].text for chunk in chunks) == PROMPT + plain


def test_echoed_logprobs_cover_prompt_and_text(client: openai.OpenAI) -> None:
    choice = complete(client, max_tokens=5, echo=True, logprobs=1).choices[0]
    rows = choice.logprobs
    assert len(rows.tokens) == len(PROMPT) + 5
    assert (rows.token_logprobs[0], rows.top_logprobs[0]) == (None, None)
    assert all(logprob is not None for logprob in rows.token_logprobs[1:])
    assert rows.text_offset[: len(PROMPT)] == list(range(len(PROMPT)))


def test_no_tokens_at_all_is_an_empty_text(client: openai.OpenAI) -> None:
    answer = complete(client, max_tokens=0)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("", "length")
    assert answer.usage.completion_tokens == 0
    one = complete(client, "x", max_tokens=0, echo=True, logprobs=0).choices[0]
    assert (one.text, one.logprobs.token_logprobs) == ("x", [None])


def test_cross_entropy_through_the_gateway_is_that_of_evaluate(
    client: openai.OpenAI, checkpoint: Path
) -> None:
    text = (Path(__file__).read_text() * 2)[:1500]
    rows = complete(client, text, max_tokens=0, echo=True, logprobs=0).choices[0].logprobs
    through_gateway = -sum(rows.token_logprobs[1:]) / (len(rows.tokens) - 1)
    loaded = load_checkpoint(checkpoint, torch.device("cpu"))
    evaluator = Evaluator(loaded.objective, loaded.codebook_VD, loaded.recipe.evaluation, seed=0)
    tokens = loaded.tokenizer.encode(text.encode())
    evaluated = evaluator.score(loaded.blocks, loaded.pooling, tokens, euler=False).consensus.ce
    assert through_gateway == pytest.approx(evaluated, abs=1e-4)


def test_a_long_prompt_slides_where_asked(client: openai.OpenAI, checkpoint: Path) -> None:
    prompt = "x = [" + "1, " * 60
    answer = complete(client, prompt, overflow="slide", temperature=0)
    assert answer.choices[0].text == local_text(checkpoint, prompt, 32, seed=7, temperature=0)


def test_text_may_grow_beyond_the_context(client: openai.OpenAI, checkpoint: Path) -> None:
    answer = complete(client, max_tokens=150, temperature=0.7)
    assert answer.choices[0].text == local_text(checkpoint, PROMPT, 150, seed=7, temperature=0.7)


def test_top_p_near_zero_is_greedy(client: openai.OpenAI) -> None:
    greedy = complete(client, temperature=0).choices[0].text
    assert complete(client, temperature=1, top_p=1e-9).choices[0].text == greedy


def test_the_asynchronous_client_works(served: Served) -> None:
    import asyncio

    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0) as client:
            stream = await client.completions.create(
                model="tiny", prompt=PROMPT, max_tokens=16, seed=7, stream=True
            )
            return [chunk.choices[0].text async for chunk in stream]

    assert "".join(asyncio.run(ask()))


@pytest.mark.parametrize(("route", "prompt"), [("completions", "prompt"), ("responses", "input")])
def test_the_request_id_is_that_of_the_answer(served: Served, route: str, prompt: str) -> None:
    body = {"model": "tiny", prompt: "x"}
    with served.http() as http:
        whole = http.post(f"/v1/{route}", json=body)
        assert whole.headers["x-request-id"] == whole.json()["id"]
        streamed = http.post(f"/v1/{route}", json={**body, "stream": True})
        assert streamed.headers["x-request-id"] in streamed.text.split("data: ")[1]
        assert http.post(f"/v1/{route}", json={}).headers["x-request-id"].startswith("req-")


def test_probes_answer(served: Served) -> None:
    with served.http() as client:
        assert client.get("/healthz").json() == {"status": "ok"}
        assert client.get("/readyz").json()["ready"] is True
        assert math.isfinite(served.metric("blocktrain_gateway_requests_total"))
        assert "/v1/completions" in client.get("/openapi.json").json()["paths"]
