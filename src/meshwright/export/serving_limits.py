"""Limits that exporters of serving engines share: words that no exporter knows, batching policies, replicas."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

import msgspec

from meshwright.export.deployment import Deployment
from meshwright.export.gap import Gap
from meshwright.export.target import load
from meshwright.plan import Plan
from meshwright.spec.serve import EngineWords

#: The draft that guesses from the prompt.
NGRAM = "ngram"
#: The draft that is a head of the model itself.
HEAD = "mtp"
#: Words of an engine that exporters write, or that say something about the prediction alone (``profile``).
WRITTEN = (
    *("policy", "profile", "max_batch", "budget", "block", "kv_blocks", "kv", "memory", "routing", "graphs"),
    *("order", "prefix_cache", "preempt", "host_bytes"),
    *("lora", "adapter_slots"),
    *("draft", "speculation", "guesses", "accept", "targets"),
)
#: Fields of a plan that exporters write; ``sp`` and ``order`` change nothing in serving.
LAID_OUT = {
    "layout": frozenset(("tp", "pp", "dp", "sp", "order", "adp")),
    "experts": frozenset(("ep", "etp", "dispatch")),
    "precision": frozenset(("compute", "weights", "experts")),
    # of training
    "memory": frozenset(("recompute", "layers", "portions", "loss", "loss_portions", "similarities", "gathered")),
}
#: Fields of a plan that are of training alone, which a serving question refuses or does not read.
OF_TRAINING = frozenset(("sync", "overlap", "data", "pipeline", "sequence"))


def unknown(d: Deployment, *more: str, sums: str = "usual") -> Iterator[Gap]:
    """Yield what an exporter does not write: words that are not their usual value, and not among those that all of them
    write nor `more`. `sums`: the way besides its own in which the engine can be told to sum."""
    usual = EngineWords()
    for field in EngineWords.__struct_fields__:
        value = getattr(d.engine, field)
        if field not in WRITTEN and field not in more and value != getattr(usual, field):
            yield Gap(
                facet=f"--serve {field}={value}",
                value=f"{field}={value}",
                reason="no setting of the engine is known that does this",
                help=f"drop {field}=",
                mend={f"engine.{field}": getattr(usual, field)},
            )
    plain = Plan()
    for facet in Plan.__struct_fields__:
        if facet in OF_TRAINING or facet in ("several", "links"):
            continue
        mine, theirs = getattr(d.plan, facet), getattr(plain, facet)
        for field in mine.__struct_fields__:
            value = getattr(mine, field)
            told = field == "sums" and value == sums
            if value != getattr(theirs, field) and field not in LAID_OUT.get(facet, ()) and not told:
                yield Gap(
                    facet=f"{facet}.{field}",
                    value=f"{facet}.{field} = {value}",
                    reason="no setting of the engine is known that does this",
                    help="drop it",
                    mend={f"{facet}.{field}": getattr(theirs, field)},
                )


def room(d: Deployment) -> Iterator[Gap]:
    """Yield the gap of weights that leave no cache, and that of models that generate nothing: no engine starts so."""
    if not d.model.flows[d.model.head.stream].causal:
        yield Gap(
            facet=f"model {d.model.name}",
            value=d.model.name,
            reason="every token of it sees all others, and the files are of servers that generate",
        )
    if d.model.ways > 1:
        yield Gap(
            facet=f"model {d.model.name}",
            value=d.model.name,
            reason="its blocks have several streams of residuals, and those of an engine's models have one",
            help="name the model without kraken",
        )
    if not d.blocks:
        yield Gap(
            facet=f"--plan {d.plan.text()}",
            value="a replica without room for the cache of a request",
            reason="weights and workspace fill its devices",
            help="more devices to a replica (tp, pp), a smaller or quantised model, or kv=fp8",
        )


def policies(d: Deployment, known: Mapping[str, str], instead: str) -> Iterator[Gap]:
    """Yield the gap of a batching policy that is none of `known`, with the one to say `instead`."""
    if d.engine.policy not in known:
        choices = ", ".join(known)
        yield Gap(
            facet=f"--serve policy={d.engine.policy}",
            value=f"policy={d.engine.policy}",
            reason=f"its scheduler batches as {choices}",
            help=f"say policy={instead}",
            mend={"engine.policy": instead, "engine.budget": 0},
        )


def one_of(d: Deployment, word: str, known: Mapping[str, str], reason: str, instead: str) -> Iterator[Gap]:
    """Yield the gap of an engine's word whose value is none of `known`."""
    value = getattr(d.engine, word)
    if value not in known:
        yield Gap(
            facet=f"--serve {word}={value}",
            value=f"{word}={value}",
            reason=reason,
            help=f"say {word}={instead}",
            mend={f"engine.{word}": instead},
        )


