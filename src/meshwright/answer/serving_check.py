"""Checks of a serving question: words of a plan that serving has no use for, models of other kinds, requests that are
too long."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np

from meshwright import serving
from meshwright.answer.drafting import HEAD, NGRAM
from meshwright.cost.engine import EngineProfile, engine_profile
from meshwright.cost.roofline import supports
from meshwright.errors import Diagnostic, MeshwrightError
from meshwright.lower.served_experts import Spread
from meshwright.plan import Experts, Layout, Memory, Pipeline, Plan, check
from meshwright.plan.facets import fields
from meshwright.plan.facets.offload import Offload
from meshwright.plan.serving_roles import serving_pools
from meshwright.quantity import gibibytes
from meshwright.serving.decided import budget_shares
from meshwright.serving.kv_budget import KvShares
from meshwright.spec import model as models
from meshwright.spec.cluster import Cluster
from meshwright.spec.cluster_part import cut
from meshwright.spec.ends import Contrastive, Embedding
from meshwright.spec.mixers import SharedTransformer
from meshwright.spec.model import Model
from meshwright.spec.requests import Requests, common_prefix, numbered
from meshwright.spec.routing import Routing
from meshwright.spec.serve import EngineWords, Serve
from meshwright.spec.serve_values import AUTO_BUDGET
from meshwright.spec.workload import BIT_PRODUCTS, DTYPE_BYTES, WEIGHT_BYTES, Train

#: Batching policies that never cut a prompt.
WHOLE_PROMPTS = ("static", "orca", "vllm-v0", "trtllm")


def refused(plan: Plan, model: Model, cluster: Cluster, serve: Serve) -> list[Diagnostic]:
    """Return everything that is wrong with a plan, a model, a cluster and an engine's words."""
    found: list[Diagnostic] = []
    words = serve.engine
    for axis, name in (("batching", words.policy), ("order", words.order), ("routing", words.routing)):
        found += _tried(lambda axis=axis, name=name: serving.get(axis, name))
    found += _of_drafts(words, [pool.plan for pool in plan.pools]) if words.draft else []
    found += _of_adapters(serve, model)
    found += _of_models(serve, model, plan, cluster)
    found += _of_auto_budget(serve)
    if plan.several and (serve.certain or any(client.certain for client in serve.clients)):
        help = "drop certain=, or serve prompts and answers by the same replicas"
        found.append(_bad("queries that end early are not served by several pools", "--serve certain=", help))
    if words.kv_budget:
        found += _of_budget(words, cluster)
    unknown = _tried(lambda: engine_profile(serve.engine.profile))
    found += unknown or _unpublished(engine_profile(serve.engine.profile), plan, model, cluster)
    unlike = list(_unserved(model))
    if unlike:
        what = "a decoder is served, or an encoder of one stream of tokens in one pass"
        found.append(_bad(f"{model.name} {' and '.join(unlike)}", f"model {model.name}", what))
    if words.kv_budget and not model.attentions:
        message = f"kv_budget={words.kv_budget} keeps a part of keys and values, and {model.name} has none"
        found.append(_bad(message, "--serve kv_budget", "drop kv_budget="))
    if plan.several:
        return [*found, *_of_pools(plan, model, cluster, serve)]
    if plan.serving.padded and not (serve.batch or words.policy == "static"):
        message = f"padding=yes: policy={words.policy} computes the tokens of all requests one behind the other, packed"
        found.append(_bad(message, "plan.serving.padded", "drop padding=, or say policy=static"))
    if len(cluster.islands) > 1 and words.peers is None:
        help = "say one of its islands, or a pool for each: a=[on=0:8] + b=[on=8:16] a->b:kv"
        found.append(_bad(f"{cluster.name} has islands of unlike devices", f"--on {cluster.name}", help))
    return found + _of_replicas(plan, model, cluster, sound=not found, routing=serve.expert_routing)


