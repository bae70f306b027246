"""Stop strings in a text that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Cuts an answer before the first stop string, or behind it.

    The match that is complete first wins, of several that end together the longest: so where the text is cut
    does not depend on how it was split. Text that may yet become a stop string is held back unless that is kept; the
    rest leaves at once. Each character costs amortised constant time per stop string.

    Args:
        kept: whether the stop string is a part of the answer.

    Attributes:
        matched: a stop string was found; the answer is over.
    """

    def __init__(self, stops: Sequence[str], *, kept: bool = False) -> None:
        self._stops = [_Prefix(stop) for stop in stops]
        self._kept = kept
        self._held = ""
        self.matched = False

    def push(self, text: str, *, too_early: bool = False) -> str:
        """The text that can be sent now. After a match there is none.

        Args:
            too_early: a stop string that is complete within this text is none.
        """
        if self.matched:
            return ""
        held_characters = len(self._held)
        self._held += text
        for end, character in enumerate(text, start=held_characters + 1):
            complete = [stop.length for stop in self._stops if stop.advance(character)]
            if complete and not too_early:
                self.matched = True
                return self._release(end if self._kept else end - max(complete))
        begun = 0 if self._kept else max((stop.begun for stop in self._stops), default=0)
        return self._release(len(self._held) - begun)

    def finish(self) -> str:
        """What was held back when the answer ended without a match."""
        return "" if self.matched else self._release(len(self._held))

    def _release(self, characters: int) -> str:
        released, self._held = self._held[:characters], self._held[characters:]
        return released


class _Prefix:
    """How much of a stop string the text so far ends with, less than all (Knuth, Morris and Pratt, 1977)."""

    __slots__ = ("_borders", "_stop", "begun", "length")

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self.length = len(stop)
        self.begun = 0
        # Of each prefix, the longest proper prefix that it also ends with.
        self._borders = [0]
        border = 0
        for character in stop[1:]:
            while border and stop[border] != character:
                border = self._borders[border - 1]
            border += stop[border] == character
            self._borders.append(border)

    def advance(self, character: str) -> bool:
        """Whether the text ends with the whole stop string, `character` included."""
        while self.begun and self._stop[self.begun] != character:
            self.begun = self._borders[self.begun - 1]
        self.begun += self._stop[self.begun] == character
        if self.begun < self.length:
            return False
        self.begun = self._borders[-1]
        return True
