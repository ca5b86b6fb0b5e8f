"""Fitted curves as a link of the cost chain: asked before the roofline, answers from constants learned on tables.

A device with curves of its own is priced by them; another device of the same vendor by those of its nearest
relative, whose constants are fractions of the hardware's own peaks and so carry over, with the wider spread that
leaving whole devices out showed. Other vendors' devices are left to the roofline.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from math import hypot
from pathlib import Path

import msgspec

from meshwright import catalog
from meshwright.cost.carried import KIN as OF_KIN
from meshwright.cost.carried import NEAR, OTHER, ROOFLINE, SAME, Carried, Spreads, width
from meshwright.cost.chain import EXTRAPOLATED, SCAN_SIGMA, Estimate, Link, joined, roofline_estimate
from meshwright.cost.curve import FADE_OCTAVES, CurveProfile, CurveShape, Fit, Residual, hardware, sigma_class
from meshwright.cost.curves_attention import DECODE, FORWARD, LATENT
from meshwright.cost.curves_gemm import GEMM, GROUPED
from meshwright.cost.curves_scan import CONVOLUTION, CONVOLUTION_BLOCKS, CONVOLUTION_STEP, PERSISTENT, SCAN, STEP
from meshwright.cost.points import point
from meshwright.cost.relatives import asynchronous, clock_under_limit, distance, generation, nearness
from meshwright.errors import MeshwrightError
from meshwright.spec.cluster import load_device
from meshwright.spec.hardware import Device
from meshwright.work import AttentionCore, Convolution, Gemm, GroupedGemm, Scan, Work

FORMAT_VERSION = 1
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
#: Spread (one standard deviation of the log) of a rule's step that is priced by another rule's: those of two rules and
#: three kernels reach 0.68 to 0.90 of one device's bandwidth (tables of NVIDIA AIConfigurator, H100).
STEP_SIGMA = 0.15
#: Extra spread (one standard deviation of the log) per octave outside the measured range: an assumption, as no
#: table reaches beyond itself.
SIGMA_PER_OCTAVE = 0.10
#: Share of FlashAttention-2's rate that the first FlashAttention reaches: 25 to 40% of the peak where the second
#: reaches 50 to 73% (Dao 2307.08691, abstract; the middles of both ranges).
FIRST_FLASH = 32.5 / 61.5


class BoundCurve:
    """A fit bound to a device: constants as a tuple, hardware as a tuple, texts made once."""

    def __init__(self, fit: Fit, owner: Device, device: Device, dtype: str, spreads: Spreads):
        shape = SHAPES[fit.op]
        self.owner = owner.name
        self.op, self.seconds, self.axes = fit.op, shape.seconds, shape.axes
        self.constants = tuple(fit.constants[c.name] for c in shape.constants)
        self.hardware = hardware(device, dtype, slower=clock_under_limit(owner, device, dtype))
        self.residual = Residual(fit)
        self.sigma = fit.sigma
        self.shared_bound = 1.0 if fit.shared_bound else 0.0
        self.source = f"fitted: {device.name} {fit.op} {fit.dtype} from {fit.source}, {fit.rows} rows"
        self.near = OF_KIN if width(fit.dtype) != width(dtype) else nearness(owner, device)
        if owner.name != device.name or self.near == OF_KIN:
            apart = spreads.of(fit.op, self.near, dtype)
            self.sigma = tuple(max(s, more) for s, more in zip(fit.sigma, apart))
        if owner.name != device.name:
            self.source = f"fitted: {owner.name} {fit.op} {fit.dtype} from {fit.source}, carried to {device.name}"
        self.cause = CAUSES.get(fit.op, "attention")
        # Products of 16 bits of one generation left out and predicted from an older one's curve: 21% off for the H100
        # from the A100 where the roofline is 13% off, 13% against 10% for the B200. Attention carries better, and
        # products of fewer bits do too: 29% off for the B200 from the H200, where the roofline, which knows nothing of
        # quantising, is 55% off. Those of experts carry worse from the A100 (44% against 18%); what engines run on a
        # newer generation is faster than the kernel of the tables even there (B200).
        newer = generation(device) > generation(owner) and self.cause == "gemm"
        self.outdated = newer
        self.outdated_served = newer and (fit.op == "grouped_gemm" or width(dtype) >= 2)

    def start_as(self, other: Fit | None) -> None:
        """Start as soon as another curve's kernels do, where these start later for what runs before them."""
        if other is not None:
            self.constants = (min(self.constants[0], other.constants["start_us"]), *self.constants[1:])

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


