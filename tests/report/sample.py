"""A made-up prediction to render: a 1F1B pipeline on its timeline, with memory, a layer's zoom and every field set.

The numbers are plausible, not measured: reports show what a prediction says, whatever it says.
"""

from __future__ import annotations

import msgspec
import numpy as np

from meshwright import plan as plans
from meshwright.answer.metrics import Metric, TrainMetrics
from meshwright.answer.prediction import (
    Assumption,
    Money,
    Prediction,
    RankMemory,
    Sensitivity,
    TrainingRun,
    Zoom,
)
from meshwright.causes import WORDS
from meshwright.graph import GraphBuilder, RankClass
from meshwright.simulate import engine
from meshwright.spec import cluster, model, workload
from meshwright.timeline import Identity, MemoryTrace, Timeline, from_times

GIB = 2.0**30
STATIC = {"parameters": 16.4 * GIB, "gradients": 8.2 * GIB, "optimizer": 9.9 * GIB, "context": 1.1 * GIB}
ACTIVATIONS = 2.6 * GIB


def _alternating(stage: int, num_stages: int, num_microbatches: int) -> list[tuple[str, int]]:
    """1F1B's order on one rank."""
    warm_up = min(num_stages - stage - 1, num_microbatches)
    order = [("F", i) for i in range(warm_up)]
    for i in range(num_microbatches - warm_up):
        order += [("F", warm_up + i), ("BW", i)]
    return order + [("BW", i) for i in range(num_microbatches - warm_up, num_microbatches)]


def pipeline(num_stages: int = 4, num_microbatches: int = 8) -> Timeline:
    """The step's timeline: passes, sends, gradient exchange and optimizer of every stage, and their memory."""
    build = GraphBuilder([RankClass(label=f"stage {s}", multiplicity=16) for s in range(num_stages)])
    done: dict[tuple[str, int, int], int] = {}
    for stage in range(num_stages):
        for kind, mb in _alternating(stage, num_stages, num_microbatches):
            where = {"stage": stage, "microbatch": mb}
            task = build.add(kind, f"{kind} stage {stage}", build.stream(stage, "compute"), **where)
            queue = "pp_forward" if kind == "F" else "pp_backward"
            if 0 <= stage + (1 if kind == "F" else -1) < num_stages:
                done[kind, stage, mb] = build.add("send", "send", build.stream(stage, queue), after=[task], **where)
        exchange = build.add("reduce_scatter", "gradients", build.stream(stage, "dp"), after=[task], stage=stage)
        update = build.add("optimizer", "adamw", build.stream(stage, "compute"), after=[exchange], stage=stage)
        build.add("all_gather", "parameters", build.stream(stage, "dp_gather"), after=[update], stage=stage)
    _connect(build, done, num_stages, num_microbatches)
    graph = build.build()
    seconds = {"F": 0.121, "BW": 0.252, "send": 0.0041, "gradients": 0.18, "adamw": 0.021, "parameters": 0.06}
    durations = np.array([seconds[key.split()[0]] * (1.06 if key.endswith("stage 0") else 1.0) for key in graph.keys])
    start, end = engine.times(graph, durations)
    shares = {"gemm": 0.61, "attention": 0.12, "elementwise": 0.11, "host": 0.01, "tp": 0.15}
    is_pass = np.array([key[0] in "FB" for key in graph.keys])
    parts = {cause: np.where(is_pass, durations * share, 0.0) for cause, share in shares.items()}
    identity = Identity(code="0.1.0", costs="h100_sxm roofline")
    bare = from_times(graph, start, end, parts=parts, identity=identity)
    traces = tuple(_memory(bare, rank) for rank in range(num_stages))
    return msgspec.structs.replace(bare, memory=traces)


