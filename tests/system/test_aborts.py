"""A client that leaves in each phase of its request: the engine stops, and blocks and names are released.

Real sockets on both sides of the gateway. The model is gated, so that a client leaves exactly where the test wants it.
"""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import pytest

from cachestore.protocol import Submit
from cachestore.sequence import Phase
from tests.system.scene import KINDS, WITHIN_SECONDS, scene
from tests.system.scripted import TEXT, until

pytestmark = pytest.mark.anyio

# Of each kind: five make twenty in a phase.
each = pytest.mark.parametrize("each", [5, pytest.param(20, marks=pytest.mark.once)])


@each
async def test_aborts_hit_requests_that_wait(tmp_path: Path, each: int) -> None:
    async with scene(tmp_path, max_running=1) as s:
        staying = await s.ask(TEXT, True, max_tokens=1900)
        await s.submitted(1)
        await s.step()
        for path, stream in KINDS * each:
            client, sequence = await s.begin(path, stream)
            assert sequence.phase is Phase.WAITING
            await s.leave(client, sequence)
            assert s.rows(sequence) == 0
            assert s.inside.engine.scheduler.queued == []
        assert s.ended() == {"aborted": len(KINDS) * each}
        # What they waited behind was not disturbed.
        s.runner.open()
        assert (await staying.answer()).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


@each
async def test_aborts_hit_requests_that_prefill(tmp_path: Path, each: int) -> None:
    async with scene(tmp_path, max_running=8) as s:
        for path, stream in KINDS * each:
            client, sequence = await s.begin(path, stream)
            assert sequence.phase is Phase.RUNNING
            assert 0 < sequence.computed_tokens < sequence.prompt_tokens
            await s.leave(client, sequence)
            assert sequence.output_tokens == 0
            assert s.inside.engine.pool.held == 0
        assert s.ended() == {"aborted": len(KINDS) * each}


@each
async def test_aborts_hit_requests_that_decode(tmp_path: Path, each: int) -> None:
    async with scene(tmp_path, max_running=8) as s:
        for path, stream in KINDS * each:
            client, sequence = await s.begin(path, stream)
            while sequence.output_tokens < 3:
                await s.step()
            assert sequence.phase is Phase.RUNNING
            await s.leave(client, sequence)
            assert sequence.output_tokens <= 4
            assert s.inside.engine.pool.held == 0
        assert s.ended() == {"aborted": len(KINDS) * each}


@each
async def test_aborts_hit_requests_that_have_finished(tmp_path: Path, each: int) -> None:
    """The engine has finished and waits for the last names; its gateway does not know yet when the client leaves."""
    async with scene(tmp_path, max_running=8) as s:
        for path, stream in KINDS * each:
            client, sequence = await s.begin(path, stream, max_tokens=3)
            while sequence.output_tokens < 2:
                await s.step()
            s.held.hold()
            await s.step()
            assert sequence.phase is Phase.ENDED
            assert s.inside.engine.pool.held > 0
            await s.leave(client, sequence)
            assert s.inside.engine.pool.held == 0
        assert s.ended() == {"length": len(KINDS) * each}


async def test_a_client_that_leaves_ends_all_choices_of_all_prompts(tmp_path: Path) -> None:
    async with scene(tmp_path, max_running=5) as s:
        for stream in (False, True) * 3:
            prompts = [f"{next(s._numbers)} ".ljust(40, "x") for _ in range(2)]
            before = len(s.arrived.of(Submit))
            client = await s.ask(TEXT, stream, prompt=prompts, n=3)
            await s.submitted(before + 6)
            sequences = list(s.inside.engine._sequences.values())
            # Five have a place, one waits.
            while Counter(each.phase for each in sequences) != {Phase.RUNNING: 5, Phase.WAITING: 1}:
                await s.step()
                sequences = list(s.inside.engine._sequences.values())
            rows = {each: s.rows(each) for each in sequences}
            left_at = time.monotonic()
            client.leave()
            await until(lambda: not s.inside.gateway.completions._choices)
            s.runner.open()
            await until(lambda: not s.inside.engine._sequences)
            assert time.monotonic() - left_at < WITHIN_SECONDS
            s.runner.close()
            assert all(s.rows(each) <= count + 1 for each, count in rows.items())
            assert s.inside.engine.pool.held == 0
