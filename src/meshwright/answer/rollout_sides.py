"""The two sides of a reinforcement-learning job: devices that train, devices that generate, and the parameters that go
from the one to the other."""

from __future__ import annotations

from collections import Counter
from math import ceil, log

import msgspec
import numpy as np

from meshwright.answer.predict import predict
from meshwright.answer.prediction import Prediction
from meshwright.answer.replica import BuiltReplica, built
from meshwright.answer.serving_check import oversized, refused
from meshwright.answer.whole_answer import OUTER
from meshwright.cost import Costs
from meshwright.cost.engine import EngineProfile
from meshwright.errors import Diagnostic, MeshwrightError
from meshwright.graph import KINDS
from meshwright.lower.place import Mesh
from meshwright.plan import Layout, Plan
from meshwright.spec.cluster import Cluster
from meshwright.spec.lengths import of_counts
from meshwright.spec.model import Model
from meshwright.spec.requests import Requests
from meshwright.spec.rollout import Rollout
from meshwright.spec.serve import Serve
from meshwright.spec.workload import Train
from meshwright.work import Collective

#: Equally likely lengths that stand for those of trajectories.
QUANTILES = 256
#: Bytes of a parameter as it is sent to where answers are generated.
SENT_BYTES = 2.0
#: Kinds of passes; a forward is one of them, and so are all parts of a backward.
PASSES = ("F", "B", "W", "BW")
#: State of training that stays on a device while it generates.
KEPT = ("parameters", "optimizer")


class TrainedSide(msgspec.Struct, frozen=True, kw_only=True):
    """The devices that train: one optimizer step as it is predicted, of so many ``tokens`` of trajectories, and
    ``forward_s`` of a forward pass alone over as many."""

    prediction: Prediction
    tokens: float
    forward_s: float
    forwards: int

    def seconds(self, tokens: float) -> float:
        """Return what a training step on trajectories of so many tokens takes, its forward passes included."""
        return (self.prediction.step_time_s + self.forwards * self.forward_s) * tokens / self.tokens

    @property
    def forward_share(self) -> float:
        """The part of a training step that is forward passes alone."""
        more = self.forwards * self.forward_s
        return more / (self.prediction.step_time_s + more)

    @property
    def kept_bytes(self) -> float:
        """Bytes of parameters and optimizer state on the rank with the most."""
        return max(sum(rank.alive.get(name, 0.0) for name in KEPT) for rank in self.prediction.memory)

    @property
    def sigma(self) -> float:
        """Standard deviation of the logarithm of a step's time."""
        low, high = self.prediction.step_time_interval_s
        return log(high / low) / (2.0 * OUTER)


def trajectories_of(requests: Requests) -> np.ndarray:
    """Return the tokens of trajectories [n], ascending: at most :data:`QUANTILES` that are equally likely."""
    length = np.sort(requests.prompt + requests.output)
    if len(length) <= QUANTILES or length[0] == length[-1]:
        return length
    places = (np.arange(QUANTILES) + 0.5) / QUANTILES * len(length)
    return length[places.astype(np.int64)]


def trained_side(
    model: Model, cluster: Cluster, train: Train, plan: Plan, rollout: Rollout, requests: Requests, costs: Costs | None
) -> TrainedSide:
    """Return the side that trains on a cluster. ``seq=`` of the workload is the tokens of a sequence that trajectories
    are packed into; there are as many sequences as they fill.

    Raises:
        MeshwrightError: W020 for a trajectory longer than a sequence, and the codes of a training step.
    """
    plan = plan.on(cluster.num_devices)
    length = trajectories_of(requests)
    if length[-1] > train.seq_len:
        message = f"trajectories of up to {length[-1]:,} tokens in sequences of {train.seq_len:,}"
        help = f"say --train seq={length[-1]}, or cut= fewer tokens of an answer"
        raise MeshwrightError.one("W020", message, place=f"--train seq={train.seq_len}", help=help)
    if plan.several:
        help = "one pool of a plan trains; the devices that generate have a plan of their own: --rollout plan="
        raise MeshwrightError.one("W020", "a plan of several pools", place=f"--plan {plan.text()}", help=help)
    each = rollout.trajectories / rollout.updates
    packing = train.pack or "balanced"
    wanted = each if packing == "padded" else each * float(length.mean()) / train.seq_len
    unit = plan.layout.dp * plan.pipeline.microbatch
    lengths = of_counts(Counter(length.tolist()))
    step = msgspec.structs.replace(
        train, global_batch=unit * max(1, ceil(wanted / unit - 1e-9)), lengths=lengths, pack=packing
    )
    found = predict(model, cluster, step, plan, costs=costs, detail=False)
    rate = found.tokens_per_s_per_gpu * found.num_devices
    return TrainedSide(
        prediction=found,
        tokens=rate * found.step_time_s,
        forward_s=forward_s(found),
        forwards=rollout.forwards,
    )


