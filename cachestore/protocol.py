"""Every message that crosses the socket between a gateway and a store, and how it is framed.

A frame is `u32be length` and one msgpack-encoded, tagged struct. Unknown fields, wrong types and frames over
the limit are refused before anything is allocated for them; they cost the peer its connection and nothing else.

Blocks are named by 32-byte keys that only a tenant's secret can produce. The store sees accounts (16 opaque
bytes), epochs, keys and tokens; it never sees a salt, a tenant's name, HTTP or SQL.

Not in this version: host limits.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

PROTOCOL = 4
KEY_VERSION = 1
LAYOUT_VERSION = 1

KEY_BYTES = 32
ACCOUNT_BYTES = 16
TOKEN_BYTES = 4

MAX_FRAME_TO_STORE_BYTES = 16 << 20
MAX_FRAME_TO_GATEWAY_BYTES = 1 << 20
MAX_UNSENT_BYTES = 8 << 20
MAX_TTL_SECONDS = 24 * 60 * 60
PING_INTERVAL_SECONDS = 1.0
# So that what a stalled peer held is free within five seconds, the step that runs included.
SILENCE_LIMIT_SECONDS = 4.5

Account = Annotated[bytes, Meta(min_length=ACCOUNT_BYTES, max_length=ACCOUNT_BYTES)]
RequestId = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Epoch = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
#: A block that is not there: nothing went on from here (`cold`), something else did (`diverged`), it gave way, and when
#: it did its lifetime was over (`expired`) or it had none or a lasting one (`evicted`), or nothing is stored at all.
MissReason = Literal["cold", "diverged", "evicted", "expired", "not_stored"]
DType = Literal["fp32", "bf16", "fp16"]
KVDType = Literal[DType, "int8", "fp8"]


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages. Immutable; a message is a value."""


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the values inside messages."""


class Geometry(Part, frozen=True, kw_only=True):
    """What a block of this store is made of: fields of the block-key context.

    `rope_context_tokens` is 0 for plain RoPE, else the context the rotary factors were frozen for.
    """

    layers: Count
    kv_heads: Count
    key_dim: Count
    value_dim: Count
    block_tokens: Count
    kv_dtype: KVDType
    layout_version: Count
    rope_context_tokens: Count
    bytes_per_token: Count


class Limits(Part, frozen=True, kw_only=True):
    blocks: Count
    max_context_tokens: Count
    max_running: Count
    step_tokens: Count
    vocabulary_tokens: Count


TokenId = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
MAX_BIASED_TOKENS = 1024
MAX_TOP_LOGPROBS = 20


class Sampling(Part, frozen=True, kw_only=True):
    """How one request turns logits into tokens. The defaults change nothing.

    Attributes:
        temperature: 0 is greedy.
        top_k: 0 is off.
        min_p: keeps tokens at least this likely in proportion to the likeliest.
        presence_penalty, frequency_penalty: of tokens in the output, as OpenAI defines them.
        repetition_penalty: of tokens in prompt and output (Keskar et al., 2019).
        logit_bias: (token, what is added to its logit), each token once.
        min_tokens: no stop token before so many.
        logprobs: None, or how many of the likeliest tokens are told with each token.
    """

    temperature: Annotated[float, Meta(ge=0, le=2)] = 1.0
    top_k: Annotated[int, Meta(ge=0, le=(1 << 31) - 1)] = 0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    # msgpack has no integer beyond 64 bits, so the upper bound is the format's.
    seed: Annotated[int, Meta(ge=0)] = 0
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=1024)] = []
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] = 1.0
    logit_bias: Annotated[
        list[tuple[TokenId, Annotated[float, Meta(ge=-100, le=100)]]], Meta(max_length=MAX_BIASED_TOKENS)
    ] = []
    min_tokens: Count = 0
    logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None


class TokenLogprobs(Part, frozen=True, array_like=True):
    """Natural logarithms of probabilities: of the sampled token, and of the likeliest ones, most likely first."""

    logprob: float
    top: list[tuple[int, float]]


class Stamps(Part, frozen=True, kw_only=True):
    """CLOCK_MONOTONIC of the host, in ns; 0 means it did not happen."""

    queued_ns: Count
    started_ns: Count = 0
    first_token_ns: Count = 0
    finished_ns: Count = 0


class Counts(Part, frozen=True, kw_only=True):
    """What a request did. `written_blocks`: full prompt blocks it computed and published."""

    prompt_tokens: Count = 0
    cached_tokens: Count = 0
    output_tokens: Count = 0
    computed_tokens: Count = 0
    written_blocks: Count = 0
    preemptions: Count = 0
    steps: Count = 0


# --- gateway → store


class Hello(Message, frozen=True, kw_only=True):
    """First message of a connection; answered by `Welcome` or `Refused`."""

    protocol: int
    key_version: int


class OpenAccount(Message, frozen=True, kw_only=True):
    """The account's epoch and limits. Idempotent; `epoch` and `revision` each only rise.

    Attributes:
        reserved_blocks: nobody else takes them; unused ones are lent to cached blocks that give way at once.
        max_blocks: held and cached together; None is the pool.
        weight: of its part in what nobody has reserved, and in what is computed.
        strict: `reserved_blocks` = `max_blocks`, nothing lent and nothing borrowed.
    """

    account: Account
    epoch: Epoch
    revision: Count = 0
    reserved_blocks: Count = 0
    max_blocks: Count | None = None
    weight: Annotated[float, Meta(gt=0)] = 1.0
    strict: bool = False
    offload_key: Annotated[bytes, Meta(min_length=32, max_length=32)] | None = None


class Fence(Message, frozen=True, kw_only=True):
    """Everything older than `epoch` leaves the index before `Fenced` is sent."""

    account: Account
    epoch: Epoch


class DropAccount(Message, frozen=True, kw_only=True):
    """All of an account leaves the index, its running requests are aborted, a tombstone stays."""

    account: Account


class Flush(Message, frozen=True, kw_only=True):
    """All that is cached of an account leaves the index before `Flushed` is sent; nothing else changes."""

    account: Account


class Submit(Message, frozen=True, kw_only=True):
    """Start a request.

    Attributes:
        request: chosen by the gateway, unique among the connection's live requests.
        tokens: the prompt, u32le each; at least one.
        keys: 32 bytes per full block of the prompt, in order.
        max_tokens: output cap, at least 1.
        queue_deadline_ns: CLOCK_MONOTONIC after which a request that still waits is rejected.
        ttl_seconds: so long after its end all its blocks give way after those of the account that are not wanted; 0
            for no such wish. It protects from no need of anybody.
    """

    request: RequestId
    account: Account
    epoch: Epoch
    tokens: bytes
    keys: bytes
    sampling: Sampling
    max_tokens: Annotated[int, Meta(ge=1, le=(1 << 31) - 1)]
    queue_deadline_ns: Count
    ttl_seconds: Annotated[int, Meta(ge=0, le=MAX_TTL_SECONDS)] = 0


class Seal(Message, frozen=True, kw_only=True):
    """Names for full blocks from `first_block` on (index within the request); `last` ends the request's hold."""

    request: RequestId
    first_block: Count
    keys: bytes
    last: bool = False


