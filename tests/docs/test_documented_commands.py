"""Every command in the README and the docs runs; those that cannot are well formed and name real options."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from blocktrain.cli.reference import Verb, all_verbs
from tests.docs.pages import FENCE, ROOT, Fence, Runner, blocktrain_words, commands, fences, name_of, pages

VERBS = {verb.name: verb for verb in all_verbs()}
KINDS = {"sh", "python", "text", "json", "ini", "caddy", "toml", "yaml", "mermaid", "", "bash"}
MARKS = {(), ("server",), ("norun",)}
RUN_ELSEWHERE = {("docs/serve.md", "bash"), ("docs/serve.md", "python")}
"""tests/serving/gateway/test_gateway_docs.py holds them against the official client."""
STARTS_A_COMMAND = re.compile(
    r"^\s*(sudo |\$ )?(blocktrain|python|pip|make|curl|git|bash|lm_eval) ", re.MULTILINE
)
GIVEN = {
    "README.md": ("with_demo",),
    "docs/quickstart.md": (),
    "docs/join.md": ("with_run",),
    "docs/host.md": ("with_database_and_bucket",),
    "docs/dashboard.md": ("with_demo",),
    "docs/data.md": (),
    "docs/serve.md": ("with_demo",),
    "docs/objective.md": (),
    "docs/python.md": (),
    "docs/tracking.md": (),
}
"""What a page takes for granted before its first command."""
NOT_OF_THE_PAGE = (".", "deploy", "example.py", "given/")
"""The reader's home, the repository's own, and what the tests add."""

ALL = [fence for path in pages() for fence in fences(path)]


def runnable(fence: Fence) -> bool:
    if (fence.page, fence.kind) in RUN_ELSEWHERE or "norun" in fence.info:
        return False
    return fence.kind in ("sh", "python")


@pytest.mark.parametrize("page", sorted({fence.page for fence in ALL if runnable(fence)}))
def test_the_commands_of_a_page_run(page: str, request: pytest.FixtureRequest) -> None:
    runner: Runner = request.getfixturevalue("runner")
    for fixture in GIVEN[page]:
        request.getfixturevalue(fixture)
    for fence in ALL:
        if fence.page == page and runnable(fence):
            runner.run(fence)
    # A reader who follows the pages, and what a coordinator prints, has nothing to commit afterwards.
    runner.shell("mkdir -p model && touch model/config.json", fence)
    shutil.copy(ROOT / ".gitignore", runner.folder)
    runner.shell("git init -q .", fence)
    made = runner.shell("git ls-files --others --exclude-standard", fence).splitlines()
    assert [name for name in made if not name.startswith(NOT_OF_THE_PAGE)] == []


@pytest.mark.parametrize("fence", ALL, ids=str)
def test_a_block_says_what_it_is(fence: Fence) -> None:
    assert fence.kind in KINDS
    if fence.kind == "sh":
        assert fence.info[1:] in MARKS
    elif fence.kind == "bash":
        assert (fence.page, fence.kind) in RUN_ELSEWHERE
    elif fence.kind not in ("python", "text"):
        assert STARTS_A_COMMAND.search(fence.body) is None, "commands stand in `sh` blocks"


@pytest.mark.parametrize("fence", [fence for fence in ALL if fence.kind in ("sh", "bash")], ids=str)
def test_a_block_of_commands_is_well_formed(fence: Fence) -> None:
    done = subprocess.run(["bash", "-n"], input=fence.body, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert commands(fence.body)


@pytest.mark.parametrize("words", [words for _, words in blocktrain_words()], ids=" ".join)
def test_a_command_names_a_verb_and_options_that_exist(words: list[str]) -> None:
    verb = verb_named(words)
    assert verb is not None, f"no verb in {words}"
    known = {parameter.name for parameter in verb.parameters} | {"--help"}
    asked = {re.split(r"[=\]]", word.lstrip("["))[0] for word in words if word.lstrip("[").startswith("--")}
    assert asked <= known


def verb_named(words: list[str]) -> Verb | None:
    """`data tokenizer train`, `workers ls`, `train`, or the first of `judge|invite`."""
    plain = [re.split(r"[^a-z-]", word)[0] for word in words[:3]]
    return next((VERBS[name] for n in (3, 2, 1) if (name := " ".join(plain[:n])) in VERBS), None)


def test_makefile_targets_that_the_docs_name_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    named = {words[1] for fence in ALL if fence.kind == "sh" for words in commands(fence.body)
             if words[0] == "make"}  # fmt: skip
    assert named
    for target in named:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_benchmarks_that_the_docs_name_exist_with_their_options() -> None:
    checked = 0
    for path in pages():
        text = re.sub(r"\\\n\s*", " ", path.read_text(encoding="utf-8"))
        for script, options in re.findall(r"python (benchmarks/\w+\.py)([^`\n|]*)", text):
            source = (ROOT / script).read_text()
            for option in re.findall(r"--[a-z][\w-]*", options):
                assert f'"{option}"' in source, f"{path.name}: {script} {option}"
            checked += 1
    assert checked >= 5


def test_a_reader_is_given_the_python_that_has_our_packages() -> None:
    """`make demo` and `make test` make .venv: a bare `python` or `pip` is another one. Reports of what was
    run (experiments, history, decisions) say it as it was."""
    told = [path for path in pages() if path.parent.name not in ("history", "decisions")]
    for path in told:
        if path.name in ("README.md", "experiments.md"):
            continue
        text = path.read_text(encoding="utf-8")
        bare = re.findall(r"(?<!\.venv/bin/)\b(?:python benchmarks/\S+|pip install \S+)", text)
        assert not bare, name_of(path)


def test_links_of_the_docs_lead_somewhere() -> None:
    broken = []
    for path in pages():
        prose = FENCE.sub("", path.read_text(encoding="utf-8"))
        for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", prose):
            there = path.parent / target if target else path
            if "://" not in target and not (there.exists() and (not anchor or anchor in anchors(there))):
                broken.append(f"{name_of(path)}: {target}#{anchor}")
    assert not broken


def anchors(page: Path) -> set[str]:
    """What GitHub lets a link name: each heading in small letters, without punctuation."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_the_index_names_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    missing = [path.name for path in Path(ROOT / "docs").glob("*.md") if path.name not in index]
    assert missing == ["README.md"]
