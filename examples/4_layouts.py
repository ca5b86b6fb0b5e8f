"""Collectives between placements, and the proof that they are the right ones.

python examples/4_layouts.py            # every change of one axis
python examples/4_layouts.py "S0 P" "R S1"   # between two placements on a mesh of 2 x 4
"""

import sys
from itertools import permutations

from meshwright.layers.algebra import AxisMesh, prove, transfers


def show(mesh: AxisMesh, source: str, target: str, shape: tuple[int, ...]) -> None:
    """The collectives from one placement to the other, and the largest error on simulated ranks."""
    print(f"{source} -> {target}")
    for one in transfers(mesh, source, target, shape):
        print(f"  {one}")
    print(f"  largest error on simulated ranks: {prove(mesh, source, target, shape):.1e}")


if len(sys.argv) == 3:
    show(AxisMesh.of(dp=2, tp=4), *sys.argv[1:], (16, 24))
else:
    for source, target in permutations(("S0", "S1", "R", "P"), 2):
        show(AxisMesh.of(tp=4), source, target, (16, 24))
