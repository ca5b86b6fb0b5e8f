"""The workload of a recommendation model: how many samples a step trains on, and how its parameters are updated.

``batch=65536,dtype=bf16`` is a step of 65,536 samples, whose MLPs multiply in bf16; tables are kept in fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from meshwright.errors import MeshwrightError
from meshwright.spec.words import SaidWords

#: Largest batch of samples: above, a slip of the keyboard.
MOST_SAMPLES = 10**9
#: Optimizers of tables and dense layers, and the fp32 numbers that one keeps for each of a table's rows and for each
#: of its numbers. Row-wise AdaGrad keeps the mean square of a row's gradients, one number a row (Mudigere et al., 2022,
#: arXiv 2104.05158, section 4.1.4), and AdaGrad's one for each number of dense layers.
OPTIMIZERS: dict[str, tuple[int, int]] = {"rowwise-adagrad": (1, 0), "adagrad": (0, 1), "adam": (0, 2), "sgd": (0, 0)}


class SampleBatch(msgspec.Struct, frozen=True, kw_only=True):
    """A step over ``batch`` samples in all, whose MLPs multiply in ``dtype``, with an ``optimizer``."""

    batch: int
    dtype: str = "bf16"
    optimizer: str = "rowwise-adagrad"

    @property
    def row_state(self) -> int:
        """Numbers that the optimizer keeps for each row of a table."""
        return OPTIMIZERS[self.optimizer][0]

    @property
    def number_state(self) -> int:
        """Numbers that the optimizer keeps for each number of a table."""
        return OPTIMIZERS[self.optimizer][1]

    @property
    def dense_state(self) -> int:
        """Numbers that the optimizer keeps for each parameter of dense layers: row-wise AdaGrad is AdaGrad there."""
        return 1 if self.row_state else self.number_state

    def text(self) -> str:
        """Return the form that :func:`parse_samples` reads back."""
        words = [f"batch={self.batch}", f"dtype={self.dtype}"]
        return ",".join(words + ([] if self.row_state else [f"optimizer={self.optimizer}"]))


def _count(text: str) -> int | None:
    known = {"k": 1024, "m": 1024**2}
    text, times = (text[:-1], known[text[-1]]) if text and text[-1] in known else (text, 1)
    value = int(text) * times if text.isascii() and text.isdecimal() and len(text) < 12 else 0
    return value if 1 <= value <= MOST_SAMPLES else None


#: Word -> what reads its value, and what that is.
READERS: dict[str, tuple[Callable[[str], Any], str]] = {
    "batch": (_count, f"samples, from 1 to {MOST_SAMPLES:,}"),
    "dtype": (lambda text: text if text in ("bf16", "fp16", "fp32") else None, "bf16, fp16 or fp32"),
    "optimizer": (lambda text: text if text in OPTIMIZERS else None, f"one of {', '.join(OPTIMIZERS)}"),
}


def parse_samples(text: str, *, place: str = "--train") -> SampleBatch:
    """Return what a text such as ``batch=65536,dtype=bf16`` says.

    Raises:
        MeshwrightError: W001 unknown key, W002 bad value, W003 without a batch, W005 contradiction; all at once.
    """
    alien = {"seq": "samples of a recommendation model have no sequence, so that seq= says nothing"}
    said = SaidWords(text, READERS, place=place, of="a step of a recommendation model", alien=alien)
    if "batch" not in said.values and not said.wrong:
        said.refuse("W003", "the workload does not say batch", "for example batch=65536")
    if said.wrong:
        raise MeshwrightError(said.wrong)
    return SampleBatch(**said.values)
