"""Initial values of parameters."""

import torch

from meshwright.run.parameters import Maker, initialise
from meshwright.run.pieces import Part


def part(name, shape):
    """The whole of a published tensor."""
    return Part(name, shape, (0, 0), (slice(None), slice(None)))


def made():
    make = Maker(torch.device("cpu"), torch.float32)
    return [make(f"layer.{i}", (8 + i, 5), [part(f"layer.{i}", (8 + i, 5))]) for i in range(6)]


def test_values_are_the_same_however_many_threads_draw_them():
    one, many = made(), made()
    initialise(one, 7, threads=1)
    initialise(many, 7, threads=4)
    assert all(torch.equal(a, b) for a, b in zip(one, many, strict=True))
    assert len({p.detach()[0, 0].item() for p in one}) == 6  # each of its own name
