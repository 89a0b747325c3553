"""HTTP between a program and a server, and what goes wrong on the way: a kill, or an answer that stops."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import BinaryIO


class HttpProxy:
    """Passes requests and answers on, one after the other. Its subclasses make the trouble."""

    def __init__(self, port: Callable[[], int]) -> None:
        """`port` is asked for with every connection: a server that was restarted may have another."""
        self._port = port
        self._server = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)  # closing alone leaves the thread in accept()
        self._server.close()

    def half_sent(self, head: bytes) -> bool:
        """Half of a request's body is with the server. False ends the connection."""
        return True

    def answered(self, client: socket.socket, head: bytes, answer: bytes, body: bytes) -> bool:
        """The answer to `head` is here. False ends the connection."""
        client.sendall(answer + body)
        return True

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            with (
                client,
                socket.create_connection(("127.0.0.1", self._port())) as upstream,
                client.makefile("rb") as near,
                upstream.makefile("rb") as far,
            ):
                while self._exchange(client, near, upstream, far):
                    pass
        except OSError:
            pass

    def _exchange(
        self, client: socket.socket, near: BinaryIO, upstream: socket.socket, far: BinaryIO
    ) -> bool:
        head = _read_head(near)
        if not head:
            return False
        sent = _read_body(near, head)
        upstream.sendall(head + sent[: len(sent) // 2])
        if sent and not self.half_sent(head):
            return False
        upstream.sendall(sent[len(sent) // 2 :])
        answer = _read_head(far)
        body = b"" if head.startswith(b"HEAD") else _read_body(far, answer)
        return bool(answer) and self.answered(client, head, answer, body)


@dataclass
class Plug:
    """When to pull it: on a request that fits, at a moment of its life."""

    method: str
    path_ends: str
    moment: str
    """`half`: half of the body has been sent; `answered`: the answer is at the proxy, which keeps it;
    `delivered`: the answer has reached the worker."""
    after_seconds: float = 0.0


class PlugProxy(HttpProxy):
    """Kills the server at a chosen moment."""

    def __init__(self, port: Callable[[], int], kill: Callable[[], None]) -> None:
        self.plug: Plug | None = None
        self.pulled = threading.Event()
        self._kill = kill
        super().__init__(port)

    def arm(self, plug: Plug) -> None:
        self.pulled.clear()
        self.plug = plug

    def half_sent(self, head: bytes) -> bool:
        return not self._pulls(head, "half")

    def answered(self, client: socket.socket, head: bytes, answer: bytes, body: bytes) -> bool:
        if self._pulls(head, "answered"):
            return False
        super().answered(client, head, answer, body)
        self._pulls(head, "delivered")
        return True

    def _pulls(self, head: bytes, moment: str) -> bool:
        plug, (method, path) = self.plug, head.decode().split(" ", 2)[:2]
        if plug is None or (plug.method, plug.moment) != (method, moment):
            return False
        if not path.partition("?")[0].endswith(plug.path_ends):
            return False
        self.plug = None
        threading.Event().wait(plug.after_seconds)
        self._kill()
        self.pulled.set()
        return True


class StallProxy(HttpProxy):
    """Passes half of one answer on, the first that fits, and then nothing more on that connection."""

    def __init__(self, port: int, path_has: str) -> None:
        self.path_has = path_has
        self.stalled, self._ended = threading.Event(), threading.Event()
        self.ranges: list[str] = []
        """The `Range` of each request that fits and has one."""
        super().__init__(lambda: port)

    def answered(self, client: socket.socket, head: bytes, answer: bytes, body: bytes) -> bool:
        first, *fields = head.decode().split("\r\n")
        if first.startswith("GET") and self.path_has in first:
            self.ranges += [field for field in fields if field.lower().startswith("range")]
            if not self.stalled.is_set():
                client.sendall(answer + body[: len(body) // 2])
                self.stalled.set()
                self._ended.wait()
                return False
        return super().answered(client, head, answer, body)

    def close(self) -> None:
        self._ended.set()
        super().close()


def _read_head(file: BinaryIO) -> bytes:
    lines = []
    while line := file.readline():
        lines.append(line)
        if line == b"\r\n":
            return b"".join(lines)
    return b""


def _content_length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.split(b":")[1])
    return 0


def _read_body(file: BinaryIO, head: bytes) -> bytes:
    if b"transfer-encoding: chunked" not in head.lower():
        return file.read(_content_length(head))
    pieces = []
    while True:
        size = file.readline()
        pieces.append(size + file.read(int(size, 16) + 2))
        if int(size, 16) == 0:
            return b"".join(pieces)
