"""The front door: an OpenAI-compatible HTTP API over an engine.

Checks what depends on the model and on this server's limits, and wires the parts together. It does not
know how text is produced (`engine_api`), written (`choices`), shaped (`formats`) or sent (`answering`).

Covered: keys, rates, sizes and counts of what strangers send; every refusal has OpenAI's error shape.
Not covered: TLS; put a reverse proxy in front for it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

import blocktrain
from blocktrain.errors import BlocktrainError
from blocktrain.serving.engine.engine import TextEngine
from blocktrain.serving.engine.requests import GenerationRequest, Mode
from blocktrain.serving.gateway.access import Doorkeeper
from blocktrain.serving.gateway.answering import Answerer, EventStream, Job
from blocktrain.serving.gateway.api_errors import ApiError, as_api_error, printable
from blocktrain.serving.gateway.chat_template import STOPS, chat_prompt
from blocktrain.serving.gateway.choices import Choice, choice_seed
from blocktrain.serving.gateway.formats import ChatFormat, CompletionFormat, Heading, new_heading
from blocktrain.serving.gateway.limits import Keys, Limits, Refusal
from blocktrain.serving.gateway.metrics import GatewayMetrics
from blocktrain.serving.gateway.openai_messages import (
    DEFAULT_COMPLETION_TOKENS,
    ChatCompletion,
    ChatRequest,
    Completion,
    CompletionRequest,
    ErrorAnswer,
    ModelCard,
    ModelList,
    Overflow,
    SamplingRequest,
)

DEFAULT_MODE: Mode = "verify"
ANSWER_HEADERS = (
    "retry-after",
    "x-request-id",
    "x-blocktrain-bytes-per-traversal",
    "x-blocktrain-degraded",
    "x-blocktrain-mode",
    "x-blocktrain-seed",
    "x-blocktrain-traversals",
    "x-blocktrain-wire-bytes-received",
    "x-blocktrain-wire-bytes-sent",
)
Answers = dict[int | str, dict[str, Any]]
REFUSED: Answers = {status: {"model": ErrorAnswer} for status in (400, 401, 404, 413, 429, 503, 504)}


class Health(BaseModel):
    status: str = "ok"


class Readiness(BaseModel):
    ready: bool
    reason: str


@dataclass(frozen=True, kw_only=True)
class GatewayConfig:
    limits: Limits = Limits()
    keys: Keys | None = None
    """None lets anyone in."""
    overflow: Overflow = "refuse"
    """What happens to prompts longer than the context where a request does not say."""
    origins: tuple[str, ...] = ()
    """Web pages that browsers may use this gateway from, such as a dashboard's `http://host:port`."""


