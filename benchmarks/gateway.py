"""What the gateway costs: everything of a request that is not the store.

    python -m benchmarks.gateway [--rates 100 500] [--seconds 5] [--rounds 3] [--model DIR] [--json]

`saltern gateway` runs as it is, with its database, keys and tokenizer, over a store that answers at once
(`benchmarks.store_double`). The same load goes to the least ASGI application there is (`benchmarks.echo`), in turns.
Generator, gateway and store double share the machine's cores, and nothing is subtracted: benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import resource
import statistics
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

import httpx
import uvloop

from benchmarks.figures import Spread, percentile, table
from benchmarks.load import Load, LoadError, Outcome, arrivals
from benchmarks.processes import Measured, ProcessError, free_port, running
from cachestore import default_model

CHAT = "/v1/chat/completions"
MAX_TOKENS = 16
PROMPT_TOKENS = range(200, 301)
PROMPT_WORDS = 230
# One tenant's prompts are tokenised one after the other.
TENANTS = 8
STARTS = 5
CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64)
SATURATION_SECONDS = 2.0
ECHO_OPTIONS = (
    *("--loop", "uvloop", "--http", "httptools", "--lifespan", "off"),
    *("--no-access-log", "--timeout-keep-alive", "75"),
)
WARM_UP_PER_SECOND, WARM_UP_SECONDS = 50.0, 2.0
WORDS = (
    *("salt", "water", "sea", "stone", "river", "mountain", "morning", "evening", "bread", "table", "window", "garden"),
    *("letter", "music", "number", "question", "answer", "paper", "glass", "market", "winter", "summer", "story"),
)


class WrongSetUp(Exception):
    """The gateway does something else than what is to be measured: one line."""


@dataclass(frozen=True, slots=True)
class Target:
    """Something that is asked: a process, its port, and the keys that open it."""

    name: str
    process: Measured
    port: int
    model: str
    keys: Sequence[str]


class Chats:
    """Requests as they go over the wire: no two have a prompt in common, so no conversation is ever remembered."""

    def __init__(self, target: Target, seed: str) -> None:
        self._target = target
        self._random = random.Random(seed)
        self._keys = itertools.cycle(target.keys)

    def request(self, *, is_streamed: bool) -> bytes:
        body = json.dumps(self.body(is_streamed=is_streamed), separators=(",", ":")).encode()
        head = (
            f"POST {CHAT} HTTP/1.1\r\nhost: 127.0.0.1:{self._target.port}\r\n"
            f"authorization: Bearer {next(self._keys)}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    def body(self, *, is_streamed: bool) -> dict[str, Any]:
        words = " ".join(self._random.choices(WORDS, k=PROMPT_WORDS))
        messages = [
            {"role": "system", "content": f"You are assistant {self._random.getrandbits(32)} and answer in few words."},
            {"role": "user", "content": words},
        ]
        body = {"model": self._target.model, "messages": messages, "max_tokens": MAX_TOKENS}
        return body | ({"stream": True, "stream_options": {"include_usage": True}} if is_streamed else {})

    def endless(self, *, is_streamed: bool) -> Iterator[bytes]:
        while True:
            yield self.request(is_streamed=is_streamed)


def environment() -> dict[str, str]:
    """Ours, without settings of Saltern or of telemetry."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("SALTERN_", "OTEL_"))}


def is_ready(port: int) -> bool:
    connection = HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()


def make_keys(data_dir: Path) -> list[str]:
    """A key for each of a few new tenants."""
    url = (data_dir / "admin-url").read_text().strip()
    secret = (data_dir / "admin-key").read_text().strip()
    keys = []
    with httpx.Client(base_url=url, headers={"authorization": f"Bearer {secret}"}, trust_env=False) as admin:
        for number in range(TENANTS):
            tenant = admin.post("/admin/v1/tenants", json={"name": f"tenant-{number}"}).raise_for_status().json()
            key = admin.post(f"/admin/v1/tenants/{tenant['id']}/keys", json={}).raise_for_status().json()
            keys.append(key["secret"])
    return keys


