"""One validation: the tables of a folder, predicted and scored. Nothing is fitted here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

import msgspec

from meshwright.cost import Costs, Framework
from meshwright.cost.engine import engines
from meshwright.errors import MeshwrightError
from meshwright.validate import ops, serving, serving_requests, steps, tables
from meshwright.validate.cases import busbw_in_job, families_of, unknown_case, without_busbw
from meshwright.validate.choices import choices
from meshwright.validate.faults import FAULTS, faulty
from meshwright.validate.measured import MeasuredStep, measured, refuse
from meshwright.validate.own_runs import protocol
from meshwright.validate.rows import Sink, ignore
from meshwright.validate.score import Scored, Unsupported, interval, score_op, score_step, summary
from meshwright.validate.serving_ranking import ranking
from meshwright.validate.software import software_name

FORMAT_VERSION = 1
#: What is added to the name of a table of steps whose rows are asked as of software that nobody knows.
UNKNOWN = "_unknown"
#: The same of rows whose jobs measured their own network, asked without that.
NETWORK_UNSAID = "_network_unsaid"
#: What is added to the name of the table of steps whose stacks are given five runs of their own, and that table.
OWN_RUNS, OWN_RUNS_OF = "_own_runs", "training_steps"
#: What is added to the name of a table of kernels whose rows are predicted as of a device that nobody measured.
LEFT_OUT = "_left_out"
Progress = Callable[[str, int, int], None]


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """One table's metrics by ``source/hardware`` and ``all``, the rows behind them with the ``variables`` their
    ``at`` holds, the rows that were not supported, and what else is said ``beside`` the metrics."""

    name: str
    metrics: dict[str, dict[str, float]]
    scored: tuple[Scored, ...]
    unsupported: tuple[Unsupported, ...]
    variables: tuple[str, ...]
    beside: dict[str, dict[str, float]] = {}

    def reasons(self) -> list[tuple[str, int]]:
        """Why rows were not supported and how many, most first."""
        return Counter(u.reason for u in self.unsupported).most_common()


def validate(
    folder: Path,
    costs_of: Callable[[Framework], Costs],
    *,
    progress: Progress = lambda name, done, total: None,
    sink: Sink = ignore,
) -> list[Table]:
    """Every table found in `folder`. Each row's prediction goes to `sink` when it is made; `progress` is told the
    table, rows done and rows in all.

    Raises:
        MeshwrightError: V003 when there is none; V, K or N codes for one that cannot be read or cannot be true.
    """
    out = []
    for name in tables.NAMES:
        path = tables.find(folder, name)
        if path is None:
            continue
        beside: tuple[Table, ...] = ()
        if name in tables.STEPS:
            made, *beside = _steps(path, name, costs_of, progress, sink)
        elif name == "serving_runs":
            made = _served(path, name, progress, sink)
        else:
            made, *beside = _ops(path, name, progress, sink)
        total = int(made.metrics["all"]["rows"]) + len(made.unsupported)
        progress(name, total, total)
        out.append(made)
        out += [table for table in beside if table.scored]
        if name == OWN_RUNS_OF:
            out += _own_runs(path, name, costs_of, progress)
    served = _requests(folder, progress)
    out += [served] if served is not None else []
    if not out:
        raise MeshwrightError.one(
            "V003",
            f"no measurement table in {folder}",
            place=f"--data {folder}",
            help="tables are called " + ", ".join(f"{name}.csv(.gz)" for name in tables.NAMES),
        )
    return out


def tabulated(
    name: str, scored: list[Scored], variables: tuple[str, ...], unsupported: Sequence[Unsupported] = ()
) -> Table:
    """Return a table of scored rows with its metrics."""
    return Table(
        name=name,
        metrics=summary(scored, unsupported),
        scored=tuple(scored),
        unsupported=tuple(unsupported),
        variables=variables,
    )


def _steps(
    path: Path, name: str, costs_of: Callable[[Framework], Costs], progress: Progress, sink: Sink
) -> tuple[Table, Table, Table]:
    """The table of steps, and the same rows asked as of software that nobody knows: those whose framework has a profile
    of its own, which then is left out. Last those whose job measured its network, asked without that."""
    numbered = tables.numbered(path, name)
    refuse(path, numbered)
    scored, unsupported, unknown, unsaid = [], [], [], []
    costs_for = cache(costs_of)
    families = families_of(row for _, row in numbered)
    asked = steps.answers((row for _, row in numbered), costs_of)
    left_out = steps.answers(
        (row for _, row in numbered), costs_of, lambda row: unknown_case(row, families.get(software_name(row), ()))
    )
    for (row, answer), (_, other) in zip(asked, left_out):
        progress(name, len(scored) + len(unsupported), len(numbered))
        found = measured(row, answer.model_flops)
        if answer.unsupported:
            key = f"{row['source']}/{row['hardware']}"
            unsupported.append(Unsupported(id=row["id"], key=key, faulty=faulty(row), reason=answer.unsupported))
        else:
            scored.append(score_step(row, found, answer, steps.variables(row)))
        if not other.unsupported and "framework" not in answer.assumed:
            unknown.append(score_step(row, found, other, steps.variables(row)))
        if scored and scored[-1].id == row["id"] and scored[-1].time is not None and busbw_in_job(row["notes"]):
            (_, blind), *_ = steps.answers([row | {"notes": without_busbw(row["notes"])}], costs_for)
            if not blind.unsupported:
                unsaid.append(score_step(row, found, blind, steps.variables(row)))
        sink(_step_line(name, row, found, answer))
    return (
        _with_choices(tabulated(name, scored, steps.VARIABLES, unsupported)),
        _with_choices(tabulated(f"{name}{UNKNOWN}", unknown, steps.VARIABLES)),
        tabulated(f"{name}{NETWORK_UNSAID}", unsaid, steps.VARIABLES),
    )


def _own_runs(path: Path, name: str, costs_of: Callable[[Framework], Costs], progress: Progress) -> list[Table]:
    """The errors of each stack's rows when five of them are given as its own runs."""
    title, rows = f"{name}{OWN_RUNS}", [row for _, row in tables.numbered(path, name)]
    found = protocol(rows, costs_of, lambda key: progress(title, 0, 0))
    figures = {
        one.key: {"rows": one.rows, "mean_ape": one.after, "bias": one.bias, "before_mean_ape": one.before}
        for one in found
    }
    if not figures:
        return []
    means = {m: sum(f[m] for f in figures.values()) / len(figures) for m in ("mean_ape", "bias", "before_mean_ape")}
    figures["all"] = {"rows": sum(one.rows for one in found)} | means
    return [Table(name=title, metrics=figures, scored=(), unsupported=(), variables=())]


