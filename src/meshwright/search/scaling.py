"""Time and cost of a training run over the number of devices, and on other devices: one search for each cluster.

The points of a curve are clusters of one kind. Each is searched like any other question; what one leaves (its best
plan, what kernels take) makes the next shorter and changes no answer. The global batch stays what it is, so every point
is the same training run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import inf
from time import monotonic
from typing import Any, Protocol

import msgspec
import numpy as np

from meshwright.answer.prediction import Limit, Prediction, TrainingRun
from meshwright.errors import MeshwrightError
from meshwright.quantity import gibibytes
from meshwright.search.found import Found
from meshwright.search.warm import grown
from meshwright.spec.cluster import Cluster
from meshwright.spec.goal import Goal

FORMAT_VERSION = 1


class ScalingRange(msgspec.Struct, frozen=True):
    """Clusters asked for in one word (``8..512xh100``), each with its text as it would be said, the smallest first."""

    text: str
    clusters: tuple[tuple[str, Cluster], ...]


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster, the ``text`` that names it, and the best plan on it. ``refused`` says why there is none. ``proven``:
    no other plan of the space is faster under the cost model."""

    curve: str
    text: str
    cluster: Cluster
    prediction: Prediction | None
    refused: str
    proven: bool
    search_s: float

    @property
    def run(self) -> TrainingRun | None:
        return None if self.prediction is None else self.prediction.run

    @property
    def good(self) -> bool:
        """Whether there is a plan, and its run stays within every limit of the goal."""
        return self.prediction is not None and self.prediction.good

    @property
    def limits(self) -> tuple[Limit, ...]:
        return () if self.prediction is None else self.prediction.limits

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second of the whole cluster."""
        p = self.prediction
        return 0.0 if p is None else p.tokens_per_s_per_gpu * p.num_devices


class Scaling(msgspec.Struct, frozen=True, kw_only=True):
    """The points in the order they were asked for. ``stopped``: somebody ended it before all were searched."""

    points: tuple[Point, ...]
    goal: Goal
    stopped: bool
    asked: int

    @property
    def fitting(self) -> tuple[Point, ...]:
        return tuple(p for p in self.points if p.prediction is not None)

    @property
    def meeting(self) -> tuple[Point, ...]:
        """The points that meet the goal; all that fit where there is none."""
        return tuple(p for p in self.fitting if p.good)

    @property
    def in_dollars(self) -> bool:
        """Whether costs are told apart in dollars: unless no point has a price."""
        return any(p.run.usd is not None for p in self.fitting)

    def spent(self, point: Point) -> float | None:
        """Return the cost of a point: dollars, None where it has no price; device-hours where no point has one."""
        return point.run.usd if self.in_dollars else point.run.device_hours

    def _costs(self, point: Point) -> float:
        """Return a cost for comparison, infinite without a price, so that it is never the cheapest."""
        spent = self.spent(point)
        return inf if spent is None else spent

    @property
    def cheapest(self) -> Point | None:
        """The cheapest point that meets the goal; the faster of equal ones."""
        return min(self.meeting, key=lambda p: (self._costs(p), p.run.seconds), default=None)

    @property
    def fastest(self) -> Point | None:
        """The fastest point that meets the goal; the cheaper of equal ones."""
        return min(self.meeting, key=lambda p: (p.run.seconds, self._costs(p)), default=None)

    @property
    def nearest(self) -> Point | None:
        """The point that misses the goal by the smallest factor, where none meets it."""
        if self.meeting:
            return None
        return min(self.fitting, key=lambda p: (missed(p), p.run.seconds), default=None)

    @property
    def chosen(self) -> Point | None:
        """The answer: the cheapest that meets a deadline, without one the fastest; where none does, the nearest."""
        if not self.meeting:
            return self.nearest
        return self.cheapest if self.goal.days is not None else self.fastest

    def ties_in_time(self, point: Point) -> bool:
        """Whether a point cannot be told from the fastest of all that fit."""
        return _tied(point, min(self.fitting, key=lambda p: p.run.seconds), lambda p: np.array(p.run.draws_s))

    def ties_in_cost(self, point: Point) -> bool:
        """Whether a point cannot be told from the cheapest of all that fit."""
        if self.spent(point) is None:
            return False
        best = min(self.fitting, key=self._costs)
        return _tied(point, best, lambda p: np.array(p.run.draws_s) * (self._costs(p) / p.run.seconds))

    def to_json(self) -> dict[str, Any]:
        """The answer as plain values."""
        named = {name: getattr(self, name) for name in ("cheapest", "fastest", "nearest")}
        first = next((p.prediction for p in self.fitting), None)
        return {
            "format_version": FORMAT_VERSION,
            "model": None if first is None else first.model.name,
            "workload": None if first is None else first.train.text(),
            "goal": msgspec.to_builtins(self.goal),
            "met": bool(self.meeting),
            **{name: None if p is None else p.text for name, p in named.items()},
            "points": [self._row(p) for p in self.points],
            "stopped": self.stopped,
        }

    def _row(self, point: Point) -> dict[str, Any]:
        row: dict[str, Any] = {
            "curve": point.curve,
            "cluster": point.text,
            "num_devices": point.cluster.num_devices,
            "fits": point.prediction is not None,
            "refused": point.refused,
            "search_s": point.search_s,
        }
        p, run = point.prediction, point.run
        if p is None or run is None:
            return row
        return row | {
            "plan": p.plan.text(),
            "proven_optimal": point.proven,
            "step_time_s": p.step_time_s,
            "step_time_interval_s": list(p.step_time_interval_s),
            "tokens_per_s": point.tokens_per_s,
            "mfu": p.mfu,
            "headroom_bytes": p.tightest.headroom_bytes,
            "days": run.days,
            "days_interval": [s / 86_400 for s in run.seconds_interval],
            "device_hours": run.device_hours,
            "usd": run.usd,
            "usd_interval": None if run.usd_interval is None else list(run.usd_interval),
            "price_usd_hour": run.price_usd_hour,
            "price_source": run.price_source,
            "goal": [msgspec.to_builtins(limit) | {"met": limit.met} for limit in point.limits],
            "met": point.good,
            "ties_with_fastest": self.ties_in_time(point),
            "ties_with_cheapest": self.ties_in_cost(point),
        }


class FindOn(Protocol):
    """Searches one cluster; `first` and `kernels` are those of :func:`meshwright.search.find.find`."""

    def __call__(self, cluster: Cluster, *, first: Sequence[Any], kernels: dict) -> Found: ...


def sweep(
    curves: Sequence[ScalingRange], goal: Goal, find_on: FindOn, report: Callable[[int, int, str], None]
) -> Scaling:
    """Search every cluster of the curves. `report` is told (done, all, the name) before each. Ctrl-C ends it with
    what was found.

    A cluster on which no plan is legal or none fits is a point that says so.
    """
    asked = sum(len(curve.clusters) for curve in curves)
    points: list[Point] = []
    stopped = False

    def begun(text: str) -> None:
        report(len(points), asked, text)

    try:
        for point, ended in _points(curves, goal, find_on, begun):
            points += [point] if point is not None else []
            stopped = ended
            if ended:
                break
    except KeyboardInterrupt:
        stopped = True
    return Scaling(points=tuple(points), goal=goal, stopped=stopped, asked=asked)


def _points(
    curves: Sequence[ScalingRange], goal: Goal, find_on: FindOn, report: Callable[[str], None]
) -> Iterator[tuple[Point | None, bool]]:
    """Each point, and whether its search was stopped; a stopped search that found nothing is no point."""
    for curve in curves:
        kernels: dict = {}
        before: Prediction | None = None
        alike = all(len(cluster.islands) == 1 for _, cluster in curve.clusters)
        for text, cluster in curve.clusters:
            report(text)
            began = monotonic()
            first = () if before is None else grown(before.plan, cluster.num_devices)
            refused, found = "", None
            try:
                found = find_on(cluster, first=first, kernels=kernels if alike else {})
            except MeshwrightError as error:
                if any(d.code != "R005" for d in error.diagnostics):
                    raise
                refused = f"no legal plan: {cluster.num_devices:,} devices do not divide this batch and model"
            if found is not None and not found.fits:
                if found.stopped:
                    yield None, True
                refused = _lacks(found)
            if found is not None and found.fits:
                before = msgspec.structs.replace(found.best[0].prediction, goal=goal)
            yield (
                Point(
                    curve=curve.text,
                    text=text,
                    cluster=cluster,
                    prediction=None if refused else before,
                    refused=refused,
                    proven=found is not None and found.proven_optimal,
                    search_s=monotonic() - began,
                ),
                found is not None and found.stopped,
            )


def _lacks(found: Found) -> str:
    """Why nothing fits, by the plan that comes closest."""
    if not found.misses:
        return "nothing fits"
    closest = found.misses[0]
    return f"nothing fits: {closest.plan.text()} lacks {gibibytes(closest.lacks_bytes)}"


def missed(point: Point) -> float:
    """The largest factor by which a point is over a limit of the goal; 1 or less when it meets it."""
    return max((limit.value / limit.limit for limit in point.limits), default=1.0)


def _tied(point: Point, best: Point, values: Callable[[Point], np.ndarray]) -> bool:
    """Whether the 80% interval of the difference includes zero. On the same devices both err together, so draws are
    paired (common random numbers); on others their errors are taken as independent: every draw against every other."""
    if point is best:
        return False
    mine, other = values(point), values(best)
    same = {i.device.name for i in point.cluster.islands} == {i.device.name for i in best.cluster.islands}
    differences = mine - other if same else np.subtract.outer(mine, other).ravel()
    low, high = np.quantile(differences, [0.1, 0.9])
    return bool(low <= 0 <= high)
