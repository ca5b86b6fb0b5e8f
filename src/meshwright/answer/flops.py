"""The FLOP convention: which operations of a step count, and what they are counted against."""

from __future__ import annotations

from meshwright import layers
from meshwright.answer.asked import repeated_flops
from meshwright.assign.draws import Drawn
from meshwright.cost.roofline import peak_flops
from meshwright.graph import KIND
from meshwright.layers.kind import Flops, Tokens
from meshwright.lower import Lowered
from meshwright.simulate.simulated import Simulated
from meshwright.spec.model import Model
from meshwright.spec.workload import Train


def step_flops(lowered: Lowered, drawn: Drawn | None = None, *, needed: bool = False) -> float:
    """The operations of one step of all pools as :func:`model_flops` counts them, or :func:`needed_flops`: a pool that
    is not trained runs forward alone."""
    stages = [part.stages for part in lowered.parts]
    stages += [lowered.filled] if lowered.filled is not None else []
    return sum(
        _flops(one.model, one.train, drawn, masked=needed, frozen=one.frozen) * max(1, one.forwards) for one in stages
    )


def model_flops(model: Model, train: Train, drawn: Drawn | None = None) -> float:
    """The operations of one step by the convention of published MFU (Chowdhery et al. 2204.02311, appendix B): 6 per
    parameter of the matrix products and token, and attention as if every pair of the sequence counted. Of `drawn`
    batches it is their mean, without padding."""
    return _flops(model, train, drawn, masked=False)


def needed_flops(model: Model, train: Train, drawn: Drawn | None = None) -> float:
    """The operations a step cannot do without: as :func:`model_flops`, but pairs that a causal mask hides are free."""
    return _flops(model, train, drawn, masked=True)


def _flops(model: Model, train: Train, drawn: Drawn | None, *, masked: bool, frozen: bool = False) -> float:
    """The sum over layers: forward once, backward twice; a frozen base has no weight gradients."""
    batch, rows, steps, found = train.microbatch(train.global_batch), train.global_batch, 1, Flops()
    if drawn is not None:
        batch, steps = drawn.documents(), drawn.num_draws
        rows *= steps
    for count, layer in model.all_layers:
        tokens = Tokens(model=model, batch=batch, rows=rows, stream=layer.stream, masked=masked and train.causal)
        one = layers.of(layer).flops(layer, tokens)
        share = 2 / 3 if getattr(layer, "locked", False) and not frozen else 1  # no gradients of its weights
        found = found + Flops(weights=count * one.weights * share, mixing=count * one.mixing)
    if frozen:
        return (float(found.weights) + found.mixing) / steps
    return (float(found.weights) * (2.0 if train.lora is not None else 3.0) + found.mixing * 3.0) / steps


def executed_ratio(run: Simulated) -> float:
    """The operations executed over operations without recompute, from the priced tasks; a reference that moves in a
    ``share`` of the steps takes a pass more in those, and a peer's backward computes its forward again."""
    keys = run.lowered.graph.cost_key
    flops, repeated = float(run.priced.flops[keys].sum()), float(run.priced.repeated[keys].sum())
    if run.swarm is not None and run.lowered.plan.passes.peers:
        return (flops + repeated_flops(run)) / flops
    if run.swarm is not None:
        again = float(run.priced.flops[keys[run.lowered.graph.kind == KIND["F"]]].sum())
        return (flops + again) / flops
    again = not run.lowered.several and (run.lowered.stages.train.adversarial or run.lowered.stages.taught is not None)
    if again:  # passes of moved or public text are besides
        count = run.lowered.plan.num_microbatches(run.lowered.stages.train.global_batch)
        extra = run.lowered.graph.attribute("microbatch") >= count
        repeated += float((run.priced.flops - run.priced.repeated)[keys[extra]].sum())
    return flops * (1 + run.share) / (flops - repeated) if flops > repeated else 1.0


def dense_peak(lowered: Lowered, *, computing: bool = False) -> float:
    """The dense peak of all devices: at 16 bits (what MFU is quoted against, also below 16 bits), or at the compute
    precision when `computing`."""
    return sum(_peak(part, computing=computing) for part in lowered.parts)


def _peak(lowered: Lowered, *, computing: bool) -> float:
    plan, train = lowered.plan, lowered.stages.train
    dtype = plan.precision.compute or train.dtype
    if not computing and dtype != "fp32":
        dtype = "bf16"
    per_slice = plan.layout.tp * plan.layout.cp
    beside = range(plan.layout.num_ranks, plan.num_ranks)
    return sum(peak_flops(lowered.mesh.cluster.island_of(rank).device, dtype) for rank in beside) + sum(
        peak_flops(device, dtype) * per_slice * slice_.multiplicity
        for slice_ in lowered.mesh.slices
        for device in slice_.devices
    )
