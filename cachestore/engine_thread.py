"""The thread that owns the engine: messages in by queue, messages out in batches, never waiting for a socket."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from cachestore.engine import Engine
from cachestore.protocol import (
    Abort,
    Drain,
    Drained,
    DropAccount,
    Fence,
    Flush,
    Message,
    OpenAccount,
    Probe,
    ProtocolError,
    Seal,
    Stats,
    Submit,
)


class Disconnected:
    """Put in the inbox of the engine when a connection is gone."""


class ReportDue:
    """Put in the inbox of the engine when a connection is to have its `StatsReport` of the second."""


class Violation:
    """Handed out instead of a message: the connection broke the protocol and is to be closed."""

    def __init__(self, error: ProtocolError) -> None:
        self.error = error


class Crashed:
    """Handed out last: the engine met a state that must not be, and computes nothing any more."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class _Stop:
    pass


Outgoing = list[tuple[int, Message | Violation | Crashed]]


class EngineThread:
    """Runs an engine.

    Args:
        make_engine: given `emit`, builds the engine; called in the caller's thread.
        deliver: takes what the engine said since the last call; called in the engine's thread, must not block.
    """

    def __init__(
        self, make_engine: Callable[[Callable[[int, Message], None]], Engine], deliver: Callable[[Outgoing], None]
    ) -> None:
        self._outbox: Outgoing = []
        self._inbox: queue.SimpleQueue[tuple[int, Message | Disconnected | ReportDue | _Stop]] = queue.SimpleQueue()
        self.engine = make_engine(lambda connection, message: self._outbox.append((connection, message)))
        self._deliver = deliver
        self._drain_waiters: list[int] = []
        # Connections that broke the protocol: what else they sent before they were closed is not looked at.
        self._violators: set[int] = set()
        self._last_step_ns: int | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._inbox.put((0, _Stop()))
        self._thread.join()

    def put(self, connection: int, message: Message | Disconnected | ReportDue) -> None:
        self._inbox.put((connection, message))

    def step_age_ms(self) -> int:
        """How long ago the engine computed something or was idle; 0 when it has no work."""
        last = self._last_step_ns
        return 0 if last is None else (time.monotonic_ns() - last) // 1_000_000

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:
            self._deliver([(0, Crashed(error))])

    def _serve(self) -> None:
        engine = self.engine
        while self._take_messages():
            engine.expire()
            if engine.has_work:
                # Set before the first step too: one that never ends must be seen to age.
                self._last_step_ns = self._last_step_ns or time.monotonic_ns()
                plan = engine.plan()
                # What was fenced, rejected or admitted is said now, not after the step.
                self._flush()
                engine.compute(plan)
                if plan.rows:
                    self._last_step_ns = time.monotonic_ns()
            if not engine.has_work:
                self._last_step_ns = None
                self._outbox += [(connection, Drained()) for connection in self._drain_waiters]
                self._drain_waiters.clear()
            self._flush()

    def _flush(self) -> None:
        if self._outbox:
            outgoing, self._outbox[:] = list(self._outbox), []
            self._deliver(outgoing)

    def _take_messages(self) -> bool:
        """Apply all that has come; waits for the next message only when there is nothing to compute."""
        timeout: float | None = 0.0
        if not self.engine.has_work:
            deadline_ns = self.engine.next_deadline_ns()
            timeout = None if deadline_ns is None else max(0.0, (deadline_ns - time.monotonic_ns()) / 1e9)
        while True:
            try:
                connection, message = self._inbox.get(timeout=timeout) if timeout != 0.0 else self._inbox.get_nowait()
            except queue.Empty:
                return True
            if isinstance(message, _Stop):
                return False
            self._apply(connection, message)
            timeout = 0.0

    def _apply(self, connection: int, message: Message | Disconnected | ReportDue) -> None:
        if isinstance(message, Disconnected):
            self._violators.discard(connection)
            self.engine.disconnect(connection)
            return
        if isinstance(message, ReportDue):
            self._outbox.append((connection, self.engine.stats(pushed=True)))
            return
        if connection in self._violators:
            return
        try:
            match message:
                case Submit():
                    self.engine.submit(connection, message)
                case Seal():
                    self.engine.seal(connection, message)
                case Abort():
                    self.engine.abort(connection, message)
                case OpenAccount():
                    self.engine.open_account(message)
                case Fence():
                    self.engine.fence(connection, message)
                case DropAccount():
                    self.engine.drop_account(connection, message)
                case Flush():
                    self.engine.flush(connection, message)
                case Probe():
                    self.engine.probe(connection, message)
                case Stats(account=None):
                    self._outbox.append((connection, self.engine.stats(pushed=False)))
                case Stats(account=bytes() as account):
                    self._outbox.append((connection, self.engine.account_report(account)))
                case Drain():
                    self.engine.draining = True
                    self._drain_waiters.append(connection)
                case _:
                    raise ProtocolError(f"a {type(message).__name__} is not for the engine")
        except ProtocolError as error:
            self._violators.add(connection)
            self._outbox.append((connection, Violation(error)))
