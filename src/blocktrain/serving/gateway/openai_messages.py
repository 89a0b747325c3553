"""Requests and answers of the OpenAI-compatible API, as pydantic models.

Knows shapes and ranges that hold for every server; what depends on the model or on this server's limits
(its context, its most tokens) is checked in `gateway`. Types are strict: `"0.5"` is not a number.
Unknown fields are refused, as OpenAI does; fields that clients send but that change nothing are ignored;
fields that would change the answer in a way not offered are refused unless they are neutral.

Fields that OpenAI does not have: `mode`, `draft_tokens`, `passes`, `overflow` and `block_weights`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    model_validator,
)
from pydantic_core import PydanticCustomError

from blocktrain.serving.engine.requests import MAX_DRAFT_TOKENS, Mode
from blocktrain.serving.gateway.text import FinishReason
from blocktrain.wire.frame_metadata import MAX_PASSES

Overflow = Literal["refuse", "slide"]


def _unicode(text: str) -> str:
    # JSON may hold half a surrogate pair, which no encoder takes; ASCII needs no second look.
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError("the text holds half a surrogate pair, which is not Unicode") from None
    return text


Text = Annotated[str, AfterValidator(_unicode)]
TokenId = Annotated[int, Field(ge=0)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
# The first element that does not fit ends a list. Otherwise each of a million makes an error for every arm of
# a union: `"prompt": [-1, -1, ...]` of 2 MB cost 14 s of one core and 3 GB.
MAX_KEYS = 1024
"""Keys of one object of a request; far more than are known, and each unknown one makes an error."""
StopText = Annotated[Text, StringConstraints(min_length=1, max_length=200)]
Stops = StopText | Annotated[list[StopText], Field(max_length=16, fail_fast=True)] | None
DEFAULT_COMPLETION_TOKENS = 16
DEFAULT_CHAT_TOKENS = 256


def _wrong(field: str, problem: str) -> PydanticCustomError:
    """A field that does not fit the others; `param` goes into the error object."""
    return PydanticCustomError("wrong_field", "`{param}` {problem}", {"param": field, "problem": problem})


class StrictModel(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _few_keys(cls, found: Any) -> Any:
        for one in (found, *found.values()) if isinstance(found, dict) else ():
            if isinstance(one, dict) and len(one) > MAX_KEYS:
                raise PydanticCustomError("too_many_keys", f"an object may have {MAX_KEYS} keys")
        return found


class StreamOptions(StrictModel):
    include_usage: bool = False
    """Send one more chunk with the usage of the whole request before `[DONE]`."""
    include_obfuscation: bool | None = None
    """Ignored: nothing is obfuscated here."""


class SamplingRequest(StrictModel):
    """What completions and chat have in common."""

    model: Annotated[str, StringConstraints(min_length=1, max_length=200)]
    """A name from `/v1/models`."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """0 takes the most likely token; the default is 1."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Sample among the most likely tokens that hold this share of the probability; the default is 1."""
    n: Annotated[int, Field(ge=1)] | None = None
    """Answers for each prompt."""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    """The same seed gives the same text in `ar` and `verify`, for any number of stages; see docs/serve.md
    for `sweep`."""
    stop: Stops = None
    """The text ends in front of the first of these."""
    stream: bool | None = None
    """Send server-sent events, one for each traversal."""
    stream_options: StreamOptions | None = None
    mode: Mode | None = None
    """`ar`, `verify` (the default: the same text in fewer traversals) or `sweep` (lossy, one pass)."""
    draft_tokens: Annotated[int, Field(ge=0, le=MAX_DRAFT_TOKENS)] | None = None
    """In mode `verify`, how many tokens to draft for each traversal."""
    passes: Annotated[int, Field(ge=1, le=MAX_PASSES)] | None = None
    """In mode `sweep`, how often each block refines the text; one traversal however many."""
    overflow: Overflow | None = None
    """What to do with a prompt longer than the context: `refuse` it, or `slide` over its last part."""
    # Penalties would make a choice depend on earlier text, and the same seed would no longer give the same
    # text in every mode; 0 is taken, since clients send it.
    presence_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    """Only 0."""
    frequency_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    """Only 0."""
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    """Only empty."""
    # Ignored: clients send them, and they change nothing here.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def stops(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)

    @model_validator(mode="after")
    def _options_need_what_they_are_for(self) -> SamplingRequest:
        if self.stream_options is not None and not self.stream:
            raise _wrong("stream_options", "is only allowed when `stream` is true")
        if self.passes is not None and self.mode != "sweep":
            raise _wrong("passes", "is only allowed when `mode` is `sweep`")
        return self


