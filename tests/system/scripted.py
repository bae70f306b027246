"""A model that says what a test wants, when the test wants it; a tokenizer with words of the test; a real port.

The words are tokens that no text is tokenised to, because no merge leads to them: text is tokenised to bytes, so what
is generated in words always differs from what its text tokenises to.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from cachestore.engine import Sampled
from cachestore.protocol import Message, Submit
from cachestore.scheduler import Row
from cachestore.sequence import Sequence as StoreSequence
from gateway import process
from gateway.prompt.tokens import _BYTE_OF_CHARACTER
from tests.cachestore.support import RememberingRunner, next_token
from tests.gateway.prompt import tokenizers
from tests.system.in_process import BLOCK_TOKENS, PATIENCE_SECONDS, Customer, InProcess, in_process, until
from tests.system.wire import streamed, text_of

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
WORDS = ("he", "llo", " wor", "ld", " STOP", b"\xe4\xbd", b"\xa0!", b"\xff", "red")
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
START, END = 1, 2


@dataclass(frozen=True)
class Words:
    """A model directory whose vocabulary has these words beside bytes and control tokens; END ends an answer."""

    directory: Path
    words: tuple[bytes, ...]

    @classmethod
    def write(cls, directory: Path, *words: str | bytes, template: str = tokenizers.CHATML) -> Words:
        spelt = tuple(map(_bytes, words))
        character_of = {byte: character for character, byte in _BYTE_OF_CHARACTER.items()}
        pieces = ["".join(character_of[byte] for byte in word) for word in (*_single_bytes(), *spelt)]
        vocabulary = {piece: number for number, piece in enumerate([*SPECIAL, *pieces])}
        tokenizer = Tokenizer(models.BPE(vocabulary, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens(list(SPECIAL))
        tokenizers.write(directory, tokenizer, template=template, generation={"eos_token_id": END})
        return cls(directory, spelt)

    def ids(self, *words: str | bytes) -> list[int]:
        """The tokens of these words."""
        return [len(SPECIAL) + 256 + self.words.index(_bytes(word)) for word in words]


def byte_ids(text: str | bytes) -> list[int]:
    """What plain text is tokenised to."""
    return [len(SPECIAL) + byte for byte in _bytes(text)]


def _bytes(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text


def _single_bytes() -> list[bytes]:
    return [bytes([byte]) for byte in range(256)]


class ScriptedRunner(RememberingRunner):
    """Says what it is told to. After `close()` it computes a step only when it is let; after `open()` it never waits.

    Attributes:
        says: the next token of a sequence; None where none is left.
    """

    def __init__(self) -> None:
        super().__init__(BLOCK_TOKENS)
        self.says: Callable[[StoreSequence], int | None] = lambda sequence: next_token(sequence.tokens)
        self._gate = threading.Condition()
        self._is_closed = False
        self._came = self._allowed = 0

    def script(self, *answer: int) -> None:
        """Every request from now on is answered with these tokens, and with END after them."""
        self.says = lambda sequence: [*answer, END][min(sequence.output_tokens, len(answer))]

    @property
    def waiting(self) -> bool:
        """A step was planned and waits to be let."""
        return self._is_closed and self._came > self._allowed

    def close(self) -> None:
        with self._gate:
            self._is_closed, self._came, self._allowed = True, 0, 0

    def let(self) -> None:
        """Let one step through: the one that waits, or the next."""
        with self._gate:
            self._allowed += 1
            self._gate.notify_all()

    def open(self) -> None:
        with self._gate:
            self._is_closed = False
            self._gate.notify_all()

    def launch(self, rows: Sequence[Row]) -> list[Sampled]:
        with self._gate:
            if self._is_closed:
                self._came += 1
                may_go = self._gate.wait_for(self._may_go, PATIENCE_SECONDS)
                assert may_go, "the test forgot to let a step through"
        return super().launch(rows)

    def _may_go(self) -> bool:
        return not self.waiting

    def _compute(self, rows: Sequence[Row]) -> list[int | None]:
        super()._compute(rows)
        return [self.says(row.sequence) for row in rows if row.samples]


def tokens_of(submit: Submit) -> list[int]:
    return list(array("I", submit.tokens))


def events_of(inside: InProcess) -> list[Message]:
    """A list to which everything is added that the engine says from now on."""
    said: list[Message] = []
    emit = inside.engine._emit

    def noted(connection: int, message: Message) -> None:
        said.append(message)
        emit(connection, message)

    inside.engine._emit = noted
    return said


async def idle(inside: InProcess, seconds: float = PATIENCE_SECONDS) -> None:
    """Wait until the store knows of no request, then hold both sides to it: nothing is held, nothing is remembered."""
    engine, client = inside.engine, inside.gateway.link.connection().client
    await until(lambda: not client._requests, seconds)
    await inside.check(seconds)
    assert engine.pool.held == 0
    assert engine.pool.free + engine.pool.cached == engine.pool.total
    assert not engine.has_work


class Desk:
    """A customer of a model that is scripted."""

    def __init__(self, inside: InProcess, runner: ScriptedRunner, words: Words, customer: Customer) -> None:
        self.inside = inside
        self.runner = runner
        self.words = words
        self.customer = customer

    def script(self, *words: str | bytes) -> list[int]:
        tokens = self.words.ids(*words)
        self.runner.script(*tokens)
        return tokens

    async def ask(self, path: str, **fields: Any) -> Any:
        prompt = {"messages": [{"role": "user", "content": "x"}]} if path == CHAT else {"prompt": "x"}
        body = {"model": self.inside.model, "max_tokens": 20} | prompt | fields
        return await self.inside.http.post(path, json=body, headers=self.customer.headers)

    async def choice(self, path: str, **fields: Any) -> dict[str, Any]:
        """The only choice of an answer, sent whole."""
        answer = await self.ask(path, **fields)
        assert answer.status_code == 200, answer.text
        (choice,) = answer.json()["choices"]
        return dict(choice) | {"text": choice["text"] if path == TEXT else choice["message"]["content"]}

    async def text(self, path: str, **fields: Any) -> str:
        """Of the whole answer, which the stream must say alike."""
        whole = await self.choice(path, **fields)
        assert text_of(streamed(await self.ask(path, stream=True, **fields))) == whole["text"]
        return str(whole["text"])


@asynccontextmanager
async def desk(folder: Path, template: str = tokenizers.CHATML) -> AsyncIterator[Desk]:
    words, runner = Words.write(folder / "model", *WORDS, template=template), ScriptedRunner()
    async with in_process(folder, words.directory, runner=runner) as inside:
        yield Desk(inside, runner, words, await inside.customer("a"))
        await idle(inside)


@asynccontextmanager
async def listening(app: ASGIApp) -> AsyncIterator[str]:
    """The application behind the gateway's own HTTP server on a free port of loopback; its URL."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = process._server(app)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = server.force_exit = True
        with contextlib.suppress(asyncio.CancelledError):
            await serving
        listener.close()
