"""Figures that were measured on one H100, and what is predicted for them: steps of training, iterations of serving.

Run: python -m bench.on_gpu [--json] [--measure FILE]

The figures are in ``bench/figures``: Llama-3-8B's layers trained by the executor in bf16, iterations of serving by
layer, products of few rows, copies to the host; beside them the profile that ``calibrate --here`` wrote there. Nothing
was fitted to steps or iterations. ``--measure`` measures trained plans, iterations and the device anew, on a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import msgspec
import numpy as np

from meshwright.answer.rank_memory import rank_memory
from meshwright.causes import CAUSE
from meshwright.cost import framework, measured, standard_on
from meshwright.cost.standard import serving_costs
from meshwright.graph import KIND
from meshwright.lower.forward import Forward
from meshwright.lower.place import Mesh
from meshwright.plan import parse
from meshwright.simulate.iterations import forward_prices
from meshwright.simulate.layer import cost
from meshwright.simulate.step import simulate
from meshwright.spec import cluster, model
from meshwright.spec.dimensions import transformer
from meshwright.spec.model import Model
from meshwright.spec.routing import Routing
from meshwright.spec.workload import Train
from meshwright.spec.workload import parse as workload
from meshwright.work import Gemm

FIGURES = Path(__file__).parent / "figures"
PROFILE = FIGURES / "h100_here"
#: (layers, workload, plan) of the steps that are trained.
TRAINED = (
    (2, "batch=4,seq=4096", "mb1"), (4, "batch=4,seq=4096", "mb1"), (8, "batch=4,seq=4096", "mb1"),
    (4, "batch=2,seq=8192", "mb1 full"), (4, "batch=8,seq=4096", "mb2 full"),
    (4, "batch=16,seq=2048", "mb4 selective"), (8, "batch=4,seq=4096", "mb1 fsdp full"),
    (4, "batch=4,seq=4096", "mb1 fsdp"), (4, "batch=8,seq=2048", "mb2 full"),
)  # fmt: skip
#: The same of fp8, adapters over frozen bases, state in the host's memory and compiled layers.
MORE = (
    (8, "batch=4,seq=4096", "mb1"), (8, "batch=4,seq=4096", "mb1 fp8"), (8, "batch=4,seq=4096", "mb1 fp8_row"),
    (8, "batch=4,seq=4096,phase=lora", "mb1"), (8, "batch=4,seq=4096,phase=lora", "mb1 full params=nf4"),
    (8, "batch=4,seq=4096,phase=lora", "mb1 params=int8"), (8, "batch=4,seq=4096", "mb1 full offload=activations"),
    (4, "batch=4,seq=4096", "mb1 offload=activations"), (4, "batch=4,seq=4096", "mb1 offload=optimizer"),
    (8, "batch=8,seq=4096", "mb1 full offload=optimizer"), (8, "batch=4,seq=4096", "mb1 compile=yes"),
    (32, "batch=4,seq=4096,phase=lora", "mb1 full params=nf4"), (32, "batch=4,seq=4096,phase=lora", "mb1 full"),
)  # fmt: skip
SERVED = ("llama3-8b", "qwen3-30b-a3b")
#: How experts are chosen there: routers of random weights have no favourites.
EVEN = Routing(said="even", skew=0.0)
STEPS, TIMED_LAYERS = 9, 4


class TrainedPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Measured seconds of a step of so many layers, and of the kinds of task in it."""

    layers: int
    train: str
    plan: str
    step_s: float
    forward_s: float
    backward_s: float
    optimizer_s: float
    peak_bytes: float


class LayerSeconds(msgspec.Struct, frozen=True, kw_only=True):
    """Measured seconds of a layer in an iteration; attention by kernel, the fastest first."""

    model: str
    batch: int
    new: int
    past: int
    whole_s: float
    eager_s: float
    linear_s: float
    attention_s: dict[str, float]


class DeviceSeconds(msgspec.Struct, frozen=True, kw_only=True):
    """Measured seconds of products (m, n, k), of a kernel in a chain, and of copies by bytes."""

    products: list[tuple[int, int, int, float]]
    launch_eager_s: float
    launch_graph_s: float
    to_device: list[tuple[int, float]]
    to_host: list[tuple[int, float]]


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """First and last loss of thirty steps, and how far they were from float64 on a processor at most."""

    first: float
    last: float
    most_relative_difference: float


class GpuFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that was measured on one GPU."""

    source: str
    training: list[TrainedPlan]
    iterations: list[LayerSeconds]
    device: DeviceSeconds
    curves: dict[str, Curve] = {}


def figures() -> GpuFigures:
    """Return the figures that were kept."""
    return msgspec.json.decode((FIGURES / "h100.json").read_bytes(), type=GpuFigures)


def llama(layers: int) -> Model:
    """Return so many layers of Llama-3-8B between its embedding and its head."""
    return transformer(
        layers=layers, hidden=4096, heads=32, kv_heads=8, vocab=128256, ffn=14336, gated=True, max_seq_len=8192,
        name=f"llama-{layers}",
    )  # fmt: skip


@contextlib.contextmanager
def profiled(folder: Path) -> Iterator[None]:
    """Have ``here`` be the machine whose profile is in a folder."""
    before = os.environ.get("MESHWRIGHT_HOME")
    os.environ["MESHWRIGHT_HOME"] = str(folder)
    _forget()
    try:
        yield
    finally:
        os.environ.pop("MESHWRIGHT_HOME")
        if before is not None:
            os.environ["MESHWRIGHT_HOME"] = before
        _forget()


def _forget() -> None:
    cluster.forget_here()
    measured.forget()
    framework.frameworks.cache_clear()


def training_errors(on: str) -> list[dict[str, float]]:
    """Return the relative errors of the step, its forwards, backwards and optimizer, and of the peak memory, plan by
    plan, on ``1xh100`` of the catalog, with the executor's own framework profile, or ``1xhere`` of the kept profile."""
    out = []
    with profiled(PROFILE):
        where = cluster.load(on)
        costs = standard_on(where, "" if where.islands[0].device.framework else "meshwright")
        for row in figures().training:
            run = simulate(parse(row.plan).on(1), llama(row.layers), where, _train(row.train), costs)
            graph, seconds = run.lowered.graph, run.priced.durations
            parts = {k: float(seconds[graph.cost_key[graph.kind == KIND[k]]].sum()) for k in ("F", "BW", "optimizer")}
            # the span of an optimizer is the update alone, and its task has what surrounds that
            updates = graph.cost_key[graph.kind == KIND["optimizer"]]
            parts["optimizer"] -= float(run.priced.parts[updates, CAUSE["host"]].sum())
            out.append(
                {
                    "step": run.step_time_s / row.step_s - 1,
                    "forward": parts["F"] / row.forward_s - 1,
                    "backward": parts["BW"] / row.backward_s - 1,
                    "optimizer": parts["optimizer"] / row.optimizer_s - 1,
                    "memory": rank_memory(run, costs)[0].peak_bytes / row.peak_bytes - 1,
                }
            )
    return out


def _train(words: str) -> Train:
    return workload(f"{words},dtype=bf16")


def iteration_errors() -> list[tuple[LayerSeconds, dict[str, float]]]:
    """Return, for every iteration, the relative errors of the catalog's H100: of its products, of all beside them
    (attention, norms, activations, the cache's writes), and of the whole."""
    where, plan = cluster.load("1xh100"), parse("tp1").on(1)
    device, costs, known, out = where.islands[0].device, serving_costs(), {}, []
    for row in figures().iterations:
        if row.model not in known:
            forward = Forward(model.load(row.model), plan, Mesh(plan, where), routing=EVEN)
            known[row.model] = forward, forward_prices(forward, device, costs)
        forward, prices = known[row.model]
        kinds = forward.model.layers_by_kind
        parts = cost(forward.tokenwise(int(np.argmax(kinds)), row.batch * row.new), "F", device, costs).parts
        attention = prices.mixed(row.batch, row.new, row.past) / forward.model.num_layers
        linear, whole = float(parts[CAUSE["gemm"]]), float(parts.sum()) + attention
        found = {
            "linear": linear / row.linear_s - 1,
            "rest": (whole - linear) / (row.whole_s - row.linear_s) - 1,
            "whole": whole / row.whole_s - 1,
        }
        out.append((row, found))
    return out


def product_errors() -> list[tuple[int, float]]:
    """Return the rows of each product and its relative error."""
    where, costs = cluster.load("1xh100"), serving_costs()
    device = where.islands[0].device
    return [
        (m, costs.price(Gemm(m=m, n=n, k=k, dtype="bf16"), device).seconds / seconds - 1)
        for m, n, k, seconds in figures().device.products
    ]


def middle(errors: list[float]) -> tuple[float, float]:
    """Return the median of the absolute errors, and the median error."""
    return median(map(abs, errors)), median(errors)


def summary() -> dict[str, tuple[float, float]]:
    """Return the median absolute error and the median error of everything, by name."""
    out = {}
    for on in ("1xh100", "1xhere"):
        errors = training_errors(on)
        out |= {f"training {on} {part}": middle([e[part] for e in errors]) for part in errors[0]}
    found = iteration_errors()
    for name in SERVED:
        for title, chosen in (
            ("decode", lambda row: row.new == 1),
            ("prompt", lambda row: row.new > 1 and not row.past),
            ("chunk", lambda row: row.new > 1 and row.past > 0),
        ):
            mine = [e for row, e in found if row.model == name and chosen(row)]
            out |= {f"{name} {title} {part}": middle([e[part] for e in mine]) for part in mine[0]}
    few = product_errors()
    out["products of up to 64 rows"] = middle([e for m, e in few if m <= 64])
    return out


