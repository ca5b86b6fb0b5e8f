"""Whose a request is and what it has in common with others: tenants, priorities, adapters, shared prefixes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from meshwright.errors import MeshwrightError
from meshwright.spec.request_limits import MOST_HASHES
from meshwright.spec.requests import Requests
from meshwright.spec.serve_values import Population

if TYPE_CHECKING:
    from meshwright.spec.serve import Serve

#: Numbers of the generators that columns are drawn from, behind the workload's seeds.
TENANT, PRIORITY, ADAPTER, PREFIX, CHUNKS, CERTAIN = 1, 2, 3, 4, 5, 6


def with_belongings(serve: Serve, requests: Requests, seeds: tuple[int, ...]) -> Requests:
    """Return the requests with the columns that a workload says and a trace does not: requests of one program (a
    conversation, a query) are of one tenant, priority, adapter and prefix.

    Raises:
        MeshwrightError: W005 for a prefix of prompts that have hashes, W016 for more block hashes than are drawn.
    """
    program = requests.program if len(requests.program) else np.full(len(requests), -1, np.int64)
    units = np.where(program >= 0, program, program.max(initial=-1) + 1 + np.arange(len(requests)))

    def drawn(of: Population, stream: int) -> np.ndarray:
        rng = np.random.default_rng((*seeds, stream))
        return _members(of, rng, int(units.max(initial=-1)) + 1)[units]

    said: dict[str, np.ndarray] = {}
    if serve.tenants and not len(requests.tenant):
        said["tenant"] = drawn(serve.tenants, TENANT)
    if serve.priority and not len(requests.priority):
        said["priority"] = np.array(serve.priority.names, np.int64)[drawn(serve.priority, PRIORITY)]
    if serve.adapters and not len(requests.adapter):
        said["adapter"] = drawn(serve.adapters, ADAPTER)
    if serve.certain and len(requests.program):
        rng, asked = np.random.default_rng((*seeds, CERTAIN)), np.bincount(units)
        share = rng.uniform(serve.certain.low, serve.certain.high, len(asked))
        said["needed"] = np.maximum(np.ceil(share * asked - 1e-9), 1).astype(np.int64)[units]
    requests = msgspec.structs.replace(requests, **said)
    if serve.classes:
        priority = requests.priority if len(requests.priority) else np.zeros(len(requests), np.int64)
        classes = np.array([one.priority for one in serve.classes])
        place = np.searchsorted(classes, priority).clip(max=len(classes) - 1)
        requests = msgspec.structs.replace(requests, slo=np.where(classes[place] == priority, place + 1, 0))
    if serve.chunks is not None:
        return _with_chunks(serve, requests, np.random.default_rng((*seeds, CHUNKS)))
    together = bool(serve.turns) or serve.samples > 1
    if serve.prefix is None and not together:
        return requests
    if len(requests.hashes):
        message = "the trace says itself which blocks its prompts share"
        raise MeshwrightError.one("W005", message, place=f"--serve {serve.text()}", help="drop prefix=")
    shared, group = 0, np.zeros(len(requests), np.int64)
    if serve.prefix is not None:
        shared = serve.prefix.tokens
        group = drawn(Population(serve.prefix.groups, zipf=serve.prefix.zipf), PREFIX)
    block = serve.hash_block or serve.engine.block
    return _hashed(requests, shared, group, units if together else None, block)


def _with_chunks(serve: Serve, requests: Requests, rng: np.random.Generator) -> Requests:
    """Return the requests with names of the texts in their prompts, as many as there is room for: different ones of
    each, drawn by the Gumbel trick (the largest of noisy log-weights are a draw without replacement).

    Raises:
        MeshwrightError: W016 for more texts than are drawn.
    """
    said = serve.chunks
    if len(requests) * said.of > MOST_HASHES * 8:
        message = f"{len(requests):,} requests draw from {said.of:,} texts"
        raise MeshwrightError.one("W016", message, place="--serve chunks=", help="fewer requests=, or fewer texts of=")
    log_weights = -said.zipf * np.log(np.arange(1, said.of + 1))
    names = np.empty((len(requests), said.count), np.int64)
    for first in range(0, len(requests), 1024):
        noisy = log_weights + rng.gumbel(size=(min(1024, len(requests) - first), said.of))
        names[first : first + len(noisy)] = np.argpartition(-noisy, said.count - 1, axis=1)[:, : said.count]
    names = rng.permuted(names, axis=1)
    room = np.minimum(requests.prompt // said.tokens, said.count)
    kept = np.arange(said.count) < room[:, None]
    ptr = np.concatenate([[0], np.cumsum(room)])
    return msgspec.structs.replace(requests, hashes=names[kept], hash_ptr=ptr, hash_block=said.tokens, chunked=True)


def _members(of: Population, rng: np.random.Generator, count: int) -> np.ndarray:
    """Draw who each of `count` is; -1 for the share of them that is of nobody."""
    below = np.cumsum(of.shares())
    found = np.searchsorted(below, rng.random(count) * below[-1], side="right").clip(max=of.count - 1)
    return found if of.share == 1.0 else np.where(rng.random(count) < of.share, found, -1)


def _hashed(requests: Requests, shared: int, group: np.ndarray, unit: np.ndarray | None, block: int) -> Requests:
    """Return the requests with names of the whole blocks at the start of their prompts that another can have too: of
    the first `shared` tokens by group, of the others by `unit`, the conversation or query."""
    whole = requests.prompt // block
    alike = np.minimum(requests.prompt, shared) // block
    lengths = alike if unit is None else whole
    ptr = np.concatenate([[0], np.cumsum(lengths)])
    if ptr[-1] > MOST_HASHES:
        message = f"the prompts have {ptr[-1]:,} blocks of {block} tokens that others may share"
        help = f"say hash_block={block * -(-int(ptr[-1]) // MOST_HASHES)} or more, or fewer requests="
        raise MeshwrightError.one("W016", message, place="--serve", help=help)
    place = np.arange(ptr[-1]) - np.repeat(ptr[:-1], lengths)
    names = np.repeat(group * (shared // block), lengths) + place
    if unit is not None:
        most = np.zeros(int(unit.max(initial=-1)) + 1, np.int64)
        np.maximum.at(most, unit, whole)
        base = (int(group.max(initial=0)) + 1) * (shared // block) + np.cumsum(most) - most
        own = place >= np.repeat(alike, lengths)
        names = np.where(own, np.repeat(base[unit], lengths) + place, names)
    return msgspec.structs.replace(requests, hashes=names, hash_ptr=ptr, hash_block=block)
