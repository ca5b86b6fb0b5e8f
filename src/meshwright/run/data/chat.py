"""Conversations as documents: messages laid out by the model's own template, and which tokens are an assistant's.

A line of a ``.jsonl`` file, or a row of a ``.parquet`` file, whose field ``messages`` is a list of ``{"role": ...,
"content": ...}`` is one conversation. Its text is what the template beside the tokenizer makes of it (``chat_template``
in ``tokenizer_config.json``, or ``chat_template.jinja``), rendered in Jinja's sandbox as ``transformers`` does. Loss is
taken of the assistant's tokens alone: those that the text of the messages up to and with an answer has beyond the text
before it with the template's beginning of an answer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.endpoint.template import ChatTemplate, TemplateRefusal
from meshwright.errors import MeshwrightError
from meshwright.run.data.documents import FIELD, TextFile, not_a_document, values
from meshwright.run.data.tokenizer import HuggingFace, Tokenizer

#: The field of a conversation where nobody says.
MESSAGES = "messages"
#: Conversations that are encoded together.
TOGETHER = 256


class Conversation(NamedTuple):
    """A conversation's text, and the spans of it, in characters, that an assistant wrote."""

    text: str
    spans: tuple[tuple[int, int], ...]


def chats(found: list[TextFile]) -> list[TextFile]:
    """The files as files of conversations, [] where the first of them has none: it has messages and no text, or the
    field that was named holds a list."""
    if not found or not all(source.fields for source in found):
        return []
    named = found[0].field if found[0].field != FIELD else ""
    for field in (named,) if named else (FIELD, MESSAGES):
        try:
            _, first = next(values(TextFile(found[0].path, field)), ("", None))
        except MeshwrightError:
            continue
        if isinstance(first, list):
            return [TextFile(source.path, field) for source in found]
        return []
    return []


class Template:
    """The template of a folder, by which text is told that an assistant wrote.

    Raises:
        MeshwrightError: D008 when there is none, or it is none of Jinja's.
    """

    def __init__(self, folder: Path):
        self._chat = ChatTemplate(folder)
        self.source = self._chat.source

    def conversation(self, messages: list[dict[str, Any]], place: str) -> Conversation:
        """The text of some messages, and what of it an assistant wrote.

        Raises:
            MeshwrightError: D003 for messages that are none, or that the template refuses; D008 for a template that
                changes what came before when a message is added.
        """
        _checked(messages, place)
        whole, spans = self._render(messages, place), []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._render(messages[:number], place, begins=True)
            after = self._render(messages[: number + 1], place)
            after = after if whole.startswith(after) else _common(whole, after)
            if not after.startswith(before):
                raise self._chat.bad(
                    "a message that is added changes the text before it: no token is surely an answer's"
                )
            spans.append((len(before), len(after)))
        return Conversation(whole, tuple(spans))

    def _render(self, messages: list[dict[str, Any]], place: str, *, begins: bool = False) -> str:
        try:
            return self._chat.render(messages, begins=begins)
        except TemplateRefusal as error:
            raise not_a_document(str(error), place) from None


def layout(tokenizer: Tokenizer) -> str:
    """A hash of the template beside a tokenizer: conversations laid out by another are other tokens."""
    return hashlib.sha256(Template(_folder(tokenizer)).source.encode()).hexdigest()


def _folder(tokenizer: Tokenizer) -> Path:
    if isinstance(tokenizer, HuggingFace):
        return tokenizer.folder
    help = "conversations are laid out by a model's own template: --tokenizer FOLDER, or --weights FOLDER"
    raise MeshwrightError.one(
        "D008", "conversations need a template: text as bytes has none", place="--data", help=help
    )


def encoded(
    found: list[TextFile], tokenizer: Tokenizer, *, first: int = 0
) -> Iterator[tuple[NDArray[np.uint32], NDArray[np.bool_]]]:
    """Ids of every conversation from that number `first` on, with whether each is learnt.

    Raises:
        MeshwrightError: D001, D003 for what cannot be read; D008 without a template.
    """
    template = Template(_folder(tokenizer))
    rest = islice(((place, messages) for source in found for place, messages in values(source)), first, None)
    said = (template.conversation(messages, place) for place, messages in rest)
    for some in _in_groups(said):
        for one, (ids, offsets) in zip(some, tokenizer.spans([one.text for one in some]), strict=True):
            learnt = np.zeros(len(ids), np.bool_)
            for begin, end in one.spans:
                learnt |= (offsets[:, 0] >= begin) & (offsets[:, 1] <= end) & (offsets[:, 1] > offsets[:, 0])
            yield ids, learnt


def _in_groups(said: Iterable[Conversation]) -> Iterator[list[Conversation]]:
    rest = iter(said)
    while some := list(islice(rest, TOGETHER)):
        yield some


def _checked(messages: Any, place: str) -> None:
    wrong = "" if isinstance(messages, list) and messages else "its messages are no list of messages"
    for number, message in enumerate(messages if not wrong else ()):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            wrong = f"message {number} has no role"
        elif not isinstance(message.get("content"), str):
            wrong = f"message {number} has no text in its content"
    if not wrong and not any(message["role"] == "assistant" for message in messages):
        wrong = "no message is an assistant's, so that nothing is learnt"
    if wrong:
        raise not_a_document(wrong, place)


def _common(a: str, b: str) -> str:
    """Return the beginning that two texts share."""
    length = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
    return a[:length]
