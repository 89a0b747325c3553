"""Four replicas of a 64 MB block: seconds from the last reveal to the new snapshot being fetchable, and the
memory that takes.

    python benchmarks/merge.py [--codec sparse:64] [--replicas 4] [--repeat 3] [--json FILE]
    python benchmarks/merge.py --codec sign --width 2048 --repeat 1      # 263 M parameters
    python benchmarks/merge.py --codec sign --width 4096 --repeat 1      # 1.05 B parameters

Starts the real coordinator as a process of its own and speaks signed HTTP to it over loopback. Exits 1 when
the median is above LIMIT_SECONDS: an aim of ours, and no measurement of another project. A large block may
take 30 s per billion parameters. The coordinator's memory may grow by 0.75 times its fp32 size in a round,
and from 250 M parameters on the whole process stays under that.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from provenance import check_claims, write_report

from blocktrain.client.coordinator import CoordinatorClient, public_client
from blocktrain.codec_spec import CodecSpec
from blocktrain.wire.codec import Schema, encode
from blocktrain.wire.hashing import content_hash
from blocktrain.wire.messages import (
    Assignment,
    AssignmentRequest,
    CommitAnswer,
    CommitRequest,
    JoinRequest,
    RunAnswer,
)

MAX_SNAPSHOT_BYTES = 1 << 33
LIMIT_SECONDS = 1.4
LIMIT_SECONDS_PER_BILLION = 30.0
LIMIT_MEMORY = 0.75
"""Of the block's fp32 size: 3 GB for a billion parameters."""
LARGE_VALUES = 250_000_000
"""From here on the limit is on the whole process; a smaller block is less than the interpreter with torch."""
RECIPE = """
name = "merge benchmark"
model = {{ width = {width}, heads = 8, blocks = 1, layers_per_block = 5, context = 64 }}
data = {{ corpus = "text.txt" }}
swarm = {{ rounds = 1000, replicas = {replicas}, codec = "{codec}", evaluate_every_seconds = 100000.0 }}
trust = {{ judge = "off", stamp_bits = 0 }}
"""


def promise(replica: CoordinatorClient, payload: bytes) -> CommitAnswer:
    """Ask for an assignment and commit `payload` to it."""
    assignment = replica.ask(AssignmentRequest())
    assert isinstance(assignment, Assignment), assignment
    commitment = CommitRequest(
        payload_hash=content_hash(payload), payload_bytes=len(payload), base_hash=assignment.base_hash
    )
    return replica.commit(assignment.assignment_id, commitment)


def start(folder: Path, codec: str, replicas: int, width: int) -> tuple[subprocess.Popen[bytes], str]:
    (folder / "text.txt").write_text("all work and no play " * 20_000)
    (folder / "recipe.toml").write_text(RECIPE.format(codec=codec, replicas=replicas, width=width))
    program = [sys.executable, "-m", "blocktrain.coordinator.main", "recipe.toml", "data", "0", "", ""]
    process = subprocess.Popen(program, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    return process, process.stdout.readline().decode().strip().removeprefix("coordinator ready url=")


def payloads(run: RunAnswer, round_: int, count: int) -> list[bytes]:
    layout = run.blocks[0]
    schema = Schema(tuple((tensor.name, tensor.shape) for tensor in layout.tensors))
    generator = np.random.default_rng(round_)
    return [
        encode(
            CodecSpec.parse(layout.codec),
            schema,
            {
                name: np.asarray(np.float32(0.01) * generator.standard_normal(shape, np.float32))
                for name, shape in schema.tensors
            },
        )
        for _ in range(count)
    ]


@dataclass(frozen=True)
class Timing:
    whole: float
    """Seconds from the start of the last upload to the snapshot being fetchable."""
    after_verdict: float
    cpu: float
    """Processor seconds of the coordinator in that time: what it takes, however busy the machine."""
    peak: int
    """Most bytes that the coordinator had in memory from the first reveal on."""
    growth: int
    """By how much that is more than before."""


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_bytes(pid: int, field: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))


