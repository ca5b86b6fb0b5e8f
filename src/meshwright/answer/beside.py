"""Best-effort jobs beside serving on the same devices: what both take of them, which job is beside which replica, and
how fast requests and jobs are.

A job trains on one device, and every device of a replica has one of the kind that is beside it. Which kind that is
follows from a matching of the greatest sum of the jobs' predicted speeds (MuxFlow, Zhao et al. 2023, 2303.13803).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import msgspec
import numpy as np

from meshwright import serving
from meshwright.answer.governed import GovernedReplicas, cannot_govern
from meshwright.answer.latency import serving_metrics
from meshwright.answer.predict import predict
from meshwright.answer.prediction import Prediction
from meshwright.answer.serving_answer import BesideServing, ServingMetrics
from meshwright.assign.matching import heaviest_matching
from meshwright.cost import Costs
from meshwright.cost.part import TRAFFIC, DevicePart, part_of, untuned
from meshwright.errors import Diagnostic, MeshwrightError
from meshwright.plan import Plan
from meshwright.plan import parse as parse_plan
from meshwright.simulate.serve import refuse_oversized
from meshwright.simulate.serve_beside import SharedByJobs
from meshwright.simulate.serve_governed import GovernedPool
from meshwright.simulate.served import Replica, ServedRequests
from meshwright.spec.beside import BatchJob
from meshwright.spec.cluster import Cluster
from meshwright.spec.cluster_part import cut
from meshwright.spec.model import Model, load
from meshwright.spec.requests import Requests
from meshwright.spec.serve import Serve
from meshwright.spec.workload import Train

#: What the use of devices leaves out beside a job.
JOBS_APART = "energy and the use of devices are of requests alone: the jobs beside them draw more"


class JobOnDevice:
    """A job on shares of one device of a cluster: its step as predicted on the whole one, and by how much the roofline
    says that it takes longer on a part."""

    def __init__(self, job: BatchJob, cluster: Cluster):
        self.job, self.model, self.plan = job, load(job.model), parse_plan(f"tp1 mb{job.mb}")
        self.train = Train(global_batch=job.batch, seq_len=job.seq, dtype=job.dtype)
        one = cut(cluster, 0, 1)
        assert one is not None
        self.cluster, self.costs = one, untuned()
        self.step: Prediction = predict(self.model, one, self.train, self.plan, detail=False)
        self.seconds, self.traffic, self.speed = cache(self._seconds), cache(self._traffic), cache(self._speed)

    def _seconds(self, part: DevicePart) -> float:
        """The roofline's seconds of a step on a part of the device."""
        island = self.cluster.islands[0]
        device = part_of(island.device, part)
        where = msgspec.structs.replace(self.cluster, islands=(msgspec.structs.replace(island, device=device),))
        return predict(self.model, where, self.train, self.plan, costs=self.costs, detail=False).step_time_s

    def _traffic(self, share: float) -> float:
        """The share of the memory's rate that the job takes on a share of the multiprocessors."""
        return min(1.0, self.seconds(TRAFFIC) / self.seconds(DevicePart(sms=share)))

    def _speed(self, share: float, other: float) -> float:
        """Its speed there over that on the whole device, beside somebody who takes `other` of the memory's rate."""
        return self.seconds(DevicePart()) / self.seconds(DevicePart(share, 1.0 / (1.0 + other)))


