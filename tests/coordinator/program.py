"""The coordinator as a process of its own, for tests that kill it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from urllib.parse import urlsplit

from blocktrain.coordinator.main import main, run_coordinator
from tests.forked import processes

RECIPE = """
name = "tiny"
model = { width = 16, heads = 2, blocks = 1, layers_per_block = 1, context = 16, condition_width = 4 }
training = { batch = 2 }
swarm = { steps_per_round = 2, rounds = 500, replicas = 1, codec = "sparse:4", lease_seconds = 5.0 }
trust = { judge = "off", stamp_bits = 0 }
"""


def run_program(
    folder: Path, ready: Connection, arguments: tuple[str, ...], start: Path | None = None
) -> None:
    """In a process of its own, forked from one that has already imported torch: ten starts in seconds."""
    os.chdir(folder)
    os.dup2(ready.fileno(), 1)
    log = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 2)
    with open(1, "w", closefd=False) as sys.stdout, open(2, "w", closefd=False) as sys.stderr:
        if start is None:
            main(arguments)
        else:
            recipe, data_dir, port, *_ = arguments
            run_coordinator(Path(recipe), data_dir=Path(data_dir), port=int(port), start=start)


class Program:
    """The coordinator as a process of its own, on one port through all its lives."""

    def __init__(
        self,
        folder: Path,
        database: str = "",
        blobs: str = "",
        recipe: str = RECIPE,
        text: bytes = b"a train of thought " * 500,
        data: str | None = None,
        start: Path | None = None,
    ) -> None:
        """`data` is the recipe's table of that name; by default it names a file of `text`. `start` is a
        checkpoint to begin from."""
        folder.mkdir(exist_ok=True)
        (folder / "text.txt").write_bytes(text)
        data = data or f'{{ corpus = "{folder}/text.txt" }}'
        (folder / "recipe.toml").write_text(f"{recipe}\ndata = {data}\n")
        self._folder, self._places, self._port, self._checkpoint = folder, (database, blobs), 0, start
        self.start()

    def start(self) -> None:
        arguments = ("recipe.toml", "data", str(self._port), *self._places)
        ready, child_end = processes.Pipe(duplex=False)
        how = (self._folder, child_end, arguments, self._checkpoint)
        self.process = processes.Process(target=run_program, args=how)
        self.process.start()
        child_end.close()
        with open(ready.fileno(), closefd=False) as lines:
            line = lines.readline()
        assert line.startswith("coordinator ready url="), (self._folder / "log").read_text()
        self.url = line.strip().removeprefix("coordinator ready url=")
        self._port = urlsplit(self.url).port or 0

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def restart(self) -> None:
        self.kill()
        self.start()


@contextmanager
def program(*arguments: object) -> Iterator[Program]:
    running = Program(*arguments)  # type: ignore[arg-type]
    try:
        yield running
    finally:
        running.kill()
