"""Token ids to text as they come, never half a character.

`tokenizers` has a `DecodeStream`, but it waits for as long as its text ends in U+FFFD and decodes it again at
every step: a model that emits invalid bytes would hold text back without bound, at quadratic cost.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from gateway.prompt.tokens import Tokenizer


class Detokenizer:
    """The text of one answer.

    Up to three bytes of an unfinished character wait for the next token; bytes that cannot become a character
    are U+FFFD at once, one for each maximal invalid part (Unicode 16, section 3.9). Special tokens have no
    text. A space that the first token stands for is kept: the answer continues the prompt.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete."""
        return self._utf8.decode(b"".join(map(self._tokenizer.token_bytes, token_ids)))

    @property
    def unfinished(self) -> bool:
        """Whether a character has begun and waits for its rest."""
        return bool(self._utf8.getstate()[0])

    def finish(self) -> str:
        """What is left at the end of the answer: nothing, or one U+FFFD for an unfinished character."""
        return self._utf8.decode(b"", True)
