"""The application: OpenAI's routes over one engine, each bounded and checked before anything is computed."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Protocol

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from meshwright.endpoint.answers import Continuation, Increment, Shapes
from meshwright.endpoint.figures import CONTENT_TYPE, FrontFigures
from meshwright.endpoint.front import Front, Limits, Ordering, Ticket
from meshwright.endpoint.gate import Gate, Intake
from meshwright.endpoint.inquiry import Inquiry, Reader
from meshwright.endpoint.refusal import Refused, shown
from meshwright.endpoint.seam import EngineFacts
from meshwright.endpoint.template import ChatTemplate
from meshwright.endpoint.text import ModelText
from meshwright.version import VERSION

#: Bytes of a body from which on its text is made tokens in a thread, while others are served.
LONG = 1 << 15


class EngineHolder(Ordering, Protocol):
    """Who holds the engine: :class:`meshwright.endpoint.supervisor.EngineProcess`, or in tests this very process."""

    async def open(self, front: Front) -> None: ...
    async def close(self, grace_s: float = ...) -> None: ...


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """A served model: its text and template, the names it is asked by, who may ask, within which limits, and who reads
    its calls of tools (:data:`~meshwright.endpoint.tool_calls.PARSERS`)."""

    text: ModelText
    template: ChatTemplate | None
    names: Sequence[str]
    host: str = "127.0.0.1"
    keys: tuple[str, ...] = ()
    limits: Limits = Limits()
    tool_parser: str = ""


class App:
    """The routes of one server, over the engine that `engine` holds. ``asgi`` is the application; ``failed`` is why no
    engine could be had at the start."""

    def __init__(self, engine: EngineHolder, served: Served):
        self.engine, self.served = engine, served
        self.front = Front(engine, served.limits, FrontFigures(served.names[0]))
        self.intake = Intake(served.limits)
        self.failed: BaseException | None = None
        self._reader: Reader | None = None
        self._created = int(time.time())
        self.asgi = Starlette(
            lifespan=self._lifespan,
            routes=[
                Route("/v1/completions", self._answers(Reader.completion), methods=["POST"]),
                Route("/v1/chat/completions", self._answers(Reader.chat), methods=["POST"]),
                Route("/generate", self._answers(Reader.generate), methods=["POST"]),
                Route("/tokenize", self._tokenize, methods=["POST"]),
                Route("/detokenize", self._detokenize, methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/v1/models/{name:path}", self._model),
                Route("/health", self._health),
                Route("/metrics", self._metrics),
                Route("/version", self._version),
            ],
            middleware=[Middleware(Gate, host=served.host, keys=served.keys, slow_s=served.limits.slow_s)],
            exception_handlers={Refused: self._refused, HTTPException: _http, Exception: _fault},
        )
        self.asgi.router.redirect_slashes = False

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        try:
            await self.engine.open(self.front)
        except BaseException as error:
            self.failed = error
            raise
        yield
        await self.engine.close()

    async def abandon(self) -> None:
        """End at once: before the engine is there, or while it still has requests."""
        await self.engine.close(0.0)

    def reader(self) -> Reader:
        """Return the reader of bodies, which knows the engine's facts."""
        facts = self.front.facts
        if facts is None:
            raise Refused(503, "the engine is being built", code="starting", retry_s=5)
        if self._reader is None or self._reader.facts != facts:
            served = self.served
            self._reader = Reader(served.text, served.template, facts, served.names, served.tool_parser)
        return self._reader

    def _answers(self, read: Callable[[Reader, bytes, int], Inquiry]) -> Callable[[Request], Awaitable[Response]]:
        """A route whose body is an inquiry of the engine."""

        async def endpoint(request: Request) -> Response:
            self.front.check_open()
            data, reader = await self.intake.body(request), self.reader()
            inquiry = await _beside(read, reader, data, request.state.tenant)
            choices = [Continuation(self.served.text, inquiry, i) for i in range(len(inquiry.prompts) * inquiry.n)]
            answer = Answer(self.front.ask(inquiry), choices)
            if inquiry.stream:
                return EventStream(answer, await _first(answer, request))
            return await _whole(answer, request)

        return endpoint

    async def _tokenize(self, request: Request) -> Response:
        data, reader = await self.intake.body(request), self.reader()
        ids, named = await _beside(Reader.tokenised, reader, data)
        table = {"count": len(ids), "max_model_len": reader.facts.longest, "tokens": ids}
        return _json(table | ({"token_strs": [self.served.text.token(id) for id in ids]} if named else {}))

    async def _detokenize(self, request: Request) -> Response:
        data, reader = await self.intake.body(request), self.reader()
        return _json({"prompt": await _beside(Reader.detokenised, reader, data)})

    async def _models(self, request: Request) -> Response:
        return _json({"object": "list", "data": self._listed()})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        wanted = self.served.names[0] if name in self.served.names else name
        found = next((one for one in self._listed() if one["id"] == wanted), None)
        if found is None:
            raise Refused(404, f"there is no model {shown(name)!r} here", param="model", code="model_not_found")
        return _json(found | {"id": name})

    def _listed(self) -> list[dict[str, Any]]:
        facts, name = self.front.facts or EngineFacts(context=0, vocabulary=0, room=0), self.served.names[0]
        common = {"object": "model", "created": self._created, "owned_by": "meshwright"}
        common["max_model_len"] = facts.longest
        adapters = [{"id": adapter, **common, "parent": name} for adapter in facts.adapters]
        return [{"id": name, **common}, *adapters]

    async def _health(self, request: Request) -> Response:
        self.front.check_open()
        if not self.front.ready:
            raise Refused(503, "the engine is being built", code="starting", retry_s=5)
        return _json({"status": "ok"})

    async def _metrics(self, request: Request) -> Response:
        return Response(self.front.figures.text(), headers={"Content-Type": CONTENT_TYPE})

    async def _version(self, request: Request) -> Response:
        return _json({"version": VERSION})

    async def _refused(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, Refused)
        self.front.figures.refused.labels(self.front.figures.model, str(error.status)).inc()
        return error.response()


