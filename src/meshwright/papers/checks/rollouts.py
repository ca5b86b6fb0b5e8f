"""Cleanba: the same groups are trained on by the same versions, however fast devices are.

Huang et al., 2023 (arXiv 2310.00036), section 4. An actor that is told of new parameters when they come uses older or
newer ones by chance; one that acts a step behind the learner uses those of exactly one update before.
"""

from __future__ import annotations

from meshwright.papers.outcome import Check, Fact, Outcome
from meshwright.papers.published import RolloutQuestion
from meshwright.papers.rolled_out import rolled_out
from meshwright.world.rollouts import TrainGroups

WORDS = "prompts=8,samples=2,prompt=256,output=lognormal:median=400;sigma=1,cut=1792,devices=8"


def trained(more: str, on: str) -> tuple[TrainGroups, ...]:
    """Return what the steps of a job were trained on, with the ages."""
    asked = RolloutQuestion(model="qwen3-0.6b", on=on, train="seq=2048", rollout=f"{WORDS},{more}", plan="fsdp")
    job = rolled_out(asked).simulated
    assert job is not None
    return tuple(one for entry in job.log for one in entry.decisions if isinstance(one, TrainGroups))


def cleanba() -> Outcome:
    clusters = ("2x8xh100,ib400", "2x8xa100-80,roce25")
    step, never = ([trained(more, on) for on in clusters] for more in ("control=one-step", "staleness=8"))
    ages = {age for job in step for one in job[1:] for age in one.stale}
    return Outcome(
        facts=(
            Fact(
                "on two kinds of devices all steps train on the same answers of the same versions", step[0] == step[1]
            ),
            Fact("every one but the first is exactly one version old", ages == {1}),
            Fact("generation within a bound of eight versions trains on others on each kind", never[0] != never[1]),
        ),
        baseline="generation that waits for a bound of eight versions alone",
    )


CHECKS = {"cleanba": Check(cleanba)}
