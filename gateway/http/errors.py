"""What the HTTP APIs answer when they refuse, in OpenAI's form.

    ApiError               a status, a message that says what was wrong and what to do, and how clients name it
    ├── Unauthorized       401, one message for every reason, so that reasons cannot be told apart
    └── Unavailable        503, with when and whether a client's library should send the request again
"""

from __future__ import annotations

import asyncio
import contextlib

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

JSON = "application/json"
# What a client may still be sending after it was refused, and for how long.
LINGER_BYTES = 16 << 20
LINGER_SECONDS = 5.0

# A header of refusals that leave a part of the request unread, after which the connection can't be used again.
CLOSE = ("connection", "close")


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail


class ApiError(Exception):
    """A refusal that goes to the client as it is. Raise it anywhere below the router.

    Attributes:
        status: the HTTP status.
        message: what was wrong, with the numbers, and the remedy. Never a prompt, a key or a secret.
        type: OpenAI's error type; its SDK shows it and does not act on it.
        code: OpenAI's error code, None where there is none.
        param: path of the field that was refused, such as `messages[0].content[1]`.
        headers: (name, value) pairs added to the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        type: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        headers: tuple[tuple[str, str], ...] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.code = code
        self.param = param
        self.headers = headers

    def encode(self) -> bytes:
        """The JSON body; the same object is the last event of a stream that failed."""
        return msgspec.json.encode(ErrorBody(ErrorDetail(self.message, self.type, self.param, self.code)))

    def response(self) -> Response:
        kind = ClosingResponse if CLOSE in self.headers else Response
        return kind(self.encode(), self.status, dict(self.headers), JSON)


class ClosingResponse(Response):
    """Sent at once, and ended only when the client has sent what it was about to send, within bounds.

    A socket that is closed with data unread is reset, and the reset overtakes the answer (RFC 9112, section 9.6).
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_SECONDS):
                left_bytes = LINGER_BYTES
                while left_bytes > 0 and (message := await receive()).get("more_body"):
                    left_bytes -= len(message["body"])
        await send({"type": "http.response.body"})


class Unauthorized(ApiError):
    """No valid credential: missing, malformed, unknown, revoked and expired keys all answer this."""

    def __init__(self) -> None:
        super().__init__(
            401,
            "The API key is missing or not valid. Send `Authorization: Bearer <key>` with an active key.",
            code="invalid_api_key",
            headers=(("www-authenticate", "Bearer"),),
        )


class Unavailable(ApiError):
    """503: something that the request needs does not answer now.

    Args:
        retry: whether a client's library should send the request again by itself.
    """

    def __init__(self, message: str, *, retry: bool = True) -> None:
        super().__init__(
            503,
            message,
            type="service_unavailable_error",
            code="server_is_overloaded",
            headers=(
                ("retry-after", "1"),
                ("retry-after-ms", "1000"),
                ("x-should-retry", "true" if retry else "false"),
            ),
        )


def bad_value(param: str, message: str) -> ApiError:
    """400 for a field whose value is wrong or not supported."""
    return ApiError(400, message, code="unsupported_value", param=param)
