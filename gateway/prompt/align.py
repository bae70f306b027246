"""A prompt cut into whole blocks, each with its name."""

from __future__ import annotations

import asyncio
import sys
from array import array
from dataclasses import dataclass

from gateway.prompt.block_keys import ChainKey

# A slice of this many names takes about a third of a millisecond of the event loop.
SLICE_BLOCKS = 500


@dataclass(frozen=True, slots=True)
class AlignedPrompt:
    """What the store is sent. `tokens`: u32le each, all of the prompt; `keys`: one for each full block, in order."""

    tokens: bytes
    keys: list[bytes]

    def __repr__(self) -> str:
        return f"<AlignedPrompt of {len(self.keys)} full blocks>"


def u32le(tokens: array[int]) -> bytes:
    """Token ids (`array('I')`) as the store and the block keys read them."""
    if sys.byteorder == "little":
        return tokens.tobytes()
    swapped = tokens[:]
    swapped.byteswap()
    return swapped.tobytes()


async def name_blocks(tokens: array[int], chain: ChainKey) -> AlignedPrompt:
    """Name every full block, letting the event loop run after each `SLICE_BLOCKS`."""
    encoded = u32le(tokens)
    whole_bytes = len(encoded) - len(encoded) % chain.block_bytes
    slice_bytes = SLICE_BLOCKS * chain.block_bytes
    keys: list[bytes] = []
    for start in range(0, whole_bytes, slice_bytes):
        if start:
            await asyncio.sleep(0)
        parent = keys[-1] if keys else chain.root
        keys += chain.extend(parent, encoded[start : min(start + slice_bytes, whole_bytes)])
    return AlignedPrompt(encoded, keys)
