"""The coordinator as seen from a client: one method per route, signed, retried, translated.

Every request has time-outs and is tried again, with jittered backoff, until the coordinator answers or the
program stops: a restart of the coordinator, a lost connection or a suspended laptop look the same from here.
Every route is safe to repeat. What the coordinator declines comes out as `RequestRefused`, and an address in
digits that it may not send us to (`places`) as `ForbiddenPlace`; a name that leads to one is tried again.
"""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import httpx2
from pydantic import BaseModel, TypeAdapter, ValidationError

from blocktrain.client.address import RunLink, port_of
from blocktrain.client.places import AllowedPlaces, LeadsNearer
from blocktrain.client.traffic import CountingTransport, Kind, Pin, Traffic
from blocktrain.errors import BlocktrainError, UserError, WireError
from blocktrain.threads import Stopped
from blocktrain.wire.identity import Identity
from blocktrain.wire.messages import (
    AssignmentAnswer,
    AssignmentRequest,
    BanRequest,
    BlockAnswer,
    ChallengeAnswer,
    CommitAnswer,
    CommitRequest,
    ContributionsAnswer,
    ErrorReason,
    EvidenceReport,
    HeartbeatAnswer,
    HeartbeatRequest,
    JoinAnswer,
    JoinRequest,
    JudgeAnswer,
    LedgerAnswer,
    MergesAnswer,
    OperatorAnswer,
    ReturnAnswer,
    RunAnswer,
    StatusAnswer,
    Verdict,
    WorkersAnswer,
)
from blocktrain.wire.signing import body_digest, fresh_nonce, sign_request

FRESH_SHARE = 0.8
"""Of an upload address's time: what has not begun by then gets a new address."""
UPLOAD_TRIES = 6
# A coordinator that restarts is back within seconds, so the first tries come quickly; 15 s at most, so that a
# swarm is together again soon after an outage of an hour.
FIRST_BACKOFF_SECONDS = 0.2
LONGEST_BACKOFF_SECONDS = 15.0
CONNECT_SECONDS = 10.0
ANSWER_SECONDS = 60.0
READ_BYTES_PER_SECOND = 10_000_000
"""How slowly a coordinator may read a payload from its store, hash and decode it: a large one was told of
twice while it was still being read."""
MAX_CONNECTIONS = 8
# A stranger's coordinator must not fill our memory; the longest true answer, a page of the ledger, is far
# below.
MAX_ANSWER_BYTES = 64 * 1024 * 1024
HINT_SECONDS = 10.0
"""Silence of a coordinator that has never answered, after which the client says what may be wrong."""
PUBLIC_ATTEMPTS = 4
ASK_THE_OPERATOR = {"banned", "invite_required", "not_listed", "not_operator", "not_judge", "corpus_mismatch"}
"""Refusals that the same command gets again: exit code 2, so that systemd does not repeat it every 10 s."""
# What a proxy or a starting server says. Everything else is an answer, and asking again would not change it.
RETRIED_STATUS = {408, 425, 429, 500, 502, 503, 504}
_assignment_answer: TypeAdapter[AssignmentAnswer] = TypeAdapter(AssignmentAnswer)
_judge_answer: TypeAdapter[JudgeAnswer] = TypeAdapter(JudgeAnswer)

JSON_CONTENT = {"content-type": "application/json"}

T = TypeVar("T")
Model = TypeVar("Model", bound=BaseModel)


def backoff_seconds(attempt: int, chance: float) -> float:
    """Doubling from the first retry, jittered to between half and all of it; `chance` is in [0, 1)."""
    # Jittered, so that the workers of a swarm do not all come back in the same instant.
    longest: float = min(LONGEST_BACKOFF_SECONDS, FIRST_BACKOFF_SECONDS * 2.0 ** min(attempt, 16))
    return longest * (0.5 + 0.5 * chance)