class Fitted:
    """The link. `serving`: attention also writes new keys and values to a cache. `flash`: the generation of
    FlashAttention that training runs on every device, 0 for the one written for the device's own. `fused`: operands are
    quantised by the kernel before a product, where the tables' products come after a kernel of its own. `fastest`: of
    kernels for the same products the fastest one runs. `library`: the engine whose kernels serve."""

    def __init__(
        self,
        profiles: dict[str, CurveProfile],
        spreads: Spreads,
        *,
        serving: bool = False,
        flash: int = 0,
        fused: bool = False,
        fastest: bool = False,
        library: str = "",
    ):
        self.profiles = profiles
        self.spreads = spreads
        self._serving, self._library, self._fastest = serving, library, fastest
        self._fused = fused
        self._flash = flash
        self._curves: dict[tuple[str, tuple[str, ...], str], tuple[BoundCurve, ...]] = {}

    def __call__(self, work: Work, device: Device) -> Estimate | None:
        """Return the seconds of a work item on a device with their source; None where no curve covers it."""
        found = point(work, serving=self._serving, library=self._library)
        if found is None:
            return None
        ops = found.ops or self._core(work, device)
        curves = self._known(device, ops, found.dtype, found.like)
        if not curves:
            return self._by_roofline(work, device, ops, found.like or found.dtype)
        answer, curve = joined([one.price(found.x) for one in curves]), curves[0]
        for other in found.instead if self._fastest else ():
            kernels = self._known(device, ops, other.dtype)
            if kernels and kernels[0].owner == curve.owner:
                answer = min(answer, kernels[0].price(other.x), key=lambda one: one.seconds)
        if getattr(work, "backward", False) and isinstance(work, Scan | Convolution):
            # forwards were measured alone: as many operations and bytes more as the backward has
            return answer._replace(sigma=max(answer.sigma, SCAN_SIGMA), source=answer.source + ", backward by its work")
        if isinstance(work, Scan) and work.rule != "delta":
            said = answer.source + ", a step of the delta rule's of as many bytes"
            return answer._replace(sigma=max(answer.sigma, STEP_SIGMA), source=said)
        if self._flash == 1 and curve.op in ("flash_fwd", "flash_bwd"):
            return answer._replace(seconds=answer.seconds / FIRST_FLASH, source=answer.source + ", as FlashAttention 1")
        return answer

    def _known(self, device: Device, ops: tuple[str, ...], dtype: str, like: str = "") -> tuple[BoundCurve, ...]:
        """The curves that answer for a precision, bound once."""
        key = (device.name, ops, dtype)
        if key not in self._curves:
            self._curves[key] = self._bound(device, ops, dtype, like)
        return self._curves[key]

    def _bound(self, device: Device, ops: tuple[str, ...], dtype: str, like: str) -> tuple[BoundCurve, ...]:
        """The curves that answer: a device's own, or the nearest one's. None where the roofline is nearer.

        Of what engines run on a device none of whose generation was measured, the nearest of each distance answer
        together, as their libraries differ (products of experts' more than devices do: those stay with the nearest)."""
        known = KIN if self._serving else TRAINED
        kin = known.get(dtype, (dtype,)) if not like else STORED_KIN.get(dtype, (dtype,)) + known.get(like, (like,))
        curve = nearest_curve(self, device, ops, dtype, kin=kin)
        if curve is None:
            return ()
        curves = (curve,)
        if self._serving and curve.near in (NEAR, OTHER) and curve.op != "grouped_gemm" and not curve.outdated_served:
            curves = from_each_distance(self, device, ops, dtype, kin)
        if self._fused:
            for one in curves:
                one.start_as(self._sixteen(one))
        # what training frameworks take beside products was fitted with the roofline under them
        return tuple(one for one in curves if not (one.outdated_served if self._serving else one.outdated))

    def _by_roofline(self, work: Work, device: Device, ops: tuple[str, ...], dtype: str) -> Estimate | None:
        """The roofline's answer for products, as sure as it was of those of devices that were measured."""
        if not isinstance(work, Gemm | GroupedGemm):
            return None
        found = roofline_estimate(work, device)
        spread = self.spreads.of(ops[0], ROOFLINE, dtype)[sigma_class(found.seconds)]
        return found._replace(sigma=max(found.sigma, spread))

    def _sixteen(self, curve: BoundCurve) -> Fit | None:
        """The products of 16-bit operands of the device that a curve of quantised ones is of."""
        own = self.profiles[curve.owner].curves if curve.op == "gemm" else ()
        return next((c for c in own if c.op == "gemm" and c.dtype == "bf16"), None)

    def _core(self, work: AttentionCore, device: Device) -> tuple[str, ...]:
        """Which tables stand for an attention core that is not decoding: of the same use first, and in training
        those of kernels written for the device's generation."""
        old = self._flash > 0 or not asynchronous(device)
        if work.backward:
            return ("flash_bwd",) if old else ()
        if self._serving:
            return ("prefill",)
        return ("flash_fwd",) if old else ("prefill",)


