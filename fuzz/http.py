"""The campaign of HTTP: requests of any kind through the whole application, over an engine without a model.

Each is answered with a proper status and shape, none is the server's fault, and once it is over nothing is held for it:
no request of the engine, no block of its cache, and, over all of them, no memory.
"""

from __future__ import annotations

import asyncio
import json
import re
import weakref
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from fuzz import mutate
from fuzz.fake_engine import FakeEngine, Inside
from fuzz.fake_model import write_tokenizer
from fuzz.readers import Defect, temporary
from meshwright.endpoint.app import App, Served
from meshwright.endpoint.front import Limits
from meshwright.endpoint.template import ChatTemplate
from meshwright.endpoint.text import ModelText

#: Statuses of an answer, and of a refusal.
GOOD, REFUSED = (200,), (400, 401, 403, 404, 405, 408, 413, 415, 421, 429, 499)
KEYS = ("secret",)
LIMITS = Limits(running=16, queue=16, timeout_s=20.0, slow_s=5.0, body_bytes=20_000, body_s=5.0)
#: Examples before memory is looked at, between two looks, and the bytes that it may grow from there.
SETTLED, OFTEN, GROWS_BYTES = 10_000, 5_000, 40 << 20
PATHS = ("/v1/completions", "/v1/chat/completions", "/generate", "/tokenize", "/detokenize")
OTHER_PATHS = (
    *(
        "/v1/models",
        "/v1/models/tuned",
        "/health",
        "/metrics",
        "/version",
        "/",
        "/v1",
        "/v1/completions/",
        "//v1/models",
    ),
    *("/v1/models/../../etc/passwd", "/v1/models/%00", "/v1/embeddings", "/V1/COMPLETIONS", "/\u20ac"),
)
MESSAGES = [{"role": "system", "content": "be"}, {"role": "user", "content": [{"type": "text", "text": "hello"}]}]
SAMPLED = {"model": "tiny", "max_tokens": 6, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "seed": 3, "n": 2}
#: Bodies that are right, by path.
SEEDS: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [
        {"prompt": "hello world", **SAMPLED, "stop": ["o", "never"], "stream": True, "logprobs": 2},
        {"prompt": ["a", "é中😀"], "max_tokens": 40, "echo": True, "logprobs": 0, "stream_options": None},
        {"prompt": [5, 6, 7], "min_tokens": 2, "ignore_eos": True, "stop_token_ids": [9], "priority": 1, "user": "me"},
        {"prompt": [[5, 6], [7]], "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 9},
        {"prompt": "a", "presence_penalty": 0, "best_of": 1, "suffix": None, "skip_special_tokens": False},
    ],
    "/v1/chat/completions": [
        {"messages": MESSAGES, **SAMPLED, "stream": True},
        {"messages": MESSAGES[1:], "max_completion_tokens": 9, "logprobs": True, "top_logprobs": 3},
        {
            "messages": MESSAGES,
            "max_tokens": 9,
            "tools": [],
            "response_format": {"type": "text"},
            "tool_choice": "auto",
        },
        {"messages": MESSAGES, "max_tokens": 5, "chat_template_kwargs": {"a": 1}, "include_stop_str_in_output": True},
    ],
    "/generate": [
        {"text": "hi", "sampling_params": {"max_new_tokens": 5, "temperature": 0, "ignore_eos": True}, "stream": True},
        {"input_ids": [5, 6], "sampling_params": {"stop": "a", "sampling_seed": 4}, "lora_path": "tuned", "rid": "x"},
    ],
    "/tokenize": [{"prompt": "hello", "return_token_strs": True}, {"messages": MESSAGES, "add_special_tokens": True}],
    "/detokenize": [{"tokens": [5, 6, 260], "model": "tiny"}],
}
#: Values that take the place of any other.
ODD = (
    *(
        None,
        True,
        False,
        -1,
        0,
        1,
        2,
        3,
        129,
        10**6,
        2**31,
        2**63,
        -(2**63),
        10**30,
        0.5,
        -0.1,
        1e308,
        "",
        "a",
        "é",
        "\0",
    ),
    *([], [1], [-1], [265], [266], ["a"], [[1]], [[]], [None], ["a", 1], [1.5], {}, {"a": 1}, [{}], "tuned", "gpt-4"),
    *("x" * 3000, [7] * 600, "😀" * 200, ["s"] * 40, [{"role": "user"}], [{"role": 5, "content": "a"}]),
    *([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], {"include_usage": "yes"}),
    *([{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "{"}}]}], {"5": 1}, {"-5": 1e9}),
    *([{"type": "function", "function": {"name": "a"}}], [{"type": "function", "function": {}}]),
)
NAMES = (
    *SAMPLED,
    "prompt",
    "messages",
    "stop",
    "stream",
    "logit_bias",
    "tools",
    "tool_choice",
    "min_p",
    "temprature",
    "model\0",
    "",
)
HEADERS = (
    *(("host", "127.0.0.1:8000"), ("host", "evil.example"), ("host", ""), ("host", "[::1"), ("origin", "http://evil")),
    *(("content-type", "text/plain"), ("content-type", "application/json; charset=latin-1"), ("content-type", "")),
    *(("authorization", "Bearer no"), ("authorization", "Basic secret"), ("authorization", "Bearer secr\xe9t")),
    *(("authorization", ""), ("content-length", "99999999999"), ("content-length", "-1"), ("content-length", "x")),
    *(("x-long", "y" * 5000), ("accept", "\xff\xfe"), ("transfer-encoding", "chunked"), ("origin", "null")),
)


