"""The real pip-audit, asked about pinned packages, finds what a folder of advisories says of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from offline_audit import touches
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]


def advisory(events: list[dict[str, str]], versions: tuple[str, ...] = ()) -> dict[str, Any]:
    ranges = [{"type": "ECOSYSTEM", "events": events}]
    package = {"name": "H11", "ecosystem": "PyPI"}
    affected = [{"package": package, "ranges": ranges, "versions": list(versions)}]
    return {"id": "PYSEC-1", "modified": "2026-01-02T03:04:05Z", "details": "smuggled", "affected": affected}


FIXED = advisory([{"introduced": "0"}, {"fixed": "0.16.0"}])
TWICE = advisory([{"introduced": "0"}, {"fixed": "1.2"}, {"introduced": "2.0rc1"}, {"fixed": "2.4"}])
LAST = advisory([{"introduced": "0"}, {"last_affected": "2.6.0-cu124"}])
NO_END = advisory([{"introduced": "1.0"}, {}])
LISTED = advisory([], ("3.1", "3.2"))


@pytest.mark.parametrize(
    ("found", "version", "touched"),
    [
        (FIXED, "0.15.0", True),
        (FIXED, "0.16.0", False),
        (TWICE, "1.1", True),
        (TWICE, "1.3", False),
        (TWICE, "2.0", True),
        (TWICE, "2.4", False),
        (LAST, "2.6.0", True),
        (LAST, "2.6.1", False),
        (LAST, "2.13.0+cpu", False),
        (NO_END, "0.9", False),
        (NO_END, "99", True),
        (LISTED, "3.2.0", True),
        (LISTED, "3.3", False),
    ],
)
def test_a_version_is_touched_inside_a_range_or_where_it_is_listed(
    found: dict[str, Any], version: str, touched: bool
) -> None:
    assert touches(found, "h11", Version(version)) is touched
    assert not touches(found, "h12", Version(version))


def test_pip_audit_reports_what_the_folder_says_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "advisory-database" / "vulns" / "h11"
    folder.mkdir(parents=True)
    (folder / "PYSEC-1.yaml").write_text(yaml.safe_dump(FIXED))
    pins = tmp_path / "pins.txt"
    pins.write_text("h11==0.15.0\nanyio==4.0\n")
    command = [sys.executable, "benchmarks/offline_audit.py", str(folder.parents[1])]
    options = ["-r", str(pins), "--no-deps", "--disable-pip", "-f", "json", "--progress-spinner", "off"]
    found = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert found.returncode == 1, found.stderr
    report = {one["name"]: one["vulns"] for one in json.loads(found.stdout)["dependencies"]}
    assert report["anyio"] == []
    assert [(one["id"], one["fix_versions"]) for one in report["h11"]] == [("PYSEC-1", ["0.16.0"])]
    assert "compared 2 packages with 1 advisories on them, newest 2026-01-02" in found.stderr
