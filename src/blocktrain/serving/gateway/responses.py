"""The route `/v1/responses`: its requests, its answers, and the events of its streams.

The same text as chat gives for the same messages, in the shapes of OpenAI's newer API. Nothing is stored: an
earlier answer comes back as a message of `input`, never by its id.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, model_validator
from pydantic_core import to_json

from blocktrain.serving.engine.requests import ModelInfo
from blocktrain.serving.gateway.choices import Piece, joined
from blocktrain.serving.gateway.formats import AnswerFormat
from blocktrain.serving.gateway.openai_messages import (
    DEFAULT_CHAT_TOKENS,
    ApiErrorBody,
    ChatLogprob,
    ChatMessage,
    Overflow,
    ResponseFormat,
    SamplingRequest,
    StrictModel,
    Text,
    TraversalUsage,
    Usage,
    wrong_field,
)

LOGPROBS = "message.output_text.logprobs"
"""What `include` asks for log-probs with."""
Include = Literal[
    "message.output_text.logprobs",
    # OpenAI's others add to tool calls, images and reasoning, of which our answers have none. Clients send
    # some of them with every request, so these change nothing; a word that OpenAI does not know is refused.
    "reasoning.encrypted_content",
    "web_search_call.results",
    "web_search_call.action.sources",
    "file_search_call.results",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "message.input_image.image_url",
]
Status = Literal["in_progress", "completed", "incomplete"]


class InputPart(StrictModel):
    type: Literal["input_text", "output_text"]
    text: Text
    # What clients send back with an earlier answer as they got it; ignored.
    annotations: Any = None
    logprobs: Any = None
    prompt_cache_breakpoint: Any = None


class InputMessage(StrictModel):
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[InputPart], Field(fail_fast=True)]
    type: Literal["message"] | None = None
    # Of an earlier answer; ignored.
    id: Any = None
    status: Any = None
    phase: Any = None


class TextFormat(ResponseFormat):
    param: ClassVar[str] = "text"

    # Of a JSON schema, which is refused.
    name: Any = None
    description: Any = None
    schema_: Any = Field(default=None, alias="schema")
    strict: Any = None


class TextOptions(StrictModel):
    format: TextFormat | None = None
    """Only text."""
    verbosity: Any = None
    """Ignored."""


class ResponsesRequest(SamplingRequest):
    input: Text | Annotated[list[InputMessage], Field(min_length=1, fail_fast=True)]
    """A question, or the conversation so far, oldest first."""
    instructions: Text | None = None
    """A system message in front of the input."""
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    """Tokens to generate."""
    n: Literal[1] | None = None
    """Only 1: this API knows one answer."""
    include: Annotated[list[Include], Field(max_length=16, fail_fast=True)] | None = None
    """`message.output_text.logprobs` reports the log-probability of each token. OpenAI's other values are for
    tools, images and reasoning, of which answers have none."""
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    """Report log-probabilities, and this many alternatives."""
    truncation: Literal["auto", "disabled"] | None = None
    """`auto` is `overflow` `slide`, `disabled` is `refuse`."""
    text: TextOptions | None = None
    """Only text."""
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    """Only empty: this model calls no tools."""
    tool_choice: Literal["none", "auto"] | None = None
    """Ignored."""
    max_tool_calls: Any = None
    """Ignored."""
    background: bool | None = None
    """Only false."""
    previous_response_id: Any = None
    """Only null: no answer is stored."""
    conversation: Any = None
    """Only null."""
    prompt: Any = None
    """Only null."""

    @property
    def messages(self) -> list[ChatMessage]:
        system = [] if self.instructions is None else [ChatMessage(role="system", content=self.instructions)]
        if isinstance(self.input, str):
            return [*system, ChatMessage(role="user", content=self.input)]
        for one in self.input:
            content = one.content
            text = content if isinstance(content, str) else "".join(part.text for part in content)
            system.append(ChatMessage(role=one.role, content=text))
        return system

    @property
    def token_limit(self) -> int:
        return DEFAULT_CHAT_TOKENS if self.max_output_tokens is None else self.max_output_tokens

    @property
    def logprobs(self) -> int | None:
        """How many alternatives to report; None where no log-probs are wanted."""
        return 0 if self.top_logprobs is None and LOGPROBS in (self.include or ()) else self.top_logprobs

    @property
    def ignored(self) -> list[str]:
        sent = {
            "tool_choice": self.tool_choice,
            "max_tool_calls": self.max_tool_calls,
            "text.verbosity": None if self.text is None else self.text.verbosity,
        }
        return [*super().ignored, *(name for name, value in sent.items() if value is not None)]

    @model_validator(mode="after")
    def _nothing_is_stored(self) -> ResponsesRequest:
        for name in ("previous_response_id", "conversation", "prompt"):
            if getattr(self, name) is not None:
                raise wrong_field(
                    name, "is not offered: nothing is stored here; send all messages as `input`"
                )
        if self.background:
            raise wrong_field("background", "is not offered: an answer is written while its client waits")
        if self.truncation is not None and self.overflow is not None:
            raise wrong_field("truncation", "and `overflow` say the same; send one of them")
        if self.truncation is not None:
            self.overflow = "slide" if self.truncation == "auto" else "refuse"
        return self


class OutputText(BaseModel):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = []
    logprobs: list[ChatLogprob] = []


class OutputMessage(BaseModel):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    status: Status
    content: list[OutputText]


class InputDetails(BaseModel):
    cached_tokens: int = 0
    cache_write_tokens: int = 0


class OutputDetails(BaseModel):
    reasoning_tokens: int = 0


class ResponsesUsage(BaseModel):
    input_tokens: int
    input_tokens_details: InputDetails = InputDetails()
    """Always 0: what the stages had cached is not counted."""
    output_tokens: int
    output_tokens_details: OutputDetails = OutputDetails()
    total_tokens: int
    blocktrain: TraversalUsage


class IncompleteDetails(BaseModel):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ModelResponse(BaseModel):
    """The answer; one that is under way has no output and no usage."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status
    error: None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int
    model: str
    output: list[OutputMessage]
    parallel_tool_calls: bool = False
    previous_response_id: None = None
    store: bool = False
    temperature: float
    tool_choice: Literal["none"] = "none"
    tools: list[Any] = []
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponsesUsage | None
    metadata: dict[str, str] = {}


