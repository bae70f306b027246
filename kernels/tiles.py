"""Which tiles attention works with: a table made offline, looked up by shape, never tuned at run time.

Split length, key tile and with them the order of additions depend on what a row here says and on nothing else: not on
the batch, its lengths or the load. The rows were made from compiled code (`python -m kernels.report`): they are the
largest tiles that spill nothing with every option on, and keep the tensor cores and 16-byte loads. None has been timed
on a device yet.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Literal

Variant = Literal["prefill", "decode"]

MOST_ROWS = 64  # of a decode tile: query heads that share a KV head
# Keys of one program of a decode. Partial results of a split are value_dim + 1 floats per query head: 1/64 of the
# keys and values it has read, for four query heads per KV head in 16 bits.
SPLIT_TOKENS = 512
# Where keys are so wide that partial results are large.
LONG_SPLIT_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Attention's shape as far as tiles depend on it.

    Attributes:
        group: query heads that share a KV head.
        query_bytes, cache_bytes: of an element.
    """

    key_dim: int
    value_dim: int
    group: int
    query_bytes: int
    cache_bytes: int


@dataclass(frozen=True, slots=True)
class Tiles:
    """Rows and keys of a tile, the warps that work on it, and the stages of their pipeline."""

    row_tile: int
    key_tile: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Choice:
    """Tiles of both variants; `split_tokens` is a multiple of the decode's key tile."""

    prefill: Tiles
    decode: Tiles
    split_tokens: int


@dataclass(frozen=True, slots=True)
class Row:
    """Tiles for one family of targets, up to a dim of keys and one of values.

    Attributes:
        kind: of the cache's elements; `32 bits` where those or the query's have 32.
        tiles: a decode has the rows that its group needs, at most these.
        shared_memory_bytes: what the compiled kernel takes at most: with these dims and rows and any options.
    """

    family: str
    variant: Variant
    kind: Literal["8 bits", "16 bits", "32 bits"]
    most_key_dim: int
    most_value_dim: int
    tiles: Tiles
    shared_memory_bytes: int


# The first row that matches and fits is taken. Wider than 256 there is latent attention, which has no options.
TABLE = (
    Row("sm_80", "prefill", "16 bits", 96, 96, Tiles(128, 32, 8, 3), 37376),
    Row("sm_80", "prefill", "16 bits", 128, 128, Tiles(64, 64, 8, 3), 57856),
    Row("sm_80", "prefill", "16 bits", 256, 256, Tiles(64, 32, 8, 3), 69888),
    Row("sm_80", "prefill", "16 bits", 576, 512, Tiles(16, 16, 8, 2), 53760),
    Row("sm_80", "prefill", "8 bits", 64, 64, Tiles(128, 32, 8, 3), 21120),
    Row("sm_80", "prefill", "8 bits", 256, 256, Tiles(64, 32, 8, 3), 53888),
    Row("sm_80", "prefill", "32 bits", 256, 256, Tiles(16, 16, 4, 1), 33856),
    Row("sm_80", "decode", "16 bits", 128, 128, Tiles(64, 64, 4, 4), 57856),
    Row("sm_80", "decode", "16 bits", 256, 256, Tiles(64, 32, 8, 3), 69888),
    Row("sm_80", "decode", "16 bits", 576, 512, Tiles(64, 16, 8, 2), 110592),
    Row("sm_80", "decode", "16 bits", 576, 512, Tiles(16, 16, 8, 2), 53760),
    Row("sm_80", "decode", "8 bits", 128, 128, Tiles(64, 64, 4, 3), 42240),
    Row("sm_80", "decode", "8 bits", 256, 256, Tiles(64, 32, 8, 3), 53888),
    Row("sm_80", "decode", "32 bits", 256, 256, Tiles(16, 16, 8, 1), 33856),
    Row("sm_90", "prefill", "16 bits", 192, 128, Tiles(128, 64, 8, 3), 132096),
    Row("sm_90", "prefill", "16 bits", 256, 256, Tiles(64, 64, 8, 3), 164864),
    Row("sm_90", "prefill", "16 bits", 576, 512, Tiles(16, 16, 8, 2), 53760),
    Row("sm_90", "prefill", "8 bits", 192, 128, Tiles(128, 64, 8, 3), 87552),
    Row("sm_90", "prefill", "8 bits", 256, 256, Tiles(64, 16, 8, 3), 49472),
    Row("sm_90", "prefill", "32 bits", 256, 256, Tiles(16, 16, 4, 1), 33856),
    Row("sm_90", "decode", "16 bits", 128, 128, Tiles(64, 64, 4, 4), 82944),
    Row("sm_90", "decode", "16 bits", 256, 256, Tiles(64, 32, 8, 3), 98560),
    Row("sm_90", "decode", "16 bits", 576, 512, Tiles(64, 16, 8, 2), 143360),
    Row("sm_90", "decode", "16 bits", 576, 512, Tiles(16, 16, 8, 2), 53760),
    Row("sm_90", "decode", "8 bits", 128, 128, Tiles(64, 64, 8, 4), 50432),
    Row("sm_90", "decode", "8 bits", 256, 256, Tiles(64, 32, 8, 3), 66176),
    Row("sm_90", "decode", "32 bits", 256, 256, Tiles(16, 16, 8, 1), 33856),
    Row("sm_100", "prefill", "16 bits", 192, 128, Tiles(128, 64, 8, 3), 133120),
    Row("sm_100", "prefill", "16 bits", 256, 256, Tiles(64, 64, 8, 3), 165888),
    Row("sm_100", "prefill", "16 bits", 576, 512, Tiles(16, 16, 8, 2), 53760),
    Row("sm_100", "prefill", "8 bits", 192, 128, Tiles(128, 64, 8, 3), 103968),
    Row("sm_100", "prefill", "8 bits", 256, 256, Tiles(64, 16, 8, 3), 57696),
    Row("sm_100", "prefill", "32 bits", 256, 256, Tiles(16, 16, 4, 1), 33856),
    Row("sm_100", "decode", "16 bits", 128, 128, Tiles(64, 64, 4, 4), 82944),
    Row("sm_100", "decode", "16 bits", 256, 256, Tiles(64, 32, 8, 3), 99104),
    Row("sm_100", "decode", "16 bits", 576, 512, Tiles(16, 16, 8, 2), 53760),
    Row("sm_100", "decode", "8 bits", 96, 96, Tiles(64, 32, 4, 4), 30112),
    Row("sm_100", "decode", "8 bits", 128, 128, Tiles(64, 64, 4, 4), 66848),
    Row("sm_100", "decode", "8 bits", 256, 256, Tiles(64, 32, 8, 3), 82592),
    Row("sm_100", "decode", "32 bits", 256, 256, Tiles(16, 16, 8, 1), 33856),
    Row("gfx942", "prefill", "16 bits", 128, 128, Tiles(64, 64, 4, 1), 16384),
    Row("gfx942", "prefill", "16 bits", 256, 256, Tiles(64, 32, 4, 1), 32768),
    Row("gfx942", "prefill", "16 bits", 576, 512, Tiles(16, 16, 8, 1), 16384),
    Row("gfx942", "prefill", "8 bits", 256, 256, Tiles(64, 32, 4, 1), 32768),
    Row("gfx942", "prefill", "32 bits", 256, 256, Tiles(16, 16, 4, 1), 16384),
    Row("gfx942", "decode", "16 bits", 128, 128, Tiles(64, 64, 4, 1), 16384),
    Row("gfx942", "decode", "16 bits", 256, 256, Tiles(64, 32, 4, 1), 32768),
    Row("gfx942", "decode", "16 bits", 576, 512, Tiles(64, 16, 8, 1), 65536),
    Row("gfx942", "decode", "16 bits", 576, 512, Tiles(16, 16, 8, 1), 16384),
    Row("gfx942", "decode", "8 bits", 256, 256, Tiles(64, 32, 4, 1), 32768),
    Row("gfx942", "decode", "32 bits", 256, 256, Tiles(64, 16, 4, 1), 65536),
)


