"""A small client for tests: real signed HTTP requests, no training. Not a mock of anything of ours."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping
from typing import Any

import httpx2
import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, TypeAdapter

from blocktrain.codec_spec import CodecSpec
from blocktrain.training.snapshot import from_safetensors
from blocktrain.wire.codec import Schema, encode
from blocktrain.wire.hashing import content_hash, snapshot_hash
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
    JoinAnswer,
    JoinRequest,
    MergesAnswer,
    RunAnswer,
    Verdict,
    Wait,
)
from blocktrain.wire.signing import body_digest, fresh_nonce, sign_request
from tests.waiting import PATIENCE_SECONDS, until

Weights = dict[str, NDArray[np.float32]]


class Refused(Exception):
    def __init__(self, response: httpx2.Response) -> None:
        super().__init__(f"{response.status_code} {response.text}")
        self.status = response.status_code
        error = response.json()["error"]
        self.reason, self.message = error["reason"], error["message"]


def an_assignment(**changes: Any) -> Assignment:
    """One as a coordinator sends it, for what needs no coordinator."""
    values: dict[str, Any] = {
        "assignment_id": "0" * 32,
        "block": 0,
        "round": 0,
        "base_version": 0,
        "base_hash": "0" * 64,
        "shard": 0,
        "first_step": 0,
        "steps": 10,
        "total_steps": 100,
        "deadline": None,
        "deadline_reason": "",
        "lease_seconds": 30.0,
        "heartbeat_seconds": 10.0,
        "server_time": 0.0,
        "reason": "",
    }
    return Assignment(**{**values, **changes})


NO_AUTHORITIES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Peers speak plain HTTP; reading whom the system trusts would take each 40 ms."""


