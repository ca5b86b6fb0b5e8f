"""Build an engine from what a user says: a folder of published weights, a plan, and an engine's words.

The decider is the one that ``predict --serve`` simulates for the same words (:mod:`meshwright.serving.decided`).
"""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from meshwright import serving
from meshwright.answer.drafting import NGRAM, USUAL
from meshwright.endpoint.seam import EngineFacts
from meshwright.errors import MeshwrightError
from meshwright.lower.served_experts import Spread
from meshwright.plan import Plan
from meshwright.run import mesh
from meshwright.run.serve.apart import DividedEngine, PipeLine, SecondHalf
from meshwright.run.serve.computers import Drafter
from meshwright.run.serve.drafts import ModelDrafter, NgramDrafter
from meshwright.run.serve.engine import TorchEngine
from meshwright.run.serve.executor import LocalExecutor
from meshwright.run.serve.forward import ServedLayers
from meshwright.run.serve.grammar import Grammars
from meshwright.run.serve.halves import DecodeEngine, PrefillEngine
from meshwright.run.serve.kv_sent import joined
from meshwright.run.serve.peers import PeerExecutor, peers_of
from meshwright.run.serve.ranks import PATIENCE_S, RankedExecutor, RankProcesses, follow
from meshwright.run.serve.refused import KEPT, of_adapters, one_replica, refused
from meshwright.run.serve.shadow import SHADOW
from meshwright.run.settings import DTYPES
from meshwright.run.world import World
from meshwright.serving.adapters import AdapterRules
from meshwright.serving.decided import budget_shares, decider_of, limits_of, rules_of
from meshwright.serving.kv_budget import number_of, tokens_kept
from meshwright.serving.speculative import Drafts
from meshwright.spec import model as models
from meshwright.spec.engine_words import EngineWords
from meshwright.spec.model import Model

#: The names that published configurations have for types.
PUBLISHED = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "float64"}
#: The share of a host's free memory that the cache may take where ``memory=`` does not say.
HOST_SHARE = 0.25


def engine(
    folder: str | Path,
    plan: Plan | None = None,
    words: EngineWords | None = None,
    *,
    device: str = "cpu",
    dtype: str = "",
    adapters: Mapping[str, str | Path] | None = None,
) -> TorchEngine | DividedEngine:
    """Return an engine of the model in a `folder` (``config.json`` and safetensors). Its first rank is this process;
    it starts one for each other rank of the plan. Requests may name one of the LoRA `adapters`, folders of PEFT's.

    `dtype` (fp32, bf16, fp16, float64) is what it computes in, before the plan's word and that of the weights.

    Raises:
        MeshwrightError: W014 with everything that is not served, W013 for policies that are none, W012 where the cache
            has no room for a token; H006 and H007 for weights, M codes for the configuration.
    """
    folder, plan, words = Path(folder), plan or Plan(), words or EngineWords()
    model = models.load(folder)
    plan = placed(plan)
    named = {name: str(path) for name, path in (adapters or {}).items()}
    wrong = refused(plan, model, words) + (list(of_adapters(words)) if named else [])
    if wrong:
        raise MeshwrightError(wrong)
    kind = DTYPES[dtype or plan.pools[0].plan.precision.compute or published_type(folder)]
    if plan.several:
        return _divided(folder, plan, words, model, kind, torch.device(device).type, named)
    if words.peers is not None:
        return _chained(folder, plan, words, model, kind, torch.device(device))
    if plan.layout.num_ranks == 1:
        return _alone(folder, plan, words, model, kind, torch.device(device), named)
    device_type = torch.device(device).type
    processes = RankProcesses(plan.layout.num_ranks, device_type, _follow, folder, plan, model, kind, named)
    try:
        executor = RankedExecutor(_layers(processes.world, folder, plan, model, kind, named), processes)
        return led(executor, folder, words, kind, named)
    except BaseException:
        processes.close()
        raise


def _alone(
    folder: Path,
    plan: Plan,
    words: EngineWords,
    model: Model,
    kind: torch.dtype,
    device: torch.device,
    adapters: dict[str, str],
) -> TorchEngine:
    """Return the engine of one rank, this process."""
    place = mesh.alone(device=device)
    layers = ServedLayers(model, served_plan(plan), place, dtype=kind)
    layers.load(folder)
    if adapters:
        layers.adapt(tuple(adapters.values()))
    return led(LocalExecutor(layers), folder, words, kind, adapters)


