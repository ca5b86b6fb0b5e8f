"""Framework profiles: what a training framework adds to the kernels, as physical quantities with a source.

A framework without measurements gets the ``default`` profile, flagged in every prediction's assumptions.
"""

from __future__ import annotations

import msgspec


class Framework(msgspec.Struct, frozen=True, kw_only=True):
    """What a framework adds to a step's kernels.

    ``host_us_per_kernel``: CPU time to issue one kernel (what an unfused small layer is bound by).
    ``context_bytes``: device memory a process holds before the first tensor (CUDA context, cuBLAS workspaces).
    ``communicator_bytes``: buffers of one process group. ``allocator_slack``: reserved over allocated bytes that
    fragmentation leaves unused.
    """

    name: str
    host_us_per_kernel: float
    context_bytes: float
    communicator_bytes: float
    allocator_slack: float
    source: str
    flagged: bool = True


FRAMEWORKS: dict[str, Framework] = {
    "default": Framework(
        name="default",
        host_us_per_kernel=5.0,
        context_bytes=1.0 * 2**30,
        communicator_bytes=256 * 2**20,
        allocator_slack=0.03,
        source="not measured: round figures for PyTorch in eager mode with asynchronous launches",
    ),
}
