"""What the page of a real running swarm shows, and that everybody can use it."""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect

from tests.dashboard.conftest import REFERENCE
from tests.dashboard.kit import WAIT_MS, Watched, watched
from tests.end_to_end.swarm_kit import Coordinator

CONTRASTS = """() => {
  const parse = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
  const channel = (value) => (value /= 255) <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  const luminance = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const ground = (node) => {
    for (let at = node; at !== null; at = at.parentElement) {
      const colour = parse(getComputedStyle(at).backgroundColor);
      if (colour.length === 3 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  const poor = [];
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
    if (!own || !node.checkVisibility() || node.closest(".unseen, noscript")) continue;
    const style = getComputedStyle(node);
    const colour = parse(node instanceof SVGElement ? style.fill : style.color);
    const [high, low] = [luminance(colour), luminance(ground(node))].sort((a, b) => b - a);
    const contrast = (high + 0.05) / (low + 0.05);
    if (contrast < 4.5) poor.push(`${node.tagName}.${node.className} ${node.textContent}: ${contrast}`);
  }
  return poor;
}"""


BOXES = """(selector) => [...document.querySelectorAll(selector)].map((one) => {
  const { x, y, bottom } = one.getBoundingClientRect();
  return { x, y, bottom };
})"""

# In one go: between two questions the page may have moved on.
COUNTS = """() => {
  const number = (node) => Number(node.textContent.match(/\\d+/)[0]);
  const bar = {};
  for (const part of document.querySelectorAll("#participation-parts li")) {
    bar[part.children[1].textContent] = number(part.lastElementChild);
  }
  const list = { "on time": 0, late: 0, unused: 0, refused: 0 };
  for (const row of document.querySelectorAll("#worker-rows > tr")) {
    for (const part of row.children[4].textContent.split(", ")) {
      const [, count, word] = part.match(/^(\\d+) (.+)$/);
      list[word] += Number(count);
    }
  }
  const tile = number(document.querySelector("#figures > div:nth-child(3) .note"));
  return { tile, bar, list, share: number(document.getElementById("participation")) };
}"""


@pytest.fixture(scope="module")
def shown(browser: Browser, swarm: Coordinator) -> Iterator[Watched]:
    """One page for all tests that read and change nothing: loading it takes 2 s of processor time."""
    with watched(browser, swarm.url) as found:
        yield found
        found.fine()


def number(text: str) -> float:
    found = re.search(r"[\d.]+", text)
    assert found is not None, text
    return float(found[0])


def test_every_part_of_the_page_has_real_values(shown: Watched, swarm: Coordinator) -> None:
    shown.page.locator("#chart polyline.composed").wait_for(timeout=WAIT_MS)  # held-out scores are there
    status = swarm.status()
    assert shown.text("#name") == "tiny"
    assert status.run_id[:8] in shown.text("#subtitle")
    assert shown.text("#run-state") == "training"
    assert shown.page.locator("#block-map > li").count() == 2
    assert number(shown.text("#block-map > li:first-child .version")) >= 2
    assert re.search(r"arrivals|begins with", shown.text("#block-map > li:first-child .reason"))
    assert "ago" in shown.text("#block-map > li:first-child .age")
    assert 0 < number(shown.text("#block-map > li:first-child .loss")) < 6
    assert 0 < number(shown.text("#figures > div:nth-child(1) .value")) < 6
    assert f"end to end {REFERENCE:.3f}" in shown.text("#figures > div:nth-child(1) .note")
    assert number(shown.text("#participation")) > 0
    assert "of age 0" in shown.text("#ages")
    assert number(shown.text("#traffic-bars > div:nth-child(2) .value")) > 0
    assert number(shown.text("#ledger-length")) >= 10
    assert re.fullmatch("[0-9a-f]{64}", shown.text("#ledger-head"))
    assert shown.text("#ledger-key") == swarm.client().run().coordinator_key


def test_the_loss_stands_beside_its_references_in_picture_and_table(page: Watched) -> None:
    page.page.locator("#chart polyline.composed").wait_for(timeout=WAIT_MS)
    expect(page.page.locator("#chart .line.reference")).to_have_count(1)
    expect(page.page.locator("#chart .line.bigram")).to_have_count(1)
    names = page.page.locator("#legend li span:first-of-type").all_inner_texts()
    assert names == ["composed model", "end to end", "bigram counts", "block 0", "block 1", "training loss"]
    page.page.get_by_text("Show as a table").click()
    table = page.page.get_by_role("region", name="Loss as a table")
    assert table.get_by_role("row", name="end to end").inner_text().split()[3:4] == [f"{REFERENCE:.3f}"]
    heads = table.get_by_role("columnheader").all_inner_texts()
    assert heads == ["After", "Round", "Composed", "Block 0", "Block 1"]


