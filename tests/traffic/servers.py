"""A server of OpenAI's protocol with an engine whose times are known: every iteration sleeps what a formula says.

The engine serves in order of arrival, at most ``slots`` requests at a time: new prompts are computed in iterations of
their own, and then everybody's next token in one. It is written for the tests, of nothing that they test.
"""

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

#: Letters are one token each, as a byte-level tokenizer has them, behind a first token.
FIRST = 1


@dataclass
class Engine:
    """Seconds of an iteration: ``prompt_s`` and ``prompt_token_s`` a token of a prompt that is not cached; ``step_s``,
    ``sequence_s`` a sequence and ``context_s`` a token of their contexts for next tokens."""

    slots: int = 64
    prompt_s: float = 0.02
    prompt_token_s: float = 0.001
    step_s: float = 0.01
    sequence_s: float = 0.002
    context_s: float = 0.0
    prefixes: bool = False
    waiting: list = field(default_factory=list)
    running: list = field(default_factory=list)
    known: set = field(default_factory=set)
    cancelled: int = 0
    most_running: int = 0
    prompts: list = field(default_factory=list)
    asked: asyncio.Event = field(default_factory=asyncio.Event)

    def ask(self, prompt: str, limit: int) -> dict:
        """Queue a request: its pieces come through a queue."""
        one = {"prompt": prompt, "limit": limit, "made": 0, "out": asyncio.Queue(), "gone": False, "cached": 0}
        self.waiting.append(one)
        self.prompts.append(prompt)
        self.asked.set()
        return one

    async def serve(self) -> None:
        """Compute iterations for ever."""
        while True:
            for queue in (self.waiting, self.running):
                self.cancelled += sum(one["gone"] for one in queue)
                queue[:] = [one for one in queue if not one["gone"]]
            if self.waiting and len(self.running) < self.slots:
                one = self.waiting.pop(0)
                self.running.append(one)
                self.most_running = max(self.most_running, len(self.running))
                one["cached"] = self._cached(one["prompt"])
                tokens = FIRST + len(one["prompt"]) - one["cached"]
                await asyncio.sleep(self.prompt_s + self.prompt_token_s * tokens)
                self._made([one])
            elif self.running:
                context = sum(len(one["prompt"]) + one["made"] for one in self.running)
                await asyncio.sleep(self.step_s + self.sequence_s * len(self.running) + self.context_s * context)
                self._made(list(self.running))
            else:
                self.asked.clear()
                await self.asked.wait()

    def _made(self, some: list) -> None:
        for one in some:
            one["made"] += 1
            one["out"].put_nowait("x")
            if one["made"] == one["limit"]:
                one["out"].put_nowait(None)
                self.running.remove(one)

    def _cached(self, prompt: str) -> int:
        """Tokens in whole blocks of 16 that an earlier prompt began with, the first token with them."""
        if not self.prefixes:
            return 0
        found, tokens = 0, "^" * FIRST + prompt
        for end in range(16, len(tokens), 16):
            if tokens[:end] in self.known:
                found = end
            self.known.add(tokens[:end])
        return found


def app(engine: Engine, *, usage: bool = True, fault=None, models=("tiny",), context: int = 0) -> Starlette:
    """The application. `fault` is asked of every request for an answer (its number), and may return a Response."""
    asked = iter(range(10**9))

    async def listed(request: Request) -> Response:
        more = {"max_model_len": context} if context else {}
        return JSONResponse({"object": "list", "data": [{"id": name, "object": "model"} | more for name in models]})

    async def complete(request: Request) -> Response:
        body = await request.json()
        if body["model"] not in models:
            return JSONResponse({"error": {"message": f"no model {body['model']}"}}, status_code=404)
        chat = "messages" in body
        prompt = body["messages"][0]["content"] if chat else body["prompt"]
        if not isinstance(prompt, str):
            return JSONResponse({"error": {"message": "prompt is no text"}}, status_code=400)
        response = fault(next(asked), body) if fault is not None else None
        if response is not None:
            return response
        one = engine.ask(prompt, body["max_tokens"])
        counts = {"prompt_tokens": FIRST + len(prompt), "completion_tokens": body["max_tokens"]}
        if not body.get("stream"):
            while await one["out"].get() is not None:
                pass
            return JSONResponse(
                {"choices": [{"text": "x" * body["max_tokens"]}]} | ({"usage": counts} if usage else {})
            )
        return StreamingResponse(stream(one, counts, chat), media_type="text/event-stream")

    async def stream(one, counts, chat):
        def event(said, finish=None):
            choice = {"index": 0, "finish_reason": finish} | ({"delta": said} if chat else {"text": said})
            return f"data: {json.dumps({'choices': [choice]})}\n\n"

        over = False
        try:
            if chat:
                yield event({"role": "assistant", "content": ""})
            while (piece := await one["out"].get()) is not None:
                yield event({"content": piece} if chat else piece)
            yield event({} if chat else "", "length")
            if usage:
                counts = counts | {"prompt_tokens_details": {"cached_tokens": one["cached"]}}
                yield f"data: {json.dumps({'choices': [], 'usage': counts})}\n\n"
            yield "data: [DONE]\n\n"
            over = True
        finally:
            one["gone"] = not over

    return Starlette(
        routes=[
            Route("/v1/models", listed),
            Route("/v1/completions", complete, methods=["POST"]),
            Route("/v1/chat/completions", complete, methods=["POST"]),
        ]
    )


@asynccontextmanager
async def serving(application, engine: Engine | None = None):
    """Serve an application on a free port; the URL."""
    config = uvicorn.Config(application, host="127.0.0.1", port=0, log_level="critical", lifespan="off")
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None
    tasks = [asyncio.create_task(server._serve())]
    if engine is not None:
        tasks.append(asyncio.create_task(engine.serve()))
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = server.force_exit = True
        for task in tasks[1:]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
