"""Reports say where they come from and have the numbers of their kind; the documents repeat these numbers."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import reach
import reports
import same
from provenance import check_claims, write_report

from blocktrain.config import find_recipe, load_recipe
from tests.docs.pages import name_of, pages

ROOT = Path(__file__).parents[2]
FILES = sorted(reports.RESULTS.glob("*.json"))
SCALES = (1, 1e-6, 1e-9, 2**-30)
"""As it is, MB, GB, GiB."""
NOT_OURS = {
    **{"1.359": "the litepaper", "1.811": "the litepaper", "15.22": "the litepaper"},
    "1.320": "the litepaper",
}
"""Numbers in rows with a link that no report of ours has, and whose they are."""


def leaves(value: Any, key: str = "") -> Iterator[float]:
    """Every number that a document might repeat; of the thousands in curves one would always fit."""
    if key in ("curves", "recipe", "runs"):
        return
    if isinstance(value, dict):
        for name, part in value.items():
            yield from leaves(part, name)
    elif isinstance(value, list):
        for part in value:
            yield from leaves(part, key)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield float(value)


def linked_rows() -> list[tuple[str, str, list[Path]]]:
    found = []
    for page in pages():
        if page.name == "frontier.md":  # computed as a whole, and held by test_frontier.py
            continue
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
            links = re.findall(r"\(((?:docs/|\.\./)?results/[\w.-]+\.json)\)", line)
            if links and line.startswith("|"):
                found.append((f"{name_of(page)}:{number}", line, [page.parent / link for link in links]))
    return found


@pytest.mark.parametrize(("place", "row", "linked"), linked_rows(), ids=[one[0] for one in linked_rows()])
def test_numbers_of_a_row_are_in_the_reports_it_links_to(place: str, row: str, linked: list[Path]) -> None:
    known: list[float] = []
    for path in linked:
        known += leaves(json.loads(path.read_text(encoding="utf-8")))
    prose = re.sub(r"\]\([^)]*\)|`[^`]*`", "", row)
    strange = []
    for text in re.findall(r"(?<![\w.])[-+]?\d+(?:,\d{3})*\.\d{2,}(?!\w)", prose):
        value, digits = float(text.replace(",", "")), len(text.split(".")[1])
        near = 0.5000001 * 10**-digits
        if text not in NOT_OURS and not any(abs(one * by - value) <= near for one in known for by in SCALES):
            strange.append(text)
    assert not strange, f"{place}: {strange} are in none of {[path.name for path in linked]}"


def linking_sections() -> list[tuple[str, str, list[Path]]]:
    """Every section with a link to a report, except the threat model, which says what is done and not when
    it was measured, and decisions, which are dated."""
    found = []
    for page in pages():
        if page.name == "threat-model.md" or page.parent.name == "decisions":
            continue
        for section in re.split(r"^(?=#+ )", page.read_text(encoding="utf-8"), flags=re.MULTILINE):
            links = re.findall(r"\(((?:docs/|\.\./)?results/[\w.-]+\.json)\)", section)
            if links:
                place = f"{name_of(page)}: {section.splitlines()[0]}"
                found.append((place, section, [page.parent / link for link in links]))
    return found


@pytest.mark.parametrize(
    ("place", "section", "linked"), linking_sections(), ids=[one[0] for one in linking_sections()]
)
def test_a_section_says_which_code_made_its_reports(place: str, section: str, linked: list[Path]) -> None:
    """It has the commit of each report that names one, and says so where one names none."""
    for path in linked:
        commit = reports.commit_of(json.loads(path.read_text(encoding="utf-8")))
        wanted = commit[:7] if commit else "no commit"
        assert wanted in " ".join(section.split()), f"{place}: {wanted!r} is not said of {path.name}"


def test_rows_with_links_were_found() -> None:
    assert len(linked_rows()) >= 8


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_published_report_has_the_numbers_of_its_kind(path: Path) -> None:
    kind = reports.kind_of(path.name)
    assert kind is not None
    assert reports.lacking(json.loads(path.read_text(encoding="utf-8")), kind) == []


def test_the_code_that_a_kind_measures_exists() -> None:
    places = [place for kind in reports.KINDS.values() for place in (*kind.paths, *kind.programs)]
    assert [place for place in places if not (ROOT / place.partition(":")[0]).exists()] == []
    functions = [place.split(":") for place in places if ":" in place]
    assert [name for file, name in functions if f"def {name}(" not in (ROOT / file).read_text()] == []


@pytest.mark.parametrize("table", ["t6", "t7"])
def test_a_swarm_whose_reports_leave_the_judge_apart_has_none(table: str) -> None:
    assert reports.KINDS[table].apart == reports.WITHOUT_A_JUDGE
    assert load_recipe(find_recipe(f"swarm-{table}")).trust.judge == "off"
    names = {name for _, name in reach.reached("HEAD", reports.KINDS[table].programs)}
    assert [
        start for start in reports.WITHOUT_A_JUDGE[:3] if not any(n.startswith(start) for n in names)
    ] == []


@pytest.mark.parametrize("kind", ["attacks", "long attacks"])
def test_a_report_of_attacks_depends_on_how_a_round_of_them_is_played(kind: str) -> None:
    reached = reach.reached("HEAD", reports.KINDS[kind].programs)
    assert ("tests/adversaries/campaigns.py", "_round") in reached


def test_a_report_is_fresh_until_the_code_it_measures_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*words: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        return subprocess.check_output(["git", "-C", str(tmp_path), *identity, *words], text=True).strip()

    git("init", "-q")
    kind = reports.Kind("x.json", ("benchmarks/run.py",), ("benchmarks/code.py", "recipes/a.toml"), {})
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "recipes").mkdir()
    (tmp_path / "benchmarks" / "run.py").write_text("import code\ndef main():\n    return code.a\n")
    (tmp_path / "benchmarks" / "code.py").write_text("a = 1\n")
    (tmp_path / "recipes" / "a.toml").write_text("steps = 1\n")
    git("add", "."), git("commit", "-qm", "first")
    monkeypatch.setattr(reach, "ROOT", tmp_path)
    report = {"provenance": {"commit": git("rev-parse", "HEAD"), "clean": True}}

    def state_after(file: str, text: str) -> str:
        (tmp_path / file).write_text(text)
        git("commit", "-qam", file)
        reach.tree.cache_clear()
        reach.reached.cache_clear()
        return reports.state_of(report, kind)

    assert state_after("benchmarks/code.py", '"""Said."""\na = 1  # still\nb = 2\n').startswith("fresh")
    assert state_after("recipes/a.toml", "# Why one.\nsteps  =  1  # a comment\n").startswith("fresh")
    assert state_after("benchmarks/code.py", "a = 2\n").endswith("another a")
    # A run of both commits gave the same numbers: fresh until more changes.
    monkeypatch.setattr(reports, "SAME", tmp_path / "same.json")
    monkeypatch.setattr(reports, "KINDS", {"x": kind})
    bridge = {"kind": "x", "before": report["provenance"]["commit"], "after": git("rev-parse", "HEAD")}
    reports.SAME.write_text(json.dumps([bridge]))
    assert reports.state_of(report, kind).startswith("fresh")
    assert reports.state_of(report, kind).endswith("(another a)")
    assert state_after("recipes/a.toml", "steps = 2\n").endswith("another recipes/a.toml, a")
    assert reports.state_of({"provenance": {"commit": "0" * 40, "clean": True}}, kind).startswith("unknown")
    assert (
        reports.state_of({"provenance": {**report["provenance"], "clean": False}}, kind)
        == "unknown: no commit"
    )
    assert reports.state_of([], kind) == "unknown: no commit"
    reach.tree.cache_clear()
    reach.reached.cache_clear()


def test_numbers_are_the_same_only_if_all_of_the_older_report_are() -> None:
    old = {"provenance": 1, "units": [{"ce": 1.5, "seconds": 2.0}], "gap": 0.25}
    assert list(same.differences(old, {**old, "provenance": 2, "more": 3})) == []
    assert list(same.differences(old, {**old, "units": [{"ce": 1.5, "seconds": 9.0}]})) == []
    assert list(same.differences(old, {**old, "units": [{"ce": 1.5000001}]})) == [
        ".units[0].ce: 1.5 and 1.5000001"
    ]
    assert list(same.differences(old, {"units": []})) != []


def test_what_is_done_on_cuda_is_found_with_what_lies_below_it() -> None:
    tree = reach.Tree.__new__(reach.Tree)
    text = b"def f(x):\n    a = 1\n    if x.is_cuda:\n        a = 2\n    return a\n"
    tree.files, tree.modules = {"a.py": text}, {}
    assert same.on_cuda(tree, ("a.py", "f")) == ["    if x.is_cuda:", "        a = 2"]
    assert same.on_cuda(tree, ("b.py", "f")) == []


def test_a_written_report_carries_its_provenance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCKTRAIN_COMMIT", "c" * 40)
    monkeypatch.setattr("sys.argv", ["/somewhere/benchmarks/gap.py", "--seeds", "0,1"])
    write_report(tmp_path / "a.json", "gap", [{"ce": 1.0}], [0, 1])
    report = json.loads((tmp_path / "a.json").read_text())
    made = report.pop("provenance")
    assert report == {"rows": [{"ce": 1.0}]}
    assert (made["kind"], made["commit"], made["clean"], made["seeds"]) == ("gap", "c" * 40, True, [0, 1])
    assert made["command"] == "python benchmarks/gap.py --seeds 0,1"
    assert "CPU cores" in made["hardware"]
    assert made["versions"].keys() == {"python", "torch", "numpy"}
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", made["date"])
    assert reports.commit_of({"provenance": made}) == "c" * 40


def test_claims_that_fail_are_named_and_fail_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_claims({"a": True}) == 0
    assert check_claims({"a": True, "b": False}) == 1
    assert capsys.readouterr().err == "not so: b\n"
