"""The store over its socket: one gateway, several, and none."""

from __future__ import annotations

import asyncio
import logging
import socket
import stat
from pathlib import Path

import pytest

from cachestore import client as client_module
from cachestore import server as server_module
from cachestore.client import StoreClient, StoreLost, StoreRefused
from cachestore.protocol import (
    KEY_VERSION,
    MAX_UNSENT_BYTES,
    PROTOCOL,
    Drain,
    Drained,
    Fence,
    Fenced,
    Finished,
    Hello,
    OpenAccount,
    Ping,
    Pong,
    Refused,
    Rejected,
    Started,
    Stats,
    Submit,
    Tokens,
)
from cachestore.scheduler import StepPlan
from cachestore.start_error import StartError
from tests.cachestore.serving import (
    WELCOME,
    GatedRunner,
    RawPeer,
    answer,
    complete,
    connected,
    report_where,
    serving,
    stepping,
    submit,
)
from tests.cachestore.support import ALICE, BOB, GREEDY, chain_keys, expected_answer, token_bytes

pytestmark = pytest.mark.anyio


def prompt(word: int, count: int) -> list[int]:
    return [word] * count


# --- a connection


async def test_hello_is_answered_by_what_the_store_is(tmp_path: Path) -> None:
    async with serving(tmp_path) as server, connected(server) as client:
        assert client.welcome == WELCOME


@pytest.mark.parametrize(
    ("hello", "code"),
    [
        (Hello(protocol=PROTOCOL + 1, key_version=KEY_VERSION), "protocol"),
        (Hello(protocol=PROTOCOL, key_version=KEY_VERSION + 1), "key_version"),
    ],
)
async def test_a_gateway_of_another_version_is_refused_with_the_reason(tmp_path: Path, hello: Hello, code: str) -> None:
    async with serving(tmp_path) as server:
        peer = await RawPeer.connect(server, hello=False)
        peer.send(hello)
        refused = await peer.receive()
        assert isinstance(refused, Refused)
        assert refused.code == code
        assert "install the same version" in refused.detail
        assert await peer.rest() == b""
        async with connected(server) as client:
            assert client.welcome == WELCOME


async def test_the_client_raises_what_the_store_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(tmp_path) as server:
        with monkeypatch.context() as patch:
            patch.setattr(client_module, "PROTOCOL", PROTOCOL + 1)
            with pytest.raises(StoreRefused, match=f"speaks protocol {PROTOCOL}, the gateway {PROTOCOL + 1}"):
                await StoreClient.connect(server.socket_path)
        async with connected(server):
            pass


async def test_there_is_no_store_where_nobody_serves(tmp_path: Path) -> None:
    with pytest.raises(StoreLost, match="no store at"):
        await StoreClient.connect(tmp_path / "none.sock")
    async with serving(tmp_path) as server, connected(server):
        pass


async def test_pings_are_answered_with_the_age_of_the_last_step(tmp_path: Path) -> None:
    runner = GatedRunner()
    async with serving(tmp_path, runner) as server, connected(server) as client:
        peer = await RawPeer.connect(server)
        peer.send(Ping())
        assert await peer.receive() == Pong(step_age_ms=0)
        submit(client, prompt(1, 5))
        while (pong := await _ping(peer)).step_age_ms < 5:
            assert isinstance(pong, Pong)
        runner.open()


async def test_an_engine_with_work_that_computes_nothing_grows_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path) as server, connected(server) as client:
        peer = await RawPeer.connect(server)
        monkeypatch.setattr(server.engine.scheduler, "plan", lambda: StepPlan([], [], []))
        submit(client, prompt(1, 5))
        while (await _ping(peer)).step_age_ms < 20:
            pass


async def _ping(peer: RawPeer) -> Pong:
    peer.send(Ping())
    pong = await peer.receive()
    assert isinstance(pong, Pong)
    return pong


# --- requests


