"""Server-sent events of an answer that streams: when its tokens came, how many there were, and how it ended."""

from __future__ import annotations

from typing import Any

import msgspec

from meshwright.traffic.http import HttpFault

#: Bytes of one event beyond which an answer is none.
LONGEST_EVENT = 1 << 22


class _Cached(msgspec.Struct):
    cached_tokens: int | None = None


class TokenUsage(msgspec.Struct):
    """The tokens of a request as the server counts them."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Cached | None = None

    @property
    def cached(self) -> int:
        """Tokens of the prompt that the server had already, -1 where it does not say."""
        said = self.prompt_tokens_details
        return -1 if said is None or said.cached_tokens is None else said.cached_tokens


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: TokenUsage | None = None
    error: Any = None


_DECODER = msgspec.json.Decoder(_Event)


class StreamedAnswer:
    """The stream of one answer, fed piece by piece: ``at_s`` [pieces] is when each piece of text came.

    A piece counts as a token where the server does not say how many there were (``usage``). Chats begin with an event
    that names the role, which is none; of completions every event with a choice is one, even without text, but for the
    last one, which says why it ends. ``error`` is what is wrong with the stream, or what the server says went wrong.
    """

    def __init__(self, chat: bool = False):
        self.chat = chat
        self.at_s: list[float] = []
        self.usage: TokenUsage | None = None
        self.finish = self.error = ""
        self.done = False
        self._rest = b""
        self._data: list[bytes] = []
        self._held = 0  # bytes of an event that is not over

    def feed(self, piece: bytes, now: float) -> None:
        """Take a piece of the body, which came at `now`.

        Raises:
            HttpFault: an event has no end, and neither would its reading.
        """
        if self.error:
            return
        lines = (self._rest + piece).split(b"\n") if self._rest else piece.split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[5:].strip())
                self._held += len(line)
            elif not line.strip() and self._data:  # an event ends with an empty line
                self._event(b"\n".join(self._data), now)
                self._data.clear()
                self._held = 0
        if self._held + len(self._rest) > LONGEST_EVENT:
            self.error = f"an event is longer than {LONGEST_EVENT:,} bytes"
            raise HttpFault(self.error)

    def end(self) -> None:
        """Take note that the body is over."""
        if self._rest.startswith(b"data:"):
            self._data.append(self._rest[5:].strip())
        if self._data and not self.error:  # the last event lacks its empty line
            self._event(b"\n".join(self._data), self.at_s[-1] if self.at_s else 0.0)
        if not self.error and not (self.done or self.finish):
            self.error = "the stream ended before the answer did"

    def _event(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self.done = True
            return
        try:
            said = _DECODER.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            self.error = f"malformed event {data[:60].decode('utf-8', 'replace')!r}: {error}"
            return
        if said.error:
            self.error = f"the server says: {str(said.error)[:300]}"
        if said.usage is not None:
            self.usage = said.usage
        for choice in said.choices:
            if self._is_text(choice):
                self.at_s.append(now)
            if choice.finish_reason:
                self.finish = choice.finish_reason

    def _is_text(self, choice: _Choice) -> bool:
        if self.chat:
            return choice.delta is not None and bool(choice.delta.content or choice.delta.reasoning_content)
        return bool(choice.text) or (choice.text is not None and not choice.finish_reason)