def check(target: Target) -> int:
    """One request, held to what is to be measured; answers its prompt's tokens.

    Raises:
        WrongSetUp: it is something else.
    """
    response = httpx.post(
        f"http://127.0.0.1:{target.port}{CHAT}",
        json=Chats(target, "check").body(is_streamed=False),
        headers={"authorization": f"Bearer {target.keys[0]}"},
        trust_env=False,
    )
    if response.status_code != 200:
        raise WrongSetUp(f"the gateway answered {response.status_code}: {response.text[:300]}")
    usage = response.json().get("usage")
    if usage is None:
        raise WrongSetUp("the gateway's answer has no usage")
    prompt_tokens = int(usage["prompt_tokens"])
    if prompt_tokens not in PROMPT_TOKENS or usage["completion_tokens"] != MAX_TOKENS:
        raise WrongSetUp(f"{prompt_tokens} prompt tokens and {usage['completion_tokens']} answered: not what was meant")
    return prompt_tokens


Figures = dict[str, float]
Run = Callable[[Load, Chats], Awaitable[Outcome]]


def summary(outcome: Outcome, cpu_seconds: float) -> Figures:
    """What is said of one load. Times are milliseconds from when a request was due."""
    requests = len(outcome.whole)
    return {
        "answered per s": requests / outcome.seconds,
        "first byte p50": 1e3 * percentile(outcome.first, 0.5),
        "p50": 1e3 * percentile(outcome.whole, 0.5),
        "p99": 1e3 * percentile(outcome.whole, 0.99),
        "sent late p99": 1e3 * percentile(outcome.late, 0.99),
        "cpu ms per request": 1e3 * cpu_seconds / requests,
        "events per answer": statistics.fmean(outcome.events),
        "failed": outcome.failed,
    }


# Of these it says something how much more the gateway has than the echo.
COMPARED = ("first byte p50", "p50", "p99", "cpu ms per request")


class Pair:
    """Loads on both targets in turns; which is first changes every time."""

    def __init__(self, targets: Sequence[Target], loads: Sequence[Load]) -> None:
        self._both = list(zip(targets, loads, strict=True))
        self._turn = 0

    async def measure(self, run: Run) -> dict[str, Figures]:
        """Figures by target."""
        self._turn += 1
        figures = {}
        for target, load in self._both[:: 1 if self._turn % 2 else -1]:
            chats = Chats(target, f"{target.name}/{self._turn}")
            before_seconds = target.process.cpu_seconds()
            outcome = await run(load, chats)
            figures[target.name] = summary(outcome, target.process.cpu_seconds() - before_seconds)
        return figures

    async def rounds(self, run: Run, count: int) -> dict[str, dict[str, Spread]]:
        """Spreads over `count` rounds, by target and figure, and of what the first target has more than the second."""
        measured = [await self.measure(run) for _ in range(count)]
        gateway, echo = (target.name for target, _ in self._both)
        for figures in measured:
            figures["difference"] = {name: figures[gateway][name] - figures[echo][name] for name in COMPARED}
        return {
            target: {name: Spread.of([figures[target][name] for figures in measured]) for name in names}
            for target, names in measured[0].items()
        }


def at_rate(per_second: float, seconds: float, is_streamed: bool) -> Run:
    async def run(load: Load, chats: Chats) -> Outcome:
        due = arrivals(per_second, seconds, f"{per_second}")
        return await load.at_times([chats.request(is_streamed=is_streamed) for _ in due], due)

    return run


def at_concurrency(clients: int, is_streamed: bool) -> Run:
    async def run(load: Load, chats: Chats) -> Outcome:
        return await load.at_once(chats.endless(is_streamed=is_streamed), clients, SATURATION_SECONDS)

    return run


async def measure(targets: Sequence[Target], options: argparse.Namespace) -> dict[str, Any]:
    """All loads, as `{"open": [...], "closed": [...]}`.

    Raises:
        LoadError: there are no answers.
    """
    loads = [Load(target.port) for target in targets]
    pair = Pair(targets, loads)
    measured: dict[str, Any] = {"open": [], "closed": []}
    try:
        for is_streamed in (False, True):
            answer = "streamed" if is_streamed else "whole"
            await pair.measure(at_rate(WARM_UP_PER_SECOND, WARM_UP_SECONDS, is_streamed))
            for rate in options.rates:
                spreads = await pair.rounds(at_rate(rate, options.seconds, is_streamed), options.rounds)
                measured["open"].append({"answer": answer, "per_second": rate} | _plain(spreads))
            for clients in CONCURRENCIES:
                spreads = await pair.rounds(at_concurrency(clients, is_streamed), options.rounds)
                measured["closed"].append({"answer": answer, "clients": clients} | _plain(spreads))
    finally:
        for load in loads:
            load.close()
    return measured


