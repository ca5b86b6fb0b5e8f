"""Slow ranks and steps that vary, as a part of an answer: the step in such a world, and what replicas wait in it."""

from __future__ import annotations

from meshwright.answer.prediction import Assumption
from meshwright.causes import of_kind
from meshwright.cost import Costs
from meshwright.errors import MeshwrightError
from meshwright.simulate.simulated import Simulated
from meshwright.simulate.slowed import slowed
from meshwright.simulate.stragglers import Stragglers, straggling
from meshwright.sync.policy import read
from meshwright.world.crowd import ALIKE
from meshwright.world.slow import SlowStep
from meshwright.world.trace import JobWorld

#: What a replica waits for slower ones, in an attribution.
WAITING = "stragglers"


def in_world(
    run: Simulated, costs: Costs, world: JobWorld | None, *, drawn: bool
) -> tuple[Simulated, Stragglers | None]:
    """The step of a plan that is simulated with ranks alike, in a world whose ranks are not, and how steps vary in it;
    `drawn`: its documents differ in length.

    Raises:
        MeshwrightError: O006 for plans in which slow ranks are not simulated.
    """
    if world is None or (world.slow is None and world.jitter is None):
        return run, None
    policy = None if run.lowered.several else read(run.lowered.plan.sync.policy)
    serves = policy is not None and policy.rule.decider is not None
    if serves and world.slow is None:  # clients of a server have a world of their own
        return run, None
    if drawn:
        message = "slow ranks are not simulated among documents of different lengths"
        raise MeshwrightError.one("O006", message, place="--world", help="leave lengths= out of the workload")
    apart = policy is not None and (run.round is not None or policy.meets)
    if not serves and (world.jitter is not None or apart):
        return run, straggling(run, costs, world.slow or SlowStep(seed=world.seed), world.jitter or ALIKE)
    return slowed(run, costs, world.slow), None


def with_waiting(split: dict[str, float], varied: Stragglers) -> dict[str, float]:
    """The attribution of a step in which nothing varies, with kernels as much longer as a replica's own step is, and
    what a replica waits for others besides; it sums to the mean step."""
    kernels = sum(split[cause] for cause in of_kind("kernel"))
    more = min(varied.own_s, varied.mean_s) - varied.even_s
    longer = dict.fromkeys(of_kind("kernel"), 1 + more / kernels if kernels else 1.0)
    return {cause: seconds * longer.get(cause, 1.0) for cause, seconds in split.items()} | {WAITING: varied.waits_s}


def varied_assumption(varied: Stragglers, world: JobWorld) -> Assumption:
    """The assumption behind steps that vary."""
    what = "" if world.jitter is None else f"jitter={world.jitter.text}, "
    return Assumption(
        "ranks that vary",
        f"{what}{varied.num_steps:,} steps simulated with seed={world.seed}",
        "factors on the passes of every rank, of one step independent of those of the next; the timeline is that of a "
        "step without them",
    )
