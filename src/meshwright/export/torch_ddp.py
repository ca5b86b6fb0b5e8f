"""torch's DistributedDataParallel in a loop of a user's own: a Python module that registers the exchange of gradients.

Written for torch DDP 2.13.0: its communication hooks (16 bits, PowerSGD, post-local SGD) and the optimizer that
averages parameters; ``data/torch-ddp.toml`` lists their arguments. A policy of gradients that torch has no hook for is
``meshwright.sync.hook`` of the same words.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.export import launch, loops
from meshwright.export import limits as shared
from meshwright.export.comments import commented
from meshwright.export.gap import Gap
from meshwright.export.request import ExportRequest
from meshwright.export.target import load
from meshwright.sync.fragments import PARAMETERS
from meshwright.sync.hooked import unhooked
from meshwright.sync.policy import read
from meshwright.sync.record import ADDED, USUAL, SyncPolicy

NAME, FILE = "torch-ddp", "replicas.py"
HOOKS = "torch.distributed.algorithms.ddp_comm_hooks"
#: Codecs that torch has a stateless hook for: a cast of every value.
CASTS = {"bf16": "bf16_compress_hook", "fp16": "fp16_compress_hook"}
POWER = "powersgd"


def limits(r: ExportRequest) -> Iterator[Gap]:
    """Yield what the request needs and torch's DistributedDataParallel cannot express."""
    yield from loops.limits(r)
    yield from loops.whole(r, "every rank holds the whole model and its optimizer's state")
    yield from shared.order(r)
    yield from _exchange(r)


def _exchange(r: ExportRequest) -> Iterator[Gap]:
    """Gradients in every step, or plain averages of parameters."""
    policy = read(r.plan.sync.policy)
    why = unhooked(policy)
    if not why or _averages(policy):
        if not why and r.layout.shard and not r.layout.zero:
            yield Gap(
                facet="layout.shard",
                value=f"shard{r.layout.shard}",
                reason="gradients are exchanged among all ranks at once",
                help="leave the size of the group out",
                mend={"layout.shard": 0},
            )
        return
    if PARAMETERS in policy.fragments:
        help = "say sync=local:h=8 without codec=, combine= and moments=; or --to torchft, which has outer steps"
    else:
        help = "say sync= a code of gradients, such as powersgd or int8"
    yield Gap(
        facet="sync.policy",
        value=f"sync={policy.text}",
        reason=f"a hook sees the gradients of every step, and {why[0]}",
        help=help,
        mend={"sync.policy": USUAL},
    )


def _averages(policy: SyncPolicy) -> bool:
    """Whether a policy is local steps whose parameters are averaged as they are, and no more."""
    plain = not policy.coded and policy.combine in ADDED and policy.fragments == (PARAMETERS,)
    return (
        plain
        and not policy.stepped
        and policy.growth is None
        and policy.rule.decider is None
        and not policy.rule.optimizer
        and not policy.own_data
    )


def write(r: ExportRequest) -> tuple[dict[str, str], list[str]]:
    """(files, notes)."""
    policy = read(r.plan.sync.policy)
    local = _averages(policy)
    use = ["ddp = replicate(model)", *(["optimizer = local_steps(optimizer)"] if local else [])]
    lines = [*loops.head(r, NAME, use), *_imports(policy, r), "", ""]
    lines += [
        "def replicate(model, **options):",
        '    """The model in DistributedDataParallel, with the exchange of this plan."""',
        "    ddp = DistributedDataParallel(model, **options)",
        *_registered(policy, r),
        "    return ddp",
    ]
    if local:
        lines += _local(policy, r)
    text = commented("\n".join(lines) + "\n", load(NAME).comments)
    command = f'export PYTHONPATH="$PWD${{PYTHONPATH:+:$PYTHONPATH}}"\n{launch.torchrun(r)} "$SCRIPT"'
    start = launch.script(r, f"Starts {load(NAME).label}", FILE, command, {"SCRIPT": loops.SCRIPT})
    return {FILE: loops.checked(text), launch.FILE: start}, list(_notes(r, policy))


def _kind(policy: SyncPolicy) -> str:
    """The hook that a policy is: "" for DDP's own exchange."""
    if _averages(policy):
        return "post_localSGD_hook"
    if policy.combine == "sum":
        if not policy.coded:
            return ""
        name = policy.codec.partition(":")[0]
        if name in CASTS or name == POWER:
            return CASTS.get(name, "powerSGD_hook")
    return "sync.hook"


