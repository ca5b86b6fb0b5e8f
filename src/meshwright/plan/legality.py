"""Legality of a plan for a model, a cluster and a workload. It needs no costs: whether a plan fits in memory is found
by predicting, and is another kind of no.

Every facet has its rules, functions that yield violations; all of them are asked, so one run tells everything.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from meshwright.errors import Diagnostic
from meshwright.plan.adversarial import RULES as ADVERSARIAL_RULES
from meshwright.plan.facet import Field, wrong
from meshwright.plan.facets import facets, fields
from meshwright.plan.filling import frozen_part, nothing_frozen, num_frozen, trained_part, without_frozen
from meshwright.plan.filling import rules as filling
from meshwright.plan.layer_rules import RULES as LAYER_RULES
from meshwright.plan.pool_rules import violations as several
from meshwright.plan.record import Plan
from meshwright.spec.cluster import Cluster
from meshwright.spec.denoise import DENOISE
from meshwright.spec.model import Model
from meshwright.spec.vectors import FeatureVectors
from meshwright.spec.workload import SERVED_DTYPES, Train


def violations(plan: Plan, model: Model, cluster: Cluster, train: Train, *, serving: bool = False) -> list[Diagnostic]:
    """All violations, facet by facet in the order of their rules, then what the workload asks of the model; empty for
    a legal plan. An open ``dp`` is filled in first. Words of ``serving`` are none of a training plan's."""
    if plan.several:
        found = several(plan, model, cluster, train, violations)
        return [*found, *beyond_positions(model, train), *one_stream(plan, model, train)]
    plan = plan.on(cluster.num_devices)
    if num_frozen(plan, model) and not serving and train.phase != DENOISE:
        return list(_filling(plan, model, cluster, train))
    found = [d for rule in _rules() for d in rule(plan, model, cluster, train)]
    found += nothing_frozen(plan, model)
    if not serving:
        found += of_serving(plan)
    return [*found, *beyond_positions(model, train), *one_stream(plan, model, train)]


def _filling(plan: Plan, model: Model, cluster: Cluster, train: Train) -> Iterator[Diagnostic]:
    """Yield all violations of a plan whose first layers are frozen and fill the waits of its pipeline."""
    if any(found := list(filling(plan, model, cluster, train))):
        yield from found
        return
    own = without_frozen(plan)
    for one in violations(own, trained_part(plan, model), cluster, train):
        if not one.code.startswith("W"):  # what the workload asks is asked of the whole model
            yield one
    if model.frozen:  # layers of other kinds than those that are trained, on the same ranks
        yield from (d for d in violations(own, frozen_part(plan, model), cluster, train) if d.code in SPLIT)
    yield from beyond_positions(model, train)


#: Codes of layers that ranks cannot share as a plan says.
SPLIT = ("P011", "P027")


@cache
def _rules() -> tuple:
    return (*(rule for facet in facets().values() for rule in facet.rules), *LAYER_RULES, *ADVERSARIAL_RULES)


def of_serving(plan: Plan) -> Iterator[Diagnostic]:
    """Yield P029 for everything that a plan says which only serving has."""
    for field in _of_serving():
        if field.value(plan) != field.usual:
            said = " ".join(field.words(plan))
            help = f"drop {said}, or say what is served: --serve rate=8,prompt=1024,output=256"
            yield wrong("P029", f"{said} is a word of serving: {field.help}", f"{field.facet}.{field.name}", help)
    if plan.precision.compute in SERVED_DTYPES:
        dtype = plan.precision.compute
        help = "say bf16 or fp8"
        yield wrong(
            "P029", f"{dtype} is a word of serving: nothing is trained in it", f"precision.dtype = {dtype}", help
        )


@cache
def _of_serving() -> tuple[Field, ...]:
    return tuple(field for field in fields().values() if field.serving)


