from __future__ import annotations

import asyncio
import contextlib
import time
from array import array
from pathlib import Path

import pytest

from benchmarks.store_double import SAID_TOKENS, serve, welcome
from cachestore.client import Event, Output, StoreClient
from cachestore.protocol import Finished, Sampling, Started
from tests.system.served import until

ACCOUNT = b"a tenant's bytes"


@pytest.mark.anyio
async def test_a_gateways_client_gets_all_it_asks_for_at_once(tmp_path: Path, default_model: Path) -> None:
    socket = tmp_path / "store.sock"
    double = asyncio.create_task(serve(socket, welcome(default_model, 16)))
    await until(socket.exists)
    client = await StoreClient.connect(socket)
    try:
        assert client.welcome.model_dir == str(default_model)
        request = client.submit(
            account=ACCOUNT,
            epoch=0,
            tokens=array("I", range(40)).tobytes(),
            keys=[bytes(32), bytes(32)],
            sampling=Sampling(temperature=0),
            max_tokens=20,
            queue_deadline_ns=time.monotonic_ns(),
        )
        events: list[Event] = []
        while not isinstance(event := await request.next(), Finished):
            events.append(event)
        assert isinstance(events[0], Started)
        said = [token for output in events[1:] if isinstance(output, Output) for token in output.tokens]
        assert said == [*SAID_TOKENS, *SAID_TOKENS][:20]
        assert (event.reason, event.counts.prompt_tokens, event.counts.output_tokens) == ("length", 40, 20)
        assert (await client.fence(ACCOUNT, 1)).epoch == 1
        assert (await client.drop_account(ACCOUNT)).epoch is None
        assert (await client.stats()).held_blocks == 0
    finally:
        client.close()
        double.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await double
