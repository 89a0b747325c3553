"""The attacks of the threat model that must leave no trace: each has one round of a warm run to do its worst.

An attack is a generator: it does what it does, yields while two honest workers deliver the round's updates,
and may go on or look back afterwards. What it expects it tells the scene; the snapshot that ends the round is
to be that of the run without it, byte for byte. Attackers are established workers wherever that matters, so
that nothing is refused merely for coming from a newcomer.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import http.server
import io
import json
import pickle
import shutil
import socket
import sqlite3
import struct
import threading
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import numpy as np

from blocktrain.client.cache import BlobCache
from blocktrain.client.coordinator import CoordinatorClient
from blocktrain.client.run import Layout
from blocktrain.client.snapshots import Snapshots
from blocktrain.client.traffic import Traffic
from blocktrain.codec_spec import CHUNK_VALUES
from blocktrain.coordinator.storage.ledger import signed_bytes
from blocktrain.errors import WireError
from blocktrain.judge.ledger_check import verify_place
from blocktrain.training.setup import Setup
from blocktrain.wire.codec import Schema, frame_length
from blocktrain.wire.hashing import content_hash
from blocktrain.wire.identity import Identity, load_or_create
from blocktrain.wire.messages import Assignment, Receipt, Verdict
from tests.adversaries.swarm import FAR_AWAY, Client, Swarm, Warm, honest_leases
from tests.adversaries.training import noise_like, partly_moved, scaled
from tests.coordinator.peer import Refused
from tests.forked import processes
from tests.waiting import until

Attack = Callable[["Scene"], Iterator[None]]

SYBILS = 1000
SOCKETS = 500


@dataclass
class Scene:
    """One round of a warm run: honest workers with their leases, and attackers to which the round is open."""

    warm: Warm
    running: Swarm
    honest: list[Client]
    leases: list[Assignment]
    payloads: list[bytes]
    """What the honest workers will send."""
    delivered: set[int] = field(default_factory=set)
    happened: list[str] = field(default_factory=list)
    surprises: list[str] = field(default_factory=list)
    notes: dict[str, float] = field(default_factory=dict)
    """What the benchmark prints beside the table."""
    _sleepers: int = 0

    def expect(self, what: str, found: object, *expected: object) -> None:
        """Note what became of a try; a surprise where it is none of `expected`."""
        line = f"{what}: {found}"
        self.happened.append(line)
        if str(found) not in map(str, expected):
            self.surprises.append(f"{line}, expected {' or '.join(map(str, expected))}")

    def sleeper(self) -> Client:
        """The next established worker who attacks."""
        identity = self.warm.sleepers[self._sleepers]
        self._sleepers += 1
        return self.running.client(identity, join=False)

    def deliver_honest(self, number: int) -> Verdict:
        self.delivered.add(number)
        return self.honest[number].deliver_payload(self.leases[number], self.payloads[number])

    def honest_delta(self, number: int = 0) -> dict[str, Any]:
        return self.honest[0].decoded(self.payloads[number])

    def own_work(self, shard: int = 7) -> dict[str, Any]:
        """What an attacker gets by really training, on text of its own."""
        return dict(self.running.honest_delta(self.honest[0], shard))

    def send(self, what: str, delta: dict[str, Any], *expected: str) -> Client:
        client = self.sleeper()
        verdict = client.judged(client.lend(), delta)
        self.expect(what, verdict.reason, *expected)
        return client

    def send_bytes(self, what: str, payload: bytes, *expected: str) -> Client:
        client = self.sleeper()
        verdict = client.deliver_payload(client.lend(), payload)
        self.expect(what, verdict.reason, *expected)
        return client

    def refused(self, what: str, call: Callable[[], object], *expected: str) -> None:
        try:
            call()
        except Refused as refusal:
            self.expect(what, refusal.reason, *expected)
        else:
            self.expect(what, "let in", *expected)

    def answered(self, what: str, response: httpx2.Response, *expected: int) -> None:
        self.expect(what, response.status_code, *expected)

    def raw(self, request: bytes) -> bytes:
        """The answer to bytes that no sound client sends; its first line."""
        address = urlsplit(self.running.program.url)
        with socket.create_connection((address.hostname, address.port), timeout=60) as connection:
            with contextlib.suppress(ConnectionResetError, BrokenPipeError):
                connection.sendall(request)
            answer = b""
            with contextlib.suppress(ConnectionResetError):
                while piece := connection.recv(65536):
                    answer += piece
        return answer


def play(warm: Warm, attack: Attack, folder: Path) -> tuple[Scene, str, float]:
    """The scene afterwards, the snapshot the round ended with, and the coordinator's peak memory in MB."""
    with warm.swarm(folder) as running:
        honest = [running.client(identity, join=False) for identity in warm.honest]
        lent = honest_leases(running, honest)
        scene = Scene(
            warm,
            running,
            honest,
            [lease for _, lease, _ in lent],
            [one.encoded(delta) for one, _, delta in lent],
        )
        version = lent[0][1].round
        running.forget_peak()
        acting = attack(scene)
        next(acting)
        begun = time.monotonic()
        for number in range(len(honest)):
            if number not in scene.delivered:
                scene.deliver_honest(number)
        head = running.wait_for_version(honest[0], version + 1)
        scene.notes["round_seconds"] = time.monotonic() - begun
        with contextlib.suppress(StopIteration):
            next(acting)
        assert running.program.process.is_alive(), "the coordinator is gone"
        return scene, head, running.resident_mb("VmHWM")