def forward_s(prediction: Prediction) -> float:
    """Return the seconds of the forward passes of a predicted step by themselves: of what is neither the update nor the
    exchange of gradients, the share that forward passes have of all passes."""
    line, split = prediction.timeline, prediction.attribution
    seconds = {kind: float((line.end_s - line.start_s)[line.kind == KINDS.index(kind)].sum()) for kind in PASSES}
    passes = prediction.step_time_s - split["optimizer"] - split["dp"]
    return passes * seconds["F"] / sum(seconds.values())


def generating_replica(
    model: Model,
    cluster: Cluster,
    serve: Serve,
    plan: Plan,
    requests: Requests,
    costs: Costs,
    profile: EngineProfile,
    taken: float,
) -> BuiltReplica:
    """Return a replica of those that generate on a cluster, where so many bytes of a device are `taken`.

    Raises:
        MeshwrightError: as :func:`meshwright.answer.serving.predict_serving`.
    """
    found = [] if not plan.several else [several()]
    found = found or refused(plan, model, cluster, serve) + oversized(model, requests, serve.engine)
    if found:
        raise MeshwrightError(
            [msgspec.structs.replace(d, place=d.place.replace("--serve", "--rollout")) for d in found]
        )
    return built(model, cluster, serve, plan, requests, costs, profile, taken=taken)


def several() -> Diagnostic:
    """Return W020 for generation by several pools."""
    help = "say words of one pool, such as plan=tp2"
    return Diagnostic(code="W020", message="rollouts by several pools", place="--rollout plan=", help=help)


class ParametersSent(msgspec.Struct, frozen=True, kw_only=True):
    """New parameters on their way, in seconds: shards are ``gathered`` where they were trained, and ``sent`` to every
    device that generates."""

    gathered_s: float
    sent_s: float

    @property
    def seconds(self) -> float:
        """Seconds of both, one after the other."""
        return self.gathered_s + self.sent_s


def sending(
    model: Model, cluster: Cluster, trained: Cluster, plan: Plan, generates: Plan, apart: bool, costs: Costs
) -> ParametersSent:
    """Return how long new parameters are on their way from the layout of `plan`, on the part of a cluster that trains,
    to that of `generates`.

    On devices of their own, those that train gather what they hold in shards, and every device that generates receives
    all parameters in one broadcast along them, of which it keeps its part. On the same devices each gathers the part
    that it generates with from all others; layouts that agree have it already."""
    whole, device = SENT_BYTES * model.num_params, cluster.islands[0].device
    ours, theirs = plan.layout, generates.layout
    sharded = ours.zero == 3 and ours.dp * ours.cp > 1

    def price(op: str, num_bytes: float, group) -> float:
        return costs.price(Collective(op=op, num_bytes=num_bytes, group=group), device).seconds if group.size > 1 else 0

    if not apart:
        if not sharded and (ours.tp, ours.pp) == (theirs.tp, theirs.pp):
            return ParametersSent(gathered_s=0.0, sent_s=0.0)
        size = theirs.tp * theirs.pp
        group = Mesh(Plan(layout=Layout(dp=cluster.num_devices)), cluster).along(size, cluster.num_devices // size)
        return ParametersSent(gathered_s=price("all_gather", whole / size, group), sent_s=0.0)
    gathered = 0.0
    if sharded:
        gathered = price("all_gather", whole / (ours.tp * ours.pp), Mesh(plan, trained).group("cp", "dp"))
    generating = cluster.num_devices - trained.num_devices
    group = Mesh(Plan(layout=Layout(dp=cluster.num_devices)), cluster).along(1, 1 + generating)
    return ParametersSent(gathered_s=gathered, sent_s=price("broadcast", whole, group))
