"""A profile of this machine: device, tables and host times, from what ``run/bench.py`` timed.

Kernels, memory-bound operators and collectives become tables as they are. Host times are fitted: the executor's own
passes over a few small models are predicted with the tables, and what is left is explained by four constants (time to
issue a kernel, forward and backward, time per pass, and how much longer kernels take in a model), least squares of the
relative errors.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from meshwright.answer.intervals import LEAST_SIGMA
from meshwright.answer.rank_memory import rank_memory
from meshwright.atomic import write_bytes
from meshwright.calibrate.server_report import DRIFT, unseen
from meshwright.cost import measured
from meshwright.cost.chain import Costs
from meshwright.cost.framework import FORMAT_VERSION as FRAMEWORK_VERSION
from meshwright.cost.framework import Framework, frameworks
from meshwright.cost.measured import FORMAT_VERSION, GridTable, MeasuredLink, MeasuredTables
from meshwright.errors import Diagnostic, MeshwrightError
from meshwright.graph import KIND
from meshwright.lower.residency import LOGITS
from meshwright.lower.state import updated_bytes
from meshwright.simulate.price import STEP
from meshwright.simulate.step import simulate
from meshwright.spec.cluster import Cluster, forget_here
from meshwright.spec.workload import DTYPE_BYTES

if TYPE_CHECKING:
    from meshwright.run.bench import Machine, ModelTimes, TimedRepeats

NAME = "here"
FRAMEWORK = "meshwright-run"
#: Constants that are fitted, with the step the linear model is built from. None can be less than nothing.
FITTED = {
    "host_us_per_kernel": 1.0,
    "host_us_per_backward_kernel": 1.0,
    "host_us_per_pass": 100.0,
    "kernel_slowdown": 0.02,
}

#: What else a profile states.
GIVEN = (
    "elementwise_passes",
    "host_us_per_collective",
    "host_us_per_dispatch",
    "exchange_share",
    "gather_share",
    "activation_copies",
    "context_bytes",
    "communicator_bytes",
    "allocator_slack",
    "step_sigma",
)
#: Microseconds to issue a kernel, from where the fit of a GPU begins: of shorter ones the kernels hide all, and none
#: shows in any time.
BEGUN_US = 20.0
#: Times the linear model is built anew.
ROUNDS = 4
#: Models that are named where the fit cannot be believed, the worst first.
WORST = 3


class Disbelieved(MeshwrightError):
    """A machine was measured, and what was fitted to it cannot be believed: exit code 1."""

    exit_code = 1


class MachineFit(msgspec.Struct, frozen=True, kw_only=True):
    """The fitted profile, and for every timed model (what, measured seconds, predicted seconds). ``left_out`` is by how
    much the times of each model are off in the mean where it is left out of the fit, and ``doubts`` what keeps the
    profile from being believed. ``drift`` is by how much longer the reference probe took in the slowest round than in
    the fastest, as a share, and ``others`` the share of the time in which other work had the cores."""

    framework: Framework
    rows: tuple[tuple[str, float, float], ...]
    left_out: dict[str, float] = {}
    doubts: tuple[str, ...] = ()
    drift: float = 0.0
    others: float = 0.0

    @property
    def mean_error(self) -> float:
        return float(np.mean([abs(p / m - 1) for _, m, p in self.rows]))


def tables(machine: Machine) -> MeasuredTables:
    """The tables of a machine's kernels and collectives."""
    from meshwright.run.bench import operators as bench_operators

    def of(axes: tuple[tuple[float, ...], ...], timed: list[TimedRepeats]) -> GridTable:
        spread = _sigma(timed)
        busy = tuple(t.busy for t in timed) if machine.kind == "cpu" and all(t.busy for t in timed) else ()
        return GridTable(axes=axes, seconds=tuple(t.seconds for t in timed), spread=spread, busy=busy)

    scope, element = machine.scope, DTYPE_BYTES[machine.dtypes[0]]
    operators = {
        name: of((bench_operators.sizes(name, element, scope),), timed) for name, timed in machine.operators.items()
    }
    gemm = (scope.gemm_m, scope.gemm_nk, scope.gemm_nk)
    return MeasuredTables(
        format_version=FORMAT_VERSION,
        source=f"{machine.name}, {machine.cores} {'GPUs' if machine.kind == 'cuda' else 'cores'}",
        gemm={dtype: of(gemm, timed) for dtype, timed in machine.gemm.items()},
        attention={dtype: of(scope.attention, timed) for dtype, timed in machine.attention.items()},
        attention_backward={dtype: of(scope.attention, timed) for dtype, timed in machine.attention_backward.items()},
        elementwise=of((scope.elementwise,), machine.elementwise),
        operators=operators | ({"optimizer": _by_update(machine, "optimizer")} if machine.passes else {}),
        collectives={name: of((scope.collective_bytes,), timed) for name, timed in machine.collectives.items()},
        staging={what: of((scope.staged_bytes,), timed) for what, timed in machine.staging.items()}
        | ({STEP: _by_update(machine, "between")} if machine.passes else {}),
        cores=machine.cores if machine.kind == "cpu" else 1,
        issued=machine.kind == "cpu",
        pace={name: float(f"{np.median(seconds):.4g}") for name, seconds in machine.pace.items()},
        made=f"{datetime.fromtimestamp(machine.made, UTC):%Y-%m-%d %H:%M} UTC" if machine.made else "",
    )


