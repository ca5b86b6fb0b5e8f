"""Predict how long a diffusion model takes to make images under a plan: check, lower, time, and say what is assumed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from meshwright.answer.feature_maps import convolution_assumptions
from meshwright.answer.metrics import Metric
from meshwright.answer.prediction import Assumption, RankMemory
from meshwright.answer.whole_answer import limits, plain, rank_memory, timed
from meshwright.cost import Costs, load_framework, standard
from meshwright.errors import Diagnostic, MeshwrightError
from meshwright.lower.denoising import DenoisingStep, denoising_step, ensemble_step
from meshwright.plan import Plan, check
from meshwright.plan.facet import wrong
from meshwright.plan.facets.denoising import PATCHES, STAGES, Denoising
from meshwright.quantity import gibibytes, seconds
from meshwright.simulate.denoise import DenoisedTimes, denoised
from meshwright.spec.cluster import Cluster
from meshwright.spec.denoise import Denoise
from meshwright.spec.diffusion import NoisyClasses
from meshwright.spec.model import Model


class DenoisingPrediction(msgspec.Struct, frozen=True, kw_only=True):
    """Images made under a plan: ``latency`` until all are there, ``images_per_s``, and seconds of a step. ``memory`` is
    that of every pipeline rank; ``cautions`` should be known before the answer is believed."""

    model: Model
    cluster: Cluster
    denoise: Denoise
    plan: Plan
    times: DenoisedTimes
    latency: Metric
    memory: tuple[RankMemory, ...]
    assumptions: tuple[Assumption, ...]
    cautions: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether no rank holds more than its device has."""
        return all(rank.headroom_bytes >= 0 for rank in self.memory)

    @property
    def images_per_s(self) -> float:
        """Images made in a second, one batch after another."""
        return self.denoise.images / self.latency.value

    @property
    def peak_memory_bytes(self) -> float:
        """Bytes of the fullest rank."""
        return max(rank.peak_bytes for rank in self.memory)

    @property
    def exposed_s(self) -> float:
        """Seconds of a step in the steady state in which the busiest rank waits."""
        return max(0.0, self.times.step_s - self.times.computed_s)

    def to_json(self) -> dict[str, Any]:
        """Return the answer as plain values."""
        return {
            **plain(self),
            **limits("latency", self.latency),
            "denoise": self.denoise.text(),
            "images_per_s": self.images_per_s,
            "step_s": self.times.step_s,
            "waiting_step_s": self.times.waiting_s,
            "exposed_s": self.exposed_s,
            "exchanged_bytes": self.times.sent_bytes,
            "mixed_bytes": self.times.mixed_bytes,
        }

    def __str__(self) -> str:
        return f"{self.denoise.text()} in {seconds(self.latency.value)}, {gibibytes(self.peak_memory_bytes)} a device"


def predict_denoising(
    model: Model, cluster: Cluster, denoise: Denoise, plan: Plan, *, costs: Costs | None = None
) -> DenoisingPrediction:
    """Predict the steps of images that are made together.

    Raises:
        MeshwrightError: every violation at once: W019 a model that makes no images or a size that does not divide, and
            the P codes of the plan.
    """
    plan = plan if plan.several else plan.on(cluster.num_devices)
    if found := denoising_violations(model, cluster, denoise, plan):
        raise MeshwrightError(found)
    train = denoise.train(model, plan.layout.dp)
    rows = train.global_batch // plan.layout.dp
    plan = msgspec.structs.replace(plan, pipeline=msgspec.structs.replace(plan.pipeline, microbatch=rows))
    costs = costs or standard(load_framework("fused"))
    if denoise.experts > 1:
        step = ensemble_step(plan, model, cluster, denoise)
    else:
        step = denoising_step(plan, model, cluster, train)
    stale = plan.denoising.stale
    times = denoised(step, costs, steps=denoise.steps, warmup=denoise.warmup, stale=stale)
    return DenoisingPrediction(
        model=model,
        cluster=cluster,
        denoise=denoise,
        plan=plan,
        times=times,
        latency=timed(times.total_s, times.sigma, costs),
        memory=_memory(step, plan, cluster),
        assumptions=(
            *_assumptions(denoise, model, stale),
            *_of_experts(denoise),
            *convolution_assumptions(model, train, plan),
        ),
        cautions=_cautions(plan, denoise),
    )


