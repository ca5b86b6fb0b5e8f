"""Clients of a server: what their devices and links are predicted to take, and their rounds in a world."""

from __future__ import annotations

from math import ceil

import msgspec

from meshwright.answer.merged import MOVES, of_tasks, sizes
from meshwright.cost import Costs
from meshwright.errors import MeshwrightError
from meshwright.lower.bind import Binder
from meshwright.plan import Plan
from meshwright.plan.facets.sync import Sync
from meshwright.simulate.clients import ClientRounds, ClientSizes, simulate_clients
from meshwright.simulate.simulated import Simulated
from meshwright.simulate.step import simulate
from meshwright.spec.cluster import Cluster
from meshwright.spec.model import Model
from meshwright.spec.workload import Train
from meshwright.sync.codecs import codec
from meshwright.sync.fragments import PARAMETERS, VECTOR, coded_length
from meshwright.sync.policy import read
from meshwright.sync.record import USUAL, SyncPolicy
from meshwright.work import Collective, Elementwise
from meshwright.world.crowd import Crowd
from meshwright.world.trace import JobWorld

#: Tasks of each client that are simulated, where its tokens do not end the run before.
TASKS = 20


def client_rounds(
    run: Simulated, model: Model, cluster: Cluster, train: Train, plan: Plan, costs: Costs, world: JobWorld | None
) -> ClientRounds | None:
    """The rounds of a plan whose replicas are clients, None for any other.

    Raises:
        MeshwrightError: O005 where a world is one of clients, and the plan has none.
    """
    if world is not None and world.faulty is not None:
        raise MeshwrightError.one(
            "O005",
            "faulty workers take no other time than sound ones, so that a prediction says nothing of them",
            place="--world",
            help="meshwright run and meshwright converge train with faulty=; leave it out of a prediction",
        )
    policy = None if plan.several else read(plan.sync.policy)
    said = None if world is None else world.clients
    if policy is None or policy.rule.decider is None:
        if said is not None and not said.wavers_alone:
            raise MeshwrightError.one(
                "O005",
                "the world says how clients differ, and replicas of this plan are no clients of a server",
                place="--world",
                help="say jitter= and ranks= of replicas, or a sync of clients, such as sync=fedavg:h=8",
            )
        return None
    if said is not None:
        alike_in_data(policy, said)
    sizes = client_sizes(run, model, cluster, train, plan, costs)
    decider = policy.rule.decider(policy.values, plan.layout.dp)
    return simulate_clients(sizes, decider, said or Crowd(), total_steps(policy, plan, train))


def alike_in_data(policy: SyncPolicy, clients: Crowd) -> None:
    """Hold a crowd to what a policy needs of it.

    Raises:
        MeshwrightError: O005 where clients that compute the same parts of a batch have other data.
    """
    if policy.copies > 1 and clients.skew:
        raise MeshwrightError.one(
            "O005",
            f"the world says skew={clients.skew:g}, and several clients of sync={policy.text} compute each part",
            place="--world",
            help="leave skew= out, or say a sync whose clients have data of their own, such as sync=fedavg:h=8",
        )


def total_steps(policy: SyncPolicy, plan: Plan, train: Train) -> int:
    """Steps of all clients that are simulated."""
    some = TASKS * policy.when * plan.layout.dp
    if policy.merged is not None:
        some = policy.merged.cycle * policy.when * min(policy["clients"] or plan.layout.dp, plan.layout.dp)
    whole = ceil(train.tokens / train.tokens_per_step) * plan.layout.dp if train.tokens else some
    return min(some, whole)


def client_sizes(run: Simulated, model: Model, cluster: Cluster, train: Train, plan: Plan, costs: Costs) -> ClientSizes:
    """Times of every client for a step of its device alone, and for messages to the server, beside the first one."""
    count, lowered = plan.layout.dp, run.lowered
    alone = msgspec.structs.replace(plan, layout=msgspec.structs.replace(plan.layout, dp=1), sync=Sync(policy=USUAL))
    policy = read(plan.sync.policy)
    copies = policy.copies
    share = msgspec.structs.replace(train, global_batch=copies * train.global_batch // count)
    islands = [cluster.island_of(rank) for rank in range(count)]
    steps, passes, tasks = {}, {}, {}
    twice = msgspec.structs.replace(share, global_batch=2 * share.global_batch)
    for island in islands:
        if id(island) not in steps:
            one = msgspec.structs.replace(cluster, islands=(island,))
            steps[id(island)] = simulate(alone, model, one, share, costs).step_time_s
            both = simulate(alone, model, one, twice, costs).step_time_s if policy.rule.passes else 0.0
            passes[id(island)] = both - steps[id(island)]
            if policy.merged is not None:
                known = steps[id(island)], passes[id(island)]
                tasks[id(island)] = of_tasks(policy, alone, model, one, share, costs, known)
    binder, down, up, moved, prunable = Binder(lowered.stages, lowered.mesh), 0.0, 0, 0, 0
    for composition in lowered.stages.compositions:
        for units in composition.segments:
            for f in binder.fragments(units):
                if f.what == PARAMETERS:
                    code = codec(f.codec)
                    down += f.num_bytes
                    prunable += round(f.num_elements) if f.kind != VECTOR else 0
                    up += sum(code.messages(coded_length(f), f.element_bytes))
                    moved += code.moved(coded_length(f), f.element_bytes)[1] + 3 * f.num_bytes
    device = binder.meeting.device

    def sending_s(rank: int, num_bytes: float) -> float:
        if not rank:  # beside the server, in its memory
            return 0.0
        return costs.price(Collective(op="send", num_bytes=num_bytes, group=lowered.mesh.pair(0, rank)), device).seconds

    tree = int(read(plan.sync.policy).values.get("tree", 1))

    def near_s(rank: int) -> float:
        leader = rank // tree * tree
        if rank == leader:
            return 0.0
        pair = lowered.mesh.pair(leader, rank)
        return costs.price(Collective(op="send", num_bytes=up, group=pair), device).seconds

    heads = {}
    if policy.merged is not None:
        moved_s = costs.price(Elementwise(num_bytes=MOVES * down, kernels=MOVES, fused=True), device).seconds
        heads = sizes(policy, model, binder.stored.masters, [tasks[id(island)] for island in islands], moved_s)
    return ClientSizes(
        **heads,
        step_s=tuple(steps[id(island)] for island in islands),
        pruning=policy.pruning,
        prunable=prunable,
        element_bytes=binder.stored.masters,
        pass_s=tuple(passes[id(island)] for island in islands) if policy.rule.passes else (),
        down_s=tuple(sending_s(rank, down) for rank in range(count)),
        up_s=tuple(sending_s(rank, up) for rank in range(count)),
        down_bytes=int(down),
        up_bytes=up,
        tree=tree,
        near_s=tuple(near_s(rank) for rank in range(count)) if tree > 1 else (),
        merge_s=costs.price(Elementwise(num_bytes=moved, kernels=2, fused=True), device).seconds,
    )