def _connect(build: GraphBuilder, sent: dict, num_stages: int, num_microbatches: int) -> None:
    """Passes wait for what the neighbouring stage sent; tasks were added stage by stage, so by name."""
    numbers: dict[tuple[str, int, int], int] = {}
    count = 0
    for stage in range(num_stages):
        for kind, mb in _alternating(stage, num_stages, num_microbatches):
            numbers[kind, stage, mb] = count
            count += 2 if (kind, stage, mb) in sent else 1
        count += 3
    for (kind, stage, mb), send in sent.items():
        build.depend([numbers[kind, stage + (1 if kind == "F" else -1), mb]], [send])


def _memory(timeline: Timeline, rank: int) -> MemoryTrace:
    chosen = timeline.of_rank(rank)
    passes = chosen[timeline.attribute("microbatch")[chosen] >= 0]
    forward = timeline.kind[passes] == 0
    at = np.where(forward, timeline.start_s[passes], timeline.end_s[passes])
    order = np.argsort(at, kind="stable")
    held = np.cumsum(np.where(forward, ACTIVATIONS, -ACTIVATIONS)[order])
    time_s = np.concatenate([[0.0], at[order]])
    rows = [np.full(len(time_s), num_bytes) for num_bytes in STATIC.values()]
    rows.append(np.concatenate([[0.0], held]))
    return MemoryTrace(time_s=time_s, categories=(*STATIC, "activations"), num_bytes=np.array(rows))


def layer(name: str = "block 0, forward") -> Zoom:
    """The operators of one layer, one after the other, with a collective at the end of each half."""
    build = GraphBuilder(["tensor-parallel rank"])
    operators = [
        ("norm", "elementwise", 38e-6),
        ("qkv", "gemm", 310e-6),
        ("flash attention", "attention", 520e-6),
        ("out", "gemm", 205e-6),
        ("reduce scatter", "tp", 160e-6),
        ("norm 2", "elementwise", 38e-6),
        ("gate and up", "gemm", 910e-6),
        ("swiglu", "elementwise", 84e-6),
        ("down", "gemm", 460e-6),
        ("reduce scatter 2", "tp", 160e-6),
    ]
    before: list[int] = []
    for key, cause, _ in operators:
        kind, queue = ("reduce_scatter", "tp") if cause == "tp" else ("op", "compute")
        before = [build.add(kind, key, build.stream(0, queue), after=before, layer=0)]
    graph = build.build()
    durations = np.array([seconds for _, _, seconds in operators])
    start, end = engine.times(graph, durations)
    causes = dict.fromkeys(cause for _, cause, _ in operators)
    parts = {c: np.array([s if c == cause else 0.0 for _, cause, s in operators]) for c in causes}
    return Zoom(name=name, timeline=from_times(graph, start, end, parts=parts))


def attribution(step_s: float) -> dict[str, float]:
    """Shares in the order of the table of causes that add up to the step."""
    weights = dict.fromkeys(WORDS, 0.0)
    weights |= {"gemm": 43, "attention": 8.5, "elementwise": 7.7, "host": 0.6, "optimizer": 0.5}
    weights |= {"tp": 10.5, "pp": 1.2, "dp": 4.2, "bubble": 23.8}
    total = sum(weights.values())
    return {name: step_s * weight / total for name, weight in weights.items()}


def ranks(timeline: Timeline, capacity_bytes: float) -> tuple[RankMemory, ...]:
    found = []
    for rank, trace in enumerate(timeline.memory):
        num_bytes, at_s, alive = trace.peak()
        found.append(
            RankMemory(
                rank=timeline.ranks[rank].name,
                multiplicity=timeline.multiplicity[rank],
                capacity_bytes=capacity_bytes,
                peak_bytes=num_bytes,
                at_s=at_s,
                alive=alive,
            )
        )
    return tuple(found)


