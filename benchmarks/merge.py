"""Four replicas of a 64 MB block: seconds from the last reveal to the new snapshot being fetchable, and the
memory that takes.

    python benchmarks/merge.py [--codec sparse:64] [--replicas 4] [--repeat 3]
    python benchmarks/merge.py --codec sign --width 2048 --repeat 1      # 263 M parameters

Starts the real coordinator as a process of its own and speaks signed HTTP to it over loopback. hivemind's
averaging round of the same size takes 1.4 s on two cores, which is the line to stay under; a large block may
take 30 s per billion parameters. The coordinator's memory may grow by 0.75 times the block's fp32 size in a
round, and from 250 M parameters on the whole process stays under that. Exits with 1 where one of these fails.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
import numpy as np

from blocktrain.wire.codec import CodecSpec, Schema, encode
from blocktrain.wire.hashing import content_hash
from blocktrain.wire.identity import Identity
from blocktrain.wire.messages import (
    Assignment,
    AssignmentRequest,
    BlockAnswer,
    CommitRequest,
    JoinRequest,
    Request,
    RunAnswer,
)
from blocktrain.wire.signing import body_digest, fresh_nonce, sign_request

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


@dataclass
class Replica:
    url: str
    run: RunAnswer
    http: httpx2.Client
    identity: Identity = field(default_factory=Identity.generate)

    def send(self, method: str, path: str, body: bytes = b"") -> httpx2.Response:
        headers = sign_request(
            self.identity,
            method,
            path,
            now=time.time(),
            nonce=fresh_nonce(),
            content_digest=body_digest(body),
            content_length=len(body),
            audience=self.run.run_id,
        )
        response = self.http.request(method, self.url + path, content=body, headers=headers)
        response.raise_for_status()
        return response

    def post(self, path: str, message: Request) -> bytes:
        return self.send("POST", path, message.model_dump_json().encode()).content

    def commit(self, payload: bytes) -> None:
        answer = self.post("/v1/assignments", AssignmentRequest())
        assignment = Assignment.model_validate_json(answer)
        promise = CommitRequest(
            payload_hash=content_hash(payload), payload_bytes=len(payload), base_hash=assignment.base_hash
        )
        self.post(f"/v1/assignments/{assignment.assignment_id}/commit", promise)

    def reveal(self, payload: bytes) -> None:
        self.send("PUT", f"/v1/updates/{content_hash(payload)}", payload)


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


def one_round(replicas: Sequence[Replica], round_: int, pid: int) -> Timing:
    parts = payloads(replicas[0].run, round_, len(replicas))
    for replica, payload in zip(replicas, parts, strict=True):
        replica.commit(payload)
    Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak is counted from here
    before = memory_bytes(pid, "VmRSS")
    for replica, payload in zip(replicas[:-1], parts, strict=False):
        replica.reveal(payload)
    started, used = time.perf_counter(), cpu_seconds(pid)
    replicas[-1].reveal(parts[-1])
    judged = time.perf_counter()
    head = wait_for_version(replicas[0], round_ + 1)
    published, used = time.perf_counter(), cpu_seconds(pid) - used
    size = 0
    with replicas[0].http.stream("GET", f"{replicas[0].url}/v1/snapshots/{head}") as answer:
        for piece in answer.iter_bytes():
            size += len(piece)
    fetched, peak = time.perf_counter(), memory_bytes(pid, "VmHWM")
    print(
        f"round {round_}: last reveal {judged - started:.3f} s, merged {published - judged:.3f} s later, "
        f"{used:.2f} s of processor time; fetched {size / 1e6:.0f} MB in {fetched - published:.3f} s; "
        f"memory {before / 1e6:.0f} MB before, {peak / 1e6:.0f} MB at most"
    )
    return Timing(published - started, published - judged, used, peak, peak - before)


def wait_for_version(replica: Replica, version: int) -> str:
    while True:
        block = BlockAnswer.model_validate_json(replica.http.get(f"{replica.url}/v1/blocks/0").content)
        if block.head_version >= version:
            return block.head_hash
        time.sleep(0.04)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--codec", default="sparse:64")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--width", type=int, default=512)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, httpx2.Client(timeout=600) as http:
        process, url = start(Path(folder), options.codec, options.replicas, options.width)
        try:
            run = RunAnswer.model_validate_json(http.get(f"{url}/v1/run").content)
            replicas = [Replica(url, run, http) for _ in range(options.replicas)]
            for replica in replicas:
                replica.post("/v1/join", JoinRequest(corpus_sha256=run.corpus_sha256))
            times = [one_round(replicas, round_, process.pid) for round_ in range(options.repeat)]
        finally:
            process.kill()
            process.wait()
    sys.exit(0 if report(options.codec, options.replicas, run, times) else 1)


def report(codec: str, replicas: int, run: RunAnswer, times: Sequence[Timing]) -> bool:
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
    return whole <= limit and memory <= LIMIT_MEMORY


if __name__ == "__main__":
    main()