def _of_pools(plan: Plan, model: Model, cluster: Cluster, serve: Serve) -> list[Diagnostic]:
    """Return what is wrong with pools that serve, together and each by itself."""
    plan = plan.on(cluster.num_devices)
    found = list(serving_pools(plan, cluster))
    if serve.engine.kv_budget:
        help = "drop one of them: what a budget keeps of a prompt is not sent between pools yet"
        found.append(_bad("a KV budget and several pools", f"--serve kv_budget={serve.engine.kv_budget}", help))
    for pool in plan.pools:
        said = [one.name for one in fields().values() if one.facet == "serving" and one.value(pool.plan) != one.usual]
        if said:
            message = f"{pool.name} says {', '.join(said)}, which one pool alone can have yet"
            found.append(_bad(message, f"plan.{pool.name}", f"drop {said[0]}="))
        own = cut(cluster, *pool.devices) if pool.devices else None
        if own is None or len(own.islands) > 1:
            continue
        for one in _of_replicas(pool.plan, model, own, sound=True, routing=serve.expert_routing):
            place = one.place.replace("plan.", f"plan.{pool.name}.", 1) if one.place.startswith("plan.") else one.place
            found.append(msgspec.structs.replace(one, place=place))
    return list(dict.fromkeys(found))


def _of_replicas(
    plan: Plan, model: Model, cluster: Cluster, *, sound: bool, routing: Routing | None = None
) -> list[Diagnostic]:
    """Return what is wrong with the plan of replicas that are alike; where the question is not `sound` otherwise, its
    words alone. `routing` is how requests' tokens choose experts."""
    found: list[Diagnostic] = []
    words = _training_words(plan)
    if words:
        help = "tp, adp, pp, ep and dp (replicas) lay out serving, and a precision its weights"
        found.append(_bad(f"the plan says {', '.join(words)}", f"--plan {plan.text()}", help))
    if found or not sound:
        return found
    layout, spread = plan.layout, Spread.of(plan)
    each = 2 * layout.tp * layout.cp  # a length that every rank can have a part of: real ones are rounded up
    train = Train(global_batch=max(1, layout.dp), seq_len=each, causal=True, routing=routing)
    etp = spread.etp if model.mixtures else plan.experts.etp
    whole = msgspec.structs.replace(plan, experts=msgspec.structs.replace(plan.experts, etp=etp))
    wrong = check(whole, model, cluster, train, serving=True)
    if layout.num_ranks <= cluster.num_devices:  # replicas need not fill a cluster
        wrong = [d for d in wrong if d.code != "P010"]
    wrong = [d for d in wrong if d.code != "W006"]  # the requests' own lengths are checked
    return [*_multiplied(plan, cluster), *_experts(plan, model, routing), *_contexts(plan, model), *wrong]


def _unserved(model: Model) -> Iterator[str]:
    """Yield why a model cannot answer requests for tokens, in words that follow its name."""
    flow = model.flows[0]
    if len(model.flows) > 1:
        yield f"reads {len(model.flows)} streams of tokens ({', '.join(one.name for one in model.flows)})"
    elif flow.tokens or not isinstance(model.embedding, Embedding):
        yield f"reads {flow.name} and no tokens of a request's own length"
    if any(spec.shortcut for spec in model.mixtures):
        yield "has experts that read what entered their block"
    if isinstance(model.head, Contrastive):
        yield "ends in a loss over pairs"
    for block in model.blocks:
        if len(model.flows) == 1 and not all(isinstance(part, SharedTransformer) for part in block.before):
            yield "has layers between its stacks"
            return


def _contexts(plan: Plan, model: Model) -> Iterator[Diagnostic]:
    """Yield what is wrong with how a request's context lies on ranks."""
    cp = plan.layout.cp
    if cp > 1 and plan.head_swap > 1:
        message = "a cache split by heads is tensor parallelism: context-parallel ranks share a request by its tokens"
        help = "say ring or allgather, or a larger tp"
        yield Diagnostic(code="P015", message=message, place=f"plan.sequence = cp{cp}", help=help)
    if cp > 1 and plan.memory.attention == "unfused":
        message = "context-parallel ranks merge partial softmaxes, which the unfused kernels do not give"
        yield Diagnostic(code="P016", message=message, place="plan.memory.attention = unfused", help="say flash")
    if cp > 1 and any(block.mixer is not None for block in model.blocks):
        message = f"the scans of {model.name} go from token to token, and cp={cp} ranks would wait for one another"
        yield Diagnostic(code="P027", message=message, place=f"plan.layout.cp = {cp}", help="say cp1")


