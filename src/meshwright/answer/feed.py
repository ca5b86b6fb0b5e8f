"""The feed of a training step as a part of an answer: the step with its data, what waits for what, and how many workers
are enough."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from meshwright.answer.fed_answer import ENOUGH, FeedAnswer, TriedWorkers
from meshwright.answer.prediction import Assumption, Sensitivity
from meshwright.errors import MeshwrightError
from meshwright.plan import Plan
from meshwright.simulate.feed import ROUNDING, FedSteps, FeedSizes, enough, fed
from meshwright.simulate.reservoir import StreamSizes, streamed
from meshwright.spec.cluster import Cluster
from meshwright.spec.feed import AHEAD, BEFORE_FILTER, MOST_WORKERS, RANK, USUAL_PREFETCH, Feed
from meshwright.spec.hardware import USUAL_CORES
from meshwright.spec.model import Model
from meshwright.spec.workload import Train
from meshwright.world.reservoir import ReservoirControl

#: The cause that waiting for data is, in an attribution.
DATA = "data"
#: Bytes of text behind a token: English in the usual vocabularies (from memory, not read).
TEXT_BYTES = 4.0
#: Bytes of a token as its id goes to the device: 64 bits, as torch's embeddings take them.
ID_BYTES = 8.0
#: A change of the step time below this is none.
LEAST = 5e-5
#: Numbers of workers that are tried beside the one that is asked about.
TRIED = (0, 1, 2, 4, 8, 16, 32, 64, 128)


def feed_answer(
    feed: Feed | None, model: Model, cluster: Cluster, train: Train, plan: Plan, step_s: float
) -> tuple[FeedAnswer | None, tuple[Assumption, ...]]:
    """Return the step of `step_s` seconds with its data, None where nothing says how it is fed, and what is assumed.

    Raises:
        MeshwrightError: W021 for plans of several pools, whose ranks read different things.
    """
    if feed is None:
        return None, ()
    sizes, readers, told = sizes_of(feed, model, cluster, train, plan, step_s)
    copy, least, stream, used = 0.0 if sizes.copied_ahead else sizes.copy_s, None, None, sizes.used()
    if feed.reservoir:
        stream = streamed(stream_of(feed, sizes, readers, copy))
        found = FedSteps(stream.first_s, stream.period_s, stream.wait_s + copy, np.zeros(0), 0)
        del used["producers"]
    else:
        found = fed(sizes)
    if not feed.producers:
        known = enough(sizes, ENOUGH, MOST_WORKERS, USUAL_PREFETCH)
        least = None if known is None else known[0]
    answer = FeedAnswer(
        words=feed.text(),
        workers=feed.workers,
        ahead=sizes.ahead if feed.workers or feed.producers else 0,
        readers=readers,
        a_node=sizes.readers,
        own_s=step_s,
        step_s=found.period_s,
        wait_s=_waits(found, copy),
        copy_s=copy,
        first_s=found.first_s,
        early_s=tuple(float(s) if s > ROUNDING * found.period_s else 0.0 for s in found.waits_s[:8] - copy),
        make_s=sizes.make_alone_s,
        stages={"read": sizes.read_alone_s} | sizes.work_s,
        used=used,
        enough=least,
        tried=() if feed.producers else _tried(sizes, feed, found, least),
        sizes=sizes,
        stream=stream,
    )
    return answer, told


def stream_of(feed: Feed, sizes: FeedSizes, readers: int, copy_s: float) -> StreamSizes:
    """Return the sizes of the stream into one rank's reservoir, of as many producers as each rank has."""
    link = sizes.readers * sizes.read_bytes / sizes.read_bytes_s / sizes.samples if sizes.read_bytes_s else 0.0
    return StreamSizes(
        control=ReservoirControl(room=feed.reservoir, threshold=feed.threshold, seed=feed.seed),
        producers=max(1, round(feed.producers / readers)),
        make_s=feed.make_s,
        send_s=link,
        samples=sizes.samples,
        step_s=sizes.step_s,
        copy_s=copy_s,
    )


