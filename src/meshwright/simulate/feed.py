"""The feed of a step on the virtual clock: workers make batches ahead of the ranks that read them, and steps wait.

A graph of a node: every rank that reads (``reader``) has its own queue, and so has each of its workers, which make its
batches in turn. A worker takes its samples one after the other: it waits for one, reads it and works on it, so that of
many workers some are at the disk and others compute at any time. A batch in the making is therefore one flow of the
event engine (:mod:`.events`) over what it needs, the source and the node's cores, which workers share max-min fairly,
and no faster than one worker alone. A reader takes its batch, which frees a place in its buffer for another, and the
step of all readers begins when each has its own.

Readers that are alike in everything are one, with its part of what they share. Where samples are drawn they are told
apart, and a step waits for the slowest.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshwright.graph import GraphBuilder
from meshwright.simulate import events

#: Readers that are told apart at most, where samples are drawn.
MOST_READERS = 16
#: Steps of each half of what the steady state is the mean of, at least, where samples are drawn, and at most.
MEASURED, DRAWN, MOST_MEASURED = 24, 100, 2048
#: Batches in the making that share something, at most; workers that are simulated in any case.
MOST_FLOWS, FEW = 64, 32
#: First steps that are told.
EARLY = 8
#: Samples of a batch that are drawn one by one, at most.
MANY = 256
#: A part of a step below this is rounding.
ROUNDING = 1e-9


class FeedSizes(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of a node's feed: its ``readers``, and for each of them its ``workers``, its batches ``ahead``, and of
    one batch the ``samples``, bytes (``read_bytes``), seconds of ``latency_s`` and of each stage (``work_s``), bytes
    to the device (``copy_bytes``) and whether they go there ``copied_ahead``.

    What they share: ``read_bytes_s`` and ``cores``; one worker alone has ``stream_bytes_s`` at most, and a device
    ``copy_bytes_s``; 0 is no bound. A step takes ``step_s`` by itself, on ``step_cores`` of these cores. ``sigma`` are
    the deviations of the logarithm of each stage of one sample. In place of workers ``producers`` (of a node) make a
    batch of a reader in ``make_s`` together.
    """

    readers: int
    workers: int
    ahead: int
    samples: int
    read_bytes: float
    latency_s: float
    work_s: dict[str, float]
    copy_bytes: float
    copied_ahead: bool
    read_bytes_s: float
    stream_bytes_s: float
    cores: float
    copy_bytes_s: float
    step_s: float
    step_cores: float = 0.0
    sigma: dict[str, float] = {}
    producers: int = 0
    make_s: float = 0.0
    seed: int = 0

    @property
    def copy_s(self) -> float:
        """Seconds of a batch's copy to its device."""
        return self.copy_bytes / self.copy_bytes_s if self.copy_bytes_s else 0.0

    @property
    def read_alone_s(self) -> float:
        """Seconds for which one worker reads a batch, its latency included, with nobody beside it."""
        rates = [rate for rate in (self.read_bytes_s, self.stream_bytes_s) if rate]
        return self.latency_s + (self.read_bytes / min(rates) if rates else 0.0)

    @property
    def make_alone_s(self) -> float:
        """Seconds in which one worker makes a batch with nobody beside it; of producers, all together."""
        return self.make_s + self.read_alone_s + sum(self.work_s.values())

    def with_workers(self, workers: int, ahead: int) -> FeedSizes:
        """Return the same with other workers and batches ahead."""
        return msgspec.structs.replace(self, workers=workers, ahead=ahead)

    def with_step(self, step_s: float) -> FeedSizes:
        """Return the same with another step."""
        return msgspec.structs.replace(self, step_s=step_s)

    def used(self) -> dict[str, float]:
        """Return the share of each resource that feeding takes while steps follow each other without waiting: above 1
        it is full, and no number of workers is enough."""
        busy: dict[str, float] = {}
        step = self.step_s + (0.0 if self.copied_ahead else self.copy_s)
        if not step:
            return busy
        if self.read_bytes_s:
            busy["source"] = self.readers * self.read_bytes / self.read_bytes_s / step
        if self.cores:
            work = self.readers * sum(self.work_s.values()) + self.step_cores * self.step_s
            busy["cores"] = work / self.cores / step
        if self.copy_s:
            busy["link to the device"] = self.copy_s / step
        if self.producers:
            busy["producers"] = self.make_s / step
        return busy

    def bound_s(self) -> float:
        """Return the least that a step with its data can take in the steady state, whatever is made ahead."""
        own = self.step_s + (0.0 if self.copied_ahead else self.copy_s)
        if not self.workers and not self.producers:
            return own + self.make_alone_s
        at_once = min(self.workers, self.ahead) if self.workers else 1
        busy = (share * own for share in self.used().values())
        return max(own, *busy, self.copy_s, self.make_alone_s / at_once)


class FedSteps(NamedTuple):
    """Steps with their data in seconds: when the first began (``first_s``), what one takes in the steady state
    (``period_s``), how long it waits in that (``wait_s``), the waits of all steps that were simulated [steps], and
    where the steady state was measured from."""

    first_s: float
    period_s: float
    wait_s: float
    waits_s: NDArray[np.float64]
    warm: int


