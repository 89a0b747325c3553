"""The panel of specialised blocks: text by the block that speaks it, inert, hidden where there is none."""

from __future__ import annotations

from typing import Any

from tests.dashboard.kit import Watched

SHOW = """async (speaking) => {
  const { Speaking } = await import("/dashboard/speaking.js");
  new Speaking().update({ speaking });
  const pieces = [...document.querySelectorAll("#speaking-text .piece")];
  return {
    hidden: document.getElementById("speaking").hidden,
    pieces: pieces.map((one) => [one.textContent, one.className, one.title, one.children.length]),
    legend: [...document.querySelectorAll("#speaking-legend li")].map((one) => one.textContent),
  };
}"""


def test_text_is_shown_by_the_block_that_speaks_it(quiet_page: Watched) -> None:
    assert quiet_page.page.locator("#speaking").is_hidden(), "blocks of this run are alike"
    told: list[dict[str, Any]] = [
        {"block": 1, "weight": 0.914, "text": "the token "},
        {"block": 0, "weight": 0.6, "text": "<img src=x onerror=alert(1)>"},
        {"block": 9, "weight": 1.0, "text": "17+4=21;\n"},
    ]
    found = quiet_page.page.evaluate(SHOW, told)
    assert not found["hidden"]
    assert found["pieces"] == [
        ["the token ", "piece series-1", "block 1, 91 % of the say", 0],
        ["<img src=x onerror=alert(1)>", "piece series-0", "block 0, 60 % of the say", 0],
        ["17+4=21;\n", "piece series-1", "block 9, 100 % of the say", 0],
    ]
    assert found["legend"] == ["block 0", "block 1", "block 9"]
    assert quiet_page.page.evaluate(SHOW, [])["hidden"]
    quiet_page.fine()
