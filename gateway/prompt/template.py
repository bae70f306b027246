"""A chat to a prompt, by the model's own template, such that nothing in a message becomes a control token.

    messages ─ spellings of special tokens → private markers ─ render ─ cut at the template's special tokens
        ├ control segments: parsed
        └ content segments: markers restored, encoded as plain text

A chat that spells none takes the ordinary path: the rendering is encoded in one piece, token for token what
`apply_chat_template` of transformers gives.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

from gateway.http.errors import bad_value
from gateway.prompt.model_files import SPECIAL_TOKEN_NAMES, ModelFiles
from gateway.prompt.tokens import Prompt, Segment, Tokenizer

# Supplementary private use planes: no meaning of their own, no case, no white space.
_PRIVATE_USE = (range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))
# White space that `trim` takes away and that no template writes.
_TRIMMED = "\u2003"
_MESSAGE_LIMIT_CHARACTERS = 200
# What a template is given anyway.
OWN_VARIABLES = frozenset(
    {
        *("messages", "conversations", "tools", "documents", "chat_template", "return_assistant_tokens_mask", "self"),
        *("add_generation_prompt", "continue_final_message", "raise_exception", "strftime_now"),
        *SPECIAL_TOKEN_NAMES,
    }
)

Recall = Callable[[tuple[Segment, ...]], tuple[int, "array[int]"]]


def nothing_remembered(segments: tuple[Segment, ...]) -> tuple[int, array[int]]:
    return 0, array("I")


@dataclass(frozen=True, slots=True)
class Rendering:
    """How a chat is rendered.

    Attributes:
        opens_turn: the start of the assistant's turn comes last.
        continues: the last message stays open, so that what is generated goes on with its text.
        variables: further ones for the template, none of `OWN_VARIABLES`; JSON values.
    """

    opens_turn: bool = True
    continues: bool = False
    variables: dict[str, Any] = field(default_factory=dict)


DEFAULT_RENDERING = Rendering()


class ChatTemplate:
    """Renders chats for one model. Rendering and encoding are CPU work for a thread."""

    def __init__(self, files: ModelFiles, tokenizer: Tokenizer) -> None:
        self._source = files.chat_template
        self._variables = files.special_tokens
        self._tokenizer = tokenizer

    @property
    def exists(self) -> bool:
        """Whether the model has a template; without one it takes no chats."""
        return self._source is not None

    def prompt(
        self,
        messages: list[dict[str, str]],
        recall: Recall = nothing_remembered,
        rendering: Rendering = DEFAULT_RENDERING,
    ) -> Prompt:
        """The prompt of a chat.

        Args:
            messages: `role`, `content` and possibly `name`, all strings.
            recall: how many leading segments are remembered, and their ids; they are not tokenised again.

        Raises:
            ApiError: 400 when the model has no template or its template refuses the messages.
        """
        tokenizer = self._tokenizer
        strings = [*strings_in(messages), *strings_in(rendering.variables)]
        unused = self._unused_characters(strings)
        spellings = {match[0] for string in strings for match in tokenizer.control.finditer(string)}
        # Where a template writes two strings side by side, the second may end what the first began.
        spellings |= {begun for string in strings if (begun := tokenizer.begun_control(string))}
        if not spellings:
            segments = tuple(self._cut(self._render(messages, rendering, unused)))
            remembered, known = recall(segments)
            rest = self._encode_after(segments, remembered)
            controls = sum(segment.kind == "control" for segment in segments[remembered:])
            # More control tokens than the template wrote come from content: a normaliser made a spelling, or
            # ordinary pieces merged into one.
            if sum(map(tokenizer.control_ids.__contains__, rest)) <= controls:
                return _checked(Prompt(known + rest, segments, len(known)))
        markers = {spelling: _next(unused) for spelling in sorted(spellings)}

        def mark(text: str) -> str:
            marked = tokenizer.control.sub(lambda match: markers[match[0]], text)
            begun = tokenizer.begun_control(marked)
            return marked[: len(marked) - len(begun)] + markers[begun] if begun else marked

        marked = _with_strings(messages, mark)
        variables = _with_strings(rendering.variables, mark)
        restore = {ord(marker): spelling for spelling, marker in markers.items()}
        segments = tuple(
            segment if segment.kind == "control" else Segment("content", segment.text.translate(restore))
            for segment in self._cut(self._render(marked, replace(rendering, variables=variables), unused))
        )
        remembered, known = recall(segments)
        tokens = known[:]
        for segment in segments[remembered:]:
            encode = tokenizer.encode if segment.kind == "control" else tokenizer.encode_plain
            tokens.extend(encode(segment.text))
        return _checked(Prompt(tokens, segments, len(known)))

    def _encode_after(self, segments: tuple[Segment, ...], remembered: int) -> array[int]:
        """Ids of the segments after the first `remembered`, as they would be in one piece with those."""
        rest = "".join(segment.text for segment in segments[remembered:])
        if not remembered or segments[remembered - 1].kind == "content":
            return self._tokenizer.encode(rest)
        # Some tokenizers treat the start of a text in their own way, so the rest begins behind a control token.
        lead = segments[remembered - 1].text
        return self._tokenizer.encode(lead + rest)[len(self._tokenizer.encode(lead)) :]

    def _render(self, messages: list[dict[str, str]], rendering: Rendering, unused: Iterator[str]) -> str:
        if not rendering.continues:
            return self._fill(messages, rendering)
        *before, last = messages
        end, content = _next(unused), last["content"]

        def up_to_end(content: str) -> tuple[str, str, str]:
            return self._fill([*before, last | {"content": content}], rendering).rpartition(end)

        opened, found, after = up_to_end(content + end + _TRIMMED)
        if not after.startswith(_TRIMMED):
            # The template trims, which the end keeps it from.
            opened, found, _ = up_to_end(content.rstrip() + end)
        if not found or end in opened:
            message = "The model's chat template does not write the last message as it is, so it can't be continued."
            raise bad_value("continue_final_message", message)
        return opened

    def _fill(self, messages: list[dict[str, str]], rendering: Rendering) -> str:
        if self._source is None:
            raise bad_value("messages", "This model has no chat template; send a prompt to /v1/completions instead.")
        try:
            (rendered,), _ = render_jinja_template(
                conversations=[messages],
                chat_template=self._source,
                add_generation_prompt=rendering.opens_turn,
                **self._variables,
                **rendering.variables,
            )
        except jinja2.TemplateError as error:
            reason = str(error)[:_MESSAGE_LIMIT_CHARACTERS]
            raise bad_value("messages", f"The model's chat template refuses these messages: {reason}") from None
        except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError):
            raise bad_value("messages", "The model's chat template cannot render these messages.") from None
        return str(rendered)

    def _cut(self, rendered: str) -> Iterator[Segment]:
        end = 0
        for match in self._tokenizer.control_in_rendering.finditer(rendered):
            if match.start() > end:
                yield Segment("content", rendered[end : match.start()])
            yield Segment("control", match[0])
            end = match.end()
        if end < len(rendered):
            yield Segment("content", rendered[end:])


    def _unused_characters(self, strings: list[str]) -> Iterator[str]:
        """Private-use characters that neither a chat nor the template has."""
        used = set(self._source or "").union(*strings)
        return (chr(code) for code in chain(*_PRIVATE_USE) if chr(code) not in used)


def strings_in(value: Any) -> Iterator[str]:
    """Every string of a JSON value, names in objects included, in no order."""
    # Generators within generators would hand each string up through every level that it is nested in.
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, dict):
            waiting += each
            waiting += each.values()
        elif isinstance(each, list):
            waiting += each


def _with_strings(value: Any, change: Callable[[str], str]) -> Any:
    """The value with every string changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(name): _with_strings(each, change) for name, each in value.items()}
    if isinstance(value, list):
        return [_with_strings(each, change) for each in value]
    return value


def _next(unused: Iterator[str]) -> str:
    for character in unused:
        return character
    raise bad_value("messages", "The messages use every private-use character; leave some out.")


def _checked(prompt: Prompt) -> Prompt:
    if not prompt.tokens:
        raise bad_value("messages", "The messages render to no tokens; send some text.")
    return prompt
