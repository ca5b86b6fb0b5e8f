"""Rules of a plan for the vectors of a graph's nodes, which devices train in pairs of partitions."""

from __future__ import annotations

from meshwright.errors import Diagnostic
from meshwright.plan.facet import wrong
from meshwright.plan.facets import fields
from meshwright.plan.facets.buckets import GRID, HOST, LOCK, NVME, PEERS, TOURNAMENT, UNSAID
from meshwright.plan.record import Plan
from meshwright.plan.text import read
from meshwright.spec.cluster import Cluster
from meshwright.spec.edge_samples import EdgeSamples
from meshwright.spec.graphs import NodeEmbedding
from meshwright.spec.hardware import Device

#: Partitions at most whose pass, of all pairs of them, is simulated: a minute or so.
MOST_PARTITIONS = 128


def is_host(device: Device) -> bool:
    """Whether a device is a processor, whose memory is the host's."""
    return device.synchronous or device.scale_up == "upi"


def idle_of(plan: Plan, cluster: Cluster) -> str:
    """Return where partitions lie that nobody trains: as is said, else with the others where there are several hosts,
    on the host of accelerators, and on the drives of processors."""
    if plan.buckets.idle != UNSAID:
        return plan.buckets.idle
    if cluster.num_devices > cluster.islands[0].node.devices:
        return PEERS
    if not is_host(cluster.islands[0].device):
        return HOST
    return PEERS if cluster.num_devices > 1 else NVME


def bucket_violations(plan: Plan, model: NodeEmbedding, cluster: Cluster, work: EdgeSamples) -> list[Diagnostic]:
    """Return all violations of a plan with ``dp`` filled in: P084 for words of other models, and for partitions,
    devices and tiers that do not go together."""
    if plan.several:
        return [wrong("P084", "vectors of nodes are trained by a plan of one pool", "pools", "say one pool")]
    others = of_others(plan, model.name, "buckets", "P084", "its vectors are trained in pairs of partitions")
    found = others or [*_of_cluster(plan, model, cluster, work), *partition_violations(plan, model)]
    return found


def of_others(plan: Plan, name: str, facet: str, code: str, why: str, keep: tuple[str, ...] = ("dp",)) -> list:
    """Violations by words that say nothing of a model: all but those of a `facet` and those to `keep`."""
    usual = read(f"dp{plan.layout.dp}")
    found = []
    for field_name, field in fields().items():
        if field.facet != facet and field_name not in keep and field.value(plan) != field.value(usual):
            said = " ".join(field.words(plan)) or field_name
            message = f"{said} says nothing of {name}: {why}"
            place = f"{field.facet}.{field_name}"
            found.append(wrong(code, message, place, "drop it: meshwright explain graph_model"))
    return found


def partition_violations(plan: Plan, model: NodeEmbedding) -> list[Diagnostic]:
    """Return what is wrong with partitions and the devices that train them."""
    said, devices, found = plan.buckets, plan.layout.dp, []
    if said.partitions > MOST_PARTITIONS:
        message = f"partitions={said.partitions} make {said.partitions**2:,} buckets, more than a pass is simulated for"
        found.append(wrong("P084", message, "buckets.partitions", f"say partitions={MOST_PARTITIONS} at most"))
    if said.partitions > model.nodes:
        message = f"partitions={said.partitions} of {model.nodes:,} nodes"
        found.append(wrong("P084", message, "buckets.partitions", "say fewer partitions"))
    if said.way == GRID:
        if not model.context and devices > 1:
            message = f"buckets=grid: rows and columns are two tables, and {model.name} has one without a context"
            found.append(wrong("P084", message, "buckets.buckets", "say buckets=lock"))
        if said.partitions % devices:
            message = f"buckets=grid: {devices} devices do not divide partitions={said.partitions}"
            most = devices * max(1, round(said.partitions / devices))
            found.append(wrong("P084", message, "buckets.partitions", f"say partitions={most}"))
    if said.way == TOURNAMENT:
        if model.context:
            message = f"buckets=tournament: pairs are of one table, and {model.name} has two"
            found.append(wrong("P084", message, "buckets.buckets", "say buckets=grid"))
        if said.partitions % (2 * devices):
            message = f"buckets=tournament: {devices} devices do not share the pairs of partitions={said.partitions}"
            most = 2 * devices * max(1, round(said.partitions / (2 * devices)))
            found.append(wrong("P084", message, "buckets.partitions", f"say partitions={most}"))
    least = devices if model.context else 2 * devices
    if said.way == LOCK and devices > 1 and said.partitions < least:
        each = "one partition of each table" if model.context else "two partitions"
        message = f"{devices} devices hold {each} at a time, and partitions={said.partitions} are too few"
        found.append(wrong("P084", message, "buckets.partitions", f"say partitions={least}"))
    return found


def _of_cluster(plan: Plan, model: NodeEmbedding, cluster: Cluster, work: EdgeSamples) -> list[Diagnostic]:
    dp, found = plan.layout.dp, []
    if dp != cluster.num_devices:
        message = f"dp={dp} of a cluster of {cluster.num_devices} devices: every device trains buckets"
        help = f"say dp{cluster.num_devices}, or leave dp out"
        found.append(wrong("P084", message, f"layout.dp = {dp}", help))
    device, node, idle = cluster.islands[0].device, cluster.islands[0].node, idle_of(plan, cluster)
    why = ""
    if len(cluster.islands) > 1:
        why = "its islands have unequal devices, and buckets are handed to equal ones"
    elif device.cores:
        why = "its ranks share processor cores, which is not priced for buckets"
    elif work.shared > 1 and not work.rate and "fp32" not in device.peak_flops:
        why = "its devices do not multiply in fp32"
    if why:
        help = "ask about one kind of device in nodes, such as 4xp100"
        place = f"--on {cluster.name}"
        found.append(Diagnostic(code="P084", message=f"{cluster.name}: {why}", place=place, help=help))
    if plan.buckets.partitions == 1:
        return found
    if idle == HOST and is_host(device):
        message = f"idle=host: the memory of {device.title} is the host's"
        found.append(wrong("P084", message, "buckets.idle", "say idle=nvme or idle=peers"))
    if idle == NVME and not node.nvme_gb_s:
        message = f"partitions that nobody trains lie on drives, of which nodes of {cluster.name} have none"
        help = "say nvme_gb_s of the node in a cluster file, or idle=host or idle=peers"
        found.append(wrong("P084", message, "buckets.idle", help))
    if idle in (HOST, NVME) and dp > node.devices:
        message = f"idle={idle}: partitions on one host are not there for the others of {cluster.name}"
        found.append(wrong("P084", message, "buckets.idle", "say idle=peers"))
    if idle == PEERS and dp == 1:
        found.append(wrong("P084", "idle=peers: there is one machine", "buckets.idle", "say idle=nvme"))
    return found