class RequestRefused(WireError):
    """The coordinator declined a request, with its reason and sentence."""

    def __init__(self, status: int, reason: str, message: str, remedy: str | None, code: str = "") -> None:
        super().__init__(f"{message}{'; ' + remedy if remedy else ''}")
        self.status, self.reason = status, reason
        if reason in ASK_THE_OPERATOR:
            self.exit_code = UserError.exit_code
        self.code = code
        """How an OpenAI-compatible gateway names the reason; empty from a coordinator."""


class NotCoordinator(UserError):
    """Something answers at this address, and it is not a coordinator."""


class UntrustedCertificate(UserError):
    """The coordinator's certificate cannot be checked here; that does not change by trying again."""


class _TryAgain(Exception):
    def __init__(self, why: str, after_seconds: float | None = None) -> None:
        super().__init__(why)
        self.after_seconds = after_seconds


class CoordinatorClient:
    def __init__(
        self,
        url: str,
        identity: Identity,
        traffic: Traffic,
        stop: threading.Event,
        report: Callable[[str], None],
        attempts: int | None = None,
    ) -> None:
        link = RunLink.parse(url)
        self.url, self._pin = link.url, None
        if link.pin is not None:
            place = urlsplit(link.url)
            self._pin = Pin(place.hostname or "", port_of(place), link.pin)
        self._places = AllowedPlaces()
        self.attempts = attempts
        """Tries of every request; None: as long as it takes."""
        self.identity, self.traffic, self.stop, self.report = identity, traffic, stop, report
        # Set once the run is known: before that there is no run id to sign for.
        self.audience: str | None = None
        self.clock: Callable[[], float] = time.time
        """What requests are signed by; a coordinator refuses a clock that is two minutes off."""
        self._silent_since: dict[str, float] = {}
        """Places that do not answer: the coordinator, or the storage it sends to."""
        self._led_nearer: set[str] = set()
        """Those of them whose name led nearer than it may, which was said."""
        self._may_hint = True
        self._http = self._open()

    def _open(self) -> httpx2.Client:
        return httpx2.Client(
            transport=CountingTransport(self.traffic, MAX_CONNECTIONS, self._places, self._pin),
            timeout=httpx2.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS),
            follow_redirects=True,
            headers={"user-agent": "blocktrain"},
        )

    def reconnect(self) -> None:
        """Forget connections that did not survive a suspension; threads using them retry."""
        before, self._http = self._http, self._open()
        before.close()

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> CoordinatorClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- routes of workers

    def run(self) -> RunAnswer:
        return self._introduced("/v1/run", RunAnswer)

    def join(self, request: JoinRequest) -> JoinAnswer:
        return self._ask("POST", "/v1/join", JoinAnswer, request)

    def challenge(self) -> ChallengeAnswer:
        return self._read(f"/v1/challenge/{self.identity.worker_id}", ChallengeAnswer)

    def ask(self, request: AssignmentRequest) -> AssignmentAnswer:
        content = self._request("POST", "/v1/assignments", request.model_dump_json().encode())
        return _parsed(_assignment_answer.validate_json, content)

    def heartbeat(self, assignment_id: str, request: HeartbeatRequest) -> HeartbeatAnswer:
        return self._ask("POST", f"/v1/assignments/{assignment_id}/heartbeat", HeartbeatAnswer, request)

    def hand_back(self, assignment_id: str) -> ReturnAnswer:
        # Twice and no longer: a worker that is leaving should leave, and the lease ends by itself.
        content = self._request("DELETE", f"/v1/assignments/{assignment_id}", attempts=2)
        return _parsed(ReturnAnswer.model_validate_json, content)

    def let_go(self, assignment_id: str) -> None:
        """Hand it back if that can be done: only a courtesy, as a lease ends by itself."""
        with contextlib.suppress(BlocktrainError):
            self.hand_back(assignment_id)

    def commit_and_reveal(
        self, assignment_id: str, request: CommitRequest, payload: bytes
    ) -> tuple[CommitAnswer, Verdict]:
        """Both may be repeated: the coordinator knows a commit and a payload by their hashes."""
        verdict: Verdict | None = None
        tries = 0
        while verdict is None:
            answer = self.commit(assignment_id, request)
            try:
                verdict = answer.verdict or self.reveal(request.payload_hash, payload, answer)
            except RequestRefused as refusal:
                # The storage refuses an address that an outage has outlived, and cuts off a line that stalls.
                # Parts may be listed late, or told of to a coordinator of before, which knows no parts.
                from_storage = (
                    refusal.reason.startswith("http_") or refusal.reason == ErrorReason.NOT_UPLOADED
                )
                tries += 1
                if not (answer.upload.presigned and from_storage) or tries == UPLOAD_TRIES:
                    raise
                if self.stop.wait(backoff_seconds(tries, random.random())):
                    raise Stopped("the program is stopping") from None
        return answer, verdict

    def commit(self, assignment_id: str, request: CommitRequest) -> CommitAnswer:
        return self._ask("POST", f"/v1/assignments/{assignment_id}/commit", CommitAnswer, request)

    def reveal(self, payload_hash: str, payload: bytes, answer: CommitAnswer) -> Verdict | None:
        """None where the addresses of the rest are too old: a new commit has new ones."""
        upload, began = answer.upload, time.monotonic()
        with self.traffic.sending(Kind.PAYLOAD):
            if not upload.presigned:
                content = self._request("PUT", f"/v1/updates/{payload_hash}", payload)
                return _parsed(Verdict.model_validate_json, content)
            # Straight to the object storage, whose URL carries its own permission; then the coordinator is
            # told. In parts where they were offered: what has arrived is not sent again.
            if not upload.parts:
                self._request("PUT", upload.url, payload, signed=False)
            missing = [(index, address) for index, address in enumerate(upload.parts) if address]
            for sent, (index, address) in enumerate(missing):
                # One at least: so each commit brings the upload on, however slow the line.
                if sent and time.monotonic() - began > upload.expires_seconds * FRESH_SHARE:
                    return None
                part = payload[index * upload.part_bytes : (index + 1) * upload.part_bytes]
                self._request("PUT", address, part, signed=False)
            reading = ANSWER_SECONDS + len(payload) / READ_BYTES_PER_SECOND
            content = self._request("POST", f"/v1/updates/{payload_hash}/uploaded", answer_seconds=reading)
        return _parsed(Verdict.model_validate_json, content)

    def verdict(self, payload_hash: str) -> Verdict:
        return self._ask("GET", f"/v1/updates/{payload_hash}/verdict", Verdict)

    # --- what anybody may read

    def block(self, block: int) -> BlockAnswer:
        return self._read(f"/v1/blocks/{block}", BlockAnswer)

    def merges(self, block: int, since: int) -> MergesAnswer:
        return self._read(f"/v1/blocks/{block}/merges?since={since}", MergesAnswer)

    def status(self) -> StatusAnswer:
        return self._introduced("/v1/status", StatusAnswer)

    def ledger(self, since: int) -> LedgerAnswer:
        return self._read(f"/v1/ledger?since={since}", LedgerAnswer)

    def workers(self) -> WorkersAnswer:
        return self._read("/v1/workers", WorkersAnswer)

    def contributions(self) -> ContributionsAnswer:
        return self._read("/v1/contributions", ContributionsAnswer)

    def fetch(self, path: str, max_bytes: int = MAX_ANSWER_BYTES) -> bytes:
        """A public object, whole and in memory."""
        return self._request("GET", path, signed=False, max_bytes=max_bytes)

    def payload(self, payload_hash: str, max_bytes: int) -> bytes:
        with self.traffic.sending(Kind.PAYLOAD):
            return self.fetch(f"/v1/updates/{payload_hash}", max_bytes)

    def download(
        self, path: str, target: Path, max_bytes: int, kind: Kind = Kind.SNAPSHOT, *, signed: bool = False
    ) -> None:
        """The whole of `path` in `target`, going on from whatever bytes `target` already has."""
        with self.traffic.sending(kind):
            self._request("GET", path, signed=signed, max_bytes=max_bytes, target=target)

    def download_from_mirror(self, url: str, target: Path, max_bytes: int) -> None:
        """As `download`, unsigned and tried once: there are other places to ask."""
        have = target.stat().st_size if target.exists() else 0
        headers = {"range": f"bytes={have}-"} if have else {}
        try:
            with self.traffic.sending(Kind.TEXT), self._http.stream("GET", url, headers=headers) as response:
                if not response.is_success and response.status_code != 416:
                    raise WireError(f"{url} answered {response.status_code}")
                self._write(response, target, url, max_bytes)
        except (httpx2.HTTPError, httpx2.InvalidURL, RuntimeError) as error:
            raise WireError(f"{url} did not answer: {str(error) or type(error).__name__}") from None

    # --- routes of judges and operators

    def judge_lease(self) -> JudgeAnswer:
        return _parsed(_judge_answer.validate_json, self._request("POST", "/v1/judge/lease"))

    def judge_payload(self, update_id: str, max_bytes: int) -> bytes:
        return self._request("GET", f"/v1/judge/tasks/{update_id}/payload", max_bytes=max_bytes)

    def judge_report(self, update_id: str, report: EvidenceReport) -> OperatorAnswer:
        return self._ask("POST", f"/v1/judge/tasks/{update_id}", OperatorAnswer, report)

    def ban(self, worker_id: str, request: BanRequest) -> OperatorAnswer:
        return self._ask("POST", f"/v1/workers/{worker_id}/ban", OperatorAnswer, request)

    def finish(self) -> OperatorAnswer:
        return self._ask("POST", "/v1/finish", OperatorAnswer)

    def remove(self, worker_id: str) -> OperatorAnswer:
        return self._ask("DELETE", f"/v1/workers/{worker_id}", OperatorAnswer)

    # --- how

    def _ask(self, method: str, path: str, kind: type[Model], request: BaseModel | None = None) -> Model:
        body = b"" if request is None else request.model_dump_json().encode()
        return _parsed(kind.model_validate_json, self._request(method, path, body))

    def _read(self, path: str, kind: type[Model]) -> Model:
        return _parsed(kind.model_validate_json, self.fetch(path))

    def _introduced(self, path: str, kind: type[Model]) -> Model:
        """What is asked first at an address that a person typed: something else may live there."""
        found = ""
        try:
            content = self.fetch(path)
            if not _speaks_protocol(content):
                found = f"something else to GET {path}"
        except RequestRefused as refusal:
            # A refusal in our own words comes from a coordinator, however unwelcome.
            if refusal.reason != f"http_{refusal.status}":
                raise
            found = f"{refusal.status} to GET {path}"
        if found:
            raise NotCoordinator(
                f"{self.url} is not a coordinator: it answered {found}; is it a gateway, or another program? "
                "Give the address that `blocktrain coordinator` printed"
            )
        return _parsed(kind.model_validate_json, content)

    def _request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        signed: bool = True,
        attempts: int | None = None,
        max_bytes: int = MAX_ANSWER_BYTES,
        target: Path | None = None,
        answer_seconds: float = ANSWER_SECONDS,
    ) -> bytes:
        """The answer, tried for until there is one; with a `target` it goes into that file instead."""
        url = path if "://" in path else self.url + path
        attempts, attempt = attempts or self.attempts, 0
        timeout = httpx2.Timeout(answer_seconds, connect=CONNECT_SECONDS)
        while True:
            headers: dict[str, str] = {} if method == "PUT" or not body else JSON_CONTENT
            have = target.stat().st_size if target is not None and target.exists() else 0
            if have:
                headers = {"range": f"bytes={have}-"}
            if signed:
                # At every try: a nonce may be used once, and the clock window is two minutes.
                signature = sign_request(
                    self.identity,
                    method,
                    path,
                    now=self.clock(),
                    nonce=fresh_nonce(),
                    content_digest=body_digest(body),
                    content_length=len(body),
                    audience=self.audience,
                )
                headers = headers | signature
            try:
                with self._http.stream(
                    method, url, content=body or None, headers=headers, timeout=timeout
                ) as response:
                    place = self._place(str(response.url))
                    if target is not None and (response.is_success or response.status_code == 416):
                        self._write(response, target, path, max_bytes)
                        content = b""
                    else:
                        content = _bounded(response, MAX_ANSWER_BYTES if target else max_bytes)
                        if not response.is_success:
                            raise _failure(response, content)
                break
            except (httpx2.InvalidURL, httpx2.UnsupportedProtocol, httpx2.TooManyRedirects) as error:
                raise WireError(
                    f"the coordinator sent this machine to an address that it cannot use ({error}); tell the "
                    "run's host"
                ) from None
            except (httpx2.TransportError, httpx2.StreamError, RuntimeError, _TryAgain) as error:
                # RuntimeError: `reconnect` closed the client that this request was using.
                attempt += 1
                why = str(error) or type(error).__name__
                if isinstance(error, httpx2.RequestError):  # behind a redirect it has another address
                    place = self._place(str(error.request.url))
                elif not isinstance(error, _TryAgain):
                    place = self._place(url)
                if self._may_hint and "CERTIFICATE_VERIFY_FAILED" in why:
                    # Only where nothing has answered yet: later it may be a renewal that went wrong, and
                    # a worker of weeks waits for the operator to mend it.
                    raise UntrustedCertificate(untrusted_certificate(self.url, why)) from None
                if self.stop.is_set() and attempts is None:
                    raise Stopped("the program is stopping") from None
                if attempts is not None and attempt >= attempts:
                    hint = f"; {what_may_be_wrong(self.url, error)}" if self._may_hint else ""
                    raise WireError(f"{place} did not answer: {why}{hint}") from None
                # Said also where it was silent before for another reason, such as a network that comes back.
                nearer = isinstance(error.__cause__, LeadsNearer) and place not in self._led_nearer
                if nearer:
                    self._led_nearer.add(place)
                if nearer or place not in self._silent_since:
                    self._silent_since.setdefault(place, time.monotonic())
                    self.report(f"no answer from {place} ({why}); trying again")
                elif self._may_hint and time.monotonic() - self._silent_since[place] >= HINT_SECONDS:
                    self._may_hint = False
                    self.report(f"still no answer: {what_may_be_wrong(self.url, error)}")
                asked = error.after_seconds if isinstance(error, _TryAgain) else None
                self.stop.wait(asked if asked is not None else backoff_seconds(attempt - 1, random.random()))
        # One that has answered before is restarting or out of reach, not mistyped: no hints any more.
        self._may_hint = False
        self._led_nearer.discard(place)
        since = self._silent_since.pop(place, None)
        if since is not None:
            self.report(f"{place} answers again after {time.monotonic() - since:.1f} s")
        return content

    def _place(self, url: str) -> str:
        """Whose silence it is: a user has not heard of object storage, and only the host can mend it."""
        there, own = httpx2.URL(url), httpx2.URL(self.url)
        if (there.scheme, there.netloc) == (own.scheme, own.netloc):
            return self.url
        found = f"{there.scheme}://{there.netloc.decode()}"
        return f"the run's storage at {found}, which this machine must reach too (tell the run's host)"

    def _write(self, response: httpx2.Response, target: Path, path: str, max_bytes: int) -> None:
        # Nothing is left to fetch: the file is complete, or damaged, which its hash will tell.
        if response.status_code == 416:
            return
        # A server without ranges answers 200 and starts over; so must the file.
        resumed = response.status_code == 206
        # Unbuffered: what has come is there for the next start, also after a kill.
        with target.open("ab" if resumed else "wb", buffering=0) as file:
            for piece in response.iter_raw():
                if self.stop.is_set():
                    raise Stopped("the program is stopping")
                if file.tell() + len(piece) > max_bytes:
                    raise WireError(f"{path} is longer than the {max_bytes} B that it can have")
                # A disk that fills up takes a part first, and says so only at the next write.
                rest = memoryview(piece)
                while rest:
                    rest = rest[file.write(rest) :]


