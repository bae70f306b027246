"""`POST /v1/chat/completions`, `POST /v1/completions` and `GET /v1/models`.

The body is read and checked in the handler; what it returns does the rest within the response, because only there can
a client's disconnect be noticed while the request waits, from the first await on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Annotated, Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway import generation
from gateway.bill import Bill, Bounds, context_length_exceeded, granted_tokens
from gateway.choices import Choices, Piece
from gateway.generation import Admitted, Answer
from gateway.http import sse
from gateway.http.answers import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    Delta,
    FinishReason,
    Model,
    ModelList,
    TextChoice,
    TextCompletion,
    Usage,
)
from gateway.http.body import read_object
from gateway.http.errors import JSON, ApiError
from gateway.http.fields import ignored_fields_header, other_fields
from gateway.http.routing import Route
from gateway.http.shapes import ChatRequest, CompletionRequest, Generation, read_generation_request
from gateway.naming import Naming
from gateway.prompt.block_keys import Context
from gateway.prompt.memory import Owner
from gateway.prompt.returned import ReturnedToken
from gateway.prompt.template import strings_in
from gateway.prompt.tokens import Prompt
from gateway.served_model import ServedModel
from gateway.store_link import Connection, StoreLink, StoreUnavailable
from gateway.telemetry.record import Operation, Prepared, RequestRecord, Span, now_ns
from gateway.tenants.directory import Directory, Principal
from gateway.tenants.keyring import SaltUnavailable
from gateway.tenants.ledger import Outcome
from gateway.tenants.quotas import Allowance, Quotas
from gateway.told import Told

log = logging.getLogger("saltern.gateway")

KEEPALIVE_SECONDS = 10
TOKENISING_THREADS = 4
# For the final error of a stream to leave, once its time is over.
LAST_WORDS_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Head:
    """What all parts of one answer share."""

    id: str
    created: int
    model: str
    told: Told


@dataclass(slots=True)
class Collected:
    """One choice of an answer that is sent whole."""

    text: str = ""
    finish_reason: FinishReason = "stop"
    tokens: list[ReturnedToken] = field(default_factory=list)


class ChatShape:
    """How an answer looks on `/v1/chat/completions`."""

    operation: Operation = "chat"
    id_prefix = "chatcmpl-"

    @staticmethod
    def whole(head: Head, choices: list[Collected], usage: Usage) -> msgspec.Struct:
        told = head.told
        shaped = [
            ChatChoice(
                AssistantMessage(each.text),
                each.finish_reason,
                index,
                told.chat_logprobs(each.tokens),
                told.ids(each.tokens),
            )
            for index, each in enumerate(choices)
        ]
        return ChatCompletion(head.id, head.created, head.model, shaped, usage, told.prompt_ids(0))

    @staticmethod
    def chunks(head: Head, piece: Piece, usage: msgspec.UnsetType | None, *, is_first: bool) -> list[msgspec.Struct]:
        told, tokens = head.told, piece.tokens
        delta = Delta(content=piece.text) if piece.finish_reason is None else Delta()
        logprobs = told.chat_logprobs(tokens) if tokens else None
        choice = ChatChunkChoice(delta, piece.finish_reason, piece.index, logprobs, told.ids(tokens))
        chunk = ChatChunk(head.id, head.created, head.model, [choice], usage)
        if not is_first:
            return [chunk]
        role = ChatChunkChoice(Delta(role="assistant", content=""), index=piece.index, token_ids=told.ids([]))
        return [ChatChunk(head.id, head.created, head.model, [role], usage, told.prompt_ids(piece.index)), chunk]

    @staticmethod
    def usage(head: Head, usage: Usage) -> msgspec.Struct:
        return ChatChunk(head.id, head.created, head.model, [], usage)


class TextShape:
    """How an answer looks on `/v1/completions`."""

    operation: Operation = "text_completion"
    id_prefix = "cmpl-"

    @staticmethod
    def whole(head: Head, choices: list[Collected], usage: Usage) -> msgspec.Struct:
        told = head.told
        shaped = [
            TextChoice(
                each.text,
                each.finish_reason,
                index,
                told.text_logprobs(each.tokens),
                told.ids(each.tokens),
                told.prompt_ids(index),
            )
            for index, each in enumerate(choices)
        ]
        return TextCompletion(head.id, head.created, head.model, shaped, usage)

    @staticmethod
    def chunks(head: Head, piece: Piece, usage: msgspec.UnsetType | None, *, is_first: bool) -> list[msgspec.Struct]:
        told, tokens = head.told, piece.tokens
        logprobs = told.text_logprobs(tokens) if tokens else None
        prompt_ids = told.prompt_ids(piece.index) if is_first else msgspec.UNSET
        choice = TextChoice(piece.text, piece.finish_reason, piece.index, logprobs, told.ids(tokens), prompt_ids)
        return [TextCompletion(head.id, head.created, head.model, [choice], usage)]

    @staticmethod
    def usage(head: Head, usage: Usage) -> msgspec.Struct:
        return TextCompletion(head.id, head.created, head.model, [], usage)


Shape = type[ChatShape] | type[TextShape]


class Completions:
    """The handlers, and the requests that run.

    Attributes:
        draining: new requests are refused with 503.
    """

    def __init__(self, directory: Directory, quotas: Quotas, link: StoreLink) -> None:
        self.draining = False
        self._directory = directory
        self._quotas = quotas
        self._link = link
        self._pool = ThreadPoolExecutor(TOKENISING_THREADS, thread_name_prefix="tokenise")
        # One thread per tenant at a time: a tenant's long prompts queue behind each other, not before others'.
        self._turns: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()
        self._running: set[asyncio.Task[None]] = set()
        self._choices: set[Choices] = set()
        self._closing: set[asyncio.Task[None]] = set()

    def routes(self) -> list[Route]:
        return [
            Route(
                "POST",
                "/v1/chat/completions",
                "tenant:completions",
                self.chat,
                summary="Continue a conversation",
                reads=Annotated[ChatRequest, other_fields(ChatRequest)],
                answers=ChatCompletion,
                streams=ChatChunk,
                refusals=(404, 429),
            ),
            Route(
                "POST",
                "/v1/completions",
                "tenant:completions",
                self.text,
                summary="Continue texts or token ids",
                reads=Annotated[CompletionRequest, other_fields(CompletionRequest)],
                answers=TextCompletion,
                streams=TextCompletion,
                refusals=(404, 429),
            ),
            Route("GET", "/v1/models", "tenant", self.models, summary="The model that is served", answers=ModelList),
            Route(
                "GET",
                "/v1/models/{model:path}",
                "tenant",
                self.model,
                summary="One model",
                answers=Model,
                refusals=(403,),
            ),
        ]

    async def models(self, request: Request) -> Response:
        model, principal = self._link.connection().model, request.state.principal
        allowance = await self._quotas.allowance(principal.tenant_id)
        models = [Model(model.name, model.created)] if allowance.allows(model.name) else []
        return Response(msgspec.json.encode(ModelList(models)), media_type=JSON)

    async def model(self, request: Request) -> Response:
        allowance = await self._quotas.allowance(request.state.principal.tenant_id)
        model = self._serving(request.path_params["model"], allowance).model
        return Response(msgspec.json.encode(Model(model.name, model.created)), media_type=JSON)

    async def chat(self, request: Request) -> ASGIApp:
        allowance = await self._look(request)
        body, ignored = read_generation_request(await read_object(request), ChatRequest)
        connection = self._serving(body.model, allowance)
        model, wanted, principal = connection.model, body.generation(), request.state.principal
        _note(request.state.record, model, ChatShape, wanted)
        messages, rendering = body.conversation(), body.rendering()
        texts = chain(strings_in(messages), strings_in(rendering.variables))
        _check_size(model, sum(len(text.encode("utf-8")) for text in texts))
        owner = Owner(principal.account, principal.epoch, wanted.scope)

        def tokenise() -> list[Prompt]:
            return [model.template.prompt(messages, lambda segments: model.memory.recall(owner, segments), rendering)]

        return self._respond(request, connection, allowance, ChatShape, wanted, ignored, tokenise)

    async def text(self, request: Request) -> ASGIApp:
        allowance = await self._look(request)
        body, ignored = read_generation_request(await read_object(request), CompletionRequest)
        connection = self._serving(body.model, allowance)
        model, wanted, prompts = connection.model, body.generation(), body.prompts()
        _note(request.state.record, model, TextShape, wanted)
        # Before anything is tokenised.
        generation.check_submissions(len(prompts), wanted.n)
        for prompt in prompts:
            if isinstance(prompt, str):
                _check_size(model, len(prompt.encode("utf-8")))
            else:
                granted_tokens(model, allowance, len(prompt), None)

        def tokenise() -> list[Prompt]:
            tokenizer = model.tokenizer
            return [tokenizer.completion(p) if isinstance(p, str) else tokenizer.given(p) for p in prompts]

        return self._respond(request, connection, allowance, TextShape, wanted, ignored, tokenise)

    async def _look(self, request: Request) -> Allowance:
        """Before the body is read: who has nothing left is refused, and nothing is charged."""
        principal: Principal = request.state.principal
        return await self._quotas.look(principal.tenant_id, principal.key_id)

    def _serving(self, model: str, allowance: Allowance) -> Connection:
        if self.draining:
            raise _shutting_down()
        connection = self._link.connection()
        if model != connection.model.name:
            message = f"There is no such model here; this server has {connection.model.name}."
            raise ApiError(404, message, code="model_not_found", param="model")
        if not allowance.allows(model):
            raise ApiError(403, "This tenant may not use this model.", "permission_error", param="model")
        return connection

    def _respond(
        self,
        request: Request,
        connection: Connection,
        allowance: Allowance,
        shape: Shape,
        wanted: Generation,
        ignored: tuple[str, ...],
        tokenise: Callable[[], list[Prompt]],
    ) -> ASGIApp:
        model = connection.model
        generation.check_token_ids(model, wanted)
        principal: Principal = request.state.principal
        record: RequestRecord = request.state.record

        async def respond(scope: Scope, receive: Receive, send: Send) -> None:
            await self._while_connected(receive, answer(scope, receive, send))

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            start_ns = now_ns()
            prompts = await self._tokenised(principal, tokenise)
            record.prepared = Span(start_ns, now_ns()), _prepared(prompts, record.block_tokens)
            generation.check_vocabulary(model, prompts)
            cache_tokens = self._link.most_tokens(allowance.reserved_tokens, strict=allowance.strict)
            bounds = Bounds.of(model, allowance, cache_tokens, prompts, wanted)
            context = Context.of_store(model.store, wanted.scope)
            naming = Naming(self._directory, principal.tenant_id, context, prompts)
            with contextlib.suppress(SaltUnavailable):
                # Before the reservation, so that nothing takes time between it and the store.
                await naming.all(principal.epoch)
            bill = await Bill.open(self._quotas, principal, bounds, record)
            seed = secrets.randbits(64) if wanted.seed is None else wanted.seed
            admitted = Admitted(
                self._directory,
                connection,
                principal,
                bill.standing,
                prompts,
                naming,
                wanted,
                seed,
                allowance.queue_wait_seconds,
                record,
            )

            async def submit(number: int, choice: int) -> Answer:
                return await generation.start(admitted, number, choice, bill.caps[number])

            choices = Choices(submit, len(prompts), wanted.n, self._closing)
            told = Told(model.tokenizer, wanted.logprobs is not None, wanted.token_ids, prompts, wanted.n)
            head = Head(f"{shape.id_prefix}{secrets.token_hex(12)}", int(time.time()), model.name, told)
            headers = ignored_fields_header(ignored) | dict(bill.headers)
            pieces = self._pieces(choices, bill, record)
            self._choices.add(choices)
            try:
                async with self._settled_on_error(choices, bill, record):
                    await choices.admitted()
                record.response_id = head.id
                if wanted.stream:
                    await _stream(send, choices, pieces, shape, head, wanted, headers, record)
                else:
                    response = await _whole(choices, pieces, shape, head, headers)
                    await response(scope, receive, send)
            finally:
                self._choices.discard(choices)
                record.finish_reasons = choices.finish_reasons()
                choices.close()
                if not bill.is_settled:
                    # All other ends were settled before they were told; to this client nothing is.
                    self._settle(choices, bill, "cancelled")

        return respond

    async def _pieces(self, choices: Choices, bill: Bill, record: RequestRecord) -> AsyncIterator[Piece]:
        """The pieces of all choices. What they used is booked before their end, or an error, is told."""
        async with self._settled_on_error(choices, bill, record):
            async for piece in choices.pieces():
                yield piece
        await self._settle(choices, bill, "finished")

    @asynccontextmanager
    async def _settled_on_error(self, choices: Choices, bill: Bill, record: RequestRecord) -> AsyncIterator[None]:
        try:
            yield
        except Exception:
            choices.close()
            await self._settle(choices, bill, "failed" if record.started else "refused")
            raise

    def _settle(self, choices: Choices, bill: Bill, outcome: Outcome) -> asyncio.Future[None]:
        """In a task of its own: whoever waits for it may be cancelled, and this must not be."""

        async def settle() -> None:
            await choices.ended()
            await bill.settle(outcome)

        settling = asyncio.create_task(settle())
        self._closing.add(settling)
        settling.add_done_callback(self._closing.discard)
        return asyncio.shield(settling)

    async def _tokenised(self, principal: Principal, tokenise: Callable[[], list[Prompt]]) -> list[Prompt]:
        turn = self._turns.setdefault(principal.tenant_id, asyncio.Lock())
        await turn.acquire()
        work = asyncio.get_running_loop().run_in_executor(self._pool, tokenise)

        def ended(work: asyncio.Future[list[Prompt]]) -> None:
            turn.release()
            if not work.cancelled():
                # Looked at, as nobody else does when the client has left.
                work.exception()

        work.add_done_callback(ended)
        # A thread can't be stopped: the turn ends with it, however many clients leave meanwhile.
        return await asyncio.shield(work)

    async def _while_connected(self, receive: Receive, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` to its end, or cancel it when the client disconnects."""
        worker = asyncio.create_task(work)
        watcher = asyncio.create_task(_disconnected(receive))
        self._running.add(worker)
        worker.add_done_callback(self._running.discard)
        try:
            await asyncio.wait((worker, watcher), return_when=asyncio.FIRST_COMPLETED)
            if not worker.done():
                worker.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await worker
                raise ClientDisconnect
            if worker.cancelled():
                # Only the end of a drain cancels it: it had not come as far as the store.
                raise _shutting_down()
            worker.result()
        finally:
            watcher.cancel()
            worker.cancel()

    async def drain(self, seconds: float) -> None:
        """Take nothing new, let what runs end, then end the rest with an error."""
        self.draining = True
        if self._running:
            await asyncio.wait(self._running, timeout=seconds)
        for choices in self._choices:
            choices.interrupt(_shutting_down())
        if ending := self._running | self._closing:
            await asyncio.wait(ending, timeout=LAST_WORDS_SECONDS)
        for task in self._running:
            task.cancel()

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def _shutting_down() -> StoreUnavailable:
    return StoreUnavailable("The server is shutting down. Send the request again.")


