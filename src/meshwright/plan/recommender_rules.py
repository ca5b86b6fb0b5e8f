"""Rules of a plan for a recommendation model, whose dense layers are replicated and whose tables are spread."""

from __future__ import annotations

from meshwright.errors import Diagnostic
from meshwright.plan.facet import wrong
from meshwright.plan.facets import fields
from meshwright.plan.facets.embeddings import COLUMN, NO_TOWERS, NODE, Embeddings
from meshwright.plan.record import Plan
from meshwright.plan.text import read
from meshwright.spec.cluster import Cluster
from meshwright.spec.recommender import Recommender
from meshwright.spec.samples import SampleBatch


def recommender_violations(plan: Plan, model: Recommender, cluster: Cluster, batch: SampleBatch) -> list[Diagnostic]:
    """Return all violations of a plan with ``dp`` filled in: P082 for words that say nothing of tables and replicas,
    and for tables, towers or a batch that do not divide."""
    if plan.several:
        return [wrong("P082", "a recommendation model is trained by a plan of one pool", "pools", "say one pool")]
    others = _of_others(plan, model)
    if others:  # words of other models decide how many replicas are left
        return [*others, *_of_tables(plan, model, cluster)]
    return [*_of_cluster(plan, model, cluster, batch), *_of_tables(plan, model, cluster)]


def _of_others(plan: Plan, model: Recommender) -> list[Diagnostic]:
    usual = read(f"dp{plan.layout.dp}")
    found = []
    for name, field in fields().items():
        if field.facet != "embeddings" and name != "dp" and field.value(plan) != field.value(usual):
            said = " ".join(field.words(plan)) or name
            message = f"{said} says nothing of {model.name}: dense layers are replicated, and tables spread"
            help = "drop it; embeddings=table, row, column or auto says where tables are, batch= what a step trains on"
            found.append(wrong("P082", message, f"{field.facet}.{name}", help))
    return found


def _of_cluster(plan: Plan, model: Recommender, cluster: Cluster, batch: SampleBatch) -> list[Diagnostic]:
    dp, devices = plan.layout.dp, cluster.num_devices
    found = []
    if dp != devices:
        message = f"dp={dp} of a cluster of {devices} devices: every device has a share of the batch"
        found.append(wrong("P082", message, f"layout.dp = {dp}", f"say dp{devices}, or leave dp out"))
    elif batch.batch % dp:
        message = f"{dp} devices do not share {batch.batch:,} samples alike"
        help = f"say batch={max(1, round(batch.batch / dp)) * dp}"
        found.append(Diagnostic(code="P082", message=message, place=f"--train batch={batch.batch}", help=help))
    why = ""
    if len(cluster.islands) > 1:
        why = "its islands have unequal devices, and tables are spread over equal ones"
    elif cluster.shares_ports:
        why = "exchanges share its ports with one another, which is not priced for tables"
    elif cluster.islands[0].device.cores:
        why = "its ranks share processor cores, which is not priced for tables"
    elif batch.dtype not in cluster.islands[0].device.peak_flops:
        why = f"its devices do not multiply in {batch.dtype}"
    if why:
        help = "ask about one kind of GPU in nodes, such as 16xh100, and a dtype that it has"
        message = f"{cluster.name}: {why}"
        found.append(Diagnostic(code="P082", message=message, place=f"--on {cluster.name}", help=help))
    return found


def _of_tables(plan: Plan, model: Recommender, cluster: Cluster) -> list[Diagnostic]:
    said, usual, node = plan.embeddings, Embeddings(), cluster.islands[0].node.devices
    found = []
    if said.columns != usual.columns and said.way != COLUMN:
        message = f"columns={said.columns} is about tables that are cut by columns, and embeddings={said.way}"
        found.append(wrong("P082", message, "embeddings.columns", "say embeddings=column, or drop it"))
    if said.way == COLUMN and model.dim % said.columns:
        message = f"columns={said.columns} does not divide vectors of {model.dim} numbers"
        fit = max(n for n in range(1, min(said.columns, model.dim) + 1) if model.dim % n == 0)
        found.append(wrong("P082", message, "embeddings.columns", f"say columns={max(2, fit)}"))
    if said.towers == NODE:
        if cluster.num_devices <= node:
            message = "towers=node is a tower for every node, and the cluster has one"
            found.append(wrong("P082", message, "embeddings.towers", "drop it, or ask about several nodes"))
        elif cluster.num_devices % node:
            message = f"towers=node: nodes of {node} do not divide {cluster.num_devices} devices"
            found.append(wrong("P082", message, "embeddings.towers", "ask about whole nodes"))
    if said.compress > 1 and said.towers == NO_TOWERS:
        message = f"compress={said.compress} is what a tower leaves out of its vectors, and there are no towers"
        found.append(wrong("P082", message, "embeddings.compress", "say towers=node, or drop it"))
    return found
