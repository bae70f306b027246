"""The tile table: something for every shape and target that is served, and never more than a target has."""

from __future__ import annotations

import itertools

import pytest

from kernels.tiles import TABLE, HeadShape, choose, family, shortest_split_tokens

LIMITS = {"sm_80": 166_912, "sm_86": 101_376, "sm_89": 101_376, "sm_90": 232_448, "sm_100": 232_448, "gfx942": 65_536}
DIMS = [(dim, dim) for dim in range(8, 257, 8)] + [(192, 128), (128, 192), (64, 256), (576, 512)]


def shape(dims: tuple[int, int] = (128, 128), group: int = 4, query_bytes: int = 2, cache_bytes: int = 2) -> HeadShape:
    return HeadShape(*dims, group, query_bytes, cache_bytes)


@pytest.mark.parametrize("target", LIMITS)
def test_every_shape_has_tiles_that_fit_every_target(target: str) -> None:
    for dims, group, sizes in itertools.product(DIMS[:-1], (1, 3, 8, 71), ((2, 2), (2, 1), (4, 4), (4, 1), (2, 4))):
        choice = choose(shape(dims, group, *sizes), target, LIMITS[target])
        for tiles in (choice.prefill, choice.decode):
            assert tiles.row_tile >= 16  # what a matrix instruction takes at least
            assert tiles.key_tile >= 16
            assert choice.split_tokens % tiles.key_tile == 0
        assert choice.split_tokens >= shortest_split_tokens()


def test_a_decode_has_the_rows_that_its_group_needs() -> None:
    for group, rows in ((1, 16), (9, 16), (16, 16), (17, 32), (32, 32), (33, 64), (71, 64)):
        assert choose(shape(group=group), "sm_90", LIMITS["sm_90"]).decode.row_tile == rows


def test_tiles_depend_on_the_geometry_alone() -> None:
    assert choose(shape(), "sm_90", 232_448) == choose(shape(), "sm_90", 400_000)
    assert choose(shape(), "sm_90", 232_448) != choose(shape((256, 256)), "sm_90", 232_448)


@pytest.mark.parametrize(
    ("target", "of"),
    [("sm_86", "sm_80"), ("sm_89", "sm_80"), ("sm_90", "sm_90"), ("sm_100", "sm_100"),
     ("sm_103", "sm_100"), ("sm_110", "sm_100"), ("sm_120", "sm_80"), ("gfx942", "gfx942"), ("gfx950", "gfx942"),
     ("gfx90a", "gfx942")],
)  # fmt: skip
def test_a_target_without_rows_uses_those_of_its_kin(target: str, of: str) -> None:
    assert family(target) == of


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_b075_a_decode_of_576_takes_what_fits_or_is_refused_at_once(target: str) -> None:
    wide = shape((576, 512), group=64)
    for limit, rows in ((232_448, 64), (101_376, 16), (65_536, 16)):
        decode = choose(wide, target, limit).decode
        assert decode.row_tile == rows
        (row,) = [r for r in TABLE if (r.family, r.variant, r.most_key_dim, r.tiles) == (target, "decode", 576, decode)]
        assert row.shared_memory_bytes <= limit
    with pytest.raises(ValueError, match=r"576 and values of 512 in 16 bits needs at least 53760 bytes .* 20000"):
        choose(wide, target, 20_000)


def test_what_the_table_does_not_have_is_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match="no prefill tiles for a head dim of 584 and values of 8 in 16 bits on sm_90"):
        choose(shape((584, 8)), "sm_90", 232_448)
    with pytest.raises(ValueError, match=r"needs at least \d+ bytes of shared memory, and sm_90 has 1000"):
        choose(shape(), "sm_90", 1000)
