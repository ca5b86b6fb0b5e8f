"""Megatron-LM's precisions: of matrix products, and of stored gradients, master copy and moments.

Parameters are 16 bits wide with an fp32 master copy; the precision-aware optimizer of Transformer Engine stores
master copy and moments in less, sharded over data parallelism.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.export import limits as shared
from meshwright.export.gap import Gap
from meshwright.export.megatron_model import Flags
from meshwright.export.request import ExportRequest

#: Compute precision below 16 bits -> flags beside --bf16.
RECIPES: dict[str, Flags] = {
    "fp8": {"--fp8-format": "hybrid", "--fp8-recipe": "tensorwise"},
    "fp8_block": {"--fp8-format": "e4m3", "--fp8-recipe": "blockwise"},
    "mxfp8": {"--fp8-format": "e4m3", "--fp8-recipe": "mxfp8"},
    "nvfp4": {"--fp4-format": "e2m1", "--fp4-recipe": "nvfp4"},
}
#: Numbers that stay 32 bits wide: nothing is said about them.
WIDE = "fp32"


def limits(r: ExportRequest) -> Iterator[Gap]:
    yield from _compute(r)
    yield from _gradients(r)
    yield from _optimizer(r)


def _compute(r: ExportRequest) -> Iterator[Gap]:
    known = ("fp32", "fp16", "bf16", *RECIPES)
    yield from shared.multiplies(r, known, f"its recipes below 16 bits are {', '.join(RECIPES)}", "fp8")
    if r.compute == "fp16" and r.plan.experts.ep > 1:
        yield Gap(
            facet="precision.compute",
            value="fp16 experts",
            reason="expert parallelism goes with bf16 and fp32",
            help="say bf16",
            mend={"precision.compute": "bf16"},
        )
    if r.has_experts and r.compute in ("fp16", "fp32"):
        yield Gap(
            facet="precision.compute",
            value=f"grouped experts in {r.compute}",
            reason="its grouped products are bf16 or less",
            help="say bf16",
            mend={"precision.compute": "bf16"},
        )


def _gradients(r: ExportRequest) -> Iterator[Gap]:
    grads, wanted = r.plan.precision.grads, _gradient_types(r.compute)
    if grads not in wanted:
        yield Gap(
            facet="precision.grads",
            value=f"grads={grads} beside {r.compute}",
            reason=f"it stores gradients in {' or '.join(wanted)}",
            help="say grads=fp32",
            mend={"precision.grads": WIDE},
        )


def _gradient_types(compute: str) -> tuple[str, ...]:
    return {"fp32": (WIDE,), "fp16": (WIDE, "fp16")}.get(compute, (WIDE, "bf16"))


def _optimizer(r: ExportRequest) -> Iterator[Gap]:
    p = r.plan.precision
    if r.compute != "fp32" and p.master not in (WIDE, "fp16"):
        yield Gap(
            facet="precision.master",
            value=f"master={p.master}",
            reason="it keeps a master copy in fp32 or fp16",
            help="say master=fp32",
            mend={"precision.master": WIDE},
        )
    if aware(r) and (
        r.layout.zero == 0 or r.layout.dp * r.layout.cp == 1 or r.train.optimizer not in ("adam", "adamw")
    ):
        yield Gap(
            facet="precision.moments",
            value=f"master={p.master} moments={p.moments}",
            reason="only Adam whose state is sharded over data parallelism stores less than fp32",
            help="say zero1, or master=fp32 moments=fp32",
            mend={"precision.master": WIDE, "precision.moments": WIDE},
        )


def aware(r: ExportRequest) -> bool:
    """Whether some of the optimizer's state is stored in less than 32 bits."""
    p = r.plan.precision
    return p.moments != WIDE or (r.compute != "fp32" and p.master == "fp16")


def precision(r: ExportRequest) -> Flags:
    """Return the flags of the precisions of products and of stored state."""
    p = r.plan.precision
    out: Flags = {}
    if r.compute != "fp32":
        out["--fp16" if r.compute == "fp16" else "--bf16"] = True
        out |= RECIPES.get(r.compute, {})
        if p.grads == WIDE:
            out["--accumulate-allreduce-grads-in-fp32"] = True
        elif p.grads == "bf16":
            out["--grad-reduce-in-bf16"] = True
    if aware(r):
        out["--use-precision-aware-optimizer"] = True
        out["--main-grads-dtype"] = "bf16" if p.grads == "bf16" else WIDE
        out["--main-params-dtype"] = p.master if r.compute != "fp32" else WIDE
        out |= {"--exp-avg-dtype": p.moments, "--exp-avg-sq-dtype": p.moments}
    return out
