"""`export` and `import`: the model card has the report's numbers, and nothing is uploaded unasked."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml

from tests.cli.program import Outcome, run_main
from tests.cli.servers import closed_port


@pytest.fixture
def logged_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """No token in the environment or in files; the Hub would be a closed port of this machine."""
    import huggingface_hub.constants as constants

    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{closed_port()}")
    return monkeypatch


def test_a_run_is_exported_with_its_numbers_and_comes_back(
    trained: tuple[Path, Outcome], tmp_path: Path
) -> None:
    checkpoint = trained[0] / "checkpoint"
    outcome = run_main("export", checkpoint, "--to", tmp_path / "hub")
    assert outcome.code == 0, outcome.err
    report = json.loads((trained[0] / "report.json").read_text())
    card = (tmp_path / "hub" / "README.md").read_text()
    _, front, body = card.split("---\n", 2)
    metadata = yaml.safe_load(front)
    assert metadata["library_name"] == "blocktrain"
    metrics = {one["name"]: one["value"] for one in metadata["model-index"][0]["results"][0]["metrics"]}
    consensus = report["composed"]["consensus"]["ce"]
    assert metrics["composed, consensus"] == pytest.approx(consensus, abs=1e-6)
    assert f"| composed, consensus | {consensus:.4f} |" in body
    assert f"| the same layers trained end to end | {report['reference']['ce']:.4f} |" in body
    assert f"| bigram counts | {report['bigram']['ce']:.4f} |" in body
    assert run_main("import", tmp_path / "hub", "--to", tmp_path / "back").code == 0
    for file in checkpoint.iterdir():
        assert file.read_bytes() == (tmp_path / "back" / file.name).read_bytes()


def test_the_hub_reads_the_card(trained: tuple[Path, Outcome], tmp_path: Path) -> None:
    from huggingface_hub import ModelCard

    run_main("export", trained[0] / "checkpoint", "--to", tmp_path / "hub")
    data = ModelCard.load(tmp_path / "hub" / "README.md").data
    assert data.library_name == "blocktrain"
    assert {result.metric_type for result in data.eval_results} == {"cross_entropy"}


def test_a_report_of_another_run_gives_no_numbers(trained: tuple[Path, Outcome], tmp_path: Path) -> None:
    other = json.loads((trained[0] / "report.json").read_text()) | {"corpus_sha256": "00" * 32}
    (tmp_path / "report.json").write_text(json.dumps(other))
    arguments = ("export", trained[0] / "checkpoint", "--to", tmp_path / "hub")
    refused = run_main(*arguments, "--report", tmp_path / "report.json")
    assert refused.code == 2
    assert "is not the report of" in refused.complaint
    (tmp_path / "checkpoint").symlink_to(trained[0] / "checkpoint")
    outcome = run_main("export", tmp_path / "checkpoint", "--to", tmp_path / "hub")
    assert "no report beside it" in outcome.out
    assert "No report came with this checkpoint" in (tmp_path / "hub" / "README.md").read_text()


def test_a_swarm_report_makes_a_card_too(checkpoint: Path, tmp_path: Path) -> None:
    report = {
        "name": "tiny", "final": {"consensus_ce": 1.25, "euler_ce": None, "block_ce": [1.5, 1.75]},
        "workers": [{}, {}], "bytes_total": 2_500_000, "wall_seconds": 61.2,
    }  # fmt: skip
    (tmp_path / "report.json").write_text(json.dumps(report))
    arguments = ("--to", tmp_path / "hub", "--report", tmp_path / "report.json")
    assert run_main("export", checkpoint, *arguments).code == 0
    card = (tmp_path / "hub" / "README.md").read_text()
    assert "| composed, consensus | 1.2500 |" in card
    assert "2 workers that moved 2.5 MB in all, in 61 s" in card


def test_upload_without_the_package_says_what_to_install(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    outcome = run_main("export", checkpoint, "--to", tmp_path / "hub", "--upload", "me/model")
    assert outcome.code == 2
    assert "blocktrain[hub]" in outcome.complaint
    assert not (tmp_path / "hub").exists()


@pytest.mark.usefixtures("logged_out")
def test_upload_without_a_login_says_how_to_log_in(checkpoint: Path, tmp_path: Path) -> None:
    outcome = run_main("export", checkpoint, "--to", tmp_path / "hub", "--upload", "me/model")
    assert outcome.code == 2
    assert "hf auth login" in outcome.complaint
    assert not (tmp_path / "hub").exists()


def test_an_upload_that_fails_leaves_the_folder_and_says_so(
    checkpoint: Path, tmp_path: Path, logged_out: pytest.MonkeyPatch
) -> None:
    logged_out.setenv("HF_TOKEN", "hf_of_nobody")
    outcome = run_main("export", checkpoint, "--to", tmp_path / "hub", "--upload", "me/model")
    assert outcome.code == 1
    assert "the upload to me/model failed" in outcome.complaint
    assert (tmp_path / "hub" / "config.json").exists()


def test_what_needs_no_import_and_what_is_not_there_are_told_apart(checkpoint: Path, tmp_path: Path) -> None:
    outcome = run_main("import", checkpoint, "--to", tmp_path / "again")
    assert (outcome.code, "a checkpoint already" in outcome.complaint) == (2, True)
    outcome = run_main("import", tmp_path / "nowhere", "--to", tmp_path / "again")
    assert (outcome.code, "no folder at" in outcome.complaint) == (2, True)


def test_a_folder_of_another_kind_is_not_imported(tmp_path: Path) -> None:
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "config.json").write_text('{"model_type": "gpt2"}')
    outcome = run_main("import", tmp_path / "gpt2", "--to", tmp_path / "checkpoint")
    assert outcome.code == 2
    assert "not a folder written by `blocktrain export`" in outcome.complaint
    assert not (tmp_path / "checkpoint").exists()