def public_client(
    url: str,
    identity: Identity | None = None,
    *,
    stop: threading.Event | None = None,
    report: Callable[[str], None] = lambda line: None,
    attempts: int = PUBLIC_ATTEMPTS,
) -> CoordinatorClient:
    """A client that gives up after some attempts; without an identity it may only read."""
    identity, stop = identity or Identity.generate(), stop or threading.Event()
    return CoordinatorClient(url, identity, Traffic(), stop, report, attempts)


def untrusted_certificate(url: str, why: str) -> str:
    if "self-signed" in why or "self signed" in why:
        cause = "is self-signed, so nothing proves whose it is"
    elif "expired" in why:
        cause = "has expired (or this machine's date is wrong)"
    else:
        cause = f"cannot be checked ({why})"
    return (
        f"{url} answers, but its certificate {cause}; ask the run's host for a link with a pin, or get the "
        f"certificate and set SSL_CERT_FILE to it (`blocktrain doctor --coordinator {url}`)"
    )


def what_may_be_wrong(url: str, error: Exception) -> str:
    """Likely cause, from the kind of failure, for an address that never answered."""
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    tried = f"tried {'TLS' if secure else 'plain HTTP'} to port {port_of(parts)} of {parts.hostname}"
    other = f"{'http' if secure else 'https'}://{parts.netloc}"
    if secure and "SSL" in str(error):
        found = f"which speaks no TLS; is it {other}"
    elif isinstance(error, httpx2.RemoteProtocolError):
        found = f"which closed the connection without an answer; try {other}, or is it another program's port"
    elif isinstance(error, httpx2.ConnectError):
        found = "which cannot be reached; is the address the one that `blocktrain coordinator` printed"
    else:
        found = "which does not answer as a coordinator does"
    return f"{tried}, {found}? `blocktrain doctor --coordinator {url}` looks closer"


