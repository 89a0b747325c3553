"""What people see on a terminal, and what strangers' weights may do to it: nothing."""

from __future__ import annotations

import io
import json
import os
import pty
import shlex
import subprocess
import sys
from pathlib import Path

from rich.console import Console

from blocktrain.cli.serve import lines_to_try
from blocktrain.client.traffic import Traffic
from blocktrain.local.status_view import results_table
from blocktrain.local.terminal import TrainingProgress, harmless, harmless_bytes
from blocktrain.model.pooling import Pooling
from blocktrain.tracking.model_card import report_scores
from blocktrain.training.evaluation import Score
from blocktrain.training.report import HeldOutScores, TrainingReport
from blocktrain.worker.live_view import LiveView
from tests.cli.program import run_main


def test_a_terminal_gets_no_escape_sequence_bell_or_carriage_return() -> None:
    assert harmless_bytes(b"a\x1b[2Jb\x07\rc\x7f\n\td") == b"a?[2Jb??c?\n\td"
    shown = harmless("a\x1b]0;title\x07b\x9bc\n\td")
    assert not any(ord(character) < 32 and character not in "\n\t" for character in shown)
    assert "\x9b" not in shown
    assert shown.endswith("c\n\td")


def test_other_text_is_left_alone() -> None:
    assert harmless("naïve ✓ 漢字") == "naïve ✓ 漢字"
    assert harmless_bytes("naïve ✓".encode()) == "naïve ✓".encode()


def test_losses_of_a_model_of_long_tokens_are_told_per_byte() -> None:
    scores = HeldOutScores(
        blocks=[Score(5.0)],
        consensus=Score(4.0),
        pooling=Pooling((1.0,)),
        euler=None,
        reference=Score(3.0),
        bigram_ce=6.0,
        scored_tokens=1000,
        bytes_per_token=4.0,
    )
    report = TrainingReport(
        scores=scores, name="bpe", seed=0, corpus_sha256="", tokens={}, parameters={}, flops={},
        peak_memory={}, memory_method="", seconds={}, curves={}, recipe={}, versions={}, sample="",
    )  # fmt: skip
    file = io.StringIO()
    Console(file=file, width=200).print(results_table(report))
    shown = file.getvalue()
    assert "1,000 held-out tokens" in shown
    assert "1.0000" in shown, "a consensus of 4 nats per token of 4 bytes"
    assert "+0.2500" in shown
    assert dict(report_scores(report))["composed, consensus"] == 1.0


def lines_of(progress: TrainingProgress, file: io.StringIO) -> list[str]:
    progress.plan({"block 0": 1, "block 1": 1, "reference": 2})
    progress.started("block 0", 4, 4)
    progress.started("block 1", 0, 4)
    progress.stepped("block 1", 4, 4, 2.5, 100)
    return file.getvalue().splitlines()


def test_time_left_counts_the_units_that_follow_and_finished_ones_are_not_begun_again() -> None:
    file = io.StringIO()
    progress = TrainingProgress(Console(file=file, width=200))
    done, begun, stepped = lines_of(progress, file)
    assert done == "block 0: all 4 steps are done"
    assert begun == "training block 1: 4 steps"
    assert " left=0s run_left=" in stepped
    begin = progress.begun["block 1"][0]
    # Four steps of cost 1 took 10 s; the reference has four of cost 2.
    assert progress.run_left(begin + 10.0, 4) == 20.0
    # A reference that is slower than planned: three steps at 30 s each are left of it, and of the run.
    progress.begun["reference"], progress.done["reference"] = (begin + 10.0, 0), 1
    assert progress.run_left(begin + 40.0, 4) == 90.0


def test_a_panel_of_a_worker_that_did_nothing_is_taken_away() -> None:
    for lines, kept in ((0, False), (1, True)):
        view = LiveView("w", Traffic(), Console(file=io.StringIO(), force_terminal=True))
        with view:
            for _ in range(lines):
                view.line("joined")
        assert view._live.transient is not kept


def test_a_missing_text_to_score_is_not_explained_as_a_corpus(checkpoint: Path, tmp_path: Path) -> None:
    told = run_main("evaluate", checkpoint, "--text", tmp_path / "notes.txt").complaint
    assert "--text names a file to score" in told
    assert "data.corpus" not in told


def test_what_serve_tells_to_copy_fits_a_terminal_of_80_columns() -> None:
    lines = lines_to_try("http://192.168.100.100:8000", "demo-0123456789ab", with_key=True)
    assert max(map(len, lines)) <= 80
    command = "\n".join(lines[: lines.index(next(one for one in lines if "generate" in one))])
    words = shlex.split(command.replace("\\\n", " "))
    assert words[:2] == ["curl", "http://192.168.100.100:8000/v1/completions"]
    assert json.loads(words[-1])["prompt"] == "The "


def test_a_chat_line_can_be_edited_and_called_back() -> None:
    program = "from blocktrain.cli.chat import user_lines\nfor line in user_lines(): print('got', line)"
    parent, child = pty.openpty()
    with subprocess.Popen([sys.executable, "-c", program], stdin=child, stdout=child, stderr=child) as chat:
        os.close(child)
        shown = b""
        # Up calls the first line back; Ctrl-D ends. Each when the program asks: earlier it edits nothing.
        for number, keys in enumerate((b"hello\n", b"\x1b[A\n", b"\x04"), 1):
            while shown.count(b"you> ") < number:
                shown += os.read(parent, 1024)  # an OSError at its end fails the test
            os.write(parent, keys)
        assert chat.wait(30) == 0
    os.close(parent)
    assert shown.count(b"got hello") == 2
