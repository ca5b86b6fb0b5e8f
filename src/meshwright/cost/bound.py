"""Fitted curves bound to a device: its own, or those of its relatives, joined by how near each is.

Of a device or a precision that nobody measured, every curve of the vendor prices the work, and the answer is the
weighted mean of the logarithms: inverse distance weighting (Shepard, 1968) over devices. Variants of one chip lie at
almost no distance and answer all but alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import exp, hypot, log

from meshwright.cost.carried import Spreads, width
from meshwright.cost.chain import EXTRAPOLATED, Estimate
from meshwright.cost.curve import FADE_OCTAVES, CurveProfile, CurveShape, Fit, Residual, hardware, sigma_class
from meshwright.cost.curves_attention import DECODE, FORWARD, LATENT
from meshwright.cost.curves_gemm import GEMM, GROUPED
from meshwright.cost.curves_scan import CONVOLUTION, CONVOLUTION_BLOCKS, CONVOLUTION_STEP, PERSISTENT, SCAN, STEP
from meshwright.cost.relatives import apart, change
from meshwright.cost.roofline import supports
from meshwright.spec.cluster import load_device
from meshwright.spec.hardware import Device

#: Which formula each kind of curve follows.
SHAPES: dict[str, CurveShape] = {
    "gemm": GEMM,
    "grouped_gemm": GROUPED,
    "prefill": FORWARD,
    "expanded": FORWARD,
    "flash_fwd": FORWARD,
    "flash_bwd": FORWARD,
    "decode": DECODE,
    "latent": LATENT,
    "scan": SCAN,
    "scan_flashinfer": PERSISTENT,
    "step": STEP,
    "convolution": CONVOLUTION,
    "convolution_blocks": CONVOLUTION_BLOCKS,
    "convolution_step": CONVOLUTION_STEP,
}
CAUSES = {
    "gemm": "gemm",
    "grouped_gemm": "gemm",
    "convolution": "elementwise",
    "convolution_blocks": "elementwise",
    "convolution_step": "elementwise",
}
#: Curves of one formula that stand in for a kind where no other device has one, in order.
FAMILY = {
    "flash_bwd": ("flash_fwd", "prefill"),
    "flash_fwd": ("prefill",),
    "prefill": ("flash_fwd",),
    "expanded": ("prefill",),
}
#: Precisions whose kernels stand in for one another, nearest first.
KIN = {
    "bf16": ("bf16", "fp16"),
    "fp16": ("fp16", "bf16"),
    "fp32": ("fp32",),
    "fp8": ("fp8", "fp8_block"),
    "fp8_row": ("fp8", "fp8_block"),
    "fp8_block": ("fp8_block", "fp8"),
    "mxfp8": ("fp8_block", "fp8"),
    "nvfp4": ("nvfp4", "fp8_block", "fp8"),
    "int8": ("int8", "fp8", "fp8_block"),
}
#: The same of experts' weights that are stored in fewer bits than they are multiplied in.
STORED_KIN = {"mxfp4_wo": ("mxfp4_wo", "int4_wo"), "nvfp4_wo": ("nvfp4_wo", "mxfp4_wo", "int4_wo")}
#: The same in training, where fp8 has one scale for a whole tensor and nothing to do inside the product: the tables'
#: fp8 kernel scales every token and reaches half of the peak in large products, where the one that scales blocks
#: reaches 60% (the H100's medians from 1e12 to 1e13 FLOP are 983 and 1,192 TFLOP/s of 1,979).
TRAINED = KIN | {"fp8": ("fp8_block", "fp8")}
#: Extra spread (one standard deviation of the log) per octave outside the measured range: an assumption, as no
#: table reaches beyond itself.
SIGMA_PER_OCTAVE = 0.10
#: A curve weighs as the distance to this negative power, and none nearer than this weighs more than as if it were so
#: far: fitted with the distances (``relatives``).
POWER, SOFT = 4.0, 0.25
#: Curves that weigh less than this share of the nearest are not asked, nor more than so many.
LEAST_WEIGHT, MOST_CURVES = 0.02, 8

#: (distance, place of its operation, name, curve, owner) of a curve of another device or precision.
_Relative = tuple[float, int, str, Fit, Device]


def weight(distance: float) -> float:
    """Return how much a curve at a distance weighs among others."""
    return (distance + SOFT) ** -POWER


class BoundCurve:
    """A fit bound to a device: constants as a tuple, hardware as a tuple, texts made once. `distance` is that of the
    curve (0: the device's own in that precision), `spread` the one that curves so far apart show, by class of
    duration."""

    def __init__(
        self,
        fit: Fit,
        owner: Device,
        device: Device,
        dtype: str,
        *,
        op: str = "",
        distance: float = 0.0,
        spread: tuple[float, ...] = (0.0,) * 4,
    ):
        shape = SHAPES[fit.op]
        self.owner, self.dtype, self.distance = owner.name, fit.dtype, distance
        self.op, self.seconds, self.axes = fit.op, shape.seconds, shape.axes
        changed = change(owner, device, ops=(fit.op, op or fit.op), dtypes=(fit.dtype, dtype))
        self.cycle = changed.cycle
        self.constants = tuple(
            fit.constants[c.name] * (changed.cycle if c.unit == "us" else 1.0) for c in shape.constants
        )
        sms, rate, *rest = hardware(device, dtype, slower=changed.clock)
        self.hardware = (sms, rate * changed.rate, *rest)
        self.residual = Residual(fit)
        self.sigma = tuple(max(own, more) for own, more in zip(fit.sigma, spread))
        self.shared_bound = 1.0 if fit.shared_bound else 0.0
        if owner.name == device.name:
            self.source = f"fitted: {device.name} {fit.op} {fit.dtype} from {fit.source}, {fit.rows} rows"
        else:
            self.source = f"fitted: {owner.name} {fit.op} {fit.dtype} from {fit.source}, carried to {device.name}"
        self.cause = CAUSES.get(fit.op, "attention")

    def start_as(self, other: Fit | None) -> None:
        """Start as soon as another curve's kernels do, where these start later for what runs before them."""
        if other is not None:
            start = min(self.constants[0], other.constants["start_us"] * self.cycle)
            self.constants = (start, *self.constants[1:])

    def price(self, x: tuple[float, ...]) -> Estimate:
        if self.op == "decode":
            x = (*x[:7], self.shared_bound)
        seconds = self.seconds(x, self.hardware, self.constants)
        at = self.axes(x)
        residual, outside = self.residual.at(at), self.residual.outside(at)
        if outside > 0.0:
            residual *= max(0.0, 1.0 - outside / FADE_OCTAVES)
        seconds *= 2.718281828459045**residual
        sigma = self.sigma[sigma_class(seconds)]
        if outside > 0.05:
            return Estimate(seconds, self.cause, self.source + EXTRAPOLATED, hypot(sigma, SIGMA_PER_OCTAVE * outside))
        return Estimate(seconds, self.cause, self.source, sigma)


def curves_for(
    profiles: dict[str, CurveProfile],
    spreads: Spreads,
    device: Device,
    ops: tuple[str, ...],
    dtype: str,
    kin: tuple[str, ...],
) -> tuple[BoundCurve, ...]:
    """The curves that price an operation of a device in a precision, nearest first: its own alone where it has one of
    the precisions `kin` that stand in for one another, else those of the vendor's other devices and precisions."""
    own = profiles[device.name].curves if device.name in profiles else ()
    mine = [f for f in own if f.op in ops and f.dtype in kin]
    if mine:
        fit = min(mine, key=lambda f: (kin.index(f.dtype), ops.index(f.op)))
        if fit.dtype == kin[0] or (fit.dtype in KIN.get(dtype, ()) and width(fit.dtype) == width(dtype)):
            return (BoundCurve(fit, device, device, dtype, op=ops[0]),)
        if not supports(device, dtype):  # what is multiplied there is this
            told = {"op": ops[0], "distance": apart(device, device, fit.dtype, kin[0])}
            return (BoundCurve(fit, device, device, dtype, spread=spreads.of(ops[0], told["distance"], dtype), **told),)
    for some in (ops, *((one,) for one in FAMILY.get(ops[0], ()))) if ops else ():
        found = _of_a_kind(sorted(_of_relatives(profiles, device, some, kin[0]), key=lambda one: one[:3]), kin[0])
        if found:
            nearest = found[0][0]
            least = LEAST_WEIGHT * weight(nearest)
            told = {"op": ops[0], "spread": spreads.of(ops[0], nearest, dtype)}
            return tuple(
                BoundCurve(fit, owner, device, dtype, distance=distance, **told)
                for distance, _, _, fit, owner in found[:MOST_CURVES]
                if weight(distance) >= least
            )
    return ()


def _of_relatives(
    profiles: dict[str, CurveProfile], device: Device, ops: tuple[str, ...], dtype: str
) -> Iterator[_Relative]:
    """Yield every curve of a vendor."""
    for name, profile in profiles.items():
        fits = [f for f in profile.curves if f.op in ops]
        owner = load_device(name) if fits else device
        if owner.vendor == device.vendor:
            for fit in fits:
                yield apart(owner, device, fit.dtype, dtype), ops.index(fit.op), name, fit, owner


def _of_a_kind(found: list[_Relative], dtype: str) -> list[_Relative]:
    """Return the curves of kernels that decode weights as they load them, for weights that are stored so, else those of
    kernels that do not; all where there are none of that kind."""
    return [one for one in found if one[3].dtype.endswith("_wo") == dtype.endswith("_wo")] or found


def joined(prices: Iterable[tuple[Estimate, float]]) -> Estimate:
    """Return the weighted mean of the logarithms of prices of one work item, (price, weight) each, nearest first. Its
    source is the first's, with how many others had a part in it."""
    told = list(prices)
    first = told[0][0]
    if len(told) == 1:
        return first
    total = sum(weight for _, weight in told)
    mean = sum(weight * log(one.seconds) for one, weight in told) / total
    sigma = sum(weight * one.sigma for one, weight in told) / total
    beyond = EXTRAPOLATED if first.source.endswith(EXTRAPOLATED) else ""
    source = f"{first.source.removesuffix(EXTRAPOLATED)}, with {len(told) - 1} more{beyond}"
    return first._replace(seconds=exp(mean), sigma=sigma, source=source)