def measure(file: Path) -> None:
    """Measure everything but the profile and the curves anew, on a GPU."""
    import torch

    from meshwright.run.bench import device as bench_device
    from meshwright.run.bench.forward import IterationShape, iterations
    from meshwright.run.world import World

    world = World(0, 1, 0, 1, "here", torch.device("cuda", 0))
    torch.cuda.set_device(world.device)
    shapes = [IterationShape(1, new, past) for new, past in
              ((512, 0), (2048, 0), (8192, 0), (512, 2048), (512, 8192), (2048, 8192))]  # fmt: skip
    shapes += [IterationShape(b, 1, c - 1) for b in (1, 4, 16, 64, 256) for c in (512, 2048, 8192)]

    def told(what: str, done: int, total: int) -> None:
        print(f"{what}: {done} of {total}", file=sys.stderr)

    training = [_trained(world, *one) for one in TRAINED]
    rows = [row for name in SERVED for row in iterations(world, model.load(name), shapes, TIMED_LAYERS, told)]
    weights = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (1536, 2048), (128256, 4096))
    sizes = tuple(4**e for e in range(6, 15))
    found = {
        "source": f"one {torch.cuda.get_device_name(0)}, torch {torch.__version__}",
        "training": training,
        "iterations": rows,
        "device": bench_device.figures(world, (1, 2, 4, 8, 16, 32, 64, 128, 256), weights, sizes),
    }
    file.write_bytes(msgspec.json.encode(msgspec.convert(found, GpuFigures, strict=False)))


def measure_more(file: Path, seconds: float) -> None:
    """Measure plans of :data:`MORE` on a GPU into a file, row by row, until so many seconds are over."""
    import time
    import traceback

    import torch

    from meshwright.run.world import World

    world = World(0, 1, 0, 1, "here", torch.device("cuda", 0))
    torch.cuda.set_device(world.device)
    begin, found = time.perf_counter(), []
    for layers, words, plan in MORE:
        if time.perf_counter() - begin > seconds:
            break
        try:
            found.append(_trained(world, layers, words, plan))
        except Exception:
            print(f"{layers} {words} {plan}:\n{traceback.format_exc()}", file=sys.stderr)
            continue
        file.write_bytes(msgspec.json.encode(found))
        print(f"{time.perf_counter() - begin:.0f} s: {found[-1]}", file=sys.stderr, flush=True)


def _trained(world, layers: int, words: str, plan: str) -> dict[str, object]:
    """Train one plan on a text without documents; its median step and seconds by kind of task."""
    import torch

    from meshwright.run import loop
    from meshwright.timeline import unpack

    gc.collect()
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    draw = random.Random(1)
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        text.write_text(" ".join("".join(draw.choices("abcdefgh", k=draw.randint(2, 9))) for _ in range(60_000)))
        job = loop.Job(
            model=llama(layers), plan=parse(plan).on(1), train=_train(words), text=str(text), steps=STEPS, quiet=True
        )
        done = msgspec.convert(loop.train(world, job), loop.RunSummary)
    timeline = unpack(done.timeline)
    seconds = {
        kind: float((timeline.end_s - timeline.start_s)[timeline.kind == KIND[kind]].sum()) / len(timeline.steps.number)
        for kind in ("F", "BW", "optimizer")
    }
    return {
        "layers": layers, "train": words, "plan": plan, "step_s": median(done.step_s[STEPS // 2 :]),
        "forward_s": seconds["F"], "backward_s": seconds["BW"], "optimizer_s": seconds["optimizer"],
        "peak_bytes": float(done.peak_bytes[0]),
    }  # fmt: skip


def main() -> None:
    """Print every median error; with ``--measure`` measure first."""
    parser = argparse.ArgumentParser(prog="python -m bench.on_gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--measure", type=Path, help="measure on this GPU into a file, and print nothing")
    parser.add_argument("--more", type=Path, help="measure further plans on this GPU into a file, and print nothing")
    parser.add_argument("--seconds", type=float, default=200.0, help="how long further plans may take")
    asked = parser.parse_args()
    if asked.more:
        measure_more(asked.more, asked.seconds)
        return
    if asked.measure:
        measure(asked.measure)
        return
    found = summary()
    if asked.json:
        print(json.dumps(found, indent=1))
        return
    print(figures().source)
    for name, (absolute, bias) in found.items():
        print(f"  {name:40s} median |error| {absolute:6.1%}, median error {bias:+6.1%}")


if __name__ == "__main__":
    main()
