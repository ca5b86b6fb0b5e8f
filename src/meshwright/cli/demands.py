"""Demands of ``meshwright search`` on plans: memory left over, engines that run them, whose costs they have."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

from meshwright.errors import Diagnostic, MeshwrightError

if TYPE_CHECKING:
    from meshwright.search.engines import Demands
    from meshwright.spec.cluster import Cluster
    from meshwright.spec.model import Model
    from meshwright.spec.workload import Train

_ROOM = re.compile(r"(\d+(?:\.\d+)?)\s*(%|gib|gb|mib|mb)", re.IGNORECASE)
_UNITS = {"gib": 2.0**30, "gb": 1e9, "mib": 2.0**20, "mb": 1e6}


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """``--headroom``, ``--for`` and ``--framework`` as they were said."""

    headroom: str = ""
    engines: str = ""
    framework: str = ""

    @property
    def names(self) -> list[str]:
        """The engines, each once."""
        return list(dict.fromkeys(name.strip().lower() for name in self.engines.split(",") if name.strip()))

    @property
    def profile(self) -> str:
        """The framework whose costs they are: the one that is named, else the one engine's own."""
        from meshwright.export.runnable import profile

        return self.framework or profile(self.names)

    def wrong(self) -> list[Diagnostic]:
        """Return a diagnostic for each unknown engine and for a headroom that cannot be read."""
        from meshwright.export.runnable import unknown

        found = unknown(self.names or [self.engines] * bool(self.engines), f"--for {self.engines}")
        if self.headroom and room_bytes(self.headroom, 1.0) is None:
            found.append(
                Diagnostic(
                    code="R013",
                    message=f"{self.headroom!r} is no amount of memory to leave",
                    place=f"--headroom {self.headroom}",
                    help="a share of the device's memory below 100%, or an amount: --headroom 5%, --headroom 4GiB",
                )
            )
        return found

    def of(self, model: Model, cluster: Cluster, train: Train) -> tuple[Demands, list[str]]:
        """The demands on the plans of a question, and remarks on them.

        Raises:
            MeshwrightError: R013 where no device has the memory that is to be left.
            Infeasible: E001 where none of the engines can run this question, whatever the plan.
        """
        from meshwright.export.runnable import USUAL, able, engine
        from meshwright.search.engines import Demands

        most = max(island.device.memory_bytes for island in cluster.islands)
        room = room_bytes(self.headroom, most) or 0.0
        if room >= most:
            raise MeshwrightError.one(
                "R013",
                f"{self.headroom} is all the memory of a device ({most / 2**30:.1f} GiB), or more",
                place=f"--headroom {self.headroom}",
                help="leave less, such as --headroom 5%",
            )
        engines, ruled_out = able([engine(name, model, cluster, train) for name in self.names], cluster)
        others = [engine(name, model, cluster, train) for name in USUAL]
        remarks = [f"left out: {why}" for why in ruled_out]
        if self.names and not self.framework:
            remarks.append(self._whose())
        return Demands(room_bytes=room, engines=tuple(engines), others=tuple(others)), remarks

    def _whose(self) -> str:
        if self.profile:
            return f"costs and memory are those of the {self.profile} profile; --framework names another"
        if len(self.names) > 1:
            return "several engines, one search: no engine's own profile is taken, --framework names one"
        return f"the catalog has no profile of {self.names[0]}: default costs and memory, --framework names another"


def room_bytes(text: str, device_bytes: float) -> float | None:
    """``5%`` of the memory of a device, or ``4GiB``, in bytes; None when it is neither."""
    match = _ROOM.fullmatch(text.strip())
    if not match:
        return None
    amount, unit = float(match[1]), match[2].lower()
    if unit == "%":
        return amount / 100 * device_bytes if amount < 100 else None
    return amount * _UNITS[unit]
