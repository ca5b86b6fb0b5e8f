"""The nearest plan that a target can express and that fits: the refused plan, mended, predicted, and mended on.

The first candidate is the plan with every gap closed. Where that does not fit, what takes memory off a device is tried
step by step (recompute, smaller microbatches, sharded state, a replica over more devices): all plans that are one step
away, then all that are two; the fastest of the first that fit is the nearest. Where that is slower than the refused
plan by more than a few percent, those another step away are looked at as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import msgspec

from meshwright.export.gap import Limits, with_changes
from meshwright.export.request import ExportRequest
from meshwright.plan import Plan, check

if TYPE_CHECKING:
    from meshwright.search.evaluate import Evaluated

#: Mending one facet can open another gap (folding pp into dp, say); the longest chain of the targets here is three.
ROUNDS = 4
#: A plan that is slower than this many times the refused one is not taken before plans another step away were seen.
WORTH = 1.05
#: A nearest plan that is slower by this share is one that a search may well beat.
FAR = 0.1
#: Steps away from the mended plan, and the plans that are predicted at most.
DEPTH, MOST = 3, 150


class Nearest(msgspec.Struct, frozen=True, kw_only=True):
    """A plan that the target can express. Where it was predicted: seconds of its step and of the refused plan's, the
    bytes that each leaves on its fullest device (negative: it does not fit), and the profile whose costs those are."""

    plan: Plan
    step_time_s: float = 0.0
    headroom_bytes: float = 0.0
    refused_step_time_s: float = 0.0
    refused_headroom_bytes: float = 0.0
    framework: str = ""

    @property
    def fits(self) -> bool:
        return self.headroom_bytes >= 0

    def text(self, target: str) -> str:
        """Describe the nearest plan in the words of a refusal: the plan, whether it fits, how much slower it is."""
        words = f'--plan "{self.plan.text()}"'
        if not self.step_time_s:
            return f"the nearest plan that {target} can express: {words}"
        if not self.fits:
            over = f"{_gib(-self.headroom_bytes)} over{self._costs()}"
            return (
                f"the nearest plan that {target} can express does not fit, {over}: {words}; "
                "meshwright search --for finds the fastest that does"
            )
        change = self.step_time_s / self.refused_step_time_s - 1
        slower = (
            f"{abs(change):.1%} {'slower' if change > 0 else 'faster'} than" if abs(change) >= 5e-4 else "as fast as"
        )
        over = -self.refused_headroom_bytes
        alike = f" (which does not fit, {_gib(over)} over)" if over > 0 else ""
        return (
            f"the nearest plan that {target} can express and that fits: {words}, {self.step_time_s:.3g} s a step, "
            f"{slower} the refused one{alike}, {_gib(self.headroom_bytes)} left{self._costs()}"
            + ("; meshwright search --for looks further" if change > FAR else "")
        )

    def _costs(self) -> str:
        return f" (costs of {self.framework})" if self.framework else ""


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"


def nearest(request: ExportRequest, limits: Limits, framework: str | None) -> Nearest | None:
    """The nearest plan; None when no plan closes the gaps, or the refused one is all there is.

    It is predicted with the profile of `framework` ("" for the standard one), and fits where one was found; without a
    `framework` it is only the plan with its gaps closed.
    """
    first = mended(request, limits)
    if first is None or first == request.plan:
        return None
    if framework is None:
        return Nearest(plan=first)
    from meshwright.cost import standard_on
    from meshwright.search.evaluate import Evaluator

    costs = standard_on(request.cluster, framework, request.train.dtype)
    evaluate = Evaluator(request.model, request.cluster, request.train, costs)
    refused = evaluate(request.plan)
    found = [(first, evaluate(first))]
    seen, ring, fitting = {request.plan, first}, [first], []
    for _ in range(DEPTH):
        before, fitting = fitting, [pair for pair in found if pair[1].fits]
        if before or (fitting and _seconds(_fastest(fitting)) <= WORTH * refused.step_time_s):
            break
        ring = [plan for plan in _beyond(request, limits, ring) if not (plan in seen or seen.add(plan))]
        ring = ring[: max(0, MOST - len(seen))]
        found += [(plan, evaluate(plan)) for plan in ring]
    fitting = [pair for pair in found if pair[1].fits]
    plan, result = _fastest(fitting) if fitting else found[0]
    return Nearest(
        plan=plan,
        step_time_s=result.step_time_s,
        headroom_bytes=result.headroom_bytes,
        refused_step_time_s=refused.step_time_s,
        refused_headroom_bytes=refused.headroom_bytes,
        framework=framework,
    )


def _seconds(pair: tuple[Plan, Evaluated]) -> float:
    return pair[1].step_time_s


def _fastest(pairs: list[tuple[Plan, Evaluated]]) -> tuple[Plan, Evaluated]:
    return min(pairs, key=_seconds)


def mended(request: ExportRequest, limits: Limits) -> Plan | None:
    """The plan with every gap that a plan can close closed; None when that is not a legal plan."""
    plan = request.plan
    for _ in range(ROUNDS):
        asked = msgspec.structs.replace(request, plan=plan)
        changes = {field: value for gap in limits(asked) for field, value in gap.mend.items()}
        if not changes:
            break
        plan = with_changes(plan, changes)
        if check(plan, request.model, request.cluster, request.train):
            return None
    left = limits(msgspec.structs.replace(request, plan=plan))
    return None if any(gap.facet.partition(".")[0] in Plan.__struct_fields__ for gap in left) else plan


def _beyond(request: ExportRequest, limits: Limits, plans: Iterable[Plan]) -> Iterator[Plan]:
    """Plans one step away from any of these that are legal and that the target can express."""
    for plan in plans:
        for changes in _steps(plan):
            changed = with_changes(plan, changes)
            if check(changed, request.model, request.cluster, request.train):
                continue
            expressed = mended(msgspec.structs.replace(request, plan=changed), limits)
            if expressed is not None:
                yield expressed


def _steps(plan: Plan) -> Iterator[dict[str, object]]:
    """Changes that take memory off a device, each the smallest of its kind."""
    layout, pipeline = plan.layout, plan.pipeline
    if plan.memory.recompute != "full":
        yield {"memory.recompute": "full", "memory.layers": 0}
    if plan.memory.recompute == "none" and plan.memory.attention != "flash":
        yield {"memory.recompute": "selective", "memory.layers": 0}
    if pipeline.microbatch % 2 == 0:
        yield {"pipeline.microbatch": pipeline.microbatch // 2}
    for zero in range(layout.zero + 1, 4):
        yield {"layout.zero": zero}
    if layout.shard:
        yield {"layout.shard": 0}
    if layout.dp % 2 == 0:
        half = {"layout.dp": layout.dp // 2, "layout.shard": 0}
        yield {**half, "layout.tp": 2 * layout.tp}
        yield {**half, "layout.cp": 2 * layout.cp}
        deeper = {**half, "layout.pp": 2 * layout.pp, "layout.stages": ()}
        yield deeper
        yield {**deeper, "pipeline.vpp": 1, "pipeline.schedule": "1f1b"}
    if pipeline.vpp > 1 and layout.pp > 1:
        yield {"pipeline.vpp": 1, "pipeline.schedule": "1f1b", "layout.stages": ()}