def _by_update(machine: Machine, part: str) -> GridTable:
    """Return the seconds of a part of a step outside its passes, the ``optimizer`` or what is ``between`` all tasks
    (the gradients' norm, parameters out of masters, the next batch), by the bytes that the update moves."""
    from meshwright.run import bench

    found: dict[float, list[TimedRepeats]] = {}
    for p in machine.passes:
        model, train = bench.model_of(p.layer), bench.train_of(p.layer, machine.dtypes[0])
        size = model.num_params * updated_bytes(bench.plan_of(p.layer), train)
        found.setdefault(size, []).append(getattr(p, part))
    ordered = sorted(found)
    return GridTable(
        axes=(tuple(ordered),),
        seconds=tuple(float(np.mean([t.seconds for t in found[size]])) for size in ordered),
        spread=_sigma([t for timed in found.values() for t in timed]),
    )


def _sigma(timed: list[TimedRepeats]) -> float:
    """Standard deviation of repeats, in the median: of a normal one, the interquartile range over 1.35."""
    return float(np.median([t.spread for t in timed])) / 1.35


def _unfused(measured: MeasuredTables) -> float:
    """Bytes that the executor's memory-bound operators move over what fused kernels would, in the median over what was
    timed: for operators that were not."""
    many = [
        seconds / measured.elementwise.at((size,))[0]
        for table in measured.operators.values()
        for size, seconds in zip(table.axes[0], table.seconds, strict=True)
    ]
    return max(1.0, float(f"{np.median(many):.3g}")) if many else 1.0


