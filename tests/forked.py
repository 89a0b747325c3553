"""Programs of ours as processes of their own that start in milliseconds.

Importing torch takes seconds of processor time. One process does it for the whole session and forks a child
for each start. The fork server of `multiprocessing` is one for the whole process, and so is the list of what
it imports first: everything that is forked comes through here.
"""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import os
import shutil
import socket
import sys
import tempfile
from pathlib import Path

from tests import zygote

processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["tests.forked_preload"])

ForkedProcess = multiprocessing.context.ForkServerProcess
OTHER_BUILTIN = "TEST_OTHER_BUILTIN"
"""In a program's environment: its Python comes with other documentation."""


@functools.cache
def quick_python() -> str:
    """A `python` for whose `-m blocktrain` a process is forked; everything else is left to the real one.
    A `blocktrain` stands beside it."""
    folder = Path(tempfile.mkdtemp(prefix="quick-python-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    zygote.write_shims(folder, folder / "zygote")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "zygote"))
        listener.listen(64)
        shim = str(folder / "python")
        processes.Process(target=zygote.serve, args=(listener, shim), daemon=True).start()
    return shim


def start_blocktrain(
    arguments: list[str],
    out: Path,
    err: Path,
    folder: Path | None = None,
    environment: dict[str, str] | None = None,
) -> ForkedProcess:
    """`blocktrain ARGUMENTS...` in `folder`; what it prints is added to `out` and `err`."""
    values = (
        arguments,
        out.absolute(),
        err.absolute(),
        folder or Path.cwd(),
        environment or {},
        quick_python(),
    )
    process = processes.Process(target=_run_blocktrain, args=values)
    process.start()
    return process


def _run_blocktrain(
    arguments: list[str], out: Path, err: Path, folder: Path, environment: dict[str, str], python: str
) -> None:
    os.chdir(folder)
    for stream, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    # Of the parent, not of the fork server, which keeps what it had when it was started.
    os.environ.update(environment)
    os.environ["OMP_NUM_THREADS"] = "1"  # for processes that this one starts
    from blocktrain.__main__ import main

    if OTHER_BUILTIN in environment:
        from blocktrain.data import corpora

        corpora.builtin_text = lambda: b"the documentation of another Python. " * 20_000
    sys.argv, sys.executable = ["blocktrain", *arguments], python
    with open(1, "w", closefd=False) as sys.stdout, open(2, "w", closefd=False) as sys.stderr:
        main()
