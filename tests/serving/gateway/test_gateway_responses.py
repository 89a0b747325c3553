"""`/v1/responses` as the official client asks for it: the text of chat, in events and shapes of its own."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai.types.responses import Response

from blocktrain.serving.gateway.app import GatewayConfig

from .conftest import Served, serve_engine

CHAT: list[Any] = [{"role": "system", "content": "Help."}, {"role": "user", "content": "What is a list?"}]
ENDING = "e"
"""A letter that soon comes, so that a text is complete."""


def respond(client: openai.OpenAI, *, ours: dict[str, Any] | None = None, **fields: Any) -> Any:
    settings = {"input": "What is a list?", "instructions": "Help.", "max_output_tokens": 24, **fields}
    return client.responses.create(model="tiny", extra_body={"seed": 3, **(ours or {})}, **settings)


def chat_text(client: openai.OpenAI, **fields: Any) -> str:
    answer: Any = client.chat.completions.create(
        model="tiny", max_tokens=24, seed=3, **{"messages": CHAT, **fields}
    )
    text: str = answer.choices[0].message.content
    return text


def test_a_response_has_the_text_of_chat(client: openai.OpenAI) -> None:
    answer = respond(client)
    assert answer.output_text == chat_text(client)
    # The length ended it, and this API calls that incomplete.
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.id.startswith("resp_")
    usage = answer.usage
    assert (usage.output_tokens, usage.total_tokens) == (24, usage.input_tokens + 24)
    assert usage.model_extra["blocktrain"]["mode"] == "verify"
    # Every field is one that the client knows, of the type that it expects.
    assert Response.model_validate(answer.model_dump(warnings="error")).output == answer.output


def test_earlier_answers_come_back_as_they_were(client: openai.OpenAI) -> None:
    first = respond(client, input=[CHAT[1]], max_output_tokens=6)
    parts = [{"type": "input_text", "text": "And "}, {"type": "input_text", "text": "a set?"}]
    again = {"role": "user", "content": parts, "type": "message"}
    found = respond(client, input=[CHAT[1], *(item.to_dict() for item in first.output), again])
    earlier = {"role": "assistant", "content": first.output_text}
    told = [*CHAT, earlier, {"role": "user", "content": "And a set?"}]
    assert found.output_text == chat_text(client, messages=told)


def test_a_stream_has_the_events_of_the_api(client: openai.OpenAI) -> None:
    whole = respond(client, ours={"stop": ENDING})
    events = list(respond(client, ours={"stop": ENDING}, stream=True))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].response.status == "in_progress"
    assert "".join(event.delta for event in events[4:-4]) == whole.output_text == events[-4].text
    last = events[-1].response
    assert (last.status, last.output[0].content, last.usage.output_tokens) == (
        "completed",
        whole.output[0].content,
        whole.usage.output_tokens,
    )
    assert [event.type for event in respond(client, stream=True)][-1] == "response.incomplete"


def test_the_clients_stream_helper_works(client: openai.OpenAI) -> None:
    body = {"seed": 3, "stop": ENDING}
    with client.responses.stream(model="tiny", input="What is a list?", extra_body=body) as stream:
        for _ in stream:
            pass
        final = stream.get_final_response()
    assert final.output_text
    assert final.output_text == respond(client, instructions=None, ours={"stop": ENDING}).output_text


def test_logprobs_come_where_they_are_asked_for(client: openai.OpenAI) -> None:
    assert respond(client).output[0].content[0].logprobs == []
    fields: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    rows = respond(client, **fields).output[0].content[0].logprobs
    assert len(rows) == 24
    assert all(len(row.top_logprobs) == 2 for row in rows)
    # Agents ask for it with every request; there is no reasoning to include.
    assert respond(client, include=["reasoning.encrypted_content"]).output[0].content[0].logprobs == []
    deltas = [event for event in respond(client, stream=True, **fields) if event.type.endswith("text.delta")]
    assert [row.logprob for event in deltas for row in event.logprobs] == [row.logprob for row in rows]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "nothing is stored"),
        ({"background": True}, "background", "while its client waits"),
        ({"tools": [{"type": "web_search"}]}, "tools", "calls no tools"),
        ({"text": {"format": {"type": "json_object"}}}, "text", "constrained"),
        ({"input": []}, "input", "expected a string, or a list of messages"),
        ({"input": "x" * 2000}, "input", "maximum context length"),
        ({"input": "x" * 2000, "truncation": "disabled"}, "input", "maximum context length"),
        ({"max_output_tokens": 10**9}, "max_output_tokens", "max_output_tokens must be at most"),
        ({"top_logprobs": 21}, "top_logprobs", "at most 20 log-probs"),
        ({"include": ["message.output_text.logits"]}, "include", "message.output_text.logprobs"),
        ({"colour": "red"}, "colour", "unrecognized"),
    ],
)
def test_what_is_not_offered_is_refused_by_name(
    client: openai.OpenAI, fields: dict[str, Any], param: str, words: str
) -> None:
    known = {name: value for name, value in fields.items() if name != "colour"}
    with pytest.raises(openai.BadRequestError, match=words) as refusal:
        respond(client, ours={name: value for name, value in fields.items() if name == "colour"}, **known)
    assert refusal.value.param == param


def test_a_long_input_slides_where_truncation_is_automatic(client: openai.OpenAI) -> None:
    answer = respond(client, input="x" * 2000, truncation="auto", max_output_tokens=4)
    assert (answer.truncation, answer.usage.output_tokens) == ("auto", 4)


def test_truncation_is_told_as_the_gateway_does_it(engine_of: Any) -> None:
    sliding = GatewayConfig(overflow="slide")
    with serve_engine(engine_of(), sliding) as served, served.openai() as client:
        assert respond(client, input="x" * 2000, max_output_tokens=1).truncation == "auto"
        assert respond(client, truncation="disabled", max_output_tokens=1).truncation == "disabled"


def test_wishes_about_tools_and_length_are_named_as_ignored(served: Served) -> None:
    sent = {"tool_choice": "auto", "max_tool_calls": 2, "text": {"verbosity": "low"}, "user": "me"}
    with served.http() as http:
        body = {"model": "tiny", "input": "x", "max_output_tokens": 1, **sent}
        answer = http.post("/v1/responses", json=body)
        named = set(answer.headers["x-blocktrain-ignored"].split(","))
        assert named == {"tool_choice", "max_tool_calls", "text.verbosity", "user"}
        chat = {"model": "tiny", "messages": CHAT, "max_tokens": 1, "tool_choice": "none"}
        answer = http.post("/v1/chat/completions", json=chat)
        assert answer.headers["x-blocktrain-ignored"] == "tool_choice"
