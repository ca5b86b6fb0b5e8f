"""Predict a reinforcement-learning job: rollouts by the serving simulator, training steps by the step simulator, and
the decider of rollout control between them. The whole flow is :func:`predict_rollouts`."""

from __future__ import annotations

from math import exp, hypot

import msgspec
import numpy as np

from meshwright import serving
from meshwright.answer.metrics import Metric
from meshwright.answer.prediction import Assumption, RankMemory
from meshwright.answer.replica import BuiltReplica, served_by
from meshwright.answer.rollout_answer import DevicesSpent, RolloutPrediction, SplitOfDevices
from meshwright.answer.rollout_sides import (
    ParametersSent,
    TrainedSide,
    generating_replica,
    sending,
    trained_side,
)
from meshwright.answer.whole_answer import OUTER
from meshwright.cost import Costs
from meshwright.cost.engine import engine_profile
from meshwright.cost.standard import serving_costs
from meshwright.errors import MeshwrightError
from meshwright.plan import Plan
from meshwright.plan import parse as parse_plan
from meshwright.simulate.rollouts import Flow, RolledOut, RolloutJob, in_waves
from meshwright.spec.cluster import Cluster
from meshwright.spec.cluster_part import cut
from meshwright.spec.ends import Head
from meshwright.spec.model import Model
from meshwright.spec.requests import Requests
from meshwright.spec.rollout import ASYNC, BEST, Rollout
from meshwright.spec.workload import Train
from meshwright.world.rollouts import RolloutControl

#: Replicas that are simulated of those that never wait for one another, and steps that are measured.
MOST_REPLICAS, LEAST_REPLICAS, MEASURED = 16, 8, 8
#: Steps before these, besides as many as parameters may be old.
WARM_UP = 3
#: Numbers of generating devices that are tried first, about, and trajectories drawn to see how long they are.
TRIED, DRAWN = 8, 4096


def predict_rollouts(
    model: Model,
    cluster: Cluster,
    train: Train,
    plan: Plan,
    rollout: Rollout,
    *,
    costs: Costs | None = None,
    generating_costs: Costs | None = None,
) -> RolloutPrediction:
    """Return how fast a job generates and trains: `plan` is that of the devices that train, `train` says the tokens of
    a sequence (``seq_len``) that trajectories are packed into, and what else a training step says.

    Raises:
        MeshwrightError: every violation of a side at once: W020 what rollouts do not go with, the codes of a training
            step and those of serving.
    """
    if len(cluster.islands) > 1:
        help = "say one of its islands"
        message = f"{cluster.name} has islands of unlike devices"
        raise MeshwrightError.one("W020", message, place=f"--on {cluster.name}", help=help)
    if len(model.flows) > 1 or not isinstance(model.head, Head) or model.head.pooled:
        message, help = f"{model.name} generates no tokens", "ask about a decoder, such as qwen3-0.6b"
        raise MeshwrightError.one("W020", message, place=f"model {model.name}", help=help)
    asked = (model, cluster, train, plan)
    prices = costs, generating_costs
    if rollout.devices == BEST:
        found = _best(asked, rollout, *prices)
    else:
        found = _Job(*asked, rollout, *prices).answer()
    if not rollout.against:
        return found
    other = _Job(*asked, rollout.synchronous(), *prices).answer()
    return msgspec.structs.replace(found, against=other)


