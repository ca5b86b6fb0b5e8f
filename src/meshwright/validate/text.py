"""A validation as text: one line of figures per source and hardware."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.validate.run import Table

#: Column heading, metric, how it is written.
COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("rows", "rows", "count"),
    ("unsupported", "unsupported", "some"),
    ("mean", "mean_ape", "percent"),
    ("median", "median_ape", "percent"),
    ("p90", "p90_ape", "percent"),
    ("bias", "bias", "signed"),
    ("before", "before_mean_ape", "percent"),
    ("trivial", "trivial_mean_ape", "percent"),
    ("roofline", "roofline_median_ape", "percent"),
    ("in 80%", "coverage80", "percent"),
    ("high/low", "width_median", "ratio"),
    ("rank", "spearman", "ratio"),
    ("groups", "groups", "count"),
    ("regret", "regret_mean", "percent"),
    ("allocated", "memory_allocated_mean_ape", "percent"),
    ("reserved", "memory_reserved_mean_ape", "percent"),
    ("oom", "oom_rows", "some"),
    ("accuracy", "oom_accuracy", "percent"),
    ("recall", "oom_recall", "percent"),
    ("TPOT", "tpot_median_ape", "percent"),
    ("p90", "tpot_p90_ape", "percent"),
    ("TPOT bias", "tpot_bias", "signed"),
    ("TTFT", "ttft_median_ape", "percent"),
    ("p90", "ttft_p90_ape", "percent"),
    ("TTFT bias", "ttft_bias", "signed"),
    ("throughput", "throughput_median_ape", "percent"),
    ("requests", "requests", "count"),
    ("mean TTFT", "ttft_mean_ape", "percent"),
    ("KS", "ttft_ks", "ratio"),
    ("mean TPOT", "tpot_mean_ape", "percent"),
    ("KS", "tpot_ks", "ratio"),
)
#: What each heading means, for those who have not read the definitions.
MEANING = {
    "mean": "mean absolute error of time, |predicted / measured - 1|",
    "median": "its median",
    "p90": "its 90th percentile",
    "bias": "mean of predicted / measured - 1",
    "before": "mean absolute error of time under the default profile, no run given",
    "trivial": "mean absolute error of 6 N D / (devices x peak x 0.5) x bubble on the same rows, of 8 N D where all is "
    "recomputed and 4 N D over a frozen base",
    "roofline": "median absolute error of the ideal roofline: peak arithmetic or full bandwidth",
    "in 80%": "rows inside the predicted 80% interval",
    "high/low": "median ratio of the ends of the predicted 80% interval",
    "rank": "Spearman correlation within groups, mean over groups",
    "groups": "groups of equal source, hardware, framework, model, phase, precision, devices, length and batch with "
    "five rows or more",
    "regret": "measured time of the row predicted fastest over the best measured, minus 1, mean over groups",
    "allocated": "mean absolute error of peak memory allocated",
    "reserved": "mean absolute error of peak memory reserved",
    "oom": "rows that ran out of memory",
    "accuracy": "rows whose fitting or not was told right",
    "recall": "rows out of memory that were told so",
    "unsupported": "rows that are not predicted",
    "TPOT": "median absolute error of the time per output token, and behind it its p90",
    "TPOT bias": "its mean of predicted / measured - 1; of a run, that of its requests' mean",
    "TTFT": "the same of the time to first token",
    "TTFT bias": "the same of it",
    "throughput": "median absolute error of output tokens a second and device",
    "requests": "requests of a run that were served again one by one",
    "mean TTFT": "mean absolute error of rows' times to first token; of a run, the error of its requests' mean",
    "mean TPOT": "the same of the time per output token",
    "KS": "largest difference of the measured and the predicted distribution of the time before it",
}


def columns(table: Table) -> list[tuple[str, str, str]]:
    """The columns that hold something in a table."""
    return [c for c in COLUMNS if any(_cell(m.get(c[1]), c[2]) for m in table.metrics.values())]


def lines(table: Table) -> Iterator[tuple[str, list[str]]]:
    """A table's metrics: key, then one cell per column of :func:`columns`."""
    shown = columns(table)
    for key, metrics in table.metrics.items():
        yield key, [_cell(metrics.get(name), kind) for _, name, kind in shown]


def figure(name: str, value: float) -> str:
    """Return a figure that stands beside a table, with its name."""
    if name in ("groups", "chosen"):
        return f"{int(value):,} {name}"
    return f"{name.replace('_', ' ')} {value:.1%}"


def _cell(value: float | None, kind: str) -> str:
    if value is None or (kind == "some" and not value):
        return ""
    if kind in ("count", "some"):
        return f"{int(value):,}"
    if kind == "ratio":
        return f"{value:.2f}"
    return f"{value:+.1%}" if kind == "signed" else f"{value:.1%}"
