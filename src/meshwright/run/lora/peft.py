"""Adapters as PEFT keeps them: a folder of ``adapter_config.json`` and ``adapter_model.safetensors``, written from a
checkpoint and read to go on from; and a checkpoint's adapters added to the weights that they were trained over.

A matrix' two factors are ``base_model.model.NAME.lora_A.weight`` and ``.lora_B.weight``. The file's header says which
weights they were trained over, so that they are not taken for those of others.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from meshwright.errors import Diagnostic, MeshwrightError
from meshwright.run import safetensors_file
from meshwright.run.agree import CPU, agree
from meshwright.run.checkpoint.format import find
from meshwright.run.checkpoint.loading import CheckpointReader, fill
from meshwright.run.job import MERGED
from meshwright.run.lora.base import Base
from meshwright.run.lora.formats import FORMATS
from meshwright.run.lora.formats import quantise as quantised
from meshwright.run.lora.fused import added_to, apart, fused
from meshwright.run.mesh import AxisGroup
from meshwright.run.new_folder import new_folder
from meshwright.run.pieces import PARAM, Parameter, Part, TensorPiece
from meshwright.run.weights import assembled, matched, open_weights, own_shapes, write_tensors
from meshwright.run.weights import digest as weights_digest
from meshwright.spec import naming
from meshwright.spec.architecture import Model
from meshwright.spec.lora import LORA_TARGETS, Lora

CONFIG, TENSORS, PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."
#: Key of the file's header that says which weights adapters were trained over.
BASE = "base_digest"
#: Keys of a configuration that stand for ways of adapting which are not trained, unless they are empty.
OTHER_WAYS = (
    *("use_dora", "use_qalora", "use_bdlora", "lora_bias", "modules_to_save", "rank_pattern", "alpha_pattern"),
    *("layers_to_transform", "exclude_modules", "layer_replication", "trainable_token_indices"),
    *("alora_invocation_tokens", "kasa_config", "arrow_config"),
)
#: Ways to begin adapters, beside the usual one, that leave the base as it was published (PiSSA and OLoRA do not).
BASE_KEPT = (None, "gaussian", "eva", "orthogonal")
#: Files of a published model that are not its weights, and go with them where they go.
BESIDE = ("*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt")


class AdapterRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The record in a checkpoint of adapters, beside their values: the words of ``lora``, the published ``modules``
    that have them and ``parameters`` of experts that do, the name of the ``base`` and the ``digest`` of its weights,
    and the ``matrices`` of it that were ``stored`` in a format of their own. ``turned``: it is published as [in, out]
    (GPT-2)."""

    lora: Lora
    modules: tuple[str, ...]
    base: str
    digest: str = ""
    stored: str = ""
    matrices: tuple[str, ...] = ()
    turned: bool = False
    parameters: tuple[str, ...] = ()

    @classmethod
    def of(cls, model: Model, lora: Lora, params: str, weights: str) -> AdapterRecord:
        """Build the record of a run of `lora` over `weights` that are stored as `params` of a plan."""
        called = naming.modules(model)
        return cls(
            lora=lora,
            modules=tuple(dict.fromkeys(called[target] for target in lora.targets if target in called)),
            turned=naming.names(model).conv,
            base=weights or model.name,
            digest=weights_digest(weights) if weights else "",
            stored=params if params in FORMATS else "",
            matrices=tuple(dict.fromkeys(called.values())) if params in FORMATS else (),
            parameters=tuple(name for t, name in naming.expert_parameters(model).items() if t in lora.targets),
        )


# --- in --------------------------------------------------------------------------------------------------------------


def read_config(folder: str | Path, model: Model) -> Lora:
    """The adapters that a folder of PEFT's holds.

    Raises:
        MeshwrightError: H009 for a folder that has none, of ways that are not trained, or of matrices that the model
            does not have.
    """
    file = Path(folder) / CONFIG
    try:
        said = json.loads(file.read_text(encoding="utf-8"))
        rank, alpha, modules = said["r"], said["lora_alpha"], said["target_modules"] or []
        parameters = said.get("target_parameters") or []
        dropout = said.get("lora_dropout") or 0.0
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise _not_ours(f"{type(error).__name__}: {error}", folder) from None
    wrong = list(_no_numbers(rank, alpha, dropout, modules, parameters))
    if wrong:
        raise _not_ours(", ".join(wrong), folder)
    ways = [key for key in OTHER_WAYS if said.get(key)]
    ways += [f"bias={said['bias']}"] if said.get("bias", "none") != "none" else []
    ways += [f"peft_type={said.get('peft_type')}"] if said.get("peft_type") != "LORA" else []
    begun = said.get("init_lora_weights", True)
    ways += [f"init_lora_weights={begun}"] if not isinstance(begun, bool) and begun not in BASE_KEPT else []
    if ways:
        raise _not_ours(f"{', '.join(ways)} is not trained here", folder)
    known, experts = naming.modules(model), naming.expert_parameters(model)
    hit = {target for target, name in known.items() if any(f".{name}".endswith(f".{one}") for one in modules)}
    hit |= {target for target, name in experts.items() if any(f".{name}".endswith(f".{one}") for one in parameters)}
    strange = sorted(m for m in modules if not any(f".{name}".endswith(f".{m}") for name in known.values()))
    strange += sorted(m for m in parameters if not any(f".{name}".endswith(f".{m}") for name in experts.values()))
    if strange:
        there = ", ".join(dict.fromkeys([*known.values(), *experts.values()]))
        raise _not_ours(f"{model.name} has no {', '.join(strange)}: its matrices are {there}", folder)
    targets = tuple(target for target in LORA_TARGETS if target in hit)
    alpha = alpha * math.sqrt(rank) if said.get("use_rslora") else alpha
    return Lora(rank=rank, targets=targets, alpha=0.0 if alpha == rank else float(alpha), dropout=float(dropout))


