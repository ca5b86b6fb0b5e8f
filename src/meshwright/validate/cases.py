"""A row of ``training_steps`` as a question: model, cluster, workload, plan, framework, and what had to be assumed.

What a row leaves open is filled by the framework's documented defaults, never by looking at the result.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

import msgspec

from meshwright import schedules
from meshwright.cost import Framework, frameworks, load_framework
from meshwright.cost.framework import usual_overlap
from meshwright.cost.reached import seconds_of
from meshwright.cost.softmax import rows_for_fused
from meshwright.cost.unknown import middle
from meshwright.errors import MeshwrightError
from meshwright.lower.partition import by_thresholds
from meshwright.plan import Experts, Layout, Memory, Pipeline, Plan, Precision
from meshwright.plan.facets.overlap import OVERLAPS
from meshwright.spec import cluster as clusters
from meshwright.spec import model as models
from meshwright.spec.cluster import Cluster
from meshwright.spec.cluster_check import REACHED_BY
from meshwright.spec.layers import Moe
from meshwright.spec.lora import ALL_TARGETS
from meshwright.spec.model import Model
from meshwright.spec.workload import DTYPE_BYTES, Lora, Train
from meshwright.validate.software import date_of, evidence_of, software_name, unnamed
from meshwright.validate.tables import number, whole
from meshwright.work import REACHED_BYTES

#: Vocabulary of GPT-2 padded to a multiple of 128 * 8 (Megatron-LM), when a row has none.
USUAL_VOCAB = 51200
ATTENTION = {
    "flash": "flash",
    "flash_attention": "flash",
    "flash_attention_2": "flash",
    "sdpa_flash": "flash",
    "unfused": "unfused",
    "local": "unfused",
}
#: Flags that say that communication is overlapped with compute, and which.
OVERLAPPED = {"async_tp": "tp"}
#: Flags that say where what is not recomputed lies: in the host's memory, so that a device keeps as much as where all
#: is recomputed.
LEFT_ON_DEVICE = {"qkv_proj_offloaded": "full"}
#: Flags that say how operands of 8 bits are scaled, where it is not by whole tensors.
SCALED = {"float8_rowwise": "fp8_row"}
#: How flags say that a frozen base is stored quantised, as a plan says it.
FROZEN = {"nf4_base": "nf4", "nf4_dq_base": "nf4-dq", "int4_gptq_base": "int4", "int8_gptq_base": "int8"}
#: What notes say about the precision of the gradients' reduction (Composer's modes of FSDP mixed precision).
REDUCED = {"mixed precision mode DEFAULT": "fp32", "mixed precision mode PURE": "bf16"}


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One row, ready to predict. ``assumed`` names the inputs that a default filled."""

    model: Model
    cluster: Cluster
    train: Train
    plan: Plan
    framework: Framework
    assumed: tuple[str, ...]


def case(row: dict[str, str]) -> Case:
    """The question a row asks.

    Raises:
        MeshwrightError: when the row cannot be expressed, with the reason.
    """
    try:
        framework = load_framework(" ".join([row["framework"], *_version(row)]), date_of(row))
    except MeshwrightError:
        return unknown_case(row)
    return _under(row, framework)


def unknown_case(row: dict[str, str], without: Collection[str] = ()) -> Case:
    """The question a row asks of software that nobody knows, whatever it calls it: what its device names, or the middle
    of the kinds that the row's facts leave, without some profiles.

    Raises:
        MeshwrightError: when the row cannot be expressed, with the reason.
    """
    row = unnamed(row)
    named = _of_device(row["hardware"])
    asked = _under(row, load_framework(named) if named else middle(evidence_of(row), without))
    unsaid = () if number(row, "optimizer_state_bytes_per_param") else ("state",)
    return msgspec.structs.replace(asked, assumed=("framework", *asked.assumed, *unsaid))