def device_toml(machine: Machine) -> str:
    """The device ``here``: a core or a GPU of this machine."""
    scope, peak = machine.scope, {}
    for dtype, timed in machine.gemm.items():
        shapes = [(m, n, k) for m in scope.gemm_m for n in scope.gemm_nk for k in scope.gemm_nk]
        peak[dtype] = max(2 * m * n * k / t.seconds for (m, n, k), t in zip(shapes, timed, strict=True))
    memory = max(size / t.seconds for size, t in zip(scope.elementwise, machine.elementwise, strict=True))
    links = [
        size / t.seconds
        for name, timed in machine.collectives.items()
        for size, t in zip(scope.collective_bytes, timed, strict=True)
        if name == "send 2"
    ]
    gpu = machine.kind == "cuda"
    share = machine.memory_bytes if gpu else machine.memory_bytes // max(1, machine.cores)
    host = {"node": "devices = 64\nnics = 1\nnic_gbit_s = 10.0\nhost_memory_bytes = %d\npcie_gb_s = 16.0\ncpus = %d"}
    lines = [
        "format_version = 1",
        f'name = "{NAME}"',
        f'title = "{machine.name} (this machine)"',
        f'vendor = "{"GPU" if gpu else "CPU"}"',
        'architecture = "as measured"',
        f"memory_bytes = {share}",
        # below 10 a file is taken to say TB/s; the table of kernels is what prices are read from
        f"memory_gb_s = {max(10.0, memory / 1e9):.4g}",
        "num_sms = 1",
        'scale_up = "loopback"',
        f"cores = {0 if gpu else machine.cores}",
        f"crowding = {machine.crowding:.3f}",
        f"comm_slowdown = {machine.comm_slowdown:.3f}",
        f'framework = "{FRAMEWORK}"',
        "",
        "[peak_flops]",
        *(f"{dtype} = {flops:.4g}" for dtype, flops in peak.items()),
        "",
        "[sources]",
        '"*" = "meshwright calibrate --here: micro-benchmarks on this machine"',
        "",
        "[efficiency]",
        "gemm = 1.0",
        "memory = 1.0",
        'source = "peaks are the best this machine was seen to do"',
        "",
        "[node]",
        *(host["node"] % (machine.memory_bytes, machine.cores)).split("\n"),
        *_drives(machine),
        "",
        "[node.sources]",
        '"*" = "the operating system, and free room on its drives; rates of drives are measured, the NIC is not"',
        "",
        "[[levels]]",
        'name = "loopback"',
        "arity = 64",
        f"gb_s = {max(links, default=1e9) / 1e9:.4g}",
        "latency_us = 20.0",
        'topology = "switch"',
        "",
        "[levels.sources]",
        '"*" = "meshwright calibrate --here: messages between two processes"',
        "",
        "[[levels]]",
        'name = "network"',
        "arity = 0",
        "gb_s = 1.25",
        "latency_us = 50.0",
        'topology = "switch"',
        "scale_out = true",
        "",
        "[levels.sources]",
        '"*" = "not measured: ten-gigabit Ethernet"',
    ]
    return "\n".join(lines) + "\n"


def _drives(machine: Machine) -> list[str]:
    """The lines of the node about its drives; none where they were not measured."""
    found = machine.drives
    if found is None:
        return []
    rates = {"nvme_gb_s": found.read_gb_s, "nvme_write_gb_s": found.write_gb_s}
    return [f"nvme_bytes = {found.free_bytes}", *(f"{name} = {max(0.01, rate):.4g}" for name, rate in rates.items())]


def fit(machine: Machine) -> MachineFit:
    """Host times of the executor on this machine."""
    cluster = _one(machine)
    link = MeasuredLink(tables(machine))
    start = Framework(
        name=FRAMEWORK,
        elementwise_passes=_unfused(link.tables),
        host_us_per_kernel=BEGUN_US if machine.kind == "cuda" else 0.0,
        host_us_per_backward_kernel=BEGUN_US if machine.kind == "cuda" else 0.0,
        host_us_per_collective=0.0,
        host_us_per_pass=0.0,
        kernel_slowdown=0.0,
    )
    seen = np.array([t.seconds for p in machine.passes for t in (p.forward, p.backward, p.step)])
    at = start
    for _ in range(ROUNDS):  # times are nearly linear in the constants
        base, slopes = _times(machine, cluster, link, at), []
        for name, step in FITTED.items():
            moved = msgspec.structs.replace(at, **{name: getattr(at, name) + step})
            slopes.append((_times(machine, cluster, link, moved) - base) / step)
        slopes = np.array(slopes).T
        origin = base - slopes @ np.array([getattr(at, name) for name in FITTED])
        found = _least_squares(slopes / seen[:, None], (seen - origin) / seen)
        constants = {name: float(f"{value:.4g}") for name, value in zip(FITTED, found.tolist(), strict=True)}
        at = msgspec.structs.replace(at, **constants)
    predicted = _times(machine, cluster, link, at)
    names = [f"{_describe(p)} {which}" for p in machine.passes for which in ("forward", "backward", "step")]
    rows = tuple(zip(names, seen.tolist(), predicted.tolist(), strict=True))
    error = _rms(predicted / seen - 1)
    errors = _left_out(slopes / seen[:, None], (seen - origin) / seen, len(machine.passes))
    left_out = None if errors is None else _rms(errors)
    apart = {} if errors is None else dict(zip(map(_describe, machine.passes), np.abs(errors).mean(1).tolist()))
    doubts = unseen("the time", "model", apart) if apart else []
    whole = msgspec.structs.replace(
        at,
        title="Meshwright's executor on this machine",
        activation_copies=_copies(machine, cluster, link, at),
        context_bytes=machine.base_bytes,
        communicator_bytes=0.0,
        step_sigma=round(max(LEAST_SIGMA, error if left_out is None else left_out), 3),
        source=f"fitted to {len(rows)} times of {len(machine.passes)} models here: {error:.1%} rms error in sample, "
        + ("no second model to leave out" if left_out is None else f"{left_out:.1%} with models left out")
        + "; context is what a rank holds beside its tensors; what exchanges cost the host is in their tables; "
        "communicators and slack of the allocator are not measured apart",
        flagged=bool(doubts),
    )
    drift = max((max(seconds) / min(seconds) - 1 for seconds in machine.pace.values()), default=0.0)
    more = {"drift": drift, "others": machine.others}
    return MachineFit(framework=whole, rows=rows, left_out=apart, doubts=tuple(doubts), **more)


