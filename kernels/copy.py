"""Movement of whole blocks between pools: one implementation, whatever the backend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch


def copy_blocks(
    source: torch.Tensor, target: torch.Tensor, source_index: Sequence[int], target_index: Sequence[int]
) -> None:
    """Copy block `source_index[i]` of `source` over block `target_index[i]` of `target`, for every i.

    Neighbouring pairs become one copy. Asynchronous on the current stream where a device allows it: the
    caller records the event, and leaves both ends alone until then.

    Args:
        source, target: uint8 [blocks, block_bytes], on any two devices; the same tensor is allowed as long
            as no block is both read and written.
        source_index, target_index: block numbers, of equal length.

    Raises:
        ValueError: not uint8 blocks of one size, an index without a partner or outside its pool, or a
            block that is both source and target.
    """
    for name, pool in (("source", source), ("target", target)):
        if pool.dtype != torch.uint8 or pool.ndim != 2:
            shape = list(pool.shape)
            raise ValueError(f"{name} must be uint8 [blocks, block_bytes], not {pool.dtype} {shape}")
    if source.shape[1] != target.shape[1]:
        raise ValueError(f"blocks of {source.shape[1]} bytes do not fit blocks of {target.shape[1]} bytes")
    if len(source_index) != len(target_index):
        raise ValueError(f"{len(source_index)} source blocks for {len(target_index)} target blocks")
    # A slice outside the pool would be cut short in silence.
    for name, pool, index in (("source", source, source_index), ("target", target, target_index)):
        if index and not 0 <= min(index) <= max(index) < len(pool):
            raise ValueError(f"{name} blocks {min(index)} .. {max(index)} are outside 0 .. {len(pool) - 1}")
    if source.data_ptr() == target.data_ptr() and (both := set(source_index) & set(target_index)):
        raise ValueError(f"{len(both)} blocks of one pool are both source and target of the same copy")
    for first, onto, count in _runs(source_index, target_index):
        target[onto : onto + count].copy_(source[first : first + count], non_blocking=True)


def _runs(source_index: Sequence[int], target_index: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(first source block, first target block, blocks) of each stretch in which both advance by one."""
    start = 0
    for end in range(1, len(source_index) + 1):
        if (
            end == len(source_index)
            or source_index[end] != source_index[end - 1] + 1
            or target_index[end] != target_index[end - 1] + 1
        ):
            yield source_index[start], target_index[start], end - start
            start = end
