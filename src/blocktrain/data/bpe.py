"""Tokenizers that are a file: a `tokenizer.json` of the `tokenizers` library, or byte-level BPE trained here.

The library is optional: nothing here is needed for the byte tokenizer. A tokenizer is known by the SHA-256 of
its file.

Tokenizers trained here split text into words by WORD_PATTERN, which means the same to Python's `re` and to
the library's engine. So the tokens of a word are remembered in a dictionary and a text becomes a join of
remembered bytes: over three times the library's own speed (benchmarks/data.py), with the same tokens. Other
files go through the library.

Covered: a special token's name inside a document is plain text, never the token. Not covered: a stranger's
tokenizer file whose own pattern never ends; read only files of people you trust.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from blocktrain.data.tokenizer import Tokens, token_dtype
from blocktrain.data.tokenizer_files import byte_letters
from blocktrain.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as LibraryTokenizer

MAX_TOKENIZER_BYTES = 64 << 20
MAX_VOCABULARY = 1 << 24
END_OF_DOCUMENT = "<|endoftext|>"
KNOWN_ENDS = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>")
MAX_REMEMBERED_WORDS = 250_000
"""About 50 MB a process; 40 MB of documentation have 110,000 different words."""
MAX_REMEMBERED_LENGTH = 48

_SPACE = " \t\n\r\f\v"
_LETTER = "A-Za-z\u0080-\U0010ffff"
# Explicit characters and no \s, \w or \p: these differ between regex engines. All that is not ASCII counts as
# a letter, so that words with accents stay whole.
WORD_PATTERN = (
    rf"'(?:[sdmt]|ll|ve|re)| ?[{_LETTER}]+| ?[0-9]{{1,3}}| ?[^{_SPACE}{_LETTER}0-9]+"
    rf"|[ \t\f\v]*[\r\n]+|[{_SPACE}]+(?![^{_SPACE}])|[{_SPACE}]+"
)
_WORDS = re.compile(WORD_PATTERN)


class FileTokenizer:
    """A tokenizer.json. `name` is its hash, so a copy that differs in one byte is another tokenizer."""

    def __init__(self, content: bytes, origin: str) -> None:
        library = _library()
        if len(content) > MAX_TOKENIZER_BYTES:
            raise DataError(
                f"{origin} has {len(content)} bytes; a tokenizer.json has {MAX_TOKENIZER_BYTES} at most"
            )
        try:
            described: dict[str, Any] = json.loads(content)
            self._library: LibraryTokenizer = library.Tokenizer.from_buffer(content)
        except Exception as error:  # the library raises bare Exceptions
            raise DataError(
                f"{origin} is no tokenizer.json: {error}; make one with `data tokenizer train`"
            ) from None
        self._library.no_padding()
        self._library.no_truncation()
        # Without this, a document that spells "<|endoftext|>" would end there.
        self._library.encode_special_tokens = True
        vocabulary = self._library.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise DataError(f"{origin} has an empty vocabulary; make one with `data tokenizer train`")
        self.content, self.vocabulary = content, max(vocabulary.values()) + 1
        # Before the table below: one token numbered 2^32 - 1 would make it 34 GB.
        if self.vocabulary > MAX_VOCABULARY:
            raise DataError(
                f"{origin} numbers a token {self.vocabulary - 1}; a vocabulary has {MAX_VOCABULARY} at most"
            )
        self.sha256 = hashlib.sha256(content).hexdigest()
        self.name = f"sha256:{self.sha256}"
        self.dtype = token_dtype(self.vocabulary)
        added = {str(one.get("content")): one for one in described.get("added_tokens") or ()}
        self.end_text = next((end for end in KNOWN_ENDS if end in added), None)
        self.end = None if self.end_text is None else vocabulary[self.end_text]
        self.separator = tuple(self._plain(["\n\n"])[0]) if self.end is None else (self.end,)
        self._bytes_of = _byte_pieces(described, vocabulary, set(added))
        self._splits_as_we_do = described.get("pre_tokenizer") == _pre_tokenizer_json()
        self._words_seen: dict[str, bytes] = {}
        self.front: Sequence[int] = ()

    @classmethod
    def open(cls, path: Path) -> FileTokenizer:
        return cls(read_tokenizer_file(path), str(path))

    def encode(self, text: bytes) -> Tokens:
        (tokens,) = self.encode_documents([text.decode("utf-8", "replace")])
        front = np.array(self.front, self.dtype).tobytes()
        return np.frombuffer(front + tokens, self.dtype).astype(np.int64)

    def begin_texts(self) -> None:
        """Let `encode` put in front of a text what the file's template does."""
        self.front = self.template_front()

    def template_front(self) -> Sequence[int]:
        """What other programs put in front of a text, as the file says (Llama: <|begin_of_text|>)."""
        (plain,) = self._plain(["a"])
        whole: list[int] = self._library.encode("a", add_special_tokens=True).ids
        starts = (at for at in range(len(whole)) if whole[at : at + len(plain)] == plain)
        return whole[: next(starts, 0)]

    def encode_documents(self, texts: Sequence[str]) -> list[bytes]:
        """Each text's tokens as they lie in a shard: little-endian, no separator."""
        if not self._splits_as_we_do:
            return [np.array(ids, self.dtype).tobytes() for ids in self._plain(texts)]
        # Remembering what lies between two spaces as well (9.5 bytes instead of 4.2) was tried and is slower:
        # 11 % of such pieces are new even after 40 MB.
        words_of = [_WORDS.findall(text) for text in texts]
        seen = self._words_seen
        different: set[str] = set().union(*words_of)
        if len(seen) + len(different) > MAX_REMEMBERED_WORDS:
            seen.clear()  # costs one slow portion in many; the tokens do not depend on it
        new = [word for word in different if word not in seen]
        for word, ids in zip(new, self._plain(new), strict=True):
            seen[word] = np.array(ids, self.dtype).tobytes()
        encoded = [b"".join(map(seen.__getitem__, words)) for words in words_of]
        for word in new:
            if len(word) > MAX_REMEMBERED_LENGTH:
                del seen[word]
        return encoded

    def _plain(self, texts: Sequence[str]) -> list[list[int]]:
        return [one.ids for one in self._library.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, tokens: Iterable[int]) -> bytes:
        """Bytes of the tokens; of a byte-level tokenizer they may end inside a character."""
        if self._bytes_of is None:
            return self._library.decode([int(one) for one in tokens]).encode()
        return b"".join(self._bytes_of[int(one)] for one in tokens)