class Http:
    """Requests; an example is a method, a path, headers, a body as Latin-1, the sizes it comes in, and after how many
    messages of the answer its client hangs up (-1: never)."""

    target, chunk = 100_000, 100_000

    def __init__(self) -> None:
        folder = write_tokenizer(temporary() / "tiny")
        text, template = ModelText(folder), ChatTemplate(folder)
        served = Served(text=text, template=template, names=("tiny",), keys=KEYS, limits=LIMITS)
        self.engine = FakeEngine()
        self.app = App(Inside(self.engine), served)
        self.loop = asyncio.new_event_loop()
        weakref.finalize(self, self.loop.close)
        self.loop.run_until_complete(self.app.engine.open(self.app.front))
        self._looked, self._settled = 0, 0

    def example(self, rng: Random) -> dict[str, Any]:
        path = rng.choice(PATHS) if rng.random() < 0.95 else rng.choice(OTHER_PATHS)
        seeds = SEEDS.get(path, SEEDS["/tokenize"])
        body = _body(rng, seeds)
        headers = [["host", "localhost"], ["content-type", "application/json"], ["authorization", "Bearer secret"]]
        if rng.random() < 0.08:
            name, value = rng.choice(HEADERS)
            headers = [h for h in headers if h[0] != name] + ([[name, value]] if rng.random() < 0.9 else [])
        method = (
            "POST" if rng.random() < 0.96 else rng.choice(("GET", "PUT", "DELETE", "HEAD", "OPTIONS", "P\u00d6ST", ""))
        )
        return {
            "method": method if path in PATHS or rng.random() < 0.2 else "GET",
            "path": path,
            "headers": headers,
            "body": body.decode("latin-1"),
            "sizes": [rng.choice((1, 7, 100, 4096))] if rng.random() < 0.2 else [],
            "hangs": rng.choice((0, 1, 2, 5)) if rng.random() < 0.1 else -1,
        }

    def look(self, example: dict[str, Any]) -> str:
        status, headers, body, complete = self.loop.run_until_complete(asyncio.wait_for(self._sent(example), 30))
        if self.app.front.under_way or not self.engine.idle or self.engine.figures().blocks_used:
            raise Defect(f"{self.app.front.under_way} requests and {self.engine.figures().blocks_used} blocks are held")
        self._memory()
        if status == 0:
            return "hung up"
        judge(status, headers, body, complete, example)
        return f"status {status}"

    def smaller(self, example: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield example | {"sizes": [], "hangs": -1}
        for i in range(len(example["headers"])):
            yield example | {"headers": example["headers"][:i] + example["headers"][i + 1 :]}
        try:
            fields = json.loads(example["body"].encode("latin-1"))
        except (ValueError, RecursionError):
            half = len(example["body"]) // 2
            yield from (example | {"body": part} for part in (example["body"][:half], example["body"][half:]) if half)
            return
        if isinstance(fields, dict):
            for name in fields:
                rest = {key: value for key, value in fields.items() if key != name}
                yield example | {"body": json.dumps(rest).encode().decode("latin-1")}

    async def _sent(self, example: dict[str, Any]) -> tuple[int, dict[str, str], bytes, bool]:
        """Status, headers and body of the answer, and whether it came to its end; status 0 where none came."""
        data, size = example["body"].encode("latin-1"), (example["sizes"] or [1 << 20])[0]
        parts = [data[i : i + size] for i in range(0, len(data), size)] or [b""]
        gone, sent = asyncio.Event(), []

        async def receive() -> dict[str, Any]:
            if parts and not gone.is_set():
                return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}
            if example["hangs"] == 0:
                gone.set()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)
            if len(sent) == example["hangs"]:
                gone.set()
            if gone.is_set():
                await asyncio.sleep(0)

        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in example["headers"]]
        if "content-length" not in dict(example["headers"]):
            headers.append((b"content-length", str(len(data)).encode()))
        scope = {"type": "http", "method": example["method"], "path": example["path"], "headers": headers}
        scope |= {"asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http", "query_string": b"", "state": {}}
        scope |= {"raw_path": example["path"].encode(), "root_path": "", "client": ("127.0.0.1", 9)}
        scope |= {"server": ("127.0.0.1", 8000)}
        await self.app.asgi(scope, receive, send)
        gone.set()
        for _ in range(3):  # what was withdrawn is gone at the engine after its next iteration
            await asyncio.sleep(0)
        start = next((m for m in sent if m["type"] == "http.response.start"), None)
        if start is None:
            return 0, {}, b"", False
        body = b"".join(m.get("body", b"") for m in sent if m["type"] == "http.response.body")
        complete = sent[-1]["type"] == "http.response.body" and not sent[-1].get("more_body", False)
        said = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in start["headers"]}
        return start["status"], said, body, complete and example["hangs"] < 0

    def _memory(self) -> None:
        """Look now and then that memory does not grow."""
        self._looked += 1
        if self._looked < SETTLED or self._looked % OFTEN:
            return
        held = _resident_bytes()
        self._settled = self._settled or held
        if held > self._settled + GROWS_BYTES:
            raise Defect(f"memory grows: {self._settled >> 20} MiB, later {held >> 20} MiB")


