"""Clients whose tasks are merged into one job, which splits by their affinities (MAS, Zhuang et al. 2307.11285). What a
task is and what is measured is in ``sync/merged.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from meshwright.assign.splits import MOST
from meshwright.errors import Diagnostic
from meshwright.sync.clients.cohort import Rota
from meshwright.sync.clients.split import MergeSplit
from meshwright.sync.merged import MergedTasks
from meshwright.sync.options import RuleOption
from meshwright.sync.rules import SyncRule
from meshwright.sync.rules.clients import SAMPLE, STEPS, choices, fragments
from meshwright.sync.rules.clients import wrong as unserved

if TYPE_CHECKING:
    from meshwright.plan import Plan
    from meshwright.spec.cluster import Cluster
    from meshwright.sync.record import SyncPolicy


def merged(values: dict[str, Any]) -> MergedTasks:
    """The tasks, and when they are split, as the options say."""
    return MergedTasks(
        tasks=values["tasks"],
        rounds=values["rounds"],
        groups=values["groups"],
        every=values["every"],
        turn=values["turn"] or values["rounds"],
    )


def decider(values: dict[str, Any], count: int) -> MergeSplit:
    """The decider of so many clients."""
    sample = min(values["clients"] or count, count)
    cohorts = Rota(num_clients=count, sample=sample, steps=values["h"], least=sample)
    return MergeSplit(cohorts=cohorts, merged=merged(values))


def wrong(plan: Plan, cluster: Cluster, policy: SyncPolicy) -> Iterator[Diagnostic]:
    """Layouts whose replicas are no clients, and tasks that are not to be split."""
    yield from unserved(plan, cluster, policy)
    tasks, groups = policy["tasks"], policy["groups"]
    found = []
    if not 2 <= tasks <= MOST:
        found.append((f"tasks={tasks} are not merged and split", f"say 2 to {MOST} tasks"))
    if groups > tasks:
        found.append((f"groups={groups} of tasks={tasks}", f"say groups={tasks} at most"))
    if plan.memory.loss_portions > 1 or plan.memory.portions > 1:
        found.append(("heads look ahead of their portion of a sequence", "drop portions"))
    if plan.offload.any:
        found.append(("what leaves the device comes back for the passes of a step alone", "drop offload="))
    for message, help in found:
        yield Diagnostic(code="Y003", message=message, place=f"plan.sync.policy = {policy.text}", help=help)


MAS = SyncRule(
    name="mas",
    title="tasks merged into one job, which splits by their affinities",
    paper="Zhuang et al., 2023, arXiv 2307.11285",
    exact=False,
    choices=lambda values: choices(values) | {"merged": merged(values)},
    fragments=fragments,
    together=lambda plan: 1,
    options=(
        STEPS,
        SAMPLE,
        RuleOption(name="tasks", what="heads: of the next token, of the one behind it, and so on", default=4),
        RuleOption(name="rounds", what="rounds in which all tasks are one job", example=20),
        RuleOption(name="groups", what="jobs that the tasks are split into", default=2),
        RuleOption(name="every", what="merged rounds from one measurement of affinities to the next", default=1),
        RuleOption(
            name="turn",
            what="rounds of a job before it is the next one's turn; 0 for as many as were merged",
            default=0,
            least=0,
        ),
    ),
    wrong=wrong,
    decider=decider,
    passes=True,
)

RULES = (MAS,)
