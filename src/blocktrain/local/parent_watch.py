"""A child process that ends when its parent does, however the parent ended.

The parent holds the writing end of the child's stdin and never writes: when the parent is gone, killed with
SIGKILL or not, the kernel closes it and the child reads the end. It then ends as if asked with SIGTERM, so
that a stage finishes its answers and a worker hands its lease back, and is killed if that takes too long.
"""

from __future__ import annotations

import os
import signal
import threading

LEASH = "BLOCKTRAIN_ENDS_WITH_STDIN"
"""Set for a child whose stdin is such a pipe."""
GRACE_SECONDS = 20.0


def end_with_parent() -> None:
    """Called first in every process of the command line; does nothing unless a parent asked for it."""
    if os.environ.pop(LEASH, None) is not None:
        threading.Thread(target=_end_after_parent, name="leash", daemon=True).start()


def _end_after_parent() -> None:
    while os.read(0, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(GRACE_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)
