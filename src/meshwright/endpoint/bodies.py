"""Bodies: what a request may say, as msgspec structs, and the field and reason where it says something else.

The names are OpenAI's, and those that vLLM and SGLang add to them. What is known and not done here is taken where it
asks for nothing (``length_penalty: 1``) and refused where it does; a name that nobody knows is refused unless it is
null, so that a slip of the pen is not an answer to another question.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from meshwright.endpoint.refusal import Refused, shown
from meshwright.errors import nearest

#: Most choices of one request, most stop strings, and the most characters of one.
MOST_CHOICES, MOST_STOPS, LONGEST_STOP = 128, 16, 1024
MOST_TOKENS, MOST_BIASES = 1 << 31, 1024

Count = Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)]
TokenIds = list[Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)]]
Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]
Repetition = Annotated[float, msgspec.Meta(gt=0, le=100)]
Seed = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class StreamOptions(msgspec.Struct, kw_only=True):
    """``stream_options``: whether token counts come with the last event, or with each."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class NamedSchema(msgspec.Struct, kw_only=True):
    """``json_schema`` of a response format: a schema and what it is called."""

    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    """``response_format``: text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class _Sampled(msgspec.Struct, kw_only=True):
    """The fields that completions and chats share."""

    model: str | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=MOST_CHOICES)] | None = None
    best_of: Annotated[int, msgspec.Meta(ge=1, le=MOST_CHOICES)] | None = None
    max_tokens: Count | None = None
    min_tokens: Count | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=MOST_TOKENS)] | None = None
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Repetition | None = None
    logit_bias: dict[str, Annotated[float, msgspec.Meta(ge=-100, le=100)]] | None = None
    seed: Seed | None = None
    stop: str | list[str] | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    priority: Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31)] | None = None
    user: str | None = None


class CompletionBody(_Sampled, kw_only=True):
    """``POST /v1/completions``."""

    prompt: str | list[str | int | list[int]]
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)] | None = None
    echo: bool | None = None


class ToolFunction(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A function that an answer may call, by its ``name`` and the JSON schema of its ``parameters``."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True):
    """A tool of a chat, which is a function."""

    type: Literal["function"]
    function: ToolFunction


class ChatBody(_Sampled, kw_only=True):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None


class GenerateSampling(msgspec.Struct, kw_only=True):
    """``sampling_params`` of SGLang's own ``POST /generate``."""

    n: Literal[1] | None = None
    max_new_tokens: Count | None = None
    min_new_tokens: Count | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=MOST_TOKENS)] | None = None
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Repetition | None = None
    sampling_seed: Seed | None = None
    stop: str | list[str] | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None


class GenerateBody(msgspec.Struct, kw_only=True):
    """SGLang's own ``POST /generate``, of one prompt."""

    text: str | None = None
    input_ids: TokenIds | None = None
    sampling_params: GenerateSampling | None = None
    stream: bool | None = None
    lora_path: str | None = None
    rid: str | None = None


class TokenizeBody(msgspec.Struct, kw_only=True):
    """``POST /tokenize``: of a text, or of messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """``POST /detokenize``."""

    tokens: TokenIds
    model: str | None = None


#: Known fields that nothing here does, and the values with which they ask for nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "length_penalty": (1,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "early_stopping": (False,),
    "spaces_between_special_tokens": (True,),
    "continue_final_message": (False,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "return_logprob": (False,),
    "logprob_start_len": (-1,),
    "top_logprobs_num": (0,),
    "return_token_ids": (False,),
    "image_data": ([], ""),
    "no_stop_trim": (False,),
    "stream_interval": (1,),
    "include_obfuscation": (False,),
}
#: What to do instead of some of them.
INSTEAD = {
    "functions": "say tools, which took their place",
    "function_call": "say tool_choice, which took its place",
    "use_beam_search": "say n, and choose among the answers",
    "suffix": "lay the text out as the model was trained to fill it in",
    "continue_final_message": "lay the messages out yourself, and ask /v1/completions",
}
#: Fields that have fields of their own, where a slip of the pen is one too.
INNER: dict[str, type[msgspec.Struct]] = {
    "sampling_params": GenerateSampling,
    "stream_options": StreamOptions,
    "response_format": ResponseFormat,
}
#: Fields that say who asks, whatever they hold: nothing depends on them.
ABOUT = ("user", "metadata", "request_id", "safety_identifier", "prompt_cache_key")

Body = TypeVar("Body", bound=msgspec.Struct)
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_decoders: dict[type, msgspec.json.Decoder] = {}
_PLACE = re.compile(r" - at `([^`]*)`$")


def read(data: bytes, kind: type[Body]) -> Body:
    """Return a body as what it has to be.

    Raises:
        Refused: it is no JSON, or a field is unknown, of another type, out of its range, or asks for what is not done.
    """
    fields = _decoded(_fields, data)
    _known(fields, kind)
    for name, inner in INNER.items():
        if name in kind.__struct_fields__ and bytes(fields.get(name, b"null")).startswith(b"{"):
            _known(_decoded(_fields, bytes(fields[name])), inner, f"{name}.")
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.json.Decoder(kind)
    return _decoded(decoder, data)


def _decoded(decoder: msgspec.json.Decoder, data: bytes) -> Any:
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        said = str(error)
        place = _PLACE.search(said)
        param = re.sub(r"^\$\.?|\[\.\.\.\]$", "", place[1]) if place else ""
        reason = _PLACE.sub("", said)
        missing = re.search(r"missing required field `(\w+)`", reason)
        param = missing[1] if missing and not param else param
        raise Refused(400, f"{shown(param) or 'the body'}: {reason}", param=shown(param) or None) from None
    except UnicodeDecodeError as error:
        raise Refused(400, f"the body is not UTF-8: {error.reason}", code="invalid_utf8") from None
    except (msgspec.DecodeError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise Refused(400, f"the body is not JSON: {reason}", code="invalid_json") from None


def _known(fields: dict[str, msgspec.Raw], kind: type[msgspec.Struct], within: str = "") -> None:
    """Refuse a field that is none of this kind of body, unless it asks for nothing; `within` stands before its name."""
    known = kind.__struct_fields__
    for name, raw in fields.items():
        if name in known or name in ABOUT or bytes(raw) == b"null":
            continue
        param = within + shown(name)
        if name not in NEUTRAL:
            close = nearest(shown(name), known if within else [*known, *NEUTRAL])
            raise Refused(400, f"unknown field {param!r}: {close}", param=param, code="unknown_field")
        if _decoded(_anything, bytes(raw)) not in NEUTRAL[name]:
            usual = " or ".join(msgspec.json.encode(value).decode() for value in NEUTRAL[name])
            message = f"{param} is not done by this server: leave it out, or say {usual}"
            message += f"; {INSTEAD[name]}" if name in INSTEAD else ""
            raise Refused(400, message, param=param, code="unsupported")


_anything = msgspec.json.Decoder()
