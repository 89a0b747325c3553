"""The program's first second: nothing heavy is loaded for it, Ctrl-C ends it, and threads are set in time."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import blocktrain
from blocktrain.coordinator.operator_notes import KEY_FILE
from blocktrain.wire.identity import load_or_create
from tests.cli.program import ENVIRONMENT, run_program

HEAVY = ("torch", "numpy", "httpx2", "cryptography", "fastapi", "sqlalchemy", "rich")
HELP_SECONDS = 0.4


def run_python(script: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in ENVIRONMENT.items() if not name.startswith(("OMP", "GOMP"))}
    return subprocess.run(
        [sys.executable, "-c", script],
        env=environment | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def loaded_by(verbs: dict[str, int], heavy: tuple[str, ...], folder: Path) -> dict[str, list[str]]:
    """What of `heavy` is loaded after each verb; all in one process, and each ends with its exit code."""
    script = (
        f"import contextlib, io, json, os, sys\nos.chdir({str(folder)!r})\n"
        "from blocktrain.cli.main import main\nfound = {}\n"
        f"for verb, expected in {verbs!r}.items():\n"
        "    sys.argv, code = ['blocktrain', *verb.split()], 0\n"
        "    with contextlib.redirect_stdout(io.StringIO()):\n"
        "        try:\n            main()\n"
        "        except SystemExit as ended:\n            code = ended.code or 0\n"
        "    assert code == expected, (verb, code)\n"
        f"    found[verb] = [name for name in {heavy!r} if name in sys.modules]\n"
        "print(json.dumps(found))"
    )
    done = run_python(script)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


def test_help_and_version_load_nothing_heavy(tmp_path: Path) -> None:
    verbs = dict.fromkeys(("--help", "--version", "worker --help", "train --help"), 0)
    assert loaded_by(verbs, HEAVY, tmp_path) == {verb: [] for verb in verbs}


def test_looking_at_a_run_and_inviting_do_not_load_torch(tmp_path: Path) -> None:
    """It is two seconds of every `blocktrain status`."""
    load_or_create(tmp_path / KEY_FILE)
    verbs = {
        "status http://127.0.0.1:1": 1,
        "workers ls http://127.0.0.1:1": 1,
        "contributions http://127.0.0.1:1": 1,
        "finish --coordinator http://127.0.0.1:1 --data-dir .": 1,
        "workers ban anna --coordinator http://127.0.0.1:1 --data-dir . --reason floods": 1,
        "invite --data-dir . --address http://127.0.0.1:1": 0,
    }
    assert loaded_by(verbs, ("torch",), tmp_path) == {verb: [] for verb in verbs}


def test_help_takes_less_than_the_promised_processor_time() -> None:
    """The best of three, since other processes on the core cost time too."""

    def seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert run_program("--help", python=sys.executable).code == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(seconds() for _ in range(3)) < HELP_SECONDS


def test_the_version_is_an_option_too_and_shells_complete() -> None:
    assert run_program("--version", python=sys.executable).out.strip() == blocktrain.__version__
    assert "--install-completion" in run_program("--help", python=sys.executable).out


def test_ctrl_c_while_a_module_loads_ends_with_one_line(tmp_path: Path) -> None:
    """A module that, as torch does in places, catches everything while it is loaded."""
    (tmp_path / "torch.py").write_text(
        "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\nexcept BaseException:\n    pass\n"
        "raise ImportError('went on')\n"
    )
    environment = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join([str(tmp_path), ENVIRONMENT["PYTHONPATH"]])}
    done = subprocess.run(
        [sys.executable, "-m", "blocktrain", "evaluate", "nothing", "--text", "nothing"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (130, "blocktrain: interrupted\n")


def test_ctrl_c_in_a_verb_ends_with_one_line() -> None:
    script = (
        "import os, signal, sys\nfrom blocktrain.cli.main import app, main\n"
        "@app.command()\ndef patience() -> None:\n    os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.argv = ['blocktrain', 'patience']\nmain()"
    )
    done = run_python(script)
    assert (done.returncode, done.stderr) == (130, "blocktrain: interrupted\n")


def test_threads_do_not_spin_unless_the_user_says_so() -> None:
    script = (
        "import os\nfrom blocktrain.starting import prepare\nprepare()\n"
        "print(os.environ['OMP_WAIT_POLICY'], os.environ.get('GOMP_SPINCOUNT'))"
    )
    assert run_python(script).stdout.split() == ["PASSIVE", "0"]
    assert run_python(script, OMP_WAIT_POLICY="ACTIVE").stdout.split() == ["ACTIVE", "None"]


@pytest.mark.parametrize("first", ["", "import torch"])
def test_threads_and_nice_reach_torch_and_the_system(first: str) -> None:
    script = (
        f"{first}\nimport os\nfrom blocktrain.starting import limit_processor\nbefore = os.nice(0)\n"
        "limit_processor(1, 3)\nimport torch\nnicer = os.nice(0) == min(19, before + 3)\n"
        "print(torch.get_num_threads(), nicer, os.environ['OMP_NUM_THREADS'])"
    )
    assert run_python(script).stdout.split() == ["1", "True", "1"]


@pytest.mark.parametrize("verb", ["stage nowhere --blocks 0", "gateway nowhere --port 0"])
def test_programs_that_serve_bound_torchs_kernels_before_they_load_it(verb: str) -> None:
    script = (
        "import os, sys\nfrom blocktrain.cli.main import app\n"
        "sys.modules['torch'] = None\n"  # to load it is an error from here on
        f"sys.argv = ['blocktrain', *{verb.split()!r}]\n"
        "try:\n    app()\nexcept ImportError:\n    print(os.environ['ONEDNN_PRIMITIVE_CACHE_CAPACITY'])"
    )
    assert run_python(script).stdout.split() == ["64"]


def test_a_thread_inside_torch_does_not_abort_the_end() -> None:
    """As scoring does when a coordinator is told to stop; without `leave` this ends with SIGABRT."""
    script = (
        "import threading, torch\nfrom blocktrain.starting import leave\n"
        "begun = threading.Event()\n"
        "def burn():\n"
        "    x = torch.randn(2000, 64)\n"
        "    while True:\n"
        "        x = torch.softmax(x @ x[:64], -1)\n"
        "        begun.set()\n"
        "threading.Thread(target=burn, daemon=True).start()\nbegun.wait(60)\n"
        "print('bye')\nleave(3)"
    )
    done = run_python(script, OMP_NUM_THREADS="2")
    assert (done.returncode, done.stdout, done.stderr) == (3, "bye\n", "")


def test_what_a_serving_program_loaded_is_not_searched_for_garbage_again() -> None:
    done = run_python(
        "import gc, json\nfrom blocktrain.starting import keep_what_is_loaded\nkeep_what_is_loaded()\n"
        "assert gc.get_freeze_count() > 1000 and len(gc.get_objects()) < 100, len(gc.get_objects())"
    )
    assert done.returncode == 0, done.stderr
