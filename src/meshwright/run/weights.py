"""Weights as the Hugging Face hub has them, in and out: one safetensors file, or several with an index.

Reading maps the files and copies only what this process holds. Writing goes through a checkpoint, which needs no
process to hold a whole tensor: what all have written is then put together tensor by tensor.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from meshwright.errors import Diagnostic, MeshwrightError
from meshwright.run import safetensors_file
from meshwright.run.agree import CPU, agree, share
from meshwright.run.blocks import whole
from meshwright.run.checkpoint.format import Index, Meta, find, identity
from meshwright.run.checkpoint.loading import CheckpointReader, Source, fill, some
from meshwright.run.checkpoint.saving import save
from meshwright.run.companions import CONFIG, NONE, Companions
from meshwright.run.mesh import AxisGroup
from meshwright.run.new_folder import new_folder, refuse
from meshwright.run.pieces import FROZEN, PARAM, Parameter, Part, TensorPiece, job_state
from meshwright.spec.architecture import Model
from meshwright.spec.encoded import COMPONENT, is_encoded
from meshwright.spec.model import published
from meshwright.sync.merged import ALL_TASKS
from meshwright.sync.taught import TAUGHT

#: The file by which torch's distributed checkpoints are known.
DISTRIBUTED = ".metadata"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
#: Bytes of one file of several, as the hub's own writers have it.
SHARD_BYTES = 5_000_000_000
#: What published files also hold and no model here does: tables that are computed, masks, counts.
_COMPUTED = re.compile(
    r"(.*\.)?(rotary_emb\.inv_freq|attn\.(masked_)?bias|attention\.(masked_)?bias|position_ids|num_batches_tracked|pos_embed|temp_embed)"
)

_ENCODER = (
    f"add encoder.* and quant_conv.* of the autoencoder's own file to them, each with {COMPONENT} before its name; or "
    "train the transformer alone, on latents"
)


def load_weights(
    path: str | Path, pieces: Sequence[TensorPiece], model: Model, group: AxisGroup, *, device=CPU, partly=False
) -> None:
    """Fill the parameters among `pieces` from published weights; collective. Where the group has the model `partly`,
    others have what it leaves.

    Values are converted to the pieces' types. A head that is tied to the embedding may be in the files or not.

    Raises:
        MeshwrightError: on every rank alike, before any piece has changed: H006 no or unreadable weights; H007 with
            all tensors that are missing, misshapen or of no use.
    """
    pieces = [p for p in pieces if p.key == "param"]
    wanted = own_shapes(pieces, group, device)
    wrong: Sequence[Diagnostic] = ()
    sources = {}
    try:
        sources, wrong = matched(open_weights(Path(path), wanted), wanted, model, str(path), partly=partly)
    except MeshwrightError as error:
        wrong = error.diagnostics
    agree(group, wrong, device)
    try:
        fill(pieces, {("param", name): [source] for name, source in sources.items()})
    except MeshwrightError as error:
        wrong = error.diagnostics
    except (OSError, SafetensorError) as error:
        wrong = (Diagnostic(code="H006", message=f"cannot read weights: {error}", place=str(path)),)
    agree(group, wrong, device)


def own_shapes(
    pieces: Sequence[TensorPiece],
    group: AxisGroup,
    device: torch.device = CPU,
    more: Mapping[str, tuple[int, ...]] | None = None,
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the published tensors that pieces of any rank are of, and `more` that it needs;
    collective."""
    mine = {part.name: tuple(part.shape) for piece in pieces for part in piece.parameter.parts} | dict(more or {})
    wanted: dict[str, tuple[int, ...]] = {}
    for data in share(group, msgspec.json.encode(mine), device):
        wanted |= msgspec.json.decode(data, type=dict[str, tuple[int, ...]])
    return wanted


def assembled(source: Source, dtype: torch.dtype) -> torch.Tensor:
    """A whole tensor of the files, of a type."""
    return source.values().to(dtype).view(tuple(source.block.shape))


