"""Hooks of gradients: which policies a communication hook of a data-parallel wrapper can be."""

from __future__ import annotations

from meshwright.sync.codecs import codec
from meshwright.sync.fragments import GRADIENTS
from meshwright.sync.record import ALL, SyncPolicy


def unhooked(policy: SyncPolicy) -> list[str]:
    """Return why a policy is none of gradients alone in every step, in words; empty when it is one."""
    return [
        why
        for why, holds in (
            ("its replicas hold models of their own", policy.differing_models),
            (f"it exchanges once in {policy.spacing:.4g} steps", policy.spacing != 1),
            (f"it exchanges {' and '.join(policy.fragments)}", policy.fragments != (GRADIENTS,)),
            (f"its result is applied {policy.delay} steps later", policy.delay != 0),
            ("its replicas have text of their own", policy.own_data),
            ("it takes gradients half-way", policy.reference != 0),
            (f"{policy.codec} chooses anew as gradients change", codec(policy.codec).adapts != 0),
            (f"it sends updates of {policy.rule.optimizer}", bool(policy.rule.optimizer)),
            ("its replicas are clients of a server", policy.rule.decider is not None),
            (
                "it encodes some layers, and a hook sees none",
                (policy.undecided and policy.coded) or policy.layers is not None,
            ),
            ("its sums are divided among replicas", policy.rule.name == "dedloc"),
            ("hosts make its sums, and not a hook", policy.hosted),
            (f"its replicas meet in {policy.group}", policy.group != ALL),
        )
        if holds
    ]