def _note(record: RequestRecord, model: ServedModel, shape: Shape, wanted: Generation) -> None:
    record.model, record.operation, record.generation = model.name, shape.operation, wanted
    record.block_tokens = model.store.geometry.block_tokens


def _prepared(prompts: list[Prompt], block_tokens: int) -> Prepared:
    return Prepared(
        tokens=sum(len(prompt.tokens) for prompt in prompts),
        blocks=sum(len(prompt.tokens) // block_tokens for prompt in prompts),
        remembered_tokens=sum(prompt.remembered_tokens for prompt in prompts),
    )


def _check_size(model: ServedModel, size_bytes: int) -> None:
    """Refuse what can't fit by its bytes, before anything is tokenised."""
    most = model.context_tokens * model.tokenizer.longest_token_bytes
    if size_bytes > most:
        raise context_length_exceeded(
            f"The prompt has {size_bytes} bytes; the context of {model.context_tokens} tokens holds at most {most}."
        )


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _whole(
    choices: Choices, pieces: AsyncIterator[Piece], shape: Shape, head: Head, headers: dict[str, str]
) -> Response:
    collected = [Collected() for _ in range(choices.count)]
    async for piece in pieces:
        choice = collected[piece.index]
        choice.text += piece.text
        choice.tokens += piece.tokens
        choice.finish_reason = piece.finish_reason or choice.finish_reason
    body = shape.whole(head, collected, choices.usage())
    return Response(msgspec.json.encode(body), 200, headers, JSON)


async def _stream(
    send: Send,
    choices: Choices,
    pieces: AsyncIterator[Piece],
    shape: Shape,
    head: Head,
    wanted: Generation,
    headers: dict[str, str],
    record: RequestRecord,
) -> None:
    """The answer as server-sent events. A failure after the headers is the last event."""
    raw = [(name.encode("ascii"), value.encode("ascii")) for name, value in (sse.HEADERS | headers).items()]
    await send({"type": "http.response.start", "status": 200, "headers": raw})

    async def say(*events: bytes, more: bool = True) -> None:
        await send({"type": "http.response.body", "body": b"".join(events), "more_body": more})

    # `usage` is null in every chunk but the last when it was asked for, and absent when not.
    none_yet = None if wanted.include_usage else msgspec.UNSET
    opened: set[int] = set()
    try:
        async for piece in _with_keepalive(pieces):
            if piece is None:
                await say(sse.KEEPALIVE)
                continue
            chunks = shape.chunks(head, piece, none_yet, is_first=piece.index not in opened)
            opened.add(piece.index)
            await say(*map(sse.event, chunks))
            record.first_chunk_ns = record.first_chunk_ns or now_ns()
    except ApiError as error:
        record.fail(error)
        await say(sse.error_event(error), more=False)
        return
    ending = [sse.event(shape.usage(head, choices.usage()))] if wanted.include_usage else []
    await say(*ending, sse.DONE, more=False)


async def _with_keepalive(pieces: AsyncIterator[Piece]) -> AsyncIterator[Piece | None]:
    """The pieces, and None whenever none came for ten seconds."""
    while True:
        following = asyncio.ensure_future(anext(pieces, None))
        try:
            while not (await asyncio.wait((following,), timeout=KEEPALIVE_SECONDS))[0]:
                yield None
        finally:
            if not following.done():
                following.cancel()
        if (piece := following.result()) is None:
            return
        yield piece
