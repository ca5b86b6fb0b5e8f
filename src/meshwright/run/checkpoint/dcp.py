"""Checkpoints in and out of torch's distributed format (``torch.distributed.checkpoint``).

Written, a checkpoint is what torch's ``get_state_dict`` makes of a published model and its AdamW: parameters under
``model.NAME``, moments and step under ``optim.state.NAME.exp_avg``, ``.exp_avg_sq`` and ``.step``, by torch's own
writer and one tensor at a time. Read, keys may have any prefix before the published names, one for parameters and one
for moments; they are cut in whatever way, and each block is read when it is needed.
"""

from __future__ import annotations

import io
import secrets
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.distributed import checkpoint as torch_checkpoint
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from meshwright.errors import MeshwrightError
from meshwright.run.blocks import TensorBox, cover, whole
from meshwright.run.checkpoint.commit import commit
from meshwright.run.checkpoint.dcp_metadata import StoredBlock, StoredTensor, read_tensors, refused
from meshwright.run.checkpoint.format import HIDDEN, Meta
from meshwright.run.checkpoint.loading import CheckpointReader, Source, fill, some
from meshwright.run.checkpoint.write import shapes, write_rank
from meshwright.run.pieces import FROZEN, Parameter, Part, TensorPiece
from meshwright.run.safetensors_file import DTYPES

#: States of AdamW beside the parameter, as both formats name them.
MOMENTS = ("exp_avg", "exp_avg_sq")
#: Bytes of values that are written at once where a distributed checkpoint becomes one of meshwright's.
AT_ONCE = 2_000_000_000


# -- reading