def cache(d: Deployment) -> Iterator[Gap]:
    """Yield the gaps of caches: no engine here swaps requests, and the host's memory holds shared blocks alone."""
    if d.engine.preempt != "recompute":
        yield Gap(
            facet=f"--serve preempt={d.engine.preempt}",
            value=f"preempt={d.engine.preempt}",
            reason="it computes a request again whose cache was taken",
            help="say preempt=recompute",
            mend={"engine.preempt": "recompute", **({} if d.engine.prefix_cache else {"engine.host_bytes": 0.0})},
        )
    elif d.engine.host_bytes and not d.engine.prefix_cache:
        yield Gap(
            facet="--serve host=",
            value="host= without a prefix cache",
            reason="the host's memory holds blocks that requests share",
            help="say prefix_cache=yes, or drop host=",
            mend={"engine.host_bytes": 0.0},
        )


def orders(d: Deployment, known: tuple[str, ...]) -> Iterator[Gap]:
    """Yield the gap of an order of who is served first that is none of `known`."""
    yield from one_of(d, "order", dict.fromkeys(known, ""), f"it serves by {' or '.join(known)}", "fcfs")


def adapters(d: Deployment, ranks: tuple[int, ...] = ()) -> Iterator[Gap]:
    """Yield the gaps of low-rank adapters: they lie in slots of their own, of one of these `ranks` if there are any."""
    if d.adapters and d.engine.lora == "models":
        reason = "a server holds one model: models that take turns on one are several servers"
        yield Gap(facet="--serve lora=models", value="lora=models", reason=reason, help="deploy each model by itself")
    elif d.adapters and d.engine.lora != "slots":
        yield Gap(
            facet=f"--serve lora={d.engine.lora}",
            value=f"lora={d.engine.lora}",
            reason="adapters lie in slots of their own beside the cache",
            help="say lora=slots",
            mend={"engine.lora": "slots"},
        )
    rank = d.serve.adapter_rank
    if d.adapters and ranks and rank not in ranks:
        yield Gap(
            facet=f"--serve adapter_rank={rank}",
            value=f"adapter_rank={rank}",
            reason=f"its adapters have ranks {', '.join(map(str, ranks))}",
            help="say one of them: adapters of other ranks are padded",
        )


def no_adapters(d: Deployment) -> Iterator[Gap]:
    """Yield the gap of low-rank adapters for a target whose options for them are not written."""
    if d.adapters:
        yield Gap(
            facet="--serve adapters=",
            value=f"{d.adapters} adapters",
            reason="what it is told of adapters is not written",
            help="drop adapters=, or export to vllm or sglang",
        )


def adapted(d: Deployment) -> Iterator[str]:
    """Yield what is to be said of low-rank adapters."""
    if d.adapters:
        yield f"name the {d.adapters} adapters when the server starts (--lora-modules, --lora-paths) or later"


def guesses(d: Deployment) -> Iterator[Gap]:
    """Yield the gap of a policy of speculation other than to guess and then verify."""
    if d.engine.draft and d.engine.speculation != "speculative":
        yield Gap(
            facet=f"--serve speculation={d.engine.speculation}",
            value=f"speculation={d.engine.speculation}",
            reason="it guesses, and then verifies all guesses at once",
            help="say speculation=speculative",
            mend={"engine.speculation": "speculative", "engine.targets": 1},
        )


def guessed(d: Deployment) -> Iterator[str]:
    """Yield what is to be said of speculative decoding."""
    if d.engine.draft:
        if d.engine.draft not in (NGRAM, HEAD):
            yield f"fill in <DRAFT>: the draft model, planned as {d.engine.draft}"
        yield f"accept={d.engine.accept:g} is an assumption about the draft, there is nothing to set"


def precisions(d: Deployment, known: Mapping[str, str], reason: str) -> Iterator[Gap]:
    """Yield the gap of a precision of the products that is none of `known`."""
    if d.compute not in known:
        yield Gap(
            facet="precision.compute",
            value=d.compute,
            reason=reason,
            help=f"say one of {', '.join(known)}",
            mend={"precision.compute": "bf16"},
        )


def blocks(d: Deployment, fits: bool, reason: str, instead: int) -> Iterator[Gap]:
    """Yield the gap of a number of tokens of a cache block that the engine's kernels do not take."""
    if not fits:
        yield Gap(
            facet=f"--serve block={d.engine.block}",
            value=f"block={d.engine.block}",
            reason=reason,
            help=f"say block={instead}",
            mend={"engine.block": instead, "engine.kv_blocks": 0},
        )


