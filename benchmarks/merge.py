"""Four replicas of a 64 MB block: seconds from the last reveal to the new snapshot being fetchable.

    python benchmarks/merge.py [--codec sparse:64] [--replicas 4] [--repeat 3]

Starts the real coordinator as a process of its own and speaks signed HTTP to it over loopback. Exits 1 when
the median is above LIMIT_SECONDS: an aim of ours, and no measurement of another project.
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
from provenance import check_claims

from blocktrain.client.coordinator import CoordinatorClient, public_client
from blocktrain.wire.codec import CodecSpec, Schema, encode
from blocktrain.wire.hashing import content_hash
from blocktrain.wire.messages import (
    Assignment,
    AssignmentRequest,
    CommitAnswer,
    CommitRequest,
    JoinRequest,
    RunAnswer,
)

MAX_SNAPSHOT_BYTES = 1 << 30
LIMIT_SECONDS = 1.4
RECIPE = """
name = "merge benchmark"
model = {{ width = 512, heads = 8, blocks = 1, layers_per_block = 5, context = 64 }}
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


def start(folder: Path, codec: str, replicas: int) -> tuple[subprocess.Popen[bytes], str]:
    (folder / "text.txt").write_text("all work and no play " * 20_000)
    (folder / "recipe.toml").write_text(RECIPE.format(codec=codec, replicas=replicas))
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
                name: np.asarray(0.01 * generator.standard_normal(shape), np.float32)
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


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def one_round(replicas: Sequence[CoordinatorClient], run: RunAnswer, round_: int, pid: int) -> Timing:
    parts = payloads(run, round_, len(replicas))
    waiting = [
        (replica, payload, promise(replica, payload))
        for replica, payload in zip(replicas, parts, strict=True)
    ]
    *first, (last, payload, promised) = waiting
    for replica, part, answer in first:
        replica.reveal(content_hash(part), part, answer)
    started, used = time.perf_counter(), cpu_seconds(pid)
    last.reveal(content_hash(payload), payload, promised)
    judged = time.perf_counter()
    while (block := last.block(0)).head_version <= round_:
        time.sleep(0.04)
    published, used = time.perf_counter(), cpu_seconds(pid) - used
    content = last.fetch(f"/v1/snapshots/{block.head_hash}", MAX_SNAPSHOT_BYTES)
    fetched = time.perf_counter()
    print(
        f"round {round_}: last reveal {judged - started:.3f} s, merged {published - judged:.3f} s later, "
        f"{used:.2f} s of processor time; fetched {len(content) / 1e6:.0f} MB in {fetched - published:.3f} s"
    )
    return Timing(published - started, published - judged, used)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--codec", default="sparse:64")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as open_clients:
        process, url = start(Path(folder), options.codec, options.replicas)
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
    return report(options.codec, options.replicas, run, times)


def report(codec: str, replicas: int, run: RunAnswer, times: Sequence[Timing]) -> int:
    values = sum(int(np.prod(tensor.shape, dtype=np.int64)) for tensor in run.blocks[0].tensors)
    whole = statistics.median(one.whole for one in times)
    rest = statistics.median(one.after_verdict for one in times)
    cpu = statistics.median(one.cpu for one in times)
    verdict = "within" if whole <= LIMIT_SECONDS else "above"
    print(
        f"{replicas} replicas of {4 * values / 1e6:.0f} MB, {codec} "
        f"({run.blocks[0].payload_bytes / 1e6:.2f} MB each): last reveal begun to snapshot fetchable "
        f"{whole:.2f} s (median of {len(times)}, worst {max(one.whole for one in times):.2f} s), of which "
        f"{rest:.2f} s after its verdict, {cpu:.2f} s of processor time; {verdict} {LIMIT_SECONDS} s "
        f"(load of this machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores)"
    )
    return check_claims({f"merged within {LIMIT_SECONDS} s": whole <= LIMIT_SECONDS})


if __name__ == "__main__":
    sys.exit(main())
