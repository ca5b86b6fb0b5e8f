"""Files that go with published weights where these go: the model's configuration, its tokenizer and the template of its
conversations. A run's checkpoint says which weights and which tokenizer it began with, and the files are looked for
there, after the checkpoint's own folder and the run's; it says which file the model was read from, too."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from meshwright.errors import MeshwrightError
from meshwright.run.checkpoint.format import Meta, find, identity, read_index
from meshwright.spec import model as models

if TYPE_CHECKING:
    from meshwright.run.job import Job

CONFIG = "config.json"
#: Files by which a folder is known to hold a tokenizer, and those that belong to one, as the hub's models have them.
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
WITH_TOKENIZER = (
    *TOKENIZERS,
    "merges.txt",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
#: What says how answers are drawn; it goes with the configuration.
GENERATION = "generation_config.json"
#: The entry of a checkpoint's ``extra`` that :func:`origin` returns.
ORIGIN = "origin"
BYTES = "bytes"


class Companions(NamedTuple):
    """The ``config`` of the weights, None where none was found, and the other ``files`` by the name that they get."""

    config: Mapping[str, Any] | None = None
    files: Mapping[str, Path] = {}

    def copy(self, folder: Path) -> None:
        """Copy the files into `folder`."""
        for name, file in self.files.items():
            shutil.copyfile(file, folder / name)


NONE = Companions()


def origin(job: Job) -> dict[str, str]:
    """Return the absolute paths of the ``weights``, the ``tokenizer`` and the model's ``config`` that a job has, as its
    checkpoints say them: "bytes" is a tokenizer too. A job that goes on from a checkpoint keeps what that one said of
    weights."""
    before = origin_of(job.out) if job.resume else {}
    said = {"weights": job.weights, "tokenizer": job.tokenizer, "config": job.config}
    return before | {key: path if path == BYTES else str(Path(path).resolve()) for key, path in said.items() if path}


def origin_of(out: str | Path) -> dict[str, str]:
    """Return what the newest checkpoint of a run's folder says of its weights and its tokenizer; empty without one."""
    try:
        return dict(read_index(find(out)).meta.extra.get(ORIGIN, {}))
    except MeshwrightError:
        return {}


def of_run(checkpoint: Path, meta: Meta, named: str = "") -> Companions:
    """Find the companions of a checkpoint: in the folder of the model that is `named`, in the checkpoint's, in the
    run's, with the weights that the run began with. A configuration of another model is passed over; where no folder
    has one it is the file that the run read its model from, or the catalog's."""
    began = meta.extra.get(ORIGIN, {})
    folders = [*_folder(named), checkpoint, checkpoint.absolute().parent, *_folder(began.get("weights", ""))]
    found = _companions(folders, meta.model_hash, began.get("tokenizer", ""))
    if found.config is None and "config" in began:
        found = found._replace(config=_config(Path(began["config"]), meta.model_hash))
    if found.config is None and (model := models.in_catalog(meta.model)) and identity(model) == meta.model_hash:
        found = found._replace(config=models.config(meta.model))
    return found


def of_folder(folder: Path, named: str = "") -> Companions:
    """Find the companions that lie in the folder of the model that is `named`, or in `folder`."""
    return _companions([*_folder(named), folder])


def _folder(path: str) -> list[Path]:
    """The folder that a path is or is in; none for the name of a model of the catalog."""
    if path and Path(path).is_dir():
        return [Path(path)]
    return [Path(path).parent] if path and Path(path).is_file() else []


def _companions(folders: Sequence[Path], model_hash: str = "", tokenizer: str = "") -> Companions:
    config, files = None, {}
    for folder in folders:
        config = _config(folder / CONFIG, model_hash)
        if config is not None:
            files |= {GENERATION: folder / GENERATION} if (folder / GENERATION).is_file() else {}
            break
    if tokenizer == BYTES:  # ids are bytes, whatever the weights were published with
        return Companions(config, files)
    named = Path(tokenizer)
    if tokenizer and named.is_file():
        beside = _present(named.parent) if named.name == TOKENIZERS[0] else {}
        return Companions(config, files | beside | {TOKENIZERS[0]: named})
    if tokenizer:
        folders = [named, *folders]
    holding = (folder for folder in folders if any((folder / name).is_file() for name in TOKENIZERS))
    return Companions(config, files | _present(next(holding, None)))


def _present(folder: Path | None) -> dict[str, Path]:
    """The files of a tokenizer that a folder has."""
    return {name: folder / name for name in WITH_TOKENIZER if (folder / name).is_file()} if folder else {}


def _config(file: Path, model_hash: str) -> Mapping[str, Any] | None:
    """The configuration of a file where there is one, of the model of that identity if one is said."""
    if not file.is_file():
        return None
    try:
        if model_hash and identity(models.load(file)) != model_hash:
            return None
        return models.config(file)
    except MeshwrightError:  # a config.json of something else
        return None