class CompletionRequest(SamplingRequest):
    prompt: (
        Text
        | TokenIds
        | Annotated[list[Text], Field(min_length=1, fail_fast=True)]
        | Annotated[list[TokenIds], Field(min_length=1, fail_fast=True)]
    )
    """A text, a list of token ids (for a byte model: its bytes), or a list of either."""
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    """Tokens to generate; 0 together with `echo` scores the prompt."""
    echo: bool | None = None
    """Give the prompt back in front of the text."""
    logprobs: Annotated[int, Field(ge=0)] | None = None
    """Report the log-probability of each token, and of this many alternatives."""
    block_weights: bool | None = None
    """For debugging: report what each block counted for where a token was chosen."""
    best_of: Annotated[int, Field(ge=1)] | None = None
    """Only equal to `n`."""
    suffix: str | None = None
    """Refused unless empty: a model that reads left to right cannot fill in."""

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        # Pydantic made sure that a list is not empty and holds one kind.
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt

    @model_validator(mode="after")
    def _offered_here(self) -> CompletionRequest:
        if self.block_weights and self.mode == "sweep":
            raise _wrong("block_weights", "is not offered in mode `sweep`, where the blocks take turns")
        if self.suffix:
            raise _wrong("suffix", "is not offered: this model reads left to right and cannot fill in")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise _wrong("best_of", "other than `n` is not offered; ask for `n` and choose yourself")
        return self


class TextPart(StrictModel):
    type: Literal["text"]
    text: Text


class ChatMessage(StrictModel):
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[TextPart], Field(fail_fast=True)]
    name: str | None = None
    """Ignored."""
    refusal: None = None
    """Ignored; clients send it back with an assistant's message."""

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class ResponseFormat(StrictModel):
    type: Literal["text"]


class ChatRequest(SamplingRequest):
    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    """The conversation so far, oldest first."""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """Tokens to generate."""
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    """The newer name of `max_tokens`."""
    logprobs: bool | None = None
    """Report the log-probability of each token."""
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    """And of this many alternatives; needs `logprobs`."""
    response_format: ResponseFormat | None = None
    """Only text."""
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    """Only empty: this model calls no tools."""
    tool_choice: Literal["none", "auto"] | None = None
    """Ignored."""

    @property
    def token_limit(self) -> int:
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        return DEFAULT_CHAT_TOKENS if self.max_tokens is None else self.max_tokens

    @model_validator(mode="after")
    def _top_needs_logprobs(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise _wrong("top_logprobs", "is only allowed when `logprobs` is true")
        return self


Absent = Field(exclude_if=lambda value: value is None)
"""Left out of the JSON where there is nothing to say, as OpenAI does."""


class TraversalUsage(BaseModel):
    """What the generations cost on the network; not part of OpenAI's usage."""

    mode: Mode
    traversals: int
    scoring_traversals: int
    """Round trips that scored an echoed prompt; not among `traversals`, but their bytes are counted."""
    text_bytes: int
    """Bytes of text given to the client, without an echoed prompt."""
    bytes_per_traversal: float
    drafted_tokens: int
    accepted_tokens: int
    wire_bytes_sent: int
    wire_bytes_received: int
    degraded_blocks: list[int]
    """Blocks that some traversal had to do without."""


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    blocktrain: TraversalUsage


class Heading(BaseModel):
    """What every answer and every chunk of a stream begins with."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    block_weights: Annotated[list[list[float] | None] | None, Absent] = None
    """Each token's weights of all blocks; null for the first of an echoed prompt, which nothing predicts."""
    finish_reason: FinishReason | None = None


class Completion(Heading):
    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]
    usage: Annotated[Usage | None, Absent] = None


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[ChatLogprob]
    refusal: None = None


class AssistantMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None


class ChatCompletion(Heading):
    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(BaseModel):
    role: Annotated[Literal["assistant"] | None, Absent] = None
    content: Annotated[str | None, Absent] = None


class ChatChunkChoice(BaseModel):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None


class ChatChunk(Heading):
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    usage: Annotated[Usage | None, Absent] = None


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    context: int
    """Tokens the model sees at once."""
    vocabulary: int
    modes: list[Mode]


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class ApiErrorBody(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ApiErrorAnswer(BaseModel):
    """The one shape of every error."""

    error: ApiErrorBody
