"""Layout: sizes of the mesh axes, their order on the cluster, and the state sharded over data parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations
from typing import TYPE_CHECKING

import msgspec

from meshwright import schedules
from meshwright.errors import Diagnostic
from meshwright.plan.facet import (
    ALONE,
    BALANCED,
    EVEN,
    EXCHANGE,
    KEYED,
    LAYER,
    NUMBERED,
    PLACEMENT,
    STRUCTURE,
    Facet,
    Field,
    Form,
    count,
    counts,
    divisors,
    listed,
    uneven,
    unrun,
    wrong,
    yes_no,
)
from meshwright.plan.scopes import copy_wrong, scopes_wrong
from meshwright.spec.layers import Moe
from meshwright.sync.policy import read

if TYPE_CHECKING:
    from meshwright.plan.record import Plan
    from meshwright.spec.cluster import Cluster
    from meshwright.spec.model import Model
    from meshwright.spec.workload import Train

#: Mesh axes from the innermost (closest devices) out, as Megatron-Core lays them (Narayanan et al. 2104.04473).
DEFAULT_ORDER = ("tp", "cp", "dp", "pp")
#: Tokens of a sequence that a context-parallel rank holds at least, in the default space.
LEAST_TOKENS = 512


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of the mesh axes and the state sharded over them.

    ``zero`` is what is sharded over data parallelism: 0 nothing, 1 optimizer state, 2 and gradients, 3 and
    parameters (Rajbhandari et al. 1910.02054; 3 is FSDP, Zhao et al. 2304.11277). ``shard`` is the size of the
    sharding group when smaller than dp*cp (hybrid sharding, HSDP), 0 for all of it. ``scopes`` are smaller groups
    nested in that one, over which weights and gradients are sharded where each has one of its own (Xu et al.
    2501.04266), () where all state has one. ``hpz`` neighbours keep a second copy of the weights from a forward to its
    backward, which gathers it among them alone (Wang et al. 2306.10209), 0 where there is none. ``sp`` shards the parts
    between tensor-parallel regions along the sequence (Korthikanti et al. 2205.05198). ``order`` places the
    axes on the cluster from the inside out. ``stages`` are layers per virtual stage when uneven, () for even.
    ``shares`` are microbatches of each kind of data-parallel slice (``plan/slices.py``) when uneven, () for even.
    ``adp`` is of serving: the tensor-parallel ranks make so many groups, each with requests and a cache of its own for
    attention, while experts (or the MLPs of a model without any) are split over all of them (attention data
    parallelism, DeepSeek-V3 2412.19437, section 3.4).
    """

    tp: int = 1
    pp: int = 1
    dp: int = 0
    cp: int = 1
    sp: bool = True
    zero: int = 0
    shard: int = 0
    scopes: tuple[int, ...] = ()
    hpz: int = 0
    order: tuple[str, ...] = DEFAULT_ORDER
    stages: tuple[int, ...] = ()
    shares: tuple[int, ...] = ()
    adp: int = 1

    @property
    def attention_tp(self) -> int:
        """Ranks that split the attention of a request."""
        return self.tp // self.adp

    @property
    def num_ranks(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    @property
    def shard_group(self) -> int:
        """Ranks over which ZeRO shards: dp*cp, or less with a hybrid scope."""
        return self.shard or self.dp * self.cp

    @property
    def weights_over(self) -> int:
        """Ranks over which ZeRO-3 shards the parameters that are computed with."""
        return self.scopes[0] if self.scopes else self.shard_group

    @property
    def gradients_over(self) -> int:
        """Ranks over which ZeRO-2 and 3 shard the gradients that accumulate."""
        return self.scopes[1] if self.scopes else self.shard_group

    @property
    def shards_gradients(self) -> bool:
        """Whether gradients are kept sharded while they accumulate: with ZeRO-2, and with ZeRO-3 where there is no
        pipeline. Under one FSDP gathers parameters once a step and keeps gradients whole until the last microbatch, as
        TorchTitan does (2410.06511); Megatron-Core's distributed optimizer is ZeRO-1."""
        return (self.zero == 2 or (self.zero == 3 and self.pp == 1)) and self.shard_group > 1

    @property
    def gathers_again(self) -> bool:
        """Whether parameters are gathered for every microbatch: fully sharded ones without a pipeline. Under one they
        are gathered once a step and kept, as TorchTitan does, because every microbatch needs them (2410.06511)."""
        return self.zero == 3 and self.pp == 1 and self.shard_group > 1

    def stride(self, axis: str) -> int:
        """Distance in ranks between neighbours on an axis."""
        stride = 1
        for name in self.order:
            if name == axis:
                return stride
            stride *= getattr(self, name)
        raise KeyError(axis)


def _ranks(plan: Plan, model: Model, cluster: Cluster, train: Train) -> Iterator[Diagnostic]:
    layout, have = plan.layout, cluster.num_devices
    if layout.num_ranks == have or plan.passes.peers:  # which says of its peers how many there are
        return
    other = layout.tp * layout.pp * layout.cp
    product = f"tp{layout.tp} * pp{layout.pp} * cp{layout.cp} * dp{layout.dp} = {layout.num_ranks}"
    if layout.num_ranks > have:
        message = f"the plan needs {layout.num_ranks} ranks and {cluster.name} has {have} devices"
    else:
        message = f"the plan has {layout.num_ranks} ranks and {cluster.name} has {have} devices"
    if other > have:
        fits = [pp for pp in divisors(have) if have % (layout.tp * layout.cp * pp) == 0]
        help = "take smaller axes" + (f", such as tp{layout.tp} cp{layout.cp} pp{fits[-1]}" if fits else "")
    elif have % other == 0:
        help = f"with these tp, pp and cp, dp is {have // other}"
    else:
        help = f"tp, pp and cp must divide {have}; to leave devices out, say a smaller cluster"
    yield wrong("P010", message, product, help)


def _tensor(plan: Plan, model: Model, cluster: Cluster, train: Train) -> Iterator[Diagnostic]:
    whole, adp = plan.layout.tp, plan.layout.adp
    if whole == 1 and adp == 1:
        return
    if whole % adp:
        yield wrong(
            "P011",
            f"adp={adp} groups do not divide the tp={whole} ranks that they are made of",
            f"layout.adp = {adp}",
            f"valid adp at tp{whole}: {listed(whole, whole)}",
        )
        return
    tp = plan.layout.attention_tp
    for kind, block in enumerate(model.blocks):
        where = f"{model.name}, layer kind {kind}" if len(model.blocks) > 1 else model.name
        for a in block.attentions:
            if a.heads % tp:
                yield wrong(
                    "P011",
                    f"{_ranks_of(plan)} does not divide num_heads={a.heads} ({where})",
                    f"layout.tp = {whole}",
                    f"valid tp: {listed(a.heads, cluster.num_devices)}",
                )
            elif not a.kv_lora_rank and a.kv_heads % tp and tp % a.kv_heads:
                yield wrong(
                    "P011",
                    f"{_ranks_of(plan)} and num_kv_heads={a.kv_heads} do not divide each other ({where})",
                    f"layout.tp = {whole}",
                    f"valid tp: {listed(a.kv_heads, cluster.num_devices)}, or a multiple of {a.kv_heads}",
                )
        width = block.mlp.shared_ffn if isinstance(block.mlp, Moe) else getattr(block.mlp, "ffn", 0)
        ranks = tp if model.mixtures else whole
        if width % ranks:
            yield wrong(
                "P011",
                f"tp={ranks} does not divide the MLP width {width} ({where})",
                f"layout.tp = {whole}",
                f"valid tp: {listed(width, cluster.num_devices)}",
            )
    if plan.layout.sp and train.seq_len // plan.layout.cp % whole:
        yield wrong(
            "P012",
            f"sequence parallelism shards {train.seq_len // plan.layout.cp} tokens over tp={whole}, no divisor",
            f"layout.tp = {whole}",
            "choose a tp that divides the sequence on a rank, or say nosp",
        )


def _ranks_of(plan: Plan) -> str:
    """The ranks that split a request's attention, as a plan says them."""
    layout = plan.layout
    return f"tp={layout.tp}" if layout.adp == 1 else f"tp/adp={layout.attention_tp}"


def _zero(plan: Plan, model: Model, cluster: Cluster, train: Train) -> Iterator[Diagnostic]:
    layout = plan.layout
    if layout.shard and (layout.dp * layout.cp) % layout.shard:
        yield wrong(
            "P019",
            f"the sharding group of {layout.shard} does not divide dp*cp = {layout.dp * layout.cp}",
            f"layout.shard = {layout.shard}",
            f"valid: {listed(layout.dp * layout.cp, 4096)}",
        )
    if layout.zero >= 2 and layout.pp > 1 and schedules.get(plan.pipeline.schedule).placement == "bidirectional":
        sharded = "parameters" if layout.zero == 3 else "gradients"
        yield wrong(
            "P020",
            f"{plan.pipeline.schedule} holds every stage on two ranks, which sharded {sharded} do not express",
            f"layout.zero = {layout.zero} with {plan.pipeline.schedule}",
            "say zero1, or another schedule",
        )


def _orders(plan: Plan, model: Model, cluster: Cluster, train: Train) -> Iterator[Diagnostic]:
    if plan.experts.ep > 1 and plan.layout.order[-1] != "pp" and plan.layout.pp > 1:
        yield wrong(
            "P023",
            "the expert mesh refactors tp, cp and dp, which must be neighbours on the cluster",
            f"layout.order = {'-'.join(plan.layout.order)}",
            "put pp last: order=tp-cp-dp-pp",
        )


def _zero_words(plan: Plan) -> list[str]:
    layout = plan.layout
    if layout.zero == 3:
        return [f"hsdp{layout.shard}" if layout.shard else "fsdp"]
    return [f"zero{layout.zero}"] if layout.zero else []


def _shard_words(plan: Plan) -> list[str]:
    return [f"shard{plan.layout.shard}"] if plan.layout.shard and plan.layout.zero < 3 else []


def _order(text: str) -> tuple[str, ...] | None:
    read = tuple(text.split("-"))
    return read if sorted(read) == sorted(DEFAULT_ORDER) else None


def _widths(model: Model, cluster: Cluster, train: Train) -> tuple[int, ...]:
    """Sizes that fill a scale-up domain, or a part or several of it."""
    domain = cluster.islands[0].domain_size
    return tuple(n for n in divisors(cluster.num_devices) if domain % n == 0 or n % domain == 0)


def _contexts(model: Model, cluster: Cluster, train: Train) -> tuple[int, ...]:
    return tuple(n for n in divisors(cluster.num_devices) if n == 1 or train.seq_len // n >= LEAST_TOKENS)


def _depths(model: Model, cluster: Cluster, train: Train) -> tuple[int, ...]:
    return tuple(n for n in divisors(cluster.num_devices) if n <= model.num_layers)


def _unequal(model: Model, cluster: Cluster, train: Train, unlike: bool = False) -> tuple[str, ...]:
    """Even, and on islands of unequal devices, or of layers that are `unlike`, balanced as well."""
    return (EVEN,) if len(cluster.islands) == 1 and not unlike else (EVEN, BALANCED)


def _attention_groups(model: Model, cluster: Cluster) -> tuple[int, ...]:
    """Groups worth a try: where experts are spread over all ranks."""
    return tuple(divisors(cluster.num_devices)) if model.mixtures else (1,)


def _follows(model: Model, cluster: Cluster, train: Train) -> None:
    """Worked out from the sizes."""


def _replicated(plan: Plan) -> bool:
    return plan.layout.dp * plan.layout.cp > 1


def _exchanged(plan: Plan) -> tuple[bool, bool, bool]:
    layout = plan.layout
    return layout.zero >= 1, layout.gathers_again, layout.shards_gradients


def _unexecutable(plan: Plan, model: Model, train: Train) -> Iterator[Diagnostic]:
    layout = plan.layout
    if len(set(layout.shares)) > 1 and layout.shards_gradients:
        # a gradient that is kept sharded is summed after every microbatch, and replicas have not as many
        message = f"uneven batch shares with zero{layout.zero} are priced and not run: replicas meet once a step to run"
        yield unrun("P033", message, plan, "layout", f"shares = {layout.shares}", zero=1)
    elif layout.shares and read(plan.sync.policy).rule.together(plan) < layout.dp * layout.cp:
        # a replica's own step is of the mean of its own sequences, an average over replicas one of equal weights
        message = "uneven batch shares of replicas that take steps of their own are priced and not run"
        yield unrun("P033", message, plan, "layout", f"shares = {layout.shares}", shares=())
    if layout.zero == 3 and layout.pp == 1 and model.mixtures:
        # fully_shard knows one mesh a module; experts are replicated over another one than the router beside them
        message = "fully sharded experts are priced and not run"
        yield unrun("P033", message, plan, "layout", "zero = 3", zero=2)


FIELDS = (
    Field(
        name="tp",
        help="tensor parallelism",
        form=count(),
        spelled=NUMBERED,
        place=10,
        decides=(LAYER, EXCHANGE, PLACEMENT),
        size=True,
        domain=_widths,
    ),
    Field(
        name="cp",
        help="context parallelism",
        form=count(),
        spelled=NUMBERED,
        place=50,
        decides=(STRUCTURE, LAYER, EXCHANGE, PLACEMENT),
        seen={STRUCTURE: _replicated},
        size=True,
        domain=_contexts,
    ),
    Field(
        name="pp",
        help="pipeline stages",
        form=count(),
        spelled=NUMBERED,
        place=20,
        decides=(STRUCTURE, PLACEMENT),
        size=True,
        domain=_depths,
    ),
    Field(
        name="dp",
        help="data parallelism: what the others leave of the devices",
        form=count(),
        spelled=NUMBERED,
        place=40,
        decides=(STRUCTURE, EXCHANGE, PLACEMENT),
        seen={STRUCTURE: _replicated},
        size=True,
        domain=_follows,
    ),
    Field(
        name="adp",
        help="groups of the tensor-parallel ranks with requests of their own, while serving",
        form=count(),
        spelled=NUMBERED,
        place=15,
        decides=(LAYER, EXCHANGE, PLACEMENT),
        serving=True,
        served=_attention_groups,
    ),
    Field(
        name="order",
        help="the axes on the cluster, innermost first",
        form=Form(
            read=_order,
            write="-".join,
            wanted="an order of tp, cp, dp, pp such as tp-cp-dp-pp",
            kind=tuple[str, ...],
        ),
        spelled=KEYED,
        place=200,
        decides=(PLACEMENT,),
        domain=lambda model, cluster, train: tuple(permutations(DEFAULT_ORDER)),
    ),
    Field(
        name="sp",
        help="sequence parallelism beside tensor parallelism",
        form=yes_no(),
        spelled=ALONE,
        place=120,
        decides=(LAYER,),
        seen={LAYER: lambda plan: plan.layout.sp and plan.layout.tp > 1},
        domain=lambda model, cluster, train: (True, False),
        useful=lambda plan: plan.layout.tp > 1,
        with_sizes=True,
        also={"sp": {"sp": True}, "nosp": {"sp": False}},
        say=lambda plan: [] if plan.layout.sp else ["nosp"],
    ),
    uneven(
        name="stages",
        help="layers per stage: even, balanced by the partition of assign/partition.py, or numbers",
        form=counts("layers per stage such as 9,10,10,9", least=0),
        place=180,
        decides=(STRUCTURE,),
        domain=lambda model, *asked: _unequal(model, *asked, any(flow.scale for flow in model.flows)),
        balanced=True,
    ),
    uneven(
        name="shares",
        help="microbatches of each kind of slice on unequal islands: even, balanced by assign/shares.py, or numbers",
        form=counts("microbatches per kind of slice such as 5,11"),
        place=190,
        decides=(STRUCTURE, PLACEMENT),
        domain=_unequal,
        balanced=True,
    ),
    Field(
        name="zero",
        help="what is sharded over data parallelism",
        form=count(0, 3),
        spelled=NUMBERED,
        place=100,
        decides=(STRUCTURE, EXCHANGE),
        seen={STRUCTURE: _exchanged},
        domain=lambda model, cluster, train: (0, 1, 2, 3),
        also={"fsdp": {"zero": 3}},
        numbered={"hsdp": lambda ranks: {"zero": 3, "shard": ranks}},
        say=_zero_words,
    ),
    Field(
        name="shard",
        help="ranks it is sharded over (0: all)",
        form=count(0),
        spelled=NUMBERED,
        place=110,
        decides=(STRUCTURE, EXCHANGE),
        seen={STRUCTURE: _exchanged},
        domain=_follows,
        say=_shard_words,
    ),
    uneven(
        name="scopes",
        help="ranks over which weights and gradients are sharded, where each has a scope inside that: even, or numbers",
        form=counts("two nested scopes such as 2,8: the ranks that shard the weights, and those that shard gradients"),
        place=112,
        decides=(STRUCTURE, EXCHANGE),
        seen={STRUCTURE: lambda plan: bool(plan.layout.scopes)},
    ),
    Field(
        name="hpz",
        help="neighbours that keep a second copy of sharded weights, which backwards gather among them (0: none)",
        form=count(0),
        spelled=NUMBERED,
        place=113,
        decides=(STRUCTURE, EXCHANGE),
        seen={STRUCTURE: lambda plan: plan.layout.hpz > 0},
    ),
)
FACET = Facet(
    name="layout",
    help="sizes of the mesh axes, their order on the cluster, what is sharded over data parallelism",
    record=Layout,
    fields=FIELDS,
    rules=(_ranks, _tensor, _zero, scopes_wrong, copy_wrong, _orders),
    unexecutable=_unexecutable,
)
