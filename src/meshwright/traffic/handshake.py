"""The first words with a server: whether it speaks OpenAI's protocol, its model, and which fields it takes."""

from __future__ import annotations

from typing import Any

import msgspec

from meshwright.errors import Diagnostic, MeshwrightError, nearest
from meshwright.traffic.events import StreamedAnswer, TokenUsage
from meshwright.traffic.http import HttpClient, HttpFault, Reply

#: Fields beyond OpenAI's that make an answer as long as it is wanted, and say how long it was; the first set that a
#: server takes is used.
EXTRAS = (
    ("stream_options", "ignore_eos", "min_tokens"),
    ("stream_options", "ignore_eos"),
    ("stream_options", "min_tokens"),
    ("stream_options",),
    ("min_tokens",),
    (),
)
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


class ServerDialect(msgspec.Struct, frozen=True, kw_only=True):
    """The way that a server is asked: its ``model``, whether as ``chat``, and which of the ``extras`` it takes.
    ``usage``: a stream says how many tokens there were. ``context`` is the most tokens of a request, 0 where the server
    does not say."""

    model: str
    chat: bool = False
    extras: tuple[str, ...] = ()
    usage: bool = False
    context: int = 0

    @property
    def path(self) -> str:
        """The endpoint."""
        return CHAT if self.chat else COMPLETIONS

    def body(self, prompt: str | list[int], limit: int, *, stream: bool = True) -> bytes:
        """Return the body of a request for an answer of so many tokens, the likeliest ones."""
        said: dict[str, Any] = {"model": self.model, "max_tokens": limit, "temperature": 0, "stream": stream}
        if self.chat:
            said["messages"] = [{"role": "user", "content": prompt}]
        else:
            said["prompt"] = prompt
        if "stream_options" in self.extras and stream:
            said["stream_options"] = {"include_usage": True}
        if "ignore_eos" in self.extras:
            said["ignore_eos"] = True
        if "min_tokens" in self.extras:
            said["min_tokens"] = limit
        return msgspec.json.encode(said)


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None
    context_length: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _Whole(msgspec.Struct):
    choices: list[dict[str, Any]] = []
    usage: TokenUsage | None = None


async def greet(client: HttpClient, *, model: str = "", chat: bool = False) -> ServerDialect:
    """Return how a server is to be asked.

    Raises:
        MeshwrightError: T001 where nobody answers, T002 for what is no such server or refuses its key, T003 for a model
            that it does not have.
    """
    known = await _models(client, needed=not model)
    names = [one.id for one in known]
    if not model and not names:
        help = "say which one: --model NAME"
        raise MeshwrightError.one("T003", "the server lists no model", place=client.where.text, help=help)
    chosen = model or names[0]
    mine = next((one for one in known if one.id == chosen), None)
    context = (mine.max_model_len or mine.context_length or 0) if mine is not None else 0
    dialect, why = await _dialect(client, ServerDialect(model=chosen, chat=chat, context=context))
    if dialect is None and not chat and why is not None and why.status in (404, 405):
        dialect, why = await _dialect(client, ServerDialect(model=chosen, chat=True, context=context))
    if dialect is not None:
        return dialect
    if mine is None:
        help = nearest(chosen, names) if names else "the server lists none"
        message = f"the server has no model {chosen!r}: {_said(why)}"
        raise MeshwrightError.one("T003", message, place=f"--model {chosen}", help=help)
    raise _other(client, f"a completion of two tokens failed: {_said(why)}")


async def _models(client: HttpClient, *, needed: bool) -> list[_Model]:
    """Return the models that a server lists; none where it lists none and they are not needed, as some servers fail to
    list a model that they were given as a folder."""
    try:
        reply = await client.ask("/v1/models")
    except HttpFault as fault:
        help = "is it running there? curl URL/v1/models lists its models"
        raise MeshwrightError.one("T001", str(fault), place=client.where.text, help=help) from None
    if reply.status in (401, 403):
        help = "--api-key KEY, or --api-key env:NAME for the variable that holds it"
        message = f"the server refuses the key: {_said(reply)}"
        raise MeshwrightError.one("T002", message, place=client.where.text, help=help)
    if reply.status != 200:
        if needed:
            raise _other(client, f"GET /v1/models: {_said(reply)} (--model NAME asks for one without the list)")
        return []
    try:
        return msgspec.json.decode(reply.body, type=_Models).data
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        if not needed:
            return []
        raise _other(client, f"GET /v1/models lists none: {error}") from None


async def _dialect(client: HttpClient, plain: ServerDialect) -> tuple[ServerDialect | None, Reply | None]:
    """Return the first set of fields that the server takes, or None with its last refusal."""
    reply: Reply | None = None
    for extras in EXTRAS:
        tried = msgspec.structs.replace(plain, extras=extras)
        answer = StreamedAnswer(plain.chat)
        try:
            reply = await client.ask(tried.path, tried.body("a b c", 2), answer.feed)
        except HttpFault as fault:
            return None, Reply(0, {}, str(fault).encode())
        if reply.status == 200:
            answer.end()
            if answer.error:
                return None, Reply(0, {}, answer.error.encode())
            return msgspec.structs.replace(tried, usage=answer.usage is not None), reply
        if reply.status not in (400, 422, 500):
            break
    return None, reply


async def tokens_of(client: HttpClient, dialect: ServerDialect, prompt: str | list[int]) -> int | None:
    """Return how many tokens a prompt has as the server counts them in an answer of one token; None where it does not
    say, or does not take the prompt."""
    try:
        reply = await client.ask(dialect.path, dialect.body(prompt, 1, stream=False))
        usage = msgspec.json.decode(reply.body, type=_Whole).usage if reply.status == 200 else None
    except (HttpFault, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return usage.prompt_tokens if usage is not None else None


def _said(reply: Reply | None) -> str:
    if reply is None:
        return "no answer"
    text = reply.body.decode("utf-8", "replace").strip()[:300]
    return f"status {reply.status}, {text}" if reply.status else text


def _other(client: HttpClient, why: str) -> MeshwrightError:
    help = "a URL in front of /v1/models and /v1/completions, as vLLM, SGLang, llama.cpp and transformers serve them"
    message = f"no server of OpenAI's protocol: {why}"
    return MeshwrightError(Diagnostic(code="T002", message=message, place=client.where.text, help=help))
