from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.data.bpe import FileTokenizer, train_bpe
from blocktrain.data.tokenizer import ByteTokenizer
from blocktrain.errors import DataError


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


def test_a_token_with_a_huge_number_is_refused_before_a_table_is_made() -> None:
    described = json.loads(train_bpe(["each token learns alone"], 300))
    described["model"]["vocab"]["zz"] = 2**32 - 1
    with pytest.raises(DataError, match="numbers a token 4294967295; a vocabulary has 16777216 at most"):
        FileTokenizer(json.dumps(described).encode(), "tokenizer.json")
