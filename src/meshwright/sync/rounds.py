"""Rounds: which part of the layers is due after which step of a round, and what no round can be.

A round is ``when`` steps. Parts of the layers are due at different steps of it, as far apart as they can be (Streaming
DiLoCo, Douillard et al. 2501.18512, section 2.1), so that a link carries one after the other; the last of them, or all
layers where there are no parts, at the round's end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import msgspec

from meshwright.errors import Diagnostic
from meshwright.sync.codecs import codec
from meshwright.sync.fragments import TIED, as_it_is
from meshwright.sync.groups import graph
from meshwright.sync.paths import moduled
from meshwright.sync.record import ADDED

if TYPE_CHECKING:
    from meshwright.plan import Plan
    from meshwright.spec.model import Model
    from meshwright.sync.fragments import Fragment
    from meshwright.sync.record import SyncPolicy


def part_of(policy: SyncPolicy, layer: int, num_layers: int) -> int:
    """The part that a layer belongs to: the next one for each layer, or, in sequence, for each run of layers."""
    return layer % policy.parts if policy.strided else layer * policy.parts // num_layers


def parted(
    fragments: Iterable[Fragment], policy: SyncPolicy, layer_of: Callable[[int, int], int], num_layers: int
) -> tuple[Fragment, ...]:
    """Fragments with the part or the module that each is of, in no code where their layer's are not encoded; `layer_of`
    (stage, segment) is the number of a layer in the model. A table that both ends share is of the first layer's part.
    """
    if policy.layers is not None:
        fragments = [f if f.units[0] < 0 or policy.encodes(layer_of(*f.units)) else as_it_is(f) for f in fragments]
    if policy.paths is not None:
        return tuple(
            f if f.units[0] < 0 else moduled(f, policy, policy.level_of(layer_of(*f.units), num_layers))
            for f in fragments
        )
    if policy.parts == 1:
        return tuple(fragments)

    def part(f: Fragment) -> int:
        return 0 if f.kind == TIED or f.units[0] < 0 else part_of(policy, layer_of(*f.units), num_layers)

    return tuple(msgspec.structs.replace(f, part=part(f)) for f in fragments)


def due_at(part: int, parts: int, every: int) -> int:
    """The step of a round, of 1 to `every`, after which a part is exchanged."""
    return (part + 1) * every // parts


def ended(policy: SyncPolicy, step: int) -> bool:
    """Return whether so many steps are whole rounds."""
    return step % policy.when == 0 if policy.growth is None else policy.growth.ended(step)


def since_due(policy: SyncPolicy, part: int, step: int) -> int:
    """Return the steps since a part was last due after so many steps, 0 where it is now. Rounds that grow have one
    part, which is applied as it is due: of them 1 says that it is not."""
    if policy.growth is not None:
        return int(not policy.growth.ended(step))
    return (step - due_at(part, policy.parts, policy.when)) % policy.when


def turns_of(policy: SyncPolicy, num_replicas: int) -> int:
    """Exchanges after which replicas that meet by a graph meet the same others again, 0 where all meet."""
    return len(graph(policy.group, num_replicas).turns) if policy.meets else 0


def begun(policy: SyncPolicy, part: int, step: int) -> int:
    """Return how often a part has been exchanged after so many steps."""
    if policy.growth is not None:
        return policy.growth.rounds_by(step)
    return (step - due_at(part, policy.parts, policy.when)) // policy.when + 1


def in_common(policy: SyncPolicy) -> bool:
    """Whether replicas that never hold the same parameters agree on those of the last exchange."""
    return policy.apart and not policy.outer.eager and not policy.differing_models


def impossible(plan: Plan, model: Model, policy: SyncPolicy) -> Iterator[Diagnostic]:
    """Records that no round can be, with the nearest that can."""
    h, parts, delay, layers = policy.when, policy.parts, policy.delay, model.num_layers
    if parts > layers:
        yield _bad(
            policy,
            f"{layers} layers are not divided into {parts} parts",
            f"say parts={min(layers, h)}",
        )
    elif parts > h:
        yield _bad(policy, f"{parts} parts are not due at different steps of {h}", f"say parts={min(layers, h)}")
    levels = len(policy.paths.levels) if policy.paths is not None else 0
    if levels > layers:
        modules = "x".join(map(str, policy.paths.levels[:layers]))
        yield _bad(policy, f"{layers} layers are not divided into {levels} levels", f"say levels={modules}")
    if policy.layers and policy.layers[-1] >= layers:
        yield _bad(
            policy,
            f"layer {policy.layers[-1]} is encoded, and the model's are 0 to {layers - 1}",
            "say what meshwright predict prints for this model, or leave coded out of its question",
        )
    if delay > h or (delay == h and "delay" in policy.values):
        yield _bad(
            policy,
            f"a result {delay} steps late is not there when the next exchange begins, {h} steps later",
            f"say delay={h - 1}" if h > 1 else "say delay=0",
        )
    if policy.early and (plan.layout.zero or policy.rule.together(plan) > 1):
        yield _bad(
            policy,
            "layers are updated within the backward of replicas of one rank, and ranks of this plan step together",
            "say start=update, or drop what shards and cp",
        )
    if codec(policy.codec).ring and not (policy.combine in ADDED and policy.rule.decider is None and not policy.meets):
        yield _bad(
            policy,
            f"codes that are added around a ring make a sum of all, and this is combine={policy.combine}, an exchange "
            "with some, or one with a server",
            "leave ring=yes out",
        )
    if parts > 1 and model.tied_embeddings and plan.layout.pp > 1:
        yield _bad(
            policy,
            "the table that embedding and head share lies on both ends of the pipeline, in parts that are due at "
            "different times",
            "say parts=1, or drop pp",
        )


def _bad(policy: SyncPolicy, message: str, help: str) -> Diagnostic:
    return Diagnostic(code="Y003", message=message, place=f"plan.sync.policy = {policy.text}", help=help)
