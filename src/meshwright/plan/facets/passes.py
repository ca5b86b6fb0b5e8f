"""Passes: who does a microbatch's passes, fixed ranks, peers that are chosen as it goes for every stage of a pipeline,
or peers that are asked for those of a mixture's experts."""

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

FIXED, SWARM, DMOE = "fixed", "swarm", "dmoe"
#: Seconds between two looks at the balance of stages where nothing is said: those of the paper.
REBALANCE_S = 300.0
#: Microbatches of a peer that are under way at a time where nothing is said, on average.
UNDER_WAY = 2
MOST_TRAINERS = 100_000
#: Seconds that an answer of experts is waited for where nothing is said: a choice of this project's.
WAIT_S = 1.0


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


class DmoeWords(msgspec.Struct, frozen=True, kw_only=True):
    """The options of ``passes=dmoe``: the ``peers`` that have the experts, each as many, and the seconds that their
    answers are waited for (``wait_s``)."""

    peers: int
    wait_s: float = WAIT_S

    @property
    def text(self) -> str:
        """The words that :func:`read` reads."""
        return f"{DMOE}:peers={self.peers}" + (f",wait={self.wait_s:g}s" if self.wait_s != WAIT_S else "")


class Passes(msgspec.Struct, frozen=True, kw_only=True):
    """The passes facet of a plan: ``policy`` is ``fixed`` (rank r of a stage sends to rank r of the next), ``swarm``
    with its options (stages are pools of peers, of which one is chosen for every pass), or ``dmoe`` with its own (peers
    have the experts, and are asked for their passes)."""

    policy: str = FIXED

    @property
    def swarm(self) -> SwarmWords | None:
        """The options of a swarm; None where there is none."""
        found = None if self.policy == FIXED else read(self.policy)
        return found if isinstance(found, SwarmWords) else None

    @property
    def dmoe(self) -> DmoeWords | None:
        """The options of experts that peers have; None where ranks have them."""
        found = None if self.policy == FIXED else read(self.policy)
        return found if isinstance(found, DmoeWords) else None

    @property
    def peers(self) -> int:
        """Peers beside the ranks of the layout."""
        return 0 if self.dmoe is None else self.dmoe.peers


#: Of each policy its code, its record, and words that show its options.
POLICIES = {
    SWARM: ("P077", SwarmWords, "rebalance=60s (0s: never), code=dynamic8, trainers=16"),
    DMOE: ("P078", DmoeWords, "peers=4 (always said), wait=500ms"),
}


@cache
def read(text: str) -> SwarmWords | DmoeWords:
    """The options that words of ``passes=swarm`` or ``passes=dmoe`` say.

    Raises:
        MeshwrightError: P077 or P078 for words that are none; Y001 for a codec that there is not.
    """
    name, colon, rest = text.partition(":")
    if name not in POLICIES or (colon and not rest):
        help = f"{nearest(name, [FIXED, *POLICIES])} or swarm:rebalance=60s,code=dynamic8,trainers=16 or dmoe:peers=4"
        raise MeshwrightError.one("P077", f"passes={text} is unknown", help=help)
    code, record, help = POLICIES[name]
    found: dict[str, object] = {}
    for word in rest.split(",") if rest else ():
        key, _, value = word.partition("=")
        field, given, wanted = _option(key, value) if name == SWARM else _asked_option(key, value)
        if given is None or field in found:
            why = f"{key} is said twice" if field in found else f"{word!r} is not {wanted}"
            raise MeshwrightError.one(code, f"passes={text}: {why}", help=help)
        found[field] = given
    if name == DMOE and "peers" not in found:
        raise MeshwrightError.one(code, f"passes={text} does not say how many peers have the experts", help=help)
    return record(**found)


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


def _asked_option(key: str, value: str) -> tuple[str, object, str]:
    """The same of ``passes=dmoe``."""
    if key == "peers":
        count = number(value)
        inside = count is not None and 1 <= count <= MOST_TRAINERS
        return key, count if inside else None, f"peers=4, at most {MOST_TRAINERS:,}"
    if key == "wait":
        given = duration_s(value)
        return "wait_s", given or None, "wait=500ms, a duration above 0"
    return key, None, "an option"


def _policy(text: str) -> str:
    return FIXED if text == FIXED else read(text).text


