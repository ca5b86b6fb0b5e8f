"""Demands of ``meshwright search`` on plans: memory left over or a risk, engines that run them, whose costs."""

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
    """``--headroom``, ``--risk``, ``--for`` and ``--framework`` as they were said."""

    headroom: str = ""
    risk: str = ""
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
        """Return a diagnostic for each unknown engine, and for a headroom or a risk that cannot be read."""
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
        if self.risk and share(self.risk) is None:
            found.append(
                Diagnostic(
                    code="R013",
                    message=f"{self.risk!r} is no probability of running out of memory",
                    place=f"--risk {self.risk}",
                    help="more than 0% and at most 50%: --risk 5%",
                )
            )
        return found

    def of(self, model: Model, cluster: Cluster, train: Train) -> tuple[Demands, list[str]]:
        """The demands on the plans of a question, and remarks on them.

        Raises:
            MeshwrightError: R013 where no device has the memory that is to be left.
            Infeasible: E001 where none of the engines can run this question, whatever the plan.
        """
        from meshwright.answer.risk import USUAL_RISK
        from meshwright.export.runnable import USUAL, able, engine
        from meshwright.search.engines import Demands

        most = max(island.device.memory_bytes for island in cluster.islands)
        said = share(self.risk) if self.risk else None
        room = room_bytes(self.headroom, most) or 0.0
        if said is not None:
            room = max(room, self._risked(said, cluster, most))
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
        usual = 0.0 if self.headroom or self.risk else self._risked(USUAL_RISK, cluster, most)
        demands = Demands(room_bytes=room, usual_room_bytes=usual, engines=tuple(engines), others=tuple(others))
        return demands, remarks

    def _risked(self, chance: float, cluster: Cluster, device_bytes: float) -> float:
        """The bytes to leave free, so that a plan runs out of memory with this chance at most."""
        from meshwright.answer import risk
        from meshwright.cost import standard_on

        return risk.room_bytes(chance, device_bytes, standard_on(cluster, self.profile).framework.memory_sigma)

    def _whose(self) -> str:
        if self.profile:
            return f"costs and memory are those of the {self.profile} profile; --framework names another"
        if len(self.names) > 1:
            return "several engines, one search: no engine's own profile is taken, --framework names one"
        return f"the catalog has no profile of {self.names[0]}: default costs and memory, --framework names another"


def share(text: str) -> float | None:
    """``5%`` or ``0.05`` as a probability above 0 and up to a half; None when it is none."""
    match = re.fullmatch(r"(\d{1,3}(?:\.\d+)?|\.\d+)\s*(%?)", text.strip())
    value = float(match[1]) / (100 if match[2] else 1) if match else 0.0
    return value if 0 < value <= 0.5 else None


def room_bytes(text: str, device_bytes: float) -> float | None:
    """``5%`` of the memory of a device, or ``4GiB``, in bytes; None when it is neither."""
    match = _ROOM.fullmatch(text.strip())
    if not match:
        return None
    amount, unit = float(match[1]), match[2].lower()
    if unit == "%":
        return amount / 100 * device_bytes if amount < 100 else None
    return amount * _UNITS[unit]
