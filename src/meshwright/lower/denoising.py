"""A denoising step as forward passes: what every pipeline rank computes, and what it passes on.

A step passes all layers once, and what the last of them finds is what the first one begins the next step with.
"""

from __future__ import annotations

import msgspec

from meshwright.lower.bind import Binder
from meshwright.lower.place import Mesh
from meshwright.lower.program import Program
from meshwright.lower.roles import PassRole
from meshwright.lower.stages import Stages
from meshwright.plan import Plan
from meshwright.spec.cluster import Cluster
from meshwright.spec.denoise import Denoise
from meshwright.spec.diffusion import Latents
from meshwright.spec.model import Model
from meshwright.spec.unet import LatentStem
from meshwright.spec.workload import Train


class DenoisingStep(msgspec.Struct, frozen=True, kw_only=True):
    """The passes of one step by pipeline rank, the message from each to the next, and the one by which the first has
    what the last one found (None where they are one). ``weights`` are the bytes of each rank's, ``working`` those that
    its widest layer leaves behind while it is computed, ``kept`` those of other ranks' keys and values. Of an ensemble
    a rank passes so many experts (``repeats``) one after the other, behind the ``router``, and ranks sum what they have
    found by ``mixing``, ``mixed_bytes`` of a rank; None where one rank has all."""

    passes: tuple[Program, ...]
    onward: tuple[Program, ...]
    back: Program | None
    weights: tuple[float, ...]
    working: float
    kept: float
    repeats: int = 1
    router: Program | None = None
    mixing: Program | None = None
    mixed_bytes: float = 0.0

    def runs(self, rank: int) -> tuple[Program, ...]:
        """The passes of a rank in a step, in their order."""
        return (*((self.router,) if self.router is not None else ()), *(self.passes[rank],) * self.repeats)


def ensemble_step(plan: Plan, model: Model, cluster: Cluster, denoise: Denoise) -> DenoisingStep:
    """Lower one step of experts that are dealt out to the replicas of a legal plan, each whole on its rank.

    The noise of an image is found with its guidance on every rank, and summed over ranks in 32 bits. Images go evenly
    to the experts that are active.
    """
    count, images = denoise.passes(plan.layout.dp)
    some = msgspec.structs.replace(denoise, images=images)
    step = denoising_step(plan, model, cluster, some.train(model, plan.layout.dp))
    held, router, aside = denoise.experts // plan.layout.dp, denoise.router_model(model), 0.0
    if router is not None:
        told = msgspec.structs.replace(denoise, guidance=False)
        first = denoising_step(plan, router, cluster, told.train(router, plan.layout.dp))
        router, aside = first.passes[0], first.weights[0]
        step = msgspec.structs.replace(step, working=max(step.working, first.working))
    mixing, size = None, 0.0
    if plan.layout.dp > 1:
        size = 4.0 * denoise.images * denoise.tokens(model) * model.embedding.inner
        mesh = Mesh(plan, cluster)
        stages = Stages(plan, model, denoise.train(model, plan.layout.dp), mesh, frozen=True)
        mixing = Binder(stages, mesh).moving((("all_reduce", size, stages.context().dp_group),))
    weights = tuple(own * held + aside for own in step.weights)
    return msgspec.structs.replace(step, repeats=count, router=router, mixing=mixing, mixed_bytes=size, weights=weights)


def denoising_step(plan: Plan, model: Model, cluster: Cluster, train: Train) -> DenoisingStep:
    """Lower one step of a legal plan with ``dp`` filled in, whose replicas share the rows of the batch."""
    rows = -(-train.global_batch // plan.layout.dp)
    plan = msgspec.structs.replace(plan, pipeline=msgspec.structs.replace(plan.pipeline, microbatch=rows))
    mesh = Mesh(plan, cluster)
    stages = Stages(plan, model, train, mesh, frozen=True)
    binder, pp = Binder(stages, mesh), plan.layout.pp
    passes = tuple(binder(PassRole("F", c.units, 0, 0 if mesh.alike else r)) for r, c in enumerate(stages.compositions))
    starts = mesh.slices[0].starts
    behind = [layers[0] if layers else 0 for layers in stages.layers[1:]]
    onward = tuple(binder.message(mesh.pair(starts[r], starts[r + 1]), behind[r]) for r in range(pp - 1))
    c, e = stages.context(), stages.context().element
    back = None
    if pp > 1:
        assert isinstance(model.embedding, Latents | LatentStem)
        size = c.tokens * model.embedding.inner * e
        back = binder.moving((("send", size, mesh.pair(starts[-1], starts[0])),))
    held = [stages.total_params(composition.units) for composition in stages.compositions]
    units = {unit for composition in stages.compositions for unit in composition.units}
    working = max(found.saved + found.working for found in map(stages.unit_activations, units)) + _waiting(stages)
    return DenoisingStep(
        passes=passes,
        onward=onward,
        back=back,
        weights=tuple((params.dense + params.expert) * e for params in held),
        working=working,
        kept=_kept(stages) if plan.denoising.stale == "patches" else 0.0,
    )


def _waiting(stages: Stages) -> float:
    """Bytes of maps that wait for layers behind the next, at the border where they are most; of one stream none."""
    model, c = stages.model, stages.context()
    if len(model.flows) == 1:
        return 0.0

    def sizes(border: int) -> list[float]:
        return [c.at(s).tokens * c.at(s).hidden * c.element for s in model.carried(border)]

    return max(sum(each) - max(each, default=0.0) for each in map(sizes, range(1, model.num_layers)))


def _kept(stages: Stages) -> float:
    """Bytes of keys and values of all patches in the layers of the fullest rank, of a step before."""
    plan, c = stages.plan, stages.context()
    share = 1.0
    if plan.denoising.halo:
        share = (1.0 + min(2, plan.layout.cp - 1) * plan.denoising.halo) / plan.layout.cp
    most = 0.0
    for held in stages.layers:
        blocks = [stages.model.block(layer) for layer in held]
        own = [(b.attention, c.at(b.stream).tokens) for b in blocks if b.attention is not None]
        width = sum(a.kv_heads * (a.head_dim + a.v_head_dim) * tokens for a, tokens in own)
        most = max(most, width / c.tp * plan.layout.cp * share * c.element)
    return most