class Answer:
    """The answer to an inquiry as it grows: ``parts`` waits for what is new of its choices."""

    def __init__(self, ticket: Ticket, choices: list[Continuation]):
        self.ticket, self.choices = ticket, choices
        self.shapes = Shapes(ticket.inquiry, choices)
        self._open = len(choices)
        self._first = min(ticket.numbers)

    @property
    def complete(self) -> bool:
        """Whether every choice has ended."""
        return not self._open

    async def parts(self) -> list[tuple[Continuation, Increment]]:
        """Wait for the next parts.

        Raises:
            Refused: the engine failed, time is up, or the client is gone.
        """
        found = []
        for index, piece in await self.ticket.next():
            choice = self.choices[index]
            if choice.finish:
                continue  # behind a stop string
            part = choice.feed(piece)
            found.append((choice, part))
            if choice.finish:
                self._open -= 1
                if not piece.finish:
                    self.ticket.stop(self._first + index)
        return found


class EventStream(Response):
    """Server-sent events of an answer, which ends with its reader: the engine's memory is free again."""

    def __init__(self, answer: Answer, first: list[tuple[Continuation, Increment]]):
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no", "X-Request-Id": answer.shapes.id}
        super().__init__(headers=headers, media_type="text/event-stream; charset=utf-8")
        del self.headers["content-length"]
        self._answer, self._first = answer, first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with _until_gone(receive, self._answer.ticket):
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                async for data in self._events():
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._answer.ticket.close()

    async def _events(self) -> AsyncIterator[bytes]:
        answer, shapes = self._answer, self._answer.shapes
        new = self._first
        try:
            while True:
                if new:
                    yield b"".join([shapes.event(choice, part) for choice, part in new])
                if answer.complete:
                    break
                new = await answer.parts()
            yield shapes.closing()
        except Refused as refusal:  # too late for a status
            yield b"data: " + refusal.body() + b"\n\ndata: [DONE]\n\n"


async def _first(answer: Answer, request: Request) -> list[tuple[Continuation, Increment]]:
    """Wait for the first parts of an answer, as long as a failure still has a status of its own."""
    try:
        async with _until_gone(request.receive, answer.ticket):
            return await answer.parts()
    except BaseException:
        answer.ticket.close()
        raise


async def _whole(answer: Answer, request: Request) -> Response:
    """Wait for the whole answer."""
    parts: list[list[Increment]] = [[] for _ in answer.choices]
    try:
        async with _until_gone(request.receive, answer.ticket):
            while not answer.complete:
                for choice, part in await answer.parts():
                    parts[choice.index].append(part)
    finally:
        answer.ticket.close()
    headers = {"Cache-Control": "no-store", "X-Request-Id": answer.shapes.id}
    return Response(answer.shapes.whole(parts), media_type="application/json", headers=headers)


@contextlib.asynccontextmanager
async def _until_gone(receive: Receive, ticket: Ticket) -> AsyncIterator[None]:
    """Fail the ticket as soon as the client hangs up."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        ticket.fail(Refused(499, "the client is gone", code="gone"))

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()


async def _beside(read: Callable[..., Any], reader: Reader, data: bytes, *more: Any) -> Any:
    """Read a body, a long one in a thread."""
    return await asyncio.to_thread(read, reader, data, *more) if len(data) > LONG else read(reader, data, *more)


def _json(value: dict[str, Any]) -> Response:
    headers = {"Cache-Control": "no-store"}
    return Response(msgspec.json.encode(value), media_type="application/json", headers=headers)


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path, method = shown(request.url.path), shown(request.method)
    headers = dict(error.headers or {})
    if error.status_code == 405:
        message = f"{path} takes {headers.get('Allow', headers.get('allow', 'another method'))}, not {method}"
        return Refused(405, message, code="method_not_allowed").response(headers)
    refusal = Refused(error.status_code, f"there is no {path} here", code="unknown_path")
    return refusal.response(headers)


async def _fault(request: Request, error: Exception) -> Response:
    traceback.print_exception(error, file=sys.stderr)
    message = f"the request failed: {type(error).__name__}; this is a fault of Meshwright, please report it"
    return Refused(500, message, code="internal_error").response()