def families_of(rows: Iterable[dict[str, str]]) -> dict[str, frozenset[str]]:
    """Return for each software name the profiles that its rows, or those of the same family, were fitted to: what is
    left out with it."""
    owners: dict[str, set[str]] = {}
    for row in rows:
        try:
            found = load_framework(" ".join([row["framework"], *_version(row)]), date_of(row))
        except MeshwrightError:
            continue
        owners.setdefault(software_name(row), set()).add(found.family or found.constants_of or found.name)
    return {
        name: frozenset(f.name for f in frameworks().values() if {f.name, f.family, f.constants_of} & of)
        for name, of in owners.items()
    }


def _of_device(hardware: str) -> str:
    """The profile that a device names for whatever runs on it; "" where it names none or nobody knows it."""
    try:
        return clusters.load_device(hardware).framework
    except MeshwrightError:
        return ""


def _under(row: dict[str, str], framework: Framework) -> Case:
    """The row's question about one framework."""
    assumed: list[str] = []
    model = _model(row, framework, assumed)
    train = _train(row, framework)
    cluster = _cluster(row, assumed)
    return Case(
        model=model,
        cluster=cluster,
        train=train,
        plan=_plan(row, framework, model, cluster, train, assumed),
        framework=framework,
        assumed=tuple(assumed),
    )


def _version(row: dict[str, str]) -> list[str]:
    """The software that a row records besides the framework's name: that its layers are compiled, its version
    (``era_C``) or, where the job measured it, whether its collectives take ``slow-steps``, which no date tells as well,
    that state is sharded, which some frameworks leave to another library's engine, and sequence parallelism and
    selective recomputation, which came with a version."""
    compiled = [flag for flag in row["flags"].split(";") if flag == "compile"]
    eras = [flag.lower() for flag in row["flags"].split(";") if flag.startswith("era_")]
    slow = _slow_steps(row)
    stage = whole(row, "zero_stage")
    known = eras if slow is None else ["slow-steps"] * slow
    newer = ["sp"] * (row["sequence_parallel"] == "True") + ["selective"] * (row["recompute"] == "selective")
    return [*compiled, *known, *([f"zero{stage}"] if stage else []), *newer]


#: Microseconds of a ring's step beyond its bytes at the port's rate that tell apart the two kinds of jobs into which
#: the nanotron sweep falls: medians by number of ranks are 10 to 33 and 61 to 80.
SLOW_STEP_US = 45.0


def _slow_steps(row: dict[str, str]) -> bool | None:
    """Whether the job's own all-gather took long steps; None where it measured none. On one node there are no steps
    between nodes, so none are slow."""
    gathered = busbw_in_job(row["notes"]).get("all_gather")
    gpus, per_node = whole(row, "num_gpus"), whole(row, "gpus_per_node") or 8
    if gathered is None or gpus <= per_node:
        return None if gathered is None else False
    port = network_gb_s(row["network"], per_node)
    bytes_us = REACHED_BYTES / gpus / (port * 1e9) * 1e6 if port else 0.0
    return seconds_of(gathered, 1, gpus) / (gpus - 1) * 1e6 - bytes_us > SLOW_STEP_US


def _model(row: dict[str, str], framework: Framework, assumed: list[str]) -> Model:
    """The catalog's model where its dimensions are the row's, else one made from the dimensions."""
    named = _from_catalog(row)
    if named is not None:
        return named
    if re.search(r"\bhybrid\b|Mamba", row["notes"]):
        raise MeshwrightError.one(
            "V010", "layers of several kinds are not modelled without their sizes, which neither row nor catalog has"
        )
    vocab = whole(row, "vocab") or USUAL_VOCAB
    if not row["vocab"]:
        assumed.append("vocab")
    experts, gated = whole(row, "experts"), row["gated_mlp"] == "True"
    seq, hidden = whole(row, "seq_len"), whole(row, "hidden")
    return models.transformer(
        name=row["model"],
        layers=whole(row, "layers"),
        hidden=hidden,
        heads=whole(row, "heads"),
        kv_heads=whole(row, "kv_heads") or None,
        ffn=whole(row, "ffn") or whole(row, "moe_ffn") or 4 * hidden,
        vocab=vocab,
        gated=gated,
        experts=experts,
        top_k=whole(row, "top_k"),
        moe_ffn=whole(row, "moe_ffn") or None if experts else None,
        tied_embeddings=row["tied_embeddings"] == "True" if row["tied_embeddings"] else None,
        parallel=framework.defaults.parallel,
        max_seq_len=seq,
    )


