"""Facts: all that the structure of a step depends on. Plans with equal facts share one structure."""

from __future__ import annotations

import msgspec

from meshwright.errors import MeshwrightError
from meshwright.lower.stages import Stages
from meshwright.lower.units import Composition
from meshwright.plan.facets.offload import Offload
from meshwright.spec.workload import LAYERWISE
from meshwright.sync.fragments import DENSE, GRADIENTS, PARAMETERS, STEP, Weights, gradients_due, stored
from meshwright.sync.policy import read
from meshwright.sync.rounds import part_of, turns_of


class Facts(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """``counts`` are microbatches of each class of data-parallel slices. ``compositions`` and ``first_layers``
    (index in the model, 0 for none) have an entry a stage, ``losing`` marks stages that keep logits for the loss.
    ``alike``: all ranks run on equal devices. ``exchanges``: there are data-parallel ranks that take the same step;
    ``apart``: there are others, with which parameters are averaged if there are ``averages``, ``coded`` before they
    travel, applied ``delay`` steps later, and by ``parts``: the part of every segment of every stage, () where all
    are due at once, ``early`` within the backward; or between those that meet, who are others in each of so many
    ``turns``, 0 where all average; ``zero`` says what they shard; ``encoded``: gradients travel in a code;
    ``again``: parameters are gathered for every microbatch; ``scoped``: sums are scattered on, and updated parameters
    gathered, once a step; ``due``: gradients are exchanged after a pass, a round
    or a step. ``gathers_ahead``: parameters that are gathered once a step are so before each layer's first forward,
    and not after the update. ``tied``: a tied embedding's two copies are on two pipeline ranks; ``borrowed``: the
    stage that has another copy of the first one's table, -1 for none. ``several``: the model has several streams of
    tokens, so that messages differ. ``layerwise``: the optimizer waits for norms of whole matrices. ``frozen``:
    there are forwards only; ``ahead``: microbatches that the schedule is further ahead with its forwards than it
    would be by itself; ``forwards``: passes of each microbatch, where they are what is learnt by; ``offload``: what
    is moved to other tiers of memory, None where all is on the device; ``adversarial``: each microbatch is passed
    twice, and one of the next step as far as its inputs; ``taught``: the layers of the only stage that public text is
    passed through, with further heads behind the main one, None where there is none. ``direct``: the output's error
    enters every stage's backward, and no gradient comes back from stage to stage. ``params`` are the schedule's,
    besides sizes."""

    pp: int
    vpp: int
    schedule: str
    counts: tuple[int, ...]
    compositions: tuple[Composition, ...]
    first_layers: tuple[int, ...]
    losing: tuple[bool, ...]
    alike: bool
    exchanges: bool
    apart: bool
    averages: bool
    coded: bool
    zero: int
    again: bool
    scoped: bool
    copied: bool
    due: str
    overlap_dp: bool
    gathers_ahead: bool
    overlap_pp: bool
    tied: bool
    several: bool = False
    borrowed: int = -1
    frozen: bool = False
    encoded: bool = False
    layerwise: bool = False
    adversarial: bool = False
    delay: int = 0
    early: bool = False
    parts: tuple[tuple[int, ...], ...] = ()
    turns: int = 0
    ahead: int = 0
    forwards: int = 0
    offload: Offload | None = None
    taught: Composition | None = None
    direct: bool = False
    params: tuple[tuple[str, object], ...] = ()

    @property
    def scatters(self) -> bool:
        """Whether gradients are scattered while they accumulate."""
        return self.due != STEP


def facts_of(stages: Stages, params: dict[str, object] | None = None) -> Facts:
    """Read the facts of a plan off its stages; `params` go to the schedule's builder.

    Raises:
        MeshwrightError: Y003 where the policy leaves to a prediction what it has still to choose.
    """
    plan, model, mesh = stages.plan, stages.model, stages.mesh
    layout = plan.layout
    policy = read(plan.sync.policy)
    if policy.undecided:
        raise MeshwrightError.one(
            "Y003",
            f"sync={policy.text} does not say {policy.rule.opens[0]}",
            place=f"plan.sync.policy = {policy.text}",
            help="meshwright predict with this plan chooses, and prints the plan with it, such as "
            f"{policy.rule.opens[1]}",
        )
    together = policy.rule.together(plan)
    exchanges = together > 1
    synchronous = mesh.cluster.islands[0].device.synchronous
    return Facts(
        pp=layout.pp,
        vpp=plan.pipeline.vpp,
        schedule=plan.pipeline.schedule,
        counts=tuple(layout.shares[kind] for kind in mesh.kinds_of_slices)
        if layout.shares
        else (plan.num_microbatches(stages.train.global_batch),) * len(mesh.slices),
        compositions=stages.compositions,
        first_layers=tuple(stages.first_layer + (layers[0] if layers else 0) for layers in stages.layers),
        losing=tuple(stages.activations(c).logits > 0 for c in stages.compositions),
        alike=mesh.alike,
        exchanges=exchanges,
        apart=together < layout.dp * layout.cp,
        averages=together < layout.dp * layout.cp and bool(policy.fragments),
        coded=together < layout.dp * layout.cp and _coded(stages, PARAMETERS),
        delay=policy.delay,
        early=policy.early,
        parts=_parts(stages) if policy.parts > 1 else (),
        turns=turns_of(policy, layout.dp * layout.cp // together),
        zero=layout.zero if exchanges and not (stages.frozen and layout.zero < 3) else 0,
        again=layout.gathers_again,
        scoped=bool(layout.scopes) and exchanges,
        copied=layout.hpz > 0 and exchanges,
        due=STEP if stages.frozen else gradients_due(layout),
        # FSDP's gathers and reduces block the host until they are done. On a GPU kernels launched earlier hide that; a
        # device whose host computes (a CPU) has none, and nothing overlaps
        overlap_dp=plan.overlap.dp and not (layout.gathers_again and synchronous),
        gathers_ahead=plan.overlap.gathers_ahead or layout.gathers_again or (layout.zero == 3 and not plan.overlap.dp),
        overlap_pp=plan.overlap.pp,
        several=len(model.flows) > 1,
        borrowed=_borrowed(stages),
        tied=model.tied_embeddings and not stages.ends_meet and stages.train.lora is None and not stages.frozen,
        frozen=stages.frozen,
        forwards=stages.forwards,
        offload=plan.offload if plan.offload.any else None,
        layerwise=stages.train.optimizer in LAYERWISE,
        adversarial=bool(stages.train.adversarial),
        taught=stages.taught,
        direct=not plan.feedback.exact and not stages.frozen,
        encoded=exchanges
        and not stages.frozen
        and _coded(stages, GRADIENTS)
        and not all(u.plain for c in stages.compositions for u in c.units),
        params=tuple(sorted((params or {}).items())),
    )


def _borrowed(stages: Stages) -> int:
    """The stage with a table that is another part's, where the two are apart and trained."""
    model = stages.model
    if stages.plan.layout.pp == 1 or not any(table.borrows for table in model.tables) or stages.train.lora is not None:
        return -1
    for stage, layers in enumerate(stages.layers):
        if any(getattr(part, "borrows", False) for layer in layers for part in model.block(layer).before):
            return stage if stage else -1
    return -1


def _parts(stages: Stages) -> tuple[tuple[int, ...], ...]:
    """The part of each segment of each stage."""
    policy, count = read(stages.plan.sync.policy), stages.model.num_layers
    first = (layers[0] if layers else 0 for layers in stages.layers)
    return tuple(
        tuple(part_of(policy, layer + segment, count) for segment in range(len(c.segments)))
        for layer, c in zip(first, stages.compositions)
    )


def _coded(stages: Stages, what: str) -> bool:
    """Whether values of this kind are encoded, or changed by an outer step."""
    plan, policy = stages.plan, read(stages.plan.sync.policy)
    if policy.plain and not policy.stepped:
        return False
    some = policy.rule.fragments(plan, policy, Weights(0, 0, DENSE, 1, 1), stored(plan, stages.train))
    return any(not f.plain or f.outer is not None for f in some if f.what == what)
