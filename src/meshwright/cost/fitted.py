"""Fitted curves as a link of the cost chain: asked before the roofline, answers from constants learned on tables.

A device with curves of its own is priced by them; another device of the same vendor by those of its relatives
(``bound``), whose constants are fractions of the hardware's own peaks and so carry over, with the wider spread that
leaving devices and precisions out showed. Other vendors' devices are left to the roofline.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import msgspec

from meshwright import catalog
from meshwright.cost.bound import KIN, LEAST_WEIGHT, STORED_KIN, TRAINED, BoundCurve, curves_for, joined, weight
from meshwright.cost.carried import Carried, Spreads
from meshwright.cost.chain import SCAN_SIGMA, Estimate, Link, roofline_estimate
from meshwright.cost.curve import CurveProfile, Fit, sigma_class
from meshwright.cost.points import flash_3, point
from meshwright.cost.relatives import ROOFLINE_APART, asynchronous, generation
from meshwright.errors import MeshwrightError
from meshwright.spec.cluster import load_device
from meshwright.spec.hardware import Device
from meshwright.spec.workload import DTYPE_BYTES
from meshwright.work import AttentionCore, Convolution, Gemm, GroupedGemm, Scan, Work

FORMAT_VERSION = 1
#: Spread (one standard deviation of the log) of a rule's step that is priced by another rule's: those of two rules and
#: three kernels reach 0.68 to 0.90 of one device's bandwidth (tables of NVIDIA AIConfigurator, H100).
STEP_SIGMA = 0.15
#: Time of a scan's backward over that of its forward, which keeps next to nothing for it: the median of 24 pairs of the
#: gated delta rule (chunk_gated_delta_rule of flash-linear-attention 0.5.1 in CUDA graphs, 8,192 and 32,768 tokens in 1
#: to 8 sequences, 16 and 32 heads of 128: QwenLM/FlashQLA, benchmark_results_H200.txt, 2.99 to 3.06, and
#: benchmark_results_GB200.txt, 2.91 to 4.00). Mamba-2's is taken to be alike: its kernels recompute states and products
#: of keys, and multiply 2.7 times as much as forward (state-spaces/mamba, ssd_combined.py).
SCAN_BACKWARD = 3.06
#: Share of FlashAttention-2's rate that the first FlashAttention reaches: 25 to 40% of the peak where the second
#: reaches 50 to 73% (Dao 2307.08691, abstract; the middles of both ranges).
FIRST_FLASH = 32.5 / 61.5
#: Kernels that training runs as engines do, whatever library has the products: scans of flash-linear-attention in
#: Triton and Dao's causal_conv1d. A device whose serving kernels alone were measured has its own curves of these.
KERNELS_ALIKE = ("scan", "convolution")


def products_library(device: Device) -> str:
    """Return the library whose kernels a device's own table of products in 16 bits is of, as serving is priced
    (``trtllm``, ``sglang``, ``torch``); "" where it has none."""
    own = profiles(serving=True)[0].get(device.name)
    fits = own.curves if own is not None else ()
    source = next((fit.source for fit in fits if (fit.op, fit.dtype) == ("gemm", "bf16")), "")
    return source.split()[1] if source else ""


class Fitted:
    """The link. `serving`: attention also writes new keys and values to a cache. `flash`: the generation of
    FlashAttention that training runs on every device, 0 for the one written for the device's own. `fused`: operands are
    quantised by the kernel before a product, where the tables' products come after a kernel of its own. `fastest`: of
    kernels for the same products the fastest one runs. `library`: the engine whose kernels serve. `alike`: the profiles
    that have :data:`KERNELS_ALIKE`, by default all."""

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
        alike: dict[str, CurveProfile] | None = None,
    ):
        self.profiles = profiles
        self._alike = profiles if alike is None else alike
        self.spreads = spreads
        self._serving, self._library, self._fastest = serving, library, fastest
        self._fused = fused
        self._flash = flash
        self._curves: dict[tuple[str, tuple[str, ...], str], tuple[BoundCurve, ...]] = {}

    def __call__(self, work: Work, device: Device) -> Estimate | None:
        """Return the seconds of a work item on a device with their source; None where no curve covers it."""
        if isinstance(work, Scan) and work.backward:
            return self._scan_back(work, device)
        if self._serving:
            work = flash_3(work, device, self._library)
        found = point(work, serving=self._serving, library=self._library)
        if found is None:
            return None
        ops = found.ops or self.core(work, device)
        curves = self.bound(device, ops, found.dtype, found.like)
        if not curves:
            return self._by_roofline(work, device, ops, found.like or found.dtype)
        answer, curve = self._joined(work, device, curves, found.x), curves[0]
        for other in found.instead if self._fastest else ():
            kernels = self.bound(device, ops, other.dtype)
            if kernels and (kernels[0].owner, kernels[0].dtype) == (curve.owner, other.dtype):
                answer = min(answer, self._joined(work, device, kernels, other.x), key=lambda one: one.seconds)
        if isinstance(work, Scan) and work.rule != "delta":
            step = work.seq_len == 1
            said = f"{answer.source}, a {'step' if step else 'scan'} of the delta rule's of as many bytes"
            answer = answer._replace(sigma=max(answer.sigma, STEP_SIGMA if step else SCAN_SIGMA), source=said)
        if isinstance(work, Convolution) and work.backward:
            # forwards were measured alone: as many operations and bytes more as the backward has
            return answer._replace(sigma=max(answer.sigma, SCAN_SIGMA), source=answer.source + ", backward by its work")
        if self._flash == 1 and curve.op in ("flash_fwd", "flash_bwd"):
            return answer._replace(seconds=answer.seconds / FIRST_FLASH, source=answer.source + ", as FlashAttention 1")
        return answer

    def _scan_back(self, work: Scan, device: Device) -> Estimate | None:
        """A backward of a scan as so many of its forward: of the tables' engines, none trains."""
        one = self(msgspec.structs.replace(work, backward=False), device)
        if one is None:
            return None
        sigma = max(one.sigma, SCAN_SIGMA)
        said = f"{one.source}, {SCAN_BACKWARD:g} forwards"
        return one._replace(seconds=one.seconds * SCAN_BACKWARD, sigma=sigma, source=said)

    def bound(self, device: Device, ops: tuple[str, ...], dtype: str, like: str = "") -> tuple[BoundCurve, ...]:
        """The curves that answer, nearest first, bound once: a device's own, or its relatives' together. None where the
        roofline is nearer: what training frameworks take beside products was fitted with the roofline under them on
        devices whose kernels nobody has measured in training on that generation or a newer one."""
        key = (device.name, ops, dtype)
        if key not in self._curves:
            self._curves[key] = self._bound(device, ops, dtype, like)
        return self._curves[key]

    def _bound(self, device: Device, ops: tuple[str, ...], dtype: str, like: str) -> tuple[BoundCurve, ...]:
        known = KIN if self._serving else TRAINED
        kin = known.get(dtype, (dtype,)) if not like else STORED_KIN.get(dtype, (dtype,)) + known.get(like, (like,))
        known_to = self._alike if ops and ops[0] in KERNELS_ALIKE else self.profiles
        curves = curves_for(known_to, self.spreads, device, ops, dtype, kin)
        matrix = not self._serving and dtype != "fp32" and "gemm" in ops
        if matrix and self._outdated(device):
            return ()
        if self._fused:
            for one in curves:
                one.start_as(self._sixteen(one))
        return curves

    def _outdated(self, device: Device) -> bool:
        """Whether every device that was measured is of an older generation or has another kind of matrix
        instructions."""
        known = [one for one in map(load_device, self.profiles) if one.vendor == device.vendor]
        return not any(
            asynchronous(one) == asynchronous(device) and generation(one) >= generation(device) for one in known
        )

    def _joined(self, work: Work, device: Device, curves: tuple[BoundCurve, ...], x: tuple[float, ...]) -> Estimate:
        """The price of a device's own curve, or of its relatives' and, of products, of the roofline."""
        if not curves[0].distance and curves[0].owner == device.name:
            return curves[0].price(x)
        prices = [(one.price(x), weight(one.distance)) for one in curves]
        if isinstance(work, Gemm | GroupedGemm):
            far = weight(ROOFLINE_APART[DTYPE_BYTES[work.dtype] < 2])
            if far >= LEAST_WEIGHT * prices[0][1]:
                found = roofline_estimate(work, device)
                prices.append((found._replace(sigma=max(found.sigma, prices[0][0].sigma)), far))
        return joined(prices)

    def _by_roofline(self, work: Work, device: Device, ops: tuple[str, ...], dtype: str) -> Estimate | None:
        """The roofline's answer for products, as sure as it was of those of devices that were measured."""
        if not isinstance(work, Gemm | GroupedGemm):
            return None
        found = roofline_estimate(work, device)
        spread = self.spreads.by_roofline(ops[0], dtype)[sigma_class(found.seconds)]
        return found._replace(sigma=max(found.sigma, spread))

    def _sixteen(self, curve: BoundCurve) -> Fit | None:
        """The products of 16-bit operands of the device that a curve of quantised ones is of."""
        own = self.profiles[curve.owner].curves if curve.op == "gemm" else ()
        return next((c for c in own if c.op == "gemm" and c.dtype == "bf16"), None)

    def core(self, work: AttentionCore, device: Device) -> tuple[str, ...]:
        """Which tables stand for an attention core that is not decoding: of the same use first, and in training
        those of kernels written for the device's generation."""
        old = self._flash > 0 or not asynchronous(device)
        if work.backward:
            return ("flash_bwd",) if old else ()
        if self._serving:
            return ("prefill",)
        return ("flash_fwd",) if old else ("prefill",)


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
    alike = known if serving else profiles(folder, serving=True)[0] | (measured_few(known) if folder is None else {})
    if without:
        known, spreads = {n: p for n, p in known.items() if n != without}, spreads.without(without)
        alike = {n: p for n, p in alike.items() if n != without}
    return Fitted(
        known, spreads, serving=serving, flash=flash, fused=fused, fastest=fastest, library=library, alike=alike
    )
