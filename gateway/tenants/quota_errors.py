"""What a request is answered that its quota refuses, and what every answer says of what is left."""

from __future__ import annotations

from typing import Literal

from gateway.http.errors import ApiError
from gateway.tenants.ledger import Refused
from policies.rates import Left, LimitName, Reason, Refusal

Headers = tuple[tuple[str, str], ...]

_WHAT: dict[LimitName, str] = {
    "concurrent_requests": "concurrent requests",
    "requests_per_minute": "requests per minute",
    "tokens_per_minute": "tokens per minute",
    "tokens_per_day": "tokens per day",
    "tokens_per_month": "tokens per month",
}
_RETRIES: dict[Reason, bool] = {"rate": True, "held": True, "spent": False, "too_large": False}


class QuotaExceeded(ApiError):
    """429: which limit, with the numbers, and when to ask again.

    Attributes:
        scope: whose limit it is.
    """

    def __init__(self, refused: Refused, *, of_tenant: bool) -> None:
        refusal = refused.refusal
        self.scope: Literal["tenant", "key"] = "tenant" if of_tenant else "key"
        spent = refusal.reason == "spent"
        super().__init__(
            429,
            _message(refusal, self.scope),
            type="insufficient_quota" if spent else "rate_limit_error",
            code="insufficient_quota" if spent else "rate_limit_exceeded",
            headers=(
                *_retry(refusal.retry_ms),
                ("x-should-retry", "true" if _RETRIES[refusal.reason] else "false"),
                *rate_headers(refused.requests_left, refused.tokens_left),
            ),
        )


def rate_headers(requests: Left | None, tokens: Left | None) -> Headers:
    """`x-ratelimit-{limit,remaining,reset}-{requests,tokens}`; none of what is unlimited."""
    headers: list[tuple[str, str]] = []
    for name, left in (("requests", requests), ("tokens", tokens)):
        if left is not None:
            headers += [
                (f"x-ratelimit-limit-{name}", str(left.limit)),
                (f"x-ratelimit-remaining-{name}", str(left.remaining)),
                (f"x-ratelimit-reset-{name}", f"{left.reset_ms / 1000:.3f}s"),
            ]
    return tuple(headers)


def _retry(retry_ms: int | None) -> Headers:
    """None: no time will do."""
    if retry_ms is None:
        return ()
    return ("retry-after", str(-(-retry_ms // 1000))), ("retry-after-ms", str(retry_ms))


def _message(refusal: Refusal, scope: str) -> str:
    whose = f"this {scope}'s limit of {refusal.limit} {_WHAT[refusal.name]}"
    if refusal.name == "concurrent_requests":
        return f"{refusal.running} requests are running, which is {whose}. Wait until one has ended."
    if refusal.reason == "too_large":
        return (
            f"The request may cost {refusal.cost} tokens, prompt and maximum output together, and can never fit "
            f"{whose}. Shorten the prompt or ask for fewer tokens."
        )
    if refusal.name == "requests_per_minute":
        return f"{refusal.used} requests are counted of {whose}. Try again in {_seconds(refusal)} s."
    counted = f"The request may cost {refusal.cost} tokens and {refusal.used} are counted of {whose}"
    if refusal.reason == "rate":
        return f"{counted}. Try again in {_seconds(refusal)} s, or ask for fewer tokens."
    if refusal.reason == "held":
        return (
            f"{counted}; {refusal.running} running requests hold the rest, {refusal.held} tokens, until they end. "
            "Try again in a second, or ask for fewer tokens."
        )
    return f"{counted}. It begins anew in {_seconds(refusal)} s; a smaller request may still fit."


def _seconds(refusal: Refusal) -> int:
    assert refusal.retry_ms is not None
    return -(-refusal.retry_ms // 1000)
