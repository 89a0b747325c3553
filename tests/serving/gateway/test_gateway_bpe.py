"""A model of BPE tokens behind the gateway: text, counts and scores as of any other."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import tokenizers
import torch

from blocktrain.config import DataConfig
from blocktrain.data.bpe import END_OF_DOCUMENT, FileTokenizer, train_bpe
from blocktrain.data.corpora import builtin_text
from blocktrain.data.prepare import PrepareOptions, prepare
from blocktrain.model.generation import LocalModel, generate
from blocktrain.serving.engine.local import LocalEngine
from blocktrain.serving.engine.requests import Chunk, GenerationRequest
from blocktrain.serving.gateway.choices import Choice, ChoiceWriter
from blocktrain.training.checkpoint import UNKNOWN_TEXT, load_checkpoint
from blocktrain.training.evaluation import Evaluator
from blocktrain.training.exchange import export_checkpoint, import_checkpoint
from tests.serving.conftest import train_tiny

from .conftest import serve_engine, served_by, stages

PROMPT = "The naïve 日本語 function returns "


@pytest.fixture(scope="module")
def bpe_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Few merges: characters of three bytes are three tokens, so that streams cut through them."""
    folder = tmp_path_factory.mktemp("bpe")
    texts = builtin_text()[:200_000].decode("utf-8", "ignore")
    documents = [f"{texts[at : at + 700]} naïve café 日本語 €" for at in range(0, len(texts), 700)]
    lines = "".join(json.dumps({"text": document}) + "\n" for document in documents)
    (folder / "texts.jsonl").write_text(lines)
    (folder / "tokenizer.json").write_bytes(train_bpe([texts], 400))
    options = PrepareOptions(
        sources=(str(folder / "texts.jsonl"),),
        tokenizer=str(folder / "tokenizer.json"),
        held_out=0.05,
        pooling=0.1,
    )
    prepare(options, folder / "set", processes=1, watch=lambda *_: None)
    return train_tiny(folder / "run", steps=12, data=DataConfig(dataset=str(folder / "set")))


@pytest.fixture(scope="module")
def tokenizer(bpe_checkpoint: Path) -> FileTokenizer:
    return FileTokenizer.open(bpe_checkpoint / "tokenizer.json")


@pytest.fixture(scope="module")
def bpe_client(bpe_checkpoint: Path) -> Iterator[openai.OpenAI]:
    """Three stages over TCP."""
    with stages(bpe_checkpoint, [0], [1], [2]) as running:
        addresses = [stage.address for stage in running]
        with served_by(bpe_checkpoint, addresses) as served, served.openai() as client:
            yield client


def complete(client: openai.OpenAI, prompt: Any = PROMPT, **fields: Any) -> Any:
    extra = {name: fields.pop(name) for name in ("mode", "draft_tokens") if name in fields}
    settings = {"max_tokens": 32, "seed": 7, **fields}
    return client.completions.create(model="tiny", prompt=prompt, extra_body=extra, **settings)


def local_tokens(checkpoint: Path, tokenizer: FileTokenizer, count: int, **sampling: Any) -> list[int]:
    loaded = load_checkpoint(checkpoint, torch.device("cpu"))
    model = LocalModel(loaded.objective, loaded.blocks, loaded.codebook_VD, loaded.pooling)
    prompt = tokenizer.encode(PROMPT.encode()).tolist()
    found = list(generate(model, prompt, max_tokens=count, **sampling))
    return found[: found.index(tokenizer.end)] if tokenizer.end in found else found


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_served_text_is_the_local_text_with_and_without_drafts(
    bpe_client: openai.OpenAI, bpe_checkpoint: Path, tokenizer: FileTokenizer, temperature: float
) -> None:
    expected = local_tokens(bpe_checkpoint, tokenizer, 32, seed=7, temperature=temperature)
    text = tokenizer.decode(expected).decode("utf-8", "replace")
    for settings in ({"mode": "ar"}, {"mode": "verify"}, {"draft_tokens": 1}, {"draft_tokens": 9}):
        answer = complete(bpe_client, temperature=temperature, **settings)
        assert answer.choices[0].text == text
        assert answer.usage.completion_tokens == len(expected)


def test_drafts_save_traversals(bpe_client: openai.OpenAI) -> None:
    costs = [
        complete(bpe_client, mode=mode, temperature=0, max_tokens=48).usage.model_extra["blocktrain"]
        for mode in ("ar", "verify")
    ]
    assert costs[1]["traversals"] < costs[0]["traversals"]


