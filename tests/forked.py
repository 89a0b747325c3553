"""Programs of ours as processes of their own that start in milliseconds.

Importing torch takes seconds of processor time. One process does it for the whole session and forks a child
for each start. The fork server of `multiprocessing` is one for the whole process, and so is the list of what
it imports first: everything that is forked comes through here.

One of several processes that run tests has imported nearly all of it itself when it begins. Its fork server
is a fork of its own, which need not import torch and the rest again.
"""

from __future__ import annotations

import atexit
import faulthandler
import functools
import logging
import multiprocessing
import os
import shutil
import socket
import sys
import tempfile
import threading
import warnings
from collections.abc import Sequence
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path

import pytest

from tests import zygote

processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["tests.forked_preload"])

ForkedProcess = multiprocessing.context.ForkServerProcess
OTHER_BUILTIN = "TEST_OTHER_BUILTIN"
"""In a program's environment: its Python comes with other documentation."""


def fork_the_server() -> None:
    """Start the fork server as a fork of this process, which must not have started threads of its own yet."""
    resource_tracker.ensure_running()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(util, "spawnv_passfds", _fork)
        forkserver.ensure_running()


def _fork(_: object, command: Sequence[str], streams: Sequence[int]) -> int:
    """In the place of `util.spawnv_passfds`: what `python -c` would run, in a fork."""
    with warnings.catch_warnings():
        # Python 3.12 warns of the thread by which xdist hears from its controller. Nothing here waits for it.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        return pid
    try:
        _forget_pytest()
        last = max(map(int, os.listdir("/proc/self/fd")))
        kept = sorted({0, 1, 2, *streams})
        for before, after in zip(kept, [*kept[1:], last + 1], strict=True):
            os.closerange(before + 1, after)
        exec(command[-1], {})  # noqa: S102 multiprocessing's own words
    finally:
        os._exit(0)


def _forget_pytest() -> None:
    """Programs have streams, logs and messages about errors of their own."""
    sys.stdin, sys.stdout, sys.stderr = (
        open(number, mode, buffering=1)  # noqa: SIM115
        for number, mode in enumerate("rww")
    )
    logging.getLogger().handlers.clear()
    logging.getLogger().setLevel(logging.WARNING)
    for logger in logging.getLogger().manager.loggerDict.values():
        # Those that torch made when it was imported.
        for handler in logger.handlers if isinstance(logger, logging.Logger) else ():
            if isinstance(handler, logging.StreamHandler):
                handler.setStream(sys.stderr)
    sys.meta_path[:] = [one for one in sys.meta_path if not type(one).__module__.startswith("_pytest")]
    threading.excepthook, sys.unraisablehook = threading.__excepthook__, sys.__unraisablehook__
    faulthandler.disable()


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