def report(found: MachineFit) -> list[str]:
    """Return the fit as lines of text."""
    lines = [
        f"  {what:32s} {measured * 1e3:8.2f} ms measured {predicted * 1e3:8.2f} ms predicted "
        f"{predicted / measured - 1:+7.1%}"
        for what, measured, predicted in found.rows
    ]
    lines.append(f"  {found.framework.source}")
    if found.drift > DRIFT:
        lines.append(
            f"! the same product and copy took {found.drift:+.0%} in the slowest round, against the fastest: the "
            "machine's pace changed while it was measured, as where other work shares it. The profile is of the mean"
        )
    if found.others > DRIFT:
        lines.append(
            f"! other work had the cores for {found.others:.0%} of the time: kernels are of the processor's own time, "
            "but what exchanges wait for is longer than on a quiet machine, and so are exchanges in predictions"
        )
    return lines + [f"! not to be believed: {one}" for one in found.doubts]


def _left_out(slopes: np.ndarray, wanted: np.ndarray, models: int) -> np.ndarray | None:
    """Relative errors [models, times] of models that the constants were not fitted to, each left out in turn; rows are
    a model's together."""
    if models < 2:
        return None
    of, errors = np.arange(len(wanted)) // (len(wanted) // models), []
    for model in range(models):
        found = _least_squares(slopes[of != model], wanted[of != model])
        errors.append(slopes[of == model] @ found - wanted[of == model])
    return np.array(errors)


def _rms(errors: np.ndarray) -> float:
    return float(np.sqrt(np.mean(errors**2)))


def _describe(p: ModelTimes) -> str:
    shape = "llama" if p.layer.gated else "gpt"
    return f"{shape} {p.layer.layers} x h{p.layer.hidden} s{p.layer.seq} mb{p.layer.microbatch}"


def _copies(machine: Machine, cluster: Cluster, link: MeasuredLink, framework: Framework) -> float:
    """Return the bytes that the executor saves for a backward over those that lowering counts, in the median over the
    models, at least 1."""
    from meshwright.run import bench

    costs, found = Costs(msgspec.structs.replace(framework, activation_copies=1.0), (link,)), []
    for p in machine.passes:
        plan, train = bench.plan_of(p.layer), bench.train_of(p.layer, machine.dtypes[0])
        run = simulate(plan, bench.model_of(p.layer), cluster, train, costs)
        held = rank_memory(run, costs)[0].alive
        found.append(max(0.0, p.kept_bytes - held[LOGITS]) / held["activations"])
    return max(1.0, float(f"{np.median(found):.3g}"))


