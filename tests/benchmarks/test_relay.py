"""The emulated network holds what passes, in both directions, and loses nothing."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

RELAY = Path(__file__).parents[2] / "benchmarks" / "relay.py"
PIECE = bytes(range(256)) * 4096
HELD_SECONDS = 0.05


def test_bytes_come_back_in_order_and_not_before_their_time() -> None:
    def echo(server: socket.socket) -> None:
        client, _ = server.accept()
        with client:
            while data := client.recv(1 << 16):
                client.sendall(data)

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=echo, args=(server,), daemon=True).start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        command = [sys.executable, str(RELAY), address, str(HELD_SECONDS)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                host, _, port = process.stdout.readline().split()[1].rpartition(":")
                with socket.create_connection((host, int(port))) as client:
                    began = time.monotonic()
                    threading.Thread(target=client.sendall, args=(PIECE,), daemon=True).start()
                    found = bytearray(client.recv(1))
                    assert time.monotonic() - began >= 2 * HELD_SECONDS
                    while len(found) < len(PIECE):
                        found += client.recv(1 << 16)
                    assert found == PIECE
                    # An end is passed on too, behind everything else.
                    client.shutdown(socket.SHUT_WR)
                    assert client.recv(1) == b""
            finally:
                process.kill()
