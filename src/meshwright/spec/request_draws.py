"""Requests as the words of a workload say: drawn, the same for the same seed, or those of a trace.

Gaps between arrivals are drawn first, then lengths; who asks, for what and beginning with which words is drawn from
generators of their own, so that one more word leaves the rest as it was.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from meshwright.errors import MeshwrightError
from meshwright.spec import request_catalog
from meshwright.spec.lengths import Lengths
from meshwright.spec.request_belongings import with_belongings
from meshwright.spec.request_files import read
from meshwright.spec.request_gaps import gaps
from meshwright.spec.request_limits import MOST_REQUESTS, USUAL_REQUESTS
from meshwright.spec.request_mixture import merged
from meshwright.spec.request_sessions import in_sessions, in_users
from meshwright.spec.request_windows import by_windows
from meshwright.spec.requests import Requests

if TYPE_CHECKING:
    from meshwright.spec.serve import Serve


def draw(serve: Serve) -> Requests:
    """Return the requests of a workload.

    Raises:
        MeshwrightError: W011 for a file that cannot be read, and for every row of it that is wrong; W015 for a trace
            that is not known, W016 for more block hashes than are drawn.
    """
    if not serve.clients:
        return _drawn(serve, (serve.seed,)).from_first()
    found = merged(serve, [_of_client(serve, i, client) for i, client in enumerate(serve.clients)])
    if not len(found):
        message = f"no client asks anything within {serve.window_s:g} s"
        raise MeshwrightError.one("W011", message, place=f"--serve {serve.file}", help="a longer window=")
    return found


def _of_client(serve: Serve, number: int, client: Serve) -> Requests:
    """Return the requests of one of several clients, as many as there can be of it among all of them."""
    given = {"engine": serve.engine, "hash_block": serve.hash_block or client.hash_block}
    if serve.window_s and not (client.window_s or client.concurrency or client.batch):
        given["window_s"] = serve.window_s
    elif not client.requests and not client.window_s and not client.batch:
        given["requests"] = serve.requests or USUAL_REQUESTS
    return _drawn(msgspec.structs.replace(client, **given), (serve.seed, number), among_others=True)


def _drawn(serve: Serve, seeds: tuple[int, ...], *, among_others: bool = False) -> Requests:
    """Return the requests of one client; `among_others` it begins at any time, and a closed loop is of its users."""
    rng = np.random.default_rng(seeds[0] if len(seeds) == 1 else seeds)
    if serve.trace:
        found = _of_trace(serve)
    elif serve.windows:
        found = by_windows(serve, rng, lambda count: _lengths(serve, rng, count))
    elif serve.concurrency and (serve.turns or serve.think or among_others):
        count = serve.requests or USUAL_REQUESTS
        found = in_users(serve, rng, *_lengths(serve, rng, count))
    elif serve.turns:
        found = in_sessions(serve, rng, lambda count: _arrivals(serve, rng, count, among_others), _lengths)
    else:
        found = _plain(serve, rng, among_others)
    if serve.longest:
        found = _up_to(serve, found)
    return with_belongings(serve, found, seeds)


def _up_to(serve: Serve, requests: Requests) -> Requests:
    """Return the requests that are no longer than the workload allows; an answer that is left out takes no time."""
    kept = np.flatnonzero(requests.prompt + requests.output <= serve.longest)
    if not len(kept):
        least = int((requests.prompt + requests.output).min())
        message = f"every request is longer than {serve.longest:,} tokens"
        help = f"the shortest has {least:,} tokens of prompt and answer"
        raise MeshwrightError.one("W011", message, place=f"--serve longest={serve.longest}", help=help)
    return requests.chosen(kept)


def _plain(serve: Serve, rng: np.random.Generator, among_others: bool) -> Requests:
    """Draw requests, each by itself, or several samples of each query at a time."""
    each = serve.samples
    wanted = serve.requests or (serve.batch if serve.batch else 0 if serve.window_s else USUAL_REQUESTS)
    at = np.repeat(_arrivals(serve, rng, -(-wanted // each), among_others), each)
    at = at[:wanted] if wanted else at
    prompt, output = _lengths(serve, rng, len(at))
    program = np.empty(0, np.int64)
    if each > 1:
        program = np.arange(len(at)) // each
        prompt = prompt[program * each]
    return Requests(arrival_s=at, prompt=prompt, output=output, program=program, concurrency=serve.concurrency)


def _arrivals(serve: Serve, rng: np.random.Generator, count: int, among_others: bool) -> np.ndarray:
    """Draw when `count` requests, queries or conversations arrive (0: all of the window), the first one at 0, or
    `among_others` at any time."""
    if serve.ramp_s:
        return np.minimum(np.arange(count) * (serve.ramp_s / serve.concurrency), serve.ramp_s)
    if not serve.rate:
        return np.zeros(count)
    mean = (serve.turns.mean if serve.turns else serve.samples) / serve.rate
    begin = gaps(rng, mean, serve.cv, serve.burst, 1, first=True)[0] if among_others else 0.0
    if not serve.window_s:
        steps = gaps(rng, mean, serve.cv, serve.burst, count)
        return begin + np.cumsum(steps) - steps[0]
    expected = serve.window_s / mean
    most = min(count or MOST_REQUESTS, MOST_REQUESTS)
    at = np.full(1, begin)
    while at[-1] < serve.window_s and len(at) <= most:
        more = gaps(rng, mean, serve.cv, serve.burst, max(16, int(min(expected + 4 * math.sqrt(expected) + 1, most))))
        at = np.concatenate([at, at[-1] + np.cumsum(more)])
    return at[at < serve.window_s][:most]


def _lengths(serve: Serve, rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw prompts and answers in tokens [count]: pairs of a file, or each by itself."""
    if serve.lengths:
        known = _named(serve, serve.lengths, timed=False)
        rows = rng.integers(0, len(known), count)
        return known.prompt[rows], known.output[rows]
    return _tokens(serve.prompt, rng, count), _tokens(serve.output, rng, count)


