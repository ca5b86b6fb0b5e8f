"""torchft in a loop of a user's own: a Python module with its Manager, LocalSGD and (Streaming) DiLoCo.

Written for torchft 0.2.0: every replica is a job of its own that finds the others through a lighthouse, and rounds of
local steps average parameters (Stich, 2018) or take an outer step along what they changed (Douillard et al.,
arXiv 2311.08105 and 2501.18512). ``data/torchft.toml`` lists the arguments.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from meshwright.export import limits as shared
from meshwright.export import loops
from meshwright.export.comments import commented
from meshwright.export.gap import Gap
from meshwright.export.request import ExportRequest
from meshwright.export.target import load
from meshwright.sync.fragments import GRADIENTS, PARAMETERS
from meshwright.sync.policy import read
from meshwright.sync.record import ALL, CODEC, NO_CODEC, USUAL, SyncPolicy
from meshwright.sync.rounds import part_of

NAME, FILE = "torchft", "replicas.py"
PORT = 29510
#: Architectures whose 8 bits torchft takes as floating point (compute capability 9.0 on), and those with integers.
FLOATS = ("Hopper", "Blackwell", "Blackwell Ultra")
INTEGERS = ("Ampere", "Ada Lovelace", "Volta", "Turing")


def limits(r: ExportRequest) -> Iterator[Gap]:
    """Yield what the request needs and torchft cannot express."""
    yield from loops.limits(r)
    yield from shared.order(r)
    yield from _replica(r)
    policy = read(r.plan.sync.policy)
    if policy.text == USUAL:
        return
    found = next(_no_round(policy), "")
    if found:
        yield Gap(
            facet="sync.policy",
            value=f"sync={policy.text}",
            reason=f"it averages parameters or takes an outer step once in a round, and {found}",
            help="say sync=local:h=8, diloco:h=100 or streaming-diloco:h=104,codec=none; or --to torch-ddp",
            mend={"sync.policy": USUAL},
        )
        return
    yield from _rounds(r, policy)


def _replica(r: ExportRequest) -> Iterator[Gap]:
    """A replica is one rank, or ranks that FSDP2 shards a model over."""
    layout = r.layout
    if layout.zero == 1 or (layout.zero and not layout.shard):
        what = "optimizer state alone" if layout.zero == 1 else "all ranks"
        yield Gap(
            facet="layout.zero",
            value=f"zero{layout.zero} over {layout.shard_group} ranks",
            reason=f"replicas hold all parameters, and FSDP2 shards each inside its own; this plan shards {what}",
            help="say zero0, or hsdp8 for replicas of 8 ranks",
            mend={"layout.zero": 0, "layout.shard": 0},
        )
    elif layout.zero and read(r.plan.sync.policy).text == USUAL:
        yield Gap(
            facet="sync.policy",
            value="gradients of sharded replicas in every step",
            reason="what is written sums gradients of replicas of one rank in every step",
            help="say zero0, or sync=diloco:h=100",
            mend={"layout.zero": 0, "layout.shard": 0},
        )
    elif layout.shard and not layout.zero:
        yield Gap(
            facet="layout.shard",
            value=f"shard{layout.shard} without zero",
            reason="the ranks of a replica shard its model",
            help=f"say hsdp{layout.shard}",
            mend={"layout.zero": 3},
        )


def _no_round(policy: SyncPolicy) -> Iterator[str]:
    """Yield why a policy is none of torchft's rounds."""
    if policy.rule.decider is not None:
        yield "its replicas are clients of a server"
    if policy.differing_models:
        yield "its replicas hold models of their own"
    if policy.fragments != (PARAMETERS,):
        yield f"this exchanges {' and '.join('gradients' if what == GRADIENTS else what for what in policy.fragments)}"
    if policy.group != ALL:
        yield f"its replicas meet in {policy.group}"
    if policy.combine != "mean":
        yield f"this takes the {policy.combine.partition(':')[0]}"
    if policy.outer.eager or policy.outer.clip:
        yield "this outer step is " + ("eager" if policy.outer.eager else "clipped")
    if policy.own_data:
        yield "its replicas have text of their own"
    if policy.undecided or policy.layers is not None:
        yield "this encodes some layers"
    if policy.early:
        yield "this sends layers within the backward"
    if policy.growth is not None:
        yield "these rounds grow as the learning rate falls"
    if policy.delay >= policy.when:
        yield "this result comes a round late"
    if policy.rule.optimizer:
        yield f"this sends updates of {policy.rule.optimizer}"