def _no_numbers(rank: Any, alpha: Any, dropout: Any, modules: Any, parameters: Any) -> Iterator[str]:
    """Yield which values of a configuration are not what a workload's words could say."""
    if type(rank) is not int or not 1 <= rank <= 1e9:
        yield f"r={rank!r} is not a positive rank"
    if type(alpha) not in (int, float) or not 0 < alpha <= 1e6:
        yield f"lora_alpha={alpha!r} is not a number above 0 and up to 1e6"
    if type(dropout) not in (int, float) or not 0 <= dropout < 1:
        yield f"lora_dropout={dropout!r} is not a part of one below 1"
    named = [*modules, *parameters] if isinstance(modules, list) and isinstance(parameters, list) else []
    if not named or not all(isinstance(one, str) for one in named):
        yield "target_modules is not a list of names"


def load_adapter(
    folder: str | Path,
    pieces: Sequence[TensorPiece],
    model: Model,
    group: AxisGroup,
    digest: str,
    *,
    device: torch.device = CPU,
) -> None:
    """Fill the adapters among `pieces` from a folder of PEFT's; collective. `digest` is that of the weights of the
    base.

    Raises:
        MeshwrightError: on every rank alike: H006 unreadable; H007 with all tensors that are missing, misshapen or of
            no use; H009 for adapters of other weights.
    """
    pieces, wrong, sources = [p for p in pieces if p.key == PARAM], (), {}
    wanted = own_shapes(pieces, group, device)
    try:
        file = Path(folder) / TENSORS
        there = {name.removeprefix(PREFIX): source for name, source in open_weights(file).items()}
        there = apart(there, wanted)
        with safe_open(file, framework="pt") as opened:
            over = (opened.metadata() or {}).get(BASE, "")
        if digest and over and over != digest:
            raise _not_ours("it was trained over other weights than those of this base", folder)
        sources, wrong = matched(there, wanted, model, str(folder))
    except MeshwrightError as error:
        wrong = error.diagnostics
    agree(group, wrong, device)
    try:
        fill(pieces, {(PARAM, name): [source] for name, source in sources.items()})
    except (OSError, SafetensorError) as error:
        wrong = (Diagnostic(code="H006", message=f"cannot read adapters: {error}", place=str(folder)),)
    agree(group, wrong, device)


def load_base(path: str | Path, base: Base, model: Model, group: AxisGroup, *, device: torch.device = CPU) -> None:
    """Fill a frozen base from published weights; collective. Raises as :func:`load_adapter`."""
    pieces, wrong, sources = list(base.pieces()), (), {}
    wanted = own_shapes(pieces, group, device, base.shapes())
    try:
        sources, wrong = matched(open_weights(Path(path), wanted), wanted, model, str(path))
    except MeshwrightError as error:
        wrong = error.diagnostics
    agree(group, wrong, device)

    def published(part: Part) -> torch.Tensor:
        return assembled(sources[part.name], torch.float32).to(device)

    try:
        fill(pieces, {(PARAM, name): [source] for name, source in sources.items()})
        base.fill(published)
    except (OSError, SafetensorError) as error:
        wrong = (Diagnostic(code="H006", message=f"cannot read weights: {error}", place=str(path)),)
    agree(group, wrong, device)


def _not_ours(why: str, folder: str | Path) -> MeshwrightError:
    help = f"name a folder of PEFT's LoRA with {CONFIG} and {TENSORS}, and the weights it was trained over"
    return MeshwrightError.one(
        "H009", f"cannot go on from these adapters: {why}", place=f"--adapter {folder}", help=help
    )


# --- out -------------------------------------------------------------------------------------------------------------


def export(what: str, out: str, weights: str) -> Path:
    """Write what a run leaves beside its newest checkpoint in the folder `out`: ``ADAPTER`` or ``MERGED`` of
    :mod:`meshwright.run.job`, in a folder of that name, in the place of an older one.

    Raises as :func:`export_adapter`."""
    folder = Path(out) / what
    if what == MERGED:
        return export_merged(out, weights, folder, over=True)
    return export_adapter(out, folder, over=True)


