"""Precision: the types of matrix products, and of stored parameters, gradients and optimizer state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from meshwright.errors import Diagnostic
from meshwright.plan.facet import ALONE, EXCHANGE, KEYED, LAYER, Facet, Field, names, unrun, wrong
from meshwright.spec.workload import DTYPE_BYTES, OPTIMIZER_MOMENTS

if TYPE_CHECKING:
    from meshwright.plan.record import Plan
    from meshwright.spec.cluster import Cluster
    from meshwright.spec.model import Model
    from meshwright.spec.workload import Train


STORED = ("fp32", "bf16", "fp16", "fp8", "none")
#: What a step may be computed in by the executor.
EXECUTED = ("fp32", "bf16", "float64")


class Precision(msgspec.Struct, frozen=True, kw_only=True):
    """``compute`` is the matmul precision ("" = the workload's). What is stored: working parameters ``params`` ("fp8":
    quantised only, as Transformer Engine's primary weights; else 16 bits with their quantised copies), gradients
    ``grads``, master copy ``master`` ("none": parameters are updated in place), optimizer ``moments``."""

    compute: str = ""
    params: str = "bf16"
    grads: str = "fp32"
    master: str = "fp32"
    moments: str = "fp32"


def _precision(plan: Plan, model: Model, cluster: Cluster, train: Train) -> Iterator[Diagnostic]:
    precision = plan.precision
    for name in ("grads", "moments"):
        if getattr(precision, name) == "none":
            yield wrong(
                "P022",
                f"{name}=none: there is nothing to train with",
                f"precision.{name} = none",
                "fp32, bf16 or fp16" if name == "grads" else "fp32, bf16 or fp8",
            )
    if train.optimizer not in OPTIMIZER_MOMENTS:
        yield wrong(
            "P022",
            f"unknown optimizer {train.optimizer!r}",
            "precision.moments",
            f"known: {', '.join(OPTIMIZER_MOMENTS)}",
        )

    compute = precision.compute or train.dtype
    if precision.params == "fp8" and compute in ("fp32", "fp16", "bf16"):
        yield wrong(
            "P022",
            f"params=fp8 keeps quantised weights only, and {compute} multiplies 16 bits or more",
            "precision.params = fp8",
            "say fp8, fp8_row, mxfp8 or fp8_block as well, or drop params=fp8",
        )


def _unexecutable(plan: Plan, model: Model, train: Train) -> Iterator[Diagnostic]:
    precision = plan.precision
    compute = precision.compute or train.dtype
    if compute not in EXECUTED:
        why = "needs loss scaling" if compute == "fp16" else "needs kernels torch has on few devices"
        message = f"{compute} is predicted, not trained: it {why}"
        yield unrun("P032", message, plan, "precision", f"compute = {compute}", compute="bf16")
    executed = {"params": ("bf16",), "grads": ("fp32", "bf16"), "master": ("fp32", "none"), "moments": ("fp32",)}
    for name, known in executed.items():
        value = getattr(precision, name)
        if value not in known:
            message = f"{name}={value} is predicted, not trained"
            yield unrun("P032", message, plan, "precision", f"{name} = {value}", **{name: known[0]})


FIELDS = (
    Field(
        name="dtype",
        attribute="compute",
        help="precision of the matrix products",
        form=names(*DTYPE_BYTES),
        spelled=ALONE,
        place=170,
        decides=(LAYER, EXCHANGE),
    ),
    Field(
        name="params",
        help="stored working parameters",
        form=names("bf16", "fp8"),
        spelled=KEYED,
        place=250,
        decides=(LAYER, EXCHANGE),
    ),
    Field(
        name="grads",
        help="stored gradients",
        form=names(*STORED),
        spelled=KEYED,
        place=260,
        decides=(LAYER, EXCHANGE),
    ),
    Field(
        name="master",
        help="master copy of the parameters",
        form=names(*STORED),
        spelled=KEYED,
        place=270,
        decides=(EXCHANGE,),
    ),
    Field(
        name="moments",
        help="stored optimizer moments",
        form=names(*STORED),
        spelled=KEYED,
        place=280,
        decides=(EXCHANGE,),
    ),
)
FACET = Facet(
    name="precision",
    help="what is computed and stored in how many bits",
    record=Precision,
    fields=FIELDS,
    rules=(_precision,),
    unexecutable=_unexecutable,
)
