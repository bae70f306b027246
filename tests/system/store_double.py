"""A store without a model, as a process of its own; and the files through which a test and it speak.

Everything is what `saltern store` runs: its checks of options and model files, life descriptor, signals, server, engine
thread, engine. Only the model is a double that computes nothing, in a chosen time per step, so a start takes a fraction
of a second.

    python -m tests.system.store_double --socket … [--model …] [--block-tokens …] [--life-descriptor …]

After every command and step the engine's whole state is checked; what does not agree ends the process with status 1.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import msgspec

from cachestore import cli, engine
from cachestore.protocol import Abort, DType, Fence, Limits, Message, OpenAccount, Seal, Started, Submit
from cachestore.scheduler import Row, StepPlan
from tests.cachestore.support import RememberingRunner

# Where a store can be told to stand still, once.
POINTS = ("loading", "prefill", "decode", "abort", "last seal", "fence", "fenced")
# Tokens that a request has answered when it counts as decoding: its stream has begun.
DECODED_TOKENS = 3


class Entry(msgspec.Struct, frozen=True, omit_defaults=True):
    """What reached a store, or left it (`Started`), in order. `tokens` are a prompt's; `keys` are hexadecimal."""

    pid: int
    kind: str
    connection: int = 0
    request: int = 0
    account: str = ""
    epoch: int = 0
    tokens: list[int] = []
    keys: list[str] = []
    cached_tokens: int = 0


