"""``meshwright weights``: a checkpoint of a run as published weights or as torch's distributed checkpoint, and back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from meshwright.cli import options
from meshwright.cli.guard import ended_in_order
from meshwright.cli.needs import lacking
from meshwright.cli.output import note, print_json
from meshwright.errors import Diagnostic, MeshwrightError, nearest

DESCRIPTION = """Turn a checkpoint of meshwright run into published weights: safetensors files with the names and shapes
of Hugging Face, which transformers, vLLM and others load, and which meshwright run --weights begins with; or, with
--format dcp, into the format of torch.distributed.checkpoint, with AdamW's moments.

The model's config.json and its tokenizer go with published weights where they are found: beside the checkpoint, in the
folders of --weights and --tokenizer that the run was begun with, or where it read its model from. --model says where
else: a catalog name, for the config.json alone, or the folder of a published model.

CHECKPOINT may be a folder that torch.distributed.checkpoint wrote, too: of its parameters --model makes published
weights, or, with --format checkpoint and AdamW's moments in it, a checkpoint that meshwright run --resume goes on from
under any plan. Nothing that is pickled in it is run.

Of a run of adapters (phase=lora) the checkpoint has these alone: they become a folder that PEFT loads, or with --format
dcp tensors of their own, without the base. Weights with adapters added are written by the run itself: --export merged.

One process does it, a tensor at a time; the plan and the number of processes that trained do not matter.

Exit code 0: written; 2: the question is wrong, or the checkpoint is not whole; 130: ended by Ctrl-C or SIGTERM, which
leaves nothing behind."""
COMMAND = "weights"
DTYPES = ("fp32", "bf16", "fp16")
FORMATS = ("hub", "dcp", "checkpoint")
WANTED = {
    "checkpoint": "CHECKPOINT, a folder that run wrote into --out, or torch.distributed.checkpoint",
    "to": "--to FOLDER, a new folder",
}
FORMAT_VERSION = 1


class WeightsOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of ``meshwright weights``."""

    checkpoint: options.positional("CHECKPOINT", "A folder step-..., or a run's --out for its newest checkpoint.") = ""
    to: options.text("FOLDER", "Write model.safetensors there; a new folder.") = ""
    format: options.text("KIND", "hub, dcp (torch.distributed.checkpoint) or checkpoint; hub if left out.") = "hub"
    model: options.text("MODEL", "Take config.json, and a tokenizer, from there: a catalog name or a folder.") = ""
    dtype: options.text("TYPE", f"Convert to {', '.join(DTYPES)}; as they were trained if left out.") = ""
    head: options.text("NUMBER", "After sync=mhd or mas: which further head to write as the model's, 1 the first.") = ""
    replica: options.text("NUMBER", "After sync=ddm or dipaco: whose model to write, 0 the first; 0 if left out.") = ""
    json: options.JSON = False


def run(argv: list[str]) -> int:
    """0 when the weights are there."""
    given, wrong = options.read(WeightsOptions, argv, command=COMMAND, description=DESCRIPTION)
    wrong += options.missing({field: getattr(given, field) for field in WANTED}, WANTED, command=COMMAND)
    if given.dtype and given.dtype not in DTYPES:
        wrong.append(
            Diagnostic(
                code="L005",
                message=f"--dtype {given.dtype} cannot be",
                place="meshwright weights",
                help=nearest(given.dtype, list(DTYPES)),
            )
        )
    if given.format not in ("", *FORMATS):  # "" where the options themselves could not be read
        message, help = f"--format {given.format} cannot be", nearest(given.format, list(FORMATS))
        wrong.append(Diagnostic(code="L005", message=message, place="meshwright weights", help=help))
    wrong += _contradictions(given)
    wrong += lacking(COMMAND, "torch", "safetensors")
    config = _config(given.model, wrong)
    if wrong:
        raise MeshwrightError(wrong)
    with ended_in_order():
        made, source, apart = _foreign(given, config) if _is_distributed(given) else _own(given, config)
    files = {str(file.relative_to(made)): file.stat().st_size for file in sorted(made.rglob("*")) if file.is_file()}
    bare = "model.safetensors" in " ".join(files) and "config.json" not in files
    if given.json:
        said = {"format_version": FORMAT_VERSION, "checkpoint": str(source), "folder": str(made), "files": files}
        print_json(said | ({"note": apart.lstrip(":, ")} if apart else {}))
        return 0
    note(f"read {source}{apart}")
    print(f"wrote {made}: {', '.join(f'{name} ({size / 1e6:,.1f} MB)' for name, size in files.items())}")
    if bare:
        note("no config.json, which transformers and meshwright run on this folder need: --model MODEL writes it")
    return 0


def _is_distributed(given: WeightsOptions) -> bool:
    """Whether torch.distributed.checkpoint wrote the checkpoint."""
    try:
        return (Path(given.checkpoint) / ".metadata").is_file()
    except (OSError, ValueError):  # a name too long, or with a null byte
        return False


def _contradictions(given: WeightsOptions) -> list[Diagnostic]:
    """Options that do not go with what the checkpoint is."""
    place, distributed = "meshwright weights", _is_distributed(given)
    found = []

    def refuse(code: str, message: str, help: str) -> None:
        found.append(Diagnostic(code=code, message=message, place=place, help=help))

    if distributed and not _model(given):
        refuse("X004", "--model is missing", "torch's checkpoint does not say of which model it is: name it")
    if distributed and given.format == "dcp":
        refuse("L005", "--format dcp of a folder that has it already", "say hub or checkpoint")
    if given.checkpoint and not distributed and given.format == "checkpoint":
        refuse("L005", "--format checkpoint of what is one already", "say hub or dcp")
    if given.head and (distributed or given.format != "hub"):
        refuse("L005", "--head of other than a run's published weights", "leave --head out")
    elif given.head and not (given.head.isascii() and given.head.isdecimal() and 0 < int(given.head[:9]) < 10**8):
        refuse("L005", f"--head {given.head} cannot be", "a number such as 2: the second head besides the model's own")
    if given.replica and (distributed or given.format != "hub"):
        refuse("L005", "--replica of other than a run's published weights", "leave --replica out")
    elif given.replica and not (given.replica.isascii() and given.replica.isdecimal() and len(given.replica) < 9):
        refuse("L005", f"--replica {given.replica} cannot be", "a number such as 1: the second of them")
    if given.format == "checkpoint" and given.dtype:
        refuse("L005", f"--dtype {given.dtype} with --format checkpoint", "a run converts by itself: leave it out")
    return found