def nearest_curve(
    link: Fitted,
    device: Device,
    ops: tuple[str, ...],
    dtype: str,
    allowed: Iterable[str] | None = None,
    kin: tuple[str, ...] = (),
) -> BoundCurve | None:
    """The curve of a device's own or of its nearest relative among `allowed` (all that have profiles), of the
    precisions `kin` that stand in for one another."""
    kin = kin or KIN.get(dtype, (dtype,))
    names = link.profiles if allowed is None else allowed
    fits = [(name, f) for name in names for f in link.profiles[name].curves if f.op in ops and f.dtype in kin]
    own = [(name, f) for name, f in fits if name == device.name]
    # Other devices' records are read only when there is nothing of the device's own.
    candidates = [
        ((distance(owner, device, kin.index(fit.dtype)), name, ops.index(fit.op)), fit, owner)
        for name, fit in own or fits
        for owner in (load_device(name),)
        if owner.vendor == device.vendor
    ]
    if not candidates:
        return None
    _, fit, owner = min(candidates, key=lambda c: c[0])
    if fit.op == "flash_bwd":
        fit = _slowed(link, fit, owner, device)
    return BoundCurve(fit, owner, device, dtype, link.spreads)


def from_each_distance(
    link: Fitted, device: Device, ops: tuple[str, ...], dtype: str, kin: tuple[str, ...]
) -> tuple[BoundCurve, ...]:
    """The nearest curve of each distance from a device that nobody measured, the nearest of all first."""
    by_near: dict[str, list[str]] = {SAME: [], NEAR: [], OTHER: []}
    for name in link.profiles:
        by_near[nearness(load_device(name), device)].append(name)
    found = (nearest_curve(link, device, ops, dtype, names, kin) for names in by_near.values())
    return tuple(curve for curve in found if curve is not None)


def _slowed(link: Fitted, fit: Fit, owner: Device, device: Device) -> Fit:
    """A backward curve carried to a generation where only the forward of the same kernels was measured: it reaches
    that much less of the peak there as the forward does."""
    if owner.architecture == device.architecture:
        return fit
    forward = {name: c for name, p in link.profiles.items() for c in p.curves if c.op == "flash_fwd"}
    here = [name for name in sorted(forward) if load_device(name).architecture == device.architecture]
    if owner.name not in forward or not here:
        return fit
    ratio = forward[here[0]].constants["of_peak"] / forward[owner.name].constants["of_peak"]
    return msgspec.structs.replace(fit, constants={**fit.constants, "of_peak": fit.constants["of_peak"] * ratio})