def _rounds(r: ExportRequest, policy: SyncPolicy) -> Iterator[Gap]:
    """Yield the options of rounds that torchft does not take."""
    eight = _eight_bits(r)
    if policy.coded and (policy.codec != eight or not _stepped(policy)):
        known = f", or with should_quantize in {eight}" if eight and _stepped(policy) else ""
        why = f"changes travel as they are{known}, and these in {policy.codec}"
        yield _option(policy, why, {CODEC: NO_CODEC}, "say codec=none" + (f" or codec={eight}" if known else ""))
    h, parts, delay = policy.when, policy.parts, policy.delay
    if h % parts or delay >= h // parts:
        least = max(-(-h // parts), delay + 1) * parts
        why = f"one of {parts} parts is due every h/{parts} steps, which has to be whole and above delay={delay}"
        yield _option(policy, why, {"h": least}, f"say h={least}")


def _option(policy: SyncPolicy, reason: str, changes: dict[str, object], help: str) -> Gap:
    """The gap of an option, with the policy that has it changed; none where the rule has no such option."""
    own = tuple(o for o in policy.options if o in policy.rule.options)
    changed = msgspec.structs.replace(policy, options=own, values=policy.values | changes).text
    mend = {"sync.policy": changed} if all(any(o.name == name for o in own) for name in changes) else {}
    return Gap(facet="sync.policy", value=f"sync={policy.text}", reason=reason, help=help, mend=mend)


def _stepped(policy: SyncPolicy) -> bool:
    """Whether rounds are DiLoCo's: with an outer step, parts or a delay."""
    return policy.stepped or policy.parts > 1


def _eight_bits(r: ExportRequest) -> str:
    """The codec that ``should_quantize`` is on these devices, "" where they differ or it is none."""
    kinds = {island.device.architecture for island in r.cluster.islands}
    return "fp8" if kinds <= set(FLOATS) else "int8" if kinds <= set(INTEGERS) else ""


def replica_ranks(r: ExportRequest) -> int:
    """Ranks of a replica."""
    return r.layout.shard or 1


def write(r: ExportRequest) -> tuple[dict[str, str], list[str]]:
    """(files, notes)."""
    policy = read(r.plan.sync.policy)
    every, rounds = policy.text == USUAL, "diloco" if _stepped(policy) else "local_sgd"
    lines = [*loops.head(r, NAME, _use(r, policy)), *_imports(r, policy, every), ""]
    lines += [*_sharded(r), *_manager(r, every)]
    lines += _every_step() if every else _diloco(r, policy) if rounds == "diloco" else _local(policy)
    text = commented("\n".join(lines) + "\n", load(NAME).comments)
    return {FILE: loops.checked(text)}, list(_notes(r, policy))


def _use(r: ExportRequest, policy: SyncPolicy) -> list[str]:
    lines = ["model = sharded(model, layers)"] if r.layout.zero else []
    lines.append("manager = managed(model, optimizer)")
    if policy.text == USUAL:
        return [*lines, "model, optimizer = every_step(manager, model, optimizer)"]
    what = "parts(first, layers, last)" if policy.parts > 1 else "[model]" if _stepped(policy) else "model"
    return [*lines, f"with rounds(manager, {what}, optimizer):", "    ...  # the loop as it was"]


def _imports(r: ExportRequest, policy: SyncPolicy, every: bool) -> list[str]:
    group = _group(r)
    torchft = ["DistributedDataParallel", "Manager", "Optimizer"] if every else ["Manager"]
    lines = ["import os", ""]
    if _stepped(policy) or r.layout.zero:
        lines.append("import torch")
    if policy.parts > 1:
        lines.append("from torch import nn")
    if r.layout.zero:
        lines.append("from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard")
    lines.append(f"from torchft import {', '.join([*torchft, group])}")
    if not every:
        lines.append(f"from torchft.local_sgd import {'DiLoCo' if _stepped(policy) else 'LocalSGD'}")
    return lines


def _group(r: ExportRequest) -> str:
    """The process group of a cluster's devices."""
    vendors = {island.device.vendor for island in r.cluster.islands}
    return {"Intel": "ProcessGroupXCCL"}.get(next(iter(vendors)) if len(vendors) == 1 else "", "ProcessGroupNCCL")


def _sharded(r: ExportRequest) -> list[str]:
    if not r.layout.zero:
        return []
    again = r.layout.zero == 3
    low = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}.get(r.compute, "torch.float32")
    return [
        "",
        "def sharded(model, layers):",
        '    """The model, sharded over the ranks of this replica, which are all of its own job."""',
        f"    types = MixedPrecisionPolicy(param_dtype={low}, reduce_dtype=torch.float32)  # gathered, summed",
        "    for layer in [*layers, model]:",
        f"        fully_shard(layer, mp_policy=types, reshard_after_forward={again})  # "
        + ("gathered again in the backward" if again else "kept whole until the backward"),
        "    return model",
        "",
    ]


def _manager(r: ExportRequest, every: bool) -> list[str]:
    said = {
        "pg": f"{_group(r)}()",
        "load_state_dict": "load",
        "state_dict": "save",
        "min_replica_size": r.world // replica_ranks(r),
        "use_async_quorum": every,
        "replica_id": '"replica_" + os.environ["REPLICA_GROUP_ID"]',
    }
    return [
        "",
        "def managed(model, optimizer):",
        '    """The Manager, through which this replica meets the others, and gets their state when it joins late."""',
        "",
        "    def save():",
        '        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}',
        "",
        "    def load(state):",
        '        model.load_state_dict(state["model"])',
        '        optimizer.load_state_dict(state["optimizer"])',
        "",
        *loops.call("return Manager", said),
        "",
        "",
    ]


def _every_step() -> list[str]:
    return [
        "def every_step(manager, model, optimizer):",
        '    """The model and the optimizer of replicas that sum gradients in every step."""',
        "    return DistributedDataParallel(manager, model), Optimizer(manager, optimizer)",
    ]


def _local(policy: SyncPolicy) -> list[str]:
    said = {"manager": "manager", "model": "model", "optimizer": "optimizer", "sync_every": policy.when}
    return [
        "def rounds(manager, model, optimizer):",
        '    """The context of the loop: parameters are averaged at the end of every round."""',
        *loops.call("return LocalSGD", said),
    ]


def _diloco(r: ExportRequest, policy: SyncPolicy) -> list[str]:
    step = policy.outer
    outer = {"lr": step.rate, "momentum": step.momentum, "nesterov": step.nesterov and step.momentum > 0}
    said = {
        "manager": "manager",
        "model_fragments": "fragments",
        "inner_optimizer": "optimizer",
        "outer_optimizer": "outer",
        "sync_every": policy.when,
        "should_quantize": policy.coded,
        "fragment_sync_delay": policy.delay,
        "fragment_update_alpha": step.mix,
    }
    own = {"params": "part.parameters()", **outer}
    making = loops.call("outer = [torch.optim.SGD", own, ") for part in fragments]")
    return [
        *_parts(r, policy),
        "def rounds(manager, fragments, optimizer):",
        '    """The context of the loop: what a round changed of a part is averaged, for an outer step along it."""',
        *making,
        *loops.call("return DiLoCo", said),
    ]


def _parts(r: ExportRequest, policy: SyncPolicy) -> list[str]:
    """The function that divides a model as the plan does: what is before the layers goes with the first of them, what
    is behind with the last."""
    if policy.parts == 1:
        return []
    count = r.model.num_layers
    layers = [[i for i in range(count) if part_of(policy, i, count) == part] for part in range(policy.parts)]
    return [
        f"LAYERS = {layers}",
        "",
        "",
        "def parts(first, layers, last):",
        '    """The fragments: layers by part, with the modules before the first and behind the last of them."""',
        "    made = [nn.ModuleList(layers[i] for i in part) for part in LAYERS]",
        f"    made[{part_of(policy, 0, count)}].extend(first)",
        f"    made[{part_of(policy, count - 1, count)}].extend(last)",
        "    return made",
        "",
        "",
    ]


def _notes(r: ExportRequest, policy: SyncPolicy) -> Iterator[str]:
    size = replica_ranks(r)
    replicas, per_node = r.world // size, r.processes_per_node
    yield f"written for {load(NAME).label}: {r.name}"
    yield f"start the lighthouse once, on port {PORT}: torchft_lighthouse --min_replicas {replicas}"
    nodes = -(-size // per_node)
    meet = " --rdzv-backend=c10d --rdzv-endpoint=<HOST:PORT>" if nodes > 1 else ""
    named = f"REPLICA_GROUP_ID=<0..{replicas - 1}> TORCHFT_LIGHTHOUSE=http://<HOST>:{PORT}"
    yield (
        f"start each of the {replicas} replicas, a job of its own: {named} torchrun --nnodes={nodes} "
        f"--nproc-per-node={min(size, per_node)}{meet} <SCRIPT>"
    )
    if size < per_node:
        yield f"in the job of a replica: CUDA_VISIBLE_DEVICES names its own devices, {size} of {per_node} on a node"
    yield f"in the script: import {FILE}, whose first lines say how it is used; each replica reads data of its own"
    yield from loops.notes(r, cast=not r.layout.zero)
    if policy.parts > 1 and r.model.tied_embeddings:
        yield "in the script: the table that embedding and head share is in first alone"
    if policy.delay:
        yield f"torchft sends a part {policy.delay} steps before it is due, where meshwright run sends it then"
    if policy.coded:
        yield "should_quantize has a scale a row and quantizes the mean too; the plan's code has a scale for 256 values"
    yield f"{replicas} replicas are waited for; a smaller min_replica_size goes on with fewer"
