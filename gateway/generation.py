"""One request at the store: its blocks named, submitted, turned into text, its generated blocks named, ended.

    Prompt ─ name_blocks ─► AlignedPrompt ─ Submit ─► Answer ─► pieces of text ─ Finished ─ last Seal ─► Usage

Key status, tenant status and epoch are read with the reservation, after the blocks are named and right before `Submit`,
so that what was admitted after a rotation has the new epoch, whichever gateway took it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from cachestore.client import Event, Output, StoreLost, StoreRequest
from cachestore.protocol import Counts, Finished, Rejected, Sampling, Started
from gateway.bill import context_length_exceeded
from gateway.http.answers import FinishReason, Usage
from gateway.http.errors import ApiError, bad_value
from gateway.http.shapes import MAX_SUBMISSIONS, Generation
from gateway.naming import Naming
from gateway.prompt.align import u32le
from gateway.prompt.block_keys import ChainKey
from gateway.prompt.memory import Owner
from gateway.prompt.returned import Part, ReturnedText
from gateway.prompt.tokens import Prompt, Segment
from gateway.served_model import ServedModel
from gateway.store_link import Connection, StoreUnavailable
from gateway.telemetry.record import RequestRecord, Submission, now_ns
from gateway.tenants.directory import Directory, Principal, Standing
from gateway.tenants.keyring import SaltUnavailable

log = logging.getLogger("saltern.gateway")

ATTEMPTS = 4
# Choices that are not the first of their prompt wait for that one, which has the limit.
NO_DEADLINE_NS = (1 << 63) - 1
# A store that got `Abort` answers `Finished` after the step it is in.
FINISH_WAIT_SECONDS = 10


def check_submissions(prompts: int, n: int) -> None:
    """
    Raises:
        ApiError: 400 when there are more than one request may have.
    """
    if prompts * n > MAX_SUBMISSIONS:
        message = f"{prompts} prompts with {n} choices each are {prompts * n} answers; one request has at most"
        raise bad_value("n", f"{message} {MAX_SUBMISSIONS}.")


def check_token_ids(model: ServedModel, generation: Generation) -> None:
    """
    Raises:
        ApiError: 400 when `logit_bias` or `stop_token_ids` name a token that the model lacks.
    """
    last = model.store.limits.vocabulary_tokens - 1
    named = {"logit_bias": [token for token, _ in generation.logit_bias], "stop_token_ids": generation.stop_token_ids}
    for name, tokens in named.items():
        if not all(0 <= token <= last for token in tokens):
            raise bad_value(name, f"{name} names a token that this model lacks; its token ids are 0 to {last}.")


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request that has its reservation: what all of its submissions share.

    Attributes:
        standing: account and epoch as the reservation's transaction read them.
        seed: of the first choice; each other samples with one of its own, `seed` + choice modulo 2^64.
        queue_wait_seconds: how long the first choice of each prompt may wait in the store to be admitted.
    """

    directory: Directory
    connection: Connection
    principal: Principal
    standing: Standing
    prompts: Sequence[Prompt]
    naming: Naming
    generation: Generation
    seed: int
    queue_wait_seconds: int
    record: RequestRecord


def check_vocabulary(model: ServedModel, prompts: Sequence[Prompt]) -> None:
    """
    Raises:
        ApiError: 400 for a token that the model lacks; the store takes it for a broken gateway and drops the
            connection, everybody's requests with it.
    """
    last = model.store.limits.vocabulary_tokens - 1
    if (highest := max(max(prompt.tokens) for prompt in prompts)) > last:
        raise ApiError(400, f"The prompt has token {highest}, and the model's last one is {last}.")


