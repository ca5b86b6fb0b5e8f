"""Executability of plans that train image classifiers: what their modules do not do, each with its reason."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright import schedules
from meshwright.errors import Diagnostic
from meshwright.plan.record import Plan
from meshwright.spec.convolution import BATCH, ConvolutionPath, ImageClassifier, ImageStem
from meshwright.spec.model import Model
from meshwright.spec.vectors import FeatureVectors
from meshwright.spec.workload import Train
from meshwright.sync.policy import read


def _bad(code: str, message: str, place: str, help: str) -> Diagnostic:
    return Diagnostic(code=code, message=message, place=place, help=help)


def unbuilt(model: Model) -> Iterator[str]:
    """Yield each part of a classifier that has no module."""
    if not isinstance(model.embedding, ImageStem | FeatureVectors) or not isinstance(model.head, ImageClassifier):
        yield "it does not read images or features and tell classes"
        return
    for block in model.blocks:
        path = block.before[0] if len(block.before) == 1 else None
        if isinstance(model.embedding, FeatureVectors):
            continue
        if block.attention or block.mixer or block.mlp or not isinstance(path, ConvolutionPath):
            yield "a layer is no path of convolutions"
        elif path.norm not in ("", BATCH):
            yield f"its maps are normalised over {path.norm}s"


def unexecutable_classifier(plan: Plan, model: Model, train: Train) -> Iterator[Diagnostic]:
    """Yield each word of the plan that is not done while a classifier is trained."""
    name, memory = model.name, plan.memory
    family = schedules.get(plan.pipeline.schedule)
    found = []
    if plan.layout.pp > 1 and family.splits_backward:
        why = "gradients of a convolution's weights are not put off"
        found.append((f"pipeline.schedule = {family.name}", why, "take 1f1b, gpipe or interleaved"))
    if memory.recompute == "selective":
        found.append(("memory.recompute = selective", "no attention is recomputed", "say full, or drop it"))
    for field in ("portions", "loss_portions"):
        if (count := getattr(memory, field)) > 1:
            found.append((f"memory.{field} = {count}", "an image is not cut in portions", f"leave {field} out"))
    if plan.asks_peers:
        found.append((f"passes.policy = {plan.passes.policy}", "peers send hidden states of text", "say passes=fixed"))
    policy = read(plan.sync.policy)
    if policy.merged is not None or policy.taught is not None:
        found.append((f"sync.policy = {plan.sync.policy}", "its further heads are of text", "take another sync"))
    if policy.rule.forwards and _normed(model):
        why = "slopes of the loss are no passes that batch norms take statistics of"
        found.append((f"sync.policy = {plan.sync.policy}", why, "a classifier without batch norm, or another sync"))
    if policy.helpers:
        found.append((f"sync.policy = {plan.sync.policy}", "peers that only sum pass empty text", "drop aux"))
    for place, why, help in found:
        yield _bad("P033", f"{place.partition(' = ')[2]} of {name} is priced and not run: {why}", f"plan.{place}", help)
    places = min(flow.length(train.seq_len) for flow in model.flows)
    if plan.pipeline.microbatch * places == 1 and _normed(model):
        message = f"a microbatch of one image has one value of each channel in the smallest maps of {name}, with no"
        help = "say mb2 or more, or larger images"
        yield _bad("P033", f"{message} variance to be normalised by", "plan.pipeline.microbatch = 1", help)


def _normed(model: Model) -> bool:
    """Whether maps are normalised over a microbatch."""
    paths = [part for block in model.blocks for part in block.before] + [getattr(model.embedding, "path", None)]
    return any(getattr(path, "norm", "") for path in paths)
