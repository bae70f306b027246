"""The header of a safetensors file: what each tensor is and where its bytes lie, without reading them.

Format: `u64le length`, then that many bytes of JSON, then the tensors
(https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cachestore.start_error import ModelError

DTYPE_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16,
    "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F8_E8M0": 8,
    "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4, "C64": 64,
}  # fmt: skip
MAX_HEADER_BYTES = 100_000_000  # the format's own limit

_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file; `begin` and `end` count bytes from the start of the file."""

    dtype: str
    dims: tuple[int, ...]
    file: Path
    begin: int
    end: int

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    @property
    def size_bytes(self) -> int:
        return self.end - self.begin


def read_header(file: Path) -> dict[str, TensorEntry]:
    """The tensors of `file` by name.

    Raises:
        ModelError: it isn't a safetensors file, or it is cut short.
        OSError: it can't be read.
    """
    file_bytes = file.stat().st_size
    with open(file, "rb") as content:
        prefix = content.read(_LENGTH.size)
        if len(prefix) < _LENGTH.size:
            raise ModelError(f"{file} is not a safetensors file: it has only {file_bytes} bytes")
        (header_bytes,) = _LENGTH.unpack(prefix)
        if header_bytes > min(MAX_HEADER_BYTES, file_bytes - _LENGTH.size):
            raise ModelError(
                f"{file} is not a whole safetensors file: it announces a header of {header_bytes} bytes "
                f"and has {file_bytes} bytes"
            )
        header = content.read(header_bytes)
    data_begin = _LENGTH.size + header_bytes
    try:
        fields: dict[str, Any] = json.loads(header)
        tensors = {
            name: _entry(field, file, data_begin) for name, field in fields.items() if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{file} is not a safetensors file: its header can't be read") from error
    expected_bytes = max((tensor.end for tensor in tensors.values()), default=data_begin)
    if expected_bytes > file_bytes:
        raise ModelError(
            f"{file} is cut short: its header promises {expected_bytes} bytes, it has {file_bytes}; fetch it again"
        )
    return tensors


def _entry(field: dict[str, Any], file: Path, data_begin: int) -> TensorEntry:
    dims = tuple(int(size) for size in field["shape"])
    begin, end = (data_begin + int(offset) for offset in field["data_offsets"])
    entry = TensorEntry(str(field["dtype"]), dims, file, begin, end)
    whole = entry.size_bytes * 8 == entry.elements * DTYPE_BITS[entry.dtype]
    if min(dims, default=0) < 0 or begin < data_begin or not whole:
        raise ValueError(f"{entry.dtype} {list(dims)} does not take {entry.size_bytes} bytes")
    return entry
