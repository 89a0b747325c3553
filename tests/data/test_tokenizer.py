from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from blocktrain.data.tokenizer import ByteTokenizer


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