def sizes_of(
    feed: Feed, model: Model, cluster: Cluster, train: Train, plan: Plan, step_s: float
) -> tuple[FeedSizes, int, tuple[Assumption, ...]]:
    """Return the sizes of a node's feed, the ranks that read in all, and what is assumed in them."""
    if plan.several:
        help = "say a plan of one pool, or leave --feed out"
        raise MeshwrightError.one("W021", "a plan of several pools", place=f"--plan {plan.text()}", help=help)
    island, told = cluster.islands[0], []
    node, device = island.node, island.device
    a_node, nodes, total = readers_of(feed, plan, cluster)
    samples = max(1, round(train.global_batch / plan.layout.dp))
    tokens, more = train.seq_len, 1.0 / feed.keep

    def of(size: tuple[float, bool] | None, usual: float) -> float:
        number, a_token = size or (usual, True)
        return samples * number * (tokens if a_token else 1)

    stored = 2.0 if model.vocab <= 1 << 16 else 4.0
    if feed.sample is None and not feed.producers:
        is_text = "tokenise" in feed.work
        stored = TEXT_BYTES if is_text else stored
        what = "text behind a token" if is_text else "an id as it is stored"
        told.append(Assumption("sample=", f"{stored:g} bytes a token", what, is_text))
    rate = feed.read_bytes_s or node.nvme_gb_s * 1e9
    if not rate and not feed.store_bytes_s:
        told.append(Assumption("read=", "no bound", "nothing says what the source gives a node", True))
    elif not feed.read_bytes_s and node.nvme_gb_s:
        told.append(Assumption("read=", f"{node.nvme_gb_s:g} GB/s", "the node's drives, read by nobody else"))
    if feed.store_bytes_s:
        rate = min(rate or np.inf, feed.store_bytes_s / nodes)
    known = node.cpus or USUAL_CORES
    cores = feed.cores or device.cores or max(1, known - island.devices_per_node)
    if not feed.cores and not device.cores:
        source = "every device's process has one of its own" if node.cpus else "the usual host, which nothing names"
        told.append(Assumption("cores=", f"{cores} of {known} a node", source, not node.cpus))
    if len(cluster.islands) > 1:
        told.append(Assumption("nodes that read", f"all as of {island.name}", "islands may differ in theirs", True))
    if feed.workers > 0 and feed.readers != RANK and plan.layout.tp * plan.layout.cp * plan.layout.pp > 1:
        told.append(Assumption("readers=", "replica", "the other ranks of a replica get its tokens in no time"))
    sizes = FeedSizes(
        readers=a_node,
        workers=feed.workers,
        ahead=feed.ahead,
        samples=samples,
        read_bytes=of(feed.sample, stored) * more,
        latency_s=samples * more * feed.latency_s / feed.inflight,
        work_s={
            stage: samples * work.of(tokens) * (more if stage in BEFORE_FILTER else 1.0)
            for stage, work in feed.work.items()
        },
        copy_bytes=of(feed.copied, ID_BYTES),
        copied_ahead=feed.to_device == AHEAD,
        read_bytes_s=float(rate),
        stream_bytes_s=feed.stream_bytes_s,
        cores=float(cores),
        copy_bytes_s=0.0 if device.cores else node.copies_gb_s * 1e9,
        step_s=step_s,
        step_cores=float(min(island.devices_per_node, plan.num_ranks, device.cores)) if device.cores else 0.0,
        sigma={stage: work.sigma for stage, work in feed.work.items() if work.sigma},
        producers=feed.producers,
        make_s=samples * feed.make_s * total / feed.producers if feed.producers else 0.0,
        seed=feed.seed,
    )
    return sizes, total, tuple(told)


