"""The coordinator as seen from a worker: one method per route, signed, retried, translated.

Every request has time-outs and is tried again, with jittered backoff, until the coordinator answers or
the worker stops: a restart of the coordinator, a lost connection or a suspended laptop look the same
from here. Every route is safe to repeat. What the coordinator declines comes out as `Refusal`.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx2
from pydantic import BaseModel, TypeAdapter, ValidationError

from blocktrain.client.traffic import CountingTransport, Kind, Traffic
from blocktrain.errors import UserError, WireError
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

FIRST_BACKOFF_SECONDS = 0.2
LONGEST_BACKOFF_SECONDS = 15.0
CONNECT_SECONDS = 10.0
ANSWER_SECONDS = 60.0
LONG_POLL_SECONDS = 25.0
MAX_CONNECTIONS = 8
MAX_ANSWER_BYTES = 64 * 1024 * 1024
CLOCK_ATTEMPTS = 8
"""Tries before a wrong clock is the operator's affair; after a suspension it corrects itself soon."""
CLOCK_REASONS = {"clock_skew", "expired"}
HINT_SECONDS = 10.0
"""Silence of a coordinator that has never answered, after which it is said what may be wrong."""
RETRIED_STATUS = {408, 425, 429, 500, 502, 503, 504}
_assignment_answer: TypeAdapter[AssignmentAnswer] = TypeAdapter(AssignmentAnswer)
_judge_answer: TypeAdapter[JudgeAnswer] = TypeAdapter(JudgeAnswer)

T = TypeVar("T", bound=BaseModel)


def backoff_seconds(attempt: int, chance: float) -> float:
    """Doubling from the first retry, jittered to between half and all of it; `chance` is in [0, 1)."""
    longest: float = min(LONGEST_BACKOFF_SECONDS, FIRST_BACKOFF_SECONDS * 2.0 ** min(attempt, 16))
    return longest * (0.5 + 0.5 * chance)


class Refusal(WireError):
    """The coordinator declined a request, with its reason and sentence."""

    def __init__(self, status: int, reason: str, message: str, remedy: str | None) -> None:
        super().__init__(f"{message}{'; ' + remedy if remedy else ''}")
        self.status, self.reason = status, reason


