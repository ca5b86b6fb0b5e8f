"""What-ifs that keep the order of tasks: other speeds, and gradients exchanged in buckets of another size."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshwright.errors import MeshwrightError, nearest
from meshwright.graph import KINDS, QUEUES
from meshwright.replay.tasks import Rebuilt, Task

#: Queues that a link carries.
LINKS = tuple(q for q in QUEUES if q not in ("compute", "copy", "host"))
#: What ``--set`` may name besides kinds and queues.
LINK = "link"
_BYTES = re.compile(r"(\d+) bytes\b")


def check(factors: Mapping[str, float]) -> None:
    """Every word is a kind, a queue or ``link``, and every factor positive.

    Raises:
        MeshwrightError: X106 for the first that is not.
    """
    known = [LINK, *dict.fromkeys((*KINDS, *QUEUES))]
    for word, factor in factors.items():
        if word not in known:
            message, help = f"no kind or queue of tasks is called {word!r}", nearest(word, known)
        elif not 0 < factor < float("inf"):
            message, help = f"{word}={factor:g} is no factor of a time", "a number above 0: 2 takes twice as long"
        else:
            continue
        raise MeshwrightError.one("X106", message, place=f"--set {word}={factor:g}", help=help)


def scaled(rebuilt: Rebuilt, factors: Mapping[str, float]) -> Rebuilt:
    """Every task as many times as long as the factors of its kind and of its queue say (both, where both are named);
    ``link`` stands for all queues that a link carries.

    A pass that has collectives inside is what it computes, times its factors, and each of them, times theirs. The time
    before a task that nothing explains stays as it is.
    """
    check(factors)

    def factor(kind: str, queue: str) -> float:
        return factors.get(kind, 1.0) * factors.get(queue, 1.0) * (factors.get(LINK, 1.0) if queue in LINKS else 1.0)

    seconds = np.empty(len(rebuilt.tasks))
    for i, task in enumerate(rebuilt.tasks):
        share = rebuilt.seconds[i] / task.seconds if task.seconds else 1.0
        inner = {what: took * share for what, took in task.inner_s.items()}
        held = min(sum(inner.values()), rebuilt.seconds[i])
        # inner collectives on several queues may overlap each other
        fit = held / sum(inner.values()) if inner and sum(inner.values()) else 0.0
        changed = sum(took * fit * factor(*what) for what, took in inner.items())
        seconds[i] = (rebuilt.seconds[i] - held) * factor(task.kind, task.queue) + changed
    return msgspec.structs.replace(rebuilt, seconds=seconds)


def exchanged(task: Task) -> int:
    """Bytes of a task, 0 where its key does not say."""
    found = _BYTES.search(task.key)
    return int(found.group(1)) if found else 0


def line(num_bytes: NDArray[np.float64], seconds: NDArray[np.float64]) -> tuple[float, float]:
    """Seconds at no bytes and seconds a byte (Hockney, 1994) through measured collectives: least squares, neither
    below 0."""
    x, y = num_bytes - num_bytes.mean(), seconds - seconds.mean()
    beta = max(float((x @ y) / (x @ x)), 0.0)
    alpha = float(seconds.mean() - beta * num_bytes.mean())
    if alpha < 0:
        return 0.0, float((num_bytes @ seconds) / (num_bytes @ num_bytes))
    return alpha, beta


def rebucketed(rebuilt: Rebuilt, size_bytes: int) -> Rebuilt:
    """The gradients of a stage exchanged in buckets of `size_bytes`: the bytes in the order they were, cut anew.

    A bucket begins when the last gradient in it is there, and takes what a line through the measured exchanges of its
    kind and group says of its bytes. What waited for an exchange waits for all of its stage.

    Raises:
        MeshwrightError: X107 when the trace does not say enough: no bytes, or all exchanges of one size.
    """
    if size_bytes < 1:
        raise MeshwrightError.one("X106", f"a bucket of {size_bytes} bytes", place="--bucket", help="such as 25mb")
    groups: dict[tuple, list[Task]] = defaultdict(list)
    for task in rebuilt.tasks:
        if task.queue == "dp" and task.stage >= 0 and exchanged(task):
            groups[task.kind, task.stage, task.microbatch, tuple(sorted(task.ranks))].append(task)
    lines = _lines(rebuilt, groups)
    made: dict[int, list[tuple[Task, float]]] = defaultdict(list)
    replaced: dict[int, list[Task]] = {}
    for (kind, _, _, ranks), found in groups.items():
        alpha, beta = lines[kind, len(ranks)]
        new = [(task, alpha + beta * size) for task, size in _cut(found, size_bytes)]
        for task in found:
            replaced[task.number] = [one for one, _ in new]
        for last, (one, seconds) in zip(_closers(found, size_bytes), new):
            made[last.number].append((one, seconds))
    return _spliced(rebuilt, made, replaced)


def _lines(rebuilt: Rebuilt, groups: dict[tuple, list[Task]]) -> dict[tuple[str, int], tuple[float, float]]:
    samples: dict[tuple[str, int], list[tuple[int, float]]] = defaultdict(list)
    for (kind, _, _, ranks), found in groups.items():
        samples[kind, len(ranks)] += [(exchanged(t), float(rebuilt.seconds[t.number])) for t in found]
    if not samples or any(len({size for size, _ in s}) < 2 for s in samples.values()):
        why = "its exchanges are all of one size" if samples else "it does not say how many bytes were exchanged"
        help = "trace a run whose buckets differ in size: then latency and bandwidth can be told apart"
        raise MeshwrightError.one(
            "X107", f"the trace cannot say what another bucket takes: {why}", place="--bucket", help=help
        )
    return {what: line(*(np.array(c, float) for c in zip(*found))) for what, found in samples.items()}


def _cut(found: list[Task], size: int) -> list[tuple[Task, int]]:
    """(bucket, its bytes): each needs what the last exchange whose bytes it has needed."""
    whole = sum(exchanged(t) for t in found)
    sizes = [min(size, whole - at) for at in range(0, whole, size)]
    closers = _closers(found, size)
    return [(msgspec.structs.replace(last, key=f"{last.kind} {n} bytes"), n) for last, n in zip(closers, sizes)]


def _closers(found: list[Task], size: int) -> list[Task]:
    """For every bucket the exchange that held its last byte."""
    ends = np.cumsum([exchanged(t) for t in found])
    lasts = [min(at + size, int(ends[-1])) for at in range(0, int(ends[-1]), size)]
    return [found[int(np.searchsorted(ends, last))] for last in lasts]


def _spliced(rebuilt: Rebuilt, made: dict[int, list[tuple[Task, float]]], replaced: dict[int, list[Task]]) -> Rebuilt:
    """The tasks with the new ones where the last of what they replace was, numbered again."""
    tasks: list[Task] = []
    seconds: list[float] = []
    wait: list[float] = []
    numbers: dict[int, list[int]] = {}
    of_object: dict[int, int] = {}
    for task in rebuilt.tasks:
        fresh = [(msgspec.structs.replace(task), float(rebuilt.seconds[task.number]))]
        for i, (one, took) in enumerate(made.get(task.number, ()) if task.number in replaced else fresh):
            of_object[id(one)] = len(tasks)
            numbers.setdefault(task.number, []).append(len(tasks))
            tasks.append(one)
            seconds.append(took)
            wait.append(float(rebuilt.wait_s[task.number]) if i == 0 else 0.0)
    for old, new in replaced.items():
        numbers[old] = [of_object[id(one)] for one in new]
    for i, task in enumerate(tasks):
        task.number = i
        task.needs = {n for old in task.needs for n in numbers[old] if n != i}
    return msgspec.structs.replace(rebuilt, tasks=tuple(tasks), seconds=np.array(seconds), wait_s=np.array(wait))