def fed(sizes: FeedSizes) -> FedSteps:
    """Simulate steps that are fed, from a cold start into their steady state."""
    node = _folded(sizes)
    warm, half, steps = horizon(node)
    begins, ends = _times(node, steps)
    ends = ends[: warm + 2 * half]
    waits = _waits(ends, node)
    if node.workers < sizes.workers:  # whose first batches are made by all of them
        first = _folded(sizes, trims=False)
        begins, early = _times(first, first.ahead + EARLY)
        waits[:EARLY] = _waits(early[:EARLY], first)
    # batches that share a disk come in bursts: the mean of a half lies between them
    period = float(ends[-half:].mean() - ends[warm : warm + half].mean()) / half
    wait = period - node.step_s
    return FedSteps(float(begins[0]), period, wait if wait > ROUNDING * period else 0.0, waits, warm)


def _waits(ends: NDArray[np.float64], node: FeedSizes) -> NDArray[np.float64]:
    """The seconds that steps of these ends [steps] waited each."""
    return np.maximum(0.0, np.diff(np.append(0.0, ends)) - node.step_s)


def horizon(node: FeedSizes) -> tuple[int, int, int]:
    """Return the steps before the steady state, those of each half of what is measured, and all that are simulated:
    batches of steps behind these are made too, so that workers have as much to do until the last of them."""
    turn, least = max(1, node.workers), DRAWN if any(node.sigma.values()) else MEASURED
    half = min(MOST_MEASURED, ceil(max(least, 2 * turn) / turn) * turn)
    own, least_s = node.step_s + (0.0 if node.copied_ahead else node.copy_s), node.bound_s()
    # what the first steps find made ahead is used up little by little
    stock = node.ahead * (least_s / (least_s - own) if least_s > (1 + ROUNDING) * own else 1.0)
    warm = ceil(min(MOST_MEASURED, stock + 2 * turn + 2))
    return warm, half, warm + 2 * half + node.ahead + turn


def enough(sizes: FeedSizes, share: float, most: int, ahead: int) -> tuple[int, FedSteps] | None:
    """Return the fewest workers of a reader with which steps wait at most a ``share`` of the time, and these steps;
    `ahead` batches a worker. None where a shared resource is full before, or `most` are not enough."""
    if max(sizes.used().values(), default=0.0) > 1 + share:
        return None
    own = sizes.step_s + (0.0 if sizes.copied_ahead else sizes.copy_s)
    allowed = own - sizes.step_s  # a copy that is no part of the feed's workers

    def with_(workers: int) -> FedSteps:
        return fed(sizes.with_workers(workers, ahead * workers))

    def fine(found: FedSteps) -> bool:
        return found.wait_s - allowed <= share * found.period_s

    low = max(1, ceil(sizes.make_alone_s / own * (1 - share) - 1e-9)) if own else 1
    high, found = low, None
    while high <= most:
        found = with_(high)
        if fine(found):
            break
        low, high = high + 1, 2 * high
    else:
        return None
    while low < high:  # more workers never wait longer
        middle = (low + high) // 2
        tried = with_(middle)
        if fine(tried):
            high, found = middle, tried
        else:
            low = middle + 1
    return high, found


