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
from itertools import chain

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

from gateway.http.errors import bad_value
from gateway.prompt.model_files import ModelFiles
from gateway.prompt.tokens import Prompt, Segment, Tokenizer

# Supplementary private use planes: no meaning of their own, no case, no white space.
_PRIVATE_USE = (range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))
_MESSAGE_LIMIT_CHARACTERS = 200


Recall = Callable[[tuple[Segment, ...]], tuple[int, "array[int]"]]


def nothing_remembered(segments: tuple[Segment, ...]) -> tuple[int, array[int]]:
    return 0, array("I")


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

    def prompt(self, messages: list[dict[str, str]], recall: Recall = nothing_remembered) -> Prompt:
        """The prompt of a chat, with the start of the assistant's turn.

        Args:
            messages: `role`, `content` and possibly `name`, all strings.
            recall: how many leading segments are remembered, and their ids; they are not tokenised again.

        Raises:
            ApiError: 400 when the model has no template or its template refuses the messages.
        """
        tokenizer = self._tokenizer
        strings = [string for message in messages for string in message.values()]
        spellings = {match[0] for string in strings for match in tokenizer.control.finditer(string)}
        if not spellings:
            rendered = self._render(messages)
            segments = tuple(self._cut(rendered))
            remembered, known = recall(segments)
            rest = self._encode_after(segments, remembered)
            controls = sum(segment.kind == "control" for segment in segments[remembered:])
            # More control tokens than the template wrote come from content: a normaliser made a spelling, or
            # ordinary pieces merged into one.
            if sum(map(tokenizer.control_ids.__contains__, rest)) <= controls:
                return _checked(Prompt(known + rest, segments, len(known)))
        markers = dict(zip(sorted(spellings), _unused_characters(strings), strict=False))
        if len(markers) < len(spellings):
            raise bad_value("messages", "The messages use every private-use character; leave some out.")
        marked = [
            {key: tokenizer.control.sub(lambda match: markers[match[0]], value) for key, value in message.items()}
            for message in messages
        ]
        restore = {ord(marker): spelling for spelling, marker in markers.items()}
        segments = tuple(
            segment if segment.kind == "control" else Segment("content", segment.text.translate(restore))
            for segment in self._cut(self._render(marked))
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

    def _render(self, messages: list[dict[str, str]]) -> str:
        if self._source is None:
            raise bad_value("messages", "This model has no chat template; send a prompt to /v1/completions instead.")
        try:
            (rendered,), _ = render_jinja_template(
                conversations=[messages],
                chat_template=self._source,
                add_generation_prompt=True,
                **self._variables,
            )
        except jinja2.TemplateError as error:
            reason = str(error)[:_MESSAGE_LIMIT_CHARACTERS]
            raise bad_value("messages", f"The model's chat template refuses these messages: {reason}") from None
        except (TypeError, ValueError, LookupError, ArithmeticError):
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


def _unused_characters(strings: list[str]) -> Iterator[str]:
    used = set().union(*strings)
    return (chr(code) for code in chain(*_PRIVATE_USE) if chr(code) not in used)


def _checked(prompt: Prompt) -> Prompt:
    if not prompt.tokens:
        raise bad_value("messages", "The messages render to no tokens; send some text.")
    return prompt
