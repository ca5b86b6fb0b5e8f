"""Gaps: what a target cannot express of a plan, all of it at once, each with the nearest thing that it can.

A gap names the facet, its value and the reason, and may carry the values (``mend``) that would close it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import msgspec

from meshwright.errors import Diagnostic, Infeasible
from meshwright.export.request import ExportRequest
from meshwright.plan import Plan

if TYPE_CHECKING:
    from meshwright.export.deployment import Deployment


class Gap(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that a target cannot express.

    ``facet`` is the plan's (``layout.zero``), the workload's (``train.dropout``), ``model`` or ``cluster``; ``value``
    its value as it would be said; ``mend`` the plan's fields and values that close the gap, empty when none does.
    """

    facet: str
    value: str
    reason: str
    help: str = ""
    mend: dict[str, object] = {}


Limits = Callable[[ExportRequest], Iterable[Gap]]


def refuse(gaps: list[Gap], request: ExportRequest | Deployment, nearest: str, target: str) -> Infeasible:
    """The error with one E001 per gap; the last one's help says the `nearest` plan when there is one."""
    found = []
    for gap in gaps:
        help = gap.help
        if gap is gaps[-1] and nearest:
            help = f"{help}; {nearest}" if help else nearest
        found.append(
            Diagnostic(
                code="E001",
                message=f"{target} cannot express {gap.value}: {gap.reason}",
                place=_place(gap, request.plan),
                help=help,
            )
        )
    return Infeasible(found)


def with_changes(plan: Plan, changes: dict[str, object]) -> Plan:
    """`plan` with fields such as ``layout.zero`` replaced."""
    for field, value in changes.items():
        facet, _, name = field.partition(".")
        plan = msgspec.structs.replace(plan, **{facet: msgspec.structs.replace(getattr(plan, facet), **{name: value})})
    return plan


def _place(gap: Gap, plan: Plan) -> str:
    """Where the plan says it, with its value there."""
    facet, _, name = gap.facet.partition(".")
    if facet not in Plan.__struct_fields__:
        return gap.facet
    return f"plan.{gap.facet} = {getattr(getattr(plan, facet), name)}" if name else f"plan.{facet}"