def _with_choices(table: Table) -> Table:
    """Return the table of steps with the figures of the plans that a search would have taken beside it."""
    found = choices(table.scored)
    return msgspec.structs.replace(table, beside={**table.beside, "choices": found}) if found else table


def _step_line(name: str, row: dict[str, str], found: MeasuredStep, answer: steps.StepAnswer) -> dict[str, object]:
    line = {
        "table": name,
        **{column: row[column] for column in ("id", "source", "hardware", "flags", "outcome")},
        "measured_s": found.seconds,
        "memory_kind": found.memory_kind,
        "measured_memory_bytes": found.peak_bytes,
        "unsupported": answer.unsupported,
    }
    if answer.unsupported:
        return line
    return line | {
        "plan": answer.plan,
        "assumed": ";".join(answer.assumed),
        "predicted_s": answer.step_s,
        "low_s": answer.low_s,
        "high_s": answer.high_s,
        "trivial_s": answer.trivial_s,
        "scored_time": found.seconds is not None and not faulty(row),
        "fits": answer.fits,
        "allocated_bytes": answer.allocated_bytes,
        "reserved_bytes": answer.reserved_bytes,
    }


def _ops(path: Path, name: str, progress: Progress, sink: Sink) -> tuple[Table, Table]:
    """The table of kernels or collectives, and some of its rows predicted with their device left out."""
    scored, unsupported, left_out = [], [], []
    tables.text_of(path)  # what cannot be unpacked is refused before anything is predicted
    for answer in _answers(path, name, progress):
        row_id, key = f"{name}:{answer.line}", f"{answer.source}/{answer.hardware}"
        flagged = faulty({"flag": answer.flag}, name, "flag")
        if answer.unsupported:
            unsupported.append(Unsupported(id=row_id, key=key, faulty=flagged, reason=answer.unsupported))
        else:
            scored.append(score_op(row_id, key, answer, flagged))
        if answer.carried is not None:
            seconds, sigma = answer.carried
            left_out.append(score_op(row_id, key, answer._replace(seconds=seconds, sigma=sigma), flagged))
        sink(_op_line(name, row_id, answer, flagged))
    return (
        tabulated(name, scored, ops.VARIABLES[name], unsupported),
        tabulated(f"{name}{LEFT_OUT}", left_out, ops.VARIABLES[name]),
    )