class Notes:
    """Files of one folder, the socket's: where to stand still, who stands still, and what came."""

    def __init__(self, folder: Path) -> None:
        self._wanted = folder / "stop-at"
        self._standing = folder / "stands-still"
        self._journal = folder / "journal"

    def stop_at(self, point: str) -> None:
        """The next store that reaches this point stands still there."""
        assert point in POINTS
        _write(self._wanted, point)

    def standing(self) -> int | None:
        """The process id of the store that stands still; None as long as none does."""
        return int(self._standing.read_text()) if self._standing.exists() else None

    def go_on(self) -> None:
        """Let it go on, or forget that it stood there when it was killed."""
        self._standing.unlink(missing_ok=True)
        self._wanted.unlink(missing_ok=True)

    def entries(self) -> list[Entry]:
        if not self._journal.exists():
            return []
        # A store that is killed may leave half a line.
        lines = self._journal.read_bytes().split(b"\n")[:-1]
        return [msgspec.json.decode(line, type=Entry) for line in lines if line.endswith(b"}")]

    def reached(self, point: str) -> None:
        """For the store: stand still if this is where a test wants it to."""
        if self._wanted.exists() and self._wanted.read_text() == point:
            self._wanted.unlink()
            _write(self._standing, str(os.getpid()))
            while self._standing.exists():
                time.sleep(0.002)

    def write(self, kind: str, **fields: Any) -> None:
        """For the store: one more entry. It is the kernel's before this returns, so no kill can lose it."""
        descriptor = os.open(self._journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(descriptor, msgspec.json.encode(Entry(os.getpid(), kind, **fields)) + b"\n")
        finally:
            os.close(descriptor)


class TimedRunner(RememberingRunner):
    """Takes `step_seconds` for a step, and stands still in prefill or in decode when it is told to."""

    def __init__(self, block_tokens: int, step_seconds: float, notes: Notes) -> None:
        super().__init__(block_tokens)
        self._step_seconds = step_seconds
        self._notes = notes

    def launch(self, rows: Sequence[Row]) -> list[engine.Sampled]:
        time.sleep(self._step_seconds)
        if any(row.start < row.sequence.prompt_tokens for row in rows):
            self._notes.reached("prefill")
        if any(row.sequence.output_tokens >= DECODED_TOKENS for row in rows):
            self._notes.reached("decode")
        return super().launch(rows)


class WatchedEngine(engine.Engine):
    """Writes down what comes, stands still where it is told to, and checks itself after everything it did."""

    def __init__(self, notes: Notes, emit: Callable[[int, Message], None], **arguments: Any) -> None:
        super().__init__(emit=self._pass_on, **arguments)
        self._notes = notes
        self._outgoing = emit

    def open_account(self, message: OpenAccount) -> None:
        self._notes.write("OpenAccount", account=message.account.hex(), epoch=message.epoch)
        super().open_account(message)

    def fence(self, connection: int, message: Fence) -> None:
        self._notes.write("Fence", connection=connection, account=message.account.hex(), epoch=message.epoch)
        self._notes.reached("fence")
        super().fence(connection, message)
        # Dropped, and `Fenced` is not sent yet.
        self._notes.reached("fenced")
        self.check()

    def submit(self, connection: int, message: Submit) -> None:
        self._notes.write(
            "Submit",
            connection=connection,
            request=message.request,
            account=message.account.hex(),
            epoch=message.epoch,
            tokens=memoryview(message.tokens).cast("I").tolist(),
            keys=_split(message.keys),
        )
        super().submit(connection, message)
        self.check()

    def seal(self, connection: int, message: Seal) -> None:
        if message.last:
            self._notes.reached("last seal")
        self._notes.write("Seal", connection=connection, request=message.request, keys=_split(message.keys))
        super().seal(connection, message)
        self.check()

    def abort(self, connection: int, message: Abort) -> None:
        self._notes.reached("abort")
        super().abort(connection, message)
        self.check()

    def compute(self, plan: StepPlan) -> None:
        super().compute(plan)
        self.check()

    def check(self) -> None:
        super().check()
        assert isinstance(self.runner, RememberingRunner)
        assert not self.runner.mistakes, self.runner.mistakes

    def _pass_on(self, connection: int, message: Message) -> None:
        if isinstance(message, Started):
            self._notes.write(
                "Started", connection=connection, request=message.request, cached_tokens=message.cached_tokens
            )
        self._outgoing(connection, message)


def set_constants(assignments: Sequence[str]) -> None:
    """`module.NAME=number`, each."""
    for assignment in assignments:
        name, value = assignment.split("=")
        module, _, constant = name.rpartition(".")
        before = getattr(importlib.import_module(module), constant)
        setattr(importlib.import_module(module), constant, type(before)(value))


def _split(keys: bytes) -> list[str]:
    return [keys[start : start + 32].hex() for start in range(0, len(keys), 32)]


def _write(path: Path, text: str) -> None:
    """All of it or nothing is seen."""
    temporary = path.with_suffix(".new")
    temporary.write_text(text)
    temporary.rename(path)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto", choices=["auto", *get_args(DType)])
    parser.add_argument("--block-tokens", type=int, default=16)
    parser.add_argument("--life-descriptor", type=int)
    parser.add_argument("--blocks", type=int, default=256)
    parser.add_argument("--step-seconds", type=float, default=0.001)
    parser.add_argument("--set", action="append", default=[], metavar="MODULE.NAME=NUMBER")
    parser.add_argument("--model-fingerprint", help="another than the model's own: one letter")
    options, _ = parser.parse_known_args()
    set_constants(options.set)
    if options.model_fingerprint:
        cli.model_fingerprint = lambda checkpoint: options.model_fingerprint.encode() * 32
    notes = Notes(options.socket.parent)

    def load(plan: cli.StorePlan, _: cli.StoreOptions) -> tuple[TimedRunner, Limits, int]:
        notes.reached("loading")
        limits = Limits(
            blocks=options.blocks,
            max_context_tokens=min(plan.checkpoint.max_position_tokens, options.blocks * options.block_tokens),
            max_running=32,
            step_tokens=64,
            vocabulary_tokens=plan.checkpoint.vocabulary_tokens,
        )
        return TimedRunner(options.block_tokens, options.step_seconds, notes), limits, 0

    cli._load = load  # type: ignore[assignment]
    cli.Engine = lambda runner, **arguments: WatchedEngine(notes, runner=runner, **arguments)  # type: ignore
    return cli.run_store(
        cli.StoreOptions(
            model=options.model,
            socket=options.socket,
            device=options.device,
            dtype=options.dtype,
            block_tokens=options.block_tokens,
            # Nothing is allocated; the check against free memory is passed.
            cache_memory_bytes=64 << 20,
            life_descriptor=options.life_descriptor,
        ),
        "double",
    )


if __name__ == "__main__":
    sys.exit(main())
