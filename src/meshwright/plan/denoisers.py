"""Executability of plans that train diffusion transformers: what their modules do not do, each with its reason."""

from __future__ import annotations

from collections.abc import Iterator
from math import isqrt

from meshwright.errors import Diagnostic
from meshwright.plan.facets.feedback import CHAIN
from meshwright.plan.record import Plan
from meshwright.spec.diffusion import LATENT_PIXELS, Denoised, Latents, NoisyClasses
from meshwright.spec.encoded import denoiser_of, entry_of, is_encoded, latent_work
from meshwright.spec.layers import Dense
from meshwright.spec.model import Model
from meshwright.spec.workload import Train
from meshwright.sync.policy import read
from meshwright.sync.record import SyncPolicy


def _bad(code: str, message: str, place: str, help: str) -> Diagnostic:
    return Diagnostic(code=code, message=message, place=place, help=help)


def unbuilt_denoiser(model: Model, activations: tuple[str, ...]) -> Iterator[str]:
    """Yield each part of a diffusion transformer that has no module."""
    model = denoiser_of(model)
    if not isinstance(model.embedding, Latents) or not isinstance(model.head, Denoised | NoisyClasses):
        yield "it does not read latents and find their noise, or their class"
        return
    if model.hidden % 4:
        yield f"its width {model.hidden} is no multiple of 4, and places are written in sines and cosines of two"
    if isinstance(model.head, Denoised) and model.head.channels < model.embedding.channels:
        yield f"it writes {model.head.channels} channels, and the noise has {model.embedding.channels}"
    for block in model.blocks:
        if block.attention is None or not isinstance(block.mlp, Dense):
            yield "a block is more than attention and an MLP"
        elif block.mlp.activation not in activations:
            yield f"its activation {block.mlp.activation!r} is not one of {', '.join(activations)}"


def unexecutable_denoiser(plan: Plan, model: Model, train: Train) -> Iterator[Diagnostic]:
    """Yield each word of the plan or workload that is not done while a diffusion transformer is trained."""
    if is_encoded(model):
        yield from _encoded(plan, model, train)
        model, train = denoiser_of(model), latent_work(model, train)
    name, memory, layout = model.name, plan.memory, plan.layout
    found = []
    for field in ("portions", "loss_portions"):
        if (count := getattr(memory, field)) > 1:
            found.append((f"memory.{field} = {count}", "samples are not cut in portions", f"leave {field} out"))
    if plan.overlap.tp and plan.overlap.how:
        why = "its blocks are not run part by part"
        found.append((f"overlap.how = {plan.overlap.how}", why, "leave tp out of overlap="))
    if plan.sequence.switches and layout.sp and layout.tp > 1:
        why = "tensor-parallel ranks each have a shard of the tokens that change places"
        found.append((f"sequence.algorithm = {plan.sequence.algorithm}", why, "say nosp, or tp1"))
    if plan.asks_peers:
        found.append((f"passes.policy = {plan.passes.policy}", "peers send hidden states of text", "say passes=fixed"))
    if plan.feedback.way != CHAIN:
        found.append((f"feedback.way = {plan.feedback.way}", "errors enter blocks of text", "drop feedback="))
    policy = read(plan.sync.policy)
    modules = policy.paths is not None and not policy.paths.mixed
    if policy.merged is not None or policy.taught is not None or modules:
        found.append((f"sync.policy = {plan.sync.policy}", "its heads or paths are of text", "take another sync"))
    if isinstance(model.head, NoisyClasses):
        found += _of_classes(plan, policy)
    if policy.helpers or policy.rule.decider is not None:
        why = "peers that only sum, and clients of a server, are not tried with samples that are noised"
        found.append((f"sync.policy = {plan.sync.policy}", why, "take another sync"))
    for place, why, help in found:
        yield _bad("P033", f"{place.partition(' = ')[2]} of {name} is priced and not run: {why}", f"plan.{place}", help)
    yield from _workload(model, train)


def _encoded(plan: Plan, model: Model, train: Train) -> Iterator[Diagnostic]:
    """Yield what is not done where a frozen encoder makes the latents that are trained on."""
    name, layout, patch = model.name, plan.layout, entry_of(model).patch
    each = patch * LATENT_PIXELS
    if train.image % each:
        near = max(1, round(train.image / each)) * each
        message = f"{name}: an image of {train.image} pixels a side is no whole number of patches of {each}"
        yield _bad("P033", message, f"image={train.image}", f"say image={near}")
    found = []
    if layout.tp > 1 or layout.cp > 1:
        found.append(("layout.tp, layout.cp", "the encoder is whole on every rank of a sample", "say tp1 and cp1"))
    if train.grow:
        found.append(("grow", "encoded microbatches are dealt to ranks once", "drop grow="))
    if policy := read(plan.sync.policy):
        if policy.reference or policy.rule.forwards:
            found.append((f"sync = {plan.sync.policy}", "its steps pass a batch more than once", "take another sync"))
        if policy.paths is not None:
            why = "samples are routed by themselves, and not by what is made of them"
            found.append((f"sync = {plan.sync.policy}", why, "take another sync"))
    for place, why, help in found:
        said, where = place.partition(" = ")[0], f"plan.{place}"
        yield _bad("P033", f"{said} of {name} is priced and not run: {why}", where, help)


def _of_classes(plan: Plan, policy: SyncPolicy) -> Iterator[tuple[str, str, str]]:
    """Yield what a classifier of noisy samples, which is small, does not share out: place, reason and help."""
    why = "a sample's class is told by the mean of its tokens, which one rank has"
    for axis in ("tp", "cp"):
        if (size := getattr(plan.layout, axis)) > 1:
            yield f"layout.{axis} = {size}", why, f"take {axis}1: ranks of dp share out the samples"
    if policy.paths is not None:
        why = "its classes are the clusters that experts are trained on, and it is one model"
        yield f"sync.policy = {plan.sync.policy}", why, "drop sync"


def _workload(model: Model, train: Train) -> Iterator[Diagnostic]:
    name, film = model.name, model.embedding.frames
    words = {
        "adversarial": (train.adversarial, "embedded text is what is moved"),
        "dropout": (train.dropout, "its authors train without"),
        "phase": (train.lora is not None and "lora", "no adapters of it have names"),
        "lengths": (train.lengths is not None, "samples are no documents"),
        "pack": (train.pack, "samples are no documents"),
        "grow": (train.grow, "its spread is measured by parts of language models"),
        "align": (train.align, "its spread is measured by parts of language models"),
    }
    for word, (said, why) in words.items():
        if said:
            yield _bad("P033", f"{word}= of {name} is priced and not run: {why}", f"{word}=", f"drop {word}=")
    if bool(train.frames) != bool(film):
        help = f"say frames={film}" if film else "drop frames="
        what = "videos, and frames are not said" if film else "images, which have no frames"
        yield _bad("P033", f"{name} is trained on {what}", f"frames={train.frames}", help)
        return
    places, left = divmod(train.seq_len, max(1, train.frames))
    if left or isqrt(places) ** 2 != places:
        side = max(1, round(places**0.5))
        message = f"{train.seq_len} tokens are no {'frames of ' if film else ''}square images of patches"
        help = f"say seq={side**2 * max(1, train.frames)}: {side} x {side} patches of {model.embedding.patch}"
        yield _bad("P033", f"{name}: {message}", f"seq={train.seq_len}", help)
