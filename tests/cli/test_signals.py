"""Ctrl-C asks long work to stop, wherever the main thread is at that moment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from blocktrain.local.processes import STOPPING_SIGNALS, stop_on_signals, stopping
from tests.cli.program import ENVIRONMENT


@pytest.mark.parametrize("number", STOPPING_SIGNALS)
def test_a_signal_inside_wait_does_not_wait_for_itself(number: signal.Signals) -> None:
    """The main thread holds the event's lock for a moment at both ends of `wait`; here it holds it."""
    with stopping() as stop:
        with stop._cond:  # type: ignore[attr-defined]
            os.kill(os.getpid(), number)
        assert stop.wait(20)


def test_a_second_signal_interrupts_and_the_handlers_come_back() -> None:
    before = [signal.getsignal(number) for number in STOPPING_SIGNALS]
    with stopping() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.wait(20)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
    assert [signal.getsignal(number) for number in STOPPING_SIGNALS] == before


def test_the_second_signal_ends_a_process_that_does_not_listen() -> None:
    source = Path(sys.modules[stop_on_signals.__module__].__file__ or "")
    script = (
        f"import runpy, signal, os; made = runpy.run_path({str(source)!r})['stop_on_signals']();"
        "os.kill(os.getpid(), signal.SIGTERM); made.wait(20); print('asked', flush=True);"
        "os.kill(os.getpid(), signal.SIGTERM); print('still here')"
    )
    done = subprocess.run([sys.executable, "-c", script], env=ENVIRONMENT, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout) == (128 + signal.SIGTERM, b"asked\n")
