"""Requests of several clients on top of each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from meshwright.errors import MeshwrightError
from meshwright.spec.requests import Requests, nobody

if TYPE_CHECKING:
    from meshwright.spec.serve import Serve


def merged(serve: Serve, parts: list[Requests]) -> Requests:
    """Return the requests of all clients in order of arrival, as many as the workload says. Clients are tenants, or
    have their own; adapters, programs and shared blocks of one are none of another's.

    Raises:
        MeshwrightError: W005 where the blocks that hashes name differ in size.
    """
    blocks = sorted({part.hash_block for part in parts if len(part.hashes)})
    if len(blocks) > 1:
        message = f"hashes of the clients name blocks of {' and '.join(map(str, blocks))} tokens"
        help = f"hash_block={blocks[-1]} above the clients"
        raise MeshwrightError.one("W005", message, place=f"--serve {serve.file}", help=help)
    begins = np.cumsum([0, *(len(part) for part in parts)])
    columns = {name: np.concatenate([getattr(part, name) for part in parts]) for name in ("prompt", "output")}
    columns["arrival_s"] = np.concatenate([part.arrival_s for part in parts])
    columns["tenant"] = _counted([p.tenant if len(p.tenant) else np.zeros(len(p), np.int64) for p in parts])
    for name in ("adapter", "program"):
        if any(len(getattr(part, name)) for part in parts):
            columns[name] = _counted([_or(getattr(part, name), part, -1) for part in parts])
    for name in ("priority", "needed"):
        if any(len(getattr(part, name)) for part in parts):
            columns[name] = np.concatenate([_or(getattr(part, name), part, 0) for part in parts])
    if any(len(part.after) for part in parts):
        shifted = [np.where((a := _or(p.after, p, -1)) >= 0, a + b, -1) for p, b in zip(parts, begins)]
        columns["after"] = np.concatenate(shifted)
    classes = np.cumsum([1, *(len(client.objective_classes) for client in serve.clients)])
    if len(serve.objective_classes) > 1 and any(one != serve.objectives for one in serve.objective_classes):
        columns["slo"] = np.concatenate([_or(p.slo, p, 0) + c for p, c in zip(parts, classes)])
    hashes, ptr = nobody(), np.zeros(1, np.int64)
    if blocks:
        counts = [np.diff(part.hash_ptr) if len(part.hashes) else np.zeros(len(part), np.int64) for part in parts]
        hashes, ptr = (
            _counted([part.hashes for part in parts]),
            np.concatenate([[0], np.cumsum(np.concatenate(counts))]),
        )
    whole = Requests(**columns, hashes=hashes, hash_ptr=ptr, hash_block=blocks[0] if blocks else 16, source=serve.file)
    earliest = whole.earliest_s()
    order = np.argsort(earliest, kind="stable")
    if serve.window_s:
        order = order[earliest[order] < serve.window_s]
    return whole.chosen(order[: serve.requests or len(order)]).from_first()


def _or(column: np.ndarray, part: Requests, usual: int) -> np.ndarray:
    return column if len(column) else np.full(len(part), usual, np.int64)


def _counted(columns: list[np.ndarray]) -> np.ndarray:
    """Return numbers one client after the other, so that no two clients share any; below 0 they are nobody's."""
    found, base = [], 0
    for column in columns:
        found.append(np.where(column >= 0, column + base, column))
        base += int(column.max(initial=-1)) + 1
    return np.concatenate(found)
