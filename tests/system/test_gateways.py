"""Several gateways on one database and one store: what one does is true for all, and each may go without the others."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from cachestore.protocol import PROTOCOL
from gateway.prompt.detokenize import Detokenizer
from gateway.prompt.model_files import read_model_files
from gateway.prompt.tokens import Tokenizer
from gateway.tenants.database import Database
from gateway.tenants.directory import Directory
from gateway.tenants.registry import Registry
from tests.cachestore.support import expected_answer
from tests.system.insider import Insider, block_names
from tests.system.served import Running, eventually, running, store_alone
from tests.system.store_double import Entry
from tests.system.support import Tenant, random_prompt
from tests.system.wire import DONE, events, refusal

STEP_SECONDS = "0.005"


@dataclass
class Pair:
    """Two gateways, and a store that nobody supervises. Every test leaves all three serving."""

    first: Running
    second: Running
    store: subprocess.Popen[bytes]
    stack: ExitStack

    def start_store(self) -> None:
        """Another, after the last one ended."""
        self.store = self.stack.enter_context(store_alone(self.first.data_dir, "--step-seconds", STEP_SECONDS))

    def tenants(self) -> tuple[Tenant, Tenant]:
        """One new tenant, as each gateway's client."""
        tenant = self.first.tenant()
        return tenant, self.seen_by(self.second, tenant)

    @staticmethod
    def seen_by(gateway: Running, tenant: Tenant) -> Tenant:
        return Tenant(gateway, tenant.id, tenant.name, tenant.key)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, default_model: Path) -> Iterator[Pair]:
    """Both are started at the same moment, on a directory that is empty."""
    data_dir = tmp_path_factory.mktemp("gateways") / "data"
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        store = stack.enter_context(store_alone(data_dir, "--step-seconds", STEP_SECONDS))
        starting = [pool.submit(stack.enter_context, running(data_dir, "gateway")) for _ in range(2)]
        first, second = (gateway.result() for gateway in starting)
        for gateway in (first, second):
            gateway.wait_until_ready()
        yield Pair(first, second, store, stack)


class Stream:
    """A stream that is read as it comes, while the test goes on."""

    def __init__(self, pool: ThreadPoolExecutor, tenant: Tenant, prompt: list[int], max_tokens: int) -> None:
        self.received = b""
        self.ended_at = 0.0
        body = {"model": tenant.server.model, "prompt": prompt, "max_tokens": max_tokens}
        self._body = body | {"stream": True, "ignore_eos": True}
        self._tenant = tenant
        self.ended: Future[None] = pool.submit(self._read)
        eventually(lambda: b"data:" in self.received, "the stream begins")

    def _read(self) -> None:
        http, headers = self._tenant.server.http, self._tenant.headers
        with http.stream("POST", "/v1/completions", json=self._body, headers=headers) as response:
            for piece in response.iter_raw():
                self.received += piece
        self.ended_at = time.monotonic()

    def last(self, seconds: float = 30) -> Any:
        """Its last event, once it has ended."""
        self.ended.result(seconds)
        return events(self.received)[-1]


def test_what_one_gateway_changes_is_true_for_the_other_at_once(pair: Pair) -> None:
    here, there = pair.tenants()
    prompt = random_prompt("two gateways", 33)

    # A key made at one opens the other, and its cache is the same.
    assert [here.cached_tokens(prompt), there.cached_tokens(prompt), here.cached_tokens(prompt)] == [0, 32, 32]
    # A name taken at one is taken at the other.
    assert pair.second.admin.post("/admin/v1/tenants", json={"name": here.name}).status_code == 409

    # A rotation through either is a rotation.
    for rotating, asking in ((here, there), (there, here)):
        assert rotating.rotate()["dropped"]["blocks"] == 2
        assert [asking.cached_tokens(prompt), asking.cached_tokens(prompt)] == [0, 32]
        assert rotating.cached_tokens(prompt) == 32

    # A key deleted at one is refused at the other; the tenant's other key is not.
    made = pair.second.admin.post(f"/admin/v1/tenants/{here.id}/keys", json={}).json()
    other = Tenant(pair.first, here.id, here.name, made["secret"])
    assert other.cached_tokens(prompt) == 32
    assert pair.second.admin.delete(f"/admin/v1/tenants/{here.id}/keys/{made['id']}").status_code == 204
    refusal(other.complete(prompt), 401)
    assert here.cached_tokens(prompt) == 32

    # So is all of a tenant that one deletes.
    assert pair.second.admin.delete(f"/admin/v1/tenants/{here.id}").status_code == 204
    refusal(here.complete(prompt), 401)