def nobody(scene: Scene) -> Iterator[None]:
    """The run without attackers."""
    yield


def everybody_works(scene: Scene) -> Iterator[None]:
    """As many updates as an attack has, all honest: what the coordinator's memory is compared with."""
    for shard, _ in enumerate(scene.warm.sleepers, start=len(scene.honest)):
        client = scene.sleeper()
        client.judged(client.lend(), scene.own_work(shard))
    yield


# --- 1, 2, 3, 5: values -----------------------------------------------------------------------------------


def first_tensor(client: Client, *, chunked: bool) -> int:
    """Where in a frame the first tensor begins that travels in chunks, or does not."""
    tensors = client.schema(0).tensors
    for number, (_, shape) in enumerate(tensors):
        if (int(np.prod(shape)) >= CHUNK_VALUES) is chunked:
            return frame_length(client.codec, Schema(tensors[:number]))
    raise AssertionError("no such tensor")


def record_bytes(client: Client) -> int:
    return frame_length(client.codec, Schema((("chunk", (CHUNK_VALUES,)),)))


def patched(payload: bytes, place: int, value: bytes) -> bytes:
    return payload[:place] + value + payload[place + len(value) :]


def not_finite(scene: Scene) -> Iterator[None]:
    client, payload = scene.honest[0], scene.honest[0].encoded(scene.own_work())
    dense = first_tensor(client, chunked=False)
    magnitudes = first_tensor(client, chunked=True) + record_bytes(client) - 4
    scene.send_bytes("NaN value", patched(payload, dense, struct.pack("<e", float("nan"))), "not_finite")
    scene.send_bytes("infinite magnitude", patched(payload, magnitudes, b"\0\x7c\0\x7c"), "malformed")
    scene.send_bytes("negative NaN magnitude", patched(payload, magnitudes, b"\xff\xff\xff\xff"), "malformed")
    scene.send("subnormal magnitudes", scaled(scene.own_work(), 1e-6), "norm")
    yield


def large_norm(scene: Scene) -> Iterator[None]:
    noise = noise_like(scene.own_work(), 1)
    scene.send("noise x 8", scaled(noise, 8), "harmful")
    for number, factor in enumerate((20, 1e3, 1e6)):
        scene.send(f"noise x {factor:g}", scaled(noise_like(noise, 2 + number), factor), "norm")
    yield