def _chained(
    folder: Path, plan: Plan, words: EngineWords, model: Model, kind: torch.dtype, device: torch.device
) -> TorchEngine:
    """Return the engine of the client of peers, as many as the plan has replicas: it has the model's ends."""
    count, plan = plan.layout.dp, served_plan(one_replica(plan))
    layers = ServedLayers(model, plan, mesh.alone(device=device), dtype=kind, layers=())
    layers.load(folder)
    executor = peers_of(layers, folder, plan, words, count, memory_share(words, device) * free_bytes(device))
    drafter = NgramDrafter() if words.draft else None
    return engine_on(executor, words, executor.said.room.blocks, folder, drafter)


def led(
    executor: LocalExecutor | RankedExecutor,
    folder: Path,
    words: EngineWords,
    kind: torch.dtype,
    adapters: dict[str, str],
    half: type[TorchEngine] = TorchEngine,
) -> TorchEngine:
    """Return the engine of ranks, or a half of one, on its first: the draft model, if any, is this rank's alone."""
    layers, drafter, held = executor.layers, None, [executor.layers]
    if words.draft and words.draft != NGRAM:
        held.append(_draft_layers(words.draft, layers.model, mesh.alone(device=layers.mesh.device), kind))
    blocks = num_blocks(words, layers.model, held, ranks=layers.mesh.world)
    share = kept_share(words, layers.model)
    name, _, number = words.kv_budget.partition(":")
    said = None if share is None else (name, number_of(number) if number else serving.get("kv_budget", name).usual)
    executor.room(blocks, words.block, said)
    for draft in held[1:]:
        draft.cache(blocks, words.block)
    if words.draft:
        drafter = NgramDrafter() if len(held) == 1 else ModelDrafter(held[1])
    return engine_on(executor, words, blocks, folder, drafter, tuple(adapters), half)


def _layers(
    world: World, folder: Path, plan: Plan, model: Model, kind: torch.dtype, adapters: dict[str, str]
) -> ServedLayers:
    """Return a rank's layers with their weights; collective."""
    plan = served_plan(plan)
    place = mesh.build(plan, device=world.device)
    layers = ServedLayers(model, plan, _ordered(place, place["world"], dist.group.WORLD), dtype=kind)
    layers.load(folder)
    if adapters:
        layers.adapt(tuple(adapters.values()))
    return layers


def _follow(world: World, folder: Path, plan: Plan, model: Model, kind: torch.dtype, adapters: dict[str, str]) -> None:
    """Obey rank 0 for as long as it serves."""
    follow(_layers(world, folder, plan, model, kind, adapters))


def _divided(
    folder: Path, plan: Plan, words: EngineWords, model: Model, kind: torch.dtype, device: str, adapters: dict[str, str]
) -> DividedEngine:
    """Return the engine of two pools: this process is the first rank of the one that computes prompts."""
    ours, theirs = multiprocessing.Pipe()
    said = folder, plan, words, model, kind, adapters
    processes = RankProcesses(plan.num_ranks, device, _beside, ours, theirs, *said)
    try:
        theirs.close()
        one = _half(processes.world, *said)
        assert isinstance(one, PrefillEngine)
        line = PipeLine(ours)
        room = min(one.facts.room, msgspec.msgpack.decode(line.receive(), type=int))
        return DividedEngine(one, line, msgspec.structs.replace(one.facts, room=room), processes)
    except BaseException:
        processes.close()
        raise


def _beside(world: World, ours: Connection, theirs: Connection, *said: Any) -> None:
    """The life of a rank of two pools that is not the first of all."""
    ours.close()
    one = _half(world, *said)
    if not isinstance(one, DecodeEngine):
        theirs.close()
        follow(one)
        return
    theirs.send_bytes(msgspec.msgpack.encode(one.facts.room))
    SecondHalf(one, PipeLine(theirs)).serve()


