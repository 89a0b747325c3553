"""Requests and answers of the OpenAI-compatible API, as pydantic models.

Knows shapes and ranges that hold for every server; what depends on the model or on this server's limits
(its context, its most tokens) is checked in `gateway`. Types are strict: `"0.5"` is not a number.
Unknown fields are refused, as OpenAI does; fields that clients send but that change nothing are ignored, and
a header says so; fields that would change the answer in a way not offered are refused unless neutral.

Fields that OpenAI does not have but other servers do: `top_k`, `min_p`, `repetition_penalty`, `min_tokens`,
`ignore_eos` and those of `Ignored`. Our own: `mode`, `draft_tokens`, `passes`, `overflow`, `block_weights`.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
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


ModelName = Annotated[str, StringConstraints(min_length=1, max_length=200)]
Text = Annotated[str, AfterValidator(_unicode)]
TokenId = Annotated[int, Field(ge=0)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
# The first element that does not fit ends a list. Otherwise each of a million makes an error for every arm of
# a union: `"prompt": [-1, -1, ...]` of 2 MB cost 14 s of one core and 3 GB.
MAX_KEYS = 1024
"""Keys of one object of a request; far more than are known, and each unknown one makes an error."""
BiasedToken = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}$")]
StopText = Annotated[Text, StringConstraints(min_length=1, max_length=200)]
Stops = StopText | Annotated[list[StopText], Field(max_length=16, fail_fast=True)] | None
DEFAULT_COMPLETION_TOKENS = 16
DEFAULT_CHAT_TOKENS = 256


def wrong_field(field: str, problem: str) -> PydanticCustomError:
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
    continuous_usage_stats: bool | None = None
    """Send the usage so far with every chunk."""
    include_obfuscation: bool | None = None
    """Ignored: nothing is obfuscated here."""


class Ignored(StrictModel):
    """Fields that clients and load generators send and that change no text here: they name the caller, hint
    at caches, or tune what this server does not have. Of any type, because nobody reads them."""

    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    cache_prompt: Any = None
    id_slot: Any = None
    priority: Any = None
    request_id: Any = None
    prediction: Any = None
    reasoning: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    skip_special_tokens: Any = None
    spaces_between_special_tokens: Any = None
    length_penalty: Any = None
    early_stopping: Any = None
    parallel_tool_calls: Any = None

    @property
    def ignored(self) -> list[str]:
        """The fields that were sent and not read."""
        return [name for name in Ignored.model_fields if getattr(self, name) is not None]


class SamplingRequest(Ignored):
    """What completions, chat and responses have in common."""

    model: ModelName
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
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    """Sample among this many of the most likely tokens; 0 or -1 for all, the default."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Sample among tokens at least this share as likely as the most likely one; the default is 0."""
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    """Nats to take from every token that the new text already has."""
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    """Nats to take from a token for each time that the new text already has it."""
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] | None = None
    """Factor on the log-probability of every token that the prompt or the new text has."""
    logit_bias: dict[BiasedToken, Annotated[float, Field(ge=-100, le=100)]] | None = None
    """Nats to add to the log-probability of a token, by its id."""
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    """Neither a stop sequence nor the end of a document ends the text before this many tokens."""
    ignore_eos: bool | None = None
    """Write on behind the end of a document, as load generators want."""
    add_special_tokens: bool | None = None
    """False: nothing in front of the text, where the tokenizer of an imported model puts a token there."""
    use_beam_search: Literal[False] | None = None
    """Only false."""
    include_stop_str_in_output: Literal[False] | None = None
    """Only false."""

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        return tuple((int(token), nats) for token, nats in (self.logit_bias or {}).items())

    @property
    def stops(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)

    @model_validator(mode="after")
    def _options_need_what_they_are_for(self) -> SamplingRequest:
        if self.stream_options is not None and not self.stream:
            raise wrong_field("stream_options", "is only allowed when `stream` is true")
        if self.passes is not None and self.mode != "sweep":
            raise wrong_field("passes", "is only allowed when `mode` is `sweep`")
        return self