async def test_a_request_streams_its_tokens_and_its_blocks_are_found_again(tmp_path: Path) -> None:
    async with serving(tmp_path) as server, connected(server) as client:
        request = submit(client, prompt(1, 8), max_tokens=9)
        started, tokens, end = await answer(request)
        assert started
        assert (started.cached_tokens, started.miss_block) == (0, 0)
        assert tokens == expected_answer(prompt(1, 8), 9)
        assert isinstance(end, Finished)
        assert end.reason == "length"
        assert request.finished == end
        stamps = end.stamps
        assert 0 < stamps.queued_ns <= stamps.started_ns <= stamps.first_token_ns <= stamps.finished_ns
        keys = chain_keys(ALICE, 1, prompt(1, 8) + tokens, 4)
        request.seal(keys[2:], last=True)
        assert await complete(client, prompt(1, 8) + tokens + [5], max_tokens=1) == (
            16,
            expected_answer(prompt(1, 8) + tokens + [5], 1),
        )


def _submit(request: int, tokens: list[int], *, account: bytes = ALICE, epoch: int = 1) -> Submit:
    return Submit(
        request=request,
        account=account,
        epoch=epoch,
        tokens=token_bytes(tokens),
        keys=b"".join(chain_keys(account, epoch, tokens, 4)),
        sampling=GREEDY,
        max_tokens=6,
        queue_deadline_ns=1 << 62,
    )


async def test_gateways_may_use_the_same_request_ids(tmp_path: Path) -> None:
    runner = GatedRunner()
    async with serving(tmp_path, runner) as server, connected(server) as first, connected(server) as second:
        requests = [submit(first, prompt(1, 5)), submit(second, prompt(2, 9), account=BOB)]
        runner.open()
        answers = [await answer(request) for request in requests]
        assert [tokens for _, tokens, _ in answers] == [
            expected_answer(prompt(1, 5), 4),
            expected_answer(prompt(2, 9), 4),
        ]


async def test_an_abort_ends_a_running_request(tmp_path: Path) -> None:
    runner = GatedRunner()
    async with serving(tmp_path, runner) as server, connected(server) as client:
        aborted, other = submit(client, prompt(1, 5), max_tokens=400), submit(client, prompt(2, 5), max_tokens=6)
        runner.let(2)
        assert isinstance(await aborted.next(), Started)
        aborted.abort()
        _, _, end = await stepping(runner, answer(aborted))
        assert isinstance(end, Finished)
        assert end.reason == "aborted"
        aborted.seal([], last=True)
        runner.open()
        _, tokens, _ = await answer(other)
        assert tokens == expected_answer(prompt(2, 5), 6)
        other.seal([], last=True)
        async with asyncio.timeout(1):
            await report_where(client, held_blocks=0, running=0)


async def test_a_disconnect_releases_all_that_its_requests_held_within_a_second(tmp_path: Path) -> None:
    runner = GatedRunner()
    async with serving(tmp_path, runner) as server, connected(server) as other:
        going = await StoreClient.connect(server.socket_path)
        requests = [submit(going, prompt(word, 9), max_tokens=400) for word in (1, 2, 3)]
        staying = submit(other, prompt(4, 9), account=BOB, max_tokens=4000)
        for request in (*requests, staying):
            assert isinstance(await stepping(runner, request.next()), Started)
        going.close()
        async with asyncio.timeout(1):
            await stepping(runner, report_where(other, running=1, waiting=0, ended=0))
        assert server.engine.pool.held == len(server.engine.scheduler.running[0].table)
        with pytest.raises(StoreLost):
            await answer(requests[0])
        # The other gateway's request went on.
        assert await stepping(runner, staying.next())
        assert not staying.finished


