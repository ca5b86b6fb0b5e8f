"""Assumptions of answers about networks of convolutions, beyond those of all others."""

from __future__ import annotations

from meshwright.answer.prediction import Assumption
from meshwright.plan import Plan
from meshwright.spec.denoise import DENOISE
from meshwright.spec.model import Model
from meshwright.spec.workload import Train


def convolution_assumptions(model: Model, train: Train, plan: Plan) -> list[Assumption]:
    """Return what is assumed of convolutions and of what is between them; nothing of models without any."""
    if not any(flow.scale for flow in model.flows):
        return []
    product = "implicit products, as fast as matrix products of their shapes"
    out = [
        Assumption(
            "convolutions",
            product,
            "cuDNN (1410.0759, section 3); no table of kernels has convolutions, and no time is counted for other "
            "layouts of maps",
            True,
        ),
        Assumption(
            "fewer multiplications", "none", "Winograd's (1509.09308) and Fourier's algorithms are not counted", True
        ),
        Assumption("convolutions in groups", "a product a group; one channel by itself takes its bytes", "no kernel"),
    ]
    if (plan.precision.compute or train.dtype) == "fp32":
        without = "PyTorch's convolutions round to TF32 on devices that have it, unless told not to"
        out.append(Assumption("fp32", "multiplied without TF32", without, True))
    if plan.kernels.compile:
        out.append(Assumption("norms and ReLU", "one kernel, which reads the maps twice", "plan word compile"))
    else:
        source = "PyTorch's eager kernels: statistics, scale and shift; ReLU in place; addition"
        out.append(Assumption("norms and ReLU", "kernels of their own", source))
    if train.phase == DENOISE:
        return [*out, *_shared_maps(plan)]
    if train.image:
        out += [
            Assumption("image", f"{train.image} x {train.image} pixels, 3 channels unless the model says", "workload"),
            Assumption("statistics of batch norms", "each rank's own images of a microbatch", "1706.02677, section 2"),
            Assumption("input", "images are there in time", "reading and decoding them is what --feed is asked", True),
            Assumption("operations of a step", "three times a forward's", "convention"),
        ]
    return out


def _shared_maps(plan: Plan) -> list[Assumption]:
    """Return what is assumed of ranks that share the rows of an image's maps."""
    if plan.layout.cp == 1:
        return []
    rows = "a row of each neighbour's map for every 3 x 3 convolution"
    copies = "what joins rows, or keys and values, of several ranks in one tensor takes no time"
    return [
        Assumption("edges", rows, "2402.19481, section 4"),
        Assumption("norms over groups", "sums of all ranks that share the image", "2402.19481, section 4"),
        Assumption("copies", copies, "kernels may read what was received where it lies", True),
    ]