def sign_flip(scene: Scene) -> Iterator[None]:
    attacker = scene.send("own work reversed", scaled(scene.own_work(), -1.0), "harmful")
    scene.send("an honest update reversed", scaled(scene.honest_delta(), -1.0), "harmful")
    yield
    scene.expect("credit", scene.running.standing(attacker).merged, 0)


def empty(scene: Scene) -> Iterator[None]:
    one = scene.send("all zeros", scaled(scene.own_work(), 0.0), "norm", "no_gain")
    two = scene.send("own work x 0.001", scaled(scene.own_work(), 1e-3), "norm", "no_gain")
    yield
    scene.expect("credit", scene.running.standing(one).merged + scene.running.standing(two).merged, 0)


# --- 6, 7: other people's work ----------------------------------------------------------------------------


def copying(scene: Scene) -> Iterator[None]:
    """The worst case: the copier sees an update as soon as it is sent."""
    scene.deliver_honest(0)
    source = scene.honest_delta()
    first = scene.send("an exact copy under another key", source, "duplicate")
    scene.send("scaled to 0.9", scaled(source, 0.9), "duplicate")
    scene.send("60 % of the indices changed", partly_moved(source, 0.6, 1), "duplicate")
    old = scene.honest[0].merges(0).merges[-1].inputs[0].payload_hash
    scene.send_bytes(
        "an update of the round before", scene.honest[0].get(f"/v1/updates/{old}").content, "duplicate"
    )
    yield
    scene.expect("credit", scene.running.standing(first).merged, 0)


def replay(scene: Scene) -> Iterator[None]:
    client = scene.running.client()
    headers = client.headers("POST", "/v1/assignments", b"{}")
    address = f"{client.url}/v1/assignments"
    scene.answered("a request", client.http.post(address, content=b"{}", headers=headers), 200)
    scene.answered("the same again", client.http.post(address, content=b"{}", headers=headers), 401)
    other = client.send("POST", "/v1/assignments", b"{}", audience="cd" * 32)
    scene.answered("signed for another run", other, 401)
    stolen = scene.leases[0]
    payload = client.encoded(scene.own_work())
    scene.refused("another's assignment", lambda: client.commit(stolen, payload), "not_yours")
    lease = client.lend()
    scene.refused("a base of no block", lambda: client.commit(lease, payload, "ab" * 32), "unknown_base")
    client.commit(lease, payload)
    twice = client.encoded(scaled(scene.own_work(), 0.5))
    scene.refused("a second commit", lambda: client.commit(lease, twice), "already_committed")
    scene.refused("another's payload", lambda: client.put(scene.payloads[0]), "not_committed")
    yield


# --- 9, 10, 11, 12: bytes ---------------------------------------------------------------------------------


def wrong_length(scene: Scene) -> Iterator[None]:
    client = scene.running.client()
    lease, payload = client.lend(), client.encoded(scene.own_work())
    chunk = record_bytes(client)
    for what, changed in (
        ("one byte more", payload + b"\0"),
        ("one byte less", payload[:-1]),
        ("one chunk more", payload + bytes(chunk)),
        ("one chunk less", payload[:-chunk]),
        ("a wider block's", bytes(4 * len(payload))),
        ("nothing", b""),
    ):
        scene.refused(what, lambda changed=changed: client.commit(lease, changed), "wrong_length")  # type: ignore[misc]
    lie = client.commit(lease, payload + b"\0", payload_bytes=len(payload))
    assert lie.verdict is None
    scene.refused("longer than it promised", lambda: client.put(payload + b"\0"), "wrong_length", "too_large")
    yield


def head(method: str, path: str, headers: dict[str, str]) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: x", "Connection: close"]
    return "\r\n".join([*lines, *(f"{name}: {value}" for name, value in headers.items()), "", ""]).encode()


def status_of(answer: bytes) -> str:
    return answer.split(b" ", 2)[1].decode() if answer.startswith(b"HTTP/1.1 ") else "closed"