def record_of(reader: CheckpointReader) -> AdapterRecord | None:
    """The record of a checkpoint of adapters; None for one of a whole model."""
    said = reader.index.meta.extra.get("adapter")
    return None if said is None else msgspec.convert(said, AdapterRecord)


def export_adapter(checkpoint: str | Path, folder: str | Path, *, over: bool = False) -> Path:
    """Write the adapters of a checkpoint as a folder of PEFT's, in this process alone; `over` one that is there.

    Raises:
        MeshwrightError: H001, H002, X007 for the checkpoint; H008 when the folder has something in it or cannot be
            written.
    """
    reader, folder = _whole(checkpoint), Path(folder)
    record = record_of(reader)
    lora = record.lora
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": record.base,
        "r": lora.rank,
        "lora_alpha": _number(lora.alpha or lora.rank),
        "lora_dropout": lora.dropout,
        "target_modules": list(record.modules),
        "bias": "none",
        "fan_in_fan_out": record.turned,
        "inference_mode": True,
        "init_lora_weights": True,
        "use_rslora": False,
        "use_dora": False,
    }
    config |= {"target_parameters": list(record.parameters)} if record.parameters else {}
    shapes, joined = reader.index.tensors, fused(reader.index.tensors)
    names = sorted(set(shapes) - {name for one in joined for name in one.parts})
    sizes = {name: shapes[name] for name in names} | {one.name: one.shape(shapes[one.parts[0]]) for one in joined}
    heads = [safetensors_file.TensorHeader(PREFIX + n, torch.float32, size) for n, size in sizes.items()]
    values = chain(
        (_tensor(reader, name) for name in names),
        (one.joined([_tensor(reader, name) for name in one.parts]) for one in joined),
    )
    with new_folder(folder, over=over) as temporary:
        known = {"format": "pt"} | ({BASE: record.digest} if record.digest else {})
        safetensors_file.write(temporary / TENSORS, heads, values, **known)
        safetensors_file.write_file(temporary / CONFIG, json.dumps(config, indent=2).encode())
    return folder


def export_merged(checkpoint: str | Path, weights: str | Path, folder: str | Path, *, over: bool = False) -> Path:
    """Write published weights with a checkpoint's adapters added to them, in this process alone and one tensor at a
    time. Matrices that were stored quantised are those that they stood for while adapters were trained.

    Raises:
        MeshwrightError: as :func:`export_adapter`, and H006 for the weights.
    """
    reader, folder = _whole(checkpoint), Path(folder)
    record, there = record_of(reader), open_weights(Path(weights))
    how = FORMATS.get(record.stored)

    def value(head: safetensors_file.TensorHeader) -> torch.Tensor:
        name = head.name.removesuffix(".weight")
        factors = [f"{name}.lora_{side}.weight" for side in "AB"]
        stored = name.rpartition(".")[2] in record.matrices and len(head.shape) == 2
        of_expert = added_to(name, lambda one: _tensor(reader, one) if one in reader.index.tensors else None)
        if not stored and factors[0] not in reader.index.tensors and of_expert is None:
            return assembled(there[head.name], head.dtype)
        made = assembled(there[head.name], torch.float32)
        if of_expert is not None:
            return (made + record.lora.scale * of_expert).to(head.dtype)
        if stored:
            made = quantised(made, how).restored(how, torch.float32)
        if factors[0] in reader.index.tensors:
            a, b = (_tensor(reader, one) for one in factors)
            added = record.lora.scale * (b @ a)
            made = made + (added.T if record.turned else added)
        return made.to(head.dtype)

    types = {name: source.values().dtype for name, source in there.items()}
    heads = [safetensors_file.TensorHeader(n, types[n], tuple(there[n].block.shape)) for n in sorted(there)]
    with new_folder(folder, over=over) as temporary:
        write_tensors(temporary, heads, value)
        beside = Path(weights)
        for file in (f for pattern in BESIDE for f in beside.glob(pattern) if beside.is_dir()):
            if not file.name.endswith(".index.json"):
                shutil.copyfile(file, temporary / file.name)
    return folder


def _number(value: float) -> int | float:
    return int(value) if float(value).is_integer() else value


def _whole(checkpoint: str | Path) -> CheckpointReader:
    """A checkpoint of adapters, none of whose bytes is damaged."""
    reader = CheckpointReader(find(checkpoint))
    parameters = tuple(entry for entry in reader.index.entries if entry.state == PARAM)
    reader.index = msgspec.structs.replace(reader.index, entries=parameters)
    wrong = reader.wrong()
    if wrong:
        raise MeshwrightError(wrong)
    return reader


def _tensor(reader: CheckpointReader, name: str) -> torch.Tensor:
    """One adapter's factor, put together, fp32."""
    shape = reader.index.tensors[name]
    made = torch.empty(shape)
    part = Part(name, shape, (0,) * len(shape), (slice(None),) * len(shape))
    piece = TensorPiece(PARAM, Parameter(name, shape, (part,)), 0, made.numel(), made.view(-1), True)
    fill([piece], reader.sources)
    return made