def _half(
    world: World,
    folder: Path,
    plan: Plan,
    words: EngineWords,
    model: Model,
    kind: torch.dtype,
    adapters: dict[str, str],
) -> TorchEngine | ServedLayers:
    """Return the engine of a pool on its first rank, and a rank's layers on others; collective over both pools."""
    pools = tuple(msgspec.structs.replace(pool, plan=served_plan(pool.plan)) for pool in plan.pools)
    place = mesh.build(msgspec.structs.replace(plan, several=pools), device=world.device)
    ranks = [tuple(range(*pool.devices)) for pool in pools]
    handles = [dist.new_group(list(some), timeout=timedelta(seconds=PATIENCE_S)) for some in ranks]
    sent = dist.new_group(backend="gloo")  # through the memory of the host, between GPUs too
    which = int(world.rank in ranks[1])
    own = mesh.AxisGroup(name="world", ranks=ranks[which], index=ranks[which].index(world.rank))
    layers = ServedLayers(model, pools[which].plan, _ordered(place, own, handles[which]), dtype=kind)
    layers.load(folder)
    if adapters:
        layers.adapt(tuple(adapters.values()))
    layers.port = joined(sent, pools[0].plan, pools[1].plan, model, (ranks[0][0], ranks[1][0]))
    if own.index:
        return layers
    executor = LocalExecutor(layers) if own.alone else RankedExecutor(layers)
    if which:
        return led(executor, folder, words, kind, adapters, DecodeEngine)
    words = msgspec.structs.replace(words, draft="")  # one token is generated, and nothing to be guessed
    return led(executor, folder, words, kind, adapters, PrefillEngine)


def _ordered(place: mesh.ProcessMesh, own: mesh.AxisGroup, handle: dist.ProcessGroup) -> mesh.ProcessMesh:
    """Return a mesh whose world are the ranks of one engine, with a group on which they wait for orders."""
    own = msgspec.structs.replace(own, handle=handle)
    return msgspec.structs.replace(place, groups=place.groups | {"world": own})


def placed(plan: Plan) -> Plan:
    """Return a plan on as many ranks as it says; of two pools of an engine the one that computes prompts is first."""

    def own(one: Plan, said: int = 0) -> Plan:
        layout = one.layout
        return one.on(said or layout.tp * layout.pp * layout.cp * max(1, layout.dp))

    if not plan.several:
        return own(plan)
    sources = [link.source for link in plan.links]
    first, found = 0, []
    for pool in sorted(plan.pools, key=lambda pool: pool.name not in sources):
        one = own(pool.plan, pool.devices[1] - pool.devices[0] if pool.devices else 0)
        found.append(msgspec.structs.replace(pool, plan=one, devices=(first, first + one.layout.num_ranks)))
        first += one.layout.num_ranks
    return msgspec.structs.replace(plan, several=tuple(found))


