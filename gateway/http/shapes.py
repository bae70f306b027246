"""The JSON of the OpenAI-compatible API: what requests may hold, and what answers look like.

Every top-level field of a request falls into one of four groups:

    built          a field of `ChatRequest` or `CompletionRequest`
    no effect      accepted whatever it holds
    not served     would change the answer and can't: 400 with `param`, unless it changes nothing
    unknown        ignored, and named in the `x-saltern-ignored-fields` header

The last three are `gateway.http.fields`.

An explicit null is an absent field. Unknown keys inside a message are ignored and reach no prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from gateway.http.body import convert
from gateway.http.errors import bad_value
from gateway.http.fields import sort_out_fields

ROLES = ("developer", "system", "user", "assistant")
MAX_SCOPE_BYTES = 256
MAX_PROMPT_CACHE_KEY_BYTES = 256
MAX_SUBMISSIONS = 128
MaxTokens = Annotated[int, Meta(ge=1, lt=1 << 31)]
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]


def _schema(**keywords: Any) -> Meta:
    """What `__post_init__` refuses, with a better message than a type can give, as far as a JSON schema can say it."""
    return Meta(extra_json_schema=keywords)


CacheSalt = Annotated[str, _schema(pattern=r"\S", maxLength=MAX_SCOPE_BYTES)]
PromptCacheKey = Annotated[str, _schema(maxLength=MAX_PROMPT_CACHE_KEY_BYTES)]


# --- requests --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Generation:
    """How to generate, whichever route asked. `scope` narrows the tenant's cache and is empty by default.

    `max_tokens` None means what is left of the context, `seed` None a random one; `top_k` 0 and `top_p` 1 are off.
    """

    max_tokens: int | None
    n: int
    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    stop: tuple[str, ...]
    ignore_eos: bool
    stream: bool
    include_usage: bool
    scope: bytes


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class GenerationRequest(msgspec.Struct, kw_only=True):
    """The fields that both routes share."""

    model: str
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_SUBMISSIONS)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, lt=1 << 31)] | None = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=4)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: CacheSalt | None = None
    prompt_cache_key: PromptCacheKey | None = None

    def __post_init__(self) -> None:
        if self.cache_salt is not None:
            size_bytes = len(self.cache_salt.encode("utf-8"))
            if size_bytes > MAX_SCOPE_BYTES or not self.cache_salt.strip():
                message = f"cache_salt must be 1 to {MAX_SCOPE_BYTES} bytes and not blank; it has {size_bytes}."
                raise bad_value("cache_salt", message)
        if self.prompt_cache_key is not None:
            size_bytes = len(self.prompt_cache_key.encode("utf-8"))
            if size_bytes > MAX_PROMPT_CACHE_KEY_BYTES:
                message = f"prompt_cache_key may have {MAX_PROMPT_CACHE_KEY_BYTES} bytes; it has {size_bytes}."
                raise bad_value("prompt_cache_key", message)

    def generation(self) -> Generation:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        options = self.stream_options or StreamOptions()
        return Generation(
            max_tokens=self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens,
            n=self.n or 1,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=self.top_k or 0,
            seed=None if self.seed is None else self.seed % (1 << 64),
            stop=stop,
            ignore_eos=bool(self.ignore_eos),
            stream=bool(self.stream),
            include_usage=bool(options.include_usage),
            scope=(self.cache_salt or "").encode("utf-8"),
        )


class ContentPart(msgspec.Struct):
    type: Annotated[str, _schema(enum=["text"])]
    text: Annotated[str | None, _schema(type="string")] = None

    def __post_init__(self) -> None:
        if self.type != "text":
            raise ValueError("Only parts of type text are served by this model")
        if self.text is None:
            raise ValueError("A text part needs the field text")


TextPart = Annotated[ContentPart, _schema(required=["text"])]
Nothing = Annotated[Any, _schema(enum=[None, False, 0, "", [], {}])]


class Message(msgspec.Struct):
    role: Annotated[str, _schema(enum=list(ROLES))]
    content: Annotated[str | list[TextPart] | None, _schema(type=["string", "array"])] = None
    name: str | None = None
    tool_calls: Nothing = None
    function_call: Nothing = None

    def text(self) -> str:
        """The content, text parts joined with nothing between them."""
        if isinstance(self.content, list):
            return "".join(part.text or "" for part in self.content)
        return self.content or ""


class ChatRequest(GenerationRequest, kw_only=True):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[list[Annotated[Message, _schema(required=["content"])]], Meta(min_length=1)]

    def __post_init__(self) -> None:
        super().__post_init__()
        for index, message in enumerate(self.messages):
            at = f"messages[{index}]"
            if message.role not in ROLES:
                raise bad_value(f"{at}.role", f"A role is one of {', '.join(ROLES)} here.")
            if message.tool_calls:
                raise bad_value(f"{at}.tool_calls", "Tool calls are not supported yet.")
            if message.function_call:
                raise bad_value(f"{at}.function_call", "Function calls are not supported.")
            if message.content is None:
                raise bad_value(f"{at}.content", "A message needs content: a string or text parts.")

    def conversation(self) -> list[dict[str, str]]:
        """The messages as a chat template reads them."""
        return [
            {"role": message.role, "content": message.text()} | ({"name": message.name} if message.name else {})
            for message in self.messages
        ]


TokenId = Annotated[int, Meta(ge=0, lt=1 << 32)]
PromptText = Annotated[str, _schema(minLength=1)]
PromptIds = Annotated[list[TokenId], _schema(minItems=1)]
Prompts = Annotated[
    list[PromptText | TokenId | PromptIds],
    _schema(minItems=1, anyOf=[{"items": {"type": kind}} for kind in ("string", "integer", "array")]),
]


class CompletionRequest(GenerationRequest, kw_only=True):
    """Body of `POST /v1/completions`. Whether ids are of the vocabulary is the tokenizer's to say."""

    prompt: PromptText | Prompts

    def __post_init__(self) -> None:
        super().__post_init__()
        kinds = {type(part) for part in self.prompt} if isinstance(self.prompt, list) else {str}
        if len(kinds) > 1:
            raise bad_value("prompt", "The prompt mixes forms; send a string, strings, token ids, or lists of them.")
        if not self.prompt or (kinds != {int} and not all(self.prompts())):
            raise bad_value("prompt", "The prompt is empty; send a string or token ids with something in it.")

    def prompts(self) -> list[str | list[int]]:
        """One or several prompts, each a text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        ids = [part for part in self.prompt if isinstance(part, int)]
        return [ids] if ids else [part for part in self.prompt if not isinstance(part, int)]


R = TypeVar("R", ChatRequest, CompletionRequest)


def read_generation_request(body: dict[str, Any], type: type[R]) -> tuple[R, tuple[str, ...]]:
    """The request, and the names of the fields that nothing here knows.

    Raises:
        ApiError: 400 with `param`.
    """
    built = {field.name for field in msgspec.structs.fields(type)}
    ignored = sort_out_fields(body, built)
    return convert(body, type), ignored


# --- answers ---------------------------------------------------------------------------------------------------

FinishReason = Literal["stop", "length"]


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int
    cache_write_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int = 0


class Usage(msgspec.Struct, frozen=True):
    """`prompt_tokens` includes cached ones; `completion_tokens` counts every sampled token up to the end."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails

    @classmethod
    def of(
        cls, *, prompt_tokens: int, cached_tokens: int, cache_write_tokens: int, completion_tokens: int
    ) -> Usage:
        return cls(
            prompt_tokens,
            completion_tokens,
            prompt_tokens + completion_tokens,
            PromptTokensDetails(cached_tokens, cache_write_tokens),
            CompletionTokensDetails(),
        )


class AssistantMessage(msgspec.Struct, frozen=True):
    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True):
    message: AssistantMessage
    finish_reason: FinishReason
    index: int = 0
    logprobs: None = None


class ChatCompletion(msgspec.Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"


class Delta(msgspec.Struct, frozen=True):
    """What a chunk adds. The first has `role`; the last has neither."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True):
    delta: Delta
    finish_reason: FinishReason | None = None
    index: int = 0
    logprobs: None = None


class ChatChunk(msgspec.Struct, frozen=True):
    """One event of a stream. `usage` is unset unless asked for; then null in all but the last, empty, chunk."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"


class TextChoice(msgspec.Struct, frozen=True):
    text: str
    finish_reason: FinishReason | None = None
    index: int = 0
    logprobs: None = None


class TextCompletion(msgspec.Struct, frozen=True):
    """Answer of `/v1/completions`, whole or one event of its stream."""

    id: str
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage | UnsetType | None = UNSET
    object: Literal["text_completion"] = "text_completion"


class Model(msgspec.Struct, frozen=True):
    id: str
    created: int
    owned_by: str = "saltern"
    object: Literal["model"] = "model"


class ModelList(msgspec.Struct, frozen=True):
    data: list[Model]
    object: Literal["list"] = "list"
