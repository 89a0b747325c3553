from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from blocktrain.serving.gateway.chat_template import chat_prompt
from blocktrain.serving.gateway.openai_messages import ChatMessage, TextPart
from blocktrain.serving.gateway.text import Offsets, TextStream, token_label

SMALL_TEXTS = st.text(alphabet="abé€😀\n", max_size=24)
STOPS = st.lists(st.text(alphabet="abé€\n", min_size=1, max_size=4), max_size=3)


def cut(data: bytes, places: list[int]) -> list[list[bytes]]:
    """`data` as one-byte tokens, grouped into chunks that end at `places`."""
    ends = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    tokens = [data[i : i + 1] for i in range(len(data))]
    return [tokens[a:b] for a, b in zip(ends, ends[1:], strict=False)]


def shown(chunks: list[list[bytes]], stops: list[str]) -> tuple[str, int, bool]:
    stream = TextStream(stops)
    text = "".join([stream.push(chunk) for chunk in chunks] + [stream.finish()])
    return text, stream.kept_tokens, stream.stopped


@given(SMALL_TEXTS, STOPS, st.lists(st.integers(0, 200), max_size=6))
def test_text_is_the_same_however_the_tokens_are_cut(text: str, stops: list[str], places: list[int]) -> None:
    data = text.encode()
    assert shown(cut(data, places), stops) == shown(cut(data, list(range(len(data)))), stops)


@given(SMALL_TEXTS, STOPS)
def test_nothing_of_a_stop_sequence_is_shown(text: str, stops: list[str]) -> None:
    result, kept, stopped = shown(cut(text.encode(), [3, 5]), stops)
    assert text.startswith(result)
    assert kept == len(result.encode())
    assert not any(stop in result for stop in stops)
    assert stopped == any(stop in text for stop in stops)
    assert stopped or result == text


@given(st.binary(max_size=40), st.lists(st.integers(0, 200), max_size=6))
def test_bytes_that_are_not_text_become_replacement_characters(data: bytes, places: list[int]) -> None:
    assert shown(cut(data, places), [])[0] == data.decode("utf-8", "replace")


def test_half_a_character_is_held_back() -> None:
    stream = TextStream()
    assert [stream.push([byte]) for byte in (b"\xe2", b"\x82", b"\xac", b"!")] == ["", "", "€", "!"]


def test_what_may_become_a_stop_sequence_is_held_back_and_then_shown() -> None:
    stream = TextStream(["\nUser:"])
    assert stream.push([b"a", b"\n", b"U"]) == "a"
    assert stream.push([b"p"]) == "\nUp"
    assert not stream.stopped


def test_a_stop_inside_a_longer_token_counts_only_the_tokens_before_it() -> None:
    stream = TextStream(["stop"])
    assert stream.push([b"one ", b"two st", b"op three"]) == "one two "
    assert (stream.kept_tokens, stream.stopped) == (1, True)


def test_labels_and_offsets_of_parts_of_a_character() -> None:
    tokens = [b"a", b"\xe2", b"\x82", b"\xac", b"b"]
    assert [token_label(token) for token in tokens] == ["a", "bytes:\\xe2", "bytes:\\x82", "bytes:\\xac", "b"]
    offsets = Offsets()
    assert offsets.of(tokens[:2]) + offsets.of(tokens[2:]) == [0, 1, 1, 1, 2]


def test_a_conversation_becomes_plain_text() -> None:
    messages = [
        ChatMessage(role="system", content="Be brief."),
        ChatMessage(role="user", content="Hi\n"),
        ChatMessage(role="assistant", content="Hello."),
        ChatMessage(role="user", content=[TextPart(type="text", text="Bye")]),
    ]
    expected = "Be brief.\n\nUser: Hi\n\nAssistant: Hello.\n\nUser: Bye\n\nAssistant: "
    assert chat_prompt(messages) == expected