def test_usage_counts_tokens_and_bytes(
    bpe_client: openai.OpenAI, bpe_checkpoint: Path, tokenizer: FileTokenizer
) -> None:
    answer = complete(bpe_client, temperature=0.9, max_tokens=20)
    assert answer.usage.prompt_tokens == len(tokenizer.encode(PROMPT.encode())) < len(PROMPT.encode())
    assert answer.usage.completion_tokens == 20
    text_bytes = answer.usage.model_extra["blocktrain"]["text_bytes"]
    generated = local_tokens(bpe_checkpoint, tokenizer, 20, seed=7, temperature=0.9)
    assert text_bytes == len(tokenizer.decode(generated)) > 20
    ids = tokenizer.encode(PROMPT.encode()).tolist()
    assert complete(bpe_client, ids, temperature=0.9, max_tokens=20).choices[0].text == answer.choices[0].text


def test_a_stream_is_whole_characters_and_adds_up_to_the_answer(
    bpe_client: openai.OpenAI, tokenizer: FileTokenizer
) -> None:
    """Hot enough that bytes of characters come alone: what is no UTF-8 is the same U+FFFD either way."""
    for seed in range(2):
        for mode in ("ar", "verify"):
            settings = {"mode": mode, "seed": seed, "temperature": 1.6, "max_tokens": 40}
            whole = complete(bpe_client, **settings).choices[0]
            pieces, reason = [], None
            for event in complete(bpe_client, stream=True, **settings):
                pieces.append(event.choices[0].text)
                reason = event.choices[0].finish_reason or reason
            assert "".join(pieces) == whole.text
            assert reason == whole.finish_reason


def test_echo_gives_back_a_prompt_whose_characters_are_cut_by_tokens(
    bpe_client: openai.OpenAI, tokenizer: FileTokenizer
) -> None:
    cut = [token for token in tokenizer.encode(PROMPT.encode()) if len(tokenizer.decode([token])) == 1]
    assert any(tokenizer.decode([token])[0] >= 0x80 for token in cut), "the tokenizer knows all of it"
    assert complete(bpe_client, echo=True, max_tokens=3).choices[0].text.startswith(PROMPT)


def test_a_stop_sequence_may_begin_and_end_inside_tokens(
    bpe_client: openai.OpenAI, bpe_checkpoint: Path, tokenizer: FileTokenizer
) -> None:
    hot = {"seed": 7, "temperature": 1.6}
    pieces = [tokenizer.decode([token]) for token in local_tokens(bpe_checkpoint, tokenizer, 40, **hot)]
    text = b"".join(pieces)
    # From the last byte of one token to the first of the next, both of several plain letters.
    pairs = [(a, b) for a, b in pairwise(pieces) if min(len(a), len(b)) > 1 and (a + b).isascii()]
    stops = [(a[-1:] + b[:1]).decode() for a, b in pairs][:3]
    assert stops
    for stop in stops:
        for draft_tokens in (0, 6):
            settings = {"max_tokens": 40, "stop": [stop, "never"], "draft_tokens": draft_tokens, **hot}
            choice = complete(bpe_client, **settings).choices[0]
            assert choice.text == text[: text.index(stop.encode())].decode("utf-8", "replace")
            assert choice.finish_reason == "stop"


def test_logprobs_name_tokens_that_add_up_to_the_text(
    bpe_client: openai.OpenAI, tokenizer: FileTokenizer
) -> None:
    for mode in ("ar", "verify"):
        choice = complete(bpe_client, mode=mode, temperature=0, logprobs=3, max_tokens=24).choices[0]
        scores = choice.logprobs
        assert len(scores.tokens) == len(scores.token_logprobs) == 24
        assert "".join(scores.tokens) == choice.text
        offsets = np.cumsum([0, *map(len, scores.tokens)])[:-1].tolist()
        assert scores.text_offset == [len(PROMPT) + at for at in offsets] or scores.text_offset == offsets
        for token, score, top in zip(scores.tokens, scores.token_logprobs, scores.top_logprobs, strict=True):
            assert score == pytest.approx(max(top.values()), abs=1e-6), "greedy takes the likeliest"
            assert token in top


