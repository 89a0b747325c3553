"""A small client of the gateway for the command line: text as it comes, and errors as sentences."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import httpx2

from blocktrain.client.address import checked_url
from blocktrain.errors import BlocktrainError, UserError

CONNECT_SECONDS = 10.0
READ_SECONDS = 120.0
"""The longest pause between two chunks."""


class GatewayError(BlocktrainError):
    """The gateway refused, ended its answer early, or cannot be reached."""


class NotGateway(UserError):
    """Something answers at this address, and it is not a gateway."""


@dataclass(frozen=True)
class Delta:
    """One chunk of an answer: text, or at the end the usage of the whole."""

    text: str = ""
    usage: Mapping[str, Any] | None = None


class GatewayClient:
    def __init__(self, url: str, key: str | None = None) -> None:
        self.url = checked_url(url, "a gateway").removesuffix("/v1")
        headers = {"authorization": f"Bearer {key}"} if key else {}
        timeout = httpx2.Timeout(READ_SECONDS, connect=CONNECT_SECONDS)
        self._http = httpx2.Client(base_url=self.url, headers=headers, timeout=timeout)

    def __enter__(self) -> GatewayClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def model(self) -> str:
        """The name of the model served."""
        try:
            answer = self._http.get("/v1/models")
        except httpx2.HTTPError as error:
            raise self._unreachable(error) from None
        if not _speaks_api(answer):
            raise NotGateway(
                f"{self.url} is not a gateway: it answered {answer.status_code} to GET /v1/models; is it "
                "a coordinator, or another program? Give the address that `blocktrain serve` or `gateway` "
                "printed"
            )
        return str(_checked(answer)["data"][0]["id"])

    def complete(self, fields: Mapping[str, Any]) -> Iterator[Delta]:
        for chunk in self._stream("/v1/completions", fields):
            yield Delta(chunk["choices"][0]["text"] if chunk["choices"] else "", chunk.get("usage"))

    def chat(self, messages: Sequence[Mapping[str, str]], fields: Mapping[str, Any]) -> Iterator[Delta]:
        for chunk in self._stream("/v1/chat/completions", {**fields, "messages": list(messages)}):
            text = chunk["choices"][0]["delta"].get("content", "") if chunk["choices"] else ""
            yield Delta(text, chunk.get("usage"))

    def _stream(self, path: str, fields: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        # Always as a stream: a person sees the text as it comes, and a time-out measures a pause and not the
        # whole answer.
        body = {"stream": True, "stream_options": {"include_usage": True}, **fields}
        try:
            with self._http.stream("POST", path, json=body) as answer:
                if answer.status_code != 200:
                    answer.read()
                    _checked(answer)
                yield from _events(answer.iter_lines())
        except httpx2.HTTPError as error:
            raise self._unreachable(error) from None

    def _unreachable(self, error: httpx2.HTTPError) -> GatewayError:
        reason = str(error) or type(error).__name__
        return GatewayError(
            f"no answer from the gateway at {self.url}: {reason}; does it run, and is this the address that "
            "`blocktrain serve` or `gateway` printed?"
        )


def _speaks_api(answer: httpx2.Response) -> bool:
    """True of a list of models, and of a refusal in OpenAI's words, which have a `code`."""
    match _content(answer):
        case {"error": {"code": _}} | {"data": [{"id": _}, *_]}:
            return True
    return False


def _checked(answer: httpx2.Response) -> dict[str, Any]:
    match _content(answer):
        case {"error": {"message": message}}:
            refusal = GatewayError(f"the gateway refused: {message}")
            if answer.status_code == httpx2.codes.BAD_REQUEST:
                refusal.exit_code = UserError.exit_code
            raise refusal
        case dict() as content:
            return content
    raise GatewayError(f"{answer.url} does not answer like a gateway (status {answer.status_code})")


def _content(answer: httpx2.Response) -> Any:
    try:
        return answer.json()
    except ValueError:
        return None


def _events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            return
        # Not every line is an event: servers keep connections open with comments and empty lines.
        if data == line:
            continue
        content = json.loads(data)
        if "error" in content:
            raise GatewayError(f"the gateway ended its answer early: {content['error'].get('message')}")
        yield content
    # Without [DONE] the text may look whole and be cut.
    raise GatewayError("the gateway closed the connection before the end of its answer; ask again")
