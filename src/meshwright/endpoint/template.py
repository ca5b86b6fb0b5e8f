"""Chat template: how a model wants messages laid out as one text, rendered in Jinja's sandbox as ``transformers`` does.

It is ``chat_template.jinja`` beside the tokenizer, or ``chat_template`` in ``tokenizer_config.json``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from meshwright.errors import MeshwrightError

#: Whatever rendering can raise that is the fault of the messages or of the template.
FAULTS = (TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError, ZeroDivisionError)


class TemplateRefusal(ValueError):
    """The template refuses these messages."""


class GenerationBlocks(Extension):
    """``{% generation %}`` around an assistant's words, which templates for training have: the words stay."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own attribute

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """The template of a folder that holds a tokenizer.

    Raises:
        MeshwrightError: D008 when there is none, or it is none of Jinja's.
    """

    def __init__(self, folder: Path):
        self.place = str(folder)
        config = _config(folder / "tokenizer_config.json")
        text, file = config.get("chat_template"), folder / "chat_template.jinja"
        if file.is_file():
            text = file.read_text(encoding="utf-8")
        if isinstance(text, list):  # several by name
            text = next((one.get("template") for one in text if one.get("name") == "default"), None)
        if not isinstance(text, str):
            raise self.bad("no chat_template in tokenizer_config.json, and no chat_template.jinja")
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationBlocks]
        )
        environment.filters["tojson"] = lambda value, **how: json.dumps(value, ensure_ascii=False, **how)
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self.tokens = {name: _content(config[name]) for name in config if name.endswith("_token")}
        self.source = text
        try:
            self.template = environment.from_string(text)
            #: The names of what it lays out.
            self.variables = meta.find_undeclared_variables(environment.parse(text))
        except TemplateError as error:
            raise self.bad(f"the template is none of Jinja's: {error}") from None

    def render(
        self, messages: Sequence[dict[str, Any]], *, begins: bool = False, more: Mapping[str, Any] | None = None
    ) -> str:
        """The text of messages, with the template's beginning of an answer where `begins`; `more` are variables of the
        template's own.

        Raises:
            TemplateRefusal: the template refuses them.
        """
        try:
            own = {"messages": messages, "add_generation_prompt": begins}
            return self.template.render({**self.tokens, **(more or {}), **own})
        except FAULTS as error:
            raise TemplateRefusal(f"the template refuses it: {error}") from None

    def bad(self, why: str) -> MeshwrightError:
        """Return D008: the template cannot be used, and why."""
        help = "name the folder of a model that was made for conversations: --tokenizer FOLDER, or --weights FOLDER"
        return MeshwrightError.one("D008", f"conversations need a template: {why}", place=self.place, help=help)


def _raise(message: str) -> Callable[..., None]:
    raise TemplateError(message)


def _config(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _content(token: Any) -> Any:
    return token.get("content") if isinstance(token, dict) else token
