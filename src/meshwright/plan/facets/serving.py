"""Serving: how an engine computes an iteration beside its layout: in parts that overlap, padded or packed, where tables
and scores lie, how sums travel, and weights that come from elsewhere layer by layer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from meshwright.errors import Diagnostic
from meshwright.plan.facet import EXCHANGE, KEYED, LAYER, NUMBERED, Facet, Field, Form, count, names, wrong, yes_no

if TYPE_CHECKING:
    from meshwright.plan.record import Plan
    from meshwright.spec.cluster import Cluster
    from meshwright.spec.model import Model
    from meshwright.spec.workload import Train


TABLES = ("split", "whole", "master")
SCORES = ("gathered", "local")
SUMS = ("usual", "nccl", "star")
PREFIXES = ("each", "once")
REORDERED = ("aligned", "gathered")
SOURCES = ("host", "disk", "peer")
#: No share of the host, and the one for which both take equally long.
NONE, AUTO = "none", "auto"


class ServingPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine computes an iteration.

    Attributes:
        nano: an iteration's tokens are cut into so many parts, so that products of one run beside attention and
            exchanges of another, each on its share of the device (NanoFlow, 2408.12757).
        padded: every prompt of a batch is computed as long as its longest; packed otherwise (ByteTransformer,
            2210.03052).
        prefix: attention reads a prefix that all requests share for ``each``, or ``once`` for all of them (Hydragen,
            2402.05099).
        act_order: rows of quantised weights are reordered by importance; the inner features of an MLP are ``gathered``
            for that between its two products, or the first one's columns were ``aligned`` before (2402.04925).
        sums: of tensor-parallel ranks: as the engine does, whose kernels read small buffers from their peers; as
            ``nccl`` does at every size, where an engine has no such kernels or they are switched off; or each rank's
            part goes to one rank and the sum back (``star``; TPI-LLM, 2410.00531).
        tables: the token table is ``split`` by rows and its results summed; ``whole`` on every rank, to which token ids
            are sent (xFasterTransformer, 2407.00029); or on one rank, the ``master``, which sends embeddings and also
            has the head.
        scores: over the vocabulary are ``gathered``, or the best ``local`` ones of each rank alone.
        stream: layers' weights come from the ``host``, the ``disk`` or a neighbour's memory (``peer``) while others are
            computed (TPI-LLM; EnergonAI, 2209.02341); "" = they stay.
        slots: layers that there is room for at a time, of those that come.
        resident: layers of a stage that stay all the same.
        host_share: the share of the columns of every product that the host's processors compute where weights lie,
            while the others come to the device (HeteGen, 2403.01164): a number between 0 and 1, or ``auto``: as many
            as take the processors as long as the others on their way, or ``none``.
        streams: so many learned variants of every token pass the same weights at once and are joined at the end
            (ParScale, 2505.10475).
    """

    nano: int = 1
    padded: bool = False
    prefix: str = "each"
    act_order: str = "aligned"
    sums: str = "usual"
    tables: str = "split"
    scores: str = "gathered"
    stream: str = ""
    slots: int = 2
    resident: int = 0
    host_share: str = NONE
    streams: int = 1

    @property
    def divides(self) -> bool:
        """Whether products are divided between host and device."""
        return self.host_share != NONE


def _streamed(plan: Plan, model: Model, cluster: Cluster, train: Train) -> Iterator[Diagnostic]:
    serving, node = plan.serving, cluster.islands[0].node
    said = [
        f"{name}={getattr(serving, name)}"
        for name, usual in (("slots", 2), ("resident", 0))
        if getattr(serving, name) != usual
    ]
    if said and not serving.stream:
        help = f"say where they come from: weights_from={', '.join(SOURCES[:-1])} or {SOURCES[-1]}"
        yield wrong("P050", f"{' and '.join(said)}: no layer's weights come from elsewhere", "serving.stream", help)
    if serving.stream == "disk" and not node.nvme_gb_s:
        help = "say it in a cluster file: nvme_gb_s of the node; or weights_from=host"
        yield wrong("P050", f"{cluster.name} says no drive that weights could come from", "serving.stream = disk", help)
    if serving.stream == "peer" and cluster.num_devices < 2:
        yield wrong(
            "P050", f"{cluster.name} has no neighbour with memory", "serving.stream = peer", "say weights_from=host"
        )
    if serving.stream and plan.layout.pp > 1:
        help = "say tp: every rank streams its part of every layer"
        message = f"layers come one after the other, and pp={plan.layout.pp} stages would each wait for their own"
        yield wrong("P050", message, f"serving.stream = {serving.stream}", help)
    fewest = model.num_layers // plan.layout.pp
    if serving.stream and serving.slots + serving.resident > fewest:
        message = f"{serving.slots} slots and {serving.resident} resident layers of {fewest} on a stage"
        yield wrong("P050", message, f"serving.slots = {serving.slots}", "drop weights_from=: all layers have room")


def _shared_with_host(plan: Plan, model: Model, cluster: Cluster, train: Train) -> Iterator[Diagnostic]:
    """Products that are not divided between host and device."""
    serving = plan.serving
    if not serving.divides:
        return
    place, said = f"serving.host_share = {serving.host_share}", f"host_share={serving.host_share}"
    if serving.stream != "host":
        message = f"{said} computes with weights where they lie, and no layer's lie in the host's memory"
        yield wrong("P050", message, place, "say weights_from=host")
    if model.mixtures:
        message = f"{said} divides products by columns, and those of {model.name}'s experts are not divided so"
        yield wrong("P050", message, place, "drop host_share=")
    if plan.overlap.tp and plan.layout.tp > 1:
        yield wrong("P050", f"{said} and overlap=tp both cut products", place, "leave tp out of overlap=")
    if serving.nano > 1:
        yield wrong("P050", f"{said} and nano{serving.nano} both overlap products", place, "drop one of them")