@pytest.mark.parametrize("width", [390, 1440])
def test_names_of_lines_do_not_overlap_and_stay_off_the_axis(
    browser: Browser, swarm: Coordinator, width: int
) -> None:
    with watched(browser, swarm.url, viewport={"width": width, "height": 800}) as page:
        page.page.locator("#chart polyline.composed").wait_for(timeout=WAIT_MS)
        boxes = page.page.evaluate(BOXES, "#chart .line-name")
        axis = min(one["y"] for one in page.page.evaluate(BOXES, "#chart .tick[text-anchor=middle]"))
        assert len(boxes) == 5
        assert max(one["bottom"] for one in boxes) <= axis + 2
        tops = sorted(one["y"] for one in boxes)
        assert all(below - above >= 12 for above, below in zip(tops, tops[1:], strict=False))


def test_losses_of_training_are_drawn_between_the_scores_by_time_and_by_round(page: Watched) -> None:
    page.page.locator("#chart polyline.training").first.wait_for(timeout=WAIT_MS)
    expect(page.page.locator("#chart polyline.training")).to_have_count(2)
    ticks = page.page.locator("#chart .tick[text-anchor=middle]")
    expect(ticks.first).to_have_text("start")
    expect(ticks.nth(1)).to_have_text(re.compile(r"^(\d+ s|[\d.]+ min)$"))
    page.page.get_by_label("by round").check()
    expect(ticks.first).to_have_text("round 0")


def test_tile_list_and_bar_say_the_same(shown: Watched, swarm: Coordinator) -> None:
    told = shown.page.evaluate(COUNTS)
    assert told["tile"] == told["bar"]["refused"]
    assert told["list"] == {key: told["bar"][key] for key in ("on time", "late", "unused", "refused")}
    due = sum(told["bar"].values())
    assert told["share"] == round(100 * told["bar"]["on time"] / due)
    assert number(shown.text("#figures > div:nth-child(5) .value")) == told["share"]


def test_a_reader_learns_how_to_join_what_is_trained_and_on_what_and_takes_the_model(
    shown: Watched, swarm: Coordinator
) -> None:
    assert shown.text("#join-command") == f"blocktrain join {swarm.url}"
    with shown.page.expect_download() as download:
        shown.page.locator("#download").click()
    with tarfile.open(download.value.path()) as archive:
        names = archive.getnames()
    assert {"checkpoint/config.json", "checkpoint/block-01.safetensors"} <= set(names)
    assert "2 blocks of 1 layer, width 64" in shown.text("#recipe")
    assert "text.txt, bytes" in shown.text("#recipe")
    assert "/" not in shown.text("#recipe > div[data-key=Text] dd")
    assert re.search(r"2 × cpu \(\d+ cores?\)", shown.text("#hardware"))
    assert "tokens/s" in shown.text("#hardware")
    assert number(shown.text("#figures > div:nth-child(4) .value")) > 0
    assert re.search(r"about .* left", shown.text("#figures > div:nth-child(2) .note"))
    assert re.match(r"\d+/100000 tiny", shown.page.title())


def test_history_and_contributors_are_shown(shown: Watched) -> None:
    for name in ("round-time", "participation-over-time", "throughput"):
        shown.page.locator(f"#{name} polyline").wait_for(state="attached", timeout=WAIT_MS)
    assert shown.page.locator("#leaders > li").count() == 2
    shares = [number(one) for one in shown.page.locator("#leaders .value").all_inner_texts()]
    assert shares == sorted(shares, reverse=True)
    assert 99 <= sum(shares) <= 101


def test_workers_are_folded_on_a_phone(browser: Browser, swarm: Coordinator) -> None:
    with watched(browser, swarm.url, viewport={"width": 390, "height": 844}) as page:
        row = page.page.locator("#worker-rows > tr", has_text="cellar").first
        expect(row.locator("td").nth(0)).to_be_visible()
        expect(row.locator("td").nth(3)).to_be_hidden()
        row.get_by_role("button").click()
        expect(row.locator("td").nth(3)).to_be_visible()
        page.fine()


