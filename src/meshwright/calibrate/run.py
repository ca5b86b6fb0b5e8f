"""The whole calibration of kernels: tables to curves to files, with the report in between."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from meshwright.atomic import write_bytes
from meshwright.calibrate.kernels import FittedCurve, fit, profile
from meshwright.calibrate.samples import CLASSES, LeftRows, samples
from meshwright.calibrate.transfer import leave_out
from meshwright.cost.carried import Carried
from meshwright.cost.curve import CurveProfile, Fit
from meshwright.cost.fitted import FORMAT_VERSION, read_profile
from meshwright.version import VERSION

#: Kinds of curves that each class of ``--only`` fits again; what a folder holds of others is kept.
OPS = {
    "gemm": ("gemm",),
    "attention": ("prefill", "decode", "flash_fwd", "flash_bwd"),
    "moe": ("grouped_gemm",),
    "latent": ("latent", "expanded"),
    "scan": ("scan", "scan_flashinfer", "step", "convolution", "convolution_blocks", "convolution_step"),
}


class Calibrated(NamedTuple):
    """The result of a calibration: fitted curves, the errors on each device left out, and the rows skipped."""

    fits: list[FittedCurve]
    left: list[Carried]
    skipped: list[LeftRows]


def calibrate(
    data: Path,
    *,
    classes: tuple[str, ...] = tuple(CLASSES),
    device: str = "",
    holdout: float = 0.2,
    progress: Callable[[str], None] = lambda line: None,
) -> Calibrated:
    """Fit every curve that the tables of a folder allow; of one device when it is named.

    Raises:
        MeshwrightError: K codes for tables that cannot be measurements or are too small.
    """
    found, skipped = samples(data, classes, device)
    fits = []
    for sample in found:
        progress(f"fitting {sample.device.name} {sample.op} {sample.dtype}: {len(sample.seconds)} rows")
        fits.append(fit(sample, holdout))
    made = by_device(fits)
    left = [] if device else leave_out([one.sample for one in fits], made, made)
    return Calibrated(fits, left, skipped)


def by_device(fits: list[FittedCurve]) -> dict[str, CurveProfile]:
    """Profiles of all devices that were fitted."""
    curves: dict[str, list] = {}
    for fitted in fits:
        curves.setdefault(fitted.sample.device.name, []).append(fitted.fit)
    return {name: profile(name, own) for name, own in sorted(curves.items())}


def write(done: Calibrated, classes: tuple[str, ...], folder: Path) -> list[Path]:
    """One file per device in `folder`; curves of classes that were not fitted stay as they are. The spreads of
    carried curves are written when devices were left out."""
    folder.mkdir(parents=True, exist_ok=True)
    refitted = {op for name in classes for op in OPS[name]}
    written = []
    for name, fresh in by_device(done.fits).items():
        path = folder / f"{name}.json"
        kept = []
        if path.is_file():
            kept = [c for c in read_profile(path.read_bytes(), path.name).curves if c.op not in refitted]
        merged = profile(name, [*kept, *fresh.curves])
        write_bytes(path, _text(merged))
        written.append(path)
    if done.left:
        path = folder / "transfer.json"
        known = msgspec.json.decode(path.read_bytes())["left_out"] if path.is_file() else []
        left = [*msgspec.convert(known, list[Carried]), *done.left]
        left = [one for one in left if one in done.left or one.op not in refitted]
        left.sort(key=lambda one: (one.op, one.dtype, one.device, one.left))
        lines = ",\n".join(msgspec.json.encode(one).decode() for one in left)
        columns = msgspec.json.encode(Carried.__struct_fields__).decode()
        head = f'{{"code_version":"{VERSION}","format_version":{FORMAT_VERSION},"columns":{columns},"left_out":[\n'
        write_bytes(path, f"{head}{lines}\n]}}\n".encode())
        written.append(path)
    return written


def merge(device: str, fits: list[Fit], folder: Path) -> Path:
    """Write curves of a device into its file in `folder`, in place of those of the same kernels; the others stay."""
    folder.mkdir(parents=True, exist_ok=True)
    path, fresh = folder / f"{device}.json", {(f.op, f.dtype) for f in fits}
    kept = read_profile(path.read_bytes(), path.name).curves if path.is_file() else ()
    write_bytes(path, _text(profile(device, [*(c for c in kept if (c.op, c.dtype) not in fresh), *fits])))
    return path


def _text(profile: CurveProfile) -> bytes:
    """JSON with one curve per line: small, and a refit shows in a diff."""
    record = msgspec.to_builtins(profile)
    curves = ",\n".join(msgspec.json.encode(c).decode() for c in record.pop("curves"))
    head = msgspec.json.encode(record).decode()
    return f'{head[:-1]},"curves":[\n{curves}\n]}}\n'.encode()
