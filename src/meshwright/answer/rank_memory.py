"""Peak memory of each rank: the tensors of the plan, and the memory that a framework and its libraries add.

The plan's tensors come from lowering and from the timed graph. A framework keeps more of them (``activation_copies``)
and buffers of its own beside them; its allocator has memory that no tensor uses.
"""

from __future__ import annotations

from meshwright.answer.prediction import GIVEN_BACK, RankMemory
from meshwright.cost import Costs, Framework
from meshwright.cost.relatives import GENERATIONS, generation
from meshwright.lower import Lowered
from meshwright.lower.stages import Stages
from meshwright.lower.state import STORED_BYTES, unscattered_bytes
from meshwright.lower.units import Unit
from meshwright.plan import Plan
from meshwright.simulate import memory
from meshwright.simulate.simulated import Simulated
from meshwright.spec.hardware import Device
from meshwright.spec.model import Model
from meshwright.work import Gemm, GroupedGemm

#: What an allocator has reserved beside its tensors.
RESERVED = ("allocator slack", GIVEN_BACK)
#: What a rank holds besides the tensors that the plan and the framework put there.
OVERHEAD = (*RESERVED, "communication buffers", "framework context")
#: Workspaces of cuBLAS that lie among a framework's tensors, from Hopper on and before: torch's (Hopper's alone are
#: larger; ``CublasHandlePool.cpp``), and each of Transformer Engine's (``module/base.py``), which has one for every
#: stream that experts' products run on and one otherwise.
TORCH_WORKSPACE_BYTES, ENGINE_WORKSPACE_BYTES = (32 * 2**20, 8320 * 2**10), (32 * 2**20, 4 * 2**20)
ENGINE_STREAMS = 4


def rank_memory(run: Simulated, costs: Costs) -> tuple[RankMemory, ...]:
    """Peak memory of every rank class: constant state, activations at the worst instant, and what the framework
    and the communication library hold."""
    return tuple(one for part in run.lowered.parts for one in _of_pool(run, part, costs))


def spare_bytes(run: Simulated, costs: Costs) -> float:
    """Return the bytes that the rank class with the least has left of its device's memory; negative where it lacks
    some."""
    return min(one.headroom_bytes for one in rank_memory(run, costs))


def fuller(some: tuple[RankMemory, ...], others: tuple[RankMemory, ...]) -> tuple[RankMemory, ...]:
    """Return of each rank class the memory that needs more."""
    return tuple(max(pair, key=lambda one: one.needed_bytes) for pair in zip(some, others, strict=True))


def _of_pool(run: Simulated, lowered: Lowered, costs: Costs) -> tuple[RankMemory, ...]:
    """The peak memory of the rank classes of one pool."""
    graph, framework, plan = lowered.graph, costs.framework, lowered.plan
    layout, copies = plan.layout, dynamic_copies(costs, plan)
    count = len(graph.streams.ranks) * (2 if plan.offload.activations else 1)  # what hosts hold is beside the ranks'
    at, alive = memory.peaks(graph, run.start_s, run.end_s, count, copies, run.memory_order)
    groups = sum(n > 1 for n in (layout.tp, layout.pp, layout.dp * layout.cp, plan.experts.ep)) + (layout.cp > 1)
    devices = [device for slice_ in lowered.mesh.slices for device in slice_.devices]
    leads = lead(lowered) if framework.ahead_layers else [(0.0, 0.0)] * layout.pp
    ahead = [each * min(framework.ahead_layers, layers) for each, layers in leads]
    out = []
    for rank, static in enumerate(lowered.static_bytes):
        parts = _by_matrix(lowered, static) if framework.defaults.gathers == "matrix" else {}
        known = graph.streams.ranks[lowered.first + rank]
        held = static | _buffers(lowered, costs, plan, rank) | parts
        if graph.memory is not None:
            held |= {c: float(alive[lowered.first + rank, i]) for i, c in enumerate(graph.memory.categories)}
        slack = framework.allocator_slack * sum(held.values())
        # what a process holds at first includes the workspaces, which are shown with the tensors they lie among
        workspaces = workspace_bytes(framework, devices[rank], lowered.stages.model)
        fixed = groups * framework.communicator_bytes, framework.context_bytes - workspaces
        capacity = float(devices[rank].memory_bytes)
        held |= {"library workspaces": workspaces} if workspaces else {}
        left = capacity - sum(held.values()) - slack - sum(fixed)
        held |= dict(zip(OVERHEAD, (slack, max(0.0, min(ahead[rank % layout.pp], left)), *fixed)))
        out.append(
            RankMemory(
                rank=known.name,
                multiplicity=known.multiplicity,
                capacity_bytes=capacity,
                peak_bytes=sum(held.values()),
                at_s=float(at[lowered.first + rank]),
                alive={c: size for c, size in held.items() if size or c != GIVEN_BACK},
            )
        )
    return tuple(out)


