"""Best-effort jobs beside serving: ``beside=bert-large:batch=8:seq=512``, several joined by ``+``.

Each trains a model of its own on one device, on which requests are served at the same time.
"""

from __future__ import annotations

import re

import msgspec

from meshwright.spec.workload import TRAINED_DTYPES

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./-]*")
#: Largest number in a job, and most jobs.
MOST, MOST_JOBS = 1 << 20, 64


class BatchJob(msgspec.Struct, frozen=True):
    """A job that trains ``model`` on ``batch`` sequences of ``seq`` tokens a step, in the precision ``dtype``, ``mb``
    sequences at a time."""

    model: str
    batch: int
    seq: int
    dtype: str = "bf16"
    mb: int = 1

    def text(self) -> str:
        """Return the form that :func:`batch_jobs` reads back."""
        dtype = f":dtype={self.dtype}" if self.dtype != "bf16" else ""
        mb = f":mb={self.mb}" if self.mb != 1 else ""
        return f"{self.model}:batch={self.batch}:seq={self.seq}{dtype}{mb}"


class BatchJobs(msgspec.Struct, frozen=True):
    """The jobs that wait for devices to share."""

    jobs: tuple[BatchJob, ...]

    def text(self) -> str:
        """Return the form that :func:`batch_jobs` reads back."""
        return "+".join(job.text() for job in self.jobs)


def batch_jobs(text: str) -> BatchJobs | None:
    """Read ``bert-large:batch=8:seq=512`` or several with ``+`` between them."""
    found = [_job(one.strip()) for one in text.split("+")]
    jobs = tuple(job for job in found if job is not None)
    return BatchJobs(jobs) if len(jobs) == len(found) <= MOST_JOBS else None


def _job(text: str) -> BatchJob | None:
    name, *options = text.split(":")
    said: dict[str, str] = {}
    for option in options:
        key, equals, value = option.partition("=")
        if not equals or key in said or key not in ("batch", "seq", "dtype", "mb"):
            return None
        said[key] = value
    said.setdefault("mb", "1")
    batch, seq, mb = (
        int(said[key]) if said.get(key, "").isdecimal() and len(said[key]) < 8 else 0 for key in ("batch", "seq", "mb")
    )
    dtype = said.get("dtype", "bf16")
    if not _NAME.fullmatch(name) or not all(0 < n <= MOST for n in (batch, seq, mb)) or dtype not in TRAINED_DTYPES:
        return None
    return BatchJob(name, batch, seq, dtype, mb)
