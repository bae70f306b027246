"""`copy_blocks` against copying one block after the other, and how many copies it takes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.copy import copy_blocks
from kernels.torch_backend import copy_blocks as copy_blocks_of_the_backend


class CopyCount(TorchDispatchMode):
    """Counts the copies that reach a device."""

    copies = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.copies += func is torch.ops.aten.copy_.default
        return func(*args, **(kwargs or {}))


@contextmanager
def counted() -> Iterator[CopyCount]:
    with CopyCount() as count:
        yield count


def pool(blocks: int) -> torch.Tensor:
    return torch.randint(0, 256, (blocks, 512), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("source_index", "target_index", "copies"),
    [
        ([], [], 0),
        ([3], [5], 1),
        ([0, 1, 2, 3], [4, 5, 6, 7], 1),
        ([0, 1, 2, 3], [4, 5, 1, 2], 2),
        ([0, 1, 5, 6], [2, 3, 4, 5], 2),
        ([3, 2, 1], [3, 2, 1], 3),
        ([0, 0, 0], [1, 2, 3], 3),
    ],
)
def test_neighbouring_pairs_become_one_copy(
    source_index: list[int], target_index: list[int], copies: int
) -> None:
    source, target = pool(8), pool(8)
    with counted() as count:
        copy_blocks(source, target, source_index, target_index)
    assert count.copies == copies
    assert torch.equal(target[target_index], source[source_index])


def test_blocks_move_inside_one_pool_unless_one_is_both_read_and_written() -> None:
    blocks = pool(6)
    expected = blocks[[0, 1]].clone()
    copy_blocks(blocks, blocks, [0, 1], [4, 5])
    assert torch.equal(blocks[4:], expected)
    with pytest.raises(ValueError, match="1 blocks of one pool are both source and target"):
        copy_blocks(blocks, blocks, [0, 1], [1, 2])


def test_what_does_not_fit_is_refused_before_anything_is_copied() -> None:
    source, target = pool(4), pool(6)
    before = target.clone()
    for arguments, message in (
        ((source, target, [0, 4], [0, 1]), r"source blocks 0 .. 4 are outside 0 .. 3"),
        ((source, target, [0, -1], [0, 1]), r"source blocks -1 .. 0 are outside"),
        ((source, target, [0, 1], [0, 6]), r"target blocks 0 .. 6 are outside 0 .. 5"),
        ((source, target, [0, 1], [0]), "2 source blocks for 1 target blocks"),
        ((source[:, :256], target, [0], [0]), "blocks of 256 bytes do not fit blocks of 512 bytes"),
        ((source.view(torch.int8), target, [0], [0]), "source must be uint8"),
        ((source, target[0], [0], [0]), r"target must be uint8 \[blocks, block_bytes\]"),
    ):
        with pytest.raises(ValueError, match=message):
            copy_blocks(*arguments)
    assert torch.equal(target, before)
    copy_blocks(source, target, [0], [0])
    assert torch.equal(target[0], source[0])


def test_the_backend_hands_out_the_same_copy() -> None:
    assert copy_blocks_of_the_backend is copy_blocks
