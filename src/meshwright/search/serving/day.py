"""A day of serving: replicas follow the rate as an autoscaler decides, and every request of the day is simulated.

The decider looks at the rate alone, so that who is there when is known before anything is simulated; requests are dealt
in turn among the replicas that are up, and each replica is simulated for itself. A replica that is stopped answers what
it has. Requests of one that is lost go to the others when it is lost, and their clocks run on.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
import numpy as np

from meshwright.errors import MeshwrightError
from meshwright.search.serving.beside import TrainingBeside, trained_beside
from meshwright.search.serving.evaluate import ServingEvaluator, rate_of, usd_hour
from meshwright.search.serving.space import Phase, ServingCandidate, most_replicas
from meshwright.simulate.serve import simulate
from meshwright.simulate.served import Replica
from meshwright.spec.requests import Requests
from meshwright.spec.serve import Serve
from meshwright.spec.serving_day import HOUR_S, ServingDay, requests_of
from meshwright.spec.workload import Train
from meshwright.world.autoscale import Autoscaler, RateSeen, ReplicaLost, StartReplicas
from meshwright.world.decider import LogEntry


class Shift(msgspec.Struct):
    """The hours of a replica: it holds its devices (``from_s``), answers (``up_s``), and gets no more requests
    (``down_s``), where it may be ``lost``; seconds of the day."""

    from_s: float
    up_s: float
    down_s: float = np.inf
    lost: bool = False


class HourOfDay(NamedTuple):
    """An hour: requests, the most devices that serving held, the share of requests that kept every objective, and the
    90th percentiles of TTFT and TPOT in seconds."""

    requests: int
    devices: int
    attainment: float
    ttft_s: float
    tpot_s: float


class DayServed(msgspec.Struct, frozen=True, kw_only=True):
    """A day that was simulated: its hours, the hours that devices were held (``device_hours``), the share of requests
    that kept every objective, and for every objective (metric, bound, share, value); ``resent`` requests were lost with
    their replica. ``log`` is the decider's."""

    hours: tuple[HourOfDay, ...]
    device_hours: float
    attainment: float
    objectives: tuple[tuple[str, float, float, float], ...]
    resent: int
    shifts: tuple[Shift, ...]
    log: tuple[LogEntry, ...]

    @property
    def good(self) -> bool:
        """Whether every objective is kept over the day."""
        return all(value <= bound for _, bound, _, value in self.objectives)

    def to_json(self) -> dict[str, Any]:
        """The day as plain values."""
        return {
            "good": self.good,
            "device_hours": self.device_hours,
            "attainment": self.attainment,
            "objectives": [
                dict(zip(("metric", "bound_s", "share", "value_s"), one)) | {"met": one[3] <= one[1]}
                for one in self.objectives
            ],
            "resent": self.resent,
            "hours": [one._asdict() for one in self.hours],
        }


class DayPlanned(msgspec.Struct, frozen=True, kw_only=True):
    """A day with a plan's replicas: as many as the highest rate needs all day long (``fixed``), and as many as an
    autoscaler wants (``scaled``). A replica answers ``replica_rate`` requests a second in time; ``usd_hour`` is a
    device's price, None where none is known. ``training`` is what a training job beside it gets."""

    day: ServingDay
    candidate: ServingCandidate
    replica_rate: float
    fixed: DayServed
    scaled: DayServed
    usd_hour: float | None
    training: TrainingBeside | None = None

    @property
    def good(self) -> bool:
        """Whether the autoscaled replicas keep every objective over the day."""
        return self.scaled.good

    def usd(self, one: DayServed) -> float | None:
        """Return the dollars of a day's devices."""
        return None if self.usd_hour is None else one.device_hours * self.usd_hour

    def to_json(self) -> dict[str, Any]:
        """The day as plain values."""
        return {
            "good": self.good,
            "requests": sum(hour.requests for hour in self.scaled.hours),
            "replica_rate_req_per_s": self.replica_rate,
            "scaled": self.scaled.to_json() | {"usd": self.usd(self.scaled)},
            "fixed": self.fixed.to_json() | {"usd": self.usd(self.fixed)},
            "training": None if self.training is None else self.training.to_json(),
        }