class DistributedReader:
    """The tensors of a distributed checkpoint by published name, for parameters (``param``) and moments.

    Raises:
        MeshwrightError: H010 for metadata that is not read, or that has none of the names.
    """

    def __init__(self, folder: str | Path, names: Iterable[str]):
        self.folder, self.there = Path(folder), read_tensors(folder)
        names = sorted(names)
        self._chunk = lru_cache(maxsize=4)(self._read)
        self.prefix = self._best([key for key in self.there if not key.endswith(MOMENTS)], names, "")
        if self.prefix is None:
            keys = ", ".join(some(sorted(self.there))) or "no tensor"
            raise refused(self.folder, f"none of its keys is that of a tensor of the model: {keys}")
        self.moments = self._best(self.there, names, f".{MOMENTS[0]}")

    def _best(self, keys: Iterable[str], names: list[str], suffix: str) -> str | None:
        """The prefix under which most of the names are there; None where none is."""
        asked, counts = {f"{name}{suffix}" for name in names}, Counter()
        for key in keys:
            ends = [0, *(i + 1 for i, letter in enumerate(key) if letter == ".")]
            counts.update(key[:end] for end in ends if key[end:] in asked)
        return max(sorted(counts), key=counts.__getitem__, default=None)

    def key(self, state: str, name: str) -> str:
        """The key of a published tensor's state."""
        return f"{self.prefix}{name}" if state == "param" else f"{self.moments or ''}{name}.{state}"

    def names(self) -> list[str]:
        """The names under the parameters' prefix, published or not."""
        return [
            key.removeprefix(self.prefix)
            for key in self.there
            if key.startswith(self.prefix)
            and not (self.moments is not None and key.startswith(self.moments) and key.endswith((*MOMENTS, ".step")))
        ]

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a parameter."""
        return self.there[self.key("param", name)].shape

    def sources(self, state: str, name: str) -> list[Source]:
        """The blocks of a published tensor's state; none where it is not there."""
        saved = self.there.get(self.key(state, name))
        return (
            [] if saved is None else [Source(_box(name, saved, one), partial(self._chunk, one)) for one in saved.chunks]
        )

    def source(self, name: str) -> Source:
        """A parameter, as one block that is put together when it is asked for."""
        shape = self.shape(name)
        return Source(whole(name, shape), partial(self._together, name, shape))

    def _together(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return _filled(self, "param", name, shape).values

    def step(self, names: Iterable[str]) -> int:
        """The most steps that any parameter's optimizer says it has done; 0 where none says."""
        found = [0]
        for name in names:
            saved = self.there.get(self.key("step", name))
            if saved is not None and saved.shape == () and saved.chunks:
                found.append(int(self._read(saved.chunks[0]).item()))
        return max(found)

    def _read(self, chunk: StoredBlock) -> torch.Tensor:
        """The values of a block, flat.

        Raises:
            MeshwrightError: H010 when they cannot be read, or are not what the metadata says.
        """
        where = f"{chunk.file} at byte {chunk.start}"
        try:
            with (self.folder / chunk.file).open("rb") as file:
                file.seek(chunk.start)
                data = file.read(chunk.length)
            values = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as error:  # cut short, or not a tensor: it can be wrong in any way
            why = error.strerror if isinstance(error, OSError) else f"holds no tensor ({type(error).__name__})"
            raise refused(self.folder, f"{where}: {why}") from None
        if not isinstance(values, torch.Tensor) or tuple(values.shape) != chunk.size:
            raise refused(self.folder, f"{where} holds another tensor than its metadata says")
        return values.reshape(-1)


def _box(name: str, saved: StoredTensor, chunk: StoredBlock) -> TensorBox:
    inside = whole(name, chunk.size)
    return inside._replace(shape=saved.shape, low=chunk.offset)


def into_checkpoint(
    folder: str | Path,
    root: str | Path,
    parameters: Mapping[str, tuple[int, ...]],
    meta: Callable[[int], Meta],
    frozen: Collection[str] = (),
) -> Path:
    """Turn a distributed checkpoint with AdamW's moments into one of meshwright's in the folder `root`, a part of it at
    a time. `parameters`: the shape of every published tensor; `meta` of the steps that are done; `frozen`: the tensors
    that are not trained and have no moments.

    Returns:
        The checkpoint's folder.

    Raises:
        MeshwrightError: H010 when something is missing or has another shape; H008 when it cannot be written.
    """
    reader, root = DistributedReader(folder, parameters), Path(root)
    wrong = []
    for name, shape in sorted(parameters.items()):
        for state in _states(name, frozen):
            saved = reader.there.get(reader.key(state, name))
            if saved is None:
                wrong.append(f"no {state} of {name}")
            elif saved.shape != tuple(shape):
                wrong.append(f"{state} of {name} is {list(saved.shape)} there and {list(shape)} here")
            elif what := cover(shape, [s.block for s in reader.sources(state, name)]):
                wrong.append(f"{state} of {name}: {what}")
    if wrong:
        help = "begin with its parameters alone: meshwright run --weights FOLDER" if reader.moments is None else ""
        raise refused(reader.folder, "; ".join(some(wrong)), help)
    temporary = root / f"{HIDDEN}{secrets.token_hex(4)}.part"
    try:
        root.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        runs = list(_runs(reader, parameters, frozen))
        for number, run in enumerate(runs):
            pieces = [_filled(reader, state, name, parameters[name]) for state, name in run]
            pieces = [p._replace(key=FROZEN) if p.parameter.name in frozen else p for p in pieces]
            write_rank(temporary, number, [(p, p.values) for p in pieces], shapes(pieces))
        return commit(root, temporary, meta(reader.step(parameters)), len(runs), keep=1 << 30)
    except OSError as error:
        raise _unwritten(root, error) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _states(name: str, frozen: Collection[str]) -> tuple[str, ...]:
    return ("param",) if name in frozen else ("param", *MOMENTS)


def _runs(
    reader: DistributedReader, parameters: Mapping[str, tuple[int, ...]], frozen: Collection[str]
) -> Iterator[list[tuple[str, str]]]:
    """States and names, as many at a time as :data:`AT_ONCE` has room for."""
    run, size = [], 0
    for name, shape in sorted(parameters.items()):
        for state in _states(name, frozen):
            count = torch.Size(shape).numel() * reader.there[reader.key(state, name)].dtype.itemsize
            if run and size + count > AT_ONCE:
                yield run
                run, size = [], 0
            run.append((state, name))
            size += count
    yield run


def _filled(reader: DistributedReader, state: str, name: str, shape: tuple[int, ...]) -> TensorPiece:
    values = torch.empty(torch.Size(shape).numel(), dtype=reader.there[reader.key(state, name)].dtype)
    part = Part(name, tuple(shape), (0,) * len(shape), (slice(None),) * len(shape))
    piece = TensorPiece(state, Parameter(name, tuple(shape), (part,)), 0, len(values), values, True)
    fill([piece], {(state, name): reader.sources(state, name)})
    return piece


# -- writing


class _OneByOne(DefaultSavePlanner):
    """Torch's planner, which asks for each tensor's values when they are to be written."""

    def __init__(self, made: Mapping[str, Callable[[], torch.Tensor]]):
        super().__init__()
        self.made = made

    def lookup_object(self, index: Any) -> Any:
        """The value of a key."""
        return self.made[index.fqn]() if index.fqn in self.made else super().lookup_object(index)


def export_distributed(reader: CheckpointReader, folder: str | Path, *, dtype: torch.dtype | None = None) -> Path:
    """Write a checkpoint's parameters, and AdamW's moments where it has them, as torch's distributed checkpoint; one
    tensor is held at a time. `dtype` of the parameters: as they are if None.

    Returns:
        The folder, which is new and appears when it is complete.

    Raises:
        MeshwrightError: H002 for a damaged checkpoint, H008 when it cannot be written.
    """
    folder = Path(folder)
    entries = (msgspec.structs.replace(e, state="param") if e.state == FROZEN else e for e in reader.index.entries)
    kept = tuple(e for e in entries if e.state in ("param", *MOMENTS))
    reader.index = msgspec.structs.replace(reader.index, entries=kept)
    wrong = reader.wrong()
    if wrong:
        raise MeshwrightError(wrong)
    state_dict, made = _planned(reader, dtype)
    temporary = folder.parent / f".{folder.name}.{secrets.token_hex(4)}.part"
    try:
        temporary.mkdir(parents=True)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is meant
            torch_checkpoint.save(
                state_dict,
                storage_writer=FileSystemWriter(temporary, single_file_per_rank=True),
                planner=_OneByOne(made),
                no_dist=True,
            )
        temporary.rename(folder)  # onto nothing or an empty folder
    except CheckpointException as error:
        causes = [cause for cause, _ in error.failures.values() if isinstance(cause, OSError)]
        raise _unwritten(folder, causes[0] if causes else OSError(str(error))) from None
    except (OSError, RuntimeError) as error:  # torch's own writer of files says RuntimeError for a full disk
        raise _unwritten(folder, error) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _planned(
    reader: CheckpointReader, dtype: torch.dtype | None
) -> tuple[dict[str, Any], dict[str, Callable[[], torch.Tensor]]]:
    """The state dict of tensors without values, and how to get the values of each key."""
    types = {(e.state, name): e.dtype for e in reader.index.entries for name in _names(reader, e.layout)}
    model, state, made = {}, {}, {}
    for name, shape in sorted(reader.index.tensors.items()):
        if ("param", name) not in types:
            continue
        kind = dtype or DTYPES[types["param", name]]
        model[name] = torch.empty(shape, dtype=kind, device="meta")
        made[f"model.{name}"] = partial(_assembled, reader, "param", name, tuple(shape), kind)
        for moment in MOMENTS:
            if (moment, name) in types:
                kind = DTYPES[types[moment, name]]
                state.setdefault(name, {})[moment] = torch.empty(shape, dtype=kind, device="meta")
                made[f"optim.state.{name}.{moment}"] = partial(_assembled, reader, moment, name, tuple(shape), kind)
        if name in state:
            state[name]["step"] = torch.tensor(float(reader.index.meta.step))
    return {"model": model} | ({"optim": {"state": state}} if state else {}), made


def _names(reader: CheckpointReader, layout: int) -> list[str]:
    return [part.name for part in reader.index.layouts[layout].parts]


def _assembled(
    reader: CheckpointReader, state: str, name: str, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    made = torch.empty(shape, dtype=dtype)
    part = Part(name, shape, (0,) * len(shape), (slice(None),) * len(shape))
    fill([TensorPiece(state, Parameter(name, shape, (part,)), 0, made.numel(), made.view(-1), True)], reader.sources)
    return made


def _unwritten(folder: Path, error: Exception) -> MeshwrightError:
    why = (error.strerror if isinstance(error, OSError) else "") or str(error)
    return MeshwrightError.one(
        "H008", f"cannot write a checkpoint: {why}", place=str(folder), help="free some space, or name another folder"
    )
