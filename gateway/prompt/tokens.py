"""Text to token ids and back to bytes, with the model's own `tokenizers` file."""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import tokenizers

from gateway.http.errors import bad_value
from gateway.prompt.model_files import ModelFiles, ModelFilesError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a rendered chat: a special token that the template wrote, or anything else as plain text."""

    kind: Literal["control", "content"]
    text: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the model reads.

    Attributes:
        tokens: ids (`array('I')`).
        segments: what they spell, for a chat.
        remembered_tokens: how many of them were not tokenised again.
    """

    tokens: array[int]
    segments: tuple[Segment, ...] = ()
    remembered_tokens: int = 0

    def __repr__(self) -> str:
        return f"<Prompt of {len(self.tokens)} tokens>"


class Tokenizer:
    """The model's tokenizer. Encoding releases the GIL and may run in a thread.

    Attributes:
        vocabulary_tokens: one more than the highest id.
        longest_token_bytes: no token stands for more bytes of text than this.
        stop_token_ids: ids that end an answer: of generation_config.json, else of `eos_token`.
        control: matches the spelling of any special token.
        control_in_rendering: the same, with the white space that such a token swallows.
        control_ids: ids of special tokens, without the one for unknown characters.
    """

    def __init__(self, files: ModelFiles) -> None:
        try:
            self._parsing = tokenizers.Tokenizer.from_buffer(files.tokenizer_json)
            self._plain = tokenizers.Tokenizer.from_buffer(files.tokenizer_json)
            config = json.loads(files.tokenizer_json)
        except Exception as error:  # `tokenizers` raises no narrower class
            path = files.directory / "tokenizer.json"
            raise ModelFilesError(f"{path}: not a tokenizer ({type(error).__name__})") from None
        if self._parsing.decoder is None:
            raise ModelFilesError(f"{files.directory / 'tokenizer.json'}: no decoder, so ids have no text")
        self._plain.encode_special_tokens = True
        for tokenizer in (self._parsing, self._plain):
            tokenizer.no_truncation()
            tokenizer.no_padding()
            if hasattr(tokenizer.model, "_resize_cache"):
                # It remembers words across tenants: what one sent would be tokenised faster for another.
                tokenizer.model._resize_cache(0)

        special = [token for token in config["added_tokens"] if token["special"]]
        unknown = config["model"].get("unk_token")
        self.control_ids = frozenset(token["id"] for token in special if token["content"] != unknown)
        self.control = _alternatives([re.escape(token["content"]) for token in _longest_first(special)])
        self.control_in_rendering = _alternatives([_with_white_space(token) for token in _longest_first(special)])
        self._control_beginnings = frozenset(
            token["content"][:end] for token in special for end in range(1, len(token["content"]))
        )
        self._longest_beginning = max(map(len, self._control_beginnings), default=0)
        self._silent_ids = frozenset(token["id"] for token in special)

        vocabulary = self._parsing.get_vocab(with_added_tokens=True)
        self.vocabulary_tokens = max(vocabulary.values()) + 1
        self.longest_token_bytes = max(len(token.encode("utf-8")) for token in vocabulary)
        eos = vocabulary.get(files.special_tokens.get("eos_token", ""))
        self.stop_token_ids = files.eos_token_ids or (() if eos is None else (eos,))
        with_added, without = self._encode("a", add_special_tokens=True), self.encode("a")
        self._bos = None if with_added[:1] == without[:1] else with_added[0]

        decoders = config["decoder"].get("decoders", [config["decoder"]])
        kinds = {decoder["type"] for decoder in decoders}
        self._is_byte_level = "ByteLevel" in kinds
        self._has_byte_tokens = "ByteFallback" in kinds
        self._token_bytes: dict[int, bytes] = {}

    def completion(self, text: str) -> Prompt:
        """A prompt that is the caller's from the first token on: control tokens are parsed, one BOS at most.

        Raises:
            ApiError: 400 when nothing is left to read.
        """
        tokens = self._encode(text, add_special_tokens=True)
        while self._bos is not None and len(tokens) > 1 and tokens[0] == tokens[1] == self._bos:
            del tokens[0]
        if not tokens:
            raise bad_value("prompt", "The prompt has no tokens; send text that the model can read.")
        return Prompt(tokens)

    def given(self, ids: Sequence[int]) -> Prompt:
        """A prompt of ids, used unchanged.

        Raises:
            ApiError: 400 for an id that the vocabulary lacks.
        """
        if (highest := max(ids)) >= self.vocabulary_tokens:
            at = f"prompt[{ids.index(highest)}]"
            raise bad_value(at, f"{highest} is no token id; this model has 0 to {self.vocabulary_tokens - 1}.")
        return Prompt(array("I", ids))

    def encode(self, text: str) -> array[int]:
        """Ids of `text`, special tokens parsed, nothing added."""
        return self._encode(text, add_special_tokens=False)

    def encode_plain(self, text: str) -> array[int]:
        """Ids of `text` with every spelling of a special token as ordinary characters.

        Raises:
            ApiError: 400 if this vocabulary has no ordinary tokens for such a spelling.
        """
        (encoding,) = self._plain.encode_batch_fast([text], add_special_tokens=False)
        if not self.control_ids.isdisjoint(encoding.ids):
            message = "A message spells a control token that this model's vocabulary cannot write as text; reword it."
            raise bad_value("messages", message)
        return array("I", encoding.ids)

    def begun_control(self, text: str) -> str:
        """The longest beginning of a special token's spelling that `text` ends with; empty where there is none."""
        for characters in range(min(self._longest_beginning, len(text)), 0, -1):
            if (end := text[-characters:]) in self._control_beginnings:
                return end
        return ""

    def spelling(self, token_id: int) -> str:
        """How a token is written; empty for an id that has no token."""
        return self._parsing.id_to_token(token_id) or ""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text that has begun; none for special tokens and unused ids."""
        found = self._token_bytes.get(token_id)
        if found is None:
            found = self._token_bytes[token_id] = self._bytes_of(token_id)
        return found

    def _encode(self, text: str, *, add_special_tokens: bool) -> array[int]:
        # The batch call is the one that releases the GIL.
        (encoding,) = self._parsing.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return array("I", encoding.ids)

    def _bytes_of(self, token_id: int) -> bytes:
        token: str | None = self._parsing.id_to_token(token_id)
        if token is None or token_id in self._silent_ids:
            return b""
        if self._is_byte_level:
            try:
                return bytes(_BYTE_OF_CHARACTER[character] for character in token)
            except KeyError:
                return token.encode("utf-8")
        if self._has_byte_tokens and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(match[1])
        # Decoders treat the first token of a text in their own way, so another one goes before it.
        first, both = (self._parsing.decoder.decode(tokens) for tokens in (["a"], ["a", token]))
        text: str = both.removeprefix(first)
        return text.encode("utf-8")


def _longest_first(special: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(special, key=lambda token: -len(token["content"]))


def _with_white_space(token: dict[str, Any]) -> str:
    before, after = (r"\s*" if token[side] else "" for side in ("lstrip", "rstrip"))
    return f"{before}{re.escape(token['content'])}{after}"


def _alternatives(patterns: list[str]) -> re.Pattern[str]:
    return re.compile("|".join(patterns) or r"(?!)")


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's characters for bytes: printable Latin-1 stands for itself, the rest follows from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_level_alphabet()