def _of_auto_budget(serve: Serve) -> list[Diagnostic]:
    """W003 for a token budget that follows from no objective, W005 for one under a policy without a budget."""
    if serve.engine.budget != AUTO_BUDGET:
        return []
    found, place = [], "--serve budget=auto"
    if serve.tpot is None:
        help = "say how long a token may take, such as tpot=50ms"
        found.append(Diagnostic(code="W003", message="budget=auto follows from tpot=", place=place, help=help))
    policy = serving.policies("batching").get(serve.engine.policy)
    if policy is not None and not policy.budget:
        message = f"policy={policy.name} has no token budget"
        found.append(Diagnostic(code="W005", message=message, place=place, help="policy=sarathi or policy=vllm-v1"))
    return found


def _multiplied(plan: Plan, cluster: Cluster) -> Iterator[Diagnostic]:
    """Yield P022 for products below 16 bits that the device has no matrix units for."""
    dtype, device = plan.precision.compute, cluster.islands[0].device
    if not dtype or DTYPE_BYTES[dtype] >= 2 or supports(device, dtype):
        return
    stored = dtype if dtype in WEIGHT_BYTES else "int4" if dtype in BIT_PRODUCTS else "fp8"
    message = f"{device.name} does not multiply {dtype}"
    help = f"store the weights so and multiply them in 16 bits: bf16 weights={stored}"
    yield Diagnostic(code="P022", message=message, place=f"plan.precision.dtype = {dtype}", help=help)


def _experts(plan: Plan, model: Model, routing: Routing | None) -> Iterator[Diagnostic]:
    """Yield what is wrong with how the experts lie on a replica's ranks, and with exchanges of tokens for them."""
    tp, spread, layout = plan.layout.tp, Spread.of(plan), plan.layout
    if model.mixtures and spread.ep * spread.etp != tp:
        message = f"ep{spread.ep} * etp{spread.etp} = {spread.ep * spread.etp} ranks hold the experts, and tp is {tp}"
        help = f"the tp ranks of a replica split its experts: ep that divides {tp}, and etp={tp}/ep or none"
        yield Diagnostic(code="P018", message=message, place=f"plan.experts.ep = {spread.ep}", help=help)
    if plan.experts.dispatch and layout.adp == 1:
        message = f"dispatch={plan.experts.dispatch} between attention groups, and there is one"
        help = "drop dispatch=, or say adp: every rank has all tokens already"
        yield Diagnostic(
            code="P017", message=message, place=f"plan.experts.dispatch = {plan.experts.dispatch}", help=help
        )
    if spread.stays and routing is None:
        message, help = "dispatch=stays goes by which expert follows which", "add expert_routing= to the workload"
        yield Diagnostic(code="P071", message=message, place="plan.experts.dispatch = stays", help=help)
    if plan.experts.dispatch in ("sent", "stays") and spread.etp > 1:
        message = f"tokens are sent to experts that lie on one rank, and etp={spread.etp} ranks split each"
        help = f"say ep{tp}, or dispatch=gathered"
        yield Diagnostic(code="P017", message=message, place="plan.experts.dispatch = sent", help=help)
    if layout.adp > 1 and any(block.parallel for block in model.blocks):
        message = f"adp={layout.adp}: attention and MLP of {model.name} read one norm and are summed together"
        yield Diagnostic(
            code="P011", message=message, place=f"plan.layout.adp = {layout.adp}", help="drop adp; dp makes replicas"
        )


