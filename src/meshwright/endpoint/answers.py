"""Answers: pieces of tokens as the text, scores and counts of a choice, in the shapes that OpenAI's clients read."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from meshwright.endpoint.inquiry import Inquiry
from meshwright.endpoint.seam import Generated, TokenScore
from meshwright.endpoint.text import Detokeniser, ModelText, StopCut
from meshwright.endpoint.tool_calls import CallText

#: What JSON writes for the logarithm of 0.
LEAST_LOGPROB = -9999.0
OBJECTS = {"completion": "text_completion", "chat": "chat.completion"}


class Increment(msgspec.Struct):
    """The part of a choice that is new: its text, the scores of its tokens, why it ended, if it did, the number of
    tokens that the choice has with it, and its calls of tools."""

    text: str = ""
    logprobs: dict[str, Any] | None = None
    finish: str = ""
    count: int = 0
    calls: list[dict[str, Any]] = []


class Continuation:
    """One answer as it grows. ``feed`` turns a piece into the part of the answer that is new."""

    def __init__(self, text: ModelText, inquiry: Inquiry, index: int):
        self.index, self._text, self._inquiry = index, text, inquiry
        place = index // inquiry.n
        self.prompt = inquiry.prompts[place]
        self._echo = inquiry.texts[place] or text.decode(self.prompt) if inquiry.echo else ""
        self._words = Detokeniser(text, self.prompt, special=inquiry.special)
        self._cut = StopCut(inquiry.sampling.stop, keep=inquiry.keep_stop)
        self._calls = CallText(inquiry.calls) if inquiry.calls else None
        self._length = 0
        self._begun = False
        self.count = self.cached = 0
        self.finish = ""

    def feed(self, piece: Generated) -> Increment:
        """Take a piece. ``finish`` is set once the answer is complete, which a stop string may do before the engine
        does."""
        part = self._fed(piece)
        part.count = self.count
        return part

    def _fed(self, piece: Generated) -> Increment:
        part = Increment(logprobs=self._no_scores())
        if not self._begun:
            self._begin(piece, part)
        scores = piece.scores or (None,) * len(piece.tokens)
        for place, (id, score) in enumerate(zip(piece.tokens, scores)):
            if self._inquiry.discard:
                continue
            self.count += 1
            last = piece.finish == "stop" and place + 1 == len(piece.tokens)
            keeps = self._inquiry.keep_stop or bool(self._inquiry.sampling.schema)  # JSON ends with a token of its own
            text = "" if last and not keeps else self._words.add(id)
            self._score(part, id, score)
            self._let_out(part, text)
            if self._cut.found:
                return self._ended(part, "stop")
        if piece.finish:
            if not self._inquiry.discard:
                self._let_out(part, self._words.end())
                self._say(part, self._cut.end())
            return self._ended(part, "stop" if self._cut.found else piece.finish)
        return part

    def _ended(self, part: Increment, reason: str) -> Increment:
        """The answer is complete, and what may have been calls is read."""
        if self._calls is not None:
            rest, part.calls = self._calls.end()
            part.text += rest
            reason = "tool_calls" if part.calls and reason == "stop" else reason
        self.finish = part.finish = reason
        return part

    def _begin(self, piece: Generated, part: Increment) -> None:
        """The first piece tells of the prompt too."""
        self._begun, self.cached = True, piece.cached
        if self._inquiry.echo:
            if piece.prompt_scores:
                for id, score in zip(self.prompt, piece.prompt_scores):
                    self._score(part, id, score)
                    self._length += len(self._text.token(id))
            part.text, self._length = self._echo, len(self._echo)

    def _let_out(self, part: Increment, text: str) -> None:
        early = self.count <= self._inquiry.sampling.min_tokens
        out = text if early else self._cut.add(text)
        self._say(part, out)
        self._length += len(out)

    def _say(self, part: Increment, text: str) -> None:
        part.text += text if self._calls is None else self._calls.add(text)

    def _no_scores(self) -> dict[str, Any] | None:
        if self._inquiry.sampling.logprobs is None or self._inquiry.style == "generate":
            return None
        if self._inquiry.style == "chat":
            return {"content": []}
        return {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}

    def _score(self, part: Increment, id: int, score: TokenScore | None) -> None:
        """Add a token's score in the shape of the inquiry's kind."""
        if part.logprobs is None:
            return
        token = self._text.token(id)
        if self._inquiry.style == "chat":
            others = [_scored(self._text.token(other), value) for other, value in (score.others if score else ())]
            entry = _scored(token, score.logprob if score else LEAST_LOGPROB)
            part.logprobs["content"].append(entry | {"top_logprobs": others})
            return
        part.logprobs["text_offset"].append(self._length)
        part.logprobs["tokens"].append(token)
        part.logprobs["token_logprobs"].append(None if score is None else _finite(score.logprob))
        top = None
        if score is not None:
            top = {self._text.token(other): _finite(value) for other, value in score.others}
            top = {token: _finite(score.logprob)} | top
        part.logprobs["top_logprobs"].append(top)


def _scored(token: str, value: float) -> dict[str, Any]:
    return {"token": token, "logprob": _finite(value), "bytes": list(token.encode(errors="replace"))}


def _finite(value: float) -> float:
    return value if math.isfinite(value) else LEAST_LOGPROB


class Shapes:
    """The JSON of one inquiry's answer: ``whole`` at once, or an event for each part (``event``, ``closing``)."""

    def __init__(self, inquiry: Inquiry, choices: Sequence[Continuation]):
        self._inquiry, self._choices = inquiry, choices
        self._began_s = time.monotonic()
        prefix = "chatcmpl" if inquiry.style == "chat" else "cmpl"
        self.id, self._created = f"{prefix}-{secrets.token_hex(12)}", int(time.time())
        self._begun: set[int] = set()
        self._texts = [""] * len(choices)

    def whole(self, parts: Sequence[Sequence[Increment]]) -> bytes:
        """Return the answer of a request without events, of the parts of every choice."""
        inquiry = self._inquiry
        texts = ["".join(part.text for part in some) for some in parts]
        if inquiry.style == "generate":
            return msgspec.json.encode(self._generated(self._choices[0], texts[0], parts[0][-1]))
        choices = []
        for choice, some, text in zip(self._choices, parts, texts):
            body = {"message": {"role": "assistant", "content": text, "refusal": None}}
            if calls := some[-1].calls:
                body["message"] |= {"content": text or None, "tool_calls": calls}
            if inquiry.style == "completion":
                body = {"text": text}
            ended = {"logprobs": _joined(some), "finish_reason": choice.finish}
            choices.append({"index": choice.index, **body, **ended})
        return msgspec.json.encode(self._frame(choices) | {"usage": self._usage()})

    def event(self, choice: Continuation, part: Increment) -> bytes:
        """Return the event of a part."""
        inquiry = self._inquiry
        if inquiry.style == "generate":
            self._texts[choice.index] += part.text
            return _event(self._generated(choice, self._texts[choice.index], part))
        body: dict[str, Any] = {"text": part.text}
        if inquiry.style == "chat":
            first = {} if choice.index in self._begun else {"role": "assistant"}
            self._begun.add(choice.index)
            said = {"content": part.text} if part.text or not part.finish else {}
            if part.calls:
                said["tool_calls"] = [{"index": place, **call} for place, call in enumerate(part.calls)]
            body = {"delta": {**first, **said}}
        one = {"index": choice.index, **body, "logprobs": part.logprobs, "finish_reason": part.finish or None}
        usage = {"end": {"usage": None}, "each": {"usage": self._usage(part.count - choice.count)}, "": {}}[
            inquiry.usage
        ]
        return _event(self._frame([one], events=True) | usage)

    def closing(self) -> bytes:
        """Return the last events: the counts, where they are wanted, and the end."""
        done = b"data: [DONE]\n\n"
        if not self._inquiry.usage or self._inquiry.style == "generate":
            return done
        return _event(self._frame([], events=True) | {"usage": self._usage()}) + done

    def _frame(self, choices: list[dict[str, Any]], *, events: bool = False) -> dict[str, Any]:
        kind = OBJECTS[self._inquiry.style]
        kind += ".chunk" if events and self._inquiry.style == "chat" else ""
        head = {"id": self.id, "object": kind, "created": self._created, "model": self._inquiry.model}
        return head | {"choices": choices}

    def _usage(self, less: int = 0) -> dict[str, Any]:
        made = sum(choice.count for choice in self._choices) + less
        asked = sum(len(prompt) for prompt in self._inquiry.prompts)
        cached = sum(choice.cached for choice in self._choices[:: self._inquiry.n])
        counts = {"prompt_tokens": asked, "completion_tokens": made, "total_tokens": asked + made}
        return counts | {"prompt_tokens_details": {"cached_tokens": cached}}

    def _generated(self, choice: Continuation, text: str, part: Increment) -> dict[str, Any]:
        """SGLang's own shape, whose events hold the whole text so far."""
        reason = {"type": part.finish} if part.finish else None
        counts = {"prompt_tokens": len(choice.prompt), "completion_tokens": part.count}
        counts |= {"cached_tokens": choice.cached, "e2e_latency": time.monotonic() - self._began_s}
        return {"text": text, "meta_info": {"id": self.id, "finish_reason": reason, **counts}}


def _joined(parts: Sequence[Increment]) -> dict[str, Any] | None:
    """The scores of all parts in one."""
    found = [part.logprobs for part in parts if part.logprobs is not None]
    return {key: [one for some in found for one in some[key]] for key in found[0]} if found else None


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"