class _Job:
    """One job on a cluster, its two sides built."""

    def __init__(
        self,
        model: Model,
        cluster: Cluster,
        train: Train,
        plan: Plan,
        rollout: Rollout,
        costs: Costs | None,
        generating_costs: Costs | None,
    ):
        self.model, self.cluster, self.rollout = model, cluster, rollout
        trains, generates = parts(cluster, rollout)
        self.profile = engine_profile(rollout.serve.engine.profile)
        serving_prices = generating_costs or serving_costs(self.profile.library)
        lengths = drawn(rollout, DRAWN)
        self.trained: TrainedSide = trained_side(model, trains, train, plan, rollout, lengths, costs)
        self.plan = self.trained.prediction.plan
        self.generates: Plan = parse_plan(rollout.plan or "tp1").on(generates.num_devices)
        taken = 0.0 if rollout.apart else self.trained.kept_bytes
        serve = msgspec.structs.replace(rollout.serve, batch=rollout.trajectories)
        self.made: BuiltReplica = generating_replica(
            model, generates, serve, self.generates, lengths, serving_prices, self.profile, taken
        )
        self.sending: ParametersSent = sending(
            model, cluster, trains, self.plan, self.generates, rollout.apart, serving_prices
        )
        self.num_trains, self.num_generates = trains.num_devices, generates.num_devices

    @property
    def fits(self) -> bool:
        return self.made.fits and self.trained.prediction.fits

    def answer(self) -> RolloutPrediction:
        """Return the answer; without times where the weights leave no room for a request."""
        if self.made.replica is None:
            return self._told(None, 1.0, 0, 0)
        count = self.generates.layout.dp
        shown, batch = folded(count, self.rollout.prompts) if self.rollout.control == ASYNC else (count, None)
        batch = batch or self.rollout.prompts
        warm, steps = steps_of(self.rollout)
        return self._told(self._simulated(shown, batch, steps), batch / self.rollout.prompts, warm, shown)

    def _simulated(self, count: int, batch: int, steps: int) -> RolledOut:
        """The job with so many replicas and prompts a step."""
        rollout, replica = self.rollout, self.made.replica
        assert replica is not None
        share = batch / rollout.prompts
        control = RolloutControl(
            batch=batch,
            bound=rollout.bound,
            waves=rollout.control != ASYNC,
            interrupts=rollout.control == ASYNC and rollout.interrupt,
            room=max(1, count * replica.limits.max_batch // rollout.samples),
        )
        job = RolloutJob(
            control=control,
            steps=steps,
            samples=rollout.samples,
            requests=drawn(rollout, (steps + rollout.bound + 1) * batch * rollout.samples),
            train_s=lambda tokens: self.trained.seconds(tokens / share),
            load_s=self.sending.seconds,
        )
        if control.waves:
            return in_waves(job, lambda wave: served_by(rollout.serve, replica, wave, count))
        return Flow(job, replica, count, serving.get("routing", rollout.serve.engine.routing)).run()

    def _told(self, out: RolledOut | None, share: float, warm: int, shown: int) -> RolloutPrediction:
        rollout = self.rollout
        said = RolloutPrediction(
            model=self.model,
            cluster=self.cluster,
            train=self.trained.prediction.train,
            plan=self.plan,
            rollout=rollout,
            generates=self.generates,
            devices=(self.num_trains, self.num_generates),
            fits=self.fits,
            memory=_memory(self.made, self.trained, rollout.apart),
            sending=self.sending,
            step_s=Metric(0.0),
            assumptions=_assumptions(self, share, shown),
            cautions=_cautions(self, out),
        )
        return said if out is None else msgspec.structs.replace(said, **self._measured(out, share, warm, shown))

    def _measured(self, out: RolledOut, share: float, warm: int, shown: int) -> dict:
        """The fields that the measured steps say, of all devices where a ``share`` was simulated."""
        before, last = out.steps[warm - 1], out.steps[-1]
        some, count = out.steps[warm:], len(out.steps) - warm
        step = (last.end_s - before.end_s) / count
        trains = sum(one.end_s - one.begin_s for one in some) / count
        generates = (last.generating_s - before.generating_s) / count / shown
        ages = np.array([age for one in some for age in one.stale])
        factor = exp(OUTER * hypot(self.trained.sigma * trains / step, self.generated_sigma * generates / step))
        forwards = trains * self.trained.forward_share
        ended = max(out.ended, 1) * self.rollout.samples
        answered = sum(one.answered for one in out.steps)
        return {
            "step_s": Metric(step, (step / factor, step * factor)),
            "trained_tokens": sum(one.tokens for one in some) / count / share,
            "answered_tokens": sum(one.answered for one in some) / count / share,
            "spent": _spent(self, step, trains - forwards, forwards, generates),
            "staleness": (float(ages.mean()), int(max(age for one in out.steps for age in one.stale))),
            "interruptions": out.interrupted / ended,
            "recomputed": out.recomputed / max(answered, 1),
            "simulated": out,
        }

    @property
    def generated_sigma(self) -> float:
        """Standard deviation of the logarithm of an iteration's time."""
        assert self.made.replica is not None
        table = self.made.replica.costs
        linear = float(table.linear_spread.sum() / max(table.linear_parts.sum(), 1e-30))
        return hypot(self.profile.sigma, self.profile.pace_sigma, max(linear, table.sigma))


def parts(cluster: Cluster, rollout: Rollout) -> tuple[Cluster, Cluster]:
    """Return the devices that train and those that generate, which are the last ones.

    Raises:
        MeshwrightError: W020 where there are no others, or a side would be no part of the cluster's tree.
    """
    if not rollout.apart:
        return cluster, cluster
    count, place = int(rollout.devices), f"--rollout devices={rollout.devices}"
    left = cluster.num_devices - count
    if left < 1:
        message = f"{count:,} of {cluster.num_devices:,} devices generate, and none trains"
        raise MeshwrightError.one("W020", message, place=place, help="say fewer, or devices=best")
    trains, generates = cut(cluster, 0, left), cut(cluster, left, cluster.num_devices)
    if trains is None or generates is None:
        node = cluster.islands[0].devices_per_node
        message = f"{count:,} devices that generate and {left:,} that train are no parts of {cluster.name}"
        help = f"whole nodes of {node} on each side, or a part of one on each"
        raise MeshwrightError.one("W020", message, place=place, help=help)
    return trains, generates


def drawn(rollout: Rollout, count: int) -> Requests:
    """Return so many trajectories, or the next number that is whole groups: the same for the same rollouts. Answers end
    where they are cut."""
    each = rollout.samples
    serve = msgspec.structs.replace(rollout.serve, batch=-(-count // each) * each, samples=each)
    found = serve.drawn()
    if rollout.cut:
        found = msgspec.structs.replace(found, output=np.minimum(found.output, rollout.cut))
    return found


def folded(replicas: int, prompts: int) -> tuple[int, int]:
    """Return how many replicas and prompts a step are simulated in place of all: of at most :data:`MOST_REPLICAS`
    replicas, the number that has its share of the prompts the most nearly."""
    if replicas <= MOST_REPLICAS:
        return replicas, prompts

    def error(count: int) -> float:
        share = prompts * count / replicas
        return abs(max(1, round(share)) / share - 1.0)

    best = min(range(MOST_REPLICAS, LEAST_REPLICAS - 1, -1), key=error)
    return best, max(1, round(prompts * best / replicas))


def steps_of(rollout: Rollout) -> tuple[int, int]:
    """Return how many steps are simulated before some are measured, and in all."""
    warm = WARM_UP + rollout.bound if rollout.bound else 1
    if rollout.steps:
        return min(warm, max(1, rollout.steps - 1)), max(2, rollout.steps)
    return warm, warm + max(MEASURED, rollout.bound)


def _spent(job: _Job, step: float, trains: float, forwards: float, generates: float) -> tuple[DevicesSpent, ...]:
    loads = job.sending.seconds
    generates = min(generates, step - loads)  # an iteration that waits for parameters is counted until it ends
    if not job.rollout.apart:
        causes = {"training": trains, "forward passes": forwards, "generating": generates, "new parameters": loads}
        return (DevicesSpent.of("all", job.num_trains, step, causes),)
    return (
        DevicesSpent.of(
            "training", job.num_trains, step, {"training": trains, "forward passes": forwards, "new parameters": loads}
        ),
        DevicesSpent.of("generating", job.num_generates, step, {"generating": generates, "new parameters": loads}),
    )


def _memory(made: BuiltReplica, trained: TrainedSide, apart: bool) -> tuple[RankMemory, ...]:
    """The fullest rank that trains, and those that generate; state of training beside them is told by its name."""
    fullest = max(trained.prediction.memory, key=lambda rank: rank.peak_bytes)
    named = [msgspec.structs.replace(fullest, rank=f"training, {fullest.rank}")]
    for rank in made.memory:
        held = {"state of training" if name == "job beside" else name: size for name, size in rank.alive.items()}
        named.append(msgspec.structs.replace(rank, rank=f"generating, {rank.rank}", alive=held))
    return tuple(named)


def _assumptions(job: _Job, share: float, shown: int) -> tuple[Assumption, ...]:
    rollout, train = job.rollout, job.trained.prediction.train
    out = [
        Assumption("rewards", "no time", "they are found beside generation, by other computers", True),
        Assumption("groups", f"{rollout.samples} answers", "a step trains on all answers to a prompt, or on none"),
        Assumption(
            "packing",
            f"{train.packing}, {train.global_batch} sequences of {train.seq_len:,}",
            "a step of other trajectories takes as long for each token",
        ),
        Assumption("parameters sent", "16 bits each", "all of them after every step, while neither side works"),
    ]
    if not rollout.apart:
        kept = (
            "parameters and optimizer state stay on the device while it generates, its cache does not while it trains"
        )
        out.append(Assumption("same devices", "in turn", kept))
    if 0 < shown < job.generates.layout.dp:
        said = f"{shown} of {job.generates.layout.dp} replicas"
        out.append(
            Assumption("simulated", said, f"with {share * rollout.prompts:.0f} of {rollout.prompts} prompts a step")
        )
    return tuple(out)


def _cautions(job: _Job, out: RolledOut | None) -> tuple[str, ...]:
    bound = job.rollout.bound
    if out is None:
        return ("the weights leave no room for an answer where it is generated",)
    if not bound:
        return ()
    old = "an update" if bound == 1 else f"up to {bound} updates"
    return (f"approximate: a step trains on answers by parameters {old} older; what that does to learning is not said",)


def _best(asked: tuple, rollout: Rollout, costs: Costs | None, generating_costs: Costs | None) -> RolloutPrediction:
    """The answer of the number of generating devices that gives the most trajectories a second."""
    cluster, found, refused = asked[1], {}, None

    def tried(count: int) -> None:
        nonlocal refused
        if count in found:
            return
        try:
            found[count] = _Job(*asked, rollout.with_devices(count), costs, generating_costs).answer()
        except MeshwrightError as error:
            refused = refused or error

    sizes = splits(cluster, rollout)
    first = sizes[:: max(1, len(sizes) // TRIED)]
    for count in first:
        tried(count)
    good = [count for count, one in found.items() if one.fits]
    if not good:
        if found:
            return next(iter(found.values()))
        raise refused or _none(cluster, rollout)
    at = sizes.index(max(good, key=lambda count: found[count].trajectories_per_s))
    step = max(1, len(sizes) // TRIED)
    for count in sizes[max(0, at - step + 1) : at + step : max(1, step // 2)]:
        tried(count)
    best = max((one for one in found.values() if one.fits), key=lambda one: one.trajectories_per_s)
    rows = tuple(SplitOfDevices.of(found[count]) for count in sorted(found))
    return msgspec.structs.replace(best, splits=rows)


def splits(cluster: Cluster, rollout: Rollout) -> list[int]:
    """Return the numbers of generating devices that leave parts of the cluster on both sides: whole replicas."""
    layout = parse_plan(rollout.plan or "tp1").layout
    each = layout.tp * layout.pp * layout.cp * max(1, layout.dp)
    counts = range(each, cluster.num_devices, each)
    return [
        n
        for n in counts
        if cut(cluster, 0, cluster.num_devices - n) and cut(cluster, cluster.num_devices - n, cluster.num_devices)
    ]


def _none(cluster: Cluster, rollout: Rollout) -> MeshwrightError:
    message = f"{cluster.name} has no part for replicas of {rollout.plan or 'tp1'} and another that trains"
    return MeshwrightError.one("W020", message, place="--rollout devices=best", help="more devices, or a smaller plan=")