def test_requests_of_two_gateways_are_never_taken_for_each_other(pair: Pair, default_model: Path) -> None:
    tenants = [*pair.tenants(), *pair.tenants()]
    prompts = [random_prompt(f"whose {number}", 20 + number) for number in range(24)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        responses = list(
            pool.map(
                lambda numbered: tenants[numbered[0] % 4].complete(numbered[1], max_tokens=30, ignore_eos=True),
                enumerate(prompts),
            )
        )
    tokenizer = Tokenizer(read_model_files(default_model))
    for prompt, response in zip(prompts, responses, strict=True):
        detokenizer = Detokenizer(tokenizer)
        expected = detokenizer.push(expected_answer(prompt, 30)) + detokenizer.finish()
        assert response.json()["choices"][0]["text"] == expected
    assert len({response.json()["id"] for response in responses}) == len(prompts)
    assert len({response.headers["x-request-id"] for response in responses}) == len(prompts)
    # The store did have to tell them apart: both counted their requests alike.
    numbers: dict[int, set[int]] = {}
    for entry in pair.first.notes.entries():
        if entry.tokens in prompts:
            numbers.setdefault(entry.connection, set()).add(entry.request)
    one, two = numbers.values()
    assert len(one) == len(two) == len(prompts) // 2
    assert one & two

    # What both make at the same time has ids of its own.
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda number: (pair.first, pair.second)[number % 2].tenant(), range(16)))
    assert len({tenant.id for tenant in made} | {tenant.key for tenant in made}) == 32


def test_a_killed_gateway_takes_nothing_of_the_others_with_it(pair: Pair) -> None:
    there = pair.second.tenant()
    with running(pair.first.data_dir, "gateway") as third, ThreadPoolExecutor(4) as pool:
        third.wait_until_ready()
        here = Pair.seen_by(third, there)
        staying = Stream(pool, there, random_prompt("stays", 33), 400)
        going = [Stream(pool, here, random_prompt(f"goes {number}", 33), 1000) for number in range(3)]
        assert pair.second.stats().running == 4

        os.kill(third.process.pid, signal.SIGKILL)
        eventually(lambda: pair.second.stats().running == 1, "its requests have ended", 1)
        # What one stream holds: its prompt and what it answered.
        assert pair.second.stats().held_blocks <= (33 + 400) // 16 + 1
        for stream in going:
            assert isinstance(stream.ended.exception(1), httpx.TransportError)
        assert not staying.ended.done()
        assert staying.last() == DONE
        assert len(events(staying.received)) > 200
    report = pair.second.wait_until_idle()
    assert report.free_blocks + report.cached_blocks == report.total_blocks
    assert there.cached_tokens(random_prompt("stays", 33)) == 32


def test_line_36_a_stalled_gateway_frees_its_blocks_within_five_seconds(pair: Pair) -> None:
    here, there = pair.tenants()
    with ThreadPoolExecutor(2) as pool:
        staying = Stream(pool, there, random_prompt("goes on", 33), 900)
        stalled = Stream(pool, here, random_prompt("stalls", 33), 900)
        try:
            os.kill(pair.first.process.pid, signal.SIGSTOP)
            seconds = eventually(lambda: pair.second.stats().running == 1, "its request has ended", 5)
            print(f"freed after {seconds:.2f} s")
            assert not staying.ended.done()
        finally:
            os.kill(pair.first.process.pid, signal.SIGCONT)
        # Awake again: its client is told, and the next request is served.
        assert stalled.last(2)["error"]["type"] == "service_unavailable_error"
        pair.first.wait_until_ready()
        assert here.complete("Awake").status_code == 200
        assert staying.last() == DONE


def test_line_36_a_dead_store_fails_its_requests_within_a_second_at_every_gateway(pair: Pair) -> None:
    here, there = pair.tenants()
    with ThreadPoolExecutor(2) as pool:
        streams = [Stream(pool, tenant, random_prompt("dies", 33), 1200) for tenant in (here, there)]
        killed_at = time.monotonic()
        pair.store.kill()
        for stream in streams:
            assert stream.last(1)["error"]["type"] == "service_unavailable_error"
            assert stream.ended_at - killed_at < 1
    for gateway in (pair.first, pair.second):
        assert not gateway.ready()
        assert gateway.process.poll() is None
    pair.start_store()
    for gateway, tenant in ((pair.first, here), (pair.second, there)):
        gateway.wait_until_ready()
        assert tenant.complete("Again").status_code == 200