def read_profile(text: bytes, place: str) -> CurveProfile:
    """One file of curves.

    Raises:
        MeshwrightError: K008 when it is no profile of this format.
    """
    help = "write it again with: meshwright calibrate --data DIR --out FOLDER"
    try:
        version = msgspec.json.decode(text).get("format_version")
        if version != FORMAT_VERSION:
            raise MeshwrightError.one(
                "K008", f"format_version {version} is not {FORMAT_VERSION}, the one read here", place=place, help=help
            )
        return msgspec.json.decode(text, type=CurveProfile)
    except (msgspec.DecodeError, AttributeError) as wrong:
        raise MeshwrightError.one("K008", f"not a kernel profile: {wrong}", place=place, help=help) from None


@cache
def profiles(folder: Path | None = None, *, serving: bool = False) -> tuple[dict[str, CurveProfile], Spreads]:
    """(device name -> its curves, spreads of what is carried between devices) of a folder; default: the catalog's.

    `serving` adds those of the folder ``serving`` in it: kernels that serving engines alone run, and devices of which
    these alone were measured. What training frameworks run there is another library's, and their profiles were fitted
    beside the roofline."""
    where = folder or catalog.folder("profiles").joinpath("kernels")
    found: dict[str, CurveProfile] = {}
    left: tuple[Carried, ...] = ()
    if serving and where.joinpath("serving").is_dir():
        found |= profiles(where.joinpath("serving"))[0]
    for file in sorted(where.iterdir(), key=lambda f: f.name):
        if file.name == "transfer.json":
            left = msgspec.convert(msgspec.json.decode(file.read_bytes())["left_out"], tuple[Carried, ...])
        elif file.name.endswith(".json"):
            profile = read_profile(file.read_bytes(), file.name)
            curves = (*profile.curves, *(found[profile.device].curves if profile.device in found else ()))
            found[profile.device] = msgspec.structs.replace(profile, curves=curves)
    return found, Spreads(left)


def measured_few(known: dict[str, CurveProfile]) -> dict[str, CurveProfile]:
    """Return the profiles in the user's own folder, with what `known` has of the same devices and other kernels.

    Raises:
        MeshwrightError: K008 when a file there is no profile of this format.
    """
    found = {}
    where = catalog.measured_here() / "kernels"
    for file in sorted(where.glob("*.json")) if where.is_dir() else ():
        own = read_profile(file.read_bytes(), str(file))
        said = {(c.op, c.dtype) for c in own.curves}
        others = known[own.device].curves if own.device in known else ()
        curves = (*own.curves, *(c for c in others if (c.op, c.dtype) not in said))
        found[own.device] = msgspec.structs.replace(own, curves=curves)
    return found


def link(
    *,
    serving: bool = False,
    flash: int = 0,
    fused: bool = False,
    fastest: bool = False,
    folder: Path | None = None,
    without: str = "",
    library: str = "",
) -> Link:
    """The fitted curves as a link for ``Costs(links=(...,))``.

    `serving`: attention also writes a cache (inference engines). `flash`: generation of FlashAttention that training
    runs on every device (0: the device's own). `fused`: no kernel of its own quantises a product's operands. `fastest`:
    of kernels for the same products the fastest one runs, as engines choose by trying. `folder`: profiles that
    ``meshwright calibrate --out`` wrote, instead of the catalog's. `without`: a device as if nobody had measured it.
    `library`: the engine that serves, which may have kernels of its own. Curves in the user's own folder (``calibrate
    --few``) stand before the catalog's.
    """
    known, spreads = profiles(folder, serving=serving)
    if folder is None:
        known = known | measured_few(known)
    if without:
        known, spreads = {n: p for n, p in known.items() if n != without}, spreads.without(without)
    return Fitted(known, spreads, serving=serving, flash=flash, fused=fused, fastest=fastest, library=library)
