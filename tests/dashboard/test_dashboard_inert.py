"""Strangers' text stays text, the policy is strict, and Verify tells a broken ledger from a whole one."""

from __future__ import annotations

import re
from pathlib import Path

import httpx2
import pytest
from playwright.sync_api import Browser, expect

from blocktrain.coordinator.http.pages import FOLDER, content_security_policy
from blocktrain.coordinator.operator_notes import Display
from tests.coordinator.conftest import Running
from tests.dashboard.kit import WAIT_MS, Watched, edit_database, watched

HOSTILE = '<img src=x onerror="window.owned=1"><script>window.owned=1</script>\'"&amp;\u202e${7*7}'


def test_text_of_strangers_is_shown_as_it_is_and_does_nothing(
    browser: Browser, quiet: Running, tmp_path: Path
) -> None:
    """The API refuses such text; here it is written past it, as if that had a hole."""
    peer = quiet.peer()
    assignment = peer.lend()
    payload = b"\xff" * peer.run.blocks[assignment.block].payload_bytes
    peer.reveal(peer.commit(assignment, payload), payload)
    worker_id = peer.identity.worker_id
    edit_database(
        tmp_path,
        ("UPDATE workers SET label = ?, device = ?", (HOSTILE, HOSTILE)),
        ("UPDATE updates SET sentence = ?, reason = ?, state = ?", (HOSTILE, HOSTILE, HOSTILE)),
        ("INSERT INTO bans VALUES (?, ?, ?, ?)", (worker_id, HOSTILE, quiet.clock(), quiet.clock() + 1e6)),
    )
    with watched(browser, quiet.url) as page:
        page.page.on("dialog", lambda dialog: page.complaints.append(dialog.message))
        page.page.locator("button.disclose").click()
        page.page.locator(".details .verdicts li").first.wait_for(timeout=WAIT_MS)
        for shown in (
            ".disclose .label",
            ".device",
            "td .why",
            "#verdict-list .sentence",
            ".details .sentence",
        ):
            assert HOSTILE in (page.page.locator(shown).first.text_content() or ""), shown
        assert page.page.locator("main img, main script").count() == 0
        assert page.page.evaluate("window.owned") is None
        assert page.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.fine()


def test_the_page_cannot_turn_a_string_into_markup(browser: Browser, quiet: Running) -> None:
    with watched(browser, quiet.url) as page:
        for deed in (
            "document.body.innerHTML = '<b>x</b>'",
            "document.body.insertAdjacentHTML('beforeend', '<b>x</b>')",
            "document.createElement('script').text = 'window.owned = 1'",
            "document.body.setAttribute('onclick', 'window.owned = 1')",
            "window.setTimeout('window.owned = 1')",
        ):
            refused = page.page.evaluate(
                f"() => {{ try {{ {deed}; return ''; }} catch (e) {{ return e.name; }} }}"
            )
            assert refused == "TypeError", deed
        assert page.page.evaluate("window.owned") is None


def test_the_policy_allows_no_inline_code_and_no_other_origin(quiet: Running) -> None:
    answer = httpx2.get(quiet.url)
    policy = answer.headers["content-security-policy"]
    assert policy == content_security_policy(None)
    assert "unsafe" not in policy
    assert "connect-src 'self';" in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "cross-origin-opener-policy" not in answer.headers, "Chromium's console notes it over plain HTTP"
    assert httpx2.get(f"{quiet.url}/v1/status").headers["x-content-type-options"] == "nosniff"
    with_gateway = content_security_policy(Display(gateway="https://host:8000/llm").gateway_origin)
    assert "connect-src 'self' https://host:8000;" in with_gateway


def test_no_file_of_the_page_has_inline_code_or_another_address() -> None:
    for path in FOLDER.iterdir():
        source = path.read_text()
        addresses = set(re.findall(r"https?://[a-z][\w.-]+", source))
        assert addresses <= {"http://www.w3.org"}, path.name
        for forbidden in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "new Function",
        ):
            assert forbidden not in source, (path.name, forbidden)
    page = (FOLDER / "index.html").read_text()
    assert re.search(r"<[^>]+\s(?:style|on\w+)\s*=", page) is None
    assert re.search(r"<script(?![^>]*\ssrc=)", page) is None
    assert "<style" not in page


@pytest.mark.parametrize("name", ["..%2Fpages.py", "index.html%00", "no-such.js", "%2e%2e%2fapp.py"])
def test_no_other_file_is_served(quiet: Running, name: str) -> None:
    answer = httpx2.get(f"{quiet.url}/dashboard/{name}")
    assert answer.status_code in (404, 405)
    assert answer.json()["error"]["reason"] == "not_found"


def test_files_are_not_sent_again_to_who_has_them(quiet: Running) -> None:
    first = httpx2.get(f"{quiet.url}/dashboard/main.js")
    assert first.headers["content-type"].startswith("text/javascript")
    again = httpx2.get(f"{quiet.url}/dashboard/main.js", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def verify(page: Watched) -> str:
    page.page.locator("#verify").click()
    result = page.page.locator("#verify-result")
    expect(result).to_have_attribute("data-tone", re.compile(r"\w"), timeout=WAIT_MS)
    return result.inner_text()


def test_a_whole_ledger_is_verified_signatures_included(quiet: Running, quiet_page: Watched) -> None:
    peer = quiet.peer()
    peer.deliver(peer.lend())
    quiet.wait_for_version(0, 1)
    first = verify(quiet_page)
    assert first.startswith("8 entries hold")
    assert "Every signature is the coordinator's." in first
    assert "seen before" not in first
    quiet_page.page.reload()
    quiet_page.wait_text("#connection", "Live")
    assert "It continues the 8 entries seen before." in verify(quiet_page)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ("UPDATE ledger SET body = replace(body, '\"test\"', '\"tampered\"') WHERE sequence = 1",
         "the hash of entry 1 (join) does not follow"),
        ("UPDATE ledger SET signature = substr(signature, 3) || '00' WHERE sequence = 2",
         "entry 2 is not signed by the coordinator"),
        ("DELETE FROM ledger WHERE sequence = 1", "entry 1 calls itself 2"),
        ("UPDATE run SET ledger_length = ledger_length + 1", "entries, and shows"),
    ],
)  # fmt: skip
def test_an_altered_ledger_is_told_from_a_whole_one(
    browser: Browser, quiet: Running, tmp_path: Path, change: str, complaint: str
) -> None:
    peer = quiet.peer()
    peer.deliver(peer.lend())
    quiet.wait_for_version(0, 1)
    edit_database(tmp_path, (change, ()))
    with watched(browser, quiet.url) as page:
        found = verify(page)
        assert found.startswith("The ledger does not hold: ")
        assert complaint in found
        page.fine()


def test_a_ledger_rewritten_since_the_last_visit_is_noticed(
    browser: Browser, quiet: Running, tmp_path: Path
) -> None:
    quiet.peer()
    with watched(browser, quiet.url) as page:
        assert "entries hold" in verify(page)
        previous = "(SELECT entry_hash FROM ledger WHERE sequence = 0)"
        edit_database(
            tmp_path,
            ("DELETE FROM ledger WHERE sequence = 1", ()),
            (f"UPDATE run SET ledger_length = 1, ledger_hash = {previous}", ()),
        )
        assert "it has 1 entries; this browser verified 2 before" in verify(page)
        page.fine()


def test_the_tooltip_says_what_a_served_page_cannot_prove() -> None:
    text = Path(FOLDER / "index.html").read_text()
    assert "It cannot prove that this page is honest (the coordinator sent it)" in text
    assert "blocktrain ledger verify" in text
