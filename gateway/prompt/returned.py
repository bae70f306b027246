"""The tokens of an answer, and the text of them that is returned.

    token ─ bytes ─ whole characters ─ stop strings ─► text, and the tokens whose text that is

Which tokens belong to the text follows one rule, however the answer is cut into pieces:

    cut by a stop string     those before which fewer characters were complete than are returned
    any other end            all but the one that ended it, unless the text of that one is returned

A token is handed out with the piece that first returns some of its text, and one without a text of its own, such as a
special token or the first half of a character, with the next one that has some, or at the end.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

from cachestore.protocol import TokenLogprobs
from gateway.prompt.detokenize import Detokenizer
from gateway.prompt.stops import StopStrings
from gateway.prompt.tokens import Tokenizer


@dataclass(frozen=True, slots=True)
class ReturnedToken:
    """`offset`: how many characters of the answer were complete before it."""

    id: int
    offset: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """What one step adds to what is returned."""

    text: str
    tokens: list[ReturnedToken]


class ReturnedText:
    """Puts one answer together.

    Args:
        tokenizer: of the model.
        stops: strings that end the answer.
        end_ids: tokens that end it.
        min_tokens: a stop string counts from the token after so many on.
        stop_is_kept: whether the text of what ended the answer is returned, be it a string or a token; a special token
            and the model's own end token have none.

    Attributes:
        text: all that was returned so far.
        ended_by: the token of `end_ids` that ended the answer.
        returns_end: whether the text of that token is returned.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Collection[str] = (),
        end_ids: Collection[int] = (),
        *,
        min_tokens: int = 0,
        stop_is_kept: bool = False,
    ) -> None:
        self.text = ""
        self.ended_by: int | None = None
        self.returns_end = False
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopStrings(tuple(stops), kept=stop_is_kept)
        self._end_ids = frozenset(end_ids)
        kept = self._end_ids - set(tokenizer.stop_token_ids) if stop_is_kept else ()
        self._kept_end_ids = frozenset(token for token in kept if tokenizer.token_bytes(token))
        self._min_tokens = min_tokens
        self._count = 0
        self._decoded_characters = 0
        self._waiting: deque[ReturnedToken] = deque()
        # Where a character and a token end together: (characters of the text, tokens of the answer).
        self._common_ends = [(0, 0)]

    @property
    def stopped(self) -> bool:
        """Whether a stop string ended the answer."""
        return self._stops.matched

    def push(self, token: int, logprobs: TokenLogprobs | None = None) -> Part:
        """The next token. None may follow one that ended the answer."""
        self._count += 1
        if token in self._end_ids:
            self.ended_by = token
            self.returns_end = token in self._kept_end_ids
            if not self.returns_end:
                return Part("", [])
        self._waiting.append(ReturnedToken(token, self._decoded_characters, logprobs))
        decoded = self._detokenizer.push([token])
        self._decoded_characters += len(decoded)
        if not self._detokenizer.unfinished:
            self._common_ends.append((self._decoded_characters, self._count))
        return self._part(self._stops.push(decoded, too_early=self._is_too_early))

    def finish(self) -> Part:
        """What is left once no token follows."""
        last = self._stops.push(self._detokenizer.finish(), too_early=self._is_too_early)
        part = self._part(last + self._stops.finish())
        if not self.stopped:
            part.tokens.extend(self._waiting)
        self._waiting.clear()
        return part

    def whole(self) -> tuple[int, str]:
        """How many tokens of the answer have returned their text whole, up to the first that has not; the text of the
        others.
        """
        last = bisect_right(self._common_ends, len(self.text), key=lambda end: end[0])
        characters, tokens = self._common_ends[last - 1]
        return tokens, self.text[characters:]

    @property
    def _is_too_early(self) -> bool:
        return self._count <= self._min_tokens

    def _part(self, text: str) -> Part:
        self.text += text
        tokens = []
        while self._waiting and self._waiting[0].offset < len(self.text):
            tokens.append(self._waiting.popleft())
        return Part(text, tokens)
