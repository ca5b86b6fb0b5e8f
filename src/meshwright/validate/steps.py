"""Predicting measured training steps: one answer per row, made without looking at what was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from math import exp, hypot, log

import msgspec
import numpy as np

from meshwright.answer.flops import model_flops
from meshwright.answer.intervals import interval_draws
from meshwright.answer.prediction import RankMemory
from meshwright.answer.rank_memory import OVERHEAD, RESERVED, rank_memory, workspace_bytes
from meshwright.answer.risk import fit_probability
from meshwright.cost import Costs, Framework
from meshwright.cost.relatives import GENERATIONS, generation
from meshwright.cost.roofline import peak_flops
from meshwright.errors import MeshwrightError
from meshwright.plan import Plan, check
from meshwright.simulate.simulated import Simulated
from meshwright.simulate.step import simulate
from meshwright.spec.workload import DTYPE_BYTES
from meshwright.validate.cases import Case, case
from meshwright.validate.tables import number

#: Quantiles of the 80% interval.
INTERVAL = (0.1, 0.9)
#: Recompute modes tried, in this order, where none was recorded.
UNRECORDED = ("none", "selective")
#: What an assumed facet could have been instead: the interval covers these too. Full recompute is recorded by those who
#: use it.
ALTERNATIVES: dict[str, tuple[tuple[str, str, tuple[object, ...]], ...]] = {
    "recompute": (("memory", "recompute", UNRECORDED),),
    "attention": (("memory", "attention", ("flash", "unfused")),),
    "microbatch": (("pipeline", "microbatch", (1, 2, 4, 8)),),
    "vpp": (("pipeline", "vpp", (1, 2, 4)),),
    "sp": (("layout", "sp", (True, False)),),
}


#: What residuals are shown against: name, and the column of the table that holds it.
COLUMNS = {
    "tp": "tp",
    "pp": "pp",
    "dp": "dp",
    "ep": "ep",
    "microbatch": "micro_batch_seqs",
    "global batch": "global_batch_seqs",
    "seq": "seq_len",
    "hidden": "hidden",
    "layers": "layers",
    "num_gpus": "num_gpus",
    "hardware": "hardware",
    "framework": "framework",
}
VARIABLES = tuple(COLUMNS)


def variables(row: dict[str, str]) -> tuple[float | str, ...]:
    """A row's values of :data:`VARIABLES`; "" where it has none."""
    found = ((row.get(column) or "", number(row, column)) for column in COLUMNS.values())
    return tuple(text if value is None else value for text, value in found)


class StepAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The prediction for one row; where there is none, ``unsupported`` says why and the other fields are empty.

    ``allocated_bytes`` is what the framework's allocator holds in tensors at the peak, ``reserved_bytes`` with its
    slack; both of the rank whose memory the framework logs. ``trivial_s`` is 6 N D / (n peak 0.5) times the pipeline's
    bubble, of 8 N D with full recompute and 4 N D with a frozen base. ``model_flops`` are those of a step without
    recompute, ``p_fit`` is the probability of fitting.
    """

    id: str
    unsupported: str = ""
    plan: str = ""
    step_s: float = 0.0
    low_s: float = 0.0
    high_s: float = 0.0
    trivial_s: float = 0.0
    fits: bool = True
    p_fit: float = 1.0
    allocated_bytes: float = 0.0
    reserved_bytes: float = 0.0
    model_flops: float = 0.0
    assumed: tuple[str, ...] = ()


def answers(
    rows: Iterable[dict[str, str]],
    costs_of: Callable[[Framework], Costs],
    ask: Callable[[dict[str, str]], Case] = case,
) -> Iterator[tuple[dict[str, str], StepAnswer]]:
    """Each row with its answer; `costs_of` prices for a framework and is shared by all rows of one, `ask` makes a row a
    question."""
    costs_for = cache(costs_of)
    for row in rows:
        try:
            yield row, answer(row["id"], ask(row), costs_for)
        except MeshwrightError as error:
            first = error.diagnostics[0]
            yield row, StepAnswer(id=row["id"], unsupported=f"{first.code}: {first.message}")


def answer(row_id: str, asked: Case, costs_of: Callable[[Framework], Costs]) -> StepAnswer:
    """The prediction for one question; `costs_of` prices for a framework.

    Raises:
        MeshwrightError: when the plan is not legal.
    """
    found = check(asked.plan, asked.model, asked.cluster, asked.train)
    if found:
        raise MeshwrightError(found)
    asked, run, ranks, fits = _run(asked, costs_of(asked.framework))
    (logged,) = logging(ranks, asked.framework.defaults.logs)
    tensors = sum(size for name, size in logged.alive.items() if name not in OVERHEAD)
    low, high = _interval(run, asked, costs_of)
    return StepAnswer(
        id=row_id,
        plan=asked.plan.text(),
        step_s=run.step_time_s,
        low_s=low,
        high_s=high,
        trivial_s=trivial(asked),
        fits=fits,
        p_fit=min(fit_probability(r.needed_bytes, r.capacity_bytes, asked.framework.memory_sigma) for r in ranks),
        allocated_bytes=tensors,
        reserved_bytes=max(tensors, min(tensors + sum(logged.alive.get(c, 0.0) for c in RESERVED), room(asked))),
        model_flops=model_flops(asked.model, asked.train),
        assumed=asked.assumed,
    )


def room(asked: Case) -> float:
    """Bytes that can be reserved beside a process's context on the smallest of the devices: an allocator gives cached
    blocks back before it asks for more than there is."""
    least = min((island.device for island in asked.cluster.islands), key=lambda device: device.memory_bytes)
    return least.memory_bytes - asked.framework.context_bytes + workspace_bytes(asked.framework, least, asked.model)


def logging(ranks: tuple[RankMemory, ...], whose: str) -> tuple[RankMemory, ...]:
    """The ranks, in the order of the stages, among which the one is whose memory a framework's log states."""
    match whose:
        case "first":
            return ranks[:1]
        case "last":
            return ranks[-1:]
    return (max(ranks, key=lambda r: r.peak_bytes),)


