"""Spread of steps over drawn batches: their times as numbers, and their part of an answer."""

from __future__ import annotations

import numpy as np

from meshwright.answer.drawn import BatchSpread
from meshwright.answer.prediction import Assumption
from meshwright.simulate.batches import Batches, GroupUse
from meshwright.simulate.unfolded import MOST_TASKS
from meshwright.spec.workload import Train

#: What drawn steps take longer than the same work in equal microbatches, in an attribution.
UNEQUAL = "unequal"
#: Relative difference of step times that sums in another order leave.
ROUNDING = 1e-9


def batch_spread(batches: Batches, train: Train) -> BatchSpread:
    """Return the distribution of the step time over the drawn batches, and the share of useful tokens in them."""
    p10, p50, p90 = (float(q) for q in np.quantile(batches.steps_s, [0.1, 0.5, 0.9]))
    drawn = batches.drawn
    useful = float(drawn.useful().mean())
    return BatchSpread(
        packing=train.packing,
        num_draws=drawn.num_draws,
        mean_s=batches.mean_s,
        p10_s=p10,
        p50_s=p50,
        p90_s=p90,
        unequal_s=batches.unequal_s if batches.unequal_s > ROUNDING * batches.mean_s else 0.0,
        useful_tokens=useful,
        useful=useful / train.tokens_per_step,
        documents=sum(count for _, count in drawn.documents()) / drawn.num_draws,
        gap=drawn.laid.gap,
        groups=batches.groups,
    )


def with_unequal(split: dict[str, float], batches: Batches) -> dict[str, float]:
    """The attribution of the same work in equal microbatches, with what the drawn steps wait beyond it, so that it sums
    to their mean; where they happen to wait less, every entry is shorter."""
    extra = batches.unequal_s
    extra = extra if abs(extra) > ROUNDING * batches.mean_s else 0.0
    shorter = 1.0 if extra >= 0 else batches.mean_s / batches.even.step_time_s
    out = {cause: seconds * shorter for cause, seconds in split.items()}
    return out | {UNEQUAL: max(0.0, extra)}


def _groups(use: GroupUse) -> Assumption:
    """The groups that were formed, and how good they may be."""
    sizes = ", ".join(f"{count:,.3g} of {size:,}" for size, count in sorted(use.sizes.items(), reverse=True))
    return Assumption(
        "groups of ranks",
        f"{sizes} in {use.rounds:,.3g} rounds of a step",
        f"groups={use.method}, formed for each drawn batch by a line through prices of its passes; within "
        f"{use.gap:.1%} of the least that any groups take",
    )


def drawn_assumptions(batches: Batches, train: Train) -> list[Assumption]:
    """Return the assumptions behind steps of drawn batches."""
    rows = "laid into microbatches" if train.packing == "balanced" else "laid into sequences"
    out = [
        Assumption(
            "drawn batches",
            f"{batches.drawn.num_draws} of documents of {train.lengths.mean:,.0f} tokens on average, {train.packing}",
            f"lengths= of the workload, drawn with seed={train.seed}; documents are {rows} before they are shuffled",
        )
    ]
    if batches.distinct > batches.priced:
        out.append(
            Assumption(
                "microbatches between priced ones",
                f"{batches.priced} of {batches.distinct:,} priced",
                "the others lie between two of them by the operations of their attention",
            )
        )
    slices = batches.typical.lowered.stages.plan.layout.dp
    if batches.groups is not None:
        slices *= batches.typical.lowered.stages.plan.layout.cp
        out.append(_groups(batches.groups))
    if batches.distinct > 1 and batches.classes < slices:
        out.append(
            Assumption(
                "data-parallel ranks folded",
                f"{slices:,} as {batches.classes:,}, each its group's costliest",
                f"a step graph of {MOST_TASKS:,} tasks at most",
                flagged=True,
            )
        )
    return out
