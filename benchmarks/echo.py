"""The least an ASGI application can do with a chat: read it, and send an answer that is always the same.

    python -m uvicorn benchmarks.echo:app …

What a load generator measures of it is what the generator, the HTTP server and the machine cost by themselves.
"""

from __future__ import annotations

import json

from starlette.types import Receive, Scope, Send

TEXT = " of the sea and of the salt that is left when the water has gone"
WHOLE = json.dumps({"choices": [{"index": 0, "message": {"role": "assistant", "content": TEXT}}]}).encode()
EVENT = b"data: " + json.dumps({"choices": [{"index": 0, "delta": {"content": TEXT}}]}).encode() + b"\n\n"
# Before the last one; together as many as the gateway sends where all tokens of an answer are there at once.
EVENTS = 4


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body", False):
            break
    is_streamed = b'"stream":true' in body
    if is_streamed:
        headers = [(b"content-type", b"text/event-stream")]
        bodies = [*[EVENT] * EVENTS, b"data: [DONE]\n\n"]
    else:
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(WHOLE)).encode())]
        bodies = [WHOLE]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for part in bodies[:-1]:
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": bodies[-1]})