def test_workers_are_shown_with_name_work_and_bytes(shown: Watched, swarm: Coordinator) -> None:
    for worker in swarm.status().workers:
        row = shown.page.locator(f"tr[data-key='{worker.worker_id}']")
        assert worker.worker_id[:8] in row.inner_text()
        assert worker.label in row.inner_text()
    row = shown.page.locator("#worker-rows > tr", has_text="cellar")
    expect(row.locator("td").nth(0)).to_contain_text("live")
    expect(row.locator("td").nth(3)).to_have_text(re.compile(r"[1-9]\d* on time"))
    expect(row.locator("td").nth(5)).to_have_text(re.compile(r"[1-9][\d.]* [kM]B"))
    expect(row.locator("td").nth(6)).to_have_text(re.compile(r"[1-9][\d.]* [kM]B"))


def test_everything_comes_from_the_coordinator_itself(browser: Browser, swarm: Coordinator) -> None:
    context = browser.new_context()
    addresses: list[str] = []
    page = context.new_page()
    page.on("request", lambda request: addresses.append(request.url))
    page.goto(swarm.url)
    page.locator("#connection", has_text="Live").wait_for(timeout=WAIT_MS)
    assert f"{swarm.url}/v1/events" in addresses
    assert [one for one in addresses if not one.startswith(f"{swarm.url}/")] == []
    context.close()


@pytest.mark.parametrize("width", [320, 360, 768])
def test_a_narrow_screen_needs_no_sideways_scrolling(
    browser: Browser, swarm: Coordinator, width: int
) -> None:
    with watched(browser, swarm.url, viewport={"width": width, "height": 740}) as page:
        page.page.locator("#chart polyline").first.wait_for(timeout=WAIT_MS)
        page.page.locator("button.disclose", has_text="cellar").click()
        page.page.locator(".details .verdicts li").first.wait_for(timeout=WAIT_MS)
        page.page.get_by_text("What this proves").click()
        assert page.page.evaluate("document.documentElement.scrollWidth") <= width
        page.fine()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_ground(browser: Browser, swarm: Coordinator, scheme: str) -> None:
    with watched(browser, swarm.url, color_scheme=scheme, reduced_motion="reduce") as page:
        page.page.locator("#chart polyline").first.wait_for(timeout=WAIT_MS)
        ground = page.page.evaluate("getComputedStyle(document.body).backgroundColor")
        brightness = sum(map(int, re.findall(r"\d+", ground)[:3])) / 3
        assert brightness < 40 if scheme == "dark" else brightness > 215
        assert page.page.evaluate(CONTRASTS) == []
        page.fine()


def test_the_page_is_used_by_keyboard_alone(page: Watched) -> None:
    page.page.locator("#chart polyline").first.wait_for(timeout=WAIT_MS)
    page.page.keyboard.press("Tab")
    assert page.page.evaluate("document.activeElement.textContent") == "Skip to the content"
    seen = []
    for _ in range(60):
        page.page.keyboard.press("Tab")
        outlined = "getComputedStyle(document.activeElement).outlineStyle"
        name = page.page.evaluate("document.activeElement.id || document.activeElement.className")
        seen.append(name)
        assert page.page.evaluate(outlined) == "solid", f"{name} does not show that it has the focus"
        if name == "chart":
            page.page.keyboard.press("ArrowLeft")
            expect(page.page.locator("#chart-readout")).to_have_text(
                re.compile(r"^After .+, round .+: composed")
            )
        elif name == "disclose" and seen.count("disclose") == 1:
            page.page.keyboard.press("Enter")
            page.page.locator(".details .verdicts li").first.wait_for(timeout=WAIT_MS)
            assert page.page.evaluate("document.activeElement.className") == "disclose"
        elif name == "verify":
            page.page.keyboard.press("Enter")
            expect(page.page.locator("#verify-result")).to_contain_text("hold", timeout=WAIT_MS)
            break
    assert "verify" in seen


def test_a_screen_reader_finds_landmarks_names_and_headings(shown: Watched) -> None:
    found = shown.page
    for landmark in ("banner", "navigation", "main", "contentinfo"):
        expect(found.get_by_role(landmark)).to_have_count(1)
    for name in ("Loss", "Blocks", "Workers", "Latest verdicts", "Traffic and participation", "Ledger"):
        expect(found.get_by_role("region", name=name, exact=True)).to_have_count(1)
    levels = found.evaluate("[...document.querySelectorAll('h1,h2,h3')].map((h) => +h.tagName[1])")
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in zip(levels, levels[1:], strict=False))
    assert found.evaluate("document.getElementById('announcements').getAttribute('aria-live')") == "polite"
    for box in found.get_by_role("button").all() + found.get_by_role("checkbox").all():
        expect(box).to_have_accessible_name(re.compile(r"\S"))
    expect(found.get_by_role("table", name="Workers")).to_have_count(1)
