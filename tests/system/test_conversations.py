"""The next turn of a conversation finds what was generated in the last, down to the last whole block."""

from __future__ import annotations

import json
from typing import Any

from tests.system.support import Server, Tenant

QUESTIONS = [
    "My name is Ada. What is salt?",
    "And pepper?",
    "Write a limerick about both.",
    "Count from 1 to 12.",
    "What was my name?",
    "Say goodbye in three languages.",
]


def streamed(tenant: Tenant, messages: list[dict[str, str]], **fields: Any) -> tuple[str, dict[str, Any]]:
    """The text and the usage of a streamed chat."""
    body = {"model": tenant.server.model, "messages": messages, "stream": True, "temperature": 0, "max_tokens": 40}
    body |= {"stream_options": {"include_usage": True}} | fields
    text, usage = "", {}
    with tenant.server.http.stream("POST", "/v1/chat/completions", json=body, headers=tenant.headers) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line.removeprefix("data: "))
            usage = chunk["usage"] or usage
            text += "".join(choice["delta"].get("content", "") for choice in chunk["choices"])
    return text, usage


def test_each_turn_finds_all_whole_blocks_of_the_turn_before(server: Server) -> None:
    tenant = server.tenant()
    messages: list[dict[str, str]] = []
    promised = 0
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        # Random text is what most often tokenises differently than it was generated.
        text, usage = streamed(tenant, messages, temperature=1.5, seed=len(messages))
        assert usage["prompt_tokens_details"]["cached_tokens"] >= promised
        promised = 16 * ((usage["prompt_tokens"] + usage["completion_tokens"] - 1) // 16)
        messages.append({"role": "assistant", "content": text})