async def start(admitted: Admitted, number: int, choice: int, max_tokens: int) -> Answer:
    """Submit prompt `number` as a choice of its request and wait until the store has admitted it.

    Raises:
        ApiError: 400 too long, 401 the key is no longer active, 503 no salt, no store or no room in time.
    """
    connection, generation, principal = admitted.connection, admitted.generation, admitted.principal
    model, prompt = connection.model, admitted.prompts[number]
    sampling = Sampling(
        temperature=generation.temperature,
        top_k=generation.top_k,
        top_p=generation.top_p,
        seed=(admitted.seed + choice) % (1 << 64),
        stop_token_ids=_end_ids(model, generation),
        min_p=generation.min_p,
        presence_penalty=generation.presence_penalty,
        frequency_penalty=generation.frequency_penalty,
        repetition_penalty=generation.repetition_penalty,
        logit_bias=list(generation.logit_bias),
        min_tokens=generation.min_tokens,
        logprobs=generation.logprobs,
    )
    deadline_ns = NO_DEADLINE_NS if choice else time.monotonic_ns() + admitted.queue_wait_seconds * 1_000_000_000
    standing = admitted.standing
    # Prepared afresh when the epoch moves between the reservation and the store.
    for _ in range(ATTEMPTS):
        try:
            chain, aligned = await admitted.naming.of(number, standing.epoch)
        except SaltUnavailable:
            # A rotation destroys the old salt: an error only if there was none.
            before, standing = standing, await admitted.directory.standing(principal)
            if standing.epoch == before.epoch:
                log.error("no salt of tenant %s opens for epoch %d", principal.tenant_id, before.epoch)
                raise
            continue
        queued_ns = now_ns()
        try:
            request = connection.client.submit(
                account=standing.account,
                epoch=standing.epoch,
                tokens=aligned.tokens,
                keys=aligned.keys,
                sampling=sampling,
                max_tokens=max_tokens,
                queue_deadline_ns=deadline_ns,
                ttl_seconds=generation.ttl_seconds,
            )
        except StoreLost:
            # Lost while the prompt was made ready: whatever ended the store, this request was not it.
            raise StoreUnavailable("The model is not available at the moment. Try again in a second.") from None
        owner = Owner(standing.account, standing.epoch, generation.scope)
        submission = admitted.record.submission(len(prompt.tokens), first=choice == 0, queued_ns=queued_ns)
        answer = Answer(connection, owner, prompt, generation, chain, request, aligned.keys, submission)
        rejected = await answer.admitted()
        if rejected is None:
            return answer
        if rejected.code not in ("stale_epoch", "unknown_account"):
            raise _refusal(rejected)
        standing = await admitted.directory.standing(principal)
    raise StoreUnavailable("The tenant's salt is being rotated. Try again in a second.")


def _refusal(rejected: Rejected) -> ApiError:
    if rejected.code in ("too_long", "over_capacity"):
        return context_length_exceeded(f"The request can't fit: {rejected.detail}.")
    if rejected.code == "queue_timeout":
        return StoreUnavailable(f"The server is full: the request {rejected.detail}. Try again in a second.")
    return StoreUnavailable("The server takes no new requests at the moment. Try again in a second.")


def _end_ids(model: ServedModel, generation: Generation) -> list[int]:
    # A configuration may name an end token that the model does not have; the store takes its ids seriously.
    known = (token for token in model.tokenizer.stop_token_ids if token < model.store.limits.vocabulary_tokens)
    own = () if generation.ignore_eos else known
    return list(dict.fromkeys((*own, *generation.stop_token_ids)))


def _failure(finished: Finished, generation: Generation) -> ApiError:
    if finished.error != "no_token":
        return ApiError(500, "The server could not finish the answer. Send the request again.", "server_error")
    named = {"logit_bias": generation.logit_bias, "min_tokens": generation.min_tokens}
    param = next((name for name, value in named.items() if value), "stop_token_ids")
    return bad_value(param, f"No token is left that the answer could go on with; {param} must exclude fewer.")


