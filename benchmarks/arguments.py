"""Arguments of benchmarks that measure in rounds."""

from __future__ import annotations

import argparse
from collections.abc import Sequence


def rounds_parser(description: str | None, rounds: int) -> argparse.ArgumentParser:
    """`--rounds`, so many unless told otherwise, and `--json`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--json", action="store_true")
    return parser


def parse_rounds(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Ends the process for rounds in which nothing is measured."""
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds} measures nothing: 1 at least")
    return options