def denoising_violations(model: Model, cluster: Cluster, denoise: Denoise, plan: Plan) -> list[Diagnostic]:
    """Return all violations of a plan with ``dp`` filled in.

    Raises:
        MeshwrightError: W019 a model that makes no images, or a size that does not divide.
    """
    if plan.several:
        return [wrong("P076", "images are made by a plan of one pool", "pools", "say one pool")]
    if isinstance(model.head, NoisyClasses):
        message, help = f"{model.name} tells the class of noisy images", "name the model whose noise it was trained on"
        return [Diagnostic(code="W019", message=message, place=f"model {model.name}", help=help)]
    layout, found, train = plan.layout, [], denoise.train(model, plan.layout.dp)
    if denoise.experts > 1:
        found += _unmixed(plan, denoise)
        denoise.router_model(model)
    if train.global_batch % layout.dp:
        message = f"dp={layout.dp} replicas do not share the {train.global_batch} rows of a step alike"
        found.append(wrong("P076", message, f"layout.dp = {layout.dp}", f"say a dp that divides {train.global_batch}"))
    if layout.zero or plan.offload.any or plan.pipeline.vpp > 1 or plan.pipeline.fill:
        message = "zero, offload, several chunks a rank and frozen layers are of training"
        found.append(wrong("P076", message, "layout", "drop them"))
    rows, said = max(1, train.global_batch // layout.dp), plan.pipeline.microbatch
    if said not in (1, rows):
        message = f"mb{said}: the {rows} rows of a replica pass each step together"
        help = f"drop mb{said}; images= of --denoise says how many are made at a time"
        found.append(wrong("P076", message, f"pipeline.microbatch = {said}", help))
    return found or check(plan, model, cluster, train)


def _unmixed(plan: Plan, denoise: Denoise) -> Iterator[Diagnostic]:
    """Why a plan does not share out the experts of an ensemble."""
    layout, said = plan.layout, plan.denoising
    for axis in ("tp", "cp", "pp"):
        if (size := getattr(layout, axis)) > 1:
            message = f"{axis}={size}: an expert of an ensemble is whole on one rank"
            yield wrong("P076", message, f"layout.{axis} = {size}", f"drop {axis}: replicas have the experts, dp alone")
    if denoise.experts % layout.dp:
        message = f"dp={layout.dp} replicas do not share the {denoise.experts} experts alike"
        near = max(n for n in range(1, layout.dp + 1) if denoise.experts % n == 0)
        yield wrong("P076", message, f"layout.dp = {layout.dp}", f"say dp{near} on as many devices, or other experts=")
    if said != Denoising():
        message = "stale= and halo= are about ranks that share an image, and an expert has one"
        yield wrong("P076", message, "denoising", "drop them, or experts=")


def _memory(step: DenoisingStep, plan: Plan, cluster: Cluster) -> tuple[RankMemory, ...]:
    copies, found = plan.layout.num_ranks // len(step.weights), []
    for rank, weights in enumerate(step.weights):
        held = {"parameters": weights, "activations": step.working, "stale keys and values": step.kept}
        found.append(rank_memory(f"rank {rank}", copies, held, cluster))
    return tuple(found)


def _assumptions(denoise: Denoise, model: Model, stale: str) -> tuple[Assumption, ...]:
    tokens = denoise.tokens(model)
    out = [
        Assumption("latents", f"{tokens:,} tokens an image", "8 pixels of a side to a latent (2112.10752)"),
        Assumption("beside the steps", "nothing", "encoders of text and the decoder of latents are not counted", True),
        Assumption("sampler", "no time", "a few passes over latents, which are small beside a step's layers"),
    ]
    if stale in (PATCHES, STAGES):
        out.append(Assumption("warm-up", f"{denoise.warmup} steps wait for every exchange", "workload word warmup="))
    return tuple(out)


def _of_experts(denoise: Denoise) -> Iterator[Assumption]:
    """Yield the assumptions of an ensemble."""
    if denoise.experts == 1:
        return
    if not denoise.router:
        yield Assumption("router", "no time", "workload word router= names a model that is priced", True)
    if not denoise.whole:
        yield Assumption("images of an expert", "as many as of another", "which are whose is known step by step", True)


def _cautions(plan: Plan, denoise: Denoise) -> tuple[str, ...]:
    said = plan.denoising
    out = []
    if not denoise.whole:
        out.append(
            f"active={denoise.active} is approximate: an image passes the experts that the router weighs most, "
            f"{denoise.active} of {denoise.experts}"
        )
    if said.stale == PATCHES:
        out.append("stale=patches is approximate: other ranks' patches are attended to as they were a step before")
    if said.stale == STAGES:
        out.append("stale=stages is approximate: every stage reads what the one before it found a step earlier")
    if said.halo:
        out.append(f"halo={said.halo:g} is approximate: a patch attends to a part of its neighbours and to no others")
    return tuple(out)