async def test_a_lost_store_is_known_within_a_second_to_all_who_wait(tmp_path: Path) -> None:
    runner = GatedRunner()
    async with serving(tmp_path, runner) as server:
        client = await StoreClient.connect(server.socket_path)
        running = submit(client, prompt(1, 5), max_tokens=400)
        runner.let(1)
        assert isinstance(await running.next(), Started)
        waiting = asyncio.create_task(client.fence(ALICE, 2))
        counting = asyncio.create_task(client.stats())
        others = [asyncio.create_task(ask(ALICE)) for ask in (client.flush, client.account_report)]
        await asyncio.sleep(0)
    async with asyncio.timeout(1):
        await client.closed.wait()
        with pytest.raises(StoreLost):
            await answer(running)
        for task in (waiting, counting, *others):
            with pytest.raises(StoreLost):
                await task
    with pytest.raises(StoreLost):
        submit(client, prompt(1, 5))
    # What a lost store no longer needs to hear is dropped.
    running.abort()
    running.seal([], last=True)


async def test_a_fence_is_answered_and_what_was_older_is_gone(tmp_path: Path) -> None:
    async with serving(tmp_path) as server, connected(server) as client:
        await complete(client, prompt(1, 9))
        assert (await complete(client, prompt(1, 9)))[0] == 8
        fenced = await client.fence(ALICE, 2)
        assert (fenced.blocks, fenced.bytes) == (2, 1024)
        assert len(server.engine.index) == 0
        _, _, end = await answer(submit(client, prompt(1, 9), epoch=1))
        assert isinstance(end, Rejected)
        assert end.code == "stale_epoch"
        assert (await complete(client, prompt(1, 9), epoch=2))[0] == 0
        assert (await complete(client, prompt(1, 9), epoch=2))[0] == 8
        assert (await client.drop_account(ALICE)).blocks == 2
        _, _, end = await answer(submit(client, prompt(1, 9), epoch=3))
        assert isinstance(end, Rejected)
        assert end.code == "unknown_account"


async def test_several_fences_at_once_are_each_answered(tmp_path: Path) -> None:
    async with serving(tmp_path) as server, connected(server) as client:
        await complete(client, prompt(1, 9))
        fenced = await asyncio.gather(*(client.fence(account, 2) for account in (ALICE, BOB, ALICE)))
        assert [(each.account, each.blocks) for each in fenced] == [(ALICE, 2), (BOB, 0), (ALICE, 0)]


async def test_reports_and_flushes_of_several_accounts_at_once_are_each_answered(tmp_path: Path) -> None:
    async with serving(tmp_path) as server, connected(server) as client:
        await complete(client, prompt(1, 9))
        before = await asyncio.gather(*(client.account_report(account) for account in (BOB, ALICE, BOB)))
        assert [(each.account, each.cached_blocks) for each in before] == [(BOB, 0), (ALICE, 2), (BOB, 0)]
        flushed = await asyncio.gather(*(client.flush(account) for account in (BOB, ALICE, ALICE)))
        assert [(each.account, each.blocks) for each in flushed] == [(BOB, 0), (ALICE, 2), (ALICE, 0)]
        assert (await client.account_report(ALICE)).cached_blocks == 0


async def test_probes_of_several_prompts_at_once_are_each_answered(tmp_path: Path) -> None:
    async with serving(tmp_path) as server, connected(server) as client:
        await complete(client, prompt(1, 9))
        keys = chain_keys(ALICE, 1, prompt(1, 8) + prompt(2, 4), 4)
        asked = [(ALICE, 1, keys), (ALICE, 1, keys[:2]), (BOB, 1, keys), (ALICE, 1, []), (ALICE, 2, keys)]
        results = await asyncio.gather(*(client.probe(*each) for each in asked))
        said = [(each.device_blocks, each.miss_block, each.miss_reason) for each in results]
        assert said == [(2, 2, "cold"), (2, None, None), (0, 0, "cold"), (0, None, None), (0, 0, "cold")]
        assert [(each.account, each.epoch) for each in results] == [(account, epoch) for account, epoch, _ in asked]


