"""What an answer tells of its tokens beside their text: ids and log probabilities, as each route words them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import UNSET, UnsetType

from gateway.http.answers import ChatLogprobs, TextLogprobs, TokenLogprob, TopLogprob
from gateway.prompt.returned import ReturnedToken
from gateway.prompt.tokens import Prompt, Tokenizer


@dataclass(frozen=True, slots=True)
class Told:
    """What one request asked to be told.

    Attributes:
        tokenizer: spells the tokens.
        logprobs, token_ids: whether the answer has them.
        prompts: each for `n` choices.
    """

    tokenizer: Tokenizer
    logprobs: bool
    token_ids: bool
    prompts: Sequence[Prompt]
    n: int

    def ids(self, tokens: Sequence[ReturnedToken]) -> list[int] | UnsetType:
        return [token.id for token in tokens] if self.token_ids else UNSET

    def prompt_ids(self, index: int) -> list[int] | UnsetType:
        """Of the prompt of choice `index`."""
        return self.prompts[index // self.n].tokens.tolist() if self.token_ids else UNSET

    def chat_logprobs(self, tokens: Sequence[ReturnedToken]) -> ChatLogprobs | None:
        return ChatLogprobs([self._entry(token) for token in tokens]) if self.logprobs else None

    def text_logprobs(self, tokens: Sequence[ReturnedToken]) -> TextLogprobs | None:
        if not self.logprobs:
            return None
        entries = [self._entry(token) for token in tokens]
        return TextLogprobs(
            tokens=[entry.token for entry in entries],
            token_logprobs=[entry.logprob for entry in entries],
            top_logprobs=[_by_text(entry) for entry in entries],
            text_offset=[token.offset for token in tokens],
        )

    def _entry(self, token: ReturnedToken) -> TokenLogprob:
        assert token.logprobs is not None
        likeliest = [self._read(*each) for each in token.logprobs.top]
        sampled = self._read(token.id, token.logprobs.logprob)
        return TokenLogprob(sampled.token, sampled.logprob, sampled.bytes, likeliest)

    def _read(self, token_id: int, logprob: float) -> TopLogprob:
        spelt = self.tokenizer.token_bytes(token_id) or self.tokenizer.spelling(token_id).encode("utf-8")
        return TopLogprob(spelt.decode("utf-8", "replace"), logprob, list(spelt))


def _by_text(entry: TokenLogprob) -> dict[str, float]:
    """The likeliest tokens and the sampled one; of several that read alike, the likeliest."""
    found: dict[str, float] = {}
    for each in (*entry.top_logprobs, entry):
        found.setdefault(each.token, each.logprob)
    return found
