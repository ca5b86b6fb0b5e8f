"""Precision: the types of matrix products, and of stored parameters, gradients and optimizer state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from meshwright.errors import Diagnostic
from meshwright.plan.facet import ALONE, EXCHANGE, KEYED, LAYER, Facet, Field, names, unrun, wrong
from meshwright.spec.workload import DTYPE_BYTES, FROZEN_BYTES, OF_MOMENTS, OPTIMIZER_MOMENTS, WEIGHT_BYTES

if TYPE_CHECKING:
    from meshwright.plan.record import Plan
    from meshwright.spec.cluster import Cluster
    from meshwright.spec.model import Model
    from meshwright.spec.workload import Train


STORED = ("fp32", "bf16", "fp16", "fp8", "none")
#: What a step may be computed in by the executor.
EXECUTED = ("fp32", "bf16", "float64")
#: Formats below 16 bits that the executor rounds the operands of its products to.
LOW = ("fp8", "fp8_row")


class Precision(msgspec.Struct, frozen=True, kw_only=True):
    """``compute`` is the matmul precision ("" = the workload's). What is stored: working parameters ``params`` ("fp8":
    quantised only, as Transformer Engine's primary weights; "nf4" and others of :data:`FROZEN_BYTES`: a frozen base
    under adapters, dequantised for every product; else 16 bits with their quantised copies), gradients
    ``grads``, master copy ``master`` ("none": parameters are updated in place), optimizer ``moments``.

    While serving, the matrices of layers may be stored in a quantised format and multiplied in ``compute``:
    ``weights``, "" as they are multiplied (Frantar et al. 2408.11743); those of experts in the format ``experts``, ""
    as the others."""

    compute: str = ""
    params: str = "bf16"
    grads: str = "fp32"
    master: str = "fp32"
    moments: str = "fp32"
    weights: str = ""
    experts: str = ""

    @property
    def experts_format(self) -> str:
        """The format that experts' weights are stored in, "" as they are multiplied."""
        return self.experts or self.weights


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
    if precision.params in FROZEN_BYTES and (train.lora is None or compute not in ("bf16", "fp16")):
        why = "is multiplied in 16 bits" if train.lora is not None else "is frozen: nothing trains such weights"
        yield wrong(
            "P022",
            f"params={precision.params} stores a base that {why}",
            f"precision.params = {precision.params}",
            "train adapters over it, phase=lora with dtype=bf16 (QLoRA); or drop params=",
        )
    multiplied = DTYPE_BYTES[compute]
    for name in ("weights", "experts"):
        stored = getattr(precision, name)
        if stored and WEIGHT_BYTES[stored] >= multiplied:
            yield wrong(
                "P022",
                f"{name}={stored} stores {WEIGHT_BYTES[stored]:g} bytes a weight, and {compute} has {multiplied:g}",
                f"precision.{name} = {stored}",
                f"drop {name}=, or multiply in 16 bits: bf16 {name}={stored}",
            )


def _formats(model: Model, cluster: Cluster) -> tuple[str, ...]:
    """Quantised weights that a search of serving may try: none, and one of four and of eight bits."""
    return ("", "int4", "int8")


def _unexecutable(plan: Plan, model: Model, train: Train) -> Iterator[Diagnostic]:
    precision = plan.precision
    compute = precision.compute or train.dtype
    if compute not in (*EXECUTED, *LOW):
        why = "needs loss scaling" if compute == "fp16" else "needs kernels torch has on few devices"
        message = f"{compute} is predicted, not trained: it {why}"
        near = "bf16" if compute == "fp16" else "fp8_row" if compute == "fp8_block" else "fp8"
        yield unrun("P032", message, plan, "precision", f"compute = {compute}", compute=near)
    if compute in LOW and plan.overlap.tp and not plan.overlap.how:
        message = f"{compute} with overlap=tp is priced and not run: products in the steps of a ring are of 16 bits"
        yield unrun("P032", message, plan, "precision", f"compute = {compute}", compute="bf16")
    frozen = tuple(FROZEN_BYTES) if train.lora is not None else ()
    executed = {
        "params": ("bf16", *frozen),
        "grads": ("fp32", "bf16"),
        "master": ("fp32", "none"),
        # parameters that are updated in place may have moments of their own type
        "moments": ("fp32", "bf16") if precision.master == "none" and compute in ("bf16", *LOW) else ("fp32",),
    }
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
        form=names("bf16", "fp8", *FROZEN_BYTES),
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
        form=names(*STORED, *OF_MOMENTS),
        spelled=KEYED,
        place=280,
        decides=(EXCHANGE,),
    ),
    Field(
        name="weights",
        help="stored weights of layers that are multiplied in more bits, while serving",
        form=names(*WEIGHT_BYTES),
        spelled=KEYED,
        place=284,
        decides=(LAYER,),
        serving=True,
        served=_formats,
        also={"w4a16": {"weights": "int4"}, "w8a16": {"weights": "int8"}},
    ),
    Field(
        name="expert_weights",
        attribute="experts",
        help="stored weights of experts that are multiplied in more bits, while serving",
        form=names(*WEIGHT_BYTES),
        spelled=KEYED,
        place=286,
        decides=(LAYER,),
        serving=True,
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