def planned(
    evaluator: ServingEvaluator, candidate: ServingCandidate, day: ServingDay, train: Train | None = None
) -> DayPlanned:
    """Simulate a day with replicas of a candidate, a number of them that is fixed and one that follows the rate; with
    `train` a training job has the devices that serving leaves free.

    Raises:
        MeshwrightError: W002 for a day of too many requests, R015 where no replica keeps the objectives at any rate.
    """
    (phase,) = candidate.phases
    one = ServingCandidate((Phase(phase.plan, 1),), candidate.engine, candidate.where)
    rate = evaluator.most_rate(one) * rate_of(evaluator.requests)
    if not rate:
        message = "not even a single replica keeps the objectives at any rate"
        raise MeshwrightError.one("R015", message, place="--day", help="other bounds, or a plan of more devices")
    requests = requests_of(day, evaluator.serve.rate, evaluator.requests)
    devices, most = phase.plan.layout.num_ranks, most_replicas(phase.plan, evaluator.cluster)
    scaler = Autoscaler(rate=rate, room=day.room, least=day.least, most=most, hold_s=day.hold_s)
    looks = np.histogram(requests.arrival_s, np.arange(0.0, day.length_s + day.every_s, day.every_s))[0] / day.every_s
    peak = min(most, max(day.least, scaler.needed(float(looks.max()))))
    first = min(most, max(day.least, scaler.needed(float(looks[0]))))
    serve, replica = candidate.over(evaluator.serve), evaluator.built(phase, candidate.engine).replica
    found = {}
    for name, begins in (("fixed", peak), ("scaled", first)):
        own = msgspec.structs.replace(scaler, begins=begins)
        shifts, log = scheduled(day, own, requests, fixed=name == "fixed")
        found[name] = served(day, serve, replica, devices, requests, shifts, log)
    price = usd_hour(evaluator.cluster, 1)
    beside = None
    if train is not None:
        held = [[hour.devices for hour in found[name].hours] for name in ("scaled", "fixed")]
        beside = trained_beside(evaluator.model, evaluator.cluster, train, *held, day.restart_s)
    return DayPlanned(day=day, candidate=candidate, replica_rate=rate, **found, usd_hour=price, training=beside)


def scheduled(
    day: ServingDay, scaler: Autoscaler, requests: Requests, *, fixed: bool = False
) -> tuple[list[Shift], list[LogEntry]]:
    """Return the shifts of all replicas over a day, and the decider's log; with `fixed` only lost ones are replaced."""
    looks = np.arange(day.every_s, day.length_s, day.every_s)
    seen = np.histogram(requests.arrival_s, np.concatenate([[0.0], looks]))[0] / day.every_s
    events = [RateSeen(float(at), float(rate)) for at, rate in zip(looks, seen)]
    events = sorted([*([] if fixed else events), *(ReplicaLost(at) for at in day.lost_s)], key=lambda e: e.at_s)
    state, log = scaler.begin(), []
    shifts = [Shift(0.0, 0.0) for _ in range(state.replicas)]
    for event in events:
        state, decisions = scaler.decide(state, event)
        log.append(LogEntry(event, decisions, event.at_s))
        if isinstance(event, ReplicaLost):
            gone = next((s for s in shifts if s.up_s <= event.at_s and s.down_s == np.inf), None)
            if gone is None:
                continue
            gone.down_s, gone.lost = event.at_s, True
        for decision in decisions:
            if isinstance(decision, StartReplicas):
                shifts += [Shift(event.at_s, event.at_s + day.start_s) for _ in range(decision.count)]
            else:
                last = [s for s in sorted(shifts, key=lambda s: s.up_s) if s.down_s == np.inf][-decision.count :]
                for one in last:
                    one.down_s = max(event.at_s, one.up_s)
    return shifts, log


