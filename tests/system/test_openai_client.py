"""The official client of OpenAI's API against the server, and its exception classes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from gateway.app import open_gateway
from gateway.telemetry.providers import Exporters
from gateway.telemetry.telemetry import Telemetry
from gateway.tenants.registry import Registry
from tests.system.support import Server, Tenant

QUESTION: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say hi."}]


@pytest.fixture
def client(tenant: Tenant) -> Iterator[OpenAI]:
    with client_of(tenant.server, tenant.key) as client:
        yield client


def client_of(server: Server, key: str) -> OpenAI:
    http_client = openai.DefaultHttpxClient(trust_env=False)
    return OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=60, http_client=http_client)


def test_models_are_listed(client: OpenAI, server: Server) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == (server.model, "model", "saltern")


def test_a_chat_is_answered_whole_and_streamed_alike(client: OpenAI, server: Server) -> None:
    asked: Any = {"model": server.model, "messages": QUESTION, "temperature": 0, "max_completion_tokens": 8}
    whole = client.chat.completions.create(**asked)
    (choice,) = whole.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason == "length"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 8

    *chunks, last = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == choice.message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens
    assert last.usage.total_tokens == whole.usage.total_tokens
    # The second found what the first left.
    assert whole.usage.prompt_tokens_details is not None
    assert last.usage.prompt_tokens_details is not None
    assert whole.usage.prompt_tokens_details.cached_tokens == 0
    assert last.usage.prompt_tokens_details.cached_tokens == (whole.usage.prompt_tokens - 1) // 16 * 16


def test_a_prompt_is_completed_whole_and_streamed_alike(client: OpenAI, server: Server) -> None:
    asked: Any = {"model": server.model, "prompt": "1 2 3 4 5", "temperature": 0, "max_tokens": 6, "stop": ["9"]}
    whole = client.completions.create(**asked)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (" 6 7 8", "length")
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 6

    *chunks, last = client.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    assert "".join(chunk.choices[0].text for chunk in chunks) == " 6 7 8"
    assert chunks[-1].choices[0].finish_reason == "length"
    assert last.usage is not None
    assert last.usage.total_tokens == whole.usage.total_tokens

    ids = client.completions.create(model=server.model, prompt=[33, 216, 34, 216], max_tokens=1, temperature=0)
    assert ids.usage is not None
    assert ids.usage.prompt_tokens == 4


def test_extras_go_through_the_extra_body(client: OpenAI, server: Server) -> None:
    asked: Any = {"model": server.model, "prompt": "1 2 3 4 5", "max_tokens": 2}
    # The only candidate is the best one, at any temperature.
    best = [client.completions.create(**asked, temperature=2, extra_body={"top_k": 1}) for _ in range(2)]
    assert [answer.choices[0].text for answer in best] == [" 6", " 6"]
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(**asked, extra_body={"cache_salt": " "})
    assert refused.value.param == "cache_salt"


def test_the_client_says_how_long_blocks_are_wanted(client: OpenAI, server: Server) -> None:
    asked: Any = {"model": server.model, "max_tokens": 1, "messages": [{"role": "user", "content": "1 2 3"}]}
    assert client.chat.completions.create(**asked, prompt_cache_options={"ttl": "30m"}, prompt_cache_retention="24h")
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**asked, prompt_cache_options={"mode": "explicit", "ttl": "30m"})
    assert refused.value.param == "prompt_cache_options"
    text: Any = {"model": server.model, "max_tokens": 1, "prompt": "1 2 3"}
    assert client.completions.create(**text, extra_body={"prompt_cache_options": {"ttl": "24h"}})
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(**text, extra_body={"prompt_cache_options": {"ttl": "25h"}})
    assert refused.value.param == "prompt_cache_options"


def test_refusals_are_the_clients_own_exceptions(client: OpenAI, server: Server) -> None:
    def ask(client: OpenAI, **fields: Any) -> Any:
        asked: Any = {"model": server.model, "messages": QUESTION, "max_tokens": 1, "temperature": 0} | fields
        return client.chat.completions.create(**asked)

    with client_of(server, "sk-saltern-unknown") as stranger, pytest.raises(openai.AuthenticationError) as unknown:
        ask(stranger)
    assert (unknown.value.status_code, unknown.value.code) == (401, "invalid_api_key")
    with pytest.raises(openai.NotFoundError) as missing:
        ask(client, model="gpt-4")
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as long:
            ask(client, messages=[{"role": "user", "content": " a" * 9000}], stream=stream)
        assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as wrong:
        ask(client, temperature=3)
    assert (wrong.value.param, wrong.value.type) == ("temperature", "invalid_request_error")
    assert wrong.value.request_id is not None
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model=server.model, input="x")
    assert ask(client).choices[0].finish_reason == "length"


@asynccontextmanager
async def client_without_a_store(tmp_path: Path) -> AsyncIterator[openai.AsyncOpenAI]:
    """A client of a gateway whose store is not there."""
    async with open_gateway(
        database_url=f"sqlite+aiosqlite:///{tmp_path / 'saltern.db'}",
        kek_file=tmp_path / "kek",
        socket_path=tmp_path / "store.sock",
        telemetry=Telemetry(Exporters()),
    ) as gateway:
        directory = gateway.directory
        registry = Registry(directory.database, directory.keyring, directory.clock)
        tenant = await registry.create_tenant("a")
        created = await registry.create_key(tenant.id, None, frozenset({"completions"}), None)
        assert created is not None
        transport = httpx.ASGITransport(gateway.tenant_app)
        yield openai.AsyncOpenAI(
            base_url="http://saltern/v1",
            api_key=created[1].reveal().decode(),
            max_retries=0,
            http_client=httpx.AsyncClient(transport=transport),  # type: ignore[arg-type]  # httpx2's, which is equal
        )


@pytest.mark.anyio
async def test_without_a_store_the_client_is_told_to_try_again(tmp_path: Path) -> None:
    async with client_without_a_store(tmp_path) as client:
        for stream in (False, True):
            with pytest.raises(openai.InternalServerError) as refused:
                await client.chat.completions.create(model="x", messages=QUESTION, stream=stream)
            assert isinstance(refused.value, openai.APIStatusError)
            assert (refused.value.status_code, refused.value.code) == (503, "server_is_overloaded")
            headers = refused.value.response.headers
            assert (headers["x-should-retry"], headers["retry-after"]) == ("true", "1")
