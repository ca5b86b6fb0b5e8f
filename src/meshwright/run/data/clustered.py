"""Clusters of labelled samples in a file: ``.npz`` with ``clusters`` [N], the cluster of each sample from 0 on (-1: of
none), or with ``features`` [N, width], by which k-means finds them.

Experts that are trained on clusters (McAllister et al. 2501.05450) read either and leave the former beside their
checkpoints; the router that tells clusters apart reads it. Features are the user's own: those of a pretrained model of
vision, say, for every sample in the order of the data.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from meshwright.atomic import write_by
from meshwright.errors import MeshwrightError
from meshwright.spec.architecture import Model
from meshwright.spec.diffusion import NoisyClasses

#: The file in a run's folder.
FILE = "clusters.npz"
#: Arrays of the file, the numpy kinds of their numbers, how many dimensions they have, and their shape in words.
ARRAYS = {"clusters": ("ui", 1, "[N]"), "features": ("uif", 2, "[N, width]")}


class ClusterFile(NamedTuple):
    """The contents of a file: the ``clusters`` int64 [N], or None and the ``features`` float64 [N, width]."""

    clusters: NDArray[np.int64] | None
    features: NDArray[np.float64] | None

    @property
    def count(self) -> int:
        """Samples that it is of."""
        return len(self.features if self.clusters is None else self.clusters)


def read(path: str, count: int = 0) -> ClusterFile:
    """Read the file `path`, of so many samples where their `count` is said.

    Raises:
        MeshwrightError: D001 where there is none, D012 for one that has no such array, D013 for other samples.
    """
    if not Path(path).is_file():
        raise MeshwrightError.one("D001", f"there is no file {path}", place=_place(path), help="name one that is there")
    try:
        with np.load(path, allow_pickle=False) as file:
            found = {key: file[key] for key in ARRAYS if key in file.files}
    except (OSError, ValueError, EOFError, BadZipFile, zlib.error, AttributeError) as error:
        raise _bad(path, f"it cannot be read: {error}") from None
    file = _checked(path, found)
    if count and count != file.count:
        message = f"there are {count:,} samples, and the clusters or features of {file.count:,}"
        help = "name the file of these samples, in their order"
        raise MeshwrightError.one("D013", message, place=_place(path), help=help)
    return file


def _checked(path: str, found: Mapping[str, NDArray[np.generic]]) -> ClusterFile:
    if len(found) != 1:
        raise _bad(path, f"it has {' and '.join(found)}" if found else "it has neither clusters nor features")
    ((key, array),) = found.items()
    kinds, dims, shape = ARRAYS[key]
    if array.dtype.kind not in kinds or array.ndim != dims or not array.size:
        raise _bad(path, f"{key} are {array.dtype} of the shape {list(array.shape)}, and not {shape}")
    if key == "clusters":
        if int(array.min()) < -1:
            raise _bad(path, f"there is a cluster {int(array.min())}")
        return ClusterFile(array.astype(np.int64), None)
    if not np.isfinite(array).all():
        raise _bad(path, "features has a value that is not finite")
    return ClusterFile(None, array.astype(np.float64))


def _place(path: str) -> str:
    return f"--clusters {path}"


def _bad(path: str, why: str) -> MeshwrightError:
    help = "a .npz with clusters [N], whole numbers from 0, or features [N, width], of every sample of --data"
    return MeshwrightError.one("D012", f"no clusters of samples: {why}", place=_place(path), help=help)


def write(folder: str, clusters: NDArray[np.int64]) -> Path:
    """Write the cluster [N] of each sample into a run's folder, and return the file."""
    path = Path(folder) / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    write_by(path, lambda file: np.savez(file, clusters=clusters))
    return path


def labels_for(model: Model, path: str) -> NDArray[np.int64] | None:
    """Return the clusters [N] in a file as what a router learns to tell, -1 of samples that it does not see; None for
    another model, and without a file.

    Raises:
        MeshwrightError: as :func:`read`; D012 besides where features alone are there.
    """
    if not path or not isinstance(model.head, NoisyClasses):
        return None
    found = read(path)
    if found.clusters is None:
        raise _bad(path, "a router learns clusters, and it has features: experts of sync=ddm write them into --out")
    return found.clusters
