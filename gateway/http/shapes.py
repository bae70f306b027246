"""The JSON of the OpenAI-compatible API: what requests may hold. What answers look like is in `gateway.http.answers`.

Every top-level field of a request falls into one of four groups:

    built          a field of `ChatRequest` or `CompletionRequest`
    no effect      accepted whatever it holds
    not served     would change the answer and can't: 400 with `param`, unless it changes nothing
    unknown        ignored, and named in the `x-saltern-ignored-fields` header

The last three are `gateway.http.fields`.

An explicit null is an absent field. Unknown keys inside a message are ignored and reach no prompt.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from cachestore.protocol import MAX_BIASED_TOKENS, MAX_TOP_LOGPROBS
from gateway.http.body import convert
from gateway.http.cache_options import CacheOptions, read_ttl_seconds
from gateway.http.errors import bad_value
from gateway.http.fields import built_fields, sort_out_fields
from gateway.prompt.template import OWN_VARIABLES, Rendering

ROLES = ("developer", "system", "user", "assistant")
MAX_SCOPE_BYTES = 256
MAX_PROMPT_CACHE_KEY_BYTES = 256
MAX_SUBMISSIONS = 128
MAX_STOP_TOKEN_IDS = 256
MAX_BIAS = 100
TOKEN_ID_DIGITS = r"^(0|[1-9][0-9]{0,9})$"
MaxTokens = Annotated[int, Meta(ge=1, lt=1 << 31)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
TopLogprobs = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]


def _schema(**keywords: Any) -> Meta:
    """What `__post_init__` refuses, with a better message than a type can give, as far as a JSON schema can say it."""
    return Meta(extra_json_schema=keywords)


CacheSalt = Annotated[str, _schema(pattern=r"\S", maxLength=MAX_SCOPE_BYTES)]
PromptCacheKey = Annotated[str, _schema(maxLength=MAX_PROMPT_CACHE_KEY_BYTES)]
LogitBias = Annotated[
    dict[str, Any],
    _schema(
        propertyNames={"pattern": TOKEN_ID_DIGITS},
        additionalProperties={"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS},
        maxProperties=MAX_BIASED_TOKENS,
    ),
]
StopTokenIds = Annotated[list[Annotated[int, _schema(minimum=0)]], _schema(maxItems=MAX_STOP_TOKEN_IDS)]


@dataclass(frozen=True, slots=True)
class Generation:
    """How to generate, whichever route asked.

    Attributes:
        max_tokens: None is what is left of the context.
        seed: None is a random one.
        logit_bias: (token, what is added to its logit), each token once.
        include_stop: whether the text of what ended the answer is a part of it.
        logprobs: None, or how many of the likeliest tokens are told with each token.
        token_ids: whether the ids of prompt and answer are told.
        scope: narrows the tenant's cache; empty by default.
        ttl_seconds: how long blocks are wanted after the request's end; 0 for no such wish.
    """

    max_tokens: int | None
    n: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: tuple[tuple[int, float], ...]
    seed: int | None
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    include_stop: bool
    min_tokens: int
    ignore_eos: bool
    logprobs: int | None
    token_ids: bool
    stream: bool
    include_usage: bool
    scope: bytes
    ttl_seconds: int


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
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    logit_bias: LogitBias | None = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=4)] | None = None
    stop_token_ids: StopTokenIds | None = None
    include_stop_str_in_output: bool | None = None
    min_tokens: Annotated[int, Meta(ge=0, lt=1 << 31)] | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: CacheSalt | None = None
    prompt_cache_key: PromptCacheKey | None = None
    prompt_cache_options: CacheOptions | None = None

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
        if len(self.stop_token_ids or ()) > MAX_STOP_TOKEN_IDS:
            message = f"stop_token_ids may have {MAX_STOP_TOKEN_IDS} ids; it has {len(self.stop_token_ids or ())}."
            raise bad_value("stop_token_ids", message)
        read_ttl_seconds(self.prompt_cache_options or {})
        _check_bias(self.logit_bias or {})

    def told_logprobs(self) -> int | None:
        """How many of the likeliest tokens the answer tells with each of its own; None for no log probabilities."""
        raise NotImplementedError

    def generation(self) -> Generation:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        options = self.stream_options or StreamOptions()
        return Generation(
            max_tokens=self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens,
            n=self.n or 1,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=self.top_k or 0,
            min_p=self.min_p or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            logit_bias=tuple((int(token), float(bias)) for token, bias in (self.logit_bias or {}).items()),
            seed=None if self.seed is None else self.seed % (1 << 64),
            stop=stop,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            include_stop=bool(self.include_stop_str_in_output),
            min_tokens=self.min_tokens or 0,
            ignore_eos=bool(self.ignore_eos),
            logprobs=self.told_logprobs(),
            token_ids=bool(self.return_token_ids),
            stream=bool(self.stream),
            include_usage=bool(options.include_usage),
            scope=(self.cache_salt or "").encode("utf-8"),
            ttl_seconds=read_ttl_seconds(self.prompt_cache_options or {}),
        )


def _check_bias(bias: dict[str, Any]) -> None:
    if len(bias) > MAX_BIASED_TOKENS:
        raise bad_value("logit_bias", f"logit_bias may have {MAX_BIASED_TOKENS} tokens; it has {len(bias)}.")
    if not all(re.fullmatch(TOKEN_ID_DIGITS, token) for token in bias):
        raise bad_value("logit_bias", 'Keys of logit_bias are token ids in decimal digits, such as "42".')
    for value in bias.values():
        if isinstance(value, bool) or not isinstance(value, int | float) or not -MAX_BIAS <= value <= MAX_BIAS:
            raise bad_value("logit_bias", f"Values of logit_bias are numbers from -{MAX_BIAS} to {MAX_BIAS}.")


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


TemplateVariables = Annotated[dict[str, Any], _schema(properties=dict.fromkeys(sorted(OWN_VARIABLES), False))]


class ChatRequest(GenerationRequest, kw_only=True):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[list[Annotated[Message, _schema(required=["content"])]], Meta(min_length=1)]
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top_logprobs and not self.logprobs:
            raise bad_value("top_logprobs", "top_logprobs needs logprobs: true beside it.")
        if own := sorted(OWN_VARIABLES & (self.chat_template_kwargs or {}).keys()):
            names = ", ".join(own)
            raise bad_value("chat_template_kwargs", f"The template is given {names} already; leave that out.")
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
        if self.continue_final_message:
            if self.add_generation_prompt:
                text = "The last message is continued or a new one begun, not both: leave add_generation_prompt out."
                raise bad_value("continue_final_message", text)
            if self.messages[-1].role != "assistant":
                raise bad_value("continue_final_message", "Only a last message of the assistant can be continued.")

    def told_logprobs(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None

    def rendering(self) -> Rendering:
        continues = bool(self.continue_final_message)
        opens_turn = not continues if self.add_generation_prompt is None else self.add_generation_prompt
        return Rendering(opens_turn, continues, self.chat_template_kwargs or {})

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
    logprobs: TopLogprobs | Annotated[bool, _schema(const=False)] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.logprobs is True:
            raise bad_value("logprobs", f"logprobs is a number from 0 to {MAX_TOP_LOGPROBS} here.")
        kinds = {type(part) for part in self.prompt} if isinstance(self.prompt, list) else {str}
        if len(kinds) > 1:
            raise bad_value("prompt", "The prompt mixes forms; send a string, strings, token ids, or lists of them.")
        if not self.prompt or (kinds != {int} and not all(self.prompts())):
            raise bad_value("prompt", "The prompt is empty; send a string or token ids with something in it.")

    def told_logprobs(self) -> int | None:
        return None if isinstance(self.logprobs, bool) else self.logprobs

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
    ignored = sort_out_fields(body, built_fields(type))
    return convert(body, type), ignored