def test_echoed_scores_are_the_evaluation_s_loss(
    bpe_client: openai.OpenAI, bpe_checkpoint: Path, tokenizer: FileTokenizer
) -> None:
    text = "If the argument is not given, the naïve value is returned. "
    choice = complete(bpe_client, text, echo=True, max_tokens=0, logprobs=1).choices[0]
    assert choice.logprobs.token_logprobs[0] is None
    served = -math.fsum(choice.logprobs.token_logprobs[1:])
    loaded = load_checkpoint(bpe_checkpoint, torch.device("cpu"))
    evaluator = Evaluator(loaded.objective, loaded.codebook_VD, loaded.recipe.evaluation, seed=0)
    tokens = tokenizer.encode(text.encode())
    found = evaluator.score(loaded.blocks, loaded.pooling, tokens, euler=False).consensus.ce
    assert served / (len(tokens) - 1) == pytest.approx(found, abs=1e-4)


def test_the_end_of_a_document_ends_the_answer(tokenizer: FileTokenizer) -> None:
    """Wherever drafts put it in a chunk, and in front of the last token too."""
    assert tokenizer.end is not None
    words = tokenizer.encode(b"returns the end")
    request = GenerationRequest([1], max_tokens=len(words) + 5)
    for cut in range(len(words) + 1):
        writer = ChoiceWriter(Choice(0, request), tokenizer)
        pieces = [writer.add(Chunk([token])) for token in words[:cut].tolist()]
        pieces.append(writer.add(Chunk([*words[cut:].tolist(), tokenizer.end, 5, 6])))
        assert "".join(piece.text for piece in pieces) == "returns the end"
        assert [piece.finish_reason for piece in pieces] == [None] * cut + ["stop"]
        assert writer.stream.kept_tokens == len(words)
        assert writer.text_bytes == len("returns the end")


def test_an_exported_model_takes_its_tokenizer_along_and_comes_back(
    bpe_checkpoint: Path, tokenizer: FileTokenizer, tmp_path: Path
) -> None:
    export_checkpoint(bpe_checkpoint, tmp_path / "exported", "# a card\n")
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "exported" / "tokenizer.json"))
    assert library.encode(PROMPT).ids == tokenizer.encode(PROMPT.encode()).tolist()
    told = json.loads((tmp_path / "exported" / "tokenizer_config.json").read_text())
    assert told["eos_token"] == END_OF_DOCUMENT
    import_checkpoint(tmp_path / "exported", tmp_path / "back")
    first, second = (
        load_checkpoint(path, torch.device("cpu")) for path in (bpe_checkpoint, tmp_path / "back")
    )
    assert second.tokenizer.name == first.tokenizer.name
    for one, other in zip(first.blocks, second.blocks, strict=True):
        assert all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))


def test_a_client_may_leave_out_the_token_in_front_of_a_text(
    bpe_checkpoint: Path, tokenizer: FileTokenizer, tmp_path: Path
) -> None:
    """As of an imported model: a text that is not known here, and a template in the tokenizer."""
    shutil.copytree(bpe_checkpoint, tmp_path / "tiny")
    with_template = tokenizers.Tokenizer.from_buffer(tokenizer.content)
    with_template.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{END_OF_DOCUMENT} $A", special_tokens=[(END_OF_DOCUMENT, tokenizer.end)]
    )
    content = with_template.to_str().encode()
    (tmp_path / "tiny" / "tokenizer.json").write_bytes(content)
    config = json.loads((tmp_path / "tiny" / "config.json").read_text())
    config["corpus_sha256"] = UNKNOWN_TEXT
    config["tokenizer"]["sha256"] = hashlib.sha256(content).hexdigest()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(config))

    plain = tokenizer.encode(PROMPT.encode()).tolist()
    with serve_engine(LocalEngine(tmp_path / "tiny")) as served, served.http() as http:
        name = http.get("/v1/models").json()["data"][0]["id"]
        wishes: list[tuple[dict[str, bool], list[Any]]] = [
            ({}, [tokenizer.end, *plain]),
            ({"add_special_tokens": True}, [tokenizer.end, *plain]),
            ({"add_special_tokens": False}, plain),
        ]
        for wish, expected in wishes:
            assert http.post("/tokenize", json={"prompt": PROMPT, **wish}).json()["tokens"] == expected
            body = {"model": name, "prompt": PROMPT, "max_tokens": 1, **wish}
            answer = http.post("/v1/completions", json=body)
            assert answer.json()["usage"]["prompt_tokens"] == len(expected)
            assert "x-blocktrain-ignored" not in answer.headers
