"""A thousand answers that stream side by side, through the client of bench-serve and through httpx: what a token costs.

The server is a process of its own that sends every stream a token each tenth of a second. What a client sees beside
that, and the processor's time that it takes, is its own.

Run: python -m bench.streams [--streams 1000] [--tokens 40] [--plain]
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import time
from multiprocessing.connection import Connection

import numpy as np

from meshwright.spec.serve import parse
from meshwright.traffic.events import StreamedAnswer
from meshwright.traffic.session import opened, replayed
from meshwright.traffic.summary import summed_up

#: Seconds between two tokens of a stream.
EVERY_S = 0.1
_EVENT = b'data: {"id": "x", "choices": [{"index": 0, "text": "x", "finish_reason": null}]}\n\n'
_LAST = (
    b'data: {"choices": [{"text": "", "finish_reason": "length"}], '
    b'"usage": {"prompt_tokens": %d, "completion_tokens": %d}}\n\ndata: [DONE]\n\n'
)


def serve(pipe: Connection) -> None:
    """Serve streams until the process is ended; the port goes through the pipe."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        import json

        loop = asyncio.get_running_loop()
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                if head.startswith("GET"):
                    said = b'{"data": [{"id": "tiny"}]}'
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(said) + said)
                    continue
                length = int(head.lower().partition("content-length:")[2].split()[0])
                body = json.loads(await reader.readexactly(length))
                if "/v1/completions" not in head:
                    writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
                    continue
                tokens, prompt = body["max_tokens"], len(body.get("prompt", ""))
                if not body.get("stream"):
                    said = b'{"usage": {"prompt_tokens": %d}}' % prompt
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(said) + said)
                    continue
                writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
                begun = loop.time()
                for place in range(tokens):
                    await asyncio.sleep(begun + (place + 1) * EVERY_S - loop.time())
                    writer.write(b"%x\r\n%s\r\n" % (len(_EVENT), _EVENT))
                last = _LAST % (prompt, tokens)
                writer.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(last), last))
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def work() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=4096)
        pipe.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(work())


async def ours(url: str, streams: int, tokens: int) -> None:
    """Print what bench-serve's client takes: streams that begin over two seconds."""
    session = await opened(url)
    words = f"concurrency={streams},ramp=2s,prompt=64,output={tokens},requests={streams}"
    words_of = parse(words)
    requests = words_of.drawn()
    traffic, end = await replayed(session, words_of, requests)
    found = summed_up(words_of, traffic, end)
    assert found.metrics is not None
    gaps = np.array([us for one in traffic.answered for us in one.gaps_us]) * 1e-3 - EVERY_S * 1e3
    cpu_us = end.busy * end.seconds / (streams * tokens) * 1e6
    late = ", ".join(f"{s * 1e3:.1f}" for s in found.late_s)
    print(f"bench-serve: {found.answered:,} of {streams:,} streams, {found.peak_open:,} open at once, "
          f"{end.busy:.0%} of a core, {cpu_us:.0f} us a token; gaps off by {np.median(np.abs(gaps)):.2f} ms "
          f"(p99 {np.quantile(np.abs(gaps), 0.99):.1f} ms); sent late by {late} ms (p50, p90, p99, most)")  # fmt: skip


async def plain(url: str, streams: int, tokens: int) -> None:
    """Print the same of a client of general use."""
    import httpx2 as httpx

    limits = httpx.Limits(max_connections=None)
    body = {"model": "tiny", "prompt": "x" * 64, "max_tokens": tokens, "stream": True}
    gaps: list[float] = []

    async def one(client: httpx.AsyncClient, after_s: float) -> None:
        await asyncio.sleep(after_s)
        answer, clock = StreamedAnswer(), asyncio.get_running_loop().time
        async with client.stream("POST", f"{url}/v1/completions", json=body) as reply:
            async for piece in reply.aiter_bytes():
                answer.feed(piece, clock())
        gaps.extend(b - a for a, b in zip(answer.at_s, answer.at_s[1:], strict=False))

    cpu, wall = time.process_time(), time.monotonic()
    async with httpx.AsyncClient(limits=limits, timeout=120) as client:
        await asyncio.gather(*(one(client, 2.0 * n / streams) for n in range(streams)))
    cpu, wall = time.process_time() - cpu, time.monotonic() - wall
    off, each_us = np.abs(np.array(gaps) - EVERY_S) * 1e3, cpu / (streams * tokens) * 1e6
    print(f"httpx:       {streams:,} streams, {cpu / wall:.0%} of a core, {each_us:.0f} us a token; "
          f"gaps off by {np.median(off):.2f} ms (p99 {np.quantile(off, 0.99):.1f} ms)")  # fmt: skip


def main() -> None:
    """Run both."""
    parser = argparse.ArgumentParser(prog="python -m bench.streams", description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--plain", action="store_true", help="a client of general use as well")
    asked = parser.parse_args()
    here, there = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(there,), daemon=True)
    server.start()
    url = f"http://127.0.0.1:{here.recv()}"
    try:
        asyncio.run(ours(url, asked.streams, asked.tokens))
        if asked.plain:
            asyncio.run(plain(url, asked.streams, asked.tokens))
    finally:
        server.terminate()
        server.join()


if __name__ == "__main__":
    main()