def _from_catalog(row: dict[str, str]) -> Model | None:
    try:
        model = models.load(row["model"])
    except MeshwrightError:
        return None
    # the last kind of block that attends, and the last that has an MLP: a layer of a hybrid may have one of them alone
    heads = [[a.heads for a in block.attentions] for block in model.blocks if block.attentions]
    mlps = [block.mlp for block in model.blocks if block.mlp is not None]
    same = (
        model.num_layers == whole(row, "layers")
        and model.hidden == whole(row, "hidden")
        and heads[-1:] == [[whole(row, "heads")]]
        and (not row["vocab"] or model.vocab == whole(row, "vocab"))
        and any(isinstance(mlp, Moe) for mlp in mlps[-1:]) == bool(whole(row, "experts"))
    )
    return model if same else None


def _train(row: dict[str, str], framework: Framework) -> Train:
    named = (dtype for flag, dtype in SCALED.items() if flag in row["flags"].split(";"))
    dtype = next(named, row["dtype"] or "bf16")
    if dtype not in DTYPE_BYTES:
        raise MeshwrightError.one("V010", f"compute precision {dtype!r} is not known")
    lora = row["phase"] in ("lora", "qlora")
    return Train(
        global_batch=whole(row, "global_batch_seqs"),
        seq_len=whole(row, "seq_len"),
        dtype=dtype,
        phase="lora" if lora else row["phase"] or "pretrain",
        lora=_lora(row, framework) if lora else None,
        dropout=framework.defaults.dropout and not lora,
    )


#: What notes say about adapters: their rank, and the matrices that have some.
RANK = re.compile(r"\brank (\d+)|\br=(\d+)")


def _lora(row: dict[str, str], framework: Framework) -> Lora:
    """Adapters as the notes describe them; those of the workload's defaults where they say nothing."""
    notes, usual = row["notes"], Lora()
    rank = next((int(a or b) for a, b in RANK.findall(notes)), usual.rank)
    targets = usual.targets
    if found := re.search(r"q,k,v,proj,mlp,head=([\w/]+)", notes):
        said = [word == "true" for word in found[1].split("/")]
        names = (("q",), ("k",), ("v",), ("o",), ("gate", "up", "down"))
        targets = tuple(name for some, on in zip(names, said) if on for name in some)
    elif "all layers" in notes:
        targets = ALL_TARGETS
    elif "Q and V only" in notes:
        targets = ("q", "v")
    elif "default targets (fused qkv)" in notes:
        targets = ("q", "k", "v")
    return Lora(rank=rank, targets=targets or usual.targets, dropout=framework.defaults.adapter_dropout)


def _cluster(row: dict[str, str], assumed: list[str]) -> Cluster:
    gpus, per_node = whole(row, "num_gpus"), whole(row, "gpus_per_node")
    if per_node and gpus % per_node == 0:
        cluster = clusters.load(f"{gpus // per_node}x{per_node}x{row['hardware']}")
    else:
        cluster = clusters.load(f"{gpus}x{row['hardware']}")
    speed = network_gb_s(row["network"], per_node or 8)
    if speed is not None:
        islands = (
            msgspec.structs.replace(island, levels=_at_most(island.levels, speed, per_node, row["network"]))
            for island in cluster.islands
        )
        cluster = msgspec.structs.replace(cluster, islands=tuple(islands))
    elif cluster.num_devices > (per_node or 8):
        assumed.append("network")
    return cluster.reaching(busbw_in_job(row["notes"]))


#: What notes say that collectives over all ranks of a job reached before it trained.
BUSBW = re.compile(r"busbw GB/s in job: AR=([\d.]+) AG=([\d.]+) RS=([\d.]+)")


def busbw_in_job(notes: str) -> dict[str, float]:
    """Bus bandwidths that a job measured on its own network, by operation, in GB/s; empty when notes say none."""
    found = BUSBW.search(notes)
    values = () if found is None else map(float, found.groups())
    return {op: value for op, value in zip(REACHED_BY, values) if value > 0}


