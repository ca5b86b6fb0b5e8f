"""Tables that plans of one question share: layers, their passes and their sizes, each computed once."""

from __future__ import annotations

from typing import Any

from meshwright.lower.program import Site
from meshwright.spec.hardware import Device


class Known:
    """Tables for stages of equal sizes, each by the further values that its entries depend on: ``pieces`` by (kind,
    groups), ``passes`` of layers by (unit, pass, groups), passes of embedding and head in ``ends`` by (unit, pass,
    tensor-parallel group), ``programs`` of whole stages by (pass, units, site, groups), ``activations`` by unit or
    composition. ``params`` are by unit or units, and ``sites`` by device and ranks.

    `params`, `ends` and `sites` may be those of plans of other sizes; tables of `like` are shared entirely.
    """

    def __init__(
        self,
        *,
        params: dict | None = None,
        ends: dict | None = None,
        sites: dict[tuple[str, int], Site] | None = None,
        like: Known | None = None,
    ) -> None:
        self.params: dict[Any, Any] = {} if params is None else params
        self.ends: dict[Any, Any] = like.ends if like else {} if ends is None else ends
        self.sites: dict[tuple[str, int], Site] = like.sites if like else {} if sites is None else sites
        self.pieces: dict[Any, Any] = like.pieces if like else {}
        self.passes: dict[Any, Any] = like.passes if like else {}
        self.programs: dict[Any, Any] = like.programs if like else {}
        self.activations: dict[Any, Any] = like.activations if like else {}

    def site(self, device: Device, num_ranks: int) -> Site:
        """Return the one :class:`Site` of a device on which `num_ranks` wait for one another."""
        key = (device.name, num_ranks)
        found = self.sites.get(key)
        if found is None:
            found = self.sites[key] = Site(device, num_ranks)
        return found
