"""State of a rank that is off its device: in its host's memory, or on its drives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from meshwright.plan.facets.offload import HOST, NVME, Offload
from meshwright.run.drives import Drives, on_cores
from meshwright.run.host_memory import HostLink, HostMemory
from meshwright.run.host_update import HostUpdates
from meshwright.run.model import Stage
from meshwright.run.moments import Moments, moments_on
from meshwright.run.pieces import HeldElements
from meshwright.run.saved import SavedTensors
from meshwright.schedules.actions import Actions


class StateAway:
    """The tiers of one rank: a file where something lies on ``drives``, a ``link`` to the host where it updates."""

    def __init__(self, offload: Offload, device: torch.device, folder: str):
        """`folder` is that of files ("": the system's for temporary ones).

        Raises:
            MeshwrightError: P033 for drives of a GPU, X104 where there can be no file.
        """
        self.offload = offload
        self.drives: Drives | None = on_cores(device, folder) if NVME in offload.tiers else None
        self.host: HostMemory | None = HostMemory(device) if offload.activations == HOST else None
        self.link: HostLink | None = HostLink(device) if offload.optimizer == HOST else None

    def updates(
        self, held: Sequence[HeldElements], parts: dict, exchanges: Sequence
    ) -> Callable[[tuple[str, ...]], Moments | HostUpdates] | None:
        """Return what updates the pieces whose state is away, from the names of their moments; None where none is.
        `parts` has parameters by ((stage, segment), kind)."""
        if self.link is not None:
            return lambda names: HostUpdates(exchanges)
        return partial(moments_on, self.drives, held, parts, self.offload) if self.offload.optimizer and held else None

    def activations(self, stages: Mapping[int, Stage], actions: Actions, rank: int) -> None:
        """Have layers keep there what they save for their backward, where the plan says so."""
        store = self.drives if self.offload.activations == NVME else self.host
        if self.offload.activations and store is not None:
            SavedTensors(store, self.offload.prefetch + 1).over_stages(stages, self.offload, actions, rank)