def endless_body(scene: Scene) -> Iterator[None]:
    client = scene.running.client()
    lease, payload = client.lend(), client.encoded(scene.own_work())
    client.commit(lease, payload)
    path, megabytes = f"/v1/updates/{content_hash(payload)}", bytes(1 << 20) * 32
    terabyte, chunks = {"Content-Length": str(1 << 40)}, {"Transfer-Encoding": "chunked"}
    for what, request, expected in (
        ("a terabyte declared", head("POST", "/v1/join", terabyte) + megabytes, "413"),
        ("a payload of a terabyte", head("PUT", path, terabyte) + megabytes, "413"),
        ("chunks without end", head("PUT", path, chunks) + b"ffffff\r\n" + megabytes, "411"),
        ("a length of letters", head("PUT", path, {"Content-Length": "all of it"}), "400"),
        ("a body with more behind it", head("POST", "/v1/join", {"Content-Length": "9"}) + megabytes, "401"),
        ("a head without end", b"GET / HTTP/1.1\r\nX: " + megabytes, "400"),
    ):  # fmt: skip
        scene.expect(what, status_of(scene.raw(request)), expected, "400", "closed")
    yield


class Bomb:
    """Unpickling it leaves a file behind."""

    def __init__(self, place: Path) -> None:
        self._place = place

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._place,)


def bombs(scene: Scene) -> Iterator[None]:
    length = len(scene.payloads[0])
    place = scene.running.folder / "exploded"
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("data.pkl", pickle.dumps(Bomb(place)))
        file.writestr("data/0", bytes(64 << 20))
    claims = json.dumps({"w": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 4 << 40]}}).encode()
    for what, content in (
        ("a pickle that runs code", pickle.dumps(Bomb(place))),
        ("a zip of 64 MB in 64 kB", archive.getvalue()),
        ("safetensors that claim 4 TB", struct.pack("<Q", len(claims)) + claims),
    ):
        # Behind what a reader of such files looks for, bytes that no frame has.
        scene.send_bytes(what, content[:length].ljust(length, b"\xff"), "malformed", "not_finite")
    yield
    scene.expect("code was run", place.exists(), False)


def bad_indices(scene: Scene) -> Iterator[None]:
    client, payload = scene.honest[0], scene.honest[0].encoded(scene.own_work())
    place = first_tensor(client, chunked=True)
    index = payload[place : place + 3]
    scene.send_bytes("the first index twice", patched(payload, place + 3, index), "malformed")
    swapped = payload[place + 3 : place + 6] + index
    scene.send_bytes("indices out of order", patched(payload, place, swapped), "malformed")
    generator = np.random.default_rng(0)
    scene.send_bytes("a random frame", generator.bytes(len(payload)), "malformed", "not_finite")
    scene.send_bytes("all ones", b"\xff" * len(payload), "malformed", "not_finite")
    yield


# --- 13, 14, 15: crowds and silence -----------------------------------------------------------------------


def join_many(url: str, count: int) -> Counter[str]:
    """In a process of its own, on many connections: how it went, by reason."""

    crowd = Client(url, time.time, address=FAR_AWAY)

    def joins(_: int) -> str:
        client = copy.copy(crowd)
        client.identity = Identity.generate()
        try:
            client.join()
            client.ask()
        except Refused as refusal:
            return str(refusal.reason)
        return "joined"

    with contextlib.closing(crowd), concurrent.futures.ThreadPoolExecutor(32) as threads:
        return Counter(threads.map(joins, range(count)))