def digest(path: str | Path) -> str:
    """Return a hash of published weights: of the sizes of their files and the first and last mebibyte of each, which
    tells one set from another without all of it being read.

    Raises:
        MeshwrightError: H006 when there are none.
    """
    whole, part = hashlib.sha256(), 1 << 20
    try:
        for name in files_of(Path(path)):
            with name.open("rb") as file:
                size = file.seek(0, 2)
                file.seek(0)
                whole.update(f"{size} ".encode() + file.read(part))
                file.seek(max(0, size - part))
                whole.update(file.read(part))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _unreadable(Path(path), error) from None
    return whole.hexdigest()[:32]


def files_of(path: Path) -> list[Path]:
    """The files that published weights are in.

    Raises:
        OSError, ValueError, KeyError: there are none, or their index is none.
    """
    if path.is_file():
        return [path]
    if (path / DISTRIBUTED).is_file():
        return [path / DISTRIBUTED, *sorted(path.glob("*.distcp"))]
    if (path / INDEX).is_file():
        listed = json.loads((path / INDEX).read_text(encoding="utf-8"))["weight_map"]
        return [path / _inside(name) for name in sorted(set(listed.values()))]
    return [path / SINGLE]


def open_weights(path: Path, wanted: Iterable[str] = ()) -> dict[str, Source]:
    """Every tensor of a file or folder of weights, or of torch's distributed checkpoint: its name, shape, and how to
    get its values. `wanted`: the names by which a distributed checkpoint's keys are understood.

    Raises:
        MeshwrightError: H006 when there are none, or they cannot be read; H010 for a distributed checkpoint.
    """
    if (path / DISTRIBUTED).is_file():
        from meshwright.run.checkpoint.dcp import DistributedReader

        saved = DistributedReader(path, wanted)
        return {name: saved.source(name) for name in saved.names()}
    try:
        found = {}
        for file in files_of(path):
            opened = safe_open(file, framework="pt")
            for name in opened.keys():  # noqa: SIM118  (not a mapping)
                block = whole(name, opened.get_slice(name).get_shape())
                found[name] = Source(block, partial(_flat, opened, name))
        return found
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: Exception) -> MeshwrightError:
    return MeshwrightError.one(
        "H006",
        f"cannot read weights: {type(error).__name__}: {error}",
        place=str(path),
        help=f"name a .safetensors file, a folder with {SINGLE} or {INDEX}, or one of torch.distributed.checkpoint",
    )


def _inside(name: str) -> str:
    if Path(name).name != name:
        raise ValueError(f"{name!r} is not a file of the folder")
    return name


def _flat(opened: Any, name: str) -> torch.Tensor:
    return opened.get_tensor(name).reshape(-1)


def matched(
    there: Mapping[str, Source],
    wanted: Mapping[str, tuple[int, ...]],
    model: Model,
    place: str,
    *,
    partly: bool = False,
) -> tuple[dict[str, Source], list[Diagnostic]]:
    """The source of every tensor that is wanted, and H007 when they do not fit; `partly`: others may be left."""
    names = {name: _name_there(name, there) for name in wanted}
    lost = sorted(name for name, found in names.items() if found is None)
    bent = [
        f"{name} is {list(there[found].block.shape)} there and {list(wanted[name])} here"
        for name, found in sorted(names.items())
        if found is not None and there[found].block.shape != wanted[name]
    ]
    used = set(names.values())
    spare = [] if partly else [name for name in there if name not in used and not _COMPUTED.fullmatch(name)]
    idle = sorted(name for name in spare if not (model.tied_embeddings and _is_head(name)))
    alone = is_encoded(model) and all(name.startswith(COMPONENT) for name in lost)
    wrong = [
        Diagnostic(code="H007", message=f"{what}: {', '.join(some(found))}", place=place, help=help)
        for what, found, help in (
            (f"{len(lost)} tensors are missing from the weights", lost, _ENCODER if alone else ""),
            (f"{len(bent)} tensors have another shape", bent, ""),
            (f"{len(idle)} tensors are of no use to {model.name}", idle, ""),
        )
        if found
    ]
    if wrong:
        return {}, wrong
    return {name: there[found]._replace(block=whole(name, wanted[name])) for name, found in names.items()}, []


#: Names under which files hold a table once more that is tied to another.
_TIED = (
    *("lm_head.weight", "embed_out.weight", "cls.predictions.decoder.weight", "cls.predictions.decoder.bias"),
    *("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"),
)


