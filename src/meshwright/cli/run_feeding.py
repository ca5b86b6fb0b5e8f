"""``meshwright run --data-workers``: batches that others make, and what steps wait for them beside its prediction."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from meshwright.cli.run_worlds import bad
from meshwright.errors import Diagnostic

if TYPE_CHECKING:
    from meshwright.answer.prediction import Prediction
    from meshwright.run.job import Job

#: Steps of a run that only warm up: so many, or a quarter of a short run, as in a comparison.
WARM_UP = 5


def wrong_workers(given: Any, train: Any) -> list[Diagnostic]:
    """List what data workers do not go with."""
    out = []
    if given.prefetch and given.data_workers in ("", "0"):
        out.append(bad("--prefetch", "it says how many batches --data-workers make ahead: add that"))
    if given.data_workers not in ("", "0") and train is not None and train.grow:
        out.append(bad("--data-workers with a batch that grows", "the next one is not known ahead: leave one out"))
    return out


def batch_seconds(given: Any, job: Job) -> float:
    """Return how long one process of this machine makes a batch of a rank, measured; 0 where nobody asked for workers,
    or a launcher started the ranks."""
    if not given.data_workers or not job.corpus or job.plan.several:
        return 0.0
    from meshwright.run import data
    from meshwright.run.bench.reading import batch_s

    layout = job.plan.layout
    text = data.load(
        Path(job.corpus),
        job.train,
        vocab=job.model.vocab,
        model=job.model,
        seed=job.settings.seed,
        microbatch=job.plan.pipeline.microbatch,
        place=f"--data {job.text}",
    )
    if text.global_batch % layout.dp:
        return 0.0
    return batch_s(lambda step: text.batch(step, 0, layout.dp))


def waits(job: Job, prediction: Prediction, summary: dict[str, Any], make_s: float) -> dict[str, float] | None:
    """Return the wait for data of a step, predicted from the time of a batch that was measured before and measured on
    the first rank after a warm-up, in seconds; None where neither is known."""
    waited = summary.get("data_s") or []
    if not make_s or not waited:
        return None
    from meshwright.answer.feed import feed_answer
    from meshwright.spec.feed import RANK, Feed, StageWork

    samples = max(1, round(job.train.global_batch / job.plan.layout.dp))
    feed = Feed(
        workers=job.data_workers,
        prefetch=job.prefetch,
        readers=RANK,
        sample=(1.0, False),  # it is in memory, and its reading a part of what was measured
        work={"collate": StageWork(make_s / samples)},
    )
    asked = prediction.model, prediction.cluster, prediction.train, prediction.plan
    told, _ = feed_answer(feed, *asked, prediction.step_time_s)
    counted = waited[min(WARM_UP, len(waited) // 4) :]
    return {"workers": job.data_workers, "make_s": make_s, "predicted_s": told.wait_s, "measured_s": fmean(counted)}
