"""Measured figures of a training step's row: the scorer's half of a row, and the only reader of its answer columns.

Values that cannot be measurements are refused with file, line and reason before anything is scored: cells that are
no numbers, a step time that contradicts the row's own throughput, rates no device reaches, memory no device has.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from meshwright.calibrate.tables import Faults
from meshwright.cost.roofline import peak_flops
from meshwright.errors import MeshwrightError
from meshwright.spec.cluster import load_device
from meshwright.validate.tables import number

#: Columns that hold results; a prediction never sees them.
ANSWERS = (
    "outcome",
    "step_time_s",
    "tokens_per_s_per_gpu",
    "model_tflops_per_gpu",
    "hardware_tflops_per_gpu",
    "mfu",
    "peak_memory_gb",
    "memory_kind",
    "steady_memory_gb",
    "activation_memory_gb",
    "metric",
    "value",
    "unit",
)
NUMBERS = ANSWERS[1:7] + ANSWERS[8:10]
#: The flag of a row whose plan nobody ran: what it states beside was calculated by its authors.
UNRUN = "no_time_measured"
#: Factor by which a step time may contradict its row's own throughput or FLOP/s before the units are wrong.
UNITS_OFF = 30.0
#: Low precisions reach four times the 16-bit peak; nothing reaches five.
IMPOSSIBLE_RATE = 5.0
#: Peak memory over the device's: unified memory and rounding reach a little above one.
IMPOSSIBLE_MEMORY = 2.0


class MeasuredStep(msgspec.Struct, frozen=True, kw_only=True):
    """``seconds`` of a step, None where none was measured; ``peak_bytes`` of ``memory_kind``; ``oom``: None where
    the row says neither ok nor oom, or nobody ran its plan."""

    seconds: float | None
    peak_bytes: float | None
    memory_kind: str
    oom: bool | None


def measured(row: dict[str, str], flops: float = 0.0) -> MeasuredStep:
    """Return the measured figures of a row: seconds of a step where the run succeeded, peak bytes, out of memory or
    not. `flops` of a step time those that state a rate alone."""
    peak = number(row, "peak_memory_gb")
    return MeasuredStep(
        seconds=_seconds(row, flops) if row["outcome"] == "ok" else None,
        peak_bytes=None if peak is None else peak * 1e9,
        memory_kind=row.get("memory_kind") or "",
        oom=None if UNRUN in row["flags"].split(";") else {"ok": False, "oom": True}.get(row["outcome"]),
    )


def _seconds(row: dict[str, str], flops: float) -> float | None:
    """The seconds of a step: as the row states them, or from its tokens a second, or from its FLOP/s of one device
    without recompute, which `flops` of a step (pairs that a mask hides counted, as published ones do) take so long
    at."""
    stated, gpus = number(row, "step_time_s"), number(row, "num_gpus") or 0.0
    if stated is not None:
        return stated
    if rate := number(row, "tokens_per_s_per_gpu"):
        return (number(row, "global_batch_seqs") or 0.0) * (number(row, "seq_len") or 0.0) / (rate * gpus) or None
    rate = number(row, "model_tflops_per_gpu")
    return flops / (rate * 1e12 * gpus) if rate and flops else None


def refuse(path: Path, rows: Iterable[tuple[int, dict[str, str]]]) -> None:
    """Raise everything in the answer columns that cannot be.

    Raises:
        MeshwrightError: V004 for cells that are no positive numbers, V005 for impossible ones.
    """
    wrong = Faults(path)
    for line, row in rows:
        bad = [name for name in NUMBERS if row.get(name) and (number(row, name) or -1.0) <= 0]
        for name in bad:
            wrong.add("V004", line, f"{name} = {row[name]!r} is not a positive number", "leave unknown cells empty")
        for why in _impossible(row) if not bad else ():
            wrong.add("V005", line, why, "the units are in the column's name; drop a row that cannot be mended")
    wrong.refuse()


def _impossible(row: dict[str, str]) -> Iterable[str]:
    seconds = number(row, "step_time_s")
    tokens = (number(row, "global_batch_seqs") or 0.0) * (number(row, "seq_len") or 0.0)
    gpus = number(row, "num_gpus") or 0.0
    try:
        device = load_device(row["hardware"])
    except MeshwrightError:
        device = None
    if seconds and tokens and gpus:
        said = number(row, "tokens_per_s_per_gpu")
        if said and not 1 / UNITS_OFF < said * gpus * seconds / tokens < UNITS_OFF:
            yield f"step_time_s = {seconds:g} contradicts tokens_per_s_per_gpu = {said:g}: units off?"
        yield from _impossible_rate(row, tokens / gpus / seconds, device)
    peak = number(row, "peak_memory_gb")
    if peak and device is not None and peak * 1e9 > IMPOSSIBLE_MEMORY * device.memory_bytes:
        yield f"peak_memory_gb = {peak:g} on a device of {device.memory_bytes / 1e9:.0f} GB: units off?"


def _impossible_rate(row: dict[str, str], tokens_per_s: float, device) -> Iterable[str]:
    """A dense model's 6 N FLOP per token against what the device can do and what the row itself says."""
    params = number(row, "params_b")
    if not params or number(row, "experts"):
        return
    rate = 6e9 * params * tokens_per_s
    if device is not None and rate > IMPOSSIBLE_RATE * peak_flops(device, "bf16"):
        yield f"{rate / 1e12:.4g} TFLOP/s per device; the {device.name} has {peak_flops(device, 'bf16') / 1e12:.4g}"
    said = number(row, "model_tflops_per_gpu") or number(row, "hardware_tflops_per_gpu")
    if said and not 1 / UNITS_OFF < rate / (said * 1e12) < UNITS_OFF:
        yield f"the step time gives {rate / 1e12:.4g} TFLOP/s per device and the row says {said:g}: units off?"