def _of_drafts(words: EngineWords, plans: list[Plan]) -> list[Diagnostic]:
    """Return faults of guesses: an unknown policy or draft model, many requests where one is taken at a time, a policy
    of pipelines without one."""
    name = words.speculation
    found = _tried(lambda: serving.get("speculation", name))
    if words.draft not in (HEAD, NGRAM):
        found += _tried(lambda: models.load(words.draft))
    place = f"--serve speculation={name}"
    if not found and serving.get("speculation", name).alone and words.max_batch > 1:
        found.append(_bad(f"{name} is for one request at a time", place, "say max_batch=1, or another policy"))
    if name == "pipeinfer" and all(plan.layout.pp == 1 for plan in plans):
        found.append(_bad("pipeinfer fills the stages of a pipeline, and there is one stage", place, "say pp4"))
    return found


def _of_models(serve: Serve, model: Model, plan: Plan, cluster: Cluster) -> list[Diagnostic]:
    """Return faults of models that take turns: words of other adapters, and a host without room for all of them."""
    words = serve.engine
    if words.lora != "models":
        return []
    found = []
    if plan.several or words.draft:
        what = "pools" if plan.several else "a draft model"
        found.append(_bad(f"lora=models with {what}", "--serve lora=models", f"drop {what}"))
    if serve.adapter_rank != Serve().adapter_rank or words.adapter_pool:
        found.append(_bad("models have no rank", "--serve lora=models", "drop adapter_rank= and adapter_pool="))
    if serve.adapters is None or plan.several:
        return found
    layout, node = plan.on(cluster.num_devices).layout, cluster.islands[0].node
    nodes = max(1, layout.num_ranks // max(1, layout.dp) // node.devices)
    each = model.num_params * (WEIGHT_BYTES[plan.precision.weights] if plan.precision.weights else 2.0)
    if serve.adapters.count * each > nodes * node.host_memory_bytes:
        message = (
            f"{serve.adapters.count} models of {gibibytes(each)} do not fit into {gibibytes(node.host_memory_bytes)}"
        )
        help = f"at most {int(nodes * node.host_memory_bytes / each)}; or a host with more: --on ...,host=12tb"
        found.append(_bad(f"{message} of the host's memory", f"--serve adapters={serve.adapters.text()}", help))
    return found


def _of_adapters(serve: Serve, model: Model) -> list[Diagnostic]:
    """Return faults of adapters: layers whose projections are others, and a policy that takes whole batches."""
    found = []
    if serve.adapters and (not model.attentions or any(spec.kv_lora_rank for spec in model.attentions)):
        what = "adapters are of query, key, value and output projections"
        found.append(_bad(f"adapters of {model.name}, whose layers have others", f"model {model.name}", what))
    if serve.adapters and serve.engine.policy == "static":
        help = "say policy=orca, or another that admits requests one by one"
        found.append(_bad("adapters in static batches", "--serve policy=static", help))
    return found


def _of_budget(words: EngineWords, cluster: Cluster) -> list[Diagnostic]:
    """Return faults of a KV budget: an unknown one, drives where there are none, a cache that shares prefixes."""
    name = words.kv_budget.partition(":")[0]
    found = _tried(lambda: budget_shares(words.kv_budget, 128))
    kept = KvShares() if found else serving.get("kv_budget", name).shares(0.5, 128)
    if (kept.in_drive or kept.on_drives) and not cluster.islands[0].node.nvme_gb_s:
        help = "a device whose nodes have drives, or another budget"
        found.append(_bad(f"the nodes of {cluster.name} have no drives", f"--serve kv_budget={name}", help))
    if words.prefix_cache:
        help = "drop one of them: what a budget keeps of a prefix depends on what follows it"
        found.append(_bad("a KV budget and shared prefixes", f"--serve kv_budget={name},prefix_cache=yes", help))
    return found


def _unpublished(profile: EngineProfile, plan: Plan, model: Model, cluster: Cluster) -> list[Diagnostic]:
    """Return W014 for replicas whose iterations an engine of published times does not know."""
    if not profile.iterations:
        return []
    found = []
    for pool in plan.on(cluster.num_devices).pools:
        own = cut(cluster, *pool.devices) if pool.devices else cluster
        device, layout = (own or cluster).islands[0].device.name, pool.plan.layout
        tp = f"tp{layout.tp}" + "".join(f" {n}{v}" for n in ("adp", "cp") if (v := getattr(layout, n)) > 1)
        if profile.published(model.name, device, layout.tp) is None or " " in tp:
            known = [f"{one.model} on {one.device} tp{one.tp}" for one in profile.iterations]
            message = f"no iterations of {model.name} on {device} {tp} are published for engine={profile.name}"
            help = f"known: {', '.join(known)}"
            found.append(_bad(message, f"--serve engine={profile.name}", help))
    return found


def _tried(get) -> list[Diagnostic]:
    try:
        get()
    except MeshwrightError as error:
        return list(error.diagnostics)
    return []


def _training_words(plan: Plan) -> list[str]:
    """The words of a plan that are of training alone."""
    usual, layout = Layout(), plan.layout
    said = [name for name in ("zero", "shard", "shares") if getattr(layout, name) != getattr(usual, name)]
    of_steps = ("vpp", "microbatch", "fill")
    said += [name for name in of_steps if getattr(plan.pipeline, name) != getattr(Pipeline(), name)]
    trained = ("capacity", "hot", "hot_by", "portions", "duplicates")
    said += [name for name in trained if getattr(plan.experts, name) != getattr(Experts(), name)]
    said += [] if plan.feedback.exact else ["feedback"]
    said += ["offload"] if plan.offload != Offload() else []
    said += ["recompute"] if plan.memory.recompute != Memory().recompute else []
    return said


def unshared(plan: Plan, requests: Requests) -> list[Diagnostic]:
    """Return W014 where a plan reads a common prefix once and the requests have none."""
    if plan.several or plan.serving.prefix == "each" or common_prefix(requests):
        return []
    help = "say prefix= of a workload, or a trace with block hashes; or drop shared_prefix="
    return [_bad("shared_prefix=once, and the requests begin with nothing in common", "plan.serving.prefix", help)]


def oversized(model: Model, requests: Requests, words: EngineWords) -> list[Diagnostic]:
    """Return W012 for requests that are longer than the model's context, by their lines, and W014 for what an encoder
    does not do."""
    return [*_too_long(model, requests), *_of_encoders(model, requests, words)]


def _of_encoders(model: Model, requests: Requests, words: EngineWords) -> Iterator[Diagnostic]:
    """Yield W014 for answers of more than one pass, and for policies that cut a prompt whose tokens see all others."""
    if model.flows[model.head.stream].causal:
        return
    longest = int(requests.output.max())
    if longest > 1:
        help = "say output=1: its answer is there after one pass over the prompt"
        yield _bad(f"{model.name} generates no tokens, and {longest} are asked for", "--serve output", help)
    if words.policy not in WHOLE_PROMPTS:
        message = f"policy={words.policy} may cut a prompt, and every token of {model.name} sees all others of it"
        help = f"say policy={', '.join(WHOLE_PROMPTS[:-1])} or {WHOLE_PROMPTS[-1]}"
        yield _bad(message, f"--serve policy={words.policy}", help)


def _too_long(model: Model, requests: Requests) -> list[Diagnostic]:
    longest = model.max_seq_len
    over = np.flatnonzero(requests.prompt + requests.output > longest) if longest else np.empty(0, np.int64)
    if not len(over):
        return []
    where = numbered(requests.line[over]) if len(requests.line) else f"{len(over):,} of {len(requests):,} requests"
    message = f"prompt and answer are longer than the {longest:,} tokens of {model.name}'s context: {where}"
    help = f"leave them out with longest={longest}, or take a model with a longer context"
    return [Diagnostic(code="W012", message=message, place=f"--serve {requests.source}".strip(), help=help)]


def _bad(message: str, place: str, help: str) -> Diagnostic:
    return Diagnostic(code="W014", message=message, place=place, help=help)
