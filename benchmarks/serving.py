"""How fast a server answers, and how it compares with another one over the same model.

    python -m benchmarks.serving --url URL [--key KEY] [--model NAME]
        [--peer-url URL --peer-key KEY --peer-model NAME] [--repetitions 5] [--seed TEXT] [--json]

With a peer both are asked the same prompts in turns, one idle while the other is measured. What is measured, and how
the peer is started: benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import httpx

from benchmarks.figures import Spread, table
from benchmarks.measured_server import MeasuredServer, WrongAnswer
from benchmarks.scenarios import SCENARIOS, Draw, Scenario

# What a server does once its answer has left is over before the other one is asked: vLLM polls for a second more.
PAUSE_SECONDS = 1.5
COMPARED_PROMPT = "Salt is made of sodium and"
COMPARED_TOKENS = 8

Samples = dict[str, list[float]]


@dataclass(frozen=True, slots=True)
class Run:
    """What was measured. `samples`: for each server in turn, by figure, one for each repetition."""

    servers: Sequence[MeasuredServer]
    samples: Sequence[Samples]
    warnings: Sequence[str]

    def report(self) -> dict[str, Any]:
        figures: dict[str, dict[str, Any]] = {}
        for server, samples in zip(self.servers, self.samples, strict=True):
            for name, each in samples.items():
                figures.setdefault(name, {})[server.name] = asdict(Spread.of(each)) | {"samples": each}
        for name, figure in figures.items():
            if len(figure) > 1 and not name.endswith(" tok"):
                figure["ratio"] = asdict(Spread.of_ratios(*(samples[name] for samples in self.samples)))
        servers = {server.name: {"url": server.url, "model": server.model} for server in self.servers}
        return {"servers": servers, "figures": figures, "warnings": list(self.warnings)}


async def measure(
    servers: Sequence[MeasuredServer], seed: str, repetitions: int, scenarios: Sequence[Scenario] = SCENARIOS
) -> Run:
    """Every scenario `repetitions` times on each server, after one time that is not counted.

    Raises:
        WrongAnswer: a server did something else than it was asked for.
        httpx.HTTPError: a server does not answer.
    """
    for server in servers:
        await server.open()
    warnings = []
    texts = {server.name: await server.greedy_text(COMPARED_PROMPT, COMPARED_TOKENS) for server in servers}
    if len(set(texts.values())) > 1:
        warnings.append(f"the servers go on differently after {COMPARED_PROMPT!r}, so it may not be one model: {texts}")
    samples: list[Samples] = [defaultdict(list) for _ in servers]
    for repetition in range(repetitions + 1):
        for scenario in scenarios:
            # Whatever the first does to the second, it does not always do it to the same one.
            for index in sorted(range(len(servers)), reverse=bool(repetition % 2)):
                await asyncio.sleep(PAUSE_SECONDS)
                figures = await scenario(servers[index], Draw(f"{seed}/{scenario.__name__}/{repetition}"))
                if repetition:
                    for name, value in figures.items():
                        samples[index][name].append(value)
    for server in servers:
        if server.joined_answers:
            warnings.append(
                f"{server.name}: in {server.joined_answers} of {server.answers} answers the first event had several "
                "tokens, so the first of them was there earlier than is shown"
            )
    return Run(servers, samples, warnings)


def text(report: dict[str, Any]) -> str:
    """The report for people: medians with the least and the greatest, and ratios of the first server to the second."""
    names = list(report["servers"])
    columns = [*names, "ratio"] if len(names) > 1 else names
    rows = [["", *[f"{column}: median (least - greatest)" for column in columns]]]
    for figure, each in report["figures"].items():
        rows.append([figure, *[_cell(each.get(column), 2 if column == "ratio" else 1) for column in columns]])
    return "\n".join([table(rows), *[f"warning: {warning}" for warning in report["warnings"]]])


def _cell(spread: dict[str, Any] | None, digits: int) -> str:
    if spread is None:
        return "-"
    return "{median:.{0}f} ({least:.{0}f} - {greatest:.{0}f})".format(digits, **spread)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True, help="of the server, with or without /v1")
    parser.add_argument("--key", help="an API key of it")
    parser.add_argument("--model", help="as it calls it (default: the first that it serves)")
    parser.add_argument("--peer-url", help="of another server of the same model")
    parser.add_argument("--peer-key")
    parser.add_argument("--peer-model")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--seed", default=secrets.token_hex(4), help="of the prompts; one that was used is cached")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    options = parser.parse_args(arguments)
    if options.repetitions < 1:
        parser.error(f"--repetitions {options.repetitions} measures nothing: 1 at least")
    if options.peer_url is None and (options.peer_key or options.peer_model):
        parser.error("--peer-key and --peer-model need --peer-url")
    return options


async def run(options: argparse.Namespace) -> dict[str, Any]:
    servers = [MeasuredServer("server", options.url, options.key, options.model)]
    if options.peer_url is not None:
        servers.append(MeasuredServer("peer", options.peer_url, options.peer_key, options.peer_model))
    try:
        measured = await measure(servers, options.seed, options.repetitions)
    finally:
        for server in servers:
            await server.close()
    return {"seed": options.seed, "repetitions": options.repetitions} | measured.report()


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        report = asyncio.run(run(options))
    except (WrongAnswer, httpx.HTTPError) as error:
        print(f"benchmarks.serving: {error or type(error).__name__}", file=sys.stderr)
        return 1
    print(json.dumps(report, indent=2) if options.json else text(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
