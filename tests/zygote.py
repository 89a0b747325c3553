"""Starts `blocktrain` in milliseconds: a process that has imported torch forks one for each command.

Importing all that a worker needs takes 4.5 s of processor time. A shim named `blocktrain` (and `python`)
sends its arguments, folder, environment and standard streams to this process, which forks; the child is a
real process of its own, runs the program's own main() and gives the shim its exit code. Signals to the shim
go to the child, and the child dies with its shim, a moment later. What the child starts comes from here too.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import selectors
import signal
import socket
import stat
import sys
import tempfile
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

SHIM = """#!{python} -SE
import json, os, signal, socket, sys
arguments = sys.argv[1:]
if os.path.basename(sys.argv[0]) == "python":
    arguments = arguments[1:] if arguments[:1] == ["-u"] else arguments
    if arguments[:2] == ["-m", "blocktrain"]:
        arguments = arguments[2:]
    elif not (arguments and arguments[0].endswith(".py") and "/" not in arguments[0]):
        os.execv({python!r}, [{python!r}, *arguments])
    else:
        arguments = ["--script", *arguments]
zygote = socket.socket(socket.AF_UNIX)
zygote.connect({address!r})
request = json.dumps([arguments, os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(zygote, [len(request).to_bytes(4, "big")], [0, 1, 2])
zygote.sendall(request)
pid = int.from_bytes(zygote.recv(4), "big")
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda number, _: os.kill(pid, number))
sys.exit(zygote.recv(1)[0])
"""


def write_shims(folder: Path, address: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("blocktrain", "python"):
        shim = folder / name
        shim.write_text(SHIM.format(python=sys.executable, address=str(address)))
        shim.chmod(shim.stat().st_mode | stat.S_IXUSR)


def serve(listener: socket.socket, shim: str) -> None:
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    # A child that ends wakes the loop.
    wakes, woken = socket.socketpair()
    wakes.setblocking(False)
    selector.register(woken, selectors.EVENT_READ)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes.fileno())
    # It ends with the tests, also where these were killed.
    tests = multiprocessing.parent_process()
    assert tests is not None
    selector.register(tests.sentinel, selectors.EVENT_READ)
    shims: dict[int, socket.socket] = {}
    while True:
        for key, _ in selector.select():
            if key.fileobj == tests.sentinel:
                for pid in shims:
                    os.kill(pid, signal.SIGKILL)
                os._exit(0)
            if key.fileobj is woken:
                woken.recv(4096)
            elif key.fileobj is listener:
                connection, _ = listener.accept()
                begun = begin(connection, shim, [listener, wakes, woken, *shims.values()])
                if begun is None:
                    connection.close()
                    continue
                shims[begun] = connection
                selector.register(connection, selectors.EVENT_READ, begun)
            else:  # the shim was killed
                os.kill(key.data, signal.SIGKILL)
                selector.unregister(key.fileobj)
        while shims:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            end(selector, shims.pop(pid), status)


def begin(connection: socket.socket, shim: str, others: list[socket.socket]) -> int | None:
    """The child's process id; None where the shim was killed before it had said what it wants."""
    length, streams, _, _ = socket.recv_fds(connection, 4, 3)
    size, request = int.from_bytes(length, "big"), b""
    with suppress(ConnectionResetError):
        while len(request) < size and (piece := connection.recv(size - len(request))):
            request += piece
    if not size or len(request) < size:
        for stream in streams:
            os.close(stream)
        return None
    pid = os.fork()
    if pid == 0:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for other in (connection, *others):
            other.close()
        os._exit(run(json.loads(request), streams, shim))
    for stream in streams:
        os.close(stream)
    # A shim that is killed just now ends its child by closing the connection. It must not end this process:
    # every later program of the tests would find nobody.
    with suppress(BrokenPipeError, ConnectionResetError):
        connection.sendall(pid.to_bytes(4, "big"))
    return pid


def end(selector: selectors.BaseSelector, connection: socket.socket, status: int) -> None:
    if connection in selector.get_map():
        selector.unregister(connection)
    code = os.waitstatus_to_exitcode(status)
    with suppress(BrokenPipeError, ConnectionResetError):
        connection.sendall(bytes([code if code >= 0 else 128 - code]))
    connection.close()


def run(request: list[Any], streams: list[int], shim: str) -> int:
    """In the child: the program, with the caller's streams, folder and environment."""
    arguments, folder, environment = request
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.setsid()
    os.chdir(str(folder))
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # the caller's TMPDIR counts, and not what was found before the fork
    sys.executable = shim  # processes that this one starts come from the zygote too
    code = 0
    try:
        execute(list(arguments))
    except SystemExit as ended:
        code = int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def execute(arguments: list[str]) -> None:
    if arguments[:1] == ["--script"]:
        import runpy

        sys.argv = arguments[1:]
        runpy.run_path(arguments[1], run_name="__main__")
        return
    from blocktrain.__main__ import main

    sys.argv = ["blocktrain", *arguments]
    main()