def readers_of(feed: Feed, plan: Plan, cluster: Cluster) -> tuple[int, int, int]:
    """Return the ranks that read on the node with most of them, the nodes with such ranks, and all of these."""
    layout, island = plan.layout, cluster.islands[0]
    ranks = np.arange(layout.num_ranks)
    if feed.readers != RANK:
        for axis in ("tp", "cp", "pp"):
            ranks = ranks[ranks // layout.stride(axis) % getattr(layout, axis) == 0]
    count = np.bincount(ranks // island.devices_per_node)
    return int(count.max()), int((count > 0).sum()), len(ranks)


def _tried(sizes: FeedSizes, feed: Feed, found: FedSteps, least: int | None) -> tuple[TriedWorkers, ...]:
    """Steps with other numbers of workers, as far as some are enough, or all cores have one."""
    last = max(least or 0, feed.workers, 1)
    if least is None:
        last = max(last, int(sizes.cores // sizes.readers))
    counts = sorted({w for w in TRIED if w <= last} | {feed.workers} | ({least} if least else set()))
    out = []
    for workers in counts:
        one = found if workers == feed.workers else fed(sizes.with_workers(workers, USUAL_PREFETCH * workers))
        copy = 0.0 if sizes.copied_ahead else sizes.copy_s
        out.append(TriedWorkers(workers=workers, step_s=one.period_s, waits=_waits(one, copy) / one.period_s))
    return tuple(out)


def _waits(found: FedSteps, copy_s: float) -> float:
    """Seconds of a step that wait for data, without its copy to the device."""
    waits = found.wait_s - copy_s
    return waits if waits > ROUNDING * found.period_s else 0.0


def with_data(split: dict[str, float], told: FeedAnswer | None) -> dict[str, float]:
    """The attribution of a step with what it waits for data and copies of it, and sums to the step with its data."""
    return split if told is None else split | {DATA: told.step_s - told.own_s}


def felt(found: tuple[Sensitivity, ...], told: FeedAnswer | None) -> tuple[Sensitivity, ...]:
    """The changes of a step that has its data, as changes of one that may wait for it, and those by its feed."""
    if told is None:
        return found
    steps = told.steps_of(np.array([told.own_s * (1 + one.change) for one in found]))
    out = [msgspec.structs.replace(one, change=float(step) / told.step_s - 1) for one, step in zip(found, steps)]
    for name, what, sizes in () if told.stream is not None else _faster(told.sizes):
        out.append(Sensitivity(name=name, what=what, change=fed(sizes).period_s / told.step_s - 1))
    return tuple(sorted((one for one in out if abs(one.change) > LEAST), key=lambda one: one.change))


def _faster(sizes: FeedSizes) -> Iterator[tuple[str, str, FeedSizes]]:
    """The sizes of a feed with 10% more of one thing each, and another worker."""

    def with_(**said: Any) -> FeedSizes:
        return msgspec.structs.replace(sizes, **said)

    if sizes.read_bytes_s or sizes.stream_bytes_s:
        rates = {"read_bytes_s": 1.1 * sizes.read_bytes_s, "stream_bytes_s": 1.1 * sizes.stream_bytes_s}
        yield "data source", "the source of the data 10% faster", with_(**rates)
    if sizes.latency_s:
        yield "data latency", "the source of the data 10% sooner", with_(latency_s=sizes.latency_s / 1.1)
    if sizes.work_s:
        less = {stage: seconds / 1.1 for stage, seconds in sizes.work_s.items()}
        yield "data work", "work on samples 10% faster", with_(work_s=less)
        yield "data cores", "10% more cores for data workers", with_(cores=1.1 * sizes.cores)
    if not sizes.producers:
        more = sizes.workers + 1
        ahead = max(sizes.ahead, USUAL_PREFETCH * more)
        yield "data workers", "another data worker beside each rank that reads", sizes.with_workers(more, ahead)
    elif sizes.make_s:
        yield "data producers", "10% more producers", with_(make_s=sizes.make_s / 1.1)


def feed_cautions(told: FeedAnswer | None) -> tuple[str, ...]:
    """A caution where steps wait for their data, or train on some of it again and again."""
    if told is not None and told.stream is not None and told.stream.uses > 1 + ENOUGH:
        return (f"approximate: a sample of the reservoir is trained on {told.stream.uses:.3g} times in the mean",)
    if told is None or told.bound == "step":
        return ()
    if told.full:
        share = told.used[told.full[0]]
        many = f"no number of workers is enough: steps that do not wait would take {share:.2f} times the {told.full[0]}"
    elif told.enough is not None:
        many = f"{told.enough} workers beside each rank that reads are enough"
    else:
        many = "its producers make too few" if "producers" in told.used else "no number of workers is enough"
    return (f"bound by its data: {told.waits:.0%} of the time steps wait for it; {many}",)