class ResponsesFormat(AnswerFormat):
    prefix = "resp_"

    def __init__(self, model: ModelInfo, body: ResponsesRequest, overflow: Overflow) -> None:
        """`overflow` as it was for this request: its own wish, or else the gateway's setting."""
        super().__init__(model, body.logprobs)
        self.body, self.model_name, self.overflow = body, model.name, overflow
        self._item = f"msg_{self.id.removeprefix(self.prefix)}"
        self._place = {"item_id": self._item, "output_index": 0, "content_index": 0}
        """Of the one text, in events about it."""
        self._pieces: list[Piece] = []
        self._sent = 0

    def do_without(self, blocks: Sequence[int]) -> None:
        """Nothing: the last event always has the usage, which names them."""

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> ModelResponse:
        (piece,) = pieces
        # Where the length ended a text, this API calls it incomplete.
        status: Status = "completed" if piece.finish_reason == "stop" else "incomplete"
        message = OutputMessage(id=self._item, status=status, content=[self._part(piece)])
        cost = ResponsesUsage(
            input_tokens=usage.prompt_tokens,
            output_tokens=usage.completion_tokens,
            total_tokens=usage.total_tokens,
            blocktrain=usage.blocktrain,
        )
        return self._response(status, [message], cost)

    def events(self, piece: Piece, usage: Callable[[], Usage]) -> Iterator[str]:
        if piece.first:
            begun = self._response("in_progress", [], None)
            message = OutputMessage(id=self._item, status="in_progress", content=[])
            yield self._event("response.created", response=begun)
            yield self._event("response.in_progress", response=begun)
            yield self._event("response.output_item.added", output_index=0, item=message)
            yield self._event("response.content_part.added", **self._place, part=OutputText(text=""))
        self._pieces.append(piece)
        if piece.text or piece.scored:
            part = self._part(piece)
            yield self._event(
                "response.output_text.delta", **self._place, delta=part.text, logprobs=part.logprobs
            )

    def ending(self, usage: Usage) -> Iterator[str]:
        done = self.whole([joined(self._pieces)], usage)
        message = done.output[0]
        part = message.content[0]
        yield self._event("response.output_text.done", **self._place, text=part.text, logprobs=part.logprobs)
        yield self._event("response.content_part.done", **self._place, part=part)
        yield self._event("response.output_item.done", output_index=0, item=message)
        yield self._event(f"response.{done.status}", response=done)

    def broken_off(self, error: ApiErrorBody) -> str:
        return self._event("error", code=error.code, message=error.message, param=error.param)

    def _part(self, piece: Piece) -> OutputText:
        return OutputText(text=piece.text, logprobs=[] if self.top is None else self.scores(piece))

    def _response(
        self, status: Status, output: list[OutputMessage], usage: ResponsesUsage | None
    ) -> ModelResponse:
        body = self.body
        return ModelResponse(
            id=self.id,
            created_at=self.created,
            status=status,
            incomplete_details=IncompleteDetails() if status == "incomplete" else None,
            instructions=body.instructions,
            max_output_tokens=body.token_limit,
            model=self.model_name,
            output=output,
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            truncation="auto" if self.overflow == "slide" else "disabled",
            usage=usage,
        )

    def _event(self, kind: str, **fields: Any) -> str:
        data = to_json({"type": kind, "sequence_number": self._sent, **fields})
        self._sent += 1
        return f"event: {kind}\ndata: {data.decode()}\n\n"