class Abort(Message, frozen=True, kw_only=True):
    """Stop now; answered by `Finished{reason: aborted}`. Unknown requests are ignored."""

    request: RequestId


class Probe(Message, frozen=True, kw_only=True):
    """Ask what a prompt with these keys, 32 bytes each, would find. Changes nothing, recency included."""

    account: Account
    epoch: Epoch
    keys: bytes


class Stats(Message, frozen=True, kw_only=True):
    """Ask for an account's `AccountReport`, or for a `StatsReport` now; that is pushed every second anyway."""

    account: Account | None = None


class Drain(Message, frozen=True, kw_only=True):
    """Accept no more `Submit`; `Drained` once nothing runs or waits."""


# --- both ways


class Ping(Message, frozen=True, kw_only=True):
    pass


class Pong(Message, frozen=True, kw_only=True):
    """`step_age_ms`: how long ago the engine made a step, 0 when it has no work."""

    step_age_ms: Count = 0


# --- store → gateway


class Welcome(Message, frozen=True, kw_only=True):
    store: str
    model_dir: str
    model_fingerprint: Annotated[bytes, Meta(min_length=32, max_length=32)]
    tokenizer_fingerprint: Annotated[bytes, Meta(min_length=32, max_length=32)]
    geometry: Geometry
    dtype: DType
    limits: Limits


class Refused(Message, frozen=True, kw_only=True):
    code: Literal["protocol", "key_version"]
    detail: str


class Started(Message, frozen=True, kw_only=True):
    """Admitted, once; a later preemption is only counted.

    Attributes:
        miss_block: index of the first full block of the prompt that was not found; None: all were.
        miss_reason: why it was not.
    """

    request: RequestId
    cached_tokens: Count
    miss_block: Count | None
    miss_reason: MissReason | None
    stamps: Stamps


class Tokens(Message, frozen=True, kw_only=True):
    """One per engine step for all requests of the connection: (request, token ids, one each for those who asked)."""

    entries: list[tuple[int, list[int], list[TokenLogprobs]]]


class Finished(Message, frozen=True, kw_only=True):
    """Exactly one for each `Submit` that was not `Rejected`; the gateway answers with `Seal{last: true}`.

    `error`, with that reason: the step could not be computed, or what was asked for left no token to sample.
    """

    request: RequestId
    reason: Literal["stop", "length", "aborted", "error"]
    error: Literal["step_failed", "no_token"] | None = None
    stamps: Stamps
    counts: Counts


