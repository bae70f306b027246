"""A store that computes nothing: every request has its tokens at once. It speaks the store's protocol.

    python -m benchmarks.store_double --socket PATH --model DIR [--block-tokens 16]

What is left of a request's time over this store is everything that is not the store.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import time
from pathlib import Path

import uvloop

from cachestore.checkpoint import Checkpoint
from cachestore.fingerprint import model_fingerprint, model_tokenizer_fingerprint
from cachestore.protocol import (
    LAYOUT_VERSION,
    MAX_FRAME_TO_GATEWAY_BYTES,
    MAX_FRAME_TO_STORE_BYTES,
    TOKEN_BYTES,
    Counts,
    DropAccount,
    Fence,
    Fenced,
    Finished,
    Geometry,
    Hello,
    Limits,
    Message,
    Ping,
    Pong,
    ProtocolError,
    Stamps,
    Started,
    Stats,
    StatsReport,
    Submit,
    Tokens,
    Welcome,
    decode_to_store,
    encode_frame,
    read_message,
)

# Ordinary pieces of words in the default model's vocabulary, said in turn.
SAID_TOKENS = range(1_000, 1_016)
CACHE_TOKENS = 1 << 20


def welcome(model_dir: Path, block_tokens: int) -> Welcome:
    """What a store over this model in fp32 says of itself. Raises StartError when there is no model."""
    checkpoint = Checkpoint.open(model_dir)
    elements = checkpoint.layers * checkpoint.kv_heads * (checkpoint.head_dim + checkpoint.value_dim)
    return Welcome(
        store=secrets.token_hex(8),
        model_dir=str(checkpoint.directory),
        model_fingerprint=model_fingerprint(checkpoint),
        tokenizer_fingerprint=model_tokenizer_fingerprint(checkpoint.directory),
        geometry=Geometry(
            layers=checkpoint.layers,
            kv_heads=checkpoint.kv_heads,
            key_dim=checkpoint.head_dim,
            value_dim=checkpoint.value_dim,
            block_tokens=block_tokens,
            kv_dtype="fp32",
            layout_version=LAYOUT_VERSION,
            rope_context_tokens=0,
            bytes_per_token=4 * elements,
        ),
        dtype="fp32",
        limits=Limits(
            blocks=CACHE_TOKENS // block_tokens,
            max_context_tokens=checkpoint.max_position_tokens,
            max_running=1_024,
            step_tokens=CACHE_TOKENS,
            vocabulary_tokens=checkpoint.vocabulary_tokens,
        ),
    )


def answers(message: Message, welcome: Welcome) -> list[Message]:
    """What this store says to a message, all of it at once."""
    match message:
        case Hello():
            return [welcome]
        case Ping():
            return [Pong()]
        case Submit():
            return _answer(message)
        case Fence():
            return [Fenced(account=message.account, epoch=message.epoch, blocks=0, bytes=0)]
        case DropAccount():
            return [Fenced(account=message.account, epoch=None, blocks=0, bytes=0)]
        case Stats():
            return [_report(welcome)]
        case _:
            return []


def _answer(submit: Submit) -> list[Message]:
    """As many messages as a store that computes: one for each token."""
    now_ns = time.monotonic_ns()
    stamps = Stamps(queued_ns=now_ns, started_ns=now_ns, first_token_ns=now_ns, finished_ns=now_ns)
    prompt_tokens = len(submit.tokens) // TOKEN_BYTES
    said = [SAID_TOKENS[index % len(SAID_TOKENS)] for index in range(submit.max_tokens)]
    counts = Counts(
        prompt_tokens=prompt_tokens,
        output_tokens=submit.max_tokens,
        computed_tokens=prompt_tokens + submit.max_tokens - 1,
        steps=submit.max_tokens,
    )
    return [
        Started(request=submit.request, cached_tokens=0, miss_block=0, miss_reason="cold", stamps=stamps),
        *[Tokens(entries=[(submit.request, [token], [])]) for token in said],
        Finished(request=submit.request, reason="length", stamps=stamps, counts=counts),
    ]


def _report(welcome: Welcome) -> StatsReport:
    return StatsReport(
        pushed=False,
        total_blocks=welcome.limits.blocks,
        free_blocks=welcome.limits.blocks,
        held_blocks=0,
        cached_blocks=0,
        reserved_blocks=0,
        missing_blocks=0,
        running=0,
        waiting=0,
        ended=0,
        steps=0,
        step_ns=0,
        computed_tokens=0,
        preemptions=0,
        evictions=0,
        limit_evictions=0,
    )


async def serve(socket: Path, welcome: Welcome) -> None:
    """Answer every gateway that connects. Ends only by cancellation."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                message = await read_message(reader, decode_to_store, MAX_FRAME_TO_STORE_BYTES)
                said = answers(message, welcome)
                writer.write(b"".join(encode_frame(each, MAX_FRAME_TO_GATEWAY_BYTES) for each in said))
        except (EOFError, OSError, ProtocolError):
            writer.transport.abort()

    server = await asyncio.start_unix_server(handle, socket)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True, help="a folder in Hugging Face format")
    parser.add_argument("--block-tokens", type=int, default=16)
    options = parser.parse_args()
    uvloop.run(serve(options.socket, welcome(options.model, options.block_tokens)))


if __name__ == "__main__":
    main()
