"""A program before torch is loaded and after its verb is done: Ctrl-C ends it in one line, threads do not
spin, and its end is no abort.

Imports nothing but the standard library, because every millisecond here comes before `--help`.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
from types import FrameType

INTERRUPTED_CODE = 130
HARMLESS_THREADS = {"parent-watch"}
"""Threads that wait in the kernel, outside torch, until the process is gone."""

# OpenMP threads of torch spin while they wait for the slowest one. On a machine with other work the slowest
# is the one that was put aside, so all the others burn the very time it needs: `train demo` on two cores with
# ten other processes made 4 steps in 45 s, and 64 to 71 without spinning. docs/decisions/0013 has both sides.
QUIET_THREADS = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0"}
# torch keeps a kernel and its memory for each shape of a product, 1,024 of them twice over. Rows of a batch
# come in any number, so a stage with a 2 MB block grew from 346 to 831 MB; with 32 or 128 kernels it stayed
# at 392 or 483, and a pass took as long.
FEW_KERNELS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "64"}
# Stages and drafts attend by products of numpy, each too small to share. Its library would, from 100,000
# multiplications or so on, and its threads spin too.
ONE_PRODUCT_THREAD = {"OPENBLAS_NUM_THREADS": "1"}
THREAD_COUNTS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def prepare() -> None:
    """Called first of all by the command line."""
    quiet_threads()
    signal.signal(signal.SIGINT, _end_or_interrupt)


def quiet_threads() -> None:
    """Before torch is loaded, when OpenMP reads its settings once. What the user set stays."""
    if "OMP_WAIT_POLICY" not in os.environ:
        for name, value in QUIET_THREADS.items():
            os.environ.setdefault(name, value)


def prepare_to_serve() -> None:
    """For programs that serve, before torch and numpy are loaded. What the user set stays."""
    for name, value in {**FEW_KERNELS, **ONE_PRODUCT_THREAD}.items():
        os.environ.setdefault(name, value)


def keep_what_is_loaded() -> None:
    """For programs that serve, when all is loaded: what is there by now stays, and the search for garbage
    need not look at it again.

    A search through the objects of torch and its like takes 130 ms, in which a stage or a gateway stands
    still, and a gateway with 64 clients made one for every 1,500 tokens: 0.3 of its processor time.
    """
    gc.collect()
    gc.freeze()


def limit_processor(threads: int | None, nice: int) -> None:
    """What `--threads` and `--nice` ask of this process and of those it starts."""
    if nice and hasattr(os, "nice"):  # Windows has none
        os.nice(nice)
    if threads is None:
        return
    for name in THREAD_COUNTS:
        os.environ[name] = str(threads)
    if "torch" in sys.modules:  # too late for the environment
        sys.modules["torch"].set_num_threads(threads)


def is_importing(frame: FrameType | None) -> bool:
    """True while a module is being loaded somewhere below `frame`."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _end_or_interrupt(_: int, frame: FrameType | None) -> None:
    """Ctrl-C. Loading torch takes 2 to 12 s, and a KeyboardInterrupt inside it comes out as a page of
    traceback, as an ImportError, or not at all; nothing has begun then, so the process just ends."""
    if is_importing(frame):
        os.write(2, b"blocktrain: interrupted\n")
        os._exit(INTERRUPTED_CODE)
    raise KeyboardInterrupt


def leave(code: int | str | None) -> None:
    """End the process at once if a thread is still at work, for instance scoring; else do nothing.

    Python ends daemon threads by force when it goes down. One that is inside torch then aborts the whole
    process (`terminate called without an active exception`, exit code 134): 3 of 6 coordinators that were
    stopped while they scored, and every one of a thread that does nothing else.
    """
    busy = [one for one in threading.enumerate() if one.daemon and one is not threading.current_thread()]
    if all(one.name in HARMLESS_THREADS for one in busy):
        return
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)
