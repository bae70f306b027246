"""The model that a connected store serves, as the gateway needs it: a name, a tokenizer, a template, limits."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from cachestore.protocol import Welcome
from gateway.prompt.memory import ConversationMemory
from gateway.prompt.model_files import ModelFilesError, read_model_files
from gateway.prompt.template import ChatTemplate
from gateway.prompt.tokens import Tokenizer


@dataclass(frozen=True, slots=True)
class ServedModel:
    """
    Attributes:
        name: what clients call it.
        created: unix seconds.
        store: what the store said of itself.
        memory: conversations answered with this model; gone with it.
    """

    name: str
    created: int
    store: Welcome
    tokenizer: Tokenizer
    template: ChatTemplate
    memory: ConversationMemory

    @classmethod
    def open(cls, store: Welcome, directory: Path, name: str | None) -> ServedModel:
        """Read the model's text files. Blocking: for a thread.

        Args:
            directory: the store's model directory, or another with the same files.
            name: what clients call it; the directory's name when None.

        Raises:
            ModelFilesError: files are missing or wrong, or differ from those of the store.
        """
        files = read_model_files(directory)
        if files.fingerprint != store.tokenizer_fingerprint:
            raise ModelFilesError(
                f"{directory}: the tokenizer files have fingerprint {files.fingerprint.hex()[:16]}, the store's in "
                f"{store.model_dir} have {store.tokenizer_fingerprint.hex()[:16]}; give both the same model"
            )
        tokenizer = Tokenizer(files)
        created = int(time.time())
        template = ChatTemplate(files, tokenizer)
        return cls(name or directory.name, created, store, tokenizer, template, ConversationMemory())

    def on(self, store: Welcome) -> ServedModel | None:
        """The same model on a store that came back; None when anything that a block depends on is another."""
        if replace(store, store=self.store.store) != self.store:
            return None
        return dataclasses.replace(self, store=store)

    @property
    def context_tokens(self) -> int:
        return self.store.limits.max_context_tokens