def _tokens(said: int | Lengths, rng: np.random.Generator, count: int) -> np.ndarray:
    if not isinstance(said, Lengths):
        return np.full(count, said, np.int64)
    below = np.cumsum(said.share)
    which = np.searchsorted(below, rng.random(count) * below[-1], side="right")
    return np.array(said.tokens, np.int64)[np.minimum(which, len(below) - 1)]


def _named(serve: Serve, name: str, *, timed: bool) -> Requests:
    """Return the requests of a file, or of a trace of the catalog; whole where their folder is said."""
    known = {"tenant": serve.tenants, "adapter": serve.adapters}
    given = {"known": {n: who for n, who in known.items() if who}, "hash_block": serve.hash_block, "timed": timed}
    if not request_catalog.is_name(name):
        return read(serve.base / name, **given)
    entry = request_catalog.entry(name)
    wanted = {"prompt"} | ({"arrival_ms+"} if timed else set())
    if entry.rows and not wanted <= set(entry.columns):
        word = "windows" if "window" in entry.columns else "lengths"
        help = f"say {word}={entry.name}" + (", and rate= or concurrency=" if word == "lengths" else "")
        message = f"{entry.name} has no {'requests one by one' if word == 'windows' else 'arrivals'}"
        raise MeshwrightError.one("W015", message, place=f"--serve {name}", help=help)
    if serve.data:
        return read(request_catalog.published(name, serve.base / serve.data), **given)
    columns = request_catalog.columns(entry.name)
    hashes = {}
    if timed and "known" in columns:
        names, ptr = request_catalog.hashed(columns["known"], columns["back"], columns["prompt"])
        hashes = {"hashes": names, "hash_ptr": ptr, "hash_block": request_catalog.HASH_BLOCK}
    return Requests(
        arrival_s=columns["arrival_ms"] / 1e3 if timed else np.zeros(entry.rows),
        prompt=columns["prompt"],
        output=columns["output"],
        source=entry.label,
        **hashes,
    )


def _of_trace(serve: Serve) -> Requests:
    """Read a trace, as fast as the workload says, as much of it as the workload says."""
    found = _named(serve, serve.trace, timed=True)
    alone = found.after < 0 if len(found.after) else np.ones(len(found), bool)
    scale = serve.scale
    if serve.rate:
        span = float(found.arrival_s[alone].max())
        if span <= 0:
            message = f"all requests of {serve.trace} come at once, which no rate= changes"
            raise MeshwrightError.one("W011", message, place=f"--serve {serve.text()}", help="drop rate=")
        scale = serve.rate * span / (len(found) - 1)
    found = found.faster(scale)
    if serve.begin_s or serve.window_s:
        earliest = found.earliest_s()
        end = serve.begin_s + (serve.window_s or math.inf)
        found = found.chosen(np.flatnonzero((earliest >= serve.begin_s) & (earliest < end)))
        if not len(found):
            message = f"the trace has no request between {serve.begin_s:g} and {end:g} s"
            help = f"it ends at {earliest.max():g} s: a smaller begin=, or a longer window="
            raise MeshwrightError.one("W011", message, place=f"--serve trace={serve.trace}", help=help)
        alone = found.after < 0 if len(found.after) else np.ones(len(found), bool)
        at = np.where(alone, found.arrival_s - serve.begin_s, found.arrival_s)
        found = msgspec.structs.replace(found, arrival_s=at)
    return found.first(serve.requests or len(found))
