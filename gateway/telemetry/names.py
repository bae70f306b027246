"""Every name that this gateway tells an OpenTelemetry backend, with its type, unit and meaning.

docs/telemetry.md is checked against this module. What a later version will tell is declared with it, not before.

Sources: OpenTelemetry semantic conventions for generative AI, HTTP and errors. Names of our own begin with `saltern.`.
No value of an attribute is text that a client wrote, and no salt, key, block key, prompt or token is ever one; metrics
bear nothing that grows with what clients send.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SCOPE = "saltern"
PROVIDER = "saltern"
# The route of a request that no route matched, the method of one that HTTP does not know, the tenant beyond the last.
UNMATCHED = "unmatched"
OTHER_METHOD = "_OTHER"
OTHER_TENANT = "other"
MAX_TENANT_LABELS = 1000


@dataclass(frozen=True, slots=True)
class Attribute:
    name: str
    type: Literal["string", "int", "float", "boolean", "strings"]
    meaning: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class SpanKind:
    """`name` with a placeholder in braces stands for names made with one of ours."""

    name: str
    meaning: str
    attributes: tuple[Attribute, ...]


@dataclass(frozen=True, slots=True)
class Metric:
    """`buckets`: upper bounds of a histogram."""

    name: str
    kind: Literal["counter", "histogram", "gauge"]
    unit: str
    meaning: str
    attributes: tuple[Attribute, ...] = ()
    buckets: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class LogField:
    name: str
    meaning: str


# --- attributes

METHOD = Attribute("http.request.method", "string", f"GET, POST, …; {OTHER_METHOD} for one that HTTP does not define")
ROUTE = Attribute("http.route", "string", f"the route's template, never the path; {UNMATCHED} in metrics where none is")
STATUS = Attribute("http.response.status_code", "int", "499 where the client left before there was one")
ERROR = Attribute(
    "error.type", "string", "the API's error code, else the status; store_lost, client_disconnected; a store's refusal"
)

OPERATION = Attribute("gen_ai.operation.name", "string", "chat or text_completion")
PROVIDER_NAME = Attribute("gen_ai.provider.name", "string", PROVIDER)
REQUEST_MODEL = Attribute("gen_ai.request.model", "string", "the served model's name")
RESPONSE_MODEL = Attribute("gen_ai.response.model", "string", "the served model's name")
MAX_TOKENS = Attribute("gen_ai.request.max_tokens", "int", "the maximum that was asked for, where one was")
TEMPERATURE = Attribute("gen_ai.request.temperature", "float", "as in force")
TOP_P = Attribute("gen_ai.request.top_p", "float", "as in force")
TOP_K = Attribute("gen_ai.request.top_k", "int", "where it is on")
SEED = Attribute("gen_ai.request.seed", "int", "where one was sent; as a signed 64-bit number")
STREAM = Attribute("gen_ai.request.stream", "boolean", "whether the answer is sent as events")
CHOICES = Attribute("gen_ai.request.choice.count", "int", "where it is not 1")
STOPS = Attribute("saltern.request.stop_count", "int", "how many stop strings, where there are any; never which")
RESPONSE_ID = Attribute("gen_ai.response.id", "string", "id of the answer")
FINISH_REASONS = Attribute("gen_ai.response.finish_reasons", "strings", "one for each choice that came to its end")
FIRST_CHUNK = Attribute("gen_ai.response.time_to_first_chunk", "float", "s, from the request to its first event")
INPUT_TOKENS = Attribute("gen_ai.usage.input_tokens", "int", "prompt tokens, cached ones included")
OUTPUT_TOKENS = Attribute("gen_ai.usage.output_tokens", "int", "sampled tokens of all choices")
CACHE_READ_TOKENS = Attribute("gen_ai.usage.cache_read.input_tokens", "int", "prompt tokens that came from the cache")
# The convention is about to call it cache_write.
CACHE_WRITE_TOKENS = Attribute(
    "gen_ai.usage.cache_creation.input_tokens", "int", "prompt tokens whose blocks were computed and published"
)
TOKEN_TYPE = Attribute("gen_ai.token.type", "string", "input or output")

TENANT = Attribute("saltern.tenant.id", "string", "the tenant's public id; on spans and on the metrics of tenants")
REQUEST_ID = Attribute("saltern.request.id", "string", "as in the header x-request-id")
MISS_BLOCK = Attribute("saltern.cache.miss_block", "int", "index of the first full block that was not found")
MISS_REASON = Attribute(
    "saltern.cache.miss_reason",
    "string",
    "why not: cold (nothing went on from there), diverged (something else did), evicted, expired (evicted when its "
    "time was over) or not_stored",
)
PROMPT_TOKENS = Attribute("saltern.prompt.tokens", "int", "tokens of all prompts")
PROMPT_BLOCKS = Attribute("saltern.prompt.blocks", "int", "full blocks of all prompts")
REMEMBERED_TOKENS = Attribute("saltern.prompt.remembered_tokens", "int", "of those, not tokenised again")
CACHED_DEVICE_TOKENS = Attribute("saltern.cache.device.tokens", "int", "prompt tokens found in the device tier")
COMPUTED_TOKENS = Attribute("saltern.store.computed_tokens", "int", "tokens whose KV was computed, again included")
CHUNKS = Attribute("saltern.store.chunks", "int", "steps until the first token")
DECODED_TOKENS = Attribute("saltern.store.output_tokens", "int", "tokens that were sampled")
STEPS = Attribute("saltern.store.steps", "int", "steps after the first token")
PREEMPTIONS = Attribute("saltern.store.preemptions", "int", "how often it had to give its blocks up")
TIER = Attribute("saltern.cache.tier", "string", "device")
OUTCOME = Attribute("saltern.outcome", "string", "of a request: finished, aborted, refused or failed")
CACHE_OUTCOME = Attribute("saltern.cache.outcome", "string", "of a prompt token: hit or miss")
BLOCK_STATE = Attribute("saltern.cache.state", "string", "free, held or cached")
RESERVATION_STATE = Attribute(
    "saltern.cache.reservation.state",
    "string",
    "in_force, or missing: reserved, and not free yet, or more than the store has",
)
EVICTION_CAUSE = Attribute(
    "saltern.cache.cause", "string", "capacity: the block was needed; limit: its tenant may not have so many"
)
REQUEST_STATE = Attribute("saltern.store.state", "string", "running or waiting")
PURPOSE = Attribute("saltern.secret.purpose", "string", "what the secret is for: salt, offload_key or apikey-pepper")
QUOTA_SCOPE = Attribute("saltern.quota.scope", "string", "whose limit refused a request: tenant or key")
QUOTA_LIMIT = Attribute("saltern.quota.limit", "string", "which limit did, such as tokens_per_day")

# --- spans

SERVER = SpanKind(
    "{method} {route}", "the request, to its last byte", (METHOD, ROUTE, STATUS, ERROR, TENANT, REQUEST_ID)
)
GENERATION = SpanKind(
    "{operation} {model}",
    "a request that names the served model, to the end of all of its choices",
    (
        OPERATION,
        PROVIDER_NAME,
        REQUEST_MODEL,
        RESPONSE_MODEL,
        MAX_TOKENS,
        TEMPERATURE,
        TOP_P,
        TOP_K,
        SEED,
        STREAM,
        CHOICES,
        STOPS,
        RESPONSE_ID,
        FINISH_REASONS,
        FIRST_CHUNK,
        INPUT_TOKENS,
        OUTPUT_TOKENS,
        CACHE_READ_TOKENS,
        CACHE_WRITE_TOKENS,
        ERROR,
        TENANT,
        REQUEST_ID,
    ),
)
AUTHENTICATE = SpanKind("tenant.authenticate", "the key's look-up and comparison", (ERROR,))
PREPARE = SpanKind(
    "prompt.prepare", "template and tokeniser, waiting for a thread included",
    (PROMPT_TOKENS, PROMPT_BLOCKS, REMEMBERED_TOKENS),
)
RESERVE = SpanKind(
    "quota.reserve", "the place and the tokens that a request may use, waiting for the database included",
    (QUOTA_SCOPE, ERROR),
)
QUEUE = SpanKind("store.queue", "until the store admitted it, or refused, or nobody waited any more", (ERROR,))
PREFILL = SpanKind(
    "store.prefill",
    "from admission to the first token",
    (CACHED_DEVICE_TOKENS, MISS_BLOCK, MISS_REASON, COMPUTED_TOKENS, CHUNKS, ERROR),
)
DECODE = SpanKind("store.decode", "from the first token to the last", (DECODED_TOKENS, STEPS, PREEMPTIONS, ERROR))
SETTLE = SpanKind("quota.settle", "booking what it used; after a second nobody waits for it any more", (ERROR,))

SPANS = (SERVER, GENERATION, AUTHENTICATE, PREPARE, RESERVE, QUEUE, PREFILL, DECODE, SETTLE)

# --- metrics

_GENERATION = (OPERATION, PROVIDER_NAME, REQUEST_MODEL, RESPONSE_MODEL)

HTTP_DURATION = Metric(
    "http.server.request.duration",
    "histogram",
    "s",
    "duration of HTTP requests",
    (METHOD, ROUTE, STATUS),
    (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10),
)
REQUEST_DURATION = Metric(
    "gen_ai.server.request.duration",
    "histogram",
    "s",
    "duration of requests for generation",
    (*_GENERATION, ERROR),
    (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92),
)
TIME_TO_FIRST_TOKEN = Metric(
    "gen_ai.server.time_to_first_token",
    "histogram",
    "s",
    "from the request to the first token of a finished answer",
    _GENERATION,
    (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)
TIME_PER_OUTPUT_TOKEN = Metric(
    "gen_ai.server.time_per_output_token",
    "histogram",
    "s",
    "time per token after the first of a finished answer",
    _GENERATION,
    (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
)
TOKEN_USAGE = Metric(
    "gen_ai.client.token.usage",
    "histogram",
    "{token}",
    "tokens of a request",
    (*_GENERATION, TOKEN_TYPE),
    (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576, 4194304, 16777216, 67108864),
)
REQUESTS = Metric("saltern.requests", "counter", "{request}", "requests for generation, by how they ended", (OUTCOME,))
CACHE_TOKENS = Metric(
    "saltern.cache.tokens", "counter", "{token}", "prompt tokens of admitted submissions", (TIER, CACHE_OUTCOME)
)
OVERHEAD = Metric(
    "saltern.gateway.overhead",
    "histogram",
    "s",
    "of a finished answer: what was not the store's time, a client that reads slowly included",
    (),
    (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0),
)
CACHE_BLOCKS = Metric("saltern.cache.blocks", "gauge", "{block}", "blocks of the pool", (TIER, BLOCK_STATE))
RESERVED_BLOCKS = Metric(
    "saltern.cache.reserved_blocks", "gauge", "{block}", "blocks that tenants have reserved", (TIER, RESERVATION_STATE)
)
EVICTIONS = Metric("saltern.cache.evictions", "counter", "{block}", "cached blocks given up", (TIER, EVICTION_CAUSE))
STORE_STEPS = Metric("saltern.store.steps", "counter", "{step}", "steps of the engine")
STORE_STEP_TIME = Metric("saltern.store.step.time", "counter", "s", "time that those steps took")
STORE_REQUESTS = Metric(
    "saltern.store.requests", "gauge", "{request}", "submissions that the store has", (REQUEST_STATE,)
)
STORE_PREEMPTIONS = Metric("saltern.store.preemptions", "counter", "{preemption}", "running requests set back")
UNWRAP_FAILURES = Metric(
    "saltern.secrets.unwrap_failures", "counter", "{failure}", "secrets that did not open", (PURPOSE,)
)
QUOTA_REFUSALS = Metric(
    "saltern.quota.refusals", "counter", "{request}", "requests that a quota refused", (QUOTA_SCOPE, QUOTA_LIMIT)
)
LOST_RESERVATIONS = Metric(
    "saltern.quota.lost_reservations",
    "counter",
    "{reservation}",
    "reservations of gateways that ended without a word, booked in full",
)
TENANT_REQUESTS = Metric(
    "saltern.tenant.requests", "counter", "{request}", "requests by tenant, where asked for", (TENANT, OUTCOME)
)
TENANT_TOKENS = Metric(
    "saltern.tenant.tokens", "counter", "{token}", "tokens by tenant, where asked for", (TENANT, TOKEN_TYPE)
)

METRICS = (
    HTTP_DURATION,
    REQUEST_DURATION,
    TIME_TO_FIRST_TOKEN,
    TIME_PER_OUTPUT_TOKEN,
    TOKEN_USAGE,
    REQUESTS,
    CACHE_TOKENS,
    OVERHEAD,
    CACHE_BLOCKS,
    RESERVED_BLOCKS,
    EVICTIONS,
    STORE_STEPS,
    STORE_STEP_TIME,
    STORE_REQUESTS,
    STORE_PREEMPTIONS,
    UNWRAP_FAILURES,
    QUOTA_REFUSALS,
    LOST_RESERVATIONS,
    TENANT_REQUESTS,
    TENANT_TOKENS,
)

# --- the line that the log has of each request

LOG_FIELDS = (
    LogField("request", "as in the header x-request-id"),
    LogField("trace", "trace id, where the request is traced"),
    LogField("tenant", "the tenant's public id"),
    LogField("method", METHOD.meaning),
    LogField("route", f"the route's template, or {UNMATCHED}"),
    LogField("status", STATUS.meaning),
    LogField("outcome", OUTCOME.meaning),
    LogField("error", ERROR.meaning),
    LogField("input_tokens", INPUT_TOKENS.meaning),
    LogField("cached_tokens", CACHE_READ_TOKENS.meaning),
    LogField("output_tokens", OUTPUT_TOKENS.meaning),
    LogField("queue_ms", "the longest wait of a choice in the store's queue"),
    LogField("first_token_ms", "from the request to the first token"),
    LogField("overhead_ms", "what was not the store's time"),
    LogField("duration_ms", "the whole request"),
)