def test_line_12_a_gateway_that_dies_between_commit_and_drop_leaves_nothing_reachable(pair: Pair) -> None:
    """The store, and another gateway, live on with the old epoch's blocks in the index."""
    asks, silent = pair.tenants()[1], pair.tenants()[1]
    prompt = random_prompt("line 12", 33)
    for tenant in (asks, silent):
        assert [tenant.cached_tokens(prompt), tenant.cached_tokens(prompt)] == [0, 32]
    before = pair.second.wait_until_idle()

    async def commit_and_die() -> None:
        """All that a gateway does up to the commit, and nothing after it."""
        database = await Database.open(f"sqlite+aiosqlite:///{pair.first.data_dir / 'saltern.db'}")
        directory = await Directory.open(database, pair.first.data_dir / "kek")
        for tenant in (asks, silent):
            assert await Registry(database, directory.keyring).rotate(tenant.id)
        await database.close()

    def states(tenant: Tenant) -> list[str]:
        salts = pair.second.admin.get(f"/admin/v1/tenants/{tenant.id}/salts").json()["data"]
        return [salt["state"] for salt in salts]

    asyncio.run(commit_and_die())
    assert pair.second.stats().cached_blocks == before.cached_blocks
    assert states(asks) == states(silent) == ["dropping", "active"]

    # Who asks is cold under the new epoch, which is enough to drop the old one.
    assert asks.cached_tokens(prompt) == 0
    assert pair.second.wait_until_idle().cached_blocks == before.cached_blocks
    assert asks.cached_tokens(prompt) == 32
    # The next gateway that connects sends what is pending before anything else.
    last = len(pair.second.notes.entries())
    with running(pair.first.data_dir, "gateway") as third:
        third.wait_until_ready()
        assert states(asks) == states(silent) == ["dropped", "active"]
        came = [entry for entry in third.notes.entries()[last:] if entry.kind == "Fence"]
        assert {entry.account for entry in came} == {_account(pair, asks), _account(pair, silent)}
        assert pair.second.stats().cached_blocks == before.cached_blocks - 2
        seen = Pair.seen_by(third, silent)
        assert [seen.cached_tokens(prompt), seen.cached_tokens(prompt)] == [0, 32]
        assert Pair.seen_by(third, asks).cached_tokens(prompt) == 32


def _account(pair: Pair, tenant: Tenant) -> str:
    return Insider(pair.second).secrets(tenant).account.hex()


