"""``meshwright run --data``: what is trained on and judged by, looked at, tokenised or read, before ranks start."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from meshwright.cli.output import note
from meshwright.cli.run_options import HELD_OUT
from meshwright.cli.run_worlds import bad
from meshwright.errors import Diagnostic, MeshwrightError
from meshwright.run.environment import launched

if TYPE_CHECKING:
    from meshwright.cli.run_options import RunOptions
    from meshwright.plan import Plan
    from meshwright.spec.model import Model
    from meshwright.spec.workload import Train


#: The option that names what a run is judged by.
EVAL_DATA = "--eval-data"


class OpenedData(NamedTuple):
    """The folders of what is trained on and of what judges it, "" where each machine makes its own or there is none;
    the text or samples, None for the former."""

    corpus: str = ""
    judged: str = ""
    text: Any = None


def not_there(given: RunOptions) -> list[Diagnostic]:
    """The diagnostics of data that are not there, before anything is said of what training on them would take; under a
    launcher every machine looks for itself."""
    from meshwright.run import data
    from meshwright.run.data.named import DATA, said_by

    wrong: list[Diagnostic] = []
    for option, name in ((DATA, given.data), (EVAL_DATA, given.eval_data)):
        if not name or launched():
            continue
        try:
            with said_by(option):
                data.look(name)
        except MeshwrightError as error:
            wrong += error.diagnostics
    return wrong


def wrong_samples(given: RunOptions, model: Model) -> list[Diagnostic]:
    """The diagnostics of options of labelled samples for a model that reads none, and of options of text for one that
    does."""
    from meshwright.run.data.augment import read
    from meshwright.spec import naming
    from meshwright.spec.convolution import ImageStem

    wrong: list[Diagnostic] = []
    if read(given.augment) is None:
        wrong.append(bad(f"--augment {given.augment}", "say flip, crop=4 (pixels), or flip+crop=4"))
    elif given.augment and not (isinstance(model.embedding, ImageStem) or _of_images(model)):
        wrong.append(bad(f"--augment {given.augment}", f"{model.name} reads no images: drop it"))
    if given.eval_data and not naming.labelled(model):
        wrong.append(bad(f"--eval-data {given.eval_data}", "text is held out of --data, by --held-out: drop it"))
    if given.eval_data and given.held_out:
        wrong.append(bad("--held-out --eval-data", "a share of --data is held out, or another file: keep one of them"))
    for option, said in (("--tokenizer", given.tokenizer), ("--lengths", given.lengths)):
        if said and naming.labelled(model):
            wrong.append(bad(f"{option} {said}", f"{model.name} reads no text: drop it"))
    return wrong


def wrong_clusters(given: RunOptions, model: Model, plan: Plan) -> list[Diagnostic]:
    """The diagnostics of --clusters where nothing is clustered, or where the file is none."""
    from meshwright.run.data import clustered
    from meshwright.spec.diffusion import NoisyClasses
    from meshwright.sync.policy import read

    if not given.clusters:
        return []
    wrong, word = [], f"--clusters {given.clusters}"
    paths = None if plan.several else read(plan.sync.policy).paths
    experts = paths is not None and paths.mixed and _of_images(model)
    if not experts and not isinstance(model.head, NoisyClasses):
        wrong.append(bad(word, "experts of images (sync=ddm) or their router (num_labels) read clusters: drop it"))
    if given.eval_data:
        wrong.append(bad(f"{word} --eval-data", "the file is of --data alone: hold a part of it out, by --held-out"))
    try:
        clustered.read(given.clusters)
        clustered.labels_for(model, given.clusters)
    except MeshwrightError as error:
        return wrong + list(error.diagnostics)
    return wrong


def _of_images(model: Model) -> bool:
    """Whether a model finds the noise in images, and not in videos."""
    from meshwright.spec import naming
    from meshwright.spec.encoded import denoiser_of

    return naming.denoises(model) and not denoiser_of(model).embedding.frames


def opened(given: RunOptions, model: Model, train: Train, plan: Plan, words: str, share: float) -> OpenedData:
    """Tokenise or read the data that a run names, with the tokenizer that `words` names, and look whether they fill its
    steps; a `share` is held out where nothing else judges.

    Raises:
        MeshwrightError: D codes for everything that is wrong with them.
    """
    from meshwright.run import data
    from meshwright.run.data import clustered, tokenizer
    from meshwright.run.data.named import DATA, said_by
    from meshwright.world.trace import read

    def load(name: str, option: str) -> tuple[str, Any]:
        with said_by(option):
            folder = data.build(name, tokenizer.load(words), data.cache_folder(), say=note)
        microbatch = plan.pools[0].plan.pipeline.microbatch
        how = {"vocab": model.vocab, "model": model, "microbatch": microbatch, "place": f"{option} {name}"}
        how["labels"] = clustered.labels_for(model, given.clusters) if option == DATA else None
        return str(folder), data.load(folder, train, **how)

    if launched():
        return OpenedData()
    corpus, text = load(given.data, DATA)
    if getattr(text, "clients", None) is not None and given.world and (said := read(given.world).clients) and said.skew:
        help = "samples say whose each is (clients [N]): drop one of them"
        raise MeshwrightError([bad(f"--world skew={said.skew:g}", help)])
    if given.held_out and getattr(text, "own_held_out", False):
        raise MeshwrightError([bad(f"--held-out {given.held_out}", "the data say which samples are held out: drop it")])
    if given.clusters:
        clustered.read(given.clusters, len(text.labels))
    judged = ""
    if given.eval_data:
        judged, _ = load(given.eval_data, EVAL_DATA)
    elif given.eval_every:
        _check_held_out(text, share, given.data)
    if given.lengths and not isinstance(text, data.Corpus):
        help = "name one text after the other, with --lengths for each"
        raise MeshwrightError.one("D009", "--lengths writes those of one text", place=f"{DATA} {given.data}", help=help)
    if given.lengths:
        count = data.write_lengths(text, Path(given.lengths))
        note(f"wrote {given.lengths}: {count:,} documents, for --train ...,lengths={given.lengths}")
    return OpenedData(corpus, judged, text)


def share_held_out(numbers: dict[str, Any]) -> float:
    """Return the share of the data that is held out where some is."""
    return numbers.get("held_out", HELD_OUT)


def _check_held_out(text: Any, share: float, name: str) -> None:
    """D005 where what is held out is less than a batch, or what is left."""
    from meshwright.run import data

    try:
        data.held_out(text, share)
    except ValueError as error:
        what = "there are too few samples" if isinstance(text, data.LabelledSamples) else "the text is too short"
        message = f"{what} to hold a part out: {error}"
        help = "more of them, another --held-out, a smaller batch or seq, or no --eval-every"
        raise MeshwrightError.one("D005", message, place=f"--data {name}", help=help) from None
