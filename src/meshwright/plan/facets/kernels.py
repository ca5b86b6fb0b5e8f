"""Kernels: whether chains of pointwise operators are compiled into one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from meshwright.errors import Diagnostic
from meshwright.plan.facet import KEYED, LAYER, Facet, Field, unrun, yes_no
from meshwright.spec import naming

if TYPE_CHECKING:
    from meshwright.plan.record import Plan
    from meshwright.spec.model import Model
    from meshwright.spec.workload import Train

#: Naming schemes of which all norms, rotations and activations are those that are compiled.
SCHOOLS = ("llama", "mixtral", "gpt2", "gemma", "gemma2", "deepseek", "phi", "phi3", "olmo2")


class Kernels(msgspec.Struct, frozen=True, kw_only=True):
    """``compile``: norms, rotations and activations of every block are one kernel each, as a compiler makes them
    (torch.compile), whatever the framework has them as."""

    compile: bool = False


def _unexecutable(plan: Plan, model: Model, train: Train) -> Iterator[Diagnostic]:
    if plan.kernels.compile and naming.school(model) not in SCHOOLS:
        message = f"compile=yes in the {model.family} family is priced and not run"
        yield unrun("P033", message, plan, "kernels", "compile = True", compile=False)


FIELDS = (
    Field(
        name="compile",
        help="norms, rotations and activations as one kernel each, compiled",
        form=yes_no(),
        spelled=KEYED,
        place=330,
        decides=(LAYER,),
    ),
)
FACET = Facet(
    name="kernels", help="how kernels are made", record=Kernels, fields=FIELDS, rules=(), unexecutable=_unexecutable
)