async def test_a_frame_larger_than_what_may_be_unsent_is_sent(tmp_path: Path) -> None:
    async with serving(tmp_path) as server, connected(server) as client:
        keys = [bytes(32)] * (3 * MAX_UNSENT_BYTES // 64)
        assert (await client.probe(ALICE, 1, keys)).device_blocks == 0
        assert not client.closed.is_set()


async def test_reports_come_when_asked_for_and_every_second(tmp_path: Path) -> None:
    async with serving(tmp_path) as server, connected(server) as client:
        asked = await client.stats()
        assert (asked.pushed, asked.total_blocks, asked.free_blocks) == (False, 1024, 1024)
        peer = await RawPeer.connect(server)
        async with asyncio.timeout(3):
            while not (client.report and client.report.pushed):
                # Each answer is also a turn of the loop in which a pushed report can come.
                peer.send(Ping())
                await peer.receive()


async def test_a_draining_store_says_when_nothing_runs_any_more(tmp_path: Path) -> None:
    runner = GatedRunner()
    async with serving(tmp_path, runner) as server:
        peer = await RawPeer.connect(server)
        peer.send(OpenAccount(account=ALICE, epoch=1))
        peer.send(_submit(1, prompt(1, 5)))
        runner.let(1)
        assert isinstance(await peer.receive(), Started)
        assert isinstance(await peer.receive(), Tokens)
        peer.send(Drain())
        peer.send(_submit(2, prompt(2, 5)))
        # The answer tells that what was sent before has reached the engine's queue.
        await _ping(peer)
        runner.open()
        messages = [await peer.receive()]
        while not isinstance(messages[-1], Drained):
            messages.append(await peer.receive())
        ends = [message for message in messages if isinstance(message, Rejected | Finished)]
        assert [(type(end), end.request) for end in ends] in (
            [(Rejected, 2), (Finished, 1)],
            [(Finished, 1), (Rejected, 2)],
        )


# --- what ends a connection


async def test_what_the_engine_refuses_ends_that_connection_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(tmp_path) as server, connected(server) as other:
        peer = await RawPeer.connect(server)
        peer.send(OpenAccount(account=ALICE, epoch=1))
        peer.send(_submit(1, [2**32 - 1] * 5))
        # What comes after it on the same connection is not looked at.
        peer.send(Fence(account=ALICE, epoch=9))
        await peer.rest()
        assert "outside the vocabulary" in caplog.text
        assert "silent" not in caplog.text
        assert "4294967295" not in caplog.text
        assert await complete(other, prompt(1, 5)) == (0, expected_answer(prompt(1, 5), 4))
        assert server.engine.index.epoch(ALICE) == 1


async def test_a_silent_peer_is_closed_and_its_requests_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server_module, "PING_INTERVAL_SECONDS", 0.02)
    monkeypatch.setattr(server_module, "SILENCE_LIMIT_SECONDS", 0.3)
    monkeypatch.setattr(client_module, "PING_INTERVAL_SECONDS", 0.02)
    runner = GatedRunner()
    async with serving(tmp_path, runner) as server, connected(server) as talking:
        silent = await RawPeer.connect(server)
        silent.send(OpenAccount(account=ALICE, epoch=1))
        silent.send(_submit(1, prompt(1, 5)))
        async with asyncio.timeout(5):
            await silent.rest()
            assert "silent for" in caplog.text
            runner.open()
            await report_where(talking, running=0, waiting=0, held_blocks=0)
        assert not talking.closed.is_set()


async def test_a_peer_that_never_says_hello_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "SILENCE_LIMIT_SECONDS", 0.05)
    async with serving(tmp_path) as server:
        peer = await RawPeer.connect(server, hello=False)
        async with asyncio.timeout(5):
            assert await peer.rest() == b""


async def test_a_peer_that_does_not_read_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server_module, "MAX_UNSENT_BYTES", 64 << 10)
    async with serving(tmp_path) as server, connected(server) as reads:
        deaf = await RawPeer.connect(server)
        stats = Stats()
        async with asyncio.timeout(10):
            while "bytes unsent" not in caplog.text:
                for _ in range(200):
                    deaf.send(stats)
                await reads.stats()
        assert await complete(reads, prompt(1, 5)) == (0, expected_answer(prompt(1, 5), 4))