@functools.cache
def choose(shape: HeadShape, target: str, shared_memory_bytes: int) -> Choice:
    """Tiles for a shape on a target.

    Args:
        target: an architecture as compilers name it: `sm_90`, `gfx942`. One that has no rows gets those of its kin.
        shared_memory_bytes: what a program can have there.

    Raises:
        ValueError: the table has nothing for such a head dim, or nothing that fits.
    """
    prefill = find_row(shape, target, "prefill", shared_memory_bytes).tiles
    decode = find_row(shape, target, "decode", shared_memory_bytes).tiles
    rows = min(decode.row_tile, max(16, 1 << (shape.group - 1).bit_length()))
    wide = shape.key_dim > 256
    return Choice(prefill, replace(decode, row_tile=rows), LONG_SPLIT_TOKENS if wide else SPLIT_TOKENS)


def family(target: str) -> str:
    """The architecture whose rows a target uses."""
    if target.startswith("gfx"):
        return "gfx942"
    number = int(target.removeprefix("sm_"))
    # 12.x has the matrix instructions of 8.x, with the larger ones of 9.x and 10.x left out.
    return "sm_90" if number // 10 == 9 else "sm_100" if number // 10 in (10, 11) else "sm_80"


def find_row(shape: HeadShape, target: str, variant: Variant, shared_memory_bytes: int) -> Row:
    """The first row of the table that matches and fits; arguments and errors as of `choose`."""
    dim = f"{shape.key_dim} and values of {shape.value_dim}"
    kind = "32 bits" if max(shape.query_bytes, shape.cache_bytes) > 2 else f"{8 * shape.cache_bytes} bits"
    rows = [
        row
        for row in TABLE
        if row.family == family(target) and row.variant == variant and row.kind == kind
        and row.most_key_dim >= shape.key_dim and row.most_value_dim >= shape.value_dim
    ]
    for row in rows:
        if row.shared_memory_bytes <= shared_memory_bytes:
            return row
    if not rows:
        raise ValueError(f"no {variant} tiles for a head dim of {dim} in {kind} on {target}")
    least = min(row.shared_memory_bytes for row in rows)
    raise ValueError(
        f"{variant} with a head dim of {dim} in {kind} needs at least {least} bytes of shared memory, "
        f"and {target} has {shared_memory_bytes}"
    )


def shortest_split_tokens() -> int:
    """The shortest split that `choose` can choose."""
    return SPLIT_TOKENS
