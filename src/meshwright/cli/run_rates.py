"""``meshwright run``: settings that follow from the model, and the learning rates of a plan whose rounds grow as they
fall."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from meshwright.errors import Diagnostic, MeshwrightError

if TYPE_CHECKING:
    from meshwright.plan import Plan
    from meshwright.run.settings import Settings
    from meshwright.spec.model import Model

#: Weight decay of classifiers, where none is said: that of He et al. (2015, 1512.03385, 3.4). With the 0.1 of language
#: models, a momentum of 0.9 and a learning rate of 0.02 weights shrink by 2% a step, and running statistics lag.
CLASSIFIERS_DECAY = 1e-4
#: That of diffusion transformers: none (Peebles and Xie, 2212.09748, section 4).
DENOISERS_DECAY = 0.0

#: Fields of the settings that say the schedule, by the option of ``run`` and that of the policy.
SAID = {
    "lr": ("--lr", "rate"),
    "decay_steps": ("--decay", "steps"),
    "warmup": ("--warmup", "warmup"),
    "min_lr": ("--min-lr", "floor"),
    "schedule": ("--schedule", "falls"),
}


def usual_of(model: Model) -> dict[str, float]:
    """Return the settings of a run that are others by default for a model than for language models."""
    from meshwright.spec.naming import classifies, denoises

    if denoises(model):
        return {"weight_decay": DENOISERS_DECAY}
    return {"weight_decay": CLASSIFIERS_DECAY} if classifies(model) else {}


def by_policy(settings: Settings, plan: Plan, said: set[str], steps: int) -> Settings:
    """Return the settings of a run whose plan says learning rates in ``sync=``, else `settings` as they are. `said` are
    the fields that the command line says.

    Raises:
        MeshwrightError: Y005 for every one that is another than the plan's, and for more steps than the plan's.
    """
    from meshwright.sync.policy import read

    policy = read(plan.sync.policy)
    growth = policy.growth
    if growth is None:
        return settings
    of_plan = {
        "lr": growth.peak,
        "decay_steps": growth.steps,
        "warmup": growth.warmup,
        "min_lr": growth.floor,
        "schedule": growth.schedule,
    }
    place = f"plan.sync.policy = {policy.text}"
    wrong = []
    for field, value in of_plan.items():
        option, word = SAID[field]
        if field in said and getattr(settings, field) != value:
            message = f"{option} {getattr(settings, field)} is not the {word}={value} by which the plan's rounds grow"
            wrong.append(Diagnostic(code="Y005", message=message, place=place, help=f"leave {option} out, or say it"))
    if steps > growth.steps:
        message = f"{steps} steps are more than the {growth.steps} that the plan's rounds are laid out for"
        wrong.append(Diagnostic(code="Y005", message=message, place=place, help=f"say steps={steps} in sync="))
    if wrong:
        raise MeshwrightError(wrong)
    return msgspec.structs.replace(settings, **of_plan)