def _folded(sizes: FeedSizes, trims: bool = True) -> FeedSizes:
    """The readers that are told apart, with their part of what all share, and no more workers of each than can matter:
    where a shared resource is full of batches that are alike, twice as many as it takes to fill it."""
    drawn = any(sizes.sigma.values())
    at_once = max(1, min(sizes.workers, sizes.ahead))
    shares = sizes.read_bytes > 0 < sizes.read_bytes_s or sizes.readers * at_once + sizes.step_cores > sizes.cores > 0
    busy = {name: share * sizes.step_s for name, share in sizes.used().items() if name in ("source", "cores")}
    full_s = max(busy.values(), default=0.0)
    useful = max(FEW, ceil(2 * sizes.make_alone_s / full_s)) if full_s > sizes.step_s else sizes.workers
    if trims and not drawn and sizes.workers > useful:
        sizes = sizes.with_workers(useful, min(sizes.ahead, useful))
        at_once = max(1, min(sizes.workers, sizes.ahead))
    most = max(2, MOST_FLOWS // at_once) if shares else MOST_READERS
    count = min(sizes.readers, MOST_READERS, most) if drawn else 1
    part = count / sizes.readers
    if part == 1:
        return sizes
    return msgspec.structs.replace(
        sizes,
        readers=count,
        read_bytes_s=sizes.read_bytes_s * part,
        cores=sizes.cores * part,
        step_cores=sizes.step_cores * part,
    )


class _FeedGraph:
    """The graph of so many steps of a node, with the flows over what is shared."""

    def __init__(self, sizes: FeedSizes, steps: int):
        self.sizes, self.steps = sizes, steps
        places = [f"reader {r}" for r in range(sizes.readers)]
        places += [f"worker {w} of reader {r}" for r in range(sizes.readers) for w in range(max(1, sizes.workers))]
        self.builder = GraphBuilder(places)
        self.seconds: list[float] = []
        self.flows: dict[int, tuple[float, list[int]]] = {}
        self.capacity: list[float] = []
        busy = sizes.readers * max(1, min(sizes.workers, sizes.ahead)) + sizes.step_cores
        # as many cores as anybody could use bound nothing
        self.cores = self._link(sizes.cores if busy > sizes.cores else 0.0)
        #: Flows count seconds of cores, or bytes where no core is needed.
        self.core_s = sum(sizes.work_s.values())
        unit = self.core_s / sizes.read_bytes if self.core_s and sizes.read_bytes else 1.0
        self.source = self._link(sizes.read_bytes_s * unit if sizes.read_bytes else 0.0)
        self.factors = _factors(sizes, steps)

    def _link(self, capacity: float) -> int | None:
        if not capacity:
            return None
        self.capacity.append(capacity)
        return len(self.capacity) - 1

    def add(self, kind: str, streams: int | list[int], after: list[int], seconds: float, step: int) -> int:
        """Append a task."""
        self.seconds.append(seconds)
        return self.builder.add(kind, str(len(self.seconds) - 1), streams, after, step=step)

    def make(self, reader: int, step: int, after: list[int]) -> int:
        """Append the making of a reader's batch of a step; the last of its tasks."""
        s = self.sizes
        if s.workers:
            stream = self.builder.stream(s.readers + reader * s.workers + step % s.workers, "host")
        elif s.producers:
            stream = self.builder.stream(s.readers + reader, "host")
            after = [self.add("host", stream, after, s.make_s, step)]
        else:
            stream = self.builder.stream(reader, "compute")
        core_s = sum(took * self._factor(stage, reader, step) for stage, took in s.work_s.items())
        alone = s.read_alone_s + core_s
        computes = s.workers > 0 or s.step_cores > 0  # else it is the step's own process, which has a core
        links = [self.source, self.cores if computes and core_s else None]
        shared = [link for link in links if link is not None]
        task = self.add("host", stream, after, 0.0 if shared and alone else alone, step)
        if shared and alone:
            amount = core_s or s.read_bytes
            self.flows[task] = (amount, [self._link(amount / alone), *shared])
        return task

    def _factor(self, stage: str, reader: int, step: int) -> float:
        return float(self.factors[stage][reader, step]) if stage in self.factors else 1.0

    def build(self) -> list[int]:
        """Append everything; the tasks of the steps."""
        s, queue = self.sizes, [self.builder.stream(r, "compute") for r in range(self.sizes.readers)]
        taken: list[list[int]] = [[] for _ in range(s.readers)]
        ran: list[int] = []
        for step in range(self.steps):
            for reader in range(s.readers):
                ahead = s.workers or s.producers
                free = [taken[reader][step - s.ahead]] if ahead and step >= s.ahead else []
                made = self.make(reader, step, free)
                if s.copied_ahead and s.copy_s:
                    made = self.add("copy", self.builder.stream(reader, "h2d"), [made], s.copy_s, step)
                taken[reader].append(self.add("op", queue[reader], [made], 0.0, step))
                if not s.copied_ahead and s.copy_s:
                    self.add("copy", queue[reader], [], s.copy_s, step)
            task = self.add("op", queue, [], s.step_s if self.cores is None or not s.step_cores else 0.0, step)
            if self.cores is not None and s.step_cores:
                # a step in which ranks compute on the cores themselves slows down as they are shared
                self.flows[task] = (s.step_s, [self._link(1.0), *[self.cores] * max(1, round(s.step_cores))])
            ran.append(task)
        return ran


def _times(sizes: FeedSizes, steps: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """When each step begins and ends, seconds [steps]."""
    made = _FeedGraph(sizes, steps)
    ran = made.build()
    graph = made.builder.build()
    place = np.empty(graph.num_tasks, np.int64)
    place[graph.cost_key] = np.arange(graph.num_tasks)  # every task has a key of its own
    flows = {int(place[task]): flow for task, flow in made.flows.items()}
    moved = events.Transfers.of(graph.num_tasks, made.capacity, flows)
    start, end = events.times(graph, np.array(made.seconds), transfers=moved)
    return start[place[ran]], end[place[ran]]


def _factors(sizes: FeedSizes, steps: int) -> dict[str, NDArray[np.float64]]:
    """By stage the seconds of each batch [readers, steps] over their mean, where samples are drawn: the mean of as many
    log-normal variables as a batch has samples, and of many of them a normal one of the same spread."""
    rng, out = np.random.default_rng(sizes.seed), {}
    for stage, sigma in sizes.sigma.items():
        shape = (sizes.readers, steps)
        if sizes.samples <= MANY:
            out[stage] = rng.lognormal(-(sigma**2) / 2, sigma, (*shape, sizes.samples)).mean(axis=2)
        else:
            spread = ((np.exp(sigma**2) - 1) / sizes.samples) ** 0.5
            out[stage] = np.maximum(0.0, 1 + spread * rng.standard_normal(shape))
    return out
