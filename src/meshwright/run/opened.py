"""The data of a run as its ranks have it: opened on each, and divided in what is trained on and what judges."""

from __future__ import annotations

from pathlib import Path

from meshwright.errors import MeshwrightError
from meshwright.run import data
from meshwright.run.agree import agree, share
from meshwright.run.data import clustered, tokenizer
from meshwright.run.data.named import DATA, said_by
from meshwright.run.job import Job
from meshwright.run.mesh import ProcessMesh
from meshwright.run.trainer import Trainer
from meshwright.run.world import World


def open_corpus(world: World, job: Job, place: ProcessMesh) -> data.Corpus:
    """The corpus on every rank; where it has to be built, one rank of each machine does so."""
    return _opened(world, job, place, job.text, job.corpus, DATA)


def _opened(world: World, job: Job, place: ProcessMesh, text: str, built: str, option: str) -> data.Corpus:
    """The data that a name means, already `built` in a folder or not."""
    folder, wrong = built, ()
    if not folder and world.local_rank == 0:
        try:
            with said_by(option):
                folder = str(data.build(text, tokenizer.load(job.tokenizer), data.cache_folder()))
        except MeshwrightError as error:
            wrong = error.diagnostics
    agree(place["world"], wrong, place.device)
    if not built:
        # by its content a corpus has the same name everywhere; where it lies is each machine's own
        name = Path(folder).name.encode() if world.local_rank == 0 else b""
        names = {b for b in share(place["world"], name, place.device) if b}
        if len(names) > 1:
            raise MeshwrightError.one(
                "D001",
                "the machines of the run have different texts of this name",
                place=f"{option} {text}",
                help="copy the same files to each, or name a folder that all see",
            )
        folder = str(data.cache_folder() / names.pop().decode())
    return data.load(
        Path(folder),
        job.train,
        vocab=job.model.vocab,
        model=job.model,
        seed=job.settings.seed,
        augment=job.augment,
        labels=clustered.labels_for(job.model, job.clusters) if option == DATA else None,
        microbatch=place.plan.pipeline.microbatch,
        place=f"{option} {text}",
    )


def divided(
    job: Job, corpus: data.Corpus, world: World, place: ProcessMesh
) -> tuple[data.Corpus, data.Corpus | data.LabelledSamples | None]:
    """Return what a job trains on, and what it is judged by, None where it is not; collective where that is another
    file."""
    if not job.judged_every:
        return corpus, None
    if not job.judged_text:
        return data.held_out(corpus, job.held_out)
    held = _opened(world, job, place, job.judged_text, job.judged_corpus, "--eval-data")
    return corpus, held.judged()


def taught_on(trainer: Trainer, corpus: data.Corpus) -> data.Corpus:
    """Have heads learn from the public share of a text, its last one; return the rest, which replicas share out.

    Raises:
        MeshwrightError: D005 where one of the two is shorter than a step's batch.
    """
    taught = trainer.rounds.policy.taught
    try:
        own, public = data.held_out(corpus, taught.public)
    except ValueError as error:
        help = "a longer text, a smaller batch, or a larger public= below 1"
        message = f"there is no public part to teach heads on beside what replicas have of their own: {error}"
        raise MeshwrightError.one("D005", message, place="--data", help=help) from None
    trainer.lessons.text = lambda step: public.own(step, 0, 1, rows=trainer.lessons.rows)
    return own
