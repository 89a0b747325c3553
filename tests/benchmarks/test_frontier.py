"""The table of docs/frontier.md is what its program makes of the reports."""

from __future__ import annotations

from pathlib import Path

import frontier
import pytest


def test_the_page_has_the_table_of_the_reports(capsys: pytest.CaptureFixture[str]) -> None:
    assert frontier.main([]) == 0
    assert "four blocks of 3 layers, pooled" in capsys.readouterr().out


def test_another_table_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    changed = tmp_path / "frontier.md"
    changed.write_text(frontier.PAGE.read_text().replace("0.5815 |", "0.5715 |"))
    monkeypatch.setattr(frontier, "PAGE", changed)
    assert frontier.main([]) == 1