def _one(machine: Machine) -> Cluster:
    """One device alone."""
    text = device_toml(machine)
    from meshwright.spec import cluster_file
    from meshwright.spec import cluster_names as short
    from meshwright.spec.cluster import NodeType as Kind

    device = cluster_file.device_from(cluster_file.parse(text, NAME), NAME)
    kind = Kind(name=NAME, device=device, node=device.node, levels=device.levels)
    term = short.Term(name=NAME, first=1)
    return short.join(f"1x{NAME}", (short.island_from(term, kind, counts_machines=False),))


def _times(machine: Machine, cluster: Cluster, link: MeasuredLink, framework: Framework) -> np.ndarray:
    """Predicted seconds of every timed forward, backward and step."""
    from meshwright.run import bench

    out = []
    for p in machine.passes:
        model, train = bench.model_of(p.layer), bench.train_of(p.layer, machine.dtypes[0])
        run = simulate(bench.plan_of(p.layer), model, cluster, train, Costs(framework, (link,)))
        graph, seconds = run.lowered.graph, run.priced.durations
        for kind in ("F", "BW"):
            out.append(float(seconds[graph.cost_key[graph.kind == KIND[kind]]].sum()) / bench.MICROBATCHES)
        out.append(run.step_time_s)
    return np.array(out)


def _least_squares(slopes: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Non-negative x that minimises |slopes x - wanted|: columns that would go below zero are left out, the most
    negative first (what an active set does for a few columns)."""
    kept = list(range(slopes.shape[1]))
    while kept:
        found = np.linalg.lstsq(slopes[:, kept], wanted, rcond=None)[0]
        if (found >= 0).all():
            break
        kept.remove(kept[int(np.argmin(found))])
    out = np.zeros(slopes.shape[1])
    if kept:
        out[kept] = found
    return out


def write(machine: Machine, folder: Path, *, found: MachineFit | None = None, anyway: bool = False) -> MachineFit:
    """Write device, tables and framework profile; each file whole or not at all. `found` is their fit, made here where
    it is left out.

    Raises:
        Disbelieved: K016 where the fit cannot be believed, unless it is to be kept `anyway`: nothing is written.
        MeshwrightError: X104 when the folder cannot be written to.
    """
    found = found or fit(machine)
    if found.doubts and not anyway:
        worst = sorted(found.left_out.items(), key=lambda one: -one[1])[:WORST]
        raise Disbelieved(
            Diagnostic(
                code="K016",
                message=f"no profile: {'; '.join(found.doubts)}: "
                + ", ".join(f"{model} {error:.0%}" for model, error in worst)
                + (f"; the machine's pace changed by {found.drift:.0%} meanwhile" if found.drift > DRIFT else "")
                + ". What is measured of small models does not follow from what was measured of their kernels, as "
                "where other work took the cores from either",
                place=str(folder),
                help="measure again when the machine is quiet: meshwright calibrate --here; or keep this one, flagged "
                "in what it predicts: the same command with --anyway",
            )
        )
    folder.mkdir(parents=True, exist_ok=True)
    f = found.framework
    profile = "\n".join(
        [
            f"format_version = {FRAMEWORK_VERSION}",
            f'name = "{f.name}"',
            f'title = "{f.title}"',
            *(f"{name} = {getattr(f, name)}" for name in (*FITTED, *GIVEN)),
            f'source = "{f.source}"',
            f"flagged = {str(f.flagged).lower()}",
            "",
            "[defaults]",
            'params = "bf16"',
            'source = "the executor\'s own"',
        ]
    )
    write_bytes(folder / "here.json", msgspec.json.format(msgspec.json.encode(tables(machine)), indent=0))
    write_bytes(folder / "framework.toml", (profile + "\n").encode())
    write_bytes(folder / "here.toml", device_toml(machine).encode())
    forget_here()
    measured.forget()
    frameworks.cache_clear()
    return found


__all__ = ["Disbelieved", "MachineFit", "device_toml", "fit", "report", "tables", "write"]
