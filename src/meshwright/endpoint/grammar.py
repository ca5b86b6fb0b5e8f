"""Answers in JSON: what ``response_format`` asks for, as a JSON schema that the engine keeps to.

The grammar is llguidance's: it reads the schema and says before every token which may follow. It is an extra of this
package, as most servers are never asked for it.
"""

from __future__ import annotations

import importlib.util
import json

from meshwright.endpoint.bodies import ResponseFormat
from meshwright.endpoint.refusal import Refused

#: The module of grammars, and how it is had.
MODULE, EXTRA = "llguidance", "pip install 'meshwright[grammar]'"
#: Bytes of the longest schema.
MOST_BYTES = 1 << 16
#: JSON is written without spaces that say nothing, of which a model could write any number.
OPTIONS = {"whitespace_flexible": False}


def schema_of(said: ResponseFormat | None, *, least: int = 0) -> str:
    """Return the JSON schema that a body asks answers to keep to as text, "" where it asks for none; `least` are the
    tokens that an answer has to have.

    Raises:
        Refused: 400 for a schema that is none, or that nothing here can keep to.
    """
    if said is None or said.type == "text":
        return ""
    place = "response_format"
    if importlib.util.find_spec(MODULE) is None:
        message = f"{place}: this server has no {MODULE}, which bounds what is generated: {EXTRA}; or ask for JSON in "
        raise Refused(400, f"{message}the prompt, and check what comes", param=place, code="unsupported")
    if least:
        message = f"{place} and min_tokens={least}: an answer ends where its JSON does"
        raise Refused(400, message, param="min_tokens")
    schema: object = {"type": "object"}
    if said.type == "json_schema":
        if said.json_schema is None or said.json_schema.schema is None:
            message = "response_format of type json_schema has a json_schema with a name and a schema"
            raise Refused(400, message, param="response_format.json_schema")
        schema, place = said.json_schema.schema, "response_format.json_schema.schema"
    text = json.dumps(schema)
    if len(text) > MOST_BYTES:
        raise Refused(400, f"{place} has {len(text):,} bytes, of {MOST_BYTES:,} at most", param=place)
    from llguidance import LLMatcher

    wrong = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(text, overrides=OPTIONS))
    if wrong:
        reason = wrong.strip().splitlines()[0][:300]
        raise Refused(400, f"{place} is nothing that can be kept to: {reason}", param=place)
    return text
