"""``meshwright weights``: a checkpoint of a run as published weights, for other programs to load."""

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
of Hugging Face, which transformers, vLLM and others load, and which meshwright run --weights begins with.

One process does it, a tensor at a time; the plan and the number of processes that trained do not matter.

Exit code 0: written; 2: the question is wrong, or the checkpoint is not whole; 130: ended by Ctrl-C or SIGTERM, which
leaves nothing behind."""
COMMAND = "weights"
DTYPES = ("fp32", "bf16", "fp16")
WANTED = {"checkpoint": "CHECKPOINT, a folder that run wrote into --out", "to": "--to FOLDER, a new folder"}
FORMAT_VERSION = 1


class WeightsOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of ``meshwright weights``."""

    checkpoint: options.positional("CHECKPOINT", "A folder step-..., or a run's --out for its newest checkpoint.") = ""
    to: options.text("FOLDER", "Write model.safetensors there; a new folder.") = ""
    model: options.text("MODEL", "Write its config.json too: a catalog name or a config.json.") = ""
    dtype: options.text("TYPE", f"Convert to {', '.join(DTYPES)}; as they were trained if left out.") = ""
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
    wrong += lacking(COMMAND, "torch", "safetensors")
    config = _config(given.model, wrong)
    if wrong:
        raise MeshwrightError(wrong)
    from meshwright.run.checkpoint.format import find, read_index
    from meshwright.run.settings import DTYPES as TYPES
    from meshwright.run.weights import export_weights

    checkpoint = find(given.checkpoint)
    if config is not None:
        _same_model(checkpoint, given.model)
    with ended_in_order():
        made = export_weights(checkpoint, given.to, dtype=TYPES[given.dtype] if given.dtype else None, config=config)
    files = {file.name: file.stat().st_size for file in sorted(made.iterdir())}
    if given.json:
        said = {"format_version": FORMAT_VERSION, "checkpoint": str(checkpoint), "folder": str(made), "files": files}
        print_json(said)
        return 0
    meta = read_index(checkpoint).meta
    apart = "" if meta.extra.get("joined", True) else ", within a round of local steps: the first replica's own weights"
    note(f"read {checkpoint}{apart}")
    print(f"wrote {made}: {', '.join(f'{name} ({size / 1e6:,.1f} MB)' for name, size in files.items())}")
    return 0


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
