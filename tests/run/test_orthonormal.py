"""Orthonormal columns of many matrices at once, against one matrix after the other in numpy."""

import numpy as np
import torch

from meshwright.run.orthonormal import all_orthonormal
from meshwright.sync.codecs.powersgd import orthonormal


def test_many_matrices_are_made_orthonormal_as_each_alone_is():
    rng = np.random.default_rng(3)
    shapes = [(1, 12, 3), (4, 7, 2), (2, 12, 3), (1, 5, 1), (1, 4, 4)]
    some = [rng.standard_normal(shape) for shape in shapes]
    some[0][0, :, 2] = some[0][0, :, 0]  # nothing is left of the third column, which has no direction
    found = all_orthonormal([torch.from_numpy(one.copy()) for one in some])
    for one, mine in zip(some, found):
        alone, mine = orthonormal(one.copy()), mine.numpy()
        sound = slice(0, 2) if one is some[0] else slice(None)
        assert np.allclose(mine[..., sound], alone[..., sound], atol=1e-12)
        assert np.allclose(
            (mine[..., sound].swapaxes(-1, -2) @ mine[..., sound])[0], np.eye(one.shape[-1])[sound, sound]
        )
        assert np.isfinite(mine).all()


def test_what_is_given_stays_as_it_was():
    one = torch.randn(1, 6, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    before = one.clone()
    all_orthonormal([one])
    assert torch.equal(one, before)