def without_busbw(notes: str) -> str:
    """Notes without what a job measured of its own network."""
    return BUSBW.sub("", notes)


#: Fabrics by the word a description uses for them: name of the level and its one-way latency, from the catalog's
#: clusters that have it.
FABRICS = {"EFA": ("efa", "2xp5"), "Omni-Path": ("omni_path", "jean-zay")}


def _at_most(levels, speed: float, per_node: int, network: str):
    """The first scale-out level with the row's node bandwidth, those above it scaled alike, and its fabric's name."""
    usual = next((level.gb_s for level in levels if level.scale_out), None)
    if usual is None:
        return levels
    inside = 1
    for level in levels:
        if level.scale_out:
            break
        inside *= level.arity
    factor = speed * max(1, inside // max(1, per_node)) / usual
    named = next((fabric for word, fabric in FABRICS.items() if word in network), None)
    return tuple(_as_fabric(v, v.gb_s * factor, named) if v.scale_out else v for v in levels)


def _as_fabric(level, gb_s: float, named: tuple[str, str] | None):
    if named is None:
        return msgspec.structs.replace(level, gb_s=gb_s)
    name, known = named
    latency = next(v.latency_us for v in clusters.load(known).islands[0].levels if v.scale_out)
    return msgspec.structs.replace(level, name=name, gb_s=gb_s, latency_us=latency)


def network_gb_s(text: str, gpus_per_node: int) -> float | None:
    """Bandwidth of one node's compute network per direction in GB/s, from a description; None when it says none."""
    compute = re.split(r"[,;]", text)
    chosen = next((part for part in compute if "ompute" in part), text)
    if match := re.search(r"(\d+)\s*x[^0-9]*?(?:[A-Za-z0-9-]*\s+)*?(\d+)\s*G(?:b|B)/(?:s|S)", chosen):
        return int(match[1]) * int(match[2]) / 8
    if match := re.search(r"(\d+)\s*Gb/s per GPU", text):
        return int(match[1]) * gpus_per_node / 8
    if match := re.search(r"(\d+)\s*Gb/s(?:\s*\([^)]*\))? per node", text):
        return int(match[1]) / 8
    return None


def _plan(
    row: dict[str, str], framework: Framework, model: Model, cluster: Cluster, train: Train, assumed: list[str]
) -> Plan:
    """The row's plan; open facets by the framework's defaults."""
    usual = framework.defaults
    tp, pp, cp, dp = (max(1, whole(row, axis, 1)) for axis in ("tp", "pp", "cp", "dp"))
    microbatch = whole(row, "micro_batch_seqs")
    if not microbatch:
        microbatch = 4 if pp == 1 else 1
        # nobody who could choose ran without the fused softmax
        more = rows_for_fused(max(1, whole(row, "heads", 1) // tp) * microbatch) if usual.softmax_keys else 1
        microbatch *= more if train.global_batch % (dp * microbatch * more) == 0 else 1
        assumed.append("microbatch")
    if usual.cuts and pp > 1 and whole(row, "grad_accum", 1) <= 1 and microbatch % pp == 0:
        microbatch //= pp
        assumed += [name for name in ("microbatch",) if name not in assumed]
    count = train.global_batch // max(1, dp * microbatch)
    schedule, vpp = _schedule(row, model, pp, count, assumed)
    said = row["flags"].split(";")
    recompute = {"none": "none", "selective": usual.selective, "full": "full"}.get(row["recompute"], "")
    recompute = next((LEFT_ON_DEVICE[flag] for flag in said if flag in LEFT_ON_DEVICE), recompute)
    if not recompute:
        recompute = usual.recompute
        assumed.append("recompute")
    attention = _attention(row["attention_kernel"])
    if not attention:
        assumed.append("attention")
    sp = row["sequence_parallel"]
    if not sp:
        assumed.append("sp")
    moe = bool(model.mixtures)
    shown = {OVERLAPPED.get(flag, "") for flag in said}
    reduced = next((grads for words, grads in REDUCED.items() if words in row["notes"]), usual.grads)
    plan = Plan(
        layout=Layout(
            tp=tp,
            pp=pp,
            dp=dp,
            cp=cp,
            zero=_zero(whole(row, "zero_stage", 1 if usual.overlap else 0), pp),
            sp=(sp == "True" if sp else usual.sp) or (moe and tp > 1),
            stages=by_thresholds(model, pp) if pp * vpp == pp > 1 and usual.partition == "thresholds" else (),
        ),
        pipeline=Pipeline(schedule=schedule, vpp=vpp, microbatch=microbatch),
        experts=Experts(ep=max(1, whole(row, "ep", 1)), etp=_etp(row, usual.etp) if moe else 0),
        memory=Memory(
            recompute=recompute,
            attention=attention or ("unfused" if evidence_of(row).old else usual.attention),
            loss=usual.loss,
            gathered=usual.gathered,
        ),
        precision=Precision(
            params=_params(row, usual.params if DTYPE_BYTES[train.dtype] < 2 else "bf16"),
            grads=reduced,
            master=_master(row, usual.master),
            moments=usual.moments,
        ),
    )
    overlap = usual_overlap(framework, plan, model, cluster.islands[0].domain_size)
    overlap = msgspec.structs.replace(overlap, **{name: True for name in OVERLAPS if name in shown})
    return msgspec.structs.replace(plan, overlap=overlap)


def _schedule(row: dict[str, str], model: Model, pp: int, count: int, assumed: list[str]) -> tuple[str, int]:
    """The schedule of a row's microbatches, `count` a pipeline, and the chunks of a rank: those that it says, of a
    schedule that holds several two where it does not say how many. Where nothing is said, chunks are usual that layers
    and microbatches divide into."""
    vpp = whole(row, "vpp")
    said = row["schedule"].removesuffix("_1f1b").replace("_", "-").lower()
    known = said in schedules.families()
    if known and said != "interleaved" and not (said == "1f1b" and vpp and vpp > 1):
        return said, vpp or schedules.get(said).default_vpp
    if not vpp:
        divides = model.num_layers % (2 * pp) == 0 and count % pp == 0
        vpp = 2 if pp > 1 and (known or divides) else 1
        assumed.append("vpp")
    return "interleaved" if vpp > 1 else "1f1b", vpp


def _attention(said: str) -> str:
    """The attention kernel of a row in a plan's words; "" where nothing was recorded or nobody knows the word."""
    words = re.split(r"[^a-z0-9]+", said.lower())
    return ATTENTION.get(said, "flash" if {"flash", "splash", "fmha"} & set(words) else "")


def _params(row: dict[str, str], usual: str) -> str:
    """How working parameters are stored: a quantised base as flags say, in nf4 where only the phase tells."""
    said = (FROZEN[flag] for flag in row["flags"].split(";") if flag in FROZEN)
    return next(said, "nf4" if row["phase"] == "qlora" else usual)


def _etp(row: dict[str, str], usual: int) -> int:
    """Over how many ranks each expert is split: as a flag says, else the framework's default where experts are spread
    over ranks at all."""
    told = (int(match[1]) for flag in row["flags"].split(";") if (match := re.fullmatch(r"etp(\d+)", flag)))
    return next(told, usual if whole(row, "ep", 1) > 1 else 0)


def _zero(stage: int, pp: int) -> int:
    """Return the ZeRO stage in Meshwright's terms: 1 for a paper's ZeRO-2 in a pipeline, else the stage itself.

    With a pipeline, papers call it ZeRO-2 where the optimizer is sharded and gradients are reduced once a step out of a
    whole buffer (Megatron-LM's distributed optimizer and its descendants)."""
    return 1 if stage == 2 and pp > 1 else stage


def _master(row: dict[str, str], usual: str) -> str:
    """12 bytes of state per parameter are a fp32 master and two moments; 8 are the moments alone."""
    state = number(row, "optimizer_state_bytes_per_param")
    return "none" if state == 8 and whole(row, "zero_stage") < 3 else usual
