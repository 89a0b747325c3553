"""`sweep` through the front door."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from blocktrain.serving.engine.local import LocalEngine

from .conftest import Served, cost_of, serve_engine


@pytest.fixture(scope="module")
def swept(sweep_checkpoint: Path) -> Iterator[Served]:
    with serve_engine(LocalEngine(sweep_checkpoint)) as served:
        yield served


def test_sweep_writes_all_its_bytes_in_one_traversal(swept: Served) -> None:
    with swept.openai() as client:
        (model,) = client.models.list().data
        assert model.model_extra is not None
        assert model.model_extra["modes"] == ["ar", "verify", "sweep"]
        answers = [
            client.completions.create(
                model="swept",
                prompt="The value ",
                max_tokens=40,
                seed=3,
                extra_body={"mode": "sweep", "passes": passes},
            )
            for passes in (1, 4, 4)
        ]
    costs = [cost_of(answer) for answer in answers]
    assert [cost["traversals"] for cost in costs] == [1, 1, 1]
    assert {cost["mode"] for cost in costs} == {"sweep"}
    texts = [answer.choices[0].text for answer in answers]
    assert texts[1] == texts[2] != texts[0]


def test_sweep_streams_a_chunk_for_each_traversal(swept: Served) -> None:
    with swept.openai() as client:
        stream = client.chat.completions.create(
            model="swept",
            messages=[{"role": "user", "content": "Hello"}],
            max_tokens=100,
            stream=True,
            extra_body={"mode": "sweep"},
        )
        choices = [chunk.choices[0] for chunk in stream if chunk.choices]
    # The first chunk has the role, the last the reason for the end and no text: some clients read none there.
    assert 1 <= len([choice for choice in choices if choice.delta.content]) <= 3
    assert [choice.delta.content for choice in choices if choice.finish_reason] == [None]


def test_a_model_not_trained_for_sweep_refuses_it_by_name(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="'tiny' was not trained for mode sweep") as refused:
        client.completions.create(model="tiny", prompt="a", extra_body={"mode": "sweep"})
    assert refused.value.param == "mode"