class NotCoordinator(UserError):
    """Something answers at this address, and it is not a coordinator."""


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
        self.url = checked_url(url)
        self.attempts = attempts
        """Tries of every request; None for as long as it takes."""
        self.identity, self.traffic, self.stop, self.report = identity, traffic, stop, report
        self.audience: str | None = None
        self._silent_since: float | None = None
        self._known = self._hinted = False
        """Whether the coordinator has ever answered, and whether it was said what may be wrong."""
        self._http = self._open()

    def _open(self) -> httpx2.Client:
        return httpx2.Client(
            transport=CountingTransport(self.traffic, MAX_CONNECTIONS),
            timeout=httpx2.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS),
            follow_redirects=True,
            headers={"user-agent": "blocktrain-worker"},
        )

    def reconnect(self) -> None:
        """Forget connections that did not survive a suspension; threads using them retry."""
        before, self._http = self._http, self._open()
        before.close()

    def close(self) -> None:
        self._http.close()

    # --- routes

    def run(self) -> RunAnswer:
        return self._introduced("/v1/run", RunAnswer)

    def join(self, request: JoinRequest) -> JoinAnswer:
        return self._send("POST", "/v1/join", request, JoinAnswer)

    def ask(self, request: AssignmentRequest) -> AssignmentAnswer:
        content = self._request("POST", "/v1/assignments", _body(request))
        return _parsed(lambda: _assignment_answer.validate_json(content))

    def heartbeat(self, assignment_id: str, request: HeartbeatRequest) -> HeartbeatAnswer:
        return self._send("POST", f"/v1/assignments/{assignment_id}/heartbeat", request, HeartbeatAnswer)

    def hand_back(self, assignment_id: str) -> ReturnAnswer:
        content = self._request("DELETE", f"/v1/assignments/{assignment_id}", b"", attempts=2)
        return _parsed(lambda: ReturnAnswer.model_validate_json(content))

    def commit(self, assignment_id: str, request: CommitRequest) -> CommitAnswer:
        return self._send("POST", f"/v1/assignments/{assignment_id}/commit", request, CommitAnswer)

    def reveal(self, payload_hash: str, payload: bytes, answer: CommitAnswer) -> Verdict:
        with self.traffic.sending(Kind.PAYLOAD):
            if not answer.upload.presigned:
                content = self._request("PUT", f"/v1/updates/{payload_hash}", payload)
            else:
                self._request("PUT", answer.upload.url, payload, signed=False)
                content = self._request("POST", f"/v1/updates/{payload_hash}/uploaded", b"")
        return _parsed(lambda: Verdict.model_validate_json(content))

    def verdict(self, payload_hash: str) -> Verdict:
        content = self._request("GET", f"/v1/updates/{payload_hash}/verdict", b"")
        return _parsed(lambda: Verdict.model_validate_json(content))

    def challenge(self) -> ChallengeAnswer:
        return self._get(f"/v1/challenge/{self.identity.worker_id}", ChallengeAnswer)

    def block(self, block: int) -> BlockAnswer:
        return self._get(f"/v1/blocks/{block}", BlockAnswer)

    def merges(self, block: int, since: int) -> MergesAnswer:
        return self._get(f"/v1/blocks/{block}/merges?since={since}", MergesAnswer)

    def status(self) -> StatusAnswer:
        return self._introduced("/v1/status", StatusAnswer)

    def ledger(self, since: int) -> LedgerAnswer:
        return self._get(f"/v1/ledger?since={since}", LedgerAnswer)

    def fetch(self, path: str, max_bytes: int = MAX_ANSWER_BYTES) -> bytes:
        """A public object, whole and in memory."""
        return self._request("GET", path, b"", signed=False, max_bytes=max_bytes)

    def payload(self, payload_hash: str, max_bytes: int) -> bytes:
        with self.traffic.sending(Kind.PAYLOAD):
            return self._request("GET", f"/v1/updates/{payload_hash}", b"", signed=False, max_bytes=max_bytes)

    def download(self, path: str, target: Path, max_bytes: int) -> None:
        """The whole of `path` in `target`, going on from whatever bytes `target` already has."""
        with self.traffic.sending(Kind.SNAPSHOT):
            self._retried(lambda: self._continue_download(path, target, max_bytes), attempts=self.attempts)

    # --- judges and operators

    def judge_lease(self) -> JudgeAnswer:
        content = self._request("POST", "/v1/judge/lease", b"")
        return _parsed(lambda: _judge_answer.validate_json(content))

    def judge_payload(self, update_id: str, max_bytes: int) -> bytes:
        return self._request("GET", f"/v1/judge/tasks/{update_id}/payload", b"", max_bytes=max_bytes)

    def judge_report(self, update_id: str, report: EvidenceReport) -> OperatorAnswer:
        return self._send("POST", f"/v1/judge/tasks/{update_id}", report, OperatorAnswer)

    def workers(self) -> WorkersAnswer:
        return self._get("/v1/workers", WorkersAnswer)

    def contributions(self) -> ContributionsAnswer:
        return self._get("/v1/contributions", ContributionsAnswer)

    def ban(self, worker_id: str, request: BanRequest) -> OperatorAnswer:
        return self._send("POST", f"/v1/workers/{worker_id}/ban", request, OperatorAnswer)

    def remove(self, worker_id: str) -> OperatorAnswer:
        content = self._request("DELETE", f"/v1/workers/{worker_id}", b"")
        return _parsed(lambda: OperatorAnswer.model_validate_json(content))

    # --- how

    def _get(self, path: str, kind: type[T]) -> T:
        content = self._request("GET", path, b"", signed=False)
        return _parsed(lambda: kind.model_validate_json(content))

    def _introduced(self, path: str, kind: type[T]) -> T:
        """What is asked first at an address a person typed: something else may live there."""
        try:
            content = self._request("GET", path, b"", signed=False)
        except Refusal as refusal:
            if refusal.reason != f"http_{refusal.status}":
                raise
            raise NotCoordinator(_not_coordinator(self.url, f"{refusal.status} to GET {path}")) from None
        if not _speaks_protocol(content):
            raise NotCoordinator(_not_coordinator(self.url, f"something else to GET {path}"))
        return _parsed(lambda: kind.model_validate_json(content))

    def _send(self, method: str, path: str, request: BaseModel, kind: type[T]) -> T:
        content = self._request(method, path, _body(request))
        return _parsed(lambda: kind.model_validate_json(content))

    def _request(
        self,
        method: str,
        path: str,
        body: bytes,
        *,
        signed: bool = True,
        attempts: int | None = None,
        max_bytes: int = MAX_ANSWER_BYTES,
    ) -> bytes:
        return self._retried(
            lambda: self._once(method, path, body, signed, max_bytes), attempts or self.attempts
        )

    def _retried(self, once: Callable[[], bytes], attempts: int | None) -> bytes:
        attempt = 0
        while True:
            try:
                content = once()
            except (httpx2.TransportError, httpx2.StreamError, RuntimeError, _TryAgain) as error:
                attempt += 1
                if self.stop.is_set() and attempts is None:
                    raise Stopped("the worker is stopping") from None
                if attempts is not None and attempt >= attempts:
                    raise WireError(f"{self.url} did not answer: {_why(error)}") from None
                self._wait(attempt, error)
            else:
                self._answered()
                return content

    def _wait(self, attempt: int, error: Exception) -> None:
        if self._silent_since is None:
            self._silent_since = time.monotonic()
            self.report(f"no answer from {self.url} ({_why(error)}); trying again")
        elif not (self._known or self._hinted) and time.monotonic() - self._silent_since >= HINT_SECONDS:
            self._hinted = True
            self.report(f"still no answer: {what_may_be_wrong(self.url, error)}")
        asked = error.after_seconds if isinstance(error, _TryAgain) else None
        self.stop.wait(asked if asked is not None else backoff_seconds(attempt - 1, random.random()))

    def _answered(self) -> None:
        self._known = True
        if self._silent_since is not None:
            seconds = time.monotonic() - self._silent_since
            self._silent_since = None
            self.report(f"{self.url} answers again after {seconds:.1f} s")

    def _once(self, method: str, path: str, body: bytes, signed: bool, max_bytes: int) -> bytes:
        headers = self._signature(method, path, body) if signed else {}
        url = path if "://" in path else self.url + path
        with self._http.stream(method, url, content=body or None, headers=headers) as response:
            content = _bounded(response, max_bytes)
            if response.is_success:
                return content
            raise _failure(response, content)

    def _signature(self, method: str, path: str, body: bytes) -> dict[str, str]:
        content_type = {} if method == "PUT" or not body else {"content-type": "application/json"}
        return content_type | sign_request(
            self.identity,
            method,
            path,
            now=time.time(),
            nonce=fresh_nonce(),
            content_digest=body_digest(body),
            content_length=len(body),
            audience=self.audience,
        )

    def _continue_download(self, path: str, target: Path, max_bytes: int) -> bytes:
        have = target.stat().st_size if target.exists() else 0
        headers = {"range": f"bytes={have}-"} if have else {}
        with self._http.stream("GET", self.url + path, headers=headers) as response:
            if response.status_code == 416:
                return b""
            if not response.is_success:
                raise _failure(response, _bounded(response, MAX_ANSWER_BYTES))
            resumed = response.status_code == 206
            with target.open("ab" if resumed else "wb") as file:
                for piece in response.iter_raw():
                    if self.stop.is_set():
                        raise Stopped("the worker is stopping")
                    if file.tell() + len(piece) > max_bytes:
                        raise WireError(f"{path} is longer than the {max_bytes} B a snapshot can have")
                    file.write(piece)
        return b""


