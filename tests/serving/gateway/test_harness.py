"""lm-eval as a client of the gateway: benchmarks/harness.py compares it with the engine's own scores."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "harness.py"


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="lm_eval is not installed (50 packages; see serve.md)"
)
def test_lm_eval_finds_the_likelihood_that_the_engine_finds(checkpoint: Path, tmp_path: Path) -> None:
    text, found = tmp_path / "text.txt", tmp_path / "result.json"
    text.write_text("".join(f"def number_{i}(self):\n    return {i} * self.value\n\n" for i in range(200)))
    command = [sys.executable, str(SCRIPT), str(checkpoint), "--text", str(text), "--json", str(found)]
    subprocess.run([*command, "--pages", "2", "--endings", "2"], check=True, timeout=600)
    result = json.loads(found.read_text())
    assert 0 < result["bits_per_byte"] < 8.5
    assert 0 <= result["endings_right"] <= 1


def test_without_lm_eval_the_script_says_what_to_install(checkpoint: Path, tmp_path: Path) -> None:
    hidden = (
        "import importlib.util, runpy, sys; find = importlib.util.find_spec;"
        "importlib.util.find_spec = lambda name, *rest: None if name == 'lm_eval' else find(name, *rest);"
        f"sys.path.insert(0, {str(SCRIPT.parent)!r});"  # as Python does where a script is run
        f"sys.argv = ['harness.py', {str(checkpoint)!r}, '--text', {str(tmp_path)!r}];"
        f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", hidden], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "pip install 'lm_eval[api]'" in done.stderr
