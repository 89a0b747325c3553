"""The front door: an OpenAI-compatible HTTP API over an engine.

Checks what depends on the model and on this server's limits, and wires the parts together. It does not
know how text is produced (`engine`), written (`choices`), shaped (`formats`) or sent (`answering`).

Covered: keys, rates, sizes and counts of what strangers send; every refusal has OpenAI's error shape.
TLS is the connection's affair (`connections`).
"""

from __future__ import annotations

import asyncio
import json
import secrets
import ssl
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from prometheus_client import generate_latest
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

import blocktrain
from blocktrain.data.tokenizer import Tokenizer
from blocktrain.errors import BlocktrainError
from blocktrain.serving.engine.engine import TextEngine
from blocktrain.serving.engine.requests import GenerationRequest, Mode, ModelInfo
from blocktrain.serving.gateway.access import CALLER, AccessCheck
from blocktrain.serving.gateway.answering import Answerer, EventStream, Job
from blocktrain.serving.gateway.api_errors import ApiError, as_api_error, printable
from blocktrain.serving.gateway.chat_template import STOPS, chat_prompt
from blocktrain.serving.gateway.choices import Choice, choice_seed
from blocktrain.serving.gateway.engines import Engines
from blocktrain.serving.gateway.formats import AnswerFormat, ChatFormat, CompletionFormat
from blocktrain.serving.gateway.limits import ANYONE, GatewayLimits, Keys, TooManyRequestsError
from blocktrain.serving.gateway.metrics import GatewayMetrics
from blocktrain.serving.gateway.openai_messages import (
    DEFAULT_COMPLETION_TOKENS,
    ApiErrorAnswer,
    ChatCompletion,
    ChatMessage,
    ChatRequest,
    Completion,
    CompletionRequest,
    Conversation,
    DetokenizeAnswer,
    DetokenizeRequest,
    ModelCard,
    ModelList,
    Overflow,
    SamplingRequest,
    TokenizeAnswer,
    TokenizeRequest,
    TokenizeText,
)
from blocktrain.serving.gateway.responses import ModelResponse, ResponsesFormat, ResponsesRequest
from blocktrain.serving.gateway.text import token_label

DEFAULT_MODE: Mode = "verify"
LONG_TEXT = 10_000
"""Characters; a BPE tokenizer of 16,384 tokens takes 1.5 ms of a core for them."""
ANSWER_HEADERS = (
    "retry-after",
    "x-request-id",
    "x-blocktrain-bytes-per-traversal",
    "x-blocktrain-degraded",
    "x-blocktrain-ignored",
    "x-blocktrain-mode",
    "x-blocktrain-seed",
    "x-blocktrain-traversals",
    "x-blocktrain-versions",
    "x-blocktrain-wire-bytes-received",
    "x-blocktrain-wire-bytes-sent",
)
Answers = dict[int | str, dict[str, Any]]
REFUSED: Answers = {status: {"model": ApiErrorAnswer} for status in (400, 401, 404, 413, 429, 503, 504)}


class Health(BaseModel):
    status: str = "ok"


class Readiness(BaseModel):
    ready: bool
    reason: str


@dataclass(frozen=True, kw_only=True)
class GatewayConfig:
    limits: GatewayLimits = GatewayLimits()
    keys: Keys | None = None
    """None lets anyone in."""
    overflow: Overflow = "refuse"
    """What happens to prompts longer than the context where a request does not say."""
    tls: ssl.SSLContext | None = None
    """None speaks plain HTTP."""
    origins: tuple[str, ...] = ()
    """Web pages that browsers may use this gateway from, such as a dashboard's `http://host:port`."""