def sybils(scene: Scene) -> Iterator[None]:
    """A thousand identities at once from one address; an honest newcomer among them."""
    url = scene.running.program.url
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=processes) as elsewhere:
        trying = elsewhere.submit(join_many, url, SYBILS)
        crowd = scene.running.client()
        until("the crowd is there", lambda: len(crowd.get("/v1/workers").json()["workers"]) > 8)
        begun = time.monotonic()
        newcomer = scene.running.client()
        scene.notes["honest_join_seconds"] = time.monotonic() - begun
        newcomer.hand_back(newcomer.lend())
        yield
        outcomes = trying.result()
    cap = scene.running.recipe.trust.max_workers_per_address
    scene.expect("joined", outcomes["joined"], cap)
    scene.expect("turned away", outcomes["address_full"], SYBILS - cap)


def slow_sockets(scene: Scene) -> Iterator[None]:
    """Each a request head that does not end; half of them from the honest workers' own address."""
    address = urlsplit(scene.running.program.url)
    sockets = []
    for number in range(SOCKETS):
        source = (FAR_AWAY if number % 2 else "127.0.0.1", 0)
        sockets.append(socket.create_connection((address.hostname, address.port), 30, source))
        sockets[-1].sendall(b"GET /healthz HTTP/1.1\r\n")
    stop = threading.Event()

    def dribble() -> None:
        while not stop.is_set():
            for one in sockets:
                with contextlib.suppress(OSError):
                    one.sendall(b"X: y\r\n")
            stop.wait(0.5)

    thread = threading.Thread(target=dribble, daemon=True)
    thread.start()
    scene.happened.append(f"{len(sockets)} sockets")
    scene.answered("somebody else meanwhile", httpx2.get(f"{scene.running.program.url}/healthz"), 200)
    yield
    scene.answered("and afterwards", httpx2.get(f"{scene.running.program.url}/healthz"), 200)
    stop.set()
    thread.join()
    for one in sockets:
        one.close()


def withholding(scene: Scene) -> Iterator[None]:
    """Established workers promise and say no more: the round waits for its deadline, not for them."""
    for delta in (scene.own_work(), noise_like(scene.own_work(), 2)):
        client = scene.sleeper()
        client.commit(client.lend(), client.encoded(delta))
    yield
    scene.expect("rating", f"{scene.running.standing(client).rating:.2f}", "0.80")


# --- 18, 19, 20: what is written and served ---------------------------------------------------------------


def forged_ledger(scene: Scene) -> Iterator[None]:
    """The operator's own attack, on a copy of what the coordinator wrote."""
    yield
    receipt = scene.deliver_honest(0).receipt
    forgery = scene.running.folder / "copy"
    shutil.copytree(scene.running.folder / "data", forgery)
    honest = verify_place(str(forgery), [receipt])
    scene.expect("untouched", honest.ok, True)
    key = load_or_create(forgery / "coordinator.key")
    other = "ab" * 32
    forged = Receipt(
        sequence=receipt.sequence, entry_hash=other, signature=key.sign(signed_bytes(other)).hex()
    )
    two_heads = verify_place(str(forgery), [forged]).problems
    scene.expect("a second head", "two heads" in "".join(two_heads), True)
    _execute(forgery, "UPDATE ledger SET body = replace(body, 'accepted', 'refused') WHERE kind = 'verdict'")
    report = verify_place(str(forgery)).report
    scene.expect("a changed verdict", "(verdict)" in report.reason, True)
    shutil.copy(scene.running.folder / "data" / "coordinator.sqlite", forgery)
    for payload in (forgery / "blobs" / "payloads").iterdir():
        payload.write_bytes(patched(payload.read_bytes(), 0, b"\0\0"))
    report = verify_place(str(forgery)).report
    scene.expect("changed payloads", "(merge)" in report.reason, True)


def _execute(folder: Path, statement: str) -> None:
    with contextlib.closing(sqlite3.connect(folder / "coordinator.sqlite")) as connection, connection:
        connection.execute(statement)


INJECTIONS = (
    "<script>alert(1)</script>",
    "../../../etc/passwd",
    "a\nINFO forged line",
    "%0d%0aSet-Cookie: x",
    "x" * 70,
)


