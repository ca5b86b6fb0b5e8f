"""``meshwright bench-serve``: a workload's requests sent to a server, and what became of them."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright.cli import options
from meshwright.cli.guard import ended_in_order
from meshwright.cli.output import console, note, print_json, unwritable
from meshwright.errors import Diagnostic, MeshwrightError

if TYPE_CHECKING:
    from meshwright.traffic.record import Traffic
    from meshwright.traffic.replay import ReplayEnd, ReplayState

DESCRIPTION = """Send the requests of a workload to a server that speaks OpenAI's protocol (vLLM, SGLang, llama.cpp,
transformers serve, meshwright serve), at their times, and measure time to first token, between tokens and end to end.

--serve takes the words of meshwright predict --serve: an open loop (rate=), a closed one (concurrency=), traces, shared
prefixes, conversations. Prompts have as many tokens as it says, as the server counts them, and share what it shares.

--out keeps every answer in a file as soon as it is over: Ctrl-C leaves it valid, --resume goes on with it, and
meshwright compare lays it beside a prediction.

Exit code 0: answered; 1: an objective (ttft=, tpot=, e2e=) is missed, or some requests had errors; 2: misuse, or no
such server."""
COMMAND = "bench-serve"
#: Seconds between two lines of progress on a terminal, and elsewhere.
OFTEN_S, SELDOM_S = 0.2, 10.0


class BenchServeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of ``meshwright bench-serve``."""

    url: options.positional("URL", "The server: http://127.0.0.1:8000.") = ""
    serve: options.text(
        "REQUESTS", "rate=8,prompt=1024,output=256,requests=500 or trace=FILE: meshwright explain serve."
    ) = ""
    slo: options.text("BOUNDS", "Objectives that decide the exit code, ttft=500ms,tpot=50ms@p90.") = ""
    model: options.text("NAME", "Which of the server's models; its first if left out.") = ""
    api_key: options.text("KEY", "Sent as a bearer token; env:NAME takes it from a variable.") = ""
    tokenizer: options.text("FILE", "A tokenizer.json to count prompts by, where the server cannot be asked.") = ""
    chat: options.switch("Ask /v1/chat/completions in place of /v1/completions.") = False
    out: options.text("FILE", "Keep every answer's times there, measured.jsonl.") = ""
    resume: options.switch("Go on with the file of --out: ask what it lacks, and what had an error.") = False
    trace: options.text("FILE", "Write the timeline for Perfetto or chrome://tracing, measured.json.gz.") = ""
    timeout: options.text("SECONDS", "Give up an answer after so long; 600 if left out.") = ""
    json: options.JSON = False


def run(argv: list[str]) -> int:
    """0 when every request was answered and every objective kept, 1 when not."""
    given, wrong = options.read(BenchServeOptions, argv, command=COMMAND, description=DESCRIPTION)
    wanted = {"url": "URL, http://127.0.0.1:8000", "serve": "--serve rate=8,prompt=1024,output=256,requests=500"}
    wrong += options.missing({"url": given.url, "serve": given.serve}, wanted, command=COMMAND)
    wrong += unwritable(given.out, "--out") + unwritable(given.trace, "--trace")
    limits = options.numbers(given, {"timeout": (0.001, 1e6, False, "seconds above 0")}, wrong, command=COMMAND)
    key, fault = api_key(given.api_key)
    wrong += fault
    from meshwright.cli.serving import bounded
    from meshwright.spec.serve import parse
    from meshwright.traffic.http import origin
    from meshwright.traffic.session import earlier

    serve = requests = before = None
    try:
        words = bounded(given.serve, given.slo, wrong)
        serve = parse(words) if given.serve else None
        requests = serve.drawn() if serve is not None else None
    except MeshwrightError as error:
        wrong += error.diagnostics
    try:
        origin(given.url or "localhost")
    except MeshwrightError as error:
        wrong += error.diagnostics
    if requests is not None and not wrong:
        before, fault = earlier(given.out, requests, given.url, resume=given.resume)
        wrong += fault
    if wrong:
        raise MeshwrightError(wrong)
    try:
        with ended_in_order():
            traffic, end = asyncio.run(_measured(given, key, serve, requests, before, limits.get("timeout", 0.0)))
    except KeyboardInterrupt:
        if given.out:
            note(f"what was answered is in {given.out}: the same command with --resume goes on from there")
        raise
    return _shown(given, serve, traffic, end)