class Answer:
    """A submitted request on its way to its end. Whoever made it calls `close`, whatever happens.

    Attributes:
        finish_reason: set once all text is out.
        cached_tokens: prompt tokens that came from the tenant's cache.
    """

    def __init__(
        self,
        connection: Connection,
        owner: Owner,
        prompt: Prompt,
        generation: Generation,
        chain: ChainKey,
        request: StoreRequest,
        keys: list[bytes],
        submission: Submission,
    ) -> None:
        self.finish_reason: FinishReason | None = None
        self.cached_tokens = 0
        self._connection = connection
        self._model = connection.model
        self._owner = owner
        self._prompt = prompt
        self._prompt_tokens = len(prompt.tokens)
        self._tokens: array[int] = prompt.tokens[:]
        self._chain = chain
        self._request = request
        self._submission = submission
        self._last_key = keys[-1] if keys else chain.root
        self._generation = generation
        self._returned = ReturnedText(
            connection.model.tokenizer,
            generation.stop,
            _end_ids(connection.model, generation),
            min_tokens=generation.min_tokens,
            stop_is_kept=generation.include_stop,
        )
        self._counts: Counts | None = None
        self._ended = False

    async def admitted(self) -> Rejected | None:
        """Wait for the store to admit the request; the refusal if it does not.

        Raises:
            StoreUnavailable: the store went away.
        """
        try:
            event = await self._event()
        except BaseException:
            # Cancelled while it waited: the client is gone.
            await self.close()
            raise
        if isinstance(event, Rejected):
            self._ended = True
            self._submission.refuse(event)
            return event
        if isinstance(event, Started):
            self._submission.started = event
            self.cached_tokens = event.cached_tokens
            return None
        # Aborted before it was admitted: its tenant was deleted.
        await self.close()
        raise StoreUnavailable("The request was ended by the server.")

    async def pieces(self) -> AsyncIterator[Part]:
        """The text as it becomes certain: no half characters, no part of a stop string. Ends after the last `Seal`.

        A piece is empty when tokens came and none of their text is certain yet.

        Raises:
            ApiError: 503 the store went away, 500 it could not compute the answer, 400 no token could follow.
        """
        reason = ""
        while not reason:
            event = await self._event()
            if isinstance(event, Output):
                self._submission.first_output_ns = self._submission.first_output_ns or now_ns()
                yield self._take(event)
                if self._returned.stopped:
                    reason = "stop"
                    self._request.abort()
                    event = await self._until_end()
            if isinstance(event, Finished):
                reason = reason or event.reason
                self._end(event)
                if reason in ("aborted", "error"):
                    raise _failure(event, self._generation)
        yield self._returned.finish()
        self.finish_reason = "length" if reason == "length" and not self._returned.stopped else "stop"
        if self._prompt.segments:
            self._remember()

    async def _event(self) -> Event:
        """Raises StoreUnavailable when the store went away."""
        try:
            return await self._request.next()
        except StoreLost:
            self._ended = True
            self._submission.lose(self._output_tokens)
            raise self._connection.lost() from None

    def _take(self, output: Output) -> Part:
        """What is returned up to the token that completes a stop string; names the blocks that the tokens fill."""
        text, tokens = "", []
        block_tokens = self._model.store.geometry.block_tokens
        for token, logprobs in zip_longest(output.tokens, output.logprobs):
            self._tokens.append(token)
            part = self._returned.push(token, logprobs)
            text += part.text
            tokens += part.tokens
            if len(self._tokens) % block_tokens == 0:
                block = u32le(self._tokens[-block_tokens:])
                keys = self._chain.extend(self._last_key, block)
                self._last_key = keys[-1]
                self._request.seal(keys)
            if self._returned.stopped:
                break
        return Part(text, tokens)

    def _remember(self) -> None:
        """Keep prompt and answer as they were generated, for the next turn of this conversation."""
        *before, last = self._prompt.segments
        tokenizer, tokens, text = self._model.tokenizer, self._tokens, self._returned.text
        if last.kind == "content":
            spelt = [*before, Segment("content", last.text + text)]
        else:
            spelt = [*before, last, *([Segment("content", text)] if text else [])]
        if self._returned.stopped:
            # Tokens whose text was returned whole are kept; what is left of the last one is spelt afresh.
            kept, rest = self._returned.whole()
            try:
                tokens = tokens[: self._prompt_tokens + kept] + tokenizer.encode_plain(rest)
            except ApiError:
                return
        elif self._returned.ended_by in tokenizer.stop_token_ids:
            spelt.append(Segment("control", tokenizer.spelling(tokens[-1])))
        elif self._returned.ended_by is not None and not self._returned.returns_end:
            # No template writes a token that this request alone ended with.
            tokens = tokens[:-1]
        self._model.memory.remember(self._owner, spelt, tokens)

    async def _until_end(self) -> Finished | Rejected:
        """The end of a request that was told to stop; tokens that were on their way are not part of the answer.

        Raises:
            StoreUnavailable: the store went away, or makes no steps.
        """
        try:
            async with asyncio.timeout(FINISH_WAIT_SECONDS):
                while not isinstance(event := await self._event(), Finished | Rejected):
                    pass
        except TimeoutError:
            raise StoreUnavailable("The model's process does not answer. Send the request again.") from None
        return event

    @property
    def _output_tokens(self) -> int:
        """Tokens of the answer so far; none after the one that completed a stop string."""
        return len(self._tokens) - self._prompt_tokens

    def _end(self, finished: Finished) -> None:
        self._ended = True
        self._submission.finish(finished, self._output_tokens)
        self._counts = finished.counts
        self._request.seal([], last=True)

    async def close(self) -> None:
        """End the request if it has not ended: the store stops computing it and releases its blocks."""
        if self._ended:
            return
        self._ended = True
        self._request.abort()
        try:
            # The end may be here already, taken or not.
            ended = self._request.finished or await self._until_end()
            if isinstance(ended, Finished):
                sampled = self._output_tokens if self._returned.stopped else ended.counts.output_tokens
                self._submission.finish(ended, sampled)
                self._request.seal([], last=True)
            else:
                self._submission.refuse(ended)
        except StoreUnavailable:
            return
        finally:
            # Nothing, where its end was noted.
            self._submission.lose(self._output_tokens)

    def usage(self) -> Usage:
        """True counts, once the answer has ended."""
        assert self._counts is not None
        return Usage.of(
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self.cached_tokens,
            cache_write_tokens=self._counts.written_blocks * self._model.store.geometry.block_tokens,
            completion_tokens=self._output_tokens,
        )