def test_b016_names_are_the_same_in_every_process_and_outlive_a_gateway(
    tmp_path: Path, default_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data_dir, prompt = tmp_path / "data", random_prompt("b016", 40)
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    found, expected, tenant = [], [], None
    with store_alone(data_dir):
        for hash_seed in ("2", "random", "random"):
            monkeypatch.setenv("PYTHONHASHSEED", hash_seed)
            with running(data_dir, "gateway") as gateway:
                gateway.wait_until_ready()
                tenant = Pair.seen_by(gateway, tenant) if tenant else gateway.tenant()
                found.append(tenant.cached_tokens(prompt))
                expected = block_names(Insider(gateway).secrets(tenant).salt, Insider(gateway).welcome(), prompt)
    assert found == [0, 32, 32]
    assert tenant is not None
    # And for another store with another seed.
    with store_alone(data_dir), running(data_dir, "gateway") as gateway:
        gateway.wait_until_ready()
        Pair.seen_by(gateway, tenant).cached_tokens(prompt)
        submitted = [entry.keys for entry in gateway.notes.entries() if entry.kind == "Submit"]
    assert submitted == [[name.hex() for name in expected]] * 4


# --- B192: what does not fit together is refused, and what comes back as another is treated as another


@contextmanager
def other_tokenizer(model: Path, folder: Path) -> Iterator[Path]:
    """The same model, its tokenizer's file another by one space."""
    folder.mkdir()
    for file in model.iterdir():
        if file.name == "tokenizer.json":
            (folder / file.name).write_bytes(file.read_bytes() + b" ")
        else:
            (folder / file.name).symlink_to(file)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def lone(tmp_path_factory: pytest.TempPathFactory, default_model: Path) -> Iterator[Running]:
    """A gateway that insists on the tokenizer of the default model; no store."""
    with running(tmp_path_factory.mktemp("lone") / "data", "gateway", "--model", str(default_model)) as gateway:
        yield gateway


def test_b192_what_does_not_fit_is_refused_naming_both_sides(
    lone: Running, tmp_path: Path, default_model: Path
) -> None:
    gateway, data_dir = lone, lone.data_dir
    following = PROTOCOL + 1
    with other_tokenizer(default_model, tmp_path / "other") as other:
        tenant = gateway.tenant()
        unfit = {
            f"this store speaks protocol {following}, the gateway {PROTOCOL}": [
                "--set",
                f"cachestore.server.PROTOCOL={following}",
            ],
            "this store expects key version 2, not 1": ["--set", "cachestore.server.KEY_VERSION=2"],
            f"{default_model}: the tokenizer files have fingerprint": ["--model", str(other)],
        }
        for said, options in unfit.items():
            with store_alone(data_dir, *options):
                eventually(lambda said=said: said in gateway.log(), said)
                assert not gateway.ready()
                refusal(tenant.complete("Unfit"), 503)
        assert f"the store's in {other} have" in gateway.log()
        # Each was said once, not with every try.
        assert gateway.log().count("the store can't be used") == len(unfit)
        assert gateway.notes.entries() == []
        with store_alone(data_dir, "--model", str(default_model)):
            gateway.wait_until_ready()
            assert tenant.complete("Fit").status_code == 200
            came = {"OpenAccount", "Submit", "Started", "Seal"}
            eventually(lambda: {entry.kind for entry in gateway.notes.entries()} == came, "all of one request came")


def test_b192_a_store_that_comes_back_as_another_is_named_for_afresh(lone: Running) -> None:
    gateway, data_dir = lone, lone.data_dir
    tenant = gateway.tenant()
    salt = Insider(gateway).secrets(tenant).salt
    question = {"role": "user", "content": "Tell me all of " + "salt and water and " * 12}

    def chat(messages: list[dict[str, str]]) -> tuple[str, int, Entry]:
        """The answer, its cached tokens, and what reached the store."""
        body = {"model": gateway.model, "messages": messages, "max_tokens": 40, "ignore_eos": True}
        response = gateway.http.post("/v1/chat/completions", json=body, headers=tenant.headers)
        assert response.status_code == 200, response.text
        *_, submitted = [entry for entry in gateway.notes.entries() if entry.kind == "Submit"]
        usage = response.json()["usage"]
        text = response.json()["choices"][0]["message"]["content"]
        return text, usage["prompt_tokens_details"]["cached_tokens"], submitted

    def named_as_it_should_be(submitted: Entry, block_tokens: int) -> bool:
        welcome = Insider(gateway).welcome()
        assert welcome.geometry.block_tokens == block_tokens
        names = block_names(salt, welcome, submitted.tokens)
        return [name.hex() for name in names] == submitted.keys and len(names) == len(submitted.tokens) // block_tokens

    with store_alone(data_dir):
        gateway.wait_until_ready()
        text, _, first = chat([question])
        conversation = [question, {"role": "assistant", "content": text}, {"role": "user", "content": "And then?"}]
        generated = expected_answer(first.tokens, 40)
        _, cached, second = chat(conversation)
        # Remembered as it was generated, and found.
        remembered = first.tokens + generated
        assert second.tokens[: len(remembered)] == remembered
        assert cached == (len(remembered) - 1) // 16 * 16
        assert named_as_it_should_be(second, 16)
    with store_alone(data_dir):
        gateway.wait_until_ready()
        # The same model: conversations are kept, blocks are not.
        _, cached, again = chat(conversation)
        assert (again.tokens, again.keys, cached) == (second.tokens, second.keys, 0)
    seen = set(second.keys)
    for options, block_tokens in (
        (["--block-tokens", "32"], 32),
        (["--block-tokens", "32", "--model-fingerprint", "x"], 32),
        (["--block-tokens", "32", "--model-fingerprint", "x", "--dtype", "bf16"], 32),
    ):
        with store_alone(data_dir, *options):
            gateway.wait_until_ready()
            _, cached, fresh = chat(conversation)
            # Nothing of the other model's: neither what it answered nor any name.
            assert fresh.tokens[: len(remembered)] != remembered
            assert not seen & set(fresh.keys)
            assert named_as_it_should_be(fresh, block_tokens)
            assert cached == 0
            # And found under the new names.
            _, cached, repeated = chat(conversation)
            assert repeated.keys == fresh.keys
            assert cached == (len(fresh.tokens) - 1) // block_tokens * block_tokens > 0
            seen |= set(fresh.keys)
    assert "Traceback" not in gateway.log()
