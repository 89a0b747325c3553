"""The commit of the code that runs, for reports; None where nobody can know it (an installed package)."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
GIT_SECONDS = 10


def source_commit() -> str | None:
    """40 hex digits, with `-dirty` behind them where tracked files differ from the commit."""
    if told := os.environ.get("BLOCKTRAIN_COMMIT"):
        return told
    if not (ROOT / ".git").exists():  # site-packages inside somebody's repository is not our history
        return None
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