class Gateway:
    """Routes and the checks behind them."""

    def __init__(self, engine: TextEngine, config: GatewayConfig) -> None:
        self.engine, self.config, self.limits = engine, config, config.limits
        self.metrics = GatewayMetrics()
        self.answerer = Answerer(engine, config.limits, self.metrics)
        self.created = int(time.time())

    def router(self) -> APIRouter:
        router = APIRouter()
        add = router.add_api_route
        add("/v1/models", self.models, methods=["GET"], responses=_only(401, 429))
        add("/v1/models/{model}", self.model, methods=["GET"], responses=_only(400, 401, 404, 429))
        for path, route, shape in (
            ("/v1/completions", self.completions, Completion),
            ("/v1/chat/completions", self.chat, ChatCompletion),
        ):
            answers: Answers = {200: {"model": shape, "content": {"text/event-stream": {}}}, **REFUSED}
            add(path, route, methods=["POST"], response_model=None, responses=answers)
        add("/healthz", self.health, methods=["GET"])
        add("/readyz", self.readiness, methods=["GET"], responses={503: {"model": Readiness}})
        add("/metrics", self.metrics_page, methods=["GET"], response_class=Response)
        return router

    async def models(self) -> ModelList:
        """The one model served here."""
        return ModelList(data=[self._card()])

    async def model(self, model: str) -> ModelCard:
        """A model by name."""
        self._require_model(model)
        return self._card()

    async def completions(self, body: CompletionRequest, request: Request) -> Response:
        """Continue text."""
        self._require_model(body.model)
        prompts = [self._tokens(prompt) for prompt in body.prompts]
        limit = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        choices, seed = self._choices(
            body, prompts, max_tokens=limit, logprobs=body.logprobs, stops=body.stops, echo=bool(body.echo)
        )
        shape = CompletionFormat(self._heading("cmpl"), self.engine.model.tokenizer, body.logprobs)
        return await self._answer(body, self._job(body, shape, choices, seed, prompts), request)

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        """Answer the last message of a conversation."""
        self._require_model(body.model)
        prompts = [self._tokens(chat_prompt(body.messages))]
        top = (body.top_logprobs or 0) if body.logprobs else None
        choices, seed = self._choices(
            body, prompts, max_tokens=body.token_limit, logprobs=top, stops=[*body.stops, *STOPS], echo=False
        )
        shape = ChatFormat(self._heading("chatcmpl"), self.engine.model.tokenizer, top)
        return await self._answer(body, self._job(body, shape, choices, seed, prompts), request)

    async def health(self) -> Health:
        """Whether this process answers at all."""
        return Health()

    async def readiness(self) -> Response:
        """Whether text can be generated now."""
        ready, reason = self.engine.ready
        page = Readiness(ready=ready, reason=reason).model_dump_json()
        return Response(page, 200 if ready else 503, media_type="application/json")

    async def metrics_page(self) -> Response:
        """Numbers for Prometheus."""
        self.metrics.active.set(self.answerer.door.active)
        self.metrics.waiting.set(self.answerer.door.waiting)
        self.metrics.ready.set(self.engine.ready[0])
        return Response(self.metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")

    def _card(self) -> ModelCard:
        info = self.engine.model
        return ModelCard(
            id=info.name,
            created=self.created,
            owned_by="blocktrain",
            context=info.context,
            vocabulary=info.vocabulary,
            modes=list(info.modes),
        )

    def _require_model(self, name: str) -> None:
        known = self.engine.model.name
        if name != known:
            message = f"the model {printable(name)!r} does not exist here; this gateway serves {known!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def _heading(self, prefix: str) -> Heading:
        info = self.engine.model
        return new_heading(prefix, info.name, info.model_hash)

    def _tokens(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, list):
            return prompt
        return [int(token) for token in self.engine.model.tokenizer.encode(prompt.encode())]

    def _choices(
        self,
        body: SamplingRequest,
        prompts: Sequence[list[int]],
        *,
        max_tokens: int,
        logprobs: int | None,
        stops: Sequence[str],
        echo: bool,
    ) -> tuple[list[Choice], int]:
        seed = secrets.randbits(63) if body.seed is None else body.seed
        self._check_sizes(body, prompts, max_tokens, logprobs)
        requests = [
            GenerationRequest(
                prompt=prompt,
                max_tokens=max_tokens,
                seed=choice_seed(seed, number),
                temperature=1.0 if body.temperature is None else body.temperature,
                top_p=1.0 if body.top_p is None else body.top_p,
                mode=self._mode(body),
                draft_tokens=body.draft_tokens,
                passes=body.passes or 1,
                logprobs=logprobs,
                deadline_seconds=self.limits.request_seconds,
            )
            for prompt in prompts
            for number in range(body.choices)
        ]
        return [Choice(i, request, tuple(stops), echo) for i, request in enumerate(requests)], seed

    def _mode(self, body: SamplingRequest) -> Mode:
        mode, model = body.mode or DEFAULT_MODE, self.engine.model
        if mode not in model.modes:
            offered = ", ".join(model.modes)
            raise _wrong("mode", f"{model.name!r} was not trained for mode {mode}; it offers {offered}")
        return mode

    def _check_sizes(
        self, body: SamplingRequest, prompts: Sequence[list[int]], max_tokens: int, logprobs: int | None
    ) -> None:
        limits, context = self.limits, self.engine.model.context
        longest = max(map(len, prompts))
        if len(prompts) * body.choices > limits.max_choices:
            raise _wrong("n", f"prompts times n must be at most {limits.max_choices}")
        if max_tokens > limits.max_tokens:
            raise _wrong("max_tokens", f"max_tokens must be at most {limits.max_tokens}, found {max_tokens}")
        if logprobs is not None and logprobs > limits.max_logprobs:
            raise _wrong("logprobs", f"at most {limits.max_logprobs} log-probs are reported for each token")
        if min(map(len, prompts)) == 0:
            raise _wrong("prompt", "the prompt is empty; this model has no start token, so give it one byte")
        slides = (body.overflow or self.config.overflow) == "slide" or max_tokens == 0
        if longest > context and not slides:
            raise _too_long(longest, context)
        if sum(map(len, prompts)) > limits.max_prompt_tokens:
            raise _wrong("prompt", f"the prompts of a request may have {limits.max_prompt_tokens} tokens")

    def _job(
        self,
        body: SamplingRequest,
        shape: CompletionFormat | ChatFormat,
        choices: list[Choice],
        seed: int,
        prompts: Sequence[list[int]],
    ) -> Job:
        options = body.stream_options
        return Job(
            choices=choices,
            format=shape,
            mode=self._mode(body),
            seed=seed,
            prompt_tokens=sum(map(len, prompts)),
            include_usage=options is not None and options.include_usage,
        )

    async def _answer(self, body: SamplingRequest, job: Job, request: Request) -> Response:
        if body.stream:
            return EventStream(self.answerer, job)
        return await self.answerer.whole(job, request.receive)


def _only(*statuses: int) -> Answers:
    return {status: REFUSED[status] for status in statuses}


def _wrong(param: str, message: str) -> ApiError:
    return ApiError(400, message, param=param, code="invalid_value")


def _too_long(found: int, context: int) -> ApiError:
    return ApiError(
        400,
        f"this model's maximum context length is {context} tokens, but the prompt has {found}; shorten it, "
        'or add "overflow": "slide" to use its last part',
        param="prompt",
        code="context_length_exceeded",
    )


def create_app(engine: TextEngine, config: GatewayConfig | None = None) -> FastAPI:
    """The application; whoever runs it starts and closes the engine (see `main_gateway`)."""
    config = config or GatewayConfig()
    gateway = Gateway(engine, config)

    app = FastAPI(title="BlockTrain gateway", version=blocktrain.__version__)
    app.include_router(gateway.router())
    app.add_middleware(Doorkeeper, keys=config.keys, limits=config.limits, metrics=gateway.metrics)
    if config.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.origins,
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type"],
            expose_headers=ANSWER_HEADERS,
        )
    for kind in (ApiError, Refusal, RequestValidationError, HTTPException, BlocktrainError, Exception):
        app.add_exception_handler(kind, _error_answer)
    _describe_errors(app)
    return app


async def _error_answer(request: Request, error: Exception) -> Response:
    return as_api_error(error).response()


def _describe_errors(app: FastAPI) -> None:
    """FastAPI documents its own 422 for every body; here a body that does not fit is a 400."""
    schema = app.openapi()
    for path in schema["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
