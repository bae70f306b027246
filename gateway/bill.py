"""What a request may cost, what it has reserved of its tenant's quotas, and that this is settled, once."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.http.errors import ApiError, bad_value
from gateway.http.shapes import Generation
from gateway.prompt.tokens import Prompt
from gateway.served_model import ServedModel
from gateway.telemetry.record import RequestRecord, Span, now_ns
from gateway.tenants.directory import Principal, Standing
from gateway.tenants.ledger import Ask, Outcome
from gateway.tenants.quota_errors import Headers, QuotaExceeded, rate_headers
from gateway.tenants.quotas import Allowance, Quotas

# How long an answer waits for what it used to be booked; after that it is booked as soon as it can be.
SETTLE_SECONDS = 1.0
_ID_BYTES = 12


def context_length_exceeded(message: str) -> ApiError:
    return ApiError(400, message, code="context_length_exceeded")


def granted_tokens(model: ServedModel, allowance: Allowance, prompt_tokens: int, wanted: int | None) -> int:
    """The output cap: what was asked for, or what is left of the context and allowed at once.

    Raises:
        ApiError: 400 context_length_exceeded, or for a maximum that is not allowed; with the numbers.
    """
    context = min(model.context_tokens, allowance.max_context_tokens or model.context_tokens)
    most = allowance.max_output_tokens or context
    if wanted is not None and wanted > most and allowance.max_output_tokens:
        message = f"Up to {wanted} tokens were asked for; this tenant's answers have at most {most}."
        raise bad_value("max_tokens", message)
    if prompt_tokens >= context:
        raise context_length_exceeded(
            f"The prompt has {prompt_tokens} tokens and the context is {context}: shorten it so that at least one "
            "token can follow."
        )
    if wanted is not None and prompt_tokens + wanted > context:
        raise context_length_exceeded(
            f"The prompt has {prompt_tokens} tokens and up to {wanted} were asked for, {prompt_tokens + wanted} "
            f"together; the context is {context}. Shorten the prompt or ask for at most {context - prompt_tokens}."
        )
    return min(context - prompt_tokens, most) if wanted is None else wanted


def _kept_within(cap: int, prompt_tokens: int, cache_tokens: int) -> int:
    """The cap, as far as the cache holds it; the last token needs no place there."""
    room = cache_tokens + 1 - prompt_tokens
    # Where not even the prompt fits, the store refuses it with its numbers.
    return min(cap, room) if room > 0 else cap


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a request may cost.

    Attributes:
        caps: for each prompt, the most output tokens of each of its `n` choices.
        least: of its cost, when no maximum was asked for: the prompts and the shortest answers worth having.
    """

    prompt_tokens: int
    n: int
    caps: tuple[int, ...]
    least: int

    @classmethod
    def of(
        cls,
        model: ServedModel,
        allowance: Allowance,
        cache_tokens: int,
        prompts: Sequence[Prompt],
        wanted: Generation,
    ) -> Bounds:
        """
        Args:
            cache_tokens: what the tenant can have of the cache for one request.

        Raises:
            ApiError: 400 for a prompt, a maximum or a minimum that does not fit.
        """
        caps = tuple(
            granted_tokens(model, allowance, len(prompt.tokens), wanted.max_tokens) for prompt in prompts
        )
        if wanted.max_tokens is None:
            caps = tuple(
                _kept_within(cap, len(prompt.tokens), cache_tokens) for cap, prompt in zip(caps, prompts, strict=True)
            )
        if wanted.min_tokens > min(caps):
            message = f"min_tokens is {wanted.min_tokens} and an answer may have {min(caps)} tokens; ask for no more."
            raise bad_value("min_tokens", message)
        prompt_tokens = sum(len(prompt.tokens) for prompt in prompts)
        shortest = len(prompts) * wanted.n * max(1, wanted.min_tokens)
        least = prompt_tokens + (shortest if wanted.max_tokens is None else wanted.n * sum(caps))
        return cls(prompt_tokens, wanted.n, caps, least)

    @property
    def most(self) -> int:
        return self.prompt_tokens + self.n * sum(self.caps)

    def within(self, tokens: int) -> tuple[int, ...]:
        """The caps, when `tokens`, at least `least`, are granted: all alike where there is less than was asked for."""
        if tokens >= self.most:
            return self.caps
        each = (tokens - self.prompt_tokens) // (self.n * len(self.caps))
        return tuple(min(cap, each) for cap in self.caps)


class Bill:
    """A reservation on its way to its settlement.

    Attributes:
        standing: account and epoch as the reservation's transaction read them.
        caps: for each prompt, how many tokens each of its choices may have.
        headers: what is left of the limits, for the client.
    """

    def __init__(
        self,
        quotas: Quotas,
        ask: Ask,
        record: RequestRecord,
        standing: Standing,
        caps: tuple[int, ...],
        headers: Headers,
    ) -> None:
        self.standing = standing
        self.caps = caps
        self.headers = headers
        self.is_settled = False
        self._quotas = quotas
        self._ask = ask
        self._record = record

    @classmethod
    async def open(cls, quotas: Quotas, principal: Principal, bounds: Bounds, record: RequestRecord) -> Bill:
        """Reserve. Raises as `Quotas.reserve`."""
        ask = Ask(
            "res_" + secrets.token_hex(_ID_BYTES),
            principal.tenant_id,
            principal.key_id,
            bounds.prompt_tokens,
            bounds.least,
            bounds.most,
        )
        start_ns, error, scope = now_ns(), None, None
        try:
            reserved = await quotas.reserve(ask)
        except ApiError as refusal:
            error = refusal.code or str(refusal.status)
            scope = refusal.scope if isinstance(refusal, QuotaExceeded) else None
            raise
        finally:
            record.reserved = Span(start_ns, now_ns(), error), scope
        # What is told of the request tells of its settlement too.
        record.hold()
        standing = Standing(reserved.account, reserved.epoch)
        headers = rate_headers(reserved.requests_left, reserved.tokens_left)
        return cls(quotas, ask, record, standing, bounds.within(reserved.tokens), headers)

    async def settle(self, outcome: Outcome) -> None:
        """Once everything submitted has ended, book what it used. Later calls do nothing.

        Returns when it is booked, or after a second; then it will be.
        """
        if self.is_settled:
            return
        self.is_settled = True
        record = self._record
        try:
            await record.submissions_ended()
            start_ns, error = now_ns(), None
            booked = self._quotas.settle(
                self._ask.settlement(outcome, record.input_tokens, record.cached_tokens, record.output_tokens)
            )
            if not (await asyncio.wait((booked,), timeout=SETTLE_SECONDS))[0]:
                error = "timeout"
            record.settled = Span(start_ns, now_ns(), error)
        finally:
            record.release()