def _body(rng: Random, seeds: list[dict[str, Any]]) -> bytes:
    """A body that is right, or nearly, or mutated in its bytes, or nothing of the kind."""
    fields = dict(rng.choice(seeds))
    for _ in range(rng.choice((0, 0, 1, 1, 1, 2, 3))):
        name = rng.choice(tuple(fields) or ("prompt",)) if rng.random() < 0.7 else rng.choice(NAMES)
        fields[name] = rng.choice(ODD)
    data = json.dumps(fields, ensure_ascii=rng.random() < 0.5).encode("utf-8", "replace")
    kind = rng.random()
    if kind < 0.2:
        return mutate.text(rng, data, [json.dumps(seed).encode() for seed in seeds])
    if kind < 0.23:
        return rng.choice((b"", b"[]", b"null", b"{" * 5000, b'{"prompt":' * 3000, b"\xff\xfe{}", b"5", b'"a"', b"\0"))
    if kind < 0.25:
        return data + b" " * 30_000
    return data


def judge(status: int, headers: dict[str, str], body: bytes, complete: bool, example: dict[str, Any]) -> None:
    """Check that an answer has a proper status and the shape that goes with it.

    Raises:
        Defect: it has not.
    """
    if status not in GOOD + REFUSED:
        raise Defect(f"status {status}: {body[:200]!r}")
    if not complete or example["method"] == "HEAD":
        return
    if int(headers.get("content-length", len(body))) != len(body):
        raise Defect(f"{len(body)} bytes are said to be {headers['content-length']}")
    if status in REFUSED:
        error = msgspec.json.decode(body)["error"]
        if not error["message"] or error.keys() != {"message", "type", "param", "code"}:
            raise Defect(f"an error without its parts: {body[:200]!r}")
        if not error["message"].isascii() or re.search(r"Traceback|0x[0-9a-f]{6}", error["message"]):
            raise Defect(f"an error that says too much: {body[:200]!r}")
        if (status == 429) != ("retry-after" in headers):
            raise Defect(f"status {status} and retry-after do not go together")
    elif headers["content-type"].startswith("text/event-stream"):
        *events, end, rest = body.split(b"\n\n")
        if (end, rest) != (b"data: [DONE]", b""):
            raise Defect(f"a stream that does not end: {body[-200:]!r}")
        for event in events:
            if "error" in msgspec.json.decode(event.removeprefix(b"data: ")):
                raise Defect(f"a stream that broke off: {event[:200]!r}")
    elif headers["content-type"] == "application/json":
        msgspec.json.decode(body)


def _resident_bytes() -> int:
    """Memory of this process that is in use."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096