def beyond_positions(model: Model, train: Train) -> Iterator[Diagnostic]:
    """W006 for a sequence beyond a table of learned positions, whatever the plan; rotary positions go on."""
    flow = model.flows[model.head.stream]
    if flow.tokens and train.seq_len != flow.tokens and not isinstance(model.embedding, FeatureVectors):
        message = f"{model.name} has {flow.tokens} {flow.name} tokens a sequence, not {train.seq_len:,}"
        help = f"say seq={flow.tokens}"
        yield Diagnostic(code="W009", message=message, place=f"--train seq={train.seq_len}", help=help)
    if flow.inserts >= train.seq_len:
        message = f"{flow.inserts} of a sequence's tokens in {model.name} are an image's, of {train.seq_len:,} in all"
        yield Diagnostic(code="W009", message=message, place=f"--train seq={train.seq_len}", help="take a longer seq=")
    film = any(a.over for a in model.attentions)
    if film != bool(train.frames):
        usual = getattr(model.embedding, "frames", 0)
        about = f"{model.name} attends over the places of a frame and over frames in turn, and frames are not said"
        message = about if film else f"{model.name} attends over all tokens of a sequence, which has no frames"
        help = f"say frames={usual}, and seq= as many times the places of a frame" if film else "drop frames="
        yield Diagnostic(code="W009", message=message, place=f"--train frames={train.frames}", help=help)
    yield from _image(model, train)
    most = min(model.max_seq_len or model.learned_positions, model.learned_positions)
    if model.learned_positions and train.longest_document > most:
        help = f"at most seq={most}; documents of up to {most} tokens may be packed (lengths=)"
        message = f"{model.name} has learned positions for {most:,} tokens, not for {train.longest_document:,}"
        yield Diagnostic(code="W006", message=message, place=f"--train seq={train.seq_len}", help=help)


def _image(model: Model, train: Train) -> Iterator[Diagnostic]:
    """W009 for vectors of features and models that do not read them, images of a model that reads tokens, tokens of one
    that reads images, and images of fewer pixels a side than its smallest maps are times smaller."""
    scales, width = [flow.scale for flow in model.flows if flow.scale], 0
    if isinstance(model.embedding, FeatureVectors):
        width = model.embedding.width
    if width != train.features:
        what = f"vectors of {width} features" if width else "no vectors of features"
        said = {"features": train.features, "image": train.image, "seq": train.seq_len}
        place = next(f"--train {word}={number}" for word, number in said.items() if number)
        help = f"say features={width}" if width else f"say {'image=' if scales else 'seq='} in place of features="
        yield Diagnostic(code="W009", message=f"{model.name} reads {what}", place=place, help=help)
        return
    if not scales and train.image:
        tokens = model.flows[model.head.stream].tokens
        message = f"{model.name} reads tokens, and image= is of networks of convolutions"
        help = f"say seq={tokens} in place of image=" if tokens else "say seq= in place of image="
        yield Diagnostic(code="W009", message=message, place=f"--train image={train.image}", help=help)
    if not scales or train.phase == DENOISE:
        return
    if not train.image:
        message = f"{model.name} reads images, and how large they are is not said"
        help = "say image=224, pixels along a side, in place of seq="
        yield Diagnostic(code="W009", message=message, place=f"--train seq={train.seq_len}", help=help)
    elif train.image < max(scales):
        message = f"{model.name} makes maps {max(scales)} times smaller than an image of {train.image} pixels a side"
        help = f"say image={max(scales)} or more"
        yield Diagnostic(code="W009", message=message, place=f"--train image={train.image}", help=help)


def one_stream(plan: Plan, model: Model, train: Train) -> Iterator[Diagnostic]:
    """W010 for documents of other lengths than a sequence where more than one stream of tokens would be cut by them, or
    one whose length the model says, or more than one pool would take its microbatches of them."""
    said = [f"lengths={train.lengths.text()[:60]}"] if train.lengths is not None else []
    said += [f"pack={train.pack}"] if train.pack else []
    if not said:
        return
    why = []
    if len(model.flows) > 1:
        names = ", ".join(flow.name for flow in model.flows)
        why.append(
            f"{model.name} reads {len(model.flows)} streams of tokens ({names}), which documents do not cut alike"
        )
    elif model.flows[0].tokens:
        why.append(f"{model.name} reads {model.flows[0].tokens} tokens of each {model.flows[0].name}, which stay whole")
    if plan.several:
        why.append(f"documents are not drawn for a plan of {len(plan.several)} pools")
    for message in why:
        yield Diagnostic(
            code="W010", message=message, place=f"--train {','.join(said)}", help="drop lengths= and pack="
        )
