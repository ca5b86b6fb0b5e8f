"""The server's routes: the page, its files, and requests for answers, each bounded and checked before anything runs."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Annotated, Any, Protocol

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from meshwright.errors import Diagnostic, MeshwrightError
from meshwright.ui import page
from meshwright.ui.guard import Guard, refused
from meshwright.ui.pool import Superseded

#: Longest body in bytes: a question with two pasted files.
MAX_BODY = 512 * 1024
TYPES = {"js": "text/javascript; charset=utf-8", "css": "text/css; charset=utf-8"}
FORMAT_VERSION = 1


class Answerers(Protocol):
    """Who answers: :class:`meshwright.ui.pool.Workers`, or in tests this very process."""

    async def open(self) -> None: ...
    async def close(self) -> None: ...
    async def ask(self, page: str, task: str, body: dict[str, Any]) -> dict[str, Any]: ...
    async def search(self, page: str, body: dict[str, Any], event: Callable[[dict], Any]) -> dict[str, Any]: ...
    async def stop_search(self, page: str) -> bool: ...


class Envelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The envelope of every request of the page: which window it comes from, and what it asks."""

    page: Annotated[str, msgspec.Meta(max_length=40)]
    body: dict[str, Any] = {}


def build(answers: Answerers, start: dict[str, Any], host: str) -> Starlette:
    """The application. `start` is the question the page opens with, `host` the name that it is served under."""

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await answers.open()
        yield
        await answers.close()

    def asks(task: str) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            asked = await _envelope(request)
            found = await answers.ask(asked.page, task, asked.body)
            return _json({"format_version": FORMAT_VERSION, **found})

        return endpoint

    async def search(request: Request) -> Response:
        asked = await _envelope(request)
        headers = {"Cache-Control": "no-store"}
        stream = _events(answers, asked.page, asked.body)
        return StreamingResponse(stream, media_type="text/event-stream", headers=headers)

    async def stop(request: Request) -> Response:
        asked = await _envelope(request)
        return _json({"format_version": FORMAT_VERSION, "stopped": await answers.stop_search(asked.page)})

    async def front(request: Request) -> Response:
        return Response(page.render(start), media_type="text/html; charset=utf-8")

    async def catalog(request: Request) -> Response:
        return _json({"format_version": FORMAT_VERSION, **page.catalog()})

    return Starlette(
        lifespan=lifespan,
        routes=[
            Route("/", front),
            Route("/static/{name}", _static),
            Route("/api/catalog", catalog),
            *(Route(f"/api/{task}", asks(task), methods=["POST"]) for task in ("answer", "panel", "recipes")),
            Route("/api/search", search, methods=["POST"]),
            Route("/api/search/stop", stop, methods=["POST"]),
        ],
        middleware=[Guard.beside(host)],
        exception_handlers={
            HTTPException: _http,
            MeshwrightError: _ours,
            Superseded: _superseded,
            ClientDisconnect: _gone,
            Exception: _fault,
        },
    )


async def _envelope(request: Request) -> Envelope:
    """The body of a request, bounded before it is read and strict.

    Raises:
        MeshwrightError: I001 when it is none of the page's requests, I002 when it is too long.
    """
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY:
            help = "paste the part of the file that describes the model or the cluster"
            raise MeshwrightError.one("I002", f"a request is at most {MAX_BODY:,} bytes", place="body", help=help)
    try:
        return msgspec.json.decode(body, type=Envelope)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        message, help = f"not a request of this page: {reason}", 'send {"page": "...", "body": {...}}'
        raise MeshwrightError.one("I001", message, place="body", help=help) from None


async def _events(answers: Answerers, name: str, body: dict[str, Any]) -> AsyncIterator[str]:
    """Progress and answer of a search as server-sent events. When the reader goes, the search ends."""
    sent: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    work = asyncio.create_task(_searched(answers, name, body, sent.put_nowait))
    work.add_done_callback(lambda _: sent.put_nowait({}))
    try:
        yield _event("begun", {})
        while event := await sent.get():
            yield _event("progress", event)
        yield _event("answer", {"format_version": FORMAT_VERSION, **work.result()})
    finally:
        work.cancel()


async def _searched(answers: Answerers, name: str, body: dict, event: Callable[[dict], Any]) -> dict[str, Any]:
    try:
        return await answers.search(name, body, event)
    except MeshwrightError as error:
        return {"errors": [msgspec.to_builtins(d) for d in error.diagnostics]}


def _event(name: str, value: dict[str, Any]) -> str:
    return f"event: {name}\ndata: {msgspec.json.encode(value).decode()}\n\n"


async def _static(request: Request) -> Response:
    """A style or script of the page or of the report; only names that are listed exist."""
    name = request.path_params["name"]
    text = page.static(name)
    if text is None:
        raise HTTPException(404)
    return Response(text, headers={"Content-Type": TYPES[name.rsplit(".", 1)[1]], "Cache-Control": "no-cache"})


def _json(value: dict[str, Any], status: int = 200) -> Response:
    headers = {"Cache-Control": "no-store"}
    return Response(msgspec.json.encode(value), status, media_type="application/json", headers=headers)


STATUS = {"I001": 400, "I008": 503, "I002": 413, "I005": 504, "I006": 503}


async def _ours(request: Request, error: Exception) -> Response:
    assert isinstance(error, MeshwrightError)
    return refused(STATUS.get(error.diagnostics[0].code, 400), *error.diagnostics)


async def _superseded(request: Request, error: Exception) -> Response:
    said = Diagnostic(code="I003", message="a newer request of the same page took its place", place=request.url.path)
    return refused(409, said)


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    shown = re.sub(r"[^\x20-\x7e]", "?", request.url.path)[:200]
    message = f"no {request.method} {shown} here"
    help = "the page is at /" if error.status_code == 404 else "the page knows how its requests are made"
    return refused(error.status_code, Diagnostic(code="I003", message=message, place=shown, help=help))


async def _gone(request: Request, error: Exception) -> Response:
    return refused(499, Diagnostic(code="I001", message="the request broke off", place="body"))


async def _fault(request: Request, error: Exception) -> Response:
    message = f"the request failed: {type(error).__name__}"
    help = "this is a fault of Meshwright, please report it"
    return refused(500, Diagnostic(code="I008", message=message, place="the page", help=help))