def api_key(text: str) -> tuple[str, list[Diagnostic]]:
    """Return the key of a server, of the variable that ``env:NAME`` names, and what is wrong with it."""
    name = text.removeprefix("env:")
    key = os.environ.get(name, "") if name != text else text
    if text and not key:
        message = f"the variable {name} is not set"
    elif not key.isascii() or any(c.isspace() or not c.isprintable() for c in key):
        message = "a key is one word of ASCII"
    else:
        return key, []
    return "", [Diagnostic(code="T002", message=message, place="--api-key", help="export it first, or give the key")]


async def _measured(given: Any, key: str, serve: Any, requests: Any, before: Any, timeout_s: float) -> Any:
    from meshwright.traffic.session import GREETING_S, new_salt, opened, replayed, too_long

    salt = before.head.salt if before is not None else new_salt()
    session = await opened(
        given.url,
        model=given.model,
        api_key=key,
        chat=given.chat,
        tokenizer=given.tokenizer,
        salt=salt,
        within_s=timeout_s or GREETING_S,
    )
    wrong = too_long(session.dialect, requests)
    if before is not None and (before.head.model, before.head.chat) != (session.dialect.model, session.dialect.chat):
        message = f"{given.out} is of the model {before.head.model!r}{' as chats' if before.head.chat else ''}"
        help = "say the same --model and --chat, or another file"
        wrong.append(Diagnostic(code="T004", message=message, place=f"--out {given.out}", help=help))
    if wrong:
        session.client.close()
        raise MeshwrightError(wrong)
    note(f"{session.dialect.model} at {session.client.where.text}; prompts: {session.prompts.how}")
    progress = TrafficProgress()
    try:
        return await replayed(
            session,
            serve,
            requests,
            path=given.out,
            before=before,
            timeout_s=timeout_s or 600.0,
            watch=progress,
            looks=True,
        )
    finally:
        progress.end()


class TrafficProgress:
    """A line on stderr now and then: answered of all, requests and tokens a second, open ones, errors, how long yet."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._begun = self._said = time.monotonic()
        self._before: int | None = None

    def __call__(self, state: ReplayState) -> None:
        now = time.monotonic()
        self._before = state.done if self._before is None else self._before
        if now - self._said < (OFTEN_S if self._live else SELDOM_S):
            return
        self._said = now
        line = self.line(state, now - self._begun)
        sys.stderr.write(f"\r\033[K{line}" if self._live else f"{line}\n")
        sys.stderr.flush()

    def line(self, state: ReplayState, took_s: float) -> str:
        """Return the line of a state after so many seconds."""
        done = state.done - (self._before or 0)
        rate = done / took_s if took_s > 0 else 0.0
        by_rate = (state.total - state.done) / rate if rate else 0.0
        left = max(state.last_due_s - state.now_s, 0.0) if state.open + state.done < state.total else 0.0
        errors = f", {state.errors:,} errors" if state.errors else ""
        eta = f", {max(left, by_rate):.0f} s left" if rate or left else ""
        tokens = state.tokens / took_s if took_s > 0 else 0.0
        said = f"{state.done:,} of {state.total:,} requests, {rate:.3g}/s, {tokens:,.0f} tokens/s"
        return f"{said}, {state.open:,} running{errors}{eta}"

    def end(self) -> None:
        """Leave the line."""
        if self._live:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()


def _shown(given: Any, serve: Any, traffic: Traffic, end: ReplayEnd) -> int:
    from meshwright.report.traffic_text import render
    from meshwright.traffic.summary import summed_up

    found = summed_up(serve, traffic, end)
    if given.json:
        print_json(found)
    else:
        render(found, console())
    if given.out:
        note(f"wrote {given.out}")
    if given.trace:
        from meshwright.trace.chrome import write
        from meshwright.traffic.timeline import timeline

        write(timeline(traffic), given.trace)
        note(f"wrote {given.trace}")
    if end.gone:
        help = (
            "start it again, and go on: --resume" if given.out else "start it again; --out FILE keeps what was answered"
        )
        message = f"the server is gone after {len(traffic.answered):,} of {traffic.head.requests:,} answers"
        raise MeshwrightError.one("T006", message, place=traffic.head.url, help=help)
    return 0 if found.good else 1
