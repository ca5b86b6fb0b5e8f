"""Build an engine from what a user says: a folder of published weights, a plan, and an engine's words.

The decider is the one that ``predict --serve`` simulates for the same words (:mod:`meshwright.serving.decided`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import torch

from meshwright.answer.drafting import NGRAM, USUAL
from meshwright.endpoint.seam import EngineFacts
from meshwright.errors import MeshwrightError
from meshwright.lower.served_experts import Spread
from meshwright.plan import Plan
from meshwright.run import mesh
from meshwright.run.serve.drafts import ModelDrafter, NgramDrafter
from meshwright.run.serve.engine import Drafter, TorchEngine
from meshwright.run.serve.executor import LocalExecutor
from meshwright.run.serve.forward import ServedLayers
from meshwright.run.serve.ranks import RankedExecutor, RankProcesses, follow
from meshwright.run.serve.refused import of_adapters, refused
from meshwright.run.settings import DTYPES
from meshwright.run.world import World
from meshwright.serving.adapters import AdapterRules
from meshwright.serving.decided import budget_shares, decider_of, limits_of, rules_of
from meshwright.serving.kv_budget import tokens_kept
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
) -> TorchEngine:
    """Return an engine of the model in a `folder` (``config.json`` and safetensors). Its first rank is this process;
    it starts one for each other rank of the plan. Requests may name one of the LoRA `adapters`, folders of PEFT's.

    `dtype` (fp32, bf16, fp16, float64) is what it computes in, before the plan's word and that of the weights.

    Raises:
        MeshwrightError: W014 with everything that is not served, W013 for policies that are none, W012 where the cache
            has no room for a token; H006 and H007 for weights, M codes for the configuration.
    """
    folder, plan, words = Path(folder), plan or Plan(), words or EngineWords()
    model = models.load(folder)
    if not plan.several:
        plan = plan.on(plan.layout.tp * plan.layout.pp * plan.layout.cp * max(1, plan.layout.dp))
    named = {name: str(path) for name, path in (adapters or {}).items()}
    wrong = refused(plan, model, words) + (list(of_adapters(words)) if named else [])
    if wrong:
        raise MeshwrightError(wrong)
    kind = DTYPES[dtype or plan.precision.compute or published_type(folder)]
    if plan.layout.num_ranks == 1:
        return _alone(folder, plan, words, model, kind, torch.device(device), named)
    device_type = torch.device(device).type
    processes = RankProcesses(plan.layout.num_ranks, device_type, _follow, folder, plan, model, kind, named)
    try:
        executor = RankedExecutor(_layers(processes.world, folder, plan, model, kind, named), processes)
        return _ranked(executor, folder, words, kind, named)
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
    draft, drafter = None, None
    if words.draft and words.draft != NGRAM:
        draft = _draft_layers(words.draft, model, place, kind)
    blocks = num_blocks(words, model, [layers] if draft is None else [layers, draft])
    for one in (layers, draft):
        if one is not None:
            one.cache(blocks, words.block, kept_share(words, model))
    if words.draft:
        drafter = NgramDrafter() if draft is None else ModelDrafter(draft)
    return engine_on(LocalExecutor(layers), words, blocks, folder, drafter, tuple(adapters))


def _ranked(
    executor: RankedExecutor, folder: Path, words: EngineWords, kind: torch.dtype, adapters: dict[str, str]
) -> TorchEngine:
    """Return the engine of several ranks, on the first: the draft model, if any, is this rank's alone."""
    layers, drafter, held = executor.layers, None, [executor.layers]
    if words.draft and words.draft != NGRAM:
        held.append(_draft_layers(words.draft, layers.model, mesh.alone(device=layers.mesh.device), kind))
    blocks = num_blocks(words, layers.model, held, ranks=layers.mesh.world)
    executor.room(blocks, words.block, kept_share(words, layers.model))
    for draft in held[1:]:
        draft.cache(blocks, words.block)
    if words.draft:
        drafter = NgramDrafter() if len(held) == 1 else ModelDrafter(held[1])
    return engine_on(executor, words, blocks, folder, drafter, tuple(adapters))


def _layers(
    world: World, folder: Path, plan: Plan, model: Model, kind: torch.dtype, adapters: dict[str, str]
) -> ServedLayers:
    """Return a rank's layers with their weights; collective."""
    plan = served_plan(plan)
    layers = ServedLayers(model, plan, mesh.build(plan, device=world.device), dtype=kind)
    layers.load(folder)
    if adapters:
        layers.adapt(tuple(adapters.values()))
    return layers


def _follow(world: World, folder: Path, plan: Plan, model: Model, kind: torch.dtype, adapters: dict[str, str]) -> None:
    """Obey rank 0 for as long as it serves."""
    follow(_layers(world, folder, plan, model, kind, adapters))


def engine_on(
    executor: LocalExecutor | RankedExecutor,
    words: EngineWords,
    blocks: int,
    folder: Path,
    drafter: Drafter | None = None,
    adapters: tuple[str, ...] = (),
) -> TorchEngine:
    """Return the engine of an executor with so many cache blocks and adapters of these names. With ``lora=unified``
    adapters take blocks of the cache, which stay empty while their weights are on the device."""
    layers = executor.layers
    share = kept_share(words, layers.model)
    block_bytes = (layers.token_bytes + (0 if share is None else layers.mark_bytes)) * words.block
    held = None
    if adapters:
        unified = words.lora == "unified"
        each = -(-layers.adapters.num_bytes // block_bytes) if unified else 0
        held = AdapterRules(blocks=each, slots=0 if unified else words.adapter_slots)
    limits = limits_of(words, blocks, device_share=1.0 if share is None else share)
    rules = rules_of(words, unit=words.block, block_bytes=block_bytes, adapters=held)
    drafts = Drafts(count=words.guesses or USUAL) if words.draft else None
    decider = decider_of(words, limits, rules, drafts=drafts, together=False)
    spare = (limits.watermark if decider.policy.watermark else 0) + (held.blocks if held else 0)
    facts = EngineFacts(
        context=layers.model.max_seq_len,
        vocabulary=layers.model.vocab,
        room=limits.longest(max(0, blocks - spare)),
        block=words.block,
        end_ids=tuple(token for token in end_ids(folder) if token < layers.model.vocab),
        adapters=adapters,
    )
    return TorchEngine(decider, executor, facts, drafter=drafter, approximate=share is not None)


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
    marks = 0 if share is None else held[0].mark_bytes
    each = (sum(one.token_bytes for one in held) + marks) * words.block
    longest = tokens_kept(model.max_seq_len or 4096, 1.0 if share is None else share)
    wanted = words.max_batch * -(-longest // words.block)
    device = held[0].mesh.device
    each += each // max(1, len(held[0].cores)) if ranks > 1 else 0
    on_host, share = device.type == "cpu", words.memory
    if on_host and share == EngineWords().memory:
        share = HOST_SHARE
    free = share * free_bytes(device) / (ranks if on_host else 1)
    found = min(wanted, int(free) // each)
    if found < 1:
        help = "say kv_blocks=, or a smaller model"
        raise MeshwrightError.one("W012", "no cache block has room beside the weights", place="--serve", help=help)
    return found


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
