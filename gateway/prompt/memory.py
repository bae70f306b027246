"""What was generated, so that the next turn of a conversation is sent as it was generated.

The text of an answer need not tokenise to the tokens that spelled it. For every finished answer the exact ids of prompt
and answer are kept under the segments they spell; a later chat whose rendering begins with those segments begins with
those ids, so it finds every whole block of them. A miss costs tokenising and nothing else.

Segments are compared, never flat text: a control token that a user typed is part of a `content` segment and can't
be taken for the template's own. They are compared by digest, the owner's name in it, so no text is kept.
"""

from __future__ import annotations

import hashlib
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from gateway.prompt.tokens import Segment
from policies.encoding import encode

LIMIT_BYTES = 64 << 20
# Of an entry beside its tokens: key, digest, objects.
ENTRY_BYTES = 400


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose conversations: nobody else's are looked at. `scope` is the request's `cache_salt`."""

    account: bytes
    epoch: int
    scope: bytes


class ConversationMemory:
    """Token ids of answered prefixes, least recently used out. Safe to use from several threads."""

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self.size_bytes = 0
        self._limit_bytes = limit_bytes
        self._entries: OrderedDict[bytes, array[int]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def recall(self, owner: Owner, segments: Sequence[Segment]) -> tuple[int, array[int]]:
        """The longest remembered beginning of `segments`: how many of them, and their ids; (0, none) for a miss."""
        digests = list(_digests(owner, segments))
        with self._lock:
            for count in range(len(digests), 0, -1):
                digest = digests[count - 1]
                if (tokens := self._entries.get(digest)) is not None:
                    self._entries.move_to_end(digest)
                    return count, tokens[:]
        return 0, array("I")

    def remember(self, owner: Owner, segments: Sequence[Segment], tokens: array[int]) -> None:
        """Keep the ids that spell these segments; one that is larger than the whole memory is not kept."""
        *_, digest = _digests(owner, segments)
        size_bytes = _size_bytes(tokens)
        if size_bytes > self._limit_bytes:
            return
        with self._lock:
            if (replaced := self._entries.pop(digest, None)) is not None:
                self.size_bytes -= _size_bytes(replaced)
            # A copy is as long as it must be; what was appended to has room for more.
            self._entries[digest] = tokens[:]
            self.size_bytes += size_bytes
            while self.size_bytes > self._limit_bytes:
                _, evicted = self._entries.popitem(last=False)
                self.size_bytes -= _size_bytes(evicted)


def _size_bytes(tokens: array[int]) -> int:
    return len(tokens) * tokens.itemsize + ENTRY_BYTES


def _digests(owner: Owner, segments: Iterable[Segment]) -> Iterator[bytes]:
    """After each segment, a digest of the owner and all up to it; lengths keep kinds and texts apart."""
    running = hashlib.sha256(encode("saltern/v1/conversation", owner.account, owner.epoch, owner.scope))
    for segment in segments:
        text = segment.text.encode("utf-8", "surrogatepass")
        running.update(segment.kind.encode("ascii") + len(text).to_bytes(8, "big") + text)
        yield running.copy().digest()