def _is_head(name: str) -> bool:
    return name.endswith(_TIED)


def _name_there(name: str, there: Mapping[str, Source]) -> str | None:
    """Return a tensor's name in the files, None if absent: weights of a model without its head leave out the first
    word."""
    return next((said for said in (name, name.split(".", 1)[-1]) if said in there), None)


def export_weights(
    checkpoint: str | Path,
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    companions: Companions = NONE,
    shard_bytes: int = SHARD_BYTES,
    head: int = 0,
    replica: int = 0,
) -> Path:
    """Write the parameters of a checkpoint as published weights, in this process alone and one tensor at a time. What
    else is in the checkpoint is not looked at, nor are heads that no published model has.

    `dtype`: the type to convert to, None = as they are. `companions`: its configuration and tokenizer, which are
    written beside them.
    `head`: which of the heads that neighbours have taught (1 is the first) is written as the model's, 0 its own.
    `replica`: whose parameters are written where replicas have models of their own, 0 the first.

    Returns:
        The folder, which is new and appears when it is complete.

    Raises:
        MeshwrightError: H001, H002, X007 for the checkpoint; L005 for a head or a replica that it has not; H008
            when the folder has something in it or cannot be written.
    """
    reader, folder = CheckpointReader(find(checkpoint)), Path(folder)
    refuse(folder)
    reader.index = _published(reader.index, head, replica)
    wrong = reader.wrong()
    if wrong:
        raise MeshwrightError(wrong)
    with new_folder(folder) as temporary:
        _write(reader, temporary, dtype, shard_bytes)
        companions.copy(temporary)
        if companions.config is not None:
            write_config(temporary, companions.config, _type_name(reader, dtype))
    return folder


def _published(index: Index, head: int, replica: int = 0) -> Index:
    """The parameters of an index that a published model has, with a taught `head` as the model's where one is asked
    for, and those of a `replica`."""
    prefix, further = f"{TAUGHT}{head - 1}.", sorted(name for name in index.tensors if name.startswith(TAUGHT))
    chosen = [name for name in further if name.startswith(prefix)] if head else []
    own = chosen[0].removeprefix(prefix) if chosen else ""
    if head and own not in index.tensors:
        why = "whose own head is its embedding's table" if own else f"which has {len(further)} heads besides its own"
        message = f"--head {head} of a model {why}"
        raise MeshwrightError.one("L005", message, place="meshwright weights", help="leave --head out")
    left = {*further, own} - {*chosen}
    gone = {i for i, one in enumerate(index.layouts) if any(part.name in left for part in one.parts)}
    layouts = [
        msgspec.structs.replace(
            one, parts=tuple(msgspec.structs.replace(p, name=own) if p.name in chosen else p for p in one.parts)
        )
        if i not in gone
        else one
        for i, one in enumerate(index.layouts)
    ]
    state = f"{PARAM}@{replica}" if replica else _state_of(index.meta, head)
    if replica and all(one.state != state for one in index.entries):
        count = sum(one.startswith(f"{PARAM}@") for one in {one.state for one in index.entries})
        what = f"of {count + 1} replicas, from 0 on" if count else "whose replicas hold the same"
        help = f"a number up to {count}" if count else "leave --replica out"
        message = f"--replica {replica} of a checkpoint {what}"
        raise MeshwrightError.one("L005", message, place="meshwright weights", help=help)
    entries = (one for one in index.entries if one.state in (state, FROZEN) and one.layout not in gone)
    mine = tuple(msgspec.structs.replace(one, state=PARAM) for one in entries)
    return msgspec.structs.replace(index, layouts=tuple(layouts), entries=mine)


def _state_of(meta: Meta, head: int) -> str:
    """Return what the parameters that a head goes with are called: of several jobs those of its own."""
    begun = meta.extra.get("clients", {}).get("server", {}).get("tasks", {})
    if not (begun and head):
        return PARAM
    return job_state(next((int(job) for job, tasks in begun.items() if head in tasks), ALL_TASKS))