class Gateway:
    """Routes and the checks behind them."""

    def __init__(self, engines: Engines, config: GatewayConfig) -> None:
        self.engines, self.config, self.limits = engines, config, config.limits
        self.metrics = GatewayMetrics()
        self.answerer = Answerer(engines, config.limits, self.metrics, config.keys)
        self.created = int(time.time())

    @asynccontextmanager
    async def running(self, app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(self.answerer.quotas.flush)

    def _engine(self, model: str | None) -> TextEngine:
        """What a request for this model gets that comes now; the first model's where it names none."""
        served = self.engines.newest
        if model is None:
            return next(iter(served.values()))
        if model not in served:
            known = ", ".join(map(repr, served))
            message = f"the model {printable(model)!r} does not exist here; this gateway serves {known}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return served[model]

    def router(self) -> APIRouter:
        router = APIRouter()
        add = router.add_api_route
        add("/v1/models", self.models, methods=["GET"], responses=_only(401, 429))
        add("/v1/models/{model}", self.model, methods=["GET"], responses=_only(400, 401, 404, 429))
        for path, route, shape in (
            ("/v1/completions", self.completions, Completion),
            ("/v1/chat/completions", self.chat, ChatCompletion),
            ("/v1/responses", self.responses, ModelResponse),
        ):
            answers: Answers = {200: {"model": shape, "content": {"text/event-stream": {}}}, **REFUSED}
            add(path, route, methods=["POST"], response_model=None, responses=answers)
        for path, tokens, answer in (
            ("/tokenize", self.tokenize, TokenizeAnswer),
            ("/detokenize", self.detokenize, DetokenizeAnswer),
        ):
            refused = _only(400, 401, 404, 413, 429)
            add(path, tokens, methods=["POST"], response_model=answer, responses=refused)
        add("/health", self.health, methods=["GET"])
        add("/healthz", self.health, methods=["GET"])
        add("/readyz", self.readiness, methods=["GET"], responses={503: {"model": Readiness}})
        add("/metrics", self.metrics_page, methods=["GET"], response_class=Response)
        return router

    async def models(self) -> ModelList:
        """The models served here."""
        return ModelList(data=[await self.model(name) for name in self.engines.newest])

    async def model(self, model: str) -> ModelCard:
        """A model by name."""
        info = self._engine(model).model
        return ModelCard(
            id=info.name,
            created=self.created,
            owned_by="blocktrain",
            context=info.context,
            max_model_len=info.context,
            tokenizer=info.tokenizer.name,
            chat_template=chat_prompt([ChatMessage(role="user", content="{question}")]),
            vocabulary=info.vocabulary,
            modes=list(info.modes),
            versions=list(info.versions),
        )

    async def completions(self, body: CompletionRequest, request: Request) -> Response:
        """Continue text."""
        limit = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        job = await self._job(
            body,
            lambda model: CompletionFormat(
                model, body.logprobs, body.stream_options, block_weights=bool(body.block_weights)
            ),
            body.prompts,
            max_tokens=limit,
            logprobs=body.logprobs,
            block_weights=bool(body.block_weights),
            stops=body.stops,
            echo=bool(body.echo),
            client=request.scope.get(CALLER, ANYONE),
        )
        return await self._answered(job, body, request)

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        """Answer the last message of a conversation."""
        top = (body.top_logprobs or 0) if body.logprobs else None
        job = await self._job(
            body,
            lambda model: ChatFormat(model, top, body.stream_options),
            [self._prompt_of(body)],
            prompt_field="messages",
            limit_field="max_tokens" if body.max_completion_tokens is None else "max_completion_tokens",
            logprobs_field="top_logprobs",
            max_tokens=body.token_limit,
            logprobs=top,
            stops=[*body.stops, *STOPS],
            client=request.scope.get(CALLER, ANYONE),
        )
        return await self._answered(job, body, request)

    async def responses(self, body: ResponsesRequest, request: Request) -> Response:
        """Answer a question or the last message of a conversation, in the shape of the newer API."""
        job = await self._job(
            body,
            lambda model: ResponsesFormat(model, body, body.overflow or self.config.overflow),
            [chat_prompt(body.messages)],
            prompt_field="input",
            limit_field="max_output_tokens",
            logprobs_field="top_logprobs",
            max_tokens=body.token_limit,
            logprobs=body.logprobs,
            stops=[*body.stops, *STOPS],
            client=request.scope.get(CALLER, ANYONE),
        )
        return await self._answered(job, body, request)

    async def tokenize(self, body: TokenizeRequest) -> Response:
        """Text or a conversation as token ids."""
        model = self._engine(body.model).model
        text = body.prompt if isinstance(body, TokenizeText) else self._prompt_of(body)

        def answer() -> str:
            tokens = _encoded(model.tokenizer, text, body.add_special_tokens)
            labels = None
            if body.return_token_strs:
                labels = [token_label(model.tokenizer.decode([token])) for token in tokens]
            return TokenizeAnswer(
                count=len(tokens), max_model_len=model.context, tokens=tokens, token_strs=labels
            ).model_dump_json()

        # In a thread: of a text of 1.9 MB this took two seconds, and no stream went on meanwhile.
        return Response(await asyncio.to_thread(answer), media_type="application/json")

    async def detokenize(self, body: DetokenizeRequest) -> Response:
        """Token ids as text."""
        model = self._engine(body.model).model
        _require_ids(body.tokens, model, "tokens")

        def answer() -> str:
            text = model.tokenizer.decode(body.tokens).decode("utf-8", "replace")
            return DetokenizeAnswer(prompt=text).model_dump_json()

        return Response(await asyncio.to_thread(answer), media_type="application/json")

    async def health(self) -> Health:
        """Whether this process answers at all."""
        return Health()

    async def readiness(self) -> Response:
        """Whether text can be generated now."""
        ready, reason = self._ready()
        page = Readiness(ready=ready, reason=reason).model_dump_json()
        return Response(page, 200 if ready else 503, media_type="application/json")

    async def metrics_page(self) -> Response:
        """Numbers for Prometheus."""
        # Read at the scrape and not at every change, which happens far more often.
        self.metrics.active.set(self.answerer.places.active)
        self.metrics.waiting.set(self.answerer.places.waiting)
        self.metrics.ready.set(self._ready()[0])
        page = generate_latest(self.metrics.registry)
        return Response(page, media_type="text/plain; version=0.0.4; charset=utf-8")

    def _ready(self) -> tuple[bool, str]:
        """As the model that is worst off; with several models the reason names it."""
        served = self.engines.newest
        name, (ready, reason) = min(
            ((name, engine.ready) for name, engine in served.items()),
            key=lambda one: (one[1][0], one[1][1] == "ready"),
        )
        return ready, reason if len(served) == 1 or reason == "ready" else f"{name}: {reason}"

    async def _answered(self, job: Job, body: SamplingRequest, request: Request) -> Response:
        if body.stream:
            return EventStream(self.answerer, job)
        return await self.answerer.whole(job, request.receive)

    def _prompt_of(self, body: Conversation) -> str:
        return chat_prompt(
            body.messages,
            answer=body.add_generation_prompt is not False,
            continued=bool(body.continue_final_message),
        )

    async def _job(
        self,
        body: SamplingRequest,
        shape: Callable[[ModelInfo], AnswerFormat],
        prompts: Sequence[str | list[int]],
        *,
        max_tokens: int,
        logprobs: int | None,
        stops: Sequence[str],
        client: str,
        echo: bool = False,
        block_weights: bool = False,
        prompt_field: str = "prompt",
        limit_field: str = "max_tokens",
        logprobs_field: str = "logprobs",
    ) -> Job:
        """A request that fits this model and this server's limits, or an ApiError that names the field."""
        engine, limits = self._engine(body.model), self.limits
        model = engine.model

        def encoded() -> list[list[int]]:
            special = body.add_special_tokens
            return [
                one if isinstance(one, list) else _encoded(model.tokenizer, one, special) for one in prompts
            ]

        # Others' streams go on while a long text is cut into tokens; of a short one that takes less than the
        # way to a thread and back.
        size = sum(map(len, prompts))
        texts = encoded() if size < LONG_TEXT else await asyncio.to_thread(encoded)
        lengths = [len(text) for text in texts]
        if len(texts) * (body.n or 1) > limits.max_choices:
            raise _wrong("n", f"prompts times n must be at most {limits.max_choices}")
        if max_tokens > limits.max_tokens:
            problem = f"{limit_field} must be at most {limits.max_tokens}, found {max_tokens}"
            raise _wrong(limit_field, problem)
        if logprobs is not None and logprobs > limits.max_logprobs:
            raise _wrong(
                logprobs_field, f"at most {limits.max_logprobs} log-probs are reported for each token"
            )
        # Every row follows some token; an empty prompt has none to follow.
        if min(lengths) == 0:
            raise _wrong(prompt_field, "the prompt is empty and has no token to follow; give it one byte")
        # A text that is only scored needs no window to grow in: it is cut into windows.
        slides = (body.overflow or self.config.overflow) == "slide" or max_tokens == 0
        if max(lengths) > model.context and not slides:
            raise ApiError(
                400,
                # OpenAI's first words: client libraries look for them.
                f"This model's maximum context length is {model.context} tokens. However, your "
                f"{prompt_field} resulted in {max(lengths)} tokens. Shorten it, or add "
                '"overflow": "slide" to use its last part',
                param=prompt_field,
                code="context_length_exceeded",
            )
        if sum(lengths) > limits.max_prompt_tokens:
            raise _wrong(prompt_field, f"the prompts of a request may have {limits.max_prompt_tokens} tokens")
        for text in texts:
            _require_ids(text, model, prompt_field)
        _require_ids([token for token, _ in body.biases], model, "logit_bias")
        mode = body.mode or DEFAULT_MODE
        if mode not in model.modes:
            offered = ", ".join(model.modes)
            raise _wrong("mode", f"{model.name!r} was not trained for mode {mode}; it offers {offered}")

        # Drawn here and said in a header, so that any text can be asked for again.
        seed = secrets.randbits(63) if body.seed is None else body.seed
        requests = [
            GenerationRequest(
                prompt=text,
                max_tokens=max_tokens,
                seed=choice_seed(seed, number),
                temperature=1.0 if body.temperature is None else body.temperature,
                top_p=1.0 if body.top_p is None else body.top_p,
                # Other servers write "all tokens" as 0 or -1.
                top_k=body.top_k if body.top_k is not None and body.top_k > 0 else None,
                min_p=body.min_p or 0.0,
                logit_bias=body.biases,
                presence_penalty=body.presence_penalty or 0.0,
                frequency_penalty=body.frequency_penalty or 0.0,
                repetition_penalty=body.repetition_penalty or 1.0,
                min_tokens=body.min_tokens or 0,
                mode=mode,
                draft_tokens=body.draft_tokens,
                passes=body.passes or 1,
                # Weights come with the scores of tokens, which are then made and not shown.
                logprobs=0 if block_weights and logprobs is None else logprobs,
                deadline_seconds=limits.request_seconds,
            )
            for text in texts
            for number in range(body.n or 1)
        ]
        return Job(
            engine=engine,
            choices=[
                Choice(i, request, tuple(stops), echo, bool(body.ignore_eos))
                for i, request in enumerate(requests)
            ],
            format=shape(model),
            mode=mode,
            seed=seed,
            prompt_tokens=sum(lengths),
            ignored=body.ignored,
            client=client,
        )


def _encoded(tokenizer: Tokenizer, text: str, special: bool | None) -> list[int]:
    """Tokens of a text; where a client wants no special ones, without those that stand in front of it."""
    left_out = len(tokenizer.front) if special is False else 0
    tokens: list[int] = tokenizer.encode(text.encode())[left_out:].tolist()
    return tokens


def _require_ids(tokens: Sequence[int], model: ModelInfo, param: str) -> None:
    if max(tokens, default=0) >= model.vocabulary:
        raise _wrong(param, f"{param}: expected token ids below {model.vocabulary}")


def _only(*statuses: int) -> Answers:
    return {status: REFUSED[status] for status in statuses}


def _wrong(param: str, message: str) -> ApiError:
    return ApiError(400, message, param=param, code="invalid_value")


def create_app(engines: Engines, config: GatewayConfig | None = None) -> FastAPI:
    """The application; the program that runs it starts and closes the engine (see `gateway.main`)."""
    config = config or GatewayConfig()
    gateway = Gateway(engines, config)

    # No /docs: its page would load scripts from another origin. /openapi.json is served, but not by FastAPI,
    # which would make it in the event loop.
    app = FastAPI(
        title="BlockTrain gateway",
        version=blocktrain.__version__,
        openapi_url=None,
        lifespan=gateway.running,
    )
    app.include_router(gateway.router())
    app.add_middleware(AccessCheck, keys=config.keys, limits=config.limits, metrics=gateway.metrics)
    if config.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.origins,
            allow_methods=["GET", "POST"],
            # Any: client libraries send headers of their own (x-stainless-*), and the origins are the guard.
            allow_headers=["*"],
            expose_headers=ANSWER_HEADERS,
        )
    for kind in (
        ApiError,
        TooManyRequestsError,
        RequestValidationError,
        HTTPException,
        BlocktrainError,
        Exception,
    ):
        app.add_exception_handler(kind, _error_answer)
    describe = app.openapi

    def openapi() -> dict[str, Any]:
        # FastAPI documents its own 422 for every body; here a body that does not fit is a 400.
        described = describe()
        for path in described["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        return described

    # Made when somebody asks: it takes longer than all the rest of a gateway's start.
    app.openapi = openapi  # type: ignore[method-assign]
    making: asyncio.Task[bytes] | None = None

    async def schema() -> Response:
        """This description."""
        nonlocal making
        # Once, in a thread: it takes 0.24 s, in which no stream would go on.
        if making is None:
            making = asyncio.create_task(asyncio.to_thread(lambda: json.dumps(openapi()).encode()))
        return Response(await asyncio.shield(making), media_type="application/json")

    app.add_api_route("/openapi.json", schema, methods=["GET"], include_in_schema=False)
    return app


async def _error_answer(request: Request, error: Exception) -> Response:
    return as_api_error(error).response()
