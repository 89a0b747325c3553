"""Writes a Hugging Face tokenizer whose token ids are bytes, for lm-eval against a gateway.

Plain JSON, so that nothing but Python is needed here. lm-eval puts its end-of-text token in front of texts
that have no context; a byte model knows none, so a line feed stands for it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

LINE_FEED = 10


def byte_letters() -> list[str]:
    """The letter that byte-level BPE writes for each byte: itself where printable, U+0100 on elsewhere."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def tokenizer_json() -> dict[str, object]:
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    vocabulary = {letter: byte for byte, letter in enumerate(byte_letters())}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--context", type=int, required=True, help="the model's context in tokens")
    arguments = parser.parse_args()
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": byte_letters()[LINE_FEED],
        "model_max_length": arguments.context,
        "clean_up_tokenization_spaces": False,
    }
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for name, content in (("tokenizer.json", tokenizer_json()), ("tokenizer_config.json", config)):
        (arguments.folder / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


if __name__ == "__main__":
    main()