def save_weights(
    folder: str | Path,
    pieces: Sequence[TensorPiece],
    model: Model,
    group: AxisGroup,
    *,
    device: torch.device = CPU,
    dtype: torch.dtype | None = None,
    config: Mapping[str, Any] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write the live parameters as published weights: a checkpoint beside `folder`, turned into weights by the first
    rank and removed; collective. Returns and raises as :func:`export_weights`, on every rank alike."""
    folder = Path(folder)
    beside = folder.parent / f".{folder.name}.checkpoint"
    meta = Meta(step=0, seed=0, model=model.name, model_hash=identity(model), plan="", world=group.size)
    wrong: Sequence[Diagnostic] = ()
    try:
        made = save(beside, [p for p in pieces if p.key == "param"], meta, group, device=device)
        if group.index == 0:
            try:
                export_weights(made, folder, dtype=dtype, companions=Companions(config), shard_bytes=shard_bytes)
            except MeshwrightError as error:
                wrong = error.diagnostics
        agree(group, wrong, device)
    finally:
        if group.index == 0:
            shutil.rmtree(beside, ignore_errors=True)
    return folder


def write_config(folder: Path, config: Mapping[str, Any], dtype: str) -> None:
    """Write a model's ``config.json`` beside its weights, which are of that type."""
    said = {key: value for key, value in published(config).items() if key != "torch_dtype"}
    safetensors_file.write_file(folder / CONFIG, json.dumps(said | {"dtype": dtype}, indent=2).encode())


def _types(reader: CheckpointReader, dtype: torch.dtype | None) -> dict[str, torch.dtype]:
    """The type that every tensor is going to have."""
    found = {}
    for entry in reader.index.entries:
        if entry.state == "param":
            for part in reader.index.layouts[entry.layout].parts:
                found[part.name] = dtype or safetensors_file.DTYPES[entry.dtype]
    return found


def _type_name(reader: CheckpointReader, dtype: torch.dtype | None) -> str:
    """The type of most tensors, as configurations name it."""
    types = list(_types(reader, dtype).values())
    return str(max(types, key=types.count)).removeprefix("torch.")


def _write(reader: CheckpointReader, folder: Path, dtype: torch.dtype | None, shard_bytes: int) -> None:
    types = _types(reader, dtype)
    known = sorted((n, s) for n, s in reader.index.tensors.items() if n in types)  # others are no parameters
    heads = [safetensors_file.TensorHeader(n, types[n], s) for n, s in known]
    write_tensors(folder, heads, partial(_assemble, reader), shard_bytes)


def write_tensors(
    folder: Path,
    heads: Sequence[safetensors_file.TensorHeader],
    value: Callable[[safetensors_file.TensorHeader], torch.Tensor],
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write tensors as published weights, each with its `value` when its turn comes: one file, or several with an
    index."""
    shards = list(_shards(heads, shard_bytes))
    names = [SINGLE] if len(shards) == 1 else [_shard_name(i, len(shards)) for i in range(len(shards))]
    for name, shard in zip(names, shards):
        shard = sorted(shard, key=lambda head: -head.dtype.itemsize)
        safetensors_file.write(folder / name, shard, map(value, shard), format="pt")
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(head.num_bytes for head in heads)},
            "weight_map": {head.name: name for name, shard in zip(names, shards) for head in shard},
        }
        safetensors_file.write_file(folder / INDEX, json.dumps(index, indent=2).encode())


def _shard_name(number: int, total: int) -> str:
    return f"model-{number + 1:05d}-of-{total:05d}.safetensors"


def _shards(
    heads: Sequence[safetensors_file.TensorHeader], limit: int
) -> Iterator[list[safetensors_file.TensorHeader]]:
    """Tensors cut into runs of at most `limit` bytes; one that is larger is alone."""
    run: list[safetensors_file.TensorHeader] = []
    for head in heads:
        if run and sum(h.num_bytes for h in run) + head.num_bytes > limit:
            yield run
            run = []
        run.append(head)
    yield run


def _assemble(reader: CheckpointReader, head: safetensors_file.TensorHeader) -> torch.Tensor:
    """One published tensor, put together."""
    made = torch.empty(head.shape, dtype=head.dtype)
    part = Part(head.name, head.shape, (0,) * len(head.shape), (slice(None),) * len(head.shape))
    parameter = Parameter(head.name, head.shape, (part,))
    fill([TensorPiece("param", parameter, 0, made.numel(), made.view(-1), True)], reader.sources)
    return made