def dealt_over(shifts: list[Shift], at: np.ndarray, begins: int = 0) -> np.ndarray:
    """Return the shift that every request [n] goes to, in turn among those that are up when it comes (the next to come
    up where none is)."""
    edges = np.unique([0.0, *(s.up_s for s in shifts), *(s.down_s for s in shifts if s.down_s < np.inf)])
    place = np.searchsorted(edges, at, side="right") - 1
    where = np.zeros(len(at), np.int64)
    turn = begins + np.arange(len(at))
    for i in np.unique(place):
        up = [n for n, s in enumerate(shifts) if s.up_s <= edges[i] < s.down_s]
        if not up:
            later = [n for n, s in enumerate(shifts) if s.up_s > edges[i] and s.down_s > s.up_s]
            up = [min(later, key=lambda n: shifts[n].up_s)] if later else [len(shifts) - 1]
        mine = place == i
        where[mine] = np.array(up)[turn[mine] % len(up)]
    return where


def served(
    day: ServingDay,
    serve: Serve,
    replica: Replica,
    devices: int,
    requests: Requests,
    shifts: list[Shift],
    log: list[LogEntry],
) -> DayServed:
    """Simulate the day's requests on replicas with those shifts, each of so many `devices`."""
    origin = requests.arrival_s
    sent, where = origin.copy(), dealt_over(shifts, origin)
    sent = np.maximum(sent, np.array([s.up_s for s in shifts])[where])
    first, end = np.full(len(sent), np.nan), np.full(len(sent), np.nan)
    resent = 0
    order = sorted(range(len(shifts)), key=lambda n: (not shifts[n].lost, shifts[n].down_s))
    for number in order:  # those that are lost before the others, which get what they leave
        mine = np.flatnonzero(where == number)
        if not len(mine):
            continue
        mine = mine[np.argsort(sent[mine], kind="stable")]
        share = msgspec.structs.replace(requests.chosen(mine), arrival_s=sent[mine] - sent[mine[0]])
        done = simulate(replica, share)
        first[mine], end[mine] = done.first_s + sent[mine[0]], done.end_s + sent[mine[0]]
        if shifts[number].lost:
            open_ = mine[end[mine] > shifts[number].down_s]
            resent += len(open_)
            sent[open_] = shifts[number].down_s
            where[open_] = dealt_over(shifts, sent[open_])
            sent[open_] = np.maximum(sent[open_], np.array([s.up_s for s in shifts])[where[open_]])
    return _told(day, serve, devices, requests, (first - origin, end - origin), shifts, log, resent)


def _told(day, serve, devices, requests, times, shifts, log, resent) -> DayServed:
    """The day as figures, from the times of its requests."""
    ttft, e2e = times
    more = requests.output - 1
    tpot = np.where(more > 0, (e2e - ttft) / np.maximum(more, 1), np.nan)
    values = {"ttft_s": ttft, "tpot_s": tpot, "e2e_s": e2e}
    bounds = serve.common().objectives
    kept = np.ones(len(ttft), bool)
    for name, bound in bounds.items():
        kept &= ~(values[name] > bound.seconds)
    ends = np.array([min(s.down_s, day.length_s) for s in shifts])
    held = np.array([s.from_s for s in shifts])
    hours = []
    place = (requests.arrival_s // HOUR_S).astype(np.int64)
    for hour in range(int(np.ceil(day.length_s / HOUR_S))):
        mine = place == hour
        most = _most_at_once(held, ends, hour * HOUR_S, (hour + 1) * HOUR_S)
        hours.append(
            HourOfDay(
                int(mine.sum()),
                most * devices,
                float(kept[mine].mean()) if mine.any() else 1.0,
                _quantile(ttft[mine], 0.9),
                _quantile(tpot[mine], 0.9),
            )
        )
    found = [(name, b.seconds, b.share, _quantile(values[name], b.share)) for name, b in bounds.items()]
    return DayServed(
        hours=tuple(hours),
        device_hours=float((ends - held).sum()) * devices / HOUR_S,
        attainment=float(kept.mean()),
        objectives=tuple(found),
        resent=resent,
        shifts=tuple(shifts),
        log=tuple(log),
    )


def _most_at_once(begin: np.ndarray, end: np.ndarray, low: float, high: float) -> int:
    """The most replicas that hold devices at one time within an hour."""
    at = np.concatenate([[low], begin[(begin > low) & (begin < high)]])
    return int(((begin[None, :] <= at[:, None]) & (end[None, :] > at[:, None])).sum(axis=1).max())


def _quantile(values: np.ndarray, share: float) -> float:
    values = values[~np.isnan(values)]
    return float(np.quantile(values, share)) if len(values) else 0.0