async def test_a_client_closes_a_store_that_falls_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that welcomes and then says nothing; one that does answer pings is kept."""
    monkeypatch.setattr(client_module, "PING_INTERVAL_SECONDS", 0.02)
    monkeypatch.setattr(client_module, "SILENCE_LIMIT_SECONDS", 0.3)
    ended = asyncio.Event()

    async def welcome(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(server_module.encode_frame(WELCOME, 1 << 20))
        await ended.wait()
        writer.close()

    fake = await asyncio.start_unix_server(welcome, tmp_path / "silent.sock")
    async with serving(tmp_path) as server, connected(server) as kept:
        client = await StoreClient.connect(tmp_path / "silent.sock")
        request = submit(client, prompt(1, 5))
        async with asyncio.timeout(5):
            await client.closed.wait()
        with pytest.raises(StoreLost):
            await request.next()
        assert not kept.closed.is_set()
    ended.set()
    fake.close()


async def test_a_store_whose_engine_fails_ends_instead_of_serving_without_it(tmp_path: Path) -> None:
    lost: list[StoreClient] = []
    with pytest.raises(RuntimeError, match="the engine failed") as raised:
        await _serve_until_the_engine_fails(tmp_path, lost)
    assert str(raised.value.__cause__) == "planted"
    assert len(lost) == 1
    assert list((tmp_path / "run").iterdir()) == []


async def _serve_until_the_engine_fails(folder: Path, lost: list[StoreClient]) -> None:
    async with serving(folder) as server:
        client = await StoreClient.connect(server.socket_path)
        assert await complete(client, prompt(1, 5)) == (0, expected_answer(prompt(1, 5), 4))

        def fail() -> None:
            raise AssertionError("planted")

        server.engine.plan = fail  # type: ignore[method-assign]
        running = submit(client, prompt(2, 5))
        async with asyncio.timeout(1):
            with pytest.raises(StoreLost):
                await running.next()
            lost.append(client)


# --- the socket


async def test_the_socket_is_ours_alone_and_gone_afterwards(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        path = server.socket_path
        assert stat.S_ISSOCK(path.stat().st_mode)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize("mode", [0o755, 0o710, 0o701, 0o777])
async def test_a_folder_that_others_can_enter_is_refused(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(StartError, match="mode 0700"):
        await _serve_briefly(tmp_path)
    assert list(folder.iterdir()) == []
    folder.chmod(0o700)
    await _serve_briefly(tmp_path)


async def _serve_briefly(folder: Path) -> None:
    async with serving(folder) as server, connected(server):
        pass


async def test_a_socket_left_behind_is_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as killed:
        killed.bind(str(folder / "store.sock"))
    assert (folder / "store.sock").exists()
    await _serve_briefly(tmp_path)


async def test_a_second_store_at_the_same_place_is_refused_and_the_first_stays(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        with pytest.raises(StartError, match="another store serves at"):
            await _serve_briefly(tmp_path)
        async with connected(server) as client:
            assert await complete(client, prompt(1, 5)) == (0, expected_answer(prompt(1, 5), 4))


async def test_a_path_that_is_too_long_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="can't be made") as raised:
        await _serve_briefly(tmp_path / ("x" * 120))
    assert "\n" not in str(raised.value)
    await _serve_briefly(tmp_path)


async def test_a_store_stops_while_requests_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    runner = GatedRunner()
    async with serving(tmp_path, runner) as server:
        client = await StoreClient.connect(server.socket_path)
        running = submit(client, prompt(1, 5), max_tokens=400)
        runner.let(1)
        assert isinstance(await running.next(), Started)
    with pytest.raises(StoreLost):
        await answer(running)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_fenced_is_a_message_of_its_own(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        peer = await RawPeer.connect(server)
        peer.send(Fence(account=ALICE, epoch=3))
        assert await peer.receive() == Fenced(account=ALICE, epoch=3, blocks=0, bytes=0)
