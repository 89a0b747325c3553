"""A tokenizer as the files that Hugging Face programs read: tokenizer.json and tokenizer_config.json.

Plain JSON. lm-eval puts its end-of-text token in front of texts that have no context; a byte model knows
none, so a line feed stands for it.
"""

from __future__ import annotations

from typing import Any

LINE_FEED = 10
TOKENIZER_CONFIG = "tokenizer_config.json"


def tokenizer_config(context: int, end: str | None = None) -> dict[str, Any]:
    """tokenizer_config.json; `end` is the token that ends a text."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
    }
    return config if end is None else {**config, "eos_token": end}


def byte_letters() -> list[str]:
    """The letter that byte-level BPE writes for each byte: itself where printable, U+0100 on elsewhere."""
    # GPT-2's table, which Hugging Face's ByteLevel has built in: tokenizer.json must name the same letters.
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def byte_tokenizer() -> dict[str, Any]:
    """Byte-level BPE without merges: a token's id is its byte."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "vocab": {letter: byte for byte, letter in enumerate(byte_letters())},
            "merges": [],
        },
    }