class Rejected(Message, frozen=True, kw_only=True):
    request: RequestId
    code: Literal["too_long", "over_capacity", "stale_epoch", "unknown_account", "draining", "queue_timeout"]
    detail: str


class Fenced(Message, frozen=True, kw_only=True):
    """What left the index. `epoch` is that of the `Fence`, None for a `DropAccount`."""

    account: Account
    epoch: Epoch | None
    blocks: Count
    bytes: Count


class StatsReport(Message, frozen=True, kw_only=True):
    """The state of the pool and the engine.

    Attributes:
        pushed: nobody asked for it.
        reserved_blocks: of all reservations, as far as they are in force.
        missing_blocks: what reservations lack to be wholly in force.
        step_ns: time spent in `steps`.
        evictions: cached blocks that gave way.
        limit_evictions: those of them that did because their account may not have so many.
    """

    pushed: bool
    total_blocks: Count
    free_blocks: Count
    held_blocks: Count
    cached_blocks: Count
    reserved_blocks: Count
    missing_blocks: Count
    running: Count
    waiting: Count
    ended: Count
    steps: Count
    step_ns: Count
    computed_tokens: Count
    preemptions: Count
    evictions: Count
    limit_evictions: Count


class Flushed(Message, frozen=True, kw_only=True):
    """What left the index."""

    account: Account
    blocks: Count
    bytes: Count


class AccountReport(Message, frozen=True, kw_only=True):
    """What an account has; all zero for an unknown one.

    Attributes:
        bytes: of the held and the cached blocks.
        reserved_blocks: as far as the reservation is in force.
        hit_tokens, miss_tokens: of the prompts of all its requests that were admitted.
    """

    account: Account
    held_blocks: Count = 0
    cached_blocks: Count = 0
    bytes: Count = 0
    reserved_blocks: Count = 0
    max_blocks: Count | None = None
    hit_tokens: Count = 0
    miss_tokens: Count = 0
    evictions: Count = 0


class ProbeResult(Message, frozen=True, kw_only=True):
    """What was found of a `Probe`'s blocks, from the first on; `miss_block`, `miss_reason`: as in `Started`."""

    account: Account
    epoch: Epoch
    device_blocks: Count
    miss_block: Count | None
    miss_reason: MissReason | None


class Drained(Message, frozen=True, kw_only=True):
    pass


ToStore = (
    Hello
    | OpenAccount
    | Fence
    | DropAccount
    | Flush
    | Submit
    | Seal
    | Abort
    | Probe
    | Stats
    | Drain
    | Ping
    | Pong
)
ToGateway = (
    Welcome
    | Refused
    | Started
    | Tokens
    | Finished
    | Rejected
    | Fenced
    | Flushed
    | StatsReport
    | AccountReport
    | ProbeResult
    | Drained
    | Ping
    | Pong
)

M = TypeVar("M")

_HEADER = struct.Struct(">I")
HEADER_BYTES = _HEADER.size

decode_to_store = msgspec.msgpack.Decoder(ToStore).decode
decode_to_gateway = msgspec.msgpack.Decoder(ToGateway).decode
_encoder = msgspec.msgpack.Encoder()


class ProtocolError(Exception):
    """A peer broke the protocol: its connection is closed and its requests end."""


def encode_frame(message: Message, limit_bytes: int) -> bytes:
    """One frame, header included.

    Raises:
        ProtocolError: the encoded message is larger than `limit_bytes`.
    """
    body = _encoder.encode(message)
    if len(body) > limit_bytes:
        raise ProtocolError(f"a {type(message).__name__} of {len(body)} bytes is over the limit of {limit_bytes}")
    return _HEADER.pack(len(body)) + body


async def read_message(reader: asyncio.StreamReader, decode: Callable[[bytes], M], limit_bytes: int) -> M:
    """The next message of a peer.

    Args:
        decode: `decode_to_store` or `decode_to_gateway`.

    Raises:
        ProtocolError: a frame over `limit_bytes`, or that is no message.
        EOFError, OSError: the connection ended.
    """
    length = frame_length(await reader.readexactly(HEADER_BYTES), limit_bytes)
    body = await reader.readexactly(length)
    try:
        return decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        # The reason names fields and types of the protocol, never a value.
        raise ProtocolError(f"a frame of {length} bytes is no message: {error}") from None


def frame_length(header: bytes, limit_bytes: int) -> int:
    """The body length that a 4-byte header announces, checked before anything is allocated for it.

    Raises:
        ProtocolError: it announces nothing or more than `limit_bytes`.
    """
    (length,) = _HEADER.unpack(header)
    if not 0 < length <= limit_bytes:
        raise ProtocolError(f"a frame of {length} bytes is outside 1 .. {limit_bytes}")
    return int(length)
