"""Sensitivities: the step time under 10% more of each resource."""

from __future__ import annotations

from meshwright.answer.prediction import Sensitivity
from meshwright.causes import CAUSE
from meshwright.cost import Costs
from meshwright.simulate.clock import step_times
from meshwright.simulate.price import Pricer
from meshwright.simulate.simulated import Simulated
from meshwright.simulate.step import timed


def sensitivities(run: Simulated, costs: Costs) -> tuple[Sensitivity, ...]:
    """The change of the step time by 10% more of each resource: the same graph re-priced and re-timed."""
    levels = used_levels(run)
    named = [("gemm", "matrix units 10% faster"), ("attention", "attention kernels 10% faster")]
    named.append(("elementwise", "device memory 10% faster"))
    if run.priced.parts[:, CAUSE["host"]].any():
        named.append(("host", "host 10% faster"))
    named += [(level, f"{level} links 10% faster") for level in levels]
    under = [(Pricer(faster), faster) for faster in (costs.faster(name, 1.1) for name, _ in named)]
    steps = _steps(run, under)
    if run.moving is not None:
        steps = [own + run.share * more for own, more in zip(steps, _steps(run.moving, under))]
    out = []
    for (name, what), step in zip(named, steps):
        change = step / run.step_time_s - 1
        if abs(change) > 5e-5:
            out.append(Sensitivity(name=name, what=what, change=change))
    return tuple(sorted(out, key=lambda s: s.change))


def _steps(run: Simulated, under: list[tuple[Pricer, Costs]]) -> list[float]:
    """Seconds of a step by each of these prices."""
    if run.round is not None:
        return [timed(run.lowered, faster, one).step_time_s for one, faster in under]
    return step_times(run.lowered, [(one.all(run.lowered.programs), faster) for one, faster in under])


def used_levels(run: Simulated) -> dict[str, None]:
    """Names of the levels that some collective or message of the step crosses, from the inside out."""
    contexts = [part.stages.context() for part in run.lowered.parts]
    groups = [group for c in contexts for group in c.groups]
    for program in run.lowered.programs:
        groups += [move.group for move in (program.moves[:1] if program.kind == "send" else program.moves)]
    return {hop.name: None for group in dict.fromkeys(groups) for hop in group.hops}
