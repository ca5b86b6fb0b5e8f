"""Tool calls: how a chat's functions are laid out for a model, and how the calls in its answer are read.

The model's own template writes the functions (``tools``), and the model writes its calls as it was trained to, which
nothing in its folder says: a parser is named when the server is started. ``hermes`` reads those of Hermes 2 Pro, which
Qwen 2.5 and 3 write too: a JSON object with ``name`` and ``arguments`` between ``<tool_call>`` and ``</tool_call>``.
"""

from __future__ import annotations

import json
import secrets
from typing import Any

import msgspec

from meshwright.endpoint.bodies import ChatBody
from meshwright.endpoint.refusal import Refused
from meshwright.endpoint.template import ChatTemplate
from meshwright.endpoint.text import StopCut

#: The parsers, by name: what stands before a call and behind it.
PARSERS = {"hermes": ("<tool_call>", "</tool_call>")}


class CallText:
    """Text in, and out what is no call: from the first call on all is kept until the end, and then read."""

    def __init__(self, parser: str):
        self._begin, self._end = PARSERS[parser]
        self._cut, self._kept = StopCut((self._begin,)), ""

    def add(self, text: str) -> str:
        """Take more text; returns what surely is before any call."""
        if self._cut.found:
            self._kept += text
            return ""
        out = self._cut.add(text)
        self._kept = self._cut.rest
        return out

    def end(self) -> tuple[str, list[dict[str, Any]]]:
        """Return the text that is left, and the calls as OpenAI shapes them. Where one of them is none, all is text."""
        if not self._cut.found:
            return self._cut.end(), []
        calls = []
        for part in self._kept.split(self._begin):
            said, _, behind = part.partition(self._end)
            try:
                found = json.loads(said)
                name, arguments = found["name"], found.get("arguments", {})
                if not isinstance(name, str) or not isinstance(arguments, dict) or behind.strip():
                    raise ValueError
            except (ValueError, TypeError, KeyError, RecursionError):
                return self._begin + self._kept, []
            function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
            calls.append({"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function})
        return "", calls


def wanted(body: ChatBody, template: ChatTemplate | None, parser: str) -> list[dict[str, Any]]:
    """Return the tools that a chat's template lays out, [] where there are none to.

    Raises:
        Refused: they ask for what is not done here.
    """
    choice = body.tool_choice
    if choice not in (None, "none", "auto") or (choice == "auto" and not body.tools):
        message = 'tool_choice is "auto" or "none" here, beside tools: no grammar makes a model call a function'
        raise Refused(400, message, param="tool_choice", code="unsupported")
    if not body.tools or choice == "none":
        return []
    if not parser:
        message = (
            f"nobody said how this model writes its calls, so they would be text: start the server with "
            f"--tool-parser {' or '.join(PARSERS)}, or say tool_choice: none"
        )
        raise Refused(400, message, param="tools", code="unsupported")
    if template is not None and "tools" not in template.variables:
        message = "this model's chat template lays out no tools: describe them in a message"
        raise Refused(400, message, param="tools", code="unsupported")
    if body.parallel_tool_calls is False:
        message = "no grammar keeps a model from calling twice: leave parallel_tool_calls out, and take the first call"
        raise Refused(400, message, param="parallel_tool_calls", code="unsupported")
    return msgspec.to_builtins(body.tools)


def plain_calls(calls: Any, param: str) -> list[dict[str, Any]]:
    """Return the calls of a message as templates read them: arguments as an object, where they come as its text.

    Raises:
        Refused: they are none.
    """
    try:
        found = []
        for call in calls:
            function = dict(call["function"])
            if isinstance(function.get("arguments"), str):
                function["arguments"] = json.loads(function["arguments"] or "{}")
            if not isinstance(function["name"], str) or not isinstance(function.get("arguments", {}), dict):
                raise TypeError
            found.append({**call, "function": function})
        return found
    except (TypeError, KeyError, ValueError, RecursionError):
        message = f"{param} are no calls: each has a function with a name, and arguments that are a JSON object"
        raise Refused(400, message, param=param) from None
