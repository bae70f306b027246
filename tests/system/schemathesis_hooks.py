"""Loaded by schemathesis: keeps requests small, names the model that is served, looks at the 400s of valid data."""

from __future__ import annotations

import os
import re
from typing import Any

import schemathesis

MODEL = os.environ["SALTERN_TEST_MODEL"]
VOCABULARY_TOKENS = 49152
MAX_TOKENS = 4
MAX_CHOICES = 2

# Valid by the document, and refused for how things stand or for what JSON Schema has no words for.
REFUSALS = re.compile(
    r"cursor must be a next_cursor|expires_at must lie between now|.* together; the context is 2048"
    r"|.* one request has at most|.* is no token id; this model has"
    # A schema counts characters and not bytes, takes 1.0 for an integer, and has no bounds where any value may be, nor
    # for a number in a string.
    r"|cache_salt must be 1 to 256 bytes|prompt_cache_key may have 256 bytes|Expected `int[^`]*`, got `float`"
    r"|The ttl of prompt_cache_options is a whole number"
    r"|The body has an integer of more than 64 bits|min_tokens is \d+ and an answer may have"
    r"|top_logprobs needs logprobs|Only a last message of the assistant"
    r"|The last message is continued or a new one begun"
    r"|start must lie before end|end must lie after 2000|From start to end are more than"
    r"|time_zone must be a name of the IANA database|strict needs device_reserved_tokens"
)


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """Only what is valid already is replaced, by something else that is, so that what is not valid stays so."""
    if not case.path.endswith("/completions") or not isinstance(body := case.body, dict):
        return
    if isinstance(body.get("model"), str):
        body["model"] = MODEL
    for name, most in (("max_tokens", MAX_TOKENS), ("max_completion_tokens", MAX_TOKENS), ("n", MAX_CHOICES)):
        if isinstance(value := body.get(name), int) and most < value <= 128:
            body[name] = most
    if isinstance(prompt := body.get("prompt"), list):
        body["prompt"] = [[*map(_known, part)] if isinstance(part, list) else _known(part) for part in prompt]
    if isinstance(ids := body.get("stop_token_ids"), list):
        body["stop_token_ids"] = [*map(_known, ids)]
    if isinstance(bias := body.get("logit_bias"), dict):
        body["logit_bias"] = {_known_key(key): value for key, value in bias.items()}
    if body.get("max_tokens") is None and body.get("max_completion_tokens") is None:
        body["max_tokens"] = MAX_TOKENS


def _known(part: Any) -> Any:
    if isinstance(part, int) and VOCABULARY_TOKENS <= part < 1 << 32:
        return part % VOCABULARY_TOKENS
    return part


def _known_key(key: str) -> str:
    return str(_known(int(key))) if re.fullmatch("[1-9][0-9]{0,9}", key) else key


@schemathesis.check
def refused_for_what_no_schema_says(ctx: Any, response: Any, case: Any) -> None:
    if response.status_code != 400 or case.meta is None or not case.meta.generation.mode.is_positive:
        return
    message = response.json()["error"]["message"]
    if not REFUSALS.match(message):
        raise AssertionError(f"valid data was refused: {message}")
