"""Faulty rows: measurements whose machine or software is known to have been at fault, scored apart."""

from __future__ import annotations

#: Flags of rows whose machine or software is known to have been at fault, by table, with the reason. They are
#: predicted and printed apart; their time is not scored with the rest, their memory and OOM labels are.
FAULTS: dict[str, dict[str, str]] = {
    "training_steps": {
        "pp_before_fix": "pipeline code later fixed by its authors; matched plans ran 2.6 to 40 times faster after it",
        "degraded_intranode_bw": "the job's own NVLink all-reduce reached a tenth of its bandwidth",
        "slow_outlier": "below 0.4 times the throughput of the same plan at a smaller microbatch",
    },
    "collectives": {
        "suspect_slow_network": "between nodes 1 to 5 GB/s on a 100 GB/s network: sockets instead of RDMA",
        "slow_or_unstated_fabric": "network between nodes not stated or far below its rate",
    },
}


def faulty(row: dict[str, str], table: str = "training_steps", column: str = "flags") -> bool:
    """Whether a row carries one of its table's fault flags."""
    known = FAULTS.get(table, {})
    return any(flag in known for flag in (row.get(column) or "").split(";"))