def read_tokenizer_file(path: Path) -> bytes:
    try:
        if path.stat().st_size > MAX_TOKENIZER_BYTES:
            raise DataError(f"{path} is longer than any tokenizer.json ({MAX_TOKENIZER_BYTES} bytes)")
        return path.read_bytes()
    except OSError as error:
        raise DataError(
            f"cannot read the tokenizer {path}: {error.strerror}; name `byte` or a file"
        ) from None


def train_bpe(texts: Iterable[str], vocabulary: int) -> bytes:
    """The tokenizer.json of a byte-level BPE with `vocabulary` tokens, END_OF_DOCUMENT among them."""
    library = _library()
    if not 257 <= vocabulary <= MAX_VOCABULARY:
        raise DataError(
            f"--vocabulary must be 257 to {MAX_VOCABULARY} (256 bytes and the end of a document), found "
            f"{vocabulary}"
        )
    tokenizer = library.Tokenizer(library.models.BPE())
    split = library.pre_tokenizers.Split(library.Regex(WORD_PATTERN), behavior="isolated")
    byte_level = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = library.pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocabulary,
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[END_OF_DOCUMENT],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return str(tokenizer.to_str()).encode()


def _library() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise DataError(
            "this tokenizer needs the extra: pip install 'blocktrain[data]'; `byte` needs nothing"
        ) from None
    return tokenizers


def _pre_tokenizer_json() -> dict[str, Any]:
    """What the library writes for the splitting of train_bpe."""
    split = {"type": "Split", "pattern": {"Regex": WORD_PATTERN}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [split, level]}


def _byte_pieces(
    described: dict[str, Any], vocabulary: dict[str, int], added: set[str]
) -> list[bytes] | None:
    """The bytes of each token of a byte-level tokenizer, by id; None for tokenizers of another kind."""
    decoder = described.get("decoder") or {}
    kinds = [decoder.get("type"), *(one.get("type") for one in decoder.get("decoders") or ())]
    if "ByteLevel" not in kinds:
        return None
    byte_of = {letter: byte for byte, letter in enumerate(byte_letters())}
    pieces = [b""] * (max(vocabulary.values()) + 1)
    for token, index in vocabulary.items():
        if token not in added and all(letter in byte_of for letter in token):
            pieces[index] = bytes(byte_of[letter] for letter in token)
    return pieces