def nodes(d: Deployment, several: bool, reason: str = "") -> Iterator[Gap]:
    """Yield the gaps of replicas that do not fill nodes, and of those of `several` nodes where that has no form."""
    size = d.devices_per_node
    smaller, larger = sorted((size, d.devices))
    if larger % smaller:
        yield Gap(
            facet="layout.tp",
            value=f"replicas of {d.devices} devices",
            reason=f"they do not fill nodes of {size}, and a server's devices are those of whole nodes or lie in one",
            help=f"let tp x pp divide {size}, or be a multiple of it",
        )
    elif d.nodes_per_replica > 1 and not several:
        yield Gap(
            facet="layout.tp",
            value=f"a replica of {d.nodes_per_replica} nodes",
            reason=reason,
            help=f"let tp x pp be at most {size}",
        )


def experts(d: Deployment) -> Iterator[Gap]:
    """Yield the gap of expert parallelism over anything else than all ranks of a tensor-parallel group."""
    if d.plan.experts.ep not in (1, d.layout.tp):
        yield Gap(
            facet="experts.ep",
            value=f"ep{d.plan.experts.ep}",
            reason="a replica's experts lie whole on its tensor-parallel ranks, or are split over all of them",
            help=f"say ep1 or ep{d.layout.tp}",
            mend={"experts.ep": 1, "experts.etp": 0},
        )


def groups(d: Deployment, alone: bool) -> Iterator[Gap]:
    """Yield the gaps of attention groups: of models without experts, and where each has one rank `alone`."""
    adp = d.layout.adp
    if adp > 1 and not d.model.mixtures:
        yield Gap(
            facet="layout.adp",
            value=f"adp{adp}",
            reason="its attention groups share experts, and a model without any is copied whole",
            help=f"say dp{d.replicas * adp} tp{d.layout.attention_tp}: replicas",
            mend={"layout.adp": 1},
        )
    elif alone and adp not in (1, d.layout.tp):
        yield Gap(
            facet="layout.adp",
            value=f"adp{adp}",
            reason="an attention group is one rank, or all are one",
            help=f"say adp{d.layout.tp}, or drop adp",
            mend={"layout.adp": d.layout.tp},
        )


def stored(d: Deployment, known: tuple[str, ...]) -> Iterator[Gap]:
    """Yield the gaps of weights that are stored in a format which is none of `known`."""
    for name in ("weights", "experts"):
        value = getattr(d.plan.precision, name)
        if value and value not in known:
            yield Gap(
                facet=f"precision.{name}",
                value=f"{'expert_' if name == 'experts' else ''}weights={value}",
                reason=f"it multiplies stored weights of {', '.join(known)} in 16 bits",
                help=f"say weights={known[0]}",
                mend={f"precision.{name}": known[0]},
            )


def checkpoints(d: Deployment) -> Iterator[str]:
    """Yield what the checkpoint has to be, where the precision of weights is read there."""
    precision = d.plan.precision
    for what, value in (("weights", precision.weights), ("experts' weights", precision.experts)):
        if value:
            yield f"MODEL is a checkpoint whose {what} are stored as {value}: the engine reads that there"


def mended(d: Deployment, limits) -> str:
    """Return the nearest question in words, every gap closed that a word can close; "" where some cannot be."""
    for _ in range(3):
        changes = {field: value for gap in limits(d) for field, value in gap.mend.items()}
        if not changes:
            break
        engine = {field[7:]: value for field, value in changes.items() if field.startswith("engine.")}
        plan = d.plan
        for field, value in changes.items():
            facet, _, name = field.partition(".")
            if facet != "engine":
                plan = msgspec.structs.replace(
                    plan, **{facet: msgspec.structs.replace(getattr(plan, facet), **{name: value})}
                )
        serve = msgspec.structs.replace(d.serve, engine=msgspec.structs.replace(d.engine, **engine))
        d = msgspec.structs.replace(d, serve=serve, plan=plan)
    if any(limits(d)):
        return ""
    return f'the nearest question that can be said: --serve "{d.serve.text()}" --plan "{d.plan.text()}"'


def flagged(name: str, settings: Mapping[str, object]) -> list[str]:
    """Return settings as flags of a command, in their order; a list of several values has one flag.

    Raises:
        AssertionError: a flag that the target of that name does not have, which the exporters' tests look for.
    """
    keys, flags = {key for keys in load(name).keys.values() for key in keys}, []
    for key, value in settings.items():
        if key not in keys:
            raise AssertionError(f"{name} has no flag {key}")
        if isinstance(value, bool):
            flags += [f"--{key}"] if value else [f"--no-{key}"]
        else:
            flags.append(f"--{key}={json.dumps(value) if isinstance(value, dict) else value}")
    return flags