class CompletionRequest(SamplingRequest):
    prompt: Text | TokenIds | Annotated[list[Text | TokenIds], Field(min_length=1, fail_fast=True)]
    """A text, a list of token ids (for a byte model: its bytes), or a list of both kinds."""
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
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        texts = [one for one in self.prompt if not isinstance(one, int)]
        # Numbers alone are one prompt; pydantic made sure that they are not mixed with texts.
        return texts or [[one for one in self.prompt if isinstance(one, int)]]

    @model_validator(mode="after")
    def _offered_here(self) -> CompletionRequest:
        if self.block_weights and self.mode == "sweep":
            raise wrong_field("block_weights", "is not offered in mode `sweep`, where the blocks take turns")
        if self.suffix:
            raise wrong_field("suffix", "is not offered: this model reads left to right and cannot fill in")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise wrong_field("best_of", "other than `n` is not offered; ask for `n` and choose yourself")
        return self


class TextPart(StrictModel):
    type: Literal["text"]
    text: Text


class ChatMessage(StrictModel):
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[TextPart], Field(fail_fast=True)]
    name: str | None = None
    """Ignored."""
    # What clients send back with an assistant's message as they got it: without content, so ignored.
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None
    reasoning_content: Any = None

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class ResponseFormat(StrictModel):
    param: ClassVar[str] = "response_format"
    """The field of a request that it is in."""

    type: Literal["text", "json_object", "json_schema"]
    """Only `text`. The others are known so that their refusal says why."""
    json_schema: Any = None

    @model_validator(mode="after")
    def _only_text(self) -> ResponseFormat:
        if self.type != "text":
            raise wrong_field(
                self.param,
                "other than text is not offered: no decoding here is constrained by a grammar or a schema; "
                "ask for JSON in the prompt and check the answer",
            )
        return self


class Conversation(StrictModel):
    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    """The conversation so far, oldest first."""
    add_generation_prompt: bool | None = None
    """Whether an answer begins behind the last message; the default is true."""
    continue_final_message: bool | None = None
    """Write on where the last message ends, instead of beginning an answer."""

    @model_validator(mode="after")
    def _one_ending(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            raise wrong_field("continue_final_message", "and `add_generation_prompt` exclude each other")
        return self


class ChatRequest(Conversation, SamplingRequest):
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
    modalities: Annotated[list[Literal["text"]], Field(max_length=1, fail_fast=True)] | None = None
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

    @property
    def ignored(self) -> list[str]:
        return [*super().ignored, *(["tool_choice"] if self.tool_choice is not None else [])]

    @model_validator(mode="after")
    def _top_needs_logprobs(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise wrong_field("top_logprobs", "is only allowed when `logprobs` is true")
        return self


class TokenizeText(StrictModel):
    model: ModelName | None = None
    prompt: Text
    return_token_strs: bool | None = None
    add_special_tokens: bool | None = None
    """False: without what a request for a text has in front of it (imported models)."""


class TokenizeChat(Conversation):
    model: ModelName | None = None
    return_token_strs: bool | None = None
    add_special_tokens: bool | None = None
    """As for a text."""


def _of_a_conversation(body: Any) -> str:
    return "conversation" if isinstance(body, dict) and "messages" in body else "single"


# By what the body has, so that a mistake in a message is not told as a missing prompt.
TokenizeRequest = Annotated[
    Annotated[TokenizeText, Tag("single")] | Annotated[TokenizeChat, Tag("conversation")],
    Discriminator(_of_a_conversation),
]


class TokenizeAnswer(BaseModel):
    count: int
    max_model_len: int
    """Tokens that the model sees at once."""
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(StrictModel):
    model: ModelName | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


class DetokenizeAnswer(BaseModel):
    prompt: str
    """The text; bytes that are not UTF-8 come as U+FFFD."""


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
    versions: list[int] = []
    """Merges in each block of the model that wrote it, where it was taken from a run."""


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
    usage: Usage | None = None
    """Left out of chunks unless `stream_options` asks for it; then null in all but the last."""


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
    usage: Usage | None = None


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    context: int
    """Tokens the model sees at once."""
    max_model_len: int
    """The same, under the name that other servers give it."""
    tokenizer: str
    chat_template: str
    """A conversation of one question as the model sees it."""
    vocabulary: int
    modes: list[Mode]
    versions: list[int] = []
    """Merges in each block, where the model was taken from a run."""


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
