"""The kernels in Triton: what serves on CUDA and HIP devices, and anywhere in Triton's interpreter.

    attention.py           tensors → tiles → launches          `paged_attention`, `attention_workspace`
    attention_kernels.py   which sequence, which keys: prefill and decode
    softmax.py             the online softmax over one stretch of keys
    splits.py              putting the splits of a long decode together
    write.py               new keys and values into their slots  `write_kv`

Shapes and meanings are those of `kernels.torch_backend`. Nothing here waits for the device, so lengths, slots and
tables that are wrong are not found out. The first call with a new shape compiles, which takes seconds.
"""

from kernels.copy import copy_blocks
from kernels.latent import latent_attention, write_latent
from kernels.merge import merge_partials
from kernels.triton_backend.attention import attention_workspace, paged_attention
from kernels.triton_backend.write import write_kv

__all__ = [
    "attention_workspace",
    "copy_blocks",
    "latent_attention",
    "merge_partials",
    "paged_attention",
    "write_kv",
    "write_latent",
]