def workspace_bytes(framework: Framework, device: Device, model: Model) -> float:
    """Return the bytes of the matrix library's workspaces that are counted among a framework's tensors, at most what
    its context holds; 0 where its profile does not say whose there are, or the library is not cuBLAS."""
    usual, newer = framework.defaults.workspaces, generation(device) - GENERATIONS.index("Hopper")
    if not usual or device.vendor != "NVIDIA":
        return 0.0
    found = TORCH_WORKSPACE_BYTES[newer != 0]
    if usual == "engine":
        found += ENGINE_WORKSPACE_BYTES[newer < 0] * (ENGINE_STREAMS if model.mixtures else 1)
    return min(float(found), framework.context_bytes)


def dynamic_copies(costs: Costs, plan: Plan) -> dict[str, float]:
    """Return the factors of a framework's activation memory over that of fused kernels, by category.

    They multiply the activations saved for backward or, under full recompute, where only a layer's input is saved, the
    workspace of the layer that is recomputed. Logits saved by the loss are known exactly and not multiplied."""
    copies = costs.framework.activation_copies
    full = plan.memory.recompute == "full" and not plan.memory.layers
    return {"activations": 1.0 if full else copies, "workspace": copies if full else 1.0}


def _buffers(lowered: Lowered, costs: Costs, plan: Plan, rank: int) -> dict[str, float]:
    """Bytes of buffers that a framework keeps, counted as if for the whole step.

    Torch's DistributedDataParallel sums gradients over replicas in buckets of the parameters' precision, beside those
    that accumulate. Without replicas a backward's own gradients stay to its end where they are added to sums in another
    precision, and peaks are in backwards. Some frameworks gather the inputs of tensor-parallel products into buffers
    that stay.
    """
    out, usual, layout = {}, costs.framework.defaults, plan.layout
    c = lowered.stages.context()
    of = STORED_BYTES[plan.precision.grads]
    if usual.bucket_bytes and layout.zero < 2 and (layout.dp * layout.cp > 1 or of != c.element):
        out["gradient buckets"] = lowered.static_bytes[rank]["gradients"] / of * c.element
    if usual.gather_buffers and c.sp:
        out["gather buffers"] = usual.gather_buffers * c.tokens * c.model.hidden * c.element
    return out


def _by_matrix(lowered: Lowered, static: dict[str, float]) -> dict[str, float]:
    """Bytes of what ZeRO-3 has whole where each product gathers its own matrix: two of them, the one in use and the one
    that is fetched next, and the gradient of one. Nothing where a stage stays gathered, as under a pipeline."""
    stages, plan = lowered.stages, lowered.plan
    if plan.layout.zero < 3 or plan.layout.pp > 1 or plan.offload.any:
        return {}
    (composition,) = set(stages.compositions)
    layers = [[matrix for unit in units for matrix in _matrices(stages, unit)] for units in composition.segments]
    gathered = max(sum(sorted(matrices)[-2:]) for matrices in layers)
    whole = max(unscattered_bytes(plan, stages.total_params(units)) for units in composition.segments)
    part = max(max(matrices) for matrices in layers) * STORED_BYTES[plan.precision.grads]
    element = static["gathered parameters"] and stages.context().element
    return {
        "gathered parameters": min(static["gathered parameters"], gathered * element),
        "gradients": static["gradients"] - max(0.0, whole - part),
    }


def _matrices(stages: Stages, unit: Unit) -> list[float]:
    """Elements of the trained matrices of a unit on one rank, all parameters of one that multiplies by none."""
    works = [piece.weight for piece in stages.pieces(unit.kind)]
    found = [float(w.m * w.n * w.batch) for w in works if isinstance(w, Gemm)]
    found += [float(w.groups * w.n * w.k) for w in works if isinstance(w, GroupedGemm)]
    params = stages.params(unit)
    return found or [params.dense + params.expert]


def lead(lowered: Lowered) -> list[tuple[float, float]]:
    """Return the launch-ahead memory of each pipeline rank: (bytes for each layer that the host is ahead of its device,
    the most layers that it can be ahead).

    It is memory of tensors that the host has freed and a collective on another stream still has to use, which the
    allocator cannot hand out until then (torch's ``record_stream``): in each layer two gathered tensors of full width
    and two yet to be summed with sequence parallelism, two summed ones without. From a step's second microbatch on the
    host can be ahead by all of a rank's layers. In a step of one microbatch memory is the fullest where the backward
    begins, when what is in flight is of the forward: half as many tensors as in both.
    """
    stages, c = lowered.stages, lowered.stages.context()
    pp = stages.plan.layout.pp
    if c.tp == 1:
        return [(0.0, 0.0)] * pp
    share = 1.0 if stages.plan.num_microbatches(stages.train.global_batch) > 1 else 0.5
    held = [0] * pp
    for stage, ranks in enumerate(lowered.actions.stage_ranks):
        for rank in ranks:
            held[rank] += len(stages.layers[stage])
    each = (4 if c.sp else 2) * c.tokens * c.model.hidden * c.element
    return [(float(each), count * share) for count in held]
