"""Running the program: its own main() in this process, or `python -m blocktrain` in another."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import blocktrain
from blocktrain.cli.main import main
from tests.forked import quick_python

SOURCE = Path(blocktrain.__file__).parents[1]
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith("BLOCKTRAIN_")},
    "PYTHONPATH": str(SOURCE),
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class Outcome:
    code: int
    stdout: bytes
    err: str

    @property
    def out(self) -> str:
        return self.stdout.decode(errors="replace")

    @property
    def complaint(self) -> str:
        """The one sentence of a refusal: the last line, the only one of its kind, and no traceback."""
        assert "Traceback" not in self.err
        lines = self.err.strip().splitlines()
        assert [line for line in lines if line.startswith("blocktrain: ")] == lines[-1:], self.err
        return lines[-1]


def run_main(*arguments: Any) -> Outcome:
    """What `python -m blocktrain` does after its imports. An error it did not expect fails the test."""
    stdout, stderr = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="") for _ in range(2))
    before = sys.argv
    sys.argv = ["blocktrain", *map(str, arguments)]
    try:
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            main()
        code = 0
    except SystemExit as ended:
        code = int(ended.code or 0)
    finally:
        sys.argv = before
    stdout.flush()
    stderr.flush()
    captured = [stream.buffer.getvalue() for stream in (stdout, stderr)]
    return Outcome(code, captured[0], captured[1].decode())


def command(*arguments: Any, python: str = sys.executable) -> list[bytes]:
    return [os.fsencode(python), b"-m", b"blocktrain", *(os.fsencode(str(a)) for a in arguments)]


def run_program(*arguments: Any, python: str = "", **variables: str) -> Outcome:
    """A process of its own, to its end; forked, unless its start is what matters."""
    words = command(*arguments, python=python or quick_python())
    ended = subprocess.run(words, env=ENVIRONMENT | variables, capture_output=True, check=False, timeout=120)
    return Outcome(ended.returncode, ended.stdout, ended.stderr.decode(errors="replace"))