def _own(given: WeightsOptions, config: Mapping[str, Any] | None) -> tuple[Path, Path, str]:
    """Write a checkpoint of a run in another format; the folder, what was read, and a remark on that."""
    from meshwright.run.checkpoint.format import find, read_index
    from meshwright.run.companions import of_run
    from meshwright.run.new_folder import refuse
    from meshwright.run.settings import DTYPES as TYPES
    from meshwright.run.weights import export_weights
    from meshwright.sync.policy import read

    source, dtype = find(given.checkpoint), TYPES[given.dtype] if given.dtype else None
    if config is not None:
        _same_model(source, given.model)
    if given.format == "dcp":
        from meshwright.run.checkpoint.dcp import export_distributed
        from meshwright.run.checkpoint.loading import CheckpointReader

        refuse(Path(given.to))
        made = export_distributed(CheckpointReader(source), given.to, dtype=dtype)
    elif "adapter" in read_index(source).meta.extra:  # of a frozen base a checkpoint has nothing
        if given.dtype:
            message = f"--dtype {given.dtype} of adapters, which are written as they were trained"
            raise MeshwrightError.one("L005", message, place="meshwright weights", help="leave --dtype out")
        from meshwright.run.lora.peft import export_adapter

        made = export_adapter(source, given.to)
    else:
        found = of_run(source, read_index(source).meta, given.model)
        found = found if config is None else found._replace(config=config)
        made = export_weights(source, given.to, dtype=dtype, companions=found, **_of(given))
    extra = read_index(source).meta.extra
    apart = "" if extra.get("joined", True) else ", within a round of local steps: the first replica's own weights"
    if apart and read(extra.get("sync", "step")).differing_models:
        apart = f", of {extra['replicas']} replicas with models of their own: that of number {int(given.replica or 0)}"
    if "adapter" in extra and given.format == "dcp":
        apart += ": adapters alone, without the frozen base that they are for"
    return made, source, apart


def _of(given: WeightsOptions) -> dict[str, int]:
    """Which head, and which replica's model, is written."""
    return {"head": int(given.head or 0), "replica": int(given.replica or 0)}


def _foreign(given: WeightsOptions, config: Mapping[str, Any] | None) -> tuple[Path, Path, str]:
    """Write torch's distributed checkpoint in another format; the folder, and what was read."""
    from meshwright.plan import parse
    from meshwright.plan.executable import unexecutable
    from meshwright.run.checkpoint.dcp import into_checkpoint
    from meshwright.run.checkpoint.dcp_weights import convert_distributed
    from meshwright.run.checkpoint.format import Meta, identity
    from meshwright.run.companions import of_folder
    from meshwright.run.new_folder import refuse
    from meshwright.run.published import frozen_tensors, published_tensors
    from meshwright.run.settings import DTYPES as TYPES
    from meshwright.spec.model import load
    from meshwright.spec.workload import Train

    source, model = Path(given.checkpoint), load(_model(given))
    unnamed = [d for d in unexecutable(parse("tp1"), model, Train(global_batch=1, seq_len=1)) if d.code == "P030"]
    if unnamed:
        raise MeshwrightError(unnamed)
    wanted = published_tensors(model)
    if given.format == "checkpoint":
        refuse(Path(given.to))

        def meta(step: int) -> Meta:
            return Meta(step=step, seed=0, model=model.name, model_hash=identity(model), plan="", world=1)

        made = into_checkpoint(source, given.to, wanted, meta, frozen_tensors(model))
        return made, source, f", after {int(made.name.split('-')[1])} steps"
    dtype = TYPES[given.dtype] if given.dtype else None
    found = of_folder(source, given.model)
    found = found if config is None else found._replace(config=config)
    return convert_distributed(source, given.to, model, wanted, dtype=dtype, companions=found), source, ""


def _model(given: WeightsOptions) -> str:
    """Return the model that torch's distributed checkpoint is of: the named one, else that of a config.json beside it;
    "" where neither says."""
    beside = Path(given.checkpoint) / "config.json"
    return given.model or (str(beside) if beside.is_file() else "")


def _config(name: str, wrong: list[Diagnostic]) -> Mapping[str, Any] | None:
    """The model's published configuration; what is wrong with its name goes to `wrong`."""
    if not name:
        return None
    from meshwright.spec.model import config

    try:
        return config(name)
    except MeshwrightError as error:
        wrong += error.diagnostics
        return None


def _same_model(checkpoint: Path, name: str) -> None:
    """Raises:
    MeshwrightError: H003 when the checkpoint is of another model.
    """
    from meshwright.run.checkpoint.format import identity
    from meshwright.run.checkpoint.loading import CheckpointReader
    from meshwright.spec.model import load

    meta = CheckpointReader(checkpoint).index.meta
    if identity(load(name)) != meta.model_hash:
        raise MeshwrightError.one(
            "H003",
            f"the checkpoint is of another model ({meta.model}) than {name}",
            place=str(checkpoint),
            help="name the model that was trained, or leave --model out",
        )
