"""Passes: who does a microbatch's passes through the stages of a pipeline, fixed ranks or peers that are chosen as it
goes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING

import msgspec

from meshwright.errors import Diagnostic, MeshwrightError, nearest
from meshwright.plan.facet import EXCHANGE, KEYED, STRUCTURE, Facet, Field, Form, number, unrun, wrong
from meshwright.spec import naming
from meshwright.spec.serve_values import duration_s
from meshwright.sync.codecs import codec
from meshwright.sync.record import NO_CODEC, USUAL

if TYPE_CHECKING:
    from meshwright.plan.record import Plan
    from meshwright.spec.cluster import Cluster
    from meshwright.spec.model import Model
    from meshwright.spec.workload import Train

FIXED, SWARM = "fixed", "swarm"
#: Seconds between two looks at the balance of stages where nothing is said: those of the paper.
REBALANCE_S = 300.0
#: Microbatches of a peer that are under way at a time where nothing is said, on average.
UNDER_WAY = 2
MOST_TRAINERS = 100_000


class SwarmWords(msgspec.Struct, frozen=True, kw_only=True):
    """The options of ``passes=swarm``: seconds between looks at the balance of stages (``rebalance_s``, 0: never), the
    codec of what goes between stages, and microbatches that are under way at a time (``trainers``; 0:
    :data:`UNDER_WAY` for each peer)."""

    rebalance_s: float = REBALANCE_S
    code: str = NO_CODEC
    trainers: int = 0

    @property
    def text(self) -> str:
        """The words that :func:`read` reads."""
        usual = SwarmWords()
        said = [f"code={self.code}"] if self.code != usual.code else []
        said += [f"rebalance={self.rebalance_s:g}s"] if self.rebalance_s != usual.rebalance_s else []
        said += [f"trainers={self.trainers}"] if self.trainers != usual.trainers else []
        return SWARM + (":" + ",".join(said) if said else "")


class Passes(msgspec.Struct, frozen=True, kw_only=True):
    """The passes facet of a plan: ``policy`` is ``fixed`` (rank r of a stage sends to rank r of the next), or ``swarm``
    with its options: stages are pools of peers, of which one is chosen for every pass."""

    policy: str = FIXED

    @property
    def swarm(self) -> SwarmWords | None:
        """The options of a swarm; None where ranks are fixed."""
        return None if self.policy == FIXED else read(self.policy)


@cache
def read(text: str) -> SwarmWords:
    """The options that words of ``passes=swarm`` say.

    Raises:
        MeshwrightError: P077 for words that are none; Y001 for a codec that there is not.
    """
    name, colon, rest = text.partition(":")
    if name != SWARM or (colon and not rest):
        help = f"{nearest(name, [FIXED, SWARM])} or swarm:rebalance=60s,code=dynamic8,trainers=16"
        raise MeshwrightError.one("P077", f"passes={text} is unknown", help=help)
    found: dict[str, object] = {}
    for word in rest.split(",") if rest else ():
        key, _, value = word.partition("=")
        field, given, wanted = _option(key, value)
        if given is None or field in found:
            why = f"{key} is said twice" if field in found else f"{word!r} is not {wanted}"
            help = "rebalance=60s (0s: never), code=dynamic8, trainers=16"
            raise MeshwrightError.one("P077", f"passes={text}: {why}", help=help)
        found[field] = given
    return SwarmWords(**found)


def _option(key: str, value: str) -> tuple[str, object, str]:
    """The field that an option says, its value (None for a wrong one), and what is wanted."""
    if key == "rebalance":
        return "rebalance_s", duration_s(value), "rebalance=60s, a duration"
    if key == "code":
        found = codec(value)
        plain = found.factors is None and not found.drawn and not found.feedback
        return "code", found.name if plain else None, "a code of each message by itself, such as code=dynamic8"
    if key == "trainers":
        count = number(value)
        inside = count is not None and 1 <= count <= MOST_TRAINERS
        return "trainers", count if inside else None, f"trainers=16, at most {MOST_TRAINERS:,}"
    return key, None, "an option"


def _policy(text: str) -> str:
    return FIXED if text == FIXED else read(text).text


def _rules(plan: Plan, model: Model, cluster: Cluster, train: Train) -> Iterator[Diagnostic]:
    """Yield what a swarm of peers does not go with: each peer is one device that holds one whole stage."""
    if plan.passes.policy == FIXED:
        return
    layout, memory, place = plan.layout, plan.memory, f"passes.policy = {plan.passes.policy}"

    def other(holds: bool, why: str, help: str) -> Iterator[Diagnostic]:
        if holds:
            yield wrong("P077", f"passes=swarm: {why}", place, help)

    yield from other(layout.pp < 2, f"pp{layout.pp} has no stages to choose peers of", "say pp2 or more")
    for axis, size in (("tp", layout.tp), ("cp", layout.cp), ("ep", plan.experts.ep)):
        yield from other(size > 1, f"a peer is one device, and {axis}{size} has several act as one", f"say {axis}1")
    yield from other(layout.zero > 0, "every peer holds its stage whole", "drop zero and fsdp")
    yield from other(bool(layout.shares) or bool(plan.kinds.mbs) or bool(plan.kinds.dtypes),
                     "peers get microbatches by their speed", "drop shares=, mbs= and dtypes=")  # fmt: skip
    piped = plan.pipeline.schedule != "1f1b" or plan.pipeline.vpp > 1 or bool(plan.pipeline.fill)
    yield from other(
        piped, "peers do passes in the order in which they come", "drop the schedule, vpp and fill_layers="
    )
    yield from other(memory.recompute != "none" or memory.portions > 1,
                     "a backward computes its stage's forward again anyway", "drop the recompute")  # fmt: skip
    yield from other(plan.offload.any, "what peers hold is not offloaded", "drop offload=")
    yield from other(plan.sync.policy != USUAL, "the peers of a stage sum gradients in every step", "drop sync=")
    tied = "the embedding's table is in the first stage and in the last, whose peers sum apart"
    yield from other(model.tied_embeddings, tied, "a model with a head of its own")
    drawn = train.lengths is not None or train.packing
    yield from other(bool(drawn), "microbatches are taken to be alike", "drop lengths= and pack=")
    noisy = bool(train.grow or train.align or train.clusters or train.bias_rate)
    yield from other(noisy, "no peer sees the gradient of the whole batch", "drop grow, align, clusters and balance")
    yield from other(train.lora is not None, "adapters over a frozen base are not handed from peer to peer",
                     "train all weights")  # fmt: skip


def _unexecutable(plan: Plan, model: Model, train: Train) -> Iterator[Diagnostic]:
    if plan.passes.policy == FIXED:
        return
    if model.mixtures or naming.school(model) == "t5":
        message = f"passes=swarm of {model.name} is priced and not run: its layers count choices in whole batches"
        yield unrun("P033", message, plan, "passes", f"policy = {plan.passes.policy}", policy=FIXED)


FIELDS = (
    Field(
        name="passes",
        attribute="policy",
        help="who does a microbatch's passes: fixed ranks, or peers chosen by their speed (swarm)",
        form=Form(read=_policy, wanted="fixed or swarm", whole=True),
        spelled=KEYED,
        place=331,
        decides=(STRUCTURE, EXCHANGE),
    ),
)
FACET = Facet(
    name="passes",
    help="who does a microbatch's passes through the stages",
    record=Passes,
    fields=FIELDS,
    rules=(_rules,),
    unexecutable=_unexecutable,
)