def _rules(plan: Plan, model: Model, cluster: Cluster, train: Train) -> Iterator[Diagnostic]:
    """Yield what a swarm of peers does not go with: each peer is one device that holds one whole stage."""
    if plan.passes.swarm is None:
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
    piped = (
        plan.pipeline.schedule != "1f1b" or plan.pipeline.vpp > 1 or bool(plan.pipeline.fill or plan.pipeline.filling)
    )
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


def _asked_rules(plan: Plan, model: Model, cluster: Cluster, train: Train) -> Iterator[Diagnostic]:
    """Yield what experts that peers have do not go with: one rank trains, and each of its layers waits for them."""
    words = plan.passes.dmoe
    if words is None:
        return
    layout, memory, experts = plan.layout, plan.memory, plan.experts
    place = f"passes.policy = {plan.passes.policy}"

    def other(holds: bool, why: str, help: str) -> Iterator[Diagnostic]:
        if holds:
            yield wrong("P078", f"passes=dmoe: {why}", place, help)

    if plan.num_ranks != cluster.num_devices:
        count = f"{layout.num_ranks} ranks and {words.peers} peers"
        message = f"the plan has {count}, and {cluster.name} has {cluster.num_devices} devices"
        yield wrong("P010", message, place, "a device for the rank that trains and one for each peer")
    counts = {mixture.experts for mixture in model.mixtures}
    yield from other(not counts, f"{model.name} has no mixture of experts", "a model with experts, or passes=fixed")
    for count in sorted(counts):
        fits = [n for n in range(1, count + 1) if count % n == 0]
        yield from other(count % words.peers > 0, f"{words.peers} peers do not share {count} experts alike",
                         f"peers= one of {', '.join(map(str, fits))}")  # fmt: skip
    for axis in ("dp", "tp", "pp", "cp"):
        size = getattr(layout, axis)
        yield from other(size > 1, f"one rank trains, and {axis}{size} has several", f"say {axis}1")
    yield from other(experts.ep > 1, "experts are on peers, not on ranks", "drop ep")
    usual = type(experts)(imbalance=experts.imbalance)
    yield from other(experts.ep == 1 and experts != usual, "peers take all tokens of experts that lie in their order",
                     "drop what is said of experts besides")  # fmt: skip
    yield from other(layout.zero > 0, "one rank has nobody to share its state with", "drop zero and fsdp")
    yield from other(
        plan.pipeline.vpp > 1 or bool(plan.pipeline.fill), "there is no pipeline", "drop vpp and fill_layers="
    )
    yield from other(memory.recompute != "none" or memory.portions > 1,
                     "a forward that is computed again would ask its peers again", "drop the recompute")  # fmt: skip
    yield from other(plan.offload.any, "what is asked of peers is not offloaded", "drop offload=")
    yield from other(plan.sync.policy != USUAL, "there is nobody to exchange gradients with", "drop sync=")
    around = any(mixture.shortcut for mixture in model.mixtures)
    yield from other(around, "experts that read what entered their block are asked beside other work",
                     "a model whose experts read what its attention made")  # fmt: skip
    drawn = train.lengths is not None or train.packing
    yield from other(train.routing is not None, "peers are taken to have as many rows each", "drop routing=")
    yield from other(bool(drawn), "microbatches are taken to be alike", "drop lengths= and pack=")
    noisy = bool(train.grow or train.align or train.clusters or train.bias_rate)
    yield from other(noisy, "nobody sees the gradient of all parameters", "drop grow, align, clusters and balance")
    yield from other(train.lora is not None, "each expert takes steps of its own", "train all weights")


def _unexecutable(plan: Plan, model: Model, train: Train) -> Iterator[Diagnostic]:
    if plan.passes.swarm is None:
        return
    if model.mixtures or naming.school(model) == "t5":
        message = f"passes=swarm of {model.name} is priced and not run: its layers count choices in whole batches"
        yield unrun("P033", message, plan, "passes", f"policy = {plan.passes.policy}", policy=FIXED)


FIELDS = (
    Field(
        name="passes",
        attribute="policy",
        help="who does a microbatch's passes: fixed ranks, peers chosen by their speed (swarm), or of experts peers "
        "that are left out where they do not answer (dmoe)",
        form=Form(read=_policy, wanted="fixed, swarm or dmoe", whole=True),
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
    rules=(_rules, _asked_rules),
    unexecutable=_unexecutable,
)
