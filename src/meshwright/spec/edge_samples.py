"""The workload of node embeddings: which edges a device trains on at a time, and against how many others.

``batch=1000,negatives=100,shared=50,epochs=10`` trains every edge ten times, a thousand of them at a time, each against
a hundred nodes that it does not join, which fifty edges have in common. ``walk=40,augment=5`` makes the samples of
random walks of forty edges, in which nodes up to five apart are taken for neighbours (GraphVite, Zhu et al., 2019,
arXiv 1903.00757): an epoch is as many samples as there are edges then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from meshwright.errors import MeshwrightError
from meshwright.spec.samples import MOST_SAMPLES, OPTIMIZERS
from meshwright.spec.words import SaidWords


class EdgeSamples(msgspec.Struct, frozen=True, kw_only=True):
    """A device trains on ``batch`` edges at a time, each against ``negatives`` nodes in the place of an end, which so
    many edges have in common (``shared``; 1: each has its own). All is done ``epochs`` times. Samples are made by walks
    of ``walk`` edges, of nodes up to ``augment`` apart; 0: the edges themselves are read. ``rate``: samples a second
    that one device was measured to train, in place of what its kernels cost (0: not measured)."""

    batch: int
    negatives: int = 1
    shared: int = 1
    epochs: int = 1
    walk: int = 0
    augment: int = 1
    rate: int = 0
    optimizer: str = "sgd"

    @property
    def row_state(self) -> int:
        """Numbers that the optimizer keeps for each row."""
        return OPTIMIZERS[self.optimizer][0]

    @property
    def number_state(self) -> int:
        """Numbers that the optimizer keeps for each number of a row."""
        return OPTIMIZERS[self.optimizer][1]

    @property
    def uniform(self) -> int:
        """Negatives that are drawn beside the other ends of the edges that share them."""
        return self.negatives - self.shared if self.shared > 1 else self.negatives

    @property
    def steps_a_sample(self) -> float:
        """Steps of a walk for every sample that is made of it: nodes of a walk are paired with the next ones."""
        pairs = sum(min(self.augment, self.walk - at) for at in range(self.walk))
        return self.walk / pairs if pairs else 0.0

    def text(self) -> str:
        """Return the form that :func:`parse_edge_samples` reads back."""
        usual = {"negatives": 1, "shared": 1, "epochs": 1, "walk": 0, "augment": 1, "rate": 0, "optimizer": "sgd"}
        said = [f"{key}={getattr(self, key)}" for key, value in usual.items() if getattr(self, key) != value]
        return ",".join([f"batch={self.batch}", *said])


def _count(least: int) -> Callable[[str], int | None]:
    def read(text: str) -> int | None:
        known = {"k": 1_000, "m": 1_000_000}
        text, times = (text[:-1], known[text[-1]]) if text and text[-1] in known else (text, 1)
        value = int(text) * times if text.isascii() and text.isdecimal() and len(text) < 12 else -1
        return value if least <= value <= MOST_SAMPLES else None

    return read


#: Word -> what reads its value, and what that is.
READERS: dict[str, tuple[Callable[[str], Any], str]] = {
    "batch": (_count(1), f"edges, from 1 to {MOST_SAMPLES:,}"),
    "negatives": (_count(1), "nodes against which an edge is trained, from 1"),
    "shared": (_count(1), "edges that have negatives in common, from 1"),
    "epochs": (_count(1), "how often all edges are trained, from 1"),
    "walk": (_count(0), "edges of a random walk, 0 for none"),
    "augment": (_count(1), "how far apart nodes of a walk are neighbours, from 1"),
    "rate": (_count(0), "samples a second that a device was measured to train"),
    "optimizer": (lambda text: text if text in OPTIMIZERS else None, f"one of {', '.join(OPTIMIZERS)}"),
}


def parse_edge_samples(text: str, *, place: str = "--train") -> EdgeSamples:
    """Return what a text such as ``batch=1000,negatives=100,shared=50`` says.

    Raises:
        MeshwrightError: W001 unknown key, W002 bad value, W003 without a batch, W005 contradiction; all at once.
    """
    alien = {"seq": "edges of a graph have no sequence, so that seq= says nothing"}
    said = SaidWords(text, READERS, place=place, of="training on the edges of a graph", alien=alien)
    values = said.values
    if "batch" not in values and not said.wrong:
        said.refuse("W003", "the workload does not say batch", "for example batch=1000")
    shared, negatives = values.get("shared", 1), values.get("negatives", 1)
    if shared > 1 and negatives < shared:
        message = (
            f"{shared} edges share their ends as negatives, which are {shared} at least, and negatives={negatives}"
        )
        said.refuse("W005", message, f"say negatives={2 * shared}, half of them drawn besides")
    if shared > 1 and values.get("batch", shared) % shared:
        said.refuse("W005", f"shared={shared} does not divide batch={values['batch']}", "say a multiple of it")
    if values.get("augment", 1) > max(1, values.get("walk", 0)):
        message = f"augment={values['augment']} pairs nodes of a walk, of walk={values.get('walk', 0)} edges"
        said.refuse("W005", message, "say walk=40, or drop augment=")
    if said.wrong:
        raise MeshwrightError(said.wrong)
    return EdgeSamples(**values)
