"""Profiles of software as files: the constants that a fit found, with their errors and their source.

A step's error is that of the whole step. Of steps that were launches alone it is the host's, and the profile says
nothing of kernels.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from meshwright.atomic import write_bytes
from meshwright.calibrate.framework import FrameworkFit
from meshwright.calibrate.framework_memory import MemoryFit
from meshwright.cost import Framework, frameworks
from meshwright.cost.framework import FORMAT_VERSION, Defaults
from meshwright.cost.unknown import Evidence, likened, middle
from meshwright.spec.toml_text import dumps

#: How the parts of a profile's source begin that a fit writes, and those that it ends.
TIMES, MEMORY = "host times and passes fitted to", "memory fitted to"
UNFITTED = "not measured apart"
#: How the part begins that is said of steps which tell nothing of kernels.
LAUNCHES = "the steps were launches alone"


def report(fits: list[FrameworkFit]) -> list[str]:
    """One line a framework: its constants and both errors."""
    lines = []
    for fit in fits:
        values = ", ".join(f"{name} {value:g}" for name, value in fit.constants.items())
        outside = "no second model to leave out" if fit.left_out is None else f"left out {fit.left_out:.1%}"
        lines.append(
            f"{fit.framework}: {fit.rows} rows, {fit.groups} models; in sample {fit.in_sample:.1%}, {outside}; {values}"
        )
    return lines


def _resourced(source: str, start: str, said: str) -> str:
    """A profile's source with the part that starts like this said anew; what it says of other constants stays."""
    ends = (TIMES, UNFITTED) if start == TIMES else (start,)
    parts = [part for part in source.split("; ") if part and not part.startswith(ends)]
    place = 0 if start == TIMES else len(parts)
    return "; ".join([*parts[:place], said, *parts[place:]])


def profiles(fits: list[FrameworkFit], memory: list[MemoryFit]) -> dict[str, Framework]:
    """The catalog's profiles with what was fitted in them; those without a fit keep their flagged defaults."""
    found = dict(frameworks())
    for fit in fits:
        outside = "" if fit.left_out is None else f", {fit.left_out:.1%} with shapes left out"
        said = f"{TIMES} {fit.fitted_rows or fit.rows} of {fit.rows} measured steps of {fit.groups} shapes of models: "
        said += f"{fit.in_sample:.1%} mean error in sample{outside}"
        # the standard deviation of a normal error is 1.25 times its mean absolute value
        sigma = round(1.25 * (fit.in_sample if fit.left_out is None else fit.left_out), 3)
        for old in [f for f in found.values() if fit.framework in (f.name, f.constants_of)]:
            found[old.name] = msgspec.structs.replace(
                old,
                **fit.constants,
                pinned=fit.pinned,
                bits=fit.bits,
                step_sigma=sigma,
                source=_resourced(old.source, TIMES, said),
                flagged=False,
            )
    for one in memory:
        changed = {"activation_copies": one.activation_copies}
        if one.allocator_slack is not None:
            changed |= {"allocator_slack": one.allocator_slack, "ahead_layers": one.ahead_layers}
        said = f"{MEMORY} {one.rows} measured peaks: {one.in_sample:.1%} mean error in sample"
        said += "" if one.left_out is None else f", {one.left_out:.1%} with models left out"
        # the standard deviation of a normal error is 1.25 times its mean absolute value
        changed["memory_sigma"] = round(1.25 * (one.in_sample if one.left_out is None else one.left_out), 3)
        old = found[one.framework]
        found[one.framework] = msgspec.structs.replace(old, **changed, source=_resourced(old.source, MEMORY, said))
    for fit in fits:
        if fit.launches_alone:
            for old in [f for f in found.values() if fit.framework in (f.name, f.constants_of)]:
                found[old.name] = _of_launches(old, found)
    return {name: likened(one, tuple(found.values())) if one.like else one for name, one in found.items()}


def _of_launches(one: Framework, known: dict[str, Framework]) -> Framework:
    """Return a profile whose steps were launches alone: their error is the host's; that of a step which computes, and
    of the passes of its kernels, is how far stacks of the same kernels lie apart."""
    others = middle(Evidence(kernels=one.kernels), without=(one.name,), known=known.values())
    return msgspec.structs.replace(
        one,
        host_sigma=one.step_sigma,
        passes_sigma=others.passes_sigma,
        step_sigma=others.step_sigma,
        source=_resourced(one.source, LAUNCHES, f"{LAUNCHES}, so that their error is of the host's times"),
    )


def write(found: dict[str, Framework], folder: Path) -> list[Path]:
    """One TOML file a profile, as the catalog holds them."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for profile in found.values():
        path = folder / f"{profile.name.replace('-', '_')}.toml"
        write_bytes(path, as_toml(profile).encode())
        paths.append(path)
    return paths


def as_toml(profile: Framework) -> str:
    """A profile as the catalog holds it: what differs from the usual values."""
    usual = Framework(name="")
    table = {"format_version": FORMAT_VERSION, "name": profile.name}
    for field in Framework.__struct_fields__:
        value = getattr(profile, field)
        if field not in ("name", "defaults") and value != getattr(usual, field):
            table[field] = list(value) if isinstance(value, tuple) else value
    defaults = {
        field: list(value) if isinstance(value, tuple) else value
        for field in Defaults.__struct_fields__
        if (value := getattr(profile.defaults, field)) != getattr(usual.defaults, field)
    }
    return dumps({**table, "defaults": defaults})
