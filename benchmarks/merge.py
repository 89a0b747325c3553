"""Four replicas of a 64 MB block: seconds from the last reveal to the new snapshot being fetchable.

    python benchmarks/merge.py [--codec sparse:64] [--replicas 4] [--repeat 3]

Starts the real coordinator as a process of its own and speaks signed HTTP to it over loopback. Exits 1 when
the median is above LIMIT_SECONDS: an aim of ours, and no measurement of another project.
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
from provenance import check_claims

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
RECIPE = """
name = "merge benchmark"
model = {{ width = 512, heads = 8, blocks = 1, layers_per_block = 5, context = 64 }}
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


def one_round(replicas: Sequence[Replica], round_: int, pid: int) -> Timing:
    parts = payloads(replicas[0].run, round_, len(replicas))
    for replica, payload in zip(replicas, parts, strict=True):
        replica.commit(payload)
    for replica, payload in zip(replicas[:-1], parts, strict=False):
        replica.reveal(payload)
    started, used = time.perf_counter(), cpu_seconds(pid)
    replicas[-1].reveal(parts[-1])
    judged = time.perf_counter()
    head = wait_for_version(replicas[0], round_ + 1)
    published, used = time.perf_counter(), cpu_seconds(pid) - used
    content = replicas[0].http.get(f"{replicas[0].url}/v1/snapshots/{head}").content
    fetched = time.perf_counter()
    print(
        f"round {round_}: last reveal {judged - started:.3f} s, merged {published - judged:.3f} s later, "
        f"{used:.2f} s of processor time; fetched {len(content) / 1e6:.0f} MB in {fetched - published:.3f} s"
    )
    return Timing(published - started, published - judged, used)


def wait_for_version(replica: Replica, version: int) -> str:
    while True:
        block = BlockAnswer.model_validate_json(replica.http.get(f"{replica.url}/v1/blocks/0").content)
        if block.head_version >= version:
            return block.head_hash
        time.sleep(0.04)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--codec", default="sparse:64")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, httpx2.Client(timeout=60) as http:
        process, url = start(Path(folder), options.codec, options.replicas)
        try:
            run = RunAnswer.model_validate_json(http.get(f"{url}/v1/run").content)
            replicas = [Replica(url, run, http) for _ in range(options.replicas)]
            for replica in replicas:
                replica.post("/v1/join", JoinRequest(corpus_sha256=run.corpus_sha256))
            times = [one_round(replicas, round_, process.pid) for round_ in range(options.repeat)]
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
