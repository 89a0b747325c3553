from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from blocktrain.errors import RecipeError


@given(st.binary(max_size=300))
def test_bytes_come_back_from_their_tokens(text: bytes) -> None:
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == tokenizer.decode(tokens.tolist()) == text
    assert all(0 <= token < tokenizer.vocabulary for token in tokens)


@given(st.text(max_size=100))
def test_any_unicode_comes_back_from_its_tokens(text: str) -> None:
    tokenizer = ByteTokenizer()
    encoded = text.encode("utf-8", errors="surrogatepass")
    assert tokenizer.decode(tokenizer.encode(encoded)) == encoded


def test_the_byte_tokenizer_is_found_by_its_name() -> None:
    tokenizer: Tokenizer = load_tokenizer("byte")
    assert (tokenizer.name, tokenizer.vocabulary) == ("byte", 256)


def test_an_unknown_tokenizer_is_refused() -> None:
    with pytest.raises(RecipeError, match="known: byte"):
        load_tokenizer("klingon")
