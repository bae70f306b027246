"""The admin API on a socket, and `saltern` beside it, whose settings are those that a test gives."""

from __future__ import annotations

import asyncio
import os
import re
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import uvicorn
from typer.testing import CliRunner, Result

from gateway.cli import app
from tests.gateway.admin.served import Served, served


@asynccontextmanager
async def listening(data_dir: Path) -> AsyncIterator[Served]:
    async with served(data_dir) as admin:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            (data_dir / "admin-url").write_text(f"http://127.0.0.1:{listener.getsockname()[1]}\n")
            server = uvicorn.Server(uvicorn.Config(admin.app, lifespan="off", log_config=None))
            serving = asyncio.create_task(server.serve([listener]))
            try:
                yield admin
            finally:
                server.should_exit = True
                await serving


async def saltern(*arguments: str, env: Mapping[str, str]) -> Result:
    outside = {name: None for name in os.environ if name.startswith("SALTERN_") or name == "XDG_DATA_HOME"}
    return await asyncio.to_thread(lambda: CliRunner().invoke(app, arguments, env=outside | dict(env)))


async def done(data_dir: Path, *arguments: str) -> str:
    """What a command prints that has to succeed."""
    result = await saltern(*arguments, env={"SALTERN_DATA_DIR": str(data_dir)})
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout


async def failed(data_dir: Path, *arguments: str) -> str:
    """The one line of a command that the API refuses."""
    result = await saltern(*arguments, env={"SALTERN_DATA_DIR": str(data_dir)})
    assert (result.exit_code, result.stdout) == (1, "")
    (line,) = result.stderr.splitlines()
    return line


async def misused(data_dir: Path, *arguments: str) -> str:
    """What is said of a command line that is wrong in itself, without colours, frame and line ends."""
    result = await saltern(*arguments, env={"SALTERN_DATA_DIR": str(data_dir)})
    assert (result.exit_code, result.stdout) == (2, "")
    return " ".join(re.sub(r"\x1b\[[0-9;]*m|│", "", result.stderr).split())
