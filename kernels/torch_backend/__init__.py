"""The kernels in plain PyTorch: correct on any device, and what serves on CPU.

Shapes: T new tokens packed over S sequences; H query heads, G kv heads (H a multiple of G); D key dim, Dv
value dim; N blocks of B tokens; M entries of a block table.

Attention works on copies that lie in memory the same way in any batch: a row never depends on its company,
bit for bit. Sequences with one query token are taken together where their keys are padded to the same
length, all others one by one, query tile by query tile (Rabe and Staats, arXiv:2112.05682), so that scores
stay small and keys that no query of a tile sees are not visited.
"""

from kernels.copy import copy_blocks
from kernels.latent import latent_attention, write_latent
from kernels.merge import merge_partials
from kernels.torch_backend.attention import attention_workspace, paged_attention
from kernels.torch_backend.write import write_kv

__all__ = [
    "attention_workspace",
    "copy_blocks",
    "latent_attention",
    "merge_partials",
    "paged_attention",
    "write_kv",
    "write_latent",
]