def engine_on(
    executor: LocalExecutor | RankedExecutor | PeerExecutor,
    words: EngineWords,
    blocks: int,
    folder: Path,
    drafter: Drafter | None = None,
    adapters: tuple[str, ...] = (),
    half: type[TorchEngine] = TorchEngine,
) -> TorchEngine:
    """Return the engine of an executor with so many cache blocks and adapters of these names. With ``lora=unified``
    adapters take blocks of the cache, which stay empty while their weights are on the device."""
    layers = executor.layers
    share = kept_share(words, layers.model)
    block_bytes = (layers.token_bytes + _marks(words, layers)) * words.block
    held = None
    if adapters:
        unified = words.lora == "unified"
        each = -(-layers.adapters.num_bytes // block_bytes) if unified else 0
        held = AdapterRules(blocks=each, slots=0 if unified else words.adapter_slots)
    limits = limits_of(words, blocks, device_share=1.0 if share is None else share)
    rules = rules_of(words, unit=words.block, block_bytes=block_bytes, adapters=held)
    drafts = Drafts(count=words.guesses or USUAL) if words.draft else None
    decider = decider_of(words, limits, rules, drafts=drafts, parks=issubclass(half, PrefillEngine), together=False)
    spare = (limits.watermark if decider.policy.watermark else 0) + (held.blocks if held else 0)
    facts = EngineFacts(
        context=layers.model.max_seq_len,
        vocabulary=layers.model.vocab,
        room=limits.longest(max(0, blocks - spare)),
        block=words.block,
        end_ids=tuple(token for token in end_ids(folder) if token < layers.model.vocab),
        adapters=adapters,
    )
    made = half(decider, executor, facts, drafter=drafter, approximate=share is not None)
    if words.kv_budget.partition(":")[0] == SHADOW:
        made.firsts = set()
    if (folder / "tokenizer.json").is_file():
        made.grammars = Grammars(folder, facts.vocabulary, facts.end_ids)
    return made


def kept_share(words: EngineWords, model: Model) -> float | None:
    """Return the share of a context's tokens that the words' budget keeps, as a prediction counts them; None where all
    are kept."""
    if not words.kv_budget:
        return None
    return budget_shares(words.kv_budget, max(spec.kv_heads * spec.head_dim for spec in model.attentions)).device


def served_plan(plan: Plan) -> Plan:
    """Return the plan as its layers are built: tokens between tensor-parallel regions lie on every rank whole, and each
    expert is split over the ranks that ``ep`` leaves."""
    layout = msgspec.structs.replace(plan.layout, sp=False, dp=1)
    experts = msgspec.structs.replace(plan.experts, etp=Spread.of(plan).etp, duplicates="sent")
    return msgspec.structs.replace(plan, layout=layout, experts=experts)


def num_blocks(words: EngineWords, model: Model, held: Sequence[ServedLayers], ranks: int = 1) -> int:
    """Return the cache blocks: those that were said, else as many as fit into the share of the free memory that the
    words leave to them (a quarter of a host's where they do not say, as others use it too), and not more than a full
    batch of the longest requests could want. So many `ranks` share a host's memory, the largest of whose stages has as
    many layers as the first or one more.

    Raises:
        MeshwrightError: W012 where not even one has room.
    """
    if words.kv_blocks:
        return words.kv_blocks
    share = kept_share(words, model)
    each = (sum(one.token_bytes for one in held) + _marks(words, held[0])) * words.block
    longest = tokens_kept(model.max_seq_len or 4096, 1.0 if share is None else share)
    wanted = words.max_batch * -(-longest // words.block)
    device = held[0].mesh.device
    each += each // max(1, len(held[0].cores)) if ranks > 1 else 0
    free = memory_share(words, device) * free_bytes(device) / (ranks if device.type == "cpu" else 1)
    found = min(wanted, int(free) // each)
    if found < 1:
        help = "say kv_blocks=, or a smaller model"
        raise MeshwrightError.one("W012", "no cache block has room beside the weights", place="--serve", help=help)
    return found


def _marks(words: EngineWords, layers: ServedLayers) -> int:
    """Bytes that a budget which keeps some tokens keeps beside each."""
    return layers.mark_bytes if words.kv_budget.partition(":")[0] == KEPT else 0


def memory_share(words: EngineWords, device: torch.device) -> float:
    """Return the share of a device's free memory that the cache may take."""
    unsaid = words.memory == EngineWords().memory
    return HOST_SHARE if device.type == "cpu" and unsaid else words.memory


def free_bytes(device: torch.device) -> int:
    """Return the bytes of a device's memory, or of the host's, that nobody uses."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        name, _, size = line.partition(":")
        if name == "MemAvailable":
            return int(size.split()[0]) * 1024
    return 0


def published_type(folder: Path) -> str:
    """Return the type of published weights, as their configuration says."""
    said = models.config(folder)
    name = said.get("dtype") or said.get("torch_dtype")
    return PUBLISHED.get(name, "fp32") if isinstance(name, str) else "fp32"


def end_ids(folder: Path) -> tuple[int, ...]:
    """Return the tokens at which the model's answers end, from ``generation_config.json`` or the configuration."""
    said = models.config(folder).get("eos_token_id")
    file = folder / "generation_config.json"
    if file.is_file():
        try:
            told = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            told = {}
        if isinstance(told, dict) and told.get("eos_token_id") is not None:
            said = told["eos_token_id"]
    many = said if isinstance(said, list) else [said]
    return tuple(one for one in many if isinstance(one, int) and not isinstance(one, bool) and one >= 0)


def _draft_layers(name: str, model: Model, place: mesh.ProcessMesh, kind: torch.dtype) -> ServedLayers:
    """Return the layers of a draft model in a folder.

    Raises:
        MeshwrightError: W014 for one of another vocabulary, or of no kind that is served.
    """
    draft = models.load(name)
    wrong = refused(Plan().on(1), draft, EngineWords())
    if draft.vocab != model.vocab:
        message = f"{draft.name} knows {draft.vocab:,} tokens, and {model.name} {model.vocab:,}"
        said = f"--serve draft={name}"
        wrong += MeshwrightError.one("W014", message, place=said, help="a draft model of the same tokens").diagnostics
    if wrong:
        raise MeshwrightError(wrong)
    layers = ServedLayers(draft, served_plan(Plan().on(1)), place, dtype=kind)
    layers.load(Path(name))
    return layers
