"""``meshwright calibrate --few``: which products to measure on a device, and curves from those that were."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.cli.output import note, print_json
from meshwright.errors import Diagnostic, MeshwrightError

if TYPE_CHECKING:
    from meshwright.calibrate.few import Learned
    from meshwright.cli.calibrate_options import CalibrateOptions

MOST = 512


def run_few(given: CalibrateOptions, wrong: list[Diagnostic]) -> int:
    """0 when the table of what to measure was written, or curves were learned from one.

    Raises:
        MeshwrightError: K015 for a count that is none, K001 for options that do not go together or are missing.
    """
    if not (given.few.isdecimal() and 2 <= int(given.few) <= MOST):
        help = f"a whole number from 2 to {MOST}"
        message = f"{given.few!r} is no number of products"
        wrong.append(Diagnostic(code="K015", message=message, place="--few", help=help))
    if not given.device:
        message = "--few is of one device, and none is said"
        wrong.append(Diagnostic(code="K001", message=message, place="--few", help="--device NAME"))
    if given.only not in ("", "gemm"):
        message = f"--few learns matrix products, and --only says {given.only}"
        wrong.append(Diagnostic(code="K001", message=message, place="--only", help="drop --only"))
    if given.data and not Path(given.data).is_dir():
        wrong.append(Diagnostic(code="K001", message="not a folder", place=f"--data {given.data}"))
    if not given.data and not given.out:
        help = "--out DIR for the table of products to measure, then --data DIR"
        wrong.append(Diagnostic(code="K001", message="nothing says where to write", place="--few", help=help))
    if wrong:
        raise MeshwrightError(wrong)
    from meshwright import catalog
    from meshwright.calibrate import few
    from meshwright.calibrate.run import merge
    from meshwright.cost.fitted import profiles
    from meshwright.spec.cluster import load_device

    device, count = load_device(given.device), int(given.few)
    known = profiles(serving=True)[0]
    spreads = profiles()[1].without(device.name)
    if not given.data:
        path = few.write_table(few.to_measure(device, count, known, spreads), Path(given.out))
        again = f"meshwright calibrate --device {device.name} --few {count} --data {given.out}"
        note(f"wrote {path}: fill in latency_us, the microseconds of each product on {device.name}, drop the rows of")
        note(f"precisions that you do not use, then: {again}")
        return 0
    found = few.learned(Path(given.data), device, count, known, spreads)
    if given.json:
        print_json([one._asdict() | {"fit": one.fit} for one in found])
    else:
        for one in found:
            print(_line(device.name, one))
    path = merge(device.name, [one.fit for one in found], Path(given.out or catalog.measured_here()) / "kernels")
    note(f"wrote {path}" + ("" if given.out else f": predictions on {device.name} use it"))
    return 0


def _line(device: str, one: Learned) -> str:
    text = f"{device} {one.fit.dtype}: {one.measured} products measured, the rest by the ratio to {one.of} and others"
    text += f"; spread {one.fit.sigma[0]:.0%}"
    if not one.rows:
        return text
    (a, b), (c, d) = one.before, one.after
    text += f"\n  {one.rows} others of the table: {c:.1%} off in the median, {d:.1%} at the 90th percentile"
    return f"{text} ({a:.1%} and {b:.1%} by the curves of other devices alone)"