def injection(scene: Scene) -> Iterator[None]:
    client = scene.running.client(join=False)
    evil = "\nINFO forged line <script>"
    for text in INJECTIONS:
        body = json.dumps({"corpus_sha256": client.run.corpus_sha256, "device": text}).encode()
        allowed = (200, 422) if text.startswith("..") else (422,)  # no string of a peer is ever a path
        scene.answered(f"device {text[:12]!r}", client.send("POST", "/v1/join", body), *allowed)
    body = json.dumps({"corpus_sha256": client.run.corpus_sha256, "versions": {evil: "1"}}).encode()
    scene.answered("a key of a message", client.send("POST", "/v1/join", body), 422)
    for path in (
        "/v1/snapshots/..%2f..%2fcoordinator.key",
        "/v1/snapshots/../../coordinator.key",
        "/v1/updates/%00",
        "/v1/workers/<script>",
        "/v1/blocks/0;DROP TABLE ledger",
    ):
        answer = scene.raw(head("GET", path.replace(" ", "%20"), {}))
        scene.expect(path[:24], status_of(answer), "404", "422")
        scene.expect("repeated in the answer", b"<script>" in answer, False)
    yield
    log = scene.running.log_text()
    scene.expect("forged log lines", sum(line.startswith("INFO forged") for line in log.splitlines()), 0)
    shown = client.get("/v1/status").text + client.get("/v1/workers").text + client.get("/metrics").text
    scene.expect("shown to others", "<script>" in shown, False)


class Mirror(http.server.BaseHTTPRequestHandler):
    """Passes requests on, and changes a byte of every snapshot and payload that comes back."""

    upstream = ""

    def do_GET(self) -> None:
        answer = httpx2.get(self.upstream + self.path)
        content = answer.content
        if self.path.startswith(("/v1/snapshots/", "/v1/updates/")) and content:
            content = patched(content, len(content) - 5, b"\x11")
        self.send_response(answer.status_code)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


def tampered_snapshot(scene: Scene) -> Iterator[None]:
    """A joiner behind a mirror that lies about weights, with the worker's own code."""
    handler = type("Here", (Mirror,), {"upstream": scene.running.program.url})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    said: list[str] = []
    url = f"http://127.0.0.1:{server.server_address[1]}"
    client = CoordinatorClient(
        url, Identity.generate(), Traffic(), threading.Event(), said.append, attempts=2
    )
    snapshots = Snapshots(
        client,
        BlobCache(scene.running.folder / "cache", 1 << 30),
        Setup.of(scene.running.recipe),
        [Layout.of(one) for one in client.run().blocks],
        said.append,
    )
    try:
        snapshots.newest_for_joiner(0, None)
    except WireError as error:
        scene.expect("the joiner", "damaged" in str(error), True)
    else:
        scene.expect("the joiner", "believed it", "refused it")
    yield
    client.close()
    server.shutdown()
    server.server_close()
    scene.expect("tries", sum("damaged" in line for line in said), 3)


@dataclass(frozen=True)
class Entry:
    number: int
    name: str
    attack: Attack


REFUSED = (
    Entry(1, "NaN, Inf, subnormal magnitudes", not_finite),
    Entry(2, "norm 10x to 1e6x", large_norm),
    Entry(3, "sign flip", sign_flip),
    Entry(5, "zero or tiny update", empty),
    Entry(6, "copying, also partly changed", copying),
    Entry(7, "replay", replay),
    Entry(9, "wrong length", wrong_length),
    Entry(10, "oversized or endless body", endless_body),
    Entry(11, "pickle, zip, tensor bomb", bombs),
    Entry(12, "bad indices", bad_indices),
    Entry(13, "1,000 sybil identities", sybils),
    Entry(14, "slow-loris, 500 sockets", slow_sockets),
    Entry(15, "commit, then withhold", withholding),
    Entry(18, "ledger tampering, two heads", forged_ledger),
    Entry(19, "injection", injection),
    Entry(20, "tampered snapshot for a joiner", tampered_snapshot),
)