def _share(text: str) -> str | None:
    """The share of the host as it is kept: a number between 0 and 1, or a word; None for any other text."""
    if text in (NONE, AUTO):
        return text
    if re.fullmatch(r"0?\.\d{1,6}", text) and 0.0 < float(text) < 1.0:
        return f"{float(text):g}"
    return None


def _alone(plan: Plan, model: Model, cluster: Cluster, train: Train) -> Iterator[Diagnostic]:
    """Words that have nothing to act on."""
    serving, tp = plan.serving, plan.layout.attention_tp
    for name, value in (
        ("sums", "nccl"),
        ("sums", "star"),
        ("tables", "whole"),
        ("tables", "master"),
        ("scores", "local"),
    ):
        if getattr(serving, name) == value and tp == 1:
            message = f"{name}={value} is about ranks that split a token's work, and there is one"
            yield wrong("P051", message, f"serving.{name} = {value}", f"drop {name}=, or take a tp")
    if serving.act_order == "gathered" and not plan.precision.weights:
        help = "drop act_order=, or say weights=int4"
        yield wrong("P051", "act_order=gathered reorders quantised weights, and none are", "serving.act_order", help)
    whole = [a for a in model.attentions if not (a.window or a.index_top_k or a.kv_lora_rank)]
    if serving.prefix == "once" and not whole:
        message = f"shared_prefix=once: {model.name} has no attention that reads the keys of a whole context"
        yield wrong("P051", message, "serving.prefix = once", "drop shared_prefix=")
    if serving.streams > 1 and any(block.mixer is not None for block in model.blocks):
        message = f"streams={serving.streams} put learned keys in front of attention, and {model.name} has scans"
        yield wrong("P051", message, f"serving.streams = {serving.streams}", "drop streams=")
    if serving.nano > 1 and plan.layout.adp > 1:
        message = f"nano{serving.nano}: attention groups wait for one another at every mixture of experts"
        yield wrong("P051", message, f"serving.nano = {serving.nano}", "drop nano or adp")


FIELDS = (
    Field(
        name="nano",
        help="parts of an iteration whose products, attention and exchanges overlap",
        form=count(most=16),
        spelled=NUMBERED,
        place=295,
        decides=(LAYER,),
        serving=True,
    ),
    Field(
        name="padding",
        attribute="padded",
        help="prompts of a batch computed as long as the longest",
        form=yes_no(),
        spelled=KEYED,
        place=301,
        decides=(LAYER,),
        serving=True,
    ),
    Field(
        name="shared_prefix",
        attribute="prefix",
        help="attention over a prefix that all requests share: for each of them, or once",
        form=names(*PREFIXES),
        spelled=KEYED,
        place=302,
        decides=(LAYER,),
        serving=True,
    ),
    Field(
        name="act_order",
        help="reordered quantised weights: columns aligned before, or inner features gathered between two products",
        form=names(*REORDERED),
        spelled=KEYED,
        place=303,
        decides=(LAYER,),
        serving=True,
    ),
    Field(
        name="sums",
        help="sums of tensor-parallel ranks: as the engine does, by NCCL at every size, or over one rank",
        form=names(*SUMS),
        spelled=KEYED,
        place=304,
        decides=(LAYER, EXCHANGE),
        serving=True,
    ),
    Field(
        name="tables",
        help="the token table: split by rows, whole on every rank, or on one rank with the head",
        form=names(*TABLES),
        spelled=KEYED,
        place=305,
        decides=(LAYER,),
        serving=True,
    ),
    Field(
        name="scores",
        help="scores over the vocabulary: gathered, or the best local ones of each rank",
        form=names(*SCORES),
        spelled=KEYED,
        place=306,
        decides=(LAYER,),
        serving=True,
    ),
    Field(
        name="weights_from",
        attribute="stream",
        help="where layers' weights come from while others are computed",
        form=names(*SOURCES),
        spelled=KEYED,
        place=307,
        decides=(LAYER,),
        serving=True,
    ),
    Field(
        name="slots",
        help="streamed layers that there is room for at a time",
        form=count(),
        spelled=KEYED,
        place=308,
        decides=(LAYER,),
        serving=True,
    ),
    Field(
        name="resident",
        help="layers of a stage that stay where others are streamed",
        form=count(0),
        spelled=KEYED,
        place=309,
        decides=(LAYER,),
        serving=True,
    ),
    Field(
        name="host_share",
        help="share of every product's columns that the host computes where weights lie, or auto",
        form=Form(read=_share, wanted=f"a number between 0 and 1, or {AUTO}", kind=str, names=(NONE, AUTO)),
        spelled=KEYED,
        place=311,
        decides=(LAYER,),
        serving=True,
    ),
    Field(
        name="streams",
        help="learned variants of every token that pass the same weights at once",
        form=count(most=64),
        spelled=KEYED,
        place=310,
        decides=(LAYER,),
        serving=True,
    ),
)
FACET = Facet(
    name="serving",
    help="how an engine computes an iteration, while serving",
    record=ServingPlan,
    fields=FIELDS,
    rules=(_streamed, _shared_with_host, _alone),
)