def one_round(replicas: Sequence[CoordinatorClient], run: RunAnswer, round_: int, pid: int) -> Timing:
    parts = payloads(run, round_, len(replicas))
    waiting = [
        (replica, payload, promise(replica, payload))
        for replica, payload in zip(replicas, parts, strict=True)
    ]
    *first, (last, payload, promised) = waiting
    Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak is counted from here
    before = memory_bytes(pid, "VmRSS")
    for replica, part, answer in first:
        replica.reveal(content_hash(part), part, answer)
    started, used = time.perf_counter(), cpu_seconds(pid)
    last.reveal(content_hash(payload), payload, promised)
    judged = time.perf_counter()
    while (block := last.block(0)).head_version <= round_:
        time.sleep(0.04)
    published, used = time.perf_counter(), cpu_seconds(pid) - used
    size = len(last.fetch(f"/v1/snapshots/{block.head_hash}", MAX_SNAPSHOT_BYTES))
    fetched, peak = time.perf_counter(), memory_bytes(pid, "VmHWM")
    print(
        f"round {round_}: last reveal {judged - started:.3f} s, merged {published - judged:.3f} s later, "
        f"{used:.2f} s of processor time; fetched {size / 1e6:.0f} MB in {fetched - published:.3f} s; "
        f"memory {before / 1e6:.0f} MB before, {peak / 1e6:.0f} MB at most"
    )
    return Timing(published - started, published - judged, used, peak, peak - before)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--codec", default="sparse:64")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as open_clients:
        process, url = start(Path(folder), options.codec, options.replicas, options.width)
        try:
            replicas = [public_client(url) for _ in range(options.replicas)]
            for replica in replicas:
                open_clients.callback(replica.close)
                run = replica.run()
                replica.audience = run.run_id
                replica.join(JoinRequest(corpus_sha256=run.corpus_sha256))
            times = [one_round(replicas, run, round_, process.pid) for round_ in range(options.repeat)]
        finally:
            process.kill()
            process.wait()
    return report(options.codec, options.replicas, run, times, options.json)


def report(codec: str, replicas: int, run: RunAnswer, times: Sequence[Timing], path: Path | None) -> int:
    values = sum(int(np.prod(tensor.shape, dtype=np.int64)) for tensor in run.blocks[0].tensors)
    whole = statistics.median(one.whole for one in times)
    rest = statistics.median(one.after_verdict for one in times)
    cpu = statistics.median(one.cpu for one in times)
    limit = max(LIMIT_SECONDS, LIMIT_SECONDS_PER_BILLION * values / 1e9)
    verdict = "within" if whole <= limit else "above"
    large = values >= LARGE_VALUES
    memory = max(one.peak if large else one.growth for one in times) / (4 * values)
    print(
        f"{replicas} replicas of {4 * values / 1e6:.0f} MB, {codec} "
        f"({run.blocks[0].payload_bytes / 1e6:.2f} MB each): last reveal begun to snapshot fetchable "
        f"{whole:.2f} s (median of {len(times)}, worst {max(one.whole for one in times):.2f} s), of which "
        f"{rest:.2f} s after its verdict, {cpu:.2f} s of processor time; {verdict} {limit:.1f} s "
        f"(load of this machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores)"
    )
    growth, counted = max(one.growth for one in times), "whole process" if large else "growth"
    print(
        f"memory: {max(one.peak for one in times) / 1e6:.0f} MB at most, {growth / 1e6:.0f} MB of it for the "
        f"round; {counted} {memory:.2f} times the block, "
        f"{'within' if memory <= LIMIT_MEMORY else 'above'} {LIMIT_MEMORY}"
    )
    numbers = {
        "codec": codec,
        "replicas": replicas,
        "parameters": values,
        "payload_bytes": run.blocks[0].payload_bytes,
        "seconds": whole,
        "processor_seconds": cpu,
        "peak_bytes": max(one.peak for one in times),
        "load": os.getloadavg()[0],
    }
    write_report(path, "merge", numbers)
    return check_claims(
        {
            f"merged within {limit:.1f} s": whole <= limit,
            f"memory within {LIMIT_MEMORY} times the block": memory <= LIMIT_MEMORY,
        }
    )


if __name__ == "__main__":
    sys.exit(main())
