"""The benchmarks: one function each. A ratio is to the plain Python reference, timed in the same run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import numpy as np

from bench.result import Result, best, once
from bench.serving import serving_simulator
from meshwright import predict
from meshwright.cost import Costs
from meshwright.graph import KIND, GraphBuilder, TaskGraph
from meshwright.lower import lower
from meshwright.plan import parse
from meshwright.schedules import build
from meshwright.schedules.timing import in_order_times, in_order_times_plain
from meshwright.simulate import engine, events
from meshwright.simulate.price import Pricer
from meshwright.spec import cluster, model
from meshwright.spec.workload import Train


def pipeline_graph(num_ranks: int, num_microbatches: int) -> TaskGraph:
    """A 1F1B pipeline with its messages: F, B and two sends per stage and microbatch."""
    actions = build("1f1b", num_ranks, num_microbatches)
    builder = GraphBuilder([f"rank {r}" for r in range(num_ranks)])
    rank, forward = actions.rank_of(), actions.kind == 0
    keys = np.where(forward, builder.key("F"), builder.key("B"))
    streams = np.array([builder.stream(r, "compute") for r in range(num_ranks)])
    tasks = builder.extend(actions.kind, keys, stream=streams[rank], stage=actions.stage, microbatch=actions.microbatch)
    at = np.zeros((2, num_ranks, num_microbatches), np.int64)
    at[np.where(forward, 0, 1), actions.stage, actions.microbatch] = tasks
    for way, source, target, queue in (
        (0, slice(None, -1), slice(1, None), "pp_forward"),
        (1, slice(1, None), slice(None, -1), "pp_backward"),
    ):
        producer, consumer = at[way, source].ravel(), at[way, target].ravel()
        order = np.argsort(producer, kind="stable")
        sender = np.array([builder.stream(r, queue) for r in range(num_ranks)])[source]
        stream = np.repeat(sender, num_microbatches)[order]
        sends = builder.extend(KIND["send"], builder.key("send"), stream=stream)
        builder.depend(sends, producer[order])
        builder.depend(consumer[order], sends)
    return builder.build()


def in_order_engine() -> Result:
    graph = pipeline_graph(64, 4096)
    small = pipeline_graph(16, 256)
    durations = np.array([1.0, 2.0, 0.1])
    seconds = best(lambda: engine.times(graph, durations))
    plain = once(lambda: engine.reference_times(small, durations))
    return Result(
        what=f"in-order engine, pipeline of {graph.num_tasks:,} tasks",
        value=graph.num_tasks / seconds / 1e6,
        unit="M tasks/s",
        target=20.0,
        at_least=True,
        reference=small.num_tasks / plain / 1e6,
    )


def event_engine() -> Result:
    """Every message of the pipeline over its sender's and its receiver's port, streams that choose."""
    graph, small = pipeline_graph(64, 512), pipeline_graph(8, 32)
    durations = np.array([1.0, 2.0, 0.1])

    def question(graph: TaskGraph) -> dict:
        sends = np.flatnonzero(graph.kind == KIND["send"])
        rank = graph.streams.rank[graph.member[graph.member_ptr[sends]]]
        forward = graph.streams.queue[graph.member[graph.member_ptr[sends]]] == 5
        ports = zip(rank.tolist(), np.where(forward, rank + 1, rank - 1).tolist())
        num_ranks = len(graph.streams.ranks)
        flows = {i: (0.2, (a, num_ranks + b)) for i, (a, b) in zip(sends.tolist(), ports)}
        transfers = events.Transfers.of(graph.num_tasks, [1.0] * (2 * num_ranks), flows)
        return {"policies": ["priority"] * len(graph.streams), "transfers": transfers}

    asked, little = question(graph), question(small)
    seconds = best(lambda: events.times(graph, durations, **asked), times=3)
    plain = once(lambda: events.reference_times(small, durations, **little))
    return Result(
        what=f"event engine, {graph.num_tasks:,} tasks that choose and share links",
        value=graph.num_tasks / seconds / 1e6,
        unit="M tasks/s",
        target=0.5,
        at_least=True,
        reference=small.num_tasks / plain / 1e6,
    )


def llama_405b() -> Result:
    llama, where = model.load("llama3-405b"), cluster.load("16384xh100")
    plan = parse("tp8 pp16 vpp4 interleaved mb1 zero1")
    train = Train(global_batch=8192, seq_len=8192)
    costs = Costs()
    seconds = best(lambda: predict(llama, where, train, plan, costs=costs, detail=False))
    lowered = lower(plan.on(where.num_devices), llama, where, train)
    by_key = Pricer(costs).all(lowered.programs).durations
    return Result(
        what="predict Llama-3-405B on 16,384 H100, pp16 vpp4, 64 microbatches (reference: the plain clock alone)",
        value=seconds * 1e3,
        unit="ms",
        target=20.0,
        reference=once(lambda: engine.reference_times(lowered.graph, by_key)) * 1e3,
    )


def hundred_thousand() -> Result:
    llama, where = model.load("llama3-405b"), cluster.load("100096xh100")
    plan = parse("tp8 pp16 vpp4 interleaved mb1 zero1")
    train = Train(global_batch=plan.on(100096).layout.dp * 64, seq_len=8192)
    costs = Costs()
    seconds = best(lambda: predict(llama, where, train, plan, costs=costs, detail=False))
    return Result(what="predict the same on 100,096 H100", value=seconds * 1e3, unit="ms", target=100.0)


def whole_process() -> Result:
    """A fresh interpreter that answers, its compiled code on disk already."""
    command = [sys.executable, "-m", "meshwright", "predict", "llama3-70b", "--on", "64xh100"]
    command += ["--train", "batch=512,seq=8192", "--plan", "tp4 pp4 dp4 zero1 mb1 selective", "--json"]

    def run() -> None:
        done = subprocess.run(command, check=False, stdout=subprocess.DEVNULL, env={**os.environ, "NO_COLOR": "1"})
        if done.returncode not in (0, 1):  # 1: an answer, that it does not fit
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}")

    return Result(what="`meshwright predict`, whole process", value=best(run, times=3), unit="s", target=1.5)


def schedule_search() -> Result:
    """The zero-bubble search; its result is timed by both clocks."""
    numbers = iter(range(1000))

    def search():
        times = {"t_f": 1.0, "t_b": 1.0, "t_w": 0.7, "t_comm": 0.05 + 1e-9 * next(numbers)}
        return build("zb-2p", 64, 512, **times, keep_w=0.7)

    seconds = best(search, times=3)
    return Result(
        what="zero-bubble search, 64 stages x 512 microbatches (its authors: 6.4 s)",
        value=seconds,
        unit="s",
        target=2.0,
    )


def schedule_clock() -> Result:
    actions, small = build("zb-h1", 64, 512), build("zb-h1", 16, 64)
    seconds = best(lambda: in_order_times(actions, 1.0, 1.0, 1.0, 0.1))
    plain = once(lambda: in_order_times_plain(small, 1.0, 1.0, 1.0, 0.1))
    return Result(
        what=f"schedules' clock, {len(actions):,} actions",
        value=len(actions) / seconds / 1e6,
        unit="M actions/s",
        target=10.0,
        at_least=True,
        reference=len(small) / plain / 1e6,
    )


CASES: dict[str, Callable[[], Result]] = {
    "engine": in_order_engine,
    "events": event_engine,
    "llama-405b": llama_405b,
    "100k": hundred_thousand,
    "process": whole_process,
    "search": schedule_search,
    "clock": schedule_clock,
    "serving": serving_simulator,
}