def _imports(policy: SyncPolicy, r: ExportRequest) -> list[str]:
    ddp, kind = "from torch.nn.parallel import DistributedDataParallel", _kind(policy)
    if kind == "sync.hook":
        return ["import meshwright as mw", ddp]
    if kind in CASTS.values():
        return [f"from {HOOKS}.default_hooks import {kind}", ddp]
    if kind == "powerSGD_hook":
        return [f"from {HOOKS}.powerSGD_hook import PowerSGDState, {kind}", ddp]
    if kind == "post_localSGD_hook":
        return [
            *(["import torch.distributed as dist"] if r.layout.shard > 1 else []),
            f"from {HOOKS}.post_localSGD_hook import PostLocalSGDState, {kind}",
            "from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager",
            "from torch.distributed.optim import PostLocalSGDOptimizer",
            ddp,
        ]
    return [ddp]


def _registered(policy: SyncPolicy, r: ExportRequest) -> list[str]:
    """The lines that register the hook."""
    kind = _kind(policy)
    if kind in CASTS.values():
        bits = kind.partition("_")[0]
        return [f"    ddp.register_comm_hook(None, {kind})  # gradients are summed in {bits} and kept as they were"]
    if kind == "sync.hook":
        return [f'    ddp.register_comm_hook(ddp, mw.sync.hook("{policy.text}"))  # torch has no hook of this meaning']
    if kind == "powerSGD_hook":
        said = {
            "process_group": None,
            "matrix_approximation_rank": policy["rank"],
            "start_powerSGD_iter": 2,
            "min_compression_rate": 1,
            "use_error_feedback": True,
            "warm_start": True,
        }
        return [*loops.call("state = PowerSGDState", said), _register(kind, "every matrix is sent as two thin factors")]
    if kind == "post_localSGD_hook":
        several = r.layout.shard > 1
        lines = [f"    inside, _ = dist.new_subgroups({r.layout.shard})  # ranks that step together"] if several else []
        said = {
            "process_group": None,
            "subgroup": "inside" if several else None,
            "start_localSGD_iter": 0,
            "post_local_gradient_allreduce": several,
        }
        return [
            *lines,
            *loops.call("state = PostLocalSGDState", said),
            _register(kind, "gradients stay in a replica"),
        ]
    return []


def _register(kind: str, why: str) -> str:
    return f"    ddp.register_comm_hook(state, {kind})  # {why}"


def _local(policy: SyncPolicy, r: ExportRequest) -> list[str]:
    """The function that makes an optimizer average parameters."""
    size, lines = r.layout.shard, []
    if size > 1:
        lines = [
            f"    same = [list(range(first, {r.world}, {size})) for first in range({size})]",
            "    between, _ = dist.new_subgroups_by_enumeration(same)  # a rank of every replica",
        ]
    said = {"period": policy.when, "warmup_steps": 0, "process_group": "between" if size > 1 else None}
    return [
        "",
        "",
        "def local_steps(optimizer):",
        '    """The optimizer, after every so manieth step of which parameters are averaged."""',
        *lines,
        *loops.call("averager = PeriodicModelAverager", said),
        "    averager.step = 1  # it averages at multiples from 0 on: not after the first step, but after the last",
        "    return PostLocalSGDOptimizer(optimizer, averager)",
    ]


def _notes(r: ExportRequest, policy: SyncPolicy) -> Iterator[str]:
    yield f"written for {load(NAME).label}: {r.name}"
    yield launch.note(r, f"{launch.torchrun(r)} <SCRIPT>")
    local = ", local_steps(optimizer)" if _averages(policy) else ""
    yield f"in the script: replicate(model){local} of {FILE}, after torch.distributed.init_process_group"
    yield from loops.notes(r)
    if r.num_microbatches > 1:
        yield "in the script: with ddp.no_sync() around all microbatches of a step but the last"
    kind = _kind(policy)
    if kind == "powerSGD_hook":
        yield "torch sends the gradients of the first two steps as they are: DDP lays its buckets anew after one"
    elif kind == CASTS["bf16"]:
        yield "DDP takes bf16_compress_hook on NCCL and XCCL alone; on gloo it is mw.sync.hook('bf16')"
    elif kind == "sync.hook":
        yield "the hook is Meshwright's: its package has to be installed where the script runs"
    elif kind == "post_localSGD_hook" and policy.when == 1:
        yield "h=1 averages parameters in every step: torch warns that plain DDP would do"
