"""The names of a request's blocks: under the tenant's salt, in the epoch that the request is admitted in."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from gateway.prompt.align import AlignedPrompt, name_blocks
from gateway.prompt.block_keys import ChainKey, Context
from gateway.prompt.tokens import Prompt
from gateway.tenants.directory import Directory


class Naming:
    """The block names of a request's prompts, made once under each epoch that it meets."""

    def __init__(self, directory: Directory, tenant_id: str, context: Context, prompts: Sequence[Prompt]) -> None:
        self._directory = directory
        self._tenant_id = tenant_id
        self._context = context
        self._prompts = prompts
        self._epoch = 0
        self._chain: ChainKey | None = None
        self._aligned: dict[int, AlignedPrompt] = {}
        # Whoever asks gets an answer in turn, so that choices reach the store in their order.
        self._turn = asyncio.Lock()

    async def of(self, number: int, epoch: int) -> tuple[ChainKey, AlignedPrompt]:
        """Raises SaltUnavailable."""
        async with self._turn:
            if self._chain is None or self._epoch != epoch:
                self._chain = ChainKey(await self._directory.salt(self._tenant_id, epoch), self._context)
                self._epoch, self._aligned = epoch, {}
            if number not in self._aligned:
                self._aligned[number] = await name_blocks(self._prompts[number].tokens, self._chain)
            return self._chain, self._aligned[number]

    async def all(self, epoch: int) -> None:
        """Raises SaltUnavailable."""
        for number in range(len(self._prompts)):
            await self.of(number, epoch)