ASSUMPTIONS = (
    Assumption("compute precision", "bf16, fp32 master weights", "workload default"),
    Assumption("GEMM efficiency", "0.72 of dense peak", "unverified: no published figure for this shape", True),
    Assumption("NVLink bandwidth", "450 GB/s per direction", "NVIDIA H100 datasheet, 2023"),
    Assumption("allocator slack", "3% of activations", "roofline model, not calibrated"),
)
SENSITIVITIES = (
    Sensitivity(name="matmul peak", what="matrix multiplication rate +10%", change=-0.0391),
    Sensitivity(name="bubble", what="twice the microbatches", change=-0.0612),
    Sensitivity(name="nvlink", what="NVLink bandwidth +10%", change=-0.0095),
    Sensitivity(name="fabric", what="scale-out bandwidth +10%", change=-0.0031),
)
RUN = TrainingRun(
    tokens=1e12,
    num_steps=7_629_395,
    seconds=2.03e7,
    usd=1.08e6,
    lines=(
        ("compute", 1.94e7, "steps of the predicted time"),
        ("checkpoints", 9.0e5, "every 30 minutes, to shared storage"),
        ("data loading", None, "overlapped with compute on most clusters"),
        ("failures", None, "the catalog has no failure rate for this device"),
    ),
    num_devices=64,
    seconds_interval=(1.8e7, 2.4e7),
    usd_interval=(9.58e5, 1.28e6),
    draws_s=(1.7e7, 1.9e7, 2.03e7, 2.2e7, 2.5e7),
    price_usd_hour=191.5,
    price_source="on-demand list price, 2024",
)


def stepping(metrics: TrainMetrics, step: Metric) -> TrainMetrics:
    """The metrics with another step time, and all else as it was."""
    return msgspec.structs.replace(metrics, step_time_s=step)


def prediction(
    *, name: str = "llama3-70b", capacity_gib: float = 79.6, num_stages: int = 4, num_microbatches: int = 8, **changes
) -> Prediction:
    """A prediction of Llama-3-70B on 64 H100 with every section filled; `changes` replace its fields."""
    timeline = pipeline(num_stages, num_microbatches)
    step_s = timeline.makespan_s
    step = Metric(step_s, (step_s * 0.92, step_s * 1.11))
    memory = ranks(timeline, capacity_gib * GIB)
    whole = Prediction(
        model=msgspec.structs.replace(model.load("llama3-70b"), name=name),
        cluster=cluster.load("64xh100"),
        train=workload.parse(f"batch={2 * num_microbatches},seq=8k,tokens=1t"),
        plan=plans.parse(f"tp8 pp{num_stages} dp2 zero1 1f1b mb1"),
        fits=all(m.headroom_bytes >= 0 for m in memory),
        metrics=TrainMetrics(
            step_time_s=step,
            bound_s=Metric(step_s * 0.37),
            tokens_per_s_per_gpu=Metric.per_step(412.0 * step_s, step),
            mfu=Metric.per_step(0.4123 * step_s, step),
            hfu=Metric.per_step(0.4391 * step_s, step),
            bubble=Metric(timeline.bubble()),
            peak_memory_bytes=Metric(max(rank.peak_bytes for rank in memory)),
            headroom_bytes=Metric(min(rank.headroom_bytes for rank in memory)),
            usd_per_million_tokens=Metric.of_step(1.17, step),
            joules_per_token=Metric.of_step(1.45, step),
        ),
        attribution=attribution(step_s),
        memory=memory,
        sensitivities=SENSITIVITIES,
        assumptions=ASSUMPTIONS,
        warnings=("The optimizer's efficiency is not calibrated on this device.",),
        money=Money(
            usd_per_step=0.153,
            usd_per_million_tokens=1.17,
            joules_per_step=1.9e5,
            joules_per_token=1.45,
            source="on-demand list price, 2024; 700 W a device",
        ),
        run=RUN,
        timeline=timeline,
        zooms=(layer("block, forward"), layer("block, backward")),
        schedule_params={},
        stage_layers=tuple((80 // num_stages,) for _ in range(num_stages)),
        identity=Identity(code="0.1.0", model="a1b2c3", plan="d4e5f6", costs="h100_sxm roofline"),
    )
    return msgspec.structs.replace(whole, **changes)