class SharedReplicas(GovernedReplicas):
    """The replicas of a plan with jobs beside them."""

    def __init__(self, model: Model, cluster: Cluster, serve: Serve, plan: Plan, replica: Replica, costs: Costs):
        super().__init__(model, cluster, serve, plan, replica, costs)
        self.policy = serving.get("sharing", serve.engine.sharing)
        assert serve.engine.beside is not None
        kinds = {job: JobOnDevice(job, cluster) for job in serve.engine.beside.jobs}
        self.jobs = [kinds[job] for job in serve.engine.beside.jobs]
        self.governor: SharedByJobs | None = None
        self.matched: list[int] = []
        self.busy_alone: list[float] = []
        self.without: ServingMetrics | None = None

    def served(self, requests: Requests) -> tuple[list[Requests], list[ServedRequests]]:
        """Return the requests of every replica that has any, and what became of them beside the jobs.

        Raises:
            MeshwrightError: W012 for requests that the cache can never hold.
        """
        refuse_oversized(self.replica, requests)
        shares, served, alone = self._served(self.replica, requests, [-1] * self.count)
        self.busy_alone = [one.busy / alone.seconds for one in alone.used]
        self.without = serving_metrics(self.serve, shares, served)
        self.matched = self._matched(alone)
        shares, served, self.governor = self._served(self.replica, requests, self.matched)
        return shares, served

    def _served(
        self, replica: Replica, requests: Requests, matched: list[int]
    ) -> tuple[list[Requests], list[ServedRequests], SharedByJobs]:
        governor = SharedByJobs(self.policy, [self.jobs[job] if job >= 0 else None for job in matched])
        parts = self.parts(requests)
        shares, served = GovernedPool(replica, self.count, requests, self.router, parts, governor).served()
        return shares, served, governor

    def _matched(self, alone: SharedByJobs) -> list[int]:
        """Return which job is beside each replica, -1 for none: those whose predicted speeds, on the multiprocessors
        that the replica alone does not need, have the greatest sum."""
        weights = np.zeros((self.count, len(self.jobs)))
        for which, used in enumerate(alone.used):
            free = 1.0 - min(1.0, used.operations / alone.seconds)
            share = min(0.95, max(0.05, round(free, 1)))
            other = round(min(1.0, used.traffic / alone.seconds), 2)
            weights[which] = [job.speed(share, 0.0) * (1 - other) + job.speed(share, 1.0) * other for job in self.jobs]
        return heaviest_matching(weights).tolist()

    def again(self, replica: Replica, requests: Requests) -> tuple[list[Requests], list[ServedRequests]]:
        """Return the same of replicas of other costs, beside the same jobs."""
        matched = self.matched or self._matched(self._served(self.replica, requests, [-1] * self.count)[2])
        return self._served(replica, requests, matched)[:2]

    def beside(self) -> tuple[BesideServing, ...]:
        """Return what became of the jobs, one row for each replica, after requests were served."""
        assert self.governor is not None
        return tuple(self._of_replica(self.governor, which, job) for which, job in enumerate(self.matched))

    def _of_replica(self, governor: SharedByJobs, which: int, number: int) -> BesideServing:
        seconds, used, ranks = governor.seconds, governor.used[which], self.ranks
        job = self.jobs[number] if number >= 0 else None
        found = BesideServing(
            replica=which,
            devices=ranks,
            job=job.job.text() if job else "",
            share=float(governor.shares_s[which]) / seconds,
            there=float(governor.there_s[which]) / seconds,
            evicted=getattr(governor.states[which], "evicted", 0),
            slowdown=used.running / used.alone if used.alone else 1.0,
            busy_alone=self.busy_alone[which],
            busy=float(governor.lit_s[which]) / seconds,
            needed=min(1.0, used.operations / seconds),
        )
        if job is None:
            return found
        speed = float(governor.done_s[which]) / seconds
        samples = job.train.global_batch / job.step.step_time_s * ranks
        low, high = (job.train.global_batch / s * ranks for s in reversed(job.step.step_time_interval_s))
        return msgspec.structs.replace(
            found,
            speed=speed,
            samples_per_s=speed * samples,
            samples_interval=(speed * low, speed * high),
        )


def beside_bytes(serve: Serve, cluster: Cluster) -> float:
    """Return the memory that jobs beside requests take of a device: that of the largest of them."""
    jobs = serve.engine.beside
    found = (JobOnDevice(job, cluster).step.peak_memory_bytes for job in set(jobs.jobs if jobs else ()))
    return max(found, default=0.0)


def cannot_share(plan: Plan, cluster: Cluster, serve: Serve) -> Iterator[Diagnostic]:
    """Yield W014 for what jobs beside requests do not go with, and what is wrong with a job by itself."""
    words = serve.engine
    if words.beside is None:
        return
    place = f"--serve beside={words.beside.text()}"
    wrong = cannot_govern(plan, cluster, serve, "a job beside requests", place)
    try:
        why = serving.get("sharing", words.sharing).wrong()
        if why:
            help = f"for example sharing={words.sharing.partition(':')[0]}"
            wrong.append(Diagnostic(code="W014", message=why, place=f"--serve sharing={words.sharing}", help=help))
    except MeshwrightError as error:
        wrong += error.diagnostics
    yield from wrong
    for job in set(words.beside.jobs) if not wrong else ():
        try:
            JobOnDevice(job, cluster)
        except MeshwrightError as error:
            for one in error.diagnostics:
                yield msgspec.structs.replace(one, place=f"--serve beside={job.text()} {one.place}".strip())
