from __future__ import annotations

from typing import Any

import openai
import pytest

from blocktrain.serving.gateway.chat_template import STOPS

MESSAGES: list[Any] = [{"role": "system", "content": "Help."}, {"role": "user", "content": "What is a list?"}]


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    settings = {"messages": MESSAGES, "max_tokens": 24, "seed": 3, **fields}
    return client.chat.completions.create(model="tiny", **settings)


def test_an_answer_is_the_continuation_of_the_template(client: openai.OpenAI) -> None:
    answer = chat(client)
    prompt = "Help.\n\nUser: What is a list?\n\nAssistant: "
    plain = client.completions.create(model="tiny", prompt=prompt, max_tokens=24, seed=3, stop=list(STOPS))
    assert answer.choices[0].message.content == plain.choices[0].text
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.object == "chat.completion"


def test_a_streamed_answer_is_the_whole_one(client: openai.OpenAI) -> None:
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:-1])
    text = "".join(chunk.choices[0].delta.content for chunk in chunks[:-2])
    assert text == chat(client).choices[0].message.content
    # As OpenAI does: the role first and without text, the reason for the end last and without any.
    assert chunks[0].choices[0].delta.content == ""
    assert chunks[-2].choices[0].delta.content is None
    assert chunks[-2].choices[0].finish_reason in ("length", "stop")
    assert chunks[-1].usage.completion_tokens == 24


def test_the_clients_stream_helper_works(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="tiny", messages=MESSAGES, max_tokens=16, seed=3) as stream:
        for _ in stream:
            pass
        final = stream.current_completion_snapshot  # the final one is refused where the length ended it
    assert final.choices[0].message.content == chat(client, max_tokens=16).choices[0].message.content


def test_logprobs_have_bytes(client: openai.OpenAI) -> None:
    rows = chat(client, logprobs=True, top_logprobs=2, max_tokens=6).choices[0].logprobs.content
    assert len(rows) == 6
    assert all(len(row.bytes) == 1 and len(row.top_logprobs) == 2 for row in rows)
    assert rows[0].logprob <= rows[0].top_logprobs[0].logprob


def test_choices_and_their_logprobs_are_streamed_as_they_are_answered(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"n": 3, "logprobs": True, "top_logprobs": 2, "max_tokens": 12}
    whole = chat(client, **fields)
    chunks = [chunk.choices[0] for chunk in chat(client, stream=True, **fields)]
    for choice in whole.choices:
        mine = [chunk for chunk in chunks if chunk.index == choice.index]
        assert [chunk.delta.role for chunk in mine] == ["assistant"] + [None] * (len(mine) - 1)
        assert "".join(chunk.delta.content or "" for chunk in mine) == choice.message.content
        rows = [row for chunk in mine if chunk.logprobs for row in chunk.logprobs.content]
        assert [row.token for row in rows] == [row.token for row in choice.logprobs.content]
        # Near and not equal: the last bits depend on which texts shared a pass.
        for row, other in zip(rows, choice.logprobs.content, strict=True):
            assert row.logprob == pytest.approx(other.logprob, abs=1e-5)
            assert [one.token for one in row.top_logprobs] == [one.token for one in other.top_logprobs]
        assert [chunk.finish_reason for chunk in mine if chunk.finish_reason] == [choice.finish_reason]


def test_n_and_the_newer_name_of_max_tokens(client: openai.OpenAI) -> None:
    answer = chat(client, n=2, max_tokens=None, max_completion_tokens=5)
    assert len({choice.message.content for choice in answer.choices}) == 2
    assert answer.usage.completion_tokens == 10


def test_parts_of_text_are_joined(client: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "a list?"}]
    answer = chat(client, messages=[MESSAGES[0], {"role": "user", "content": parts}])
    assert answer.choices[0].message.content == chat(client).choices[0].message.content


def test_a_long_conversation_is_refused_or_slides(client: openai.OpenAI) -> None:
    long = [{"role": "user", "content": "word " * 100}]
    with pytest.raises(openai.BadRequestError) as refusal:
        chat(client, messages=long)
    assert refusal.value.code == "context_length_exceeded"
    assert chat(client, messages=long, extra_body={"overflow": "slide"}).choices