def checked_url(url: str) -> str:
    """Without its last slash; what cannot be a coordinator's address is refused before anything is sent."""
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        valid = False
    if not valid:
        raise UserError(f"{url!r} is no address of a coordinator; expected http(s)://HOST[:PORT]")
    return url.rstrip("/")


def what_may_be_wrong(url: str, error: Exception) -> str:
    """Of an address that has never answered, by how it failed."""
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    port = parts.port or (443 if secure else 80)
    tried = f"tried {'TLS' if secure else 'plain HTTP'} to port {port} of {parts.hostname}"
    other = f"{'http' if secure else 'https'}://{parts.netloc}"
    if secure and "SSL" in str(error) and "CERTIFICATE" not in str(error).upper():
        found = f"which speaks no TLS; is it {other}"
    elif isinstance(error, httpx2.RemoteProtocolError):
        found = f"which closed the connection without an answer; try {other}, or is it another program's port"
    elif isinstance(error, httpx2.ConnectError):
        found = "which cannot be reached; is the address the one that `blocktrain coordinator` printed"
    else:
        found = "which does not answer as a coordinator does"
    return f"{tried}, {found}? `blocktrain doctor --coordinator {url}` looks closer"


def _body(request: BaseModel) -> bytes:
    return json.dumps(request.model_dump(mode="json")).encode()


def _parsed(parse: Callable[[], T]) -> T:
    try:
        return parse()
    except ValidationError as error:
        raise WireError(
            f"the coordinator's answer does not fit protocol 1 ({error.error_count()} errors, first: "
            f"{error.errors()[0]['msg']}); is it a newer version? update one of the two"
        ) from None


def _not_coordinator(url: str, answered: str) -> str:
    return (
        f"{url} is not a coordinator: it answered {answered}; is it a gateway, or another program? Give the "
        "address that `blocktrain coordinator` printed"
    )


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
    error = _error_body(content)
    reason = str(error.get("reason", f"http_{response.status_code}"))
    message = str(error.get("message", f"the coordinator answered {response.status_code}"))
    if response.status_code in RETRIED_STATUS:
        return _TryAgain(f"{response.status_code} {message}", _retry_after(response.headers))
    remedy = error.get("remedy")
    return Refusal(response.status_code, reason, message, str(remedy) if remedy else None)


def _error_body(content: bytes) -> Mapping[str, Any]:
    try:
        error = json.loads(content)["error"]
    except (ValueError, KeyError, TypeError):
        return {}
    return error if isinstance(error, dict) else {}


def _retry_after(headers: Mapping[str, str]) -> float | None:
    try:
        return min(60.0, max(0.0, float(headers["retry-after"])))
    except (KeyError, ValueError):
        return None


def _why(error: Exception) -> str:
    return str(error) or type(error).__name__
