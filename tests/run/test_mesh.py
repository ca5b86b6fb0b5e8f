"""Which process groups share a communicator, and which never do."""

from __future__ import annotations

import pytest

from meshwright.plan import parse
from meshwright.run.mesh import build
from tests.run.processes import launch_kept as launch


def _names(rank: int, plan: str) -> dict[str, tuple[tuple[int, ...], str]]:
    mesh = build(parse(plan).on(2))
    return {name: (g.ranks, g.handle.group_name) for name, g in mesh.groups.items() if g.handle is not None}


@pytest.mark.parametrize(("plan", "name"), [("cp2", "cp_outer"), ("cp2 ulysses", "cp_outer"), ("ep2 dp2", "ep")])
def test_what_a_layer_waits_for_does_not_queue_behind_gradients(plan, name):
    for groups in launch(2, _names, plan):
        (ranks, own), (data_ranks, data) = groups[name], groups["data"]
        assert ranks == data_ranks
        assert own != data
        assert groups["world"][1] == data  # what nobody waits for inside a layer shares
