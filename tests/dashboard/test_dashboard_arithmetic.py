"""The page's own hash and canonical JSON agree with the coordinator's, for inputs of every shape."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Iterator

import blake3
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from playwright.sync_api import Browser

from blocktrain.wire.hashing import canonical_json
from tests.coordinator.conftest import served, tiny_recipe
from tests.dashboard.kit import Watched, watched

HASHES = """async (inputs) => {
  const { blake3, fromHex, toHex } = await import("/dashboard/blake3.js");
  return inputs.map((input) => toHex(blake3(fromHex(input))));
}"""
CANONICAL = """async (texts) => {
  const { canonical, parseExact } = await import("/dashboard/canonical.js");
  return texts.map((text) => canonical(parseExact(text)));
}"""
REFUSES = """async (texts) => {
  const { parseExact } = await import("/dashboard/canonical.js");
  return texts.map((text) => { try { parseExact(text); return "read"; } catch (e) { return e.name; } });
}"""
HISTORY = """async (seconds) => {
  const { History } = await import("/dashboard/history.js");
  const reports = [1, 2, 3, 4].map((i) => (
    { closed: i * seconds, seconds, assigned: 1, on_time: 1, late: 0, unused: 0, refused: 0 }
  ));
  new History().update({ created: 0, reports, blocks: [{}] }, 10);
  const picture = document.querySelector("#round-time svg").getBoundingClientRect();
  return [...document.querySelectorAll("#round-time text")].map((one) => (
    { text: one.textContent, left: one.getBoundingClientRect().left - picture.left }
  ));
}"""
FINISHED = """async (behind) => {
  const { Overview } = await import("/dashboard/overview.js");
  const status = await (await fetch("/v1/status")).json();
  const versions = status.blocks.map((block) => block.head_version - behind);
  const now = { finished: true, ended: status.created, references: [], per_token: null };
  status.evaluations = [{ consensus_ce: 2.5, versions }];
  new Overview().update({ status: { ...status, ...now }, workers: [] }, () => status.server_time);
  return document.querySelector("#figures").textContent;
}"""
PER_BYTE = """async (status) => {
  const { perByte } = await import("/dashboard/format.js");
  return perByte(status);
}"""
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@pytest.fixture(scope="module")
def quiet_page(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """One page for all of this file, which asks its scripts and does not look at the rest."""
    with (
        served(tmp_path_factory.mktemp("quiet"), tiny_recipe()) as running,
        watched(browser, running.url) as found,
    ):
        yield found
        found.fine()


def test_hashes_are_those_of_blake3(quiet_page: Watched) -> None:
    generator = random.Random(0)
    lengths = [*range(0, 130, 7), *(1024 * n + more for n in (1, 2, 3, 4, 7, 8) for more in (-1, 0, 1, 64))]
    inputs = [generator.randbytes(length) for length in lengths]
    found = quiet_page.page.evaluate(HASHES, [one.hex() for one in inputs])
    assert found == [blake3.blake3(one).hexdigest() for one in inputs]


def test_floats_are_written_as_python_writes_them(quiet_page: Watched) -> None:
    generator = random.Random(1)
    floats = [
        0.0,
        -0.0,
        1.0,
        0.1,
        1e15,
        1e16,
        123456789012345680.0,
        1e-4,
        1e-5,
        5e-324,
        1.7976931348623157e308,
    ]
    floats += [struct.unpack("<d", generator.randbytes(8))[0] for _ in range(3000)]
    finite = [value for value in floats if abs(value) < float("inf")]
    texts = [json.dumps(value) for value in finite]
    assert quiet_page.page.evaluate(CANONICAL, texts) == texts
    other_notation = [text.replace("e-0", "e-").replace("e+", "E") for text in texts]
    assert quiet_page.page.evaluate(CANONICAL, other_notation) == texts


def test_any_json_has_the_canonical_form_that_python_gives_it(quiet_page: Watched) -> None:
    @given(st.lists(VALUES, max_size=8))
    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    def check(values: list[object]) -> None:
        texts = [json.dumps(value, indent=1, ensure_ascii=False) for value in values]
        assert quiet_page.page.evaluate(CANONICAL, texts) == [
            canonical_json(value).decode() for value in values
        ]

    check()


def test_what_is_no_json_is_refused(quiet_page: Watched) -> None:
    wrong = ["", "{", "[1,]", "{1:2}", "01", "1.", "NaN", '"\n"', "'a'", "[1 2]", '{"a" 1}', "1 2", "[" * 100]
    assert quiet_page.page.evaluate(REFUSES, wrong) == ["SyntaxError"] * len(wrong)


def test_losses_of_a_run_with_tokens_are_shown_per_byte(quiet_page: Watched) -> None:
    scored = {"bytes_per_token": 4.0, "consensus_ce": 6.0, "block_ce": [6.0, 8.0]}
    status = {
        "evaluations": [scored],
        "references": [{"name": "bigram counts", "ce": 10.0}],
        "reports": [{"mean_loss": 8.0}, {"mean_loss": None}],
        "workers": [{"loss": 4.0}],
        "name": "a",
    }
    shown = quiet_page.page.evaluate(PER_BYTE, status)
    assert shown["evaluations"] == [{**scored, "consensus_ce": 1.5, "block_ce": [1.5, 2.0]}]
    assert shown["references"] == [{"name": "bigram counts", "ce": 2.5}]
    assert shown["reports"] == [{"mean_loss": 2.0}, {"mean_loss": None}]
    assert shown["workers"] == [{"loss": 1.0}]
    assert (shown["per_token"], shown["name"]) == (6.0, "a")
    status["evaluations"] = [{**scored, "bytes_per_token": 1.0}]
    assert quiet_page.page.evaluate(PER_BYTE, status) == {**status, "per_token": None}


def test_a_finished_run_says_when_its_last_rounds_are_not_scored_yet(quiet_page: Watched) -> None:
    assert "the last rounds are being scored" in quiet_page.page.evaluate(FINISHED, 1)
    assert "being scored" not in quiet_page.page.evaluate(FINISHED, 0)


def test_round_times_fit_beside_their_picture(quiet_page: Watched) -> None:
    for seconds in (2, 8, 45, 100, 1000, 5000, 90_000):
        labels = quiet_page.page.evaluate(HISTORY, seconds)
        assert len(labels) >= 2
        assert all(one["left"] >= 0 for one in labels), labels
        assert len({one["text"].split()[1] for one in labels}) == 1, labels  # "10 s" above "0 min"