def _plain(spreads: dict[str, dict[str, Spread]]) -> dict[str, Any]:
    return {target: {name: asdict(spread) for name, spread in each.items()} for target, each in spreads.items()}


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Start everything, measure, end everything.

    Raises:
        ProcessError, WrongSetUp, LoadError: one line why there are no figures.
    """
    model = options.model or default_model.ensure()
    with tempfile.TemporaryDirectory(prefix="saltern-") as name, ExitStack() as stack:
        folder = Path(name)
        socket, data_dir = folder / "store.sock", folder / "data"
        command = [sys.executable, "-m", "benchmarks.store_double", "--socket", str(socket), "--model", str(model)]
        store = stack.enter_context(running(command, folder / "store.log", environment()))
        store.wait_until(socket.exists, "listening")

        port, admin_port, echo_port = free_port(), free_port(), free_port()
        ports = ["--port", str(port), "--admin-port", str(admin_port)]
        command = [sys.executable, "-m", "gateway.cli", "gateway", "--data-dir", str(data_dir), *ports]
        command += ["--socket", str(socket)]
        starts = []
        for _ in range(STARTS):
            with running(command, folder / "gateway.log", environment()) as process:
                starts.append(process.wait_until(lambda: is_ready(port), "ready"))
        gateway = stack.enter_context(running(command, folder / "gateway.log", environment()))
        gateway.wait_until(lambda: is_ready(port), "ready")
        ready_bytes = gateway.resident_bytes()

        command = [sys.executable, "-m", "uvicorn", "benchmarks.echo:app", "--port", str(echo_port), *ECHO_OPTIONS]
        echo = stack.enter_context(running(command, folder / "echo.log", environment()))
        echo.wait_until(lambda: is_ready(echo_port), "listening")

        keys = make_keys(data_dir)
        targets = [
            Target("gateway", gateway, port, model.name, keys),
            Target("echo", echo, echo_port, model.name, keys),
        ]
        prompt_tokens = check(targets[0])
        measured = uvloop.run(measure(targets, options))
        return measured | {
            "prompt_tokens": prompt_tokens,
            "first_start_seconds": starts[0],
            "start_seconds": asdict(Spread.of(starts[1:])),
            "resident_bytes": {"ready": ready_bytes, "after the load": gateway.resident_bytes()},
        }


def text(report: dict[str, Any]) -> str:
    """The report for people: medians over the rounds, milliseconds."""
    start, resident = report["start_seconds"], report["resident_bytes"]
    lines = [
        f"prompts of about {report['prompt_tokens']} tokens, {MAX_TOKENS} tokens answered; milliseconds, medians",
        "",
        _rows(report["open"], "per_second", "requests/s"),
        "",
        _rows(report["closed"], "clients", "clients"),
        "",
        *[f"{answer}: {best}" for answer in ("whole", "streamed") if (best := _saturation(report["closed"], answer))],
        f"start: first {report['first_start_seconds']:.2f} s, later {start['median']:.2f} s "
        f"({start['least']:.2f} - {start['greatest']:.2f})",
        *[f"resident memory, {when}: {size / 2**20:.0f} MiB" for when, size in resident.items()],
    ]
    return "\n".join(lines)


def _rows(loads: Sequence[dict[str, Any]], key: str, heading: str) -> str:
    names = list(loads[0]["gateway"])
    rows = [["answer, target", heading, *names]]
    for load in loads:
        for target in ("gateway", "echo", "difference"):
            figures = load[target]
            cells = [f"{figures[name]['median']:.2f}" if name in figures else "-" for name in names]
            rows.append([f"{load['answer']}, {target}", str(load[key]), *cells])
    return table(rows)


def _saturation(loads: Sequence[dict[str, Any]], answer: str) -> str:
    def reached(load: dict[str, Any]) -> float:
        return float(load["gateway"]["answered per s"]["median"])

    best = max((load for load in loads if load["answer"] == answer), key=reached)
    return f"at most {reached(best):.0f} requests/s, with {best['clients']} clients"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="+", default=[100, 500], metavar="R", help="requests per second")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each round at a rate")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", type=Path, help="a folder in Hugging Face format (default: the default model)")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    options = parser.parse_args(arguments)
    if options.rounds < 1 or any(round(rate * options.seconds) < 1 for rate in options.rates):
        parser.error("nothing to measure: a round at least, and a request in each")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    # As many connections as requests may wait at once.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    try:
        report = run(options)
    except (ProcessError, WrongSetUp, LoadError) as error:
        print(f"benchmarks.gateway: {error}", file=sys.stderr)
        return 1
    print(json.dumps(report, indent=2) if options.json else text(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