def settled(asked: Case, costs: Costs) -> Case:
    """Return the question with the recompute mode that it is predicted under."""
    return _run(asked, costs)[0]


def _run(asked: Case, costs: Costs) -> tuple[Case, Simulated, tuple[RankMemory, ...], bool]:
    """The question simulated, and whether it fits. A recompute mode nobody recorded is none, or selective where only
    that fits: full recompute, which costs a third more, is recorded by those who use it. What does not fit so may have
    recomputed some modules more, which takes little time, or kept its state in 16 bits: it fits where the reading of
    the row that keeps the least does."""
    modes = UNRECORDED if "recompute" in asked.assumed else (asked.plan.memory.recompute,)
    for mode in modes:
        tried, run, ranks, fits = _under(asked, mode, costs)
        if fits:
            break
    if not fits and (least := _least(asked)) != asked.plan:
        fits = _under(msgspec.structs.replace(asked, plan=least), least.memory.recompute, costs)[-1]
    return tried, run, ranks, fits


def _least(asked: Case) -> Plan:
    """The plan that keeps the least of those that a row may mean: recompute that nobody recorded is full; ``selective``
    of software that nobody knows is by operators, the mode of that name that saves most; and state whose precision it
    does not say is in 16 bits, without masters."""
    memory, precision = asked.plan.memory, asked.plan.precision
    if "recompute" in asked.assumed:
        memory = msgspec.structs.replace(memory, recompute="full")
    elif "framework" in asked.assumed and memory.recompute == "selective":
        memory = msgspec.structs.replace(memory, recompute="operators")
    if "state" in asked.assumed:
        precision = msgspec.structs.replace(precision, grads="bf16", master="none", moments="bf16")
    return msgspec.structs.replace(asked.plan, memory=memory, precision=precision)


def _under(asked: Case, mode: str, costs: Costs) -> tuple[Case, Simulated, tuple[RankMemory, ...], bool]:
    """The question simulated under a recompute mode."""
    memory = msgspec.structs.replace(asked.plan.memory, recompute=mode)
    tried = msgspec.structs.replace(asked, plan=msgspec.structs.replace(asked.plan, memory=memory))
    run = simulate(tried.plan, tried.model, tried.cluster, tried.train, costs)
    ranks = rank_memory(run, costs)
    return tried, run, ranks, all(r.headroom_bytes >= 0 for r in ranks)


def _interval(run: Simulated, asked: Case, costs_of: Callable[[Framework], Costs]) -> tuple[float, float]:
    """The 80% interval, widened by what the assumed facets could have been: how far the times under their legal values
    reach is another error, independent of the prediction's own."""
    step = run.step_time_s
    low, high = (float(q) for q in np.quantile(interval_draws(run), INTERVAL))
    others = [step]
    unsure = [name for name in asked.assumed if name != "attention" or not _surely_fused(asked)]
    varied = (msgspec.structs.replace(asked, plan=plan) for name in unsure for plan in _variants(asked.plan, name))
    for other in varied:
        if not check(other.plan, other.model, other.cluster, other.train):
            costs = costs_of(other.framework)
            others.append(simulate(other.plan, other.model, other.cluster, other.train, costs).step_time_s)
    below = hypot(log(step / min(low, step)), log(step / min(others)))
    above = hypot(log(max(high, step) / step), log(max(others) / step))
    return step * exp(-below), step * exp(above)


def _surely_fused(asked: Case) -> bool:
    """Whether attention is one kernel whatever the software: operands of 8 bits, or a device of today, tell of stacks
    that came after such kernels."""
    newest = generation(asked.cluster.islands[0].device) > GENERATIONS.index("Hopper")
    return DTYPE_BYTES[asked.train.dtype] < 2 or newest


def _variants(plan: Plan, name: str) -> Iterator[Plan]:
    for facet, field, values in ALTERNATIVES.get(name, ()):
        current = getattr(plan, facet)
        for value in values:
            if value != getattr(current, field):
                changed = {field: value}
                if field == "vpp":
                    changed["schedule"] = "interleaved" if value > 1 else "1f1b"
                yield msgspec.structs.replace(plan, **{facet: msgspec.structs.replace(current, **changed)})


def trivial(asked: Case) -> float:
    """The three-line formula every planner has to beat: 6 N D at half the peak, stretched by the bubble; a forward more
    where all is recomputed, and no weight gradients of a frozen base."""
    layout, pipeline = asked.plan.layout, asked.plan.pipeline
    peak = peak_flops(asked.cluster.device_of(0), "fp32" if asked.train.dtype == "fp32" else "bf16")
    per_token = 6.0 + 2.0 * (asked.plan.memory.recompute == "full") - 2.0 * (asked.train.lora is not None)
    work = per_token * asked.model.active_params * asked.train.tokens_per_step
    count = max(1, asked.plan.num_microbatches(asked.train.global_batch))
    bubble = 1 + (layout.pp - 1) / (pipeline.vpp * count)
    return work / (layout.num_ranks * peak * 0.5) * bubble