def _served(path: Path, name: str, progress: Progress, sink: Sink) -> Table:
    """The table of serving runs, whose rows have several times and no one of them. Beside it stand the ranking of plans
    and the errors of engines' constants on what they never saw."""
    numbered = tables.numbered(path, name)
    scored, unsupported, ranked = [], [], []
    for row, found in serving.scored((row for _, row in numbered), lambda done: progress(name, done, len(numbered))):
        if isinstance(found, Unsupported):
            unsupported.append(found)
        else:
            scored.append(found)
            ranked.append((row, found))
        sink(serving.line(row, found))
    left = {
        f"{name}, {what.replace('_', ' ')}": errors
        for name, one in engines().items()
        for what, errors in one.left_out.items()
    }
    return Table(
        name=name,
        metrics=serving.summary(scored, unsupported),
        scored=(),
        unsupported=tuple(unsupported),
        variables=(),
        beside={"ranking": ranking(ranked)} | left,
    )


def _requests(folder: Path, progress: Progress) -> Table | None:
    """The runs of the folder of requests, if there is one."""
    found = []
    for path in serving_requests.files(folder):
        found += serving_requests.scored(path, lambda done: progress(serving_requests.FOLDER, done, 0))
    if not found:
        return None
    refused = [
        Unsupported(id=one.run, key=one.run, faulty=False, reason=one.unsupported) for one in found if one.unsupported
    ]
    return Table(
        name=serving_requests.FOLDER,
        metrics=serving_requests.summary(found),
        scored=(),
        unsupported=tuple(refused),
        variables=(),
    )


def _answers(path: Path, name: str, progress: Progress) -> Iterator[ops.OpAnswer]:
    def told(done: int, total: int) -> None:
        progress(name, done, total)

    return ops.collectives(path, told) if name == "collectives" else ops.kernels(path, name, told)


def _op_line(name: str, row_id: str, answer: ops.OpAnswer, flagged: bool) -> dict[str, object]:
    line = {"table": name, "id": row_id, "source": answer.source, "hardware": answer.hardware, "flags": answer.flag}
    line |= {"shape": answer.shape, "unsupported": answer.unsupported}
    if answer.unsupported:
        return line
    low, high = interval(answer.seconds, answer.sigma)
    return line | {
        "measured_s": answer.measured,
        "predicted_s": answer.seconds,
        "low_s": low,
        "high_s": high,
        "roofline_s": answer.roofline,
        "extrapolated": answer.extrapolated,
        "scored_time": not flagged,
    }


def to_json(found: list[Table]) -> dict[str, object]:
    """{table: {"source/hardware": metrics, ..., "all": metrics}}; beside the tables the versions, the flags whose
    rows are left out of time with their reasons, and why rows were not supported."""
    from meshwright import __version__

    body: dict[str, object] = {"format_version": FORMAT_VERSION, "code": __version__}
    body |= {table.name: table.metrics for table in found}
    body |= {f"{table.name}_beside": table.beside for table in found if table.beside}
    body["excluded_from_time"] = {table.name: FAULTS[table.name] for table in found if table.name in FAULTS}
    body["unsupported"] = {table.name: dict(table.reasons()) for table in found}
    return body
