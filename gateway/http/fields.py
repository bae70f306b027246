"""What becomes of top-level request fields that no struct holds. Nothing that would change the answer is dropped."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from functools import cache
from typing import Any

import msgspec
from msgspec import Meta

from gateway.http.errors import bad_value

MAX_IGNORED_NAMES = 10
MAX_IGNORED_NAME_CHARACTERS = 64

# Accepted whatever they hold.
NO_EFFECT = frozenset({"user", "safety_identifier", "metadata", "service_tier", "verbosity"})

# Values under which a field that is not served changes nothing; () where only null does. Some are served on one route.
CHANGES_NOTHING: dict[str, tuple[object, ...]] = {
    "best_of": (1,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "skip_special_tokens": (True,),
    "use_beam_search": (False,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (False, True),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "structured_outputs": ({},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": ("none",),
    "store": (False,),
    "echo": (False,),
    "suffix": ("",),
    # How long OpenAI may keep something at most, in old and new spelling; no block is dropped for its age here.
    "prompt_cache_retention": ("in_memory", "in-memory", "24h"),
    "prompt_cache_breakpoint": ({},),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "priority": (0,),
    "request_id": (),
    "kv_transfer_params": (),
}


def other_fields(type: type[msgspec.Struct]) -> Meta:
    """The same as a JSON schema, beside that of a request's struct."""
    built = built_fields(type)
    neutral = {name: {"enum": [None, *values]} for name, values in CHANGES_NOTHING.items() if name not in built}
    without_effect = {name: {"description": "Without effect."} for name in sorted(NO_EFFECT)}
    return Meta(extra_json_schema={"properties": neutral | without_effect})


@cache
def built_fields(type: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset({field.name for field in msgspec.structs.fields(type)})


def sort_out_fields(body: dict[str, Any], built: Collection[str]) -> tuple[str, ...]:
    """The names that nothing here knows, in order; they are ignored.

    Args:
        built: the fields that the request's struct holds.

    Raises:
        ApiError: 400 with `param` for a field of `CHANGES_NOTHING` with another value than its own.
    """
    ignored = []
    for name, value in body.items():
        if name in built or name in NO_EFFECT:
            continue
        if name not in CHANGES_NOTHING:
            ignored.append(name)
        elif not _changes_nothing(name, value):
            neutral = CHANGES_NOTHING[name]
            remedy = f"leave it out or send {msgspec.json.encode(neutral[0]).decode()}" if neutral else "leave it out"
            raise bad_value(name, f"{name} is not supported with this value; {remedy}.")
    return tuple(ignored)


def _changes_nothing(name: str, value: object) -> bool:
    # 1 == True in Python and not in JSON.
    return value is None or any(
        value == neutral and isinstance(value, bool) == isinstance(neutral, bool) for neutral in CHANGES_NOTHING[name]
    )


def ignored_fields_header(names: Sequence[str]) -> dict[str, str]:
    """`x-saltern-ignored-fields`, or nothing: names are the caller's text, so only harmless ASCII of them is sent."""
    if not names:
        return {}
    safe = (re.sub(r"[^A-Za-z0-9_.-]", "?", name[:MAX_IGNORED_NAME_CHARACTERS]) for name in names[:MAX_IGNORED_NAMES])
    return {"x-saltern-ignored-fields": ", ".join(safe)}