def _parsed(parse: Callable[[bytes], T], content: bytes) -> T:
    try:
        return parse(content)
    except ValidationError as error:
        raise WireError(
            f"the coordinator's answer does not fit protocol 1 ({error.error_count()} errors, first: "
            f"{error.errors()[0]['msg']}); is it a newer version? update one of the two"
        ) from None


def _speaks_protocol(content: bytes) -> bool:
    try:
        return "protocol" in json.loads(content)
    except (ValueError, TypeError):
        return False


def _bounded(response: httpx2.Response, max_bytes: int) -> bytes:
    pieces, size = [], 0
    for piece in response.iter_bytes():
        size += len(piece)
        if size > max_bytes:
            raise WireError(f"an answer longer than {max_bytes} B was cut off")
        pieces.append(piece)
    return b"".join(pieces)


def _failure(response: httpx2.Response, content: bytes) -> Exception:
    """What an answer that is no success means: try again, or a refusal in the server's own words."""
    try:
        error = json.loads(content)["error"]
    except (ValueError, KeyError, TypeError):
        error = None
    if not isinstance(error, dict):
        error = {}
    status = response.status_code
    message = str(error.get("message", f"the coordinator answered {status}"))
    if status in RETRIED_STATUS:
        try:
            after = min(60.0, max(0.0, float(response.headers["retry-after"])))
        except (KeyError, ValueError):
            after = None
        return _TryAgain(f"{status} {message}", after)
    reason, remedy = str(error.get("reason", f"http_{status}")), error.get("remedy")
    code = str(error.get("code", ""))
    return RequestRefused(status, reason, message, str(remedy) if remedy else None, code)
