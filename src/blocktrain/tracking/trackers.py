"""Numbers of a run as it goes on: metrics.jsonl always, TensorBoard, wandb or trackio by option.

docs/tracking.md describes each kind of line. Records are plain values; what makes them from a status is a
pure function. Nothing is opened before the first record, so a run that is refused leaves nothing behind.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

from blocktrain.errors import UserError
from blocktrain.files import explained_errors

if TYPE_CHECKING:  # `--help` reads `TrackerName` from here, and must not wait for torch
    from blocktrain.training.local import Observer
    from blocktrain.training.report import TrainingReport
    from blocktrain.wire.messages import StatusAnswer

log = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
PROJECT = "blocktrain"

Record = dict[str, Any]


class TrackerName(StrEnum):
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    TRACKIO = "trackio"


class Tracker(Protocol):
    def add(self, record: Record) -> None: ...

    def close(self) -> None: ...


class MetricsFile:
    """JSON lines, appended. What has a key and was written by an earlier process is not written again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known: set[tuple[Any, ...]] = set()
        self._file: IO[bytes] | None = None

    def add(self, record: Record) -> None:
        with explained_errors(self.path):
            file = self._file or self._open()
            key = record_key(record)
            # A resumed run reads the same rounds from the coordinator again; the file has each once.
            if key in self._known:
                return
            if key is not None:
                self._known.add(key)
            file.write(json.dumps(record).encode() + b"\n")
            # At every line: people follow the file, and a killed run keeps what it measured.
            file.flush()

    def _open(self) -> IO[bytes]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = file = self.path.open("ab+")
        file.seek(0)
        torn = False
        for line in file:
            torn = not line.endswith(b"\n")
            with suppress(ValueError):  # a line that is no JSON is somebody else's: it has no key
                record = json.loads(line)
                if isinstance(record, dict) and (key := record_key(record)) is not None:
                    self._known.add(key)
        if torn:  # a process was killed inside a line
            file.write(b"\n")
        return file

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def record_key(record: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """What makes a record the same as another; None for records that may be repeated."""
    if record.get("event") == "round":
        return ("round", record.get("block"), record.get("version"))
    if record.get("event") == "score":
        return ("score", record.get("model"), record.get("step"))
    if record.get("event") == "evaluation":
        return ("evaluation", tuple(record.get("versions", ())), record.get("time"))
    return None


def scalars_of(record: Record) -> tuple[str, int, dict[str, float]] | None:
    """A record as a series, a step in it and its numbers, for programs that draw curves."""
    event = record["event"]
    # The x-axis differs by series: steps of a unit, versions of a block, rounds of the whole.
    if event == "step":
        return _word(record["unit"]), int(record["step"]), {"ce": record["ce"]}
    if event == "round":
        share = record["on_time"] / record["assigned"] if record["assigned"] else None
        values = {"loss": record["mean_loss"], "participation": share, "seconds": record["seconds"]}
        return f"block_{record['block']}", int(record["version"]), _numbers(values)
    if event == "evaluation":
        values = {"consensus_ce": record["consensus_ce"], "euler_ce": record["euler_ce"]}
        values |= {f"block_{number}_ce": ce for number, ce in enumerate(record["block_ce"])}
        return "held_out", sum(record["versions"]), _numbers(values)
    if event == "score":
        return "held_out", int(record["step"]), {_word(record["model"]) + "_ce": record["ce"]}
    return None


def _numbers(values: Mapping[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in values.items() if value is not None}


def _word(text: str) -> str:
    return text.replace(" ", "_")


class TensorBoard:
    def __init__(self, folder: Path) -> None:
        self._make = _imported("torch.utils.tensorboard", TrackerName.TENSORBOARD).SummaryWriter
        self._folder = folder
        self._writer: Any = None

    def add(self, record: Record) -> None:
        found = scalars_of(record)
        if found is None:
            return
        series, step, values = found
        # Made at the first number: TensorBoard creates a folder at once, also for a run that is refused.
        self._writer = self._writer or self._make(str(self._folder))
        for name, value in values.items():
            self._writer.add_scalar(f"{series}/{name}", value, step, walltime=record["time"])
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class Board:
    """wandb, or trackio, which has the same calls. Every series has a step of its own."""

    def __init__(self, package: TrackerName, name: str, folder: Path, config: Mapping[str, Any]) -> None:
        self._module = _imported(str(package), package)
        self._begin = {"project": PROJECT, "name": name, "config": dict(config)}
        # trackio keeps its own folder and knows no `dir`.
        if package is TrackerName.WANDB:
            self._begin["dir"] = str(folder)
        self._run: Any = None

    def add(self, record: Record) -> None:
        found = scalars_of(record)
        if found is None:
            return
        if self._run is None:
            self._run = self._module.init(**self._begin)
        series, step, values = found
        # wandb draws everything over one counter of its own unless told otherwise; trackio has no such call.
        if hasattr(self._run, "define_metric"):
            self._run.define_metric(f"{series}/*", step_metric=f"{series}/step")
        self._module.log({f"{series}/step": step, **{f"{series}/{name}": v for name, v in values.items()}})

    def close(self) -> None:
        if self._run is not None:
            self._module.finish()


def _imported(module: str, package: TrackerName) -> Any:
    try:
        return import_module(module)
    except ImportError:
        raise UserError(
            f"--track {package} needs the package {package}: pip install 'blocktrain[{package}]'"
        ) from None


class Recorder:
    """Writes records to every tracker."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = trackers
        self._seen: set[tuple[Any, ...]] = set()

    def add(self, event: str, **values: Any) -> None:
        self.write({"event": event, "time": time.time(), **values})

    def write(self, record: Record) -> None:
        for tracker in self._trackers:
            tracker.add(record)

    def status(self, status: StatusAnswer) -> None:
        """Rounds and evaluations that were not written yet."""
        for record in status_records(status):
            key = record_key(record)
            if key is not None and key not in self._seen:
                self._seen.add(key)
                self.write(record)

    def report(self, report: TrainingReport) -> None:
        """The final scores of a local run."""
        scores, steps = report.scores, report.recipe["training"]["steps"]
        rows = [("bigram counts", scores.bigram_ce)]
        rows += [(f"block {number}", score.ce) for number, score in enumerate(scores.blocks)]
        rows += [(name, score.ce) for name, score in scores.composed()]
        if scores.reference is not None:
            rows.append(("reference", scores.reference.ce))
        for model, ce in rows:
            self.add("score", model=model, step=steps, ce=ce)

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()


def status_records(status: StatusAnswer) -> Iterator[Record]:
    for report in status.reports:
        yield {"event": "round", "time": status.server_time, **report.model_dump(mode="json")}
    for evaluation in status.evaluations:
        yield {"event": "evaluation", **evaluation.model_dump(mode="json")}


@contextmanager
def recording(
    folder: Path, track: Sequence[TrackerName], name: str, config: Mapping[str, Any]
) -> Iterator[Recorder]:
    """A recorder for the run in `folder`; missing packages are told before anything is begun."""
    trackers: list[Tracker] = [MetricsFile(folder / METRICS_FILE)]
    # `--track wandb --track wandb` would start two runs.
    for one in dict.fromkeys(track):
        if one is TrackerName.TENSORBOARD:
            trackers.append(TensorBoard(folder / "tensorboard"))
        else:
            trackers.append(Board(one, name, folder, config))
    recorder = Recorder(trackers)
    try:
        yield recorder
    finally:
        recorder.close()


class RecordedSteps:
    """Watches a local run for a recorder, and passes everything on."""

    def __init__(self, observer: Observer, recorder: Recorder) -> None:
        self._observer, self._recorder = observer, recorder

    def started(self, unit: str, step: int, total: int) -> None:
        # A finished unit of a resumed run is not started again, and the file should not say so.
        if step < total:
            self._recorder.add("started", unit=unit, step=step, steps=total)
        self._observer.started(unit, step, total)

    def stepped(self, unit: str, step: int, total: int, ce: float, tokens: int) -> None:
        self._recorder.add("step", unit=unit, step=step, ce=ce, bytes=step * tokens)
        self._observer.stepped(unit, step, total, ce, tokens)

    def message(self, text: str) -> None:
        self._observer.message(text)