class Peer:
    def __init__(
        self,
        url: str,
        clock: Callable[[], float],
        identity: Identity | None = None,
        address: str | None = None,
    ) -> None:
        """`address` is one of this machine's own, to come from."""
        self.url, self.clock = url, clock
        self.identity = identity or Identity.generate()
        transport = httpx2.HTTPTransport(verify=NO_AUTHORITIES, local_address=address)
        self.http = httpx2.Client(timeout=PATIENCE_SECONDS, transport=transport)
        self.run = RunAnswer.model_validate_json(self.get("/v1/run").content)
        self.codec = CodecSpec.parse(self.run.blocks[0].codec)

    def close(self) -> None:
        self.http.close()

    def schema(self, block: int) -> Schema:
        return Schema(tuple((tensor.name, tensor.shape) for tensor in self.run.blocks[block].tensors))

    # --- requests ---

    def get(self, path: str, headers: Mapping[str, str] | None = None) -> httpx2.Response:
        response = self.http.get(self.url + path, headers=dict(headers or {}), follow_redirects=True)
        if response.status_code >= 400:
            raise Refused(response)
        return response

    def headers(self, method: str, path: str, body: bytes, **changes: Any) -> dict[str, str]:
        arguments: dict[str, Any] = {
            "now": self.clock(),
            "nonce": fresh_nonce(),
            "content_digest": body_digest(body),
            "content_length": len(body),
            "audience": self.run.run_id,
        }
        return sign_request(self.identity, method, path, **{**arguments, **changes})

    def send(self, method: str, path: str, body: bytes = b"", **changes: Any) -> httpx2.Response:
        def answer() -> httpx2.Response:
            headers = self.headers(method, path, body, **changes)
            return self.http.request(method, self.url + path, content=body or None, headers=headers)

        first = answer()
        # A machine may stand still while a request is under way, for longer than its signature is valid.
        return answer() if first.status_code == 401 and not changes else first

    def call(self, method: str, path: str, message: BaseModel | None = None) -> httpx2.Response:
        response = self.send(method, path, message.model_dump_json().encode() if message else b"")
        if response.status_code != 200:
            raise Refused(response)
        return response

    # --- the protocol ---

    def join(self, **changes: Any) -> JoinAnswer:
        request = JoinRequest(**{"corpus_sha256": self.run.corpus_sha256, "device": "test", **changes})
        return JoinAnswer.model_validate_json(self.call("POST", "/v1/join", request).content)

    def ask(self, **changes: Any) -> Any:
        content = self.call("POST", "/v1/assignments", AssignmentRequest(**changes)).content
        return TypeAdapter(AssignmentAnswer).validate_json(content)

    def lend(self, **changes: Any) -> Assignment:
        """Asks again where it is told to wait, as a real worker does: in a schedule's last round there is no
        later one to be lent meanwhile."""
        lease = self.lend_or_end(**changes)
        assert lease is not None, "the run is finished"
        return lease

    def lend_or_end(self, **changes: Any) -> Assignment | None:
        """None where the run is finished."""

        def answered() -> Assignment | Finished | None:
            answer = self.ask(**changes)
            return None if isinstance(answer, Wait) else answer

        answer = until("an assignment, or the end of the run", answered)
        return answer if isinstance(answer, Assignment) else None

    def heartbeat(self, assignment: Assignment, step: int = 1) -> HeartbeatAnswer:
        path = f"/v1/assignments/{assignment.assignment_id}/heartbeat"
        return HeartbeatAnswer.model_validate_json(
            self.call("POST", path, HeartbeatRequest(step=step, loss=2.5)).content
        )

    def hand_back(self, assignment: Assignment) -> bool:
        response = self.call("DELETE", f"/v1/assignments/{assignment.assignment_id}")
        return bool(response.json()["returned"])

    def commit(
        self, assignment: Assignment, payload: bytes, base_hash: str | None = None, **changes: Any
    ) -> CommitAnswer:
        request = CommitRequest(
            **{
                "payload_hash": content_hash(payload),
                "payload_bytes": len(payload),
                "base_hash": base_hash or assignment.base_hash,
                "loss": 2.0,
                **changes,
            }
        )
        path = f"/v1/assignments/{assignment.assignment_id}/commit"
        return CommitAnswer.model_validate_json(self.call("POST", path, request).content)

    def put(self, payload: bytes) -> Verdict:
        response = self.send("PUT", f"/v1/updates/{content_hash(payload)}", payload)
        if response.status_code != 200:
            raise Refused(response)
        return Verdict.model_validate_json(response.content)

    def reveal(self, committed: CommitAnswer, payload: bytes) -> Verdict:
        """By the way the coordinator named: itself, or shared storage and then `uploaded`."""
        if not committed.upload.presigned:
            return self.put(payload)
        self.http.put(committed.upload.url, content=payload).raise_for_status()
        response = self.call("POST", f"/v1/updates/{content_hash(payload)}/uploaded")
        return Verdict.model_validate_json(response.content)

    def deliver(self, assignment: Assignment, seed: int = 0, base_hash: str | None = None) -> Verdict:
        payload = self.payload(assignment.block, seed)
        return self.reveal(self.commit(assignment, payload, base_hash), payload)

    # --- what anybody may read ---

    def block(self, block: int) -> BlockAnswer:
        return BlockAnswer.model_validate_json(self.get(f"/v1/blocks/{block}").content)

    def merges(self, block: int, since: int = 0) -> MergesAnswer:
        return MergesAnswer.model_validate_json(self.get(f"/v1/blocks/{block}/merges?since={since}").content)

    def snapshot(self, block: int, wanted: str) -> Weights:
        tensors = from_safetensors(self.get(f"/v1/snapshots/{wanted}").content, self.schema(block))
        assert snapshot_hash(tensors) == wanted
        return tensors

    def payload(self, block: int, seed: int = 0) -> bytes:
        return encode(self.codec, self.schema(block), self.tensors(block, seed))

    def tensors(self, block: int, seed: int = 0) -> Weights:
        generator = np.random.default_rng(seed)
        return {
            name: (0.01 * generator.standard_normal(shape)).astype(np.float32)
            for name, shape in self.schema(block).tensors
        }
