"""Executability of plans by which diffusion transformers make images: what is not done, each with its reason."""

from __future__ import annotations

from meshwright.errors import Diagnostic
from meshwright.plan.executable import unexecutable
from meshwright.plan.record import Plan
from meshwright.spec import naming
from meshwright.spec.denoise import Denoise
from meshwright.spec.diffusion import NOISE_STEPS
from meshwright.spec.model import Model


def _bad(code: str, message: str, place: str, help: str) -> Diagnostic:
    return Diagnostic(code=code, message=message, place=place, help=help)


def unexecutable_images(plan: Plan, model: Model, denoise: Denoise) -> list[Diagnostic]:
    """Return everything that keeps a plan whose images are predicted from making them."""
    if not naming.denoises(model):
        message = f"{model.name} is predicted, and makes no images: its feature maps have no modules"
        return [_bad("P030", message, f"model {model.name}", "a diffusion transformer, such as dit-xl-2-256")]
    found = unexecutable(plan, model, denoise.train(model, plan.layout.dp))
    if denoise.experts > 1 and not denoise.router:
        message = f"{denoise.experts} experts are weighed by a router in each step, and none is said"
        help = "router=FOLDER: weights of a diffusion transformer with num_labels, trained on --clusters"
        found.append(_bad("P033", message, f"--denoise experts={denoise.experts}", help))
    if denoise.steps > NOISE_STEPS:
        message = f"{denoise.steps:,} steps, and the noise has {NOISE_STEPS:,}"
        found.append(_bad("P033", message, f"--denoise steps={denoise.steps}", f"say steps={NOISE_STEPS} or fewer"))
    if denoise.guidance and not model.embedding.classes:
        message = f"guidance needs classes, and {model.name} knows none"
        found.append(_bad("P033", message, "--denoise guidance=yes", "say guidance=no"))
    if model.embedding.frames and not plan.denoising.exact:
        said = f"stale={plan.denoising.stale}" if plan.denoising.stale != "none" else f"halo={plan.denoising.halo:g}"
        if said != "stale=stages":
            message = f"{said} of videos is priced and not run: ranks share frames there, and no patches"
            found.append(_bad("P033", message, f"plan.denoising {said}", "drop it"))
    return found
