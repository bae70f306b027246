"""The running server against its own OpenAPI documents: data that they allow and data that they forbid.

Gateway, database, socket and store are real, and so are the listeners; only the model computes nothing.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NoReturn

import msgspec
import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from gateway.admin.shapes import TenantInput
from gateway.http.answers import ChatChunk, Model
from gateway.http.errors import JSON, ApiError, Unauthorized
from gateway.http.openapi import described
from gateway.http.routing import RawHeaders, Route, Router
from gateway.process import _server
from tests.system.in_process import in_process

pytestmark = pytest.mark.anyio

SEED = 20_263
ROOT = Path(__file__).parents[2]
CONFIG = Path(__file__).with_name("schemathesis.toml")
SCHEMATHESIS = str(Path(sys.executable).with_name("schemathesis"))


@asynccontextmanager
async def listening(app: ASGIApp) -> AsyncIterator[str]:
    """The URL of the application on a free port, served as `saltern serve` does it."""
    # With the protocol named, asyncio turns off Nagle's algorithm on what it accepts, as uvloop always does.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    server = _server(app)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = server.force_exit = True
        await serving
        listener.close()


async def schemathesis(url: str, key: str, model: str, *arguments: str) -> tuple[int, str]:
    """Exit status and report of one run over the document at `url`; the report ends with the seed."""
    process = await asyncio.create_subprocess_exec(
        SCHEMATHESIS,
        "--config-file",
        str(CONFIG),
        "run",
        url,
        f"--seed={SEED}",
        *arguments,
        # Where it finds its hooks.
        cwd=ROOT,
        env=os.environ | {"SALTERN_TEST_KEY": key, "SALTERN_TEST_MODEL": model, "NO_COLOR": "1"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    report, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, report.decode()


async def test_no_answer_contradicts_the_documents(tmp_path: Path, default_model: Path) -> None:
    async with in_process(tmp_path, default_model) as saltern:
        customer = await saltern.customer("schemathesis")
        admin_key = saltern.admin.headers["authorization"].removeprefix("Bearer ")
        # In this order: the second run may delete the customer.
        for app, path, key in (
            (saltern.gateway.tenant_app, "/openapi.json", customer.key),
            (saltern.gateway.admin_app, "/admin/openapi.json", admin_key),
        ):
            async with listening(app) as url:
                status, report = await schemathesis(url + path, key, saltern.model)
            print(report)
            assert status == 0, report
        await saltern.check()


async def crash(request: Request) -> Response:
    raise RuntimeError


async def teapot(request: Request) -> Response:
    return Response(status_code=418)


async def html(request: Request) -> Response:
    return Response("<p>", media_type="text/html")


async def half(request: Request) -> Response:
    return Response(b'{"id": "m"}', media_type=JSON)


async def events(request: Request) -> Response:
    return Response(b'data: {"id": "m"}\n\n', media_type="text/event-stream")


async def good(request: Request) -> Response:
    return Response(msgspec.json.encode(Model("m", 1)), media_type=JSON)


async def refuse(request: Request) -> Response:
    raise ApiError(400, "No.")


async def anybody(headers: RawHeaders) -> str:
    return "anybody"


async def nobody(headers: RawHeaders) -> NoReturn:
    raise Unauthorized


RIGHT = Route("GET", "/right", "public", good, answers=Model)
WRONG = [
    Route("GET", "/crashes", "public", crash, answers=Model),
    Route("GET", "/answers-another-status", "public", teapot, answers=Model),
    Route("GET", "/answers-another-type", "public", html, answers=Model),
    Route("GET", "/lacks-a-field", "public", half, answers=Model),
    Route("GET", "/streams-something-else", "public", events, answers=Model, streams=ChatChunk),
    Route("GET", "/lets-anybody-in", "tenant", good, answers=Model),
    Route("GET", "/lets-nobody-in", "admin:tenants:read", good, answers=Model),
    Route("POST", "/accepts-anything", "public", good, reads=TenantInput, answers=Model),
    Route("POST", "/refuses-everything", "public", refuse, reads=TenantInput, answers=Model),
]


async def test_every_kind_of_contradiction_is_found() -> None:
    routes = described([RIGHT, *WRONG], "/openapi.json", "Wrong")
    app = Router(routes, authenticate_tenant=anybody, authenticate_admin=nobody)
    async with listening(app) as url:
        status, report = await schemathesis(url + "/openapi.json", "sk-test", "m", "--max-examples=3")
    print(report)
    assert status == 1
    found = re.findall(r"^_+ (?:GET|POST) (/\S+) _+$", report, re.MULTILINE)
    assert sorted(found) == sorted(route.path for route in WRONG)
