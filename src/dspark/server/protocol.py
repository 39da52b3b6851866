"""What may be asked: OpenAI's fields, vLLM's further ones, and four of our own.

Bodies are strict. A field that is not listed here is refused, because ignoring it would answer
another question than was asked (:mod:`dspark.server.fields` says what to do instead of the better
known ones); fields that change nothing (``user``, ``metadata``) are listed and dropped. Names and
defaults are OpenAI's, and vLLM's where OpenAI has none. Ours: ``speculate``, ``scheduler``,
``return_acceptance`` and ``return_token_kinds``.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from dspark.decoding.params import SchedulerName
from dspark.server.fields import RENDERER, without_unfollowed, wrong

MOST_STOPS = 16
MOST_BIASES = 1024
MOST_ANSWERS = 128
MOST_LOGPROBS = 20
MOST_PROMPTS = 256
MOST_TOOLS = 128


class Body(BaseModel):
    """Strict: no conversions, no unknown fields, no infinities."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class StreamOptions(Body):
    """``include_usage``: one more chunk before the end that holds the usage;
    ``continuous_usage_stats``: usage so far in every chunk. There is no obfuscation to ask for."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class JSONSchema(Body):
    """The schema of ``response_format``; JSON outputs always follow it, ``strict`` or not."""

    name: str = Field(min_length=1, max_length=64)
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """What the text must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchema | None = None

    @model_validator(mode="after")
    def _schema_given(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema goes with type json_schema, and only with it")
        return self


class StructuredOutputs(Body):
    """vLLM's field: exactly one of a JSON schema, any JSON object, a regular expression, a list of
    answers to choose from, or a Lark grammar."""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = Field(default=None, min_length=1, max_length=4096)
    choice: list[Annotated[str, Field(min_length=1)]] | None = Field(
        default=None, min_length=1, max_length=256
    )
    grammar: str | None = Field(default=None, min_length=1, max_length=65536)

    @model_validator(mode="after")
    def _one(self) -> StructuredOutputs:
        asked = (self.json_, self.json_object or None, self.regex, self.choice, self.grammar)
        if sum(x is not None for x in asked) != 1:
            raise ValueError("exactly one of json, json_object, regex, choice and grammar")
        return self


Stop = Annotated[str, Field(min_length=1, max_length=1024)]
Token = Annotated[int, Field(ge=0)]


class Sampling(Body):
    """Fields that both kinds of request share."""

    model: str | None = Field(default=None, max_length=1024)
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, ge=0.001, le=1000)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(
        default=None, max_length=MOST_BIASES
    )
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    n: int | None = Field(default=None, ge=1, le=MOST_ANSWERS)
    max_tokens: int | None = Field(default=None, ge=1)
    min_tokens: int | None = Field(default=None, ge=0)
    stop: Stop | Annotated[list[Stop], Field(max_length=MOST_STOPS)] | None = None
    stop_token_ids: list[Token] | None = Field(default=None, max_length=MOST_BIASES)
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    request_id: str | None = Field(default=None, pattern=r"^[A-Za-z0-9._:-]{1,128}$")
    speculate: bool = True
    scheduler: SchedulerName | None = None
    return_acceptance: bool = False
    return_token_kinds: bool = False
    # Of no effect here, and sent by ordinary clients.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    session_id: str | None = None
    stream_interval: int | None = Field(default=None, ge=1)
    spaces_between_special_tokens: bool = True

    @model_validator(mode="before")
    @classmethod
    def _followed(cls, data: Any) -> Any:
        return without_unfollowed(data, frozenset(cls.model_fields))

    @model_validator(mode="after")
    def _consistent(self) -> Sampling:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed when stream is true")
        if self.response_format is not None and self.structured_outputs is not None:
            raise ValueError("response_format and structured_outputs exclude each other")
        return self


class CompletionRequest(Sampling):
    """``POST /v1/completions``: a text or token ids, or a list of them, to be continued."""

    prompt: (
        str
        | list[Token]
        | Annotated[list[str], Field(max_length=MOST_PROMPTS)]
        | Annotated[list[list[Token]], Field(max_length=MOST_PROMPTS)]
    )
    echo: bool | None = None
    logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS)
    best_of: int | None = Field(default=None, ge=1, le=MOST_ANSWERS)
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _possible(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise wrong("best_of", "best_of other than n is not supported")
        if self.echo and self.logprobs is not None:
            raise wrong("echo", "echo with logprobs is not supported: leave one of them out")
        return self


class TextPart(Body):
    """The one kind of content part that a text model reads."""

    model_config = ConfigDict(extra="ignore")
    type: Literal["text"]
    text: str


class FunctionCall(Body):
    model_config = ConfigDict(extra="ignore")
    name: str
    arguments: str


class ToolCall(Body):
    model_config = ConfigDict(extra="ignore")
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Body):
    """One turn. Answers of this server may be sent back as they came: their further fields are
    dropped."""

    model_config = ConfigDict(extra="ignore")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = Field(default=None, max_length=MOST_TOOLS)
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Message:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError("content is required, except beside an assistant's tool_calls")
        return self


class Function(Body):
    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class FunctionName(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: FunctionName


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ChatRequest(Sampling):
    """``POST /v1/chat/completions``: turns through the target's own template.

    ``reasoning_effort``, ``documents`` and ``chat_template_kwargs`` are for the template; one that
    does not know them renders what it would have rendered anyway.
    """

    messages: list[Message] = Field(min_length=1, max_length=4096)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS)
    tools: list[Tool] | None = Field(default=None, max_length=MOST_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, str]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    add_special_tokens: Literal[False] = False
    prediction: dict[str, Any] | None = None  # a hint of OpenAI's that changes no answer

    @model_validator(mode="after")
    def _renders(self) -> ChatRequest:
        if self.add_generation_prompt and self.continue_final_message:
            raise wrong(
                "continue_final_message",
                "continue_final_message and add_generation_prompt exclude each other",
            )
        for name in self.chat_template_kwargs or {}:
            if name in RENDERER:
                raise wrong(
                    "chat_template_kwargs",
                    f"chat_template_kwargs: {name} is no variable of a template. "
                    "What has a field of its own is sent there.",
                )
        return self

    @model_validator(mode="after")
    def _tools_fit(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs is only allowed when logprobs is true")
        names = [tool.function.name for tool in self.tools or []]
        if len(set(names)) != len(names):
            raise ValueError("tools must have different names")
        if isinstance(self.tool_choice, NamedTool):
            if self.tool_choice.function.name not in names:
                raise ValueError("tool_choice names a function that is not among tools")
        elif self.tool_choice == "required" and not names:
            raise ValueError("tool_choice required needs tools")
        forced = isinstance(self.tool_choice, NamedTool) or self.tool_choice == "required"
        shaped = self.response_format is not None and self.response_format.type != "text"
        if forced and (shaped or self.structured_outputs is not None):
            raise ValueError("a forced tool call leaves no room for another output format")
        return self
