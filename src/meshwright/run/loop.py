"""A long run: step after step, with progress, metrics, checkpoints, and an end in order whenever it is asked for.

Every rank runs :func:`train`. All that decides when to stop or save is the same number on every rank, so that none
waits for one that has left: that somebody was asked to stop (SIGTERM) is exchanged beside every step.
Steps count from 1: after step k, k updates are done, and the checkpoint is ``step-k``.
"""

from __future__ import annotations

import sys
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from meshwright.errors import Diagnostic, MeshwrightError
from meshwright.run import clocks, data, launch, mesh, routes, traffic, variances
from meshwright.run.agree import Votes, agree, share
from meshwright.run.begin import about_adapters, begin
from meshwright.run.checkpoint import AsyncSaver, Meta, identity
from meshwright.run.companions import ORIGIN, origin
from meshwright.run.data import clustered
from meshwright.run.data.feeding import Feeding
from meshwright.run.exchanges import in_step
from meshwright.run.faulty import spoil
from meshwright.run.gather import gather
from meshwright.run.held import device_name, peak_bytes
from meshwright.run.job import Job, RunSummary
from meshwright.run.judge import Judge, RoutedJudge, own_of, share_of
from meshwright.run.lora.peft import export
from meshwright.run.mesh import ProcessMesh
from meshwright.run.metrics import METRICS, Metrics, ProgressLine
from meshwright.run.opened import divided, open_corpus, taught_on
from meshwright.run.record import Off, Recorder, install
from meshwright.run.reports import CallbackFailed, Reporter, StepHook, StepReport, Told, callback, reporters
from meshwright.run.result import StepResult
from meshwright.run.routing import measures, watched
from meshwright.run.trainer import Trainer
from meshwright.run.world import World
from meshwright.sync.policy import read
from meshwright.timeline import Counter, Timeline
from meshwright.world.growth import Growth

#: Steps whose spans a run's timeline has, the last ones; fewer of many ranks, so that it has at most so many steps of
#: one rank: putting together a span takes some 14 us of one process at the end of a run.
KEPT_STEPS, MOST_RANK_STEPS = 5, 512
#: Values of a step's line that its report has by name.
OF_STEP = ("step", "loss", "grad_norm", "lr", "tokens", "step_s")


class Diverged(MeshwrightError):
    """The loss is not a number: the answer of the run is no."""

    exit_code = 1


def train(world: World, job: Job, on_step: Told | None = None) -> dict[str, Any]:
    """The rank `world` of a run, from the first step to the last; a :class:`RunSummary` as plain values. `on_step` is
    called on the first rank with every step's report, and ends the run in order by returning True.

    Raises:
        MeshwrightError: the same on every rank: D codes for the data, H codes for checkpoints and weights, X104 for
            the metrics.
        Diverged: L004, with the step's update left out and the state before it saved.
    """
    place = mesh.build(in_step(job.plan), device=world.device)
    corpus = open_corpus(world, job, place)
    if isinstance(corpus, data.MixedText) and read(job.plan.sync.policy).own_data:
        help = "name one text, of which each replica has a run, or say sync=local"
        raise MeshwrightError.one("D009", "replicas share out one text, not a mixture", place="--data", help=help)
    how = {"settings": job.settings, "schedule_params": job.schedule_params, "portions": job.portions}
    how |= {"group_costs": job.group_costs, "frozen_order": job.frozen_order}
    trainer = Trainer(job.model, job.plan, job.train, place, **how)
    corpus, held = divided(job, corpus, world, place)
    if trainer.lessons is not None:
        corpus = taught_on(trainer, corpus)
    if trainer.rounds.policy.paths is not None:
        trainer.routes = routes.prepared(trainer, corpus, held)
    begin(job, trainer)
    if job.faulty is not None:
        spoil(trainer, job.faulty)
    if trainer.routes is not None:
        routed(job, trainer, corpus, held)
    run = RankRun(job, trainer, corpus, held, on_step)
    if job.variances:
        found = variances.measured(trainer, run.batch(trainer.step_count))
        if place.first:
            variances.save(job.variances, found, job.model.name)
    with closing(run), recorded(place, job.steps - trainer.step_count) as recorder:
        before = clocks.probe()
        with watched(job.routing, trainer.routers, job.model, place):
            run.steps()
        run.export()
        timeline = gather(recorder, job.plan, before=before, identity=job.identity)
        moved = [(*kind, size) for kind, size in recorder.exchanged.items()]
        return msgspec.to_builtins(run.summary(timeline, exchanged=moved, judged=run.judged, accuracy=run.accuracy))


def routed(job: Job, trainer: Trainer, corpus: data.Corpus | data.LabelledSamples, held: Any) -> None:
    """Route what a job trains on, and keep the clusters of samples, by which a router learns, in its folder;
    collective."""
    given = clustered.read(job.clusters, len(corpus.labels)) if job.clusters else None
    routes.ready(trainer, corpus, held, given)
    if not (job.out and isinstance(corpus, data.LabelledSamples)):
        return
    wrong = ()
    try:
        if trainer.mesh.first:
            clustered.write(job.out, routes.written(trainer, corpus, None if job.judged_text else held))
    except MeshwrightError as error:
        wrong = error.diagnostics
    agree(trainer.mesh["world"], wrong, trainer.mesh.device)


def kept_steps(num_ranks: int) -> int:
    """Return the number of last steps whose spans a run of so many ranks keeps."""
    return max(1, min(KEPT_STEPS, MOST_RANK_STEPS // num_ranks))


@contextmanager
def recorded(place: ProcessMesh, steps: int) -> Iterator[Recorder]:
    """Record the last of so many steps; those before the window of steps that is kept leave nothing."""
    keep = kept_steps(place.world)
    recorder = Recorder(rank=place.rank, device=place.device, warmup=min(keep, steps // 2), keep=keep)
    install(recorder)
    try:
        yield recorder
    finally:
        install(Off())


class RankRun:
    """One rank's run from where its trainer stands."""

    def __init__(
        self, job: Job, trainer: Trainer, corpus: data.Corpus, held: data.Corpus | None, on_step: Told | None = None
    ):
        self.job, self.trainer, self.corpus, self.judge = job, trainer, corpus, None
        if held is not None:
            routed = trainer.routes is not None
            self.judge = RoutedJudge(trainer, held) if routed else Judge(trainer, held, job.judged_from)
        self.judged: dict[int, float] = {}
        #: The share of labelled samples that were classified rightly then.
        self.accuracy: dict[int, float] = {}
        #: The same by the last of the heads that neighbours teach.
        self.taught: dict[int, float] = {}
        self.mesh = trainer.mesh
        self.dp = trainer.mesh["dp"]
        self.first = trainer.step_count + 1
        # of every step, eight bytes each: a run may have millions of them
        self.done = {name: array("d") for name in ("seconds", "loss", "grad_norm", "tokens", "batch", "data")}
        train, layout = job.train, trainer.plan.layout
        unit = layout.dp * trainer.plan.pipeline.microbatch
        self.growth = Growth(eta=train.grow, most=train.most, unit=unit) if train.grow else None
        self.sequences = trainer.sequences
        self.about, self.exported = about_adapters(job, trainer), ""
        self.saved, self.saved_step = "", trainer.step_count if self.first > 1 else -1
        self.stopped, self.origin = False, origin(job)
        #: Called after every step with the step, its result and its seconds.
        self.after_step: list[Callable[[int, StepResult, float], None]] = []
        self.votes = Votes(self.mesh["world"])
        self.metrics = self._metrics()
        self.reporters: list[Reporter] = []
        self.hook: StepHook | None = None
        self._report_to(on_step)
        self.saver = self._saver()
        self.feeding: Feeding | None = None
        shown = self.mesh.first and not job.quiet
        said = job.train.tokens_per_step, job.ideal_s, job.train.counted
        self.progress = ProgressLine(job.steps, *said) if shown else None

    def _metrics(self) -> Metrics | None:
        """Rank 0's; made by all, because its folder is."""
        made, wrong = None, ()
        if self.job.out and self.mesh.first:
            try:
                made = Metrics(Path(self.job.out) / METRICS, done=self.trainer.step_count)
            except MeshwrightError as error:
                wrong = error.diagnostics
        agree(self.mesh["world"], wrong, self.mesh.device)
        return made

    def _report_to(self, on_step: Told | None) -> None:
        """Open what else is told of steps, on the first rank; made by all, because it may not open."""
        wrong, job = (), self.job
        try:
            if self.mesh.first:
                self.reporters = reporters(job, self.trainer.step_count)
                told = callback(job.callback) if job.callback else on_step
                self.hook = StepHook(told) if told is not None else None
        except MeshwrightError as error:
            wrong = error.diagnostics
        agree(self.mesh["world"], wrong, self.mesh.device)

    def _saver(self) -> AsyncSaver | None:
        if not self.job.out:
            return None
        saver = AsyncSaver(self.job.out, self.mesh["world"], device=self.mesh.device, keep=self.job.keep)
        self.trainer.before_update.append(saver.before_update)
        return saver

    def steps(self) -> None:
        """Train all remaining steps, or as many as are done when the run is asked to end."""
        done, job = self.trainer.step_count, self.job
        last = job.steps + (self.trainer.adversary is not None)  # who looks ahead of the last step too
        feeding = Feeding(self.batch, done, last, workers=job.data_workers, ahead=job.prefetch)
        self.feeding, begun = feeding, time.perf_counter()
        while self.trainer.step_count < self.job.steps and not self.stopped:
            if self.trainer.round_ended:
                self.votes.cast(launch.stop.requested or (self.hook is not None and self.hook.stops))
            batch, waited = feeding.take(self.trainer.step_count), feeding.waited_s
            looks = self.trainer.looks_ahead and self.trainer.step_count + 1 < last
            following = feeding.take(self.trainer.step_count + 1) if looks else None
            result = self.trainer.step(batch, following)
            if not result.updated:
                if not self.trainer.rounds.apart:  # replicas that went on alone have no step in common to go back to
                    self._save()
                raise Diverged(self._divergence(result.loss, result.grad_norm))
            if self.saver is not None:
                self._poll()
            now = time.perf_counter()
            self._note(result, now - begun, waited)
            for told in self.after_step:
                told(self.trainer.step_count, result, now - begun)
            self._grow()
            begun = now
            if self.trainer.round_ended:
                self.stopped = self.votes.counted()
            if self.saver is not None and self.job.save_every and self.trainer.step_count % self.job.save_every == 0:
                self._save(wait=False)
        self._save()
        wrong = [] if self.hook is None else self.hook.failed
        try:
            agree(self.mesh["world"], wrong, self.mesh.device)
        except MeshwrightError as error:  # the same on every rank
            raise CallbackFailed(error.diagnostics) from None

    def batch(self, step: int) -> data.Batch:
        """The rows of a step that this rank trains on."""
        if self.growth is not None:
            return self.corpus.share(self.sequences, self.trainer.train.global_batch, self.dp.index, self.dp.size)
        of = own_of if self.trainer.rounds.policy.own_data else share_of
        of = of if self.trainer.routes is None else routes.routed_of
        return of(self.trainer, self.corpus, step)

    def _grow(self) -> None:
        """Take the batch that the last step's gradient asks for."""
        batch = self.trainer.train.global_batch
        self.sequences += batch
        if self.growth is None:
            return
        for decision in self.growth.decide(batch, self.trainer.seen)[1]:
            self.trainer.take(decision.batch)

    def _note(self, result: StepResult, seconds: float, waited: float) -> None:
        step, loss = self.trainer.step_count, result.loss
        if self.judge is not None and step % self.job.judged_every == 0:
            self.judged[step], taught = self.judge.loss(), ""
            if (right := getattr(self.judge, "accuracy", None)) is not None:
                self.accuracy[step], taught = right, f", accuracy {right:.2%}"
            if self.trainer.lessons is not None:
                with self.trainer.lessons.judged():
                    self.taught[step] = self.judge.loss()
                taught = f", by the last head {self.taught[step]:.4f}"
            if self.mesh.first and not self.job.quiet:
                print(f"step {step:,}: held-out loss {self.judged[step]:.4f}{taught}", file=sys.stderr)
        batch, train = self.trainer.train.global_batch, self.job.train
        for name, value in zip(self.done, (seconds, loss, result.grad_norm, result.num_tokens, batch, waited)):
            self.done[name].append(value)
        if self.progress is not None:
            self.progress(step, loss, seconds, result.num_tokens)
        if not self.mesh.first or (self.metrics is None and not self.reporters and self.hook is None):
            return
        values = {
            "step": step,
            "loss": loss,
            "grad_norm": result.grad_norm,
            "lr": self.job.settings.lr_at(step - 1),
            "tokens": (self.sequences + batch) * train.tokens_per_step // train.global_batch,
            "step_s": seconds,
            "data_s": waited,
            "tokens_per_s": result.num_tokens / seconds,  # of packed rows those that something is learnt from
            "mfu": self.job.ideal_s * batch / train.global_batch / seconds if self.job.ideal_s else None,
        }
        values |= traffic.so_far() | measures(self.trainer.routers, train, self.trainer.plan)
        values |= {"batch": batch} if self.growth is not None else {}
        values |= {"held_out_loss": self.judged[step]} if step in self.judged else {}
        values |= {"held_out_accuracy": self.accuracy[step]} if step in self.accuracy else {}
        values |= {"held_out_loss_taught": self.taught[step]} if step in self.taught else {}
        if self.metrics is not None:
            self.metrics.add(values)
        report = StepReport(steps=self.job.steps, values=values, **{f: values[f] for f in OF_STEP})
        for one in (*self.reporters, *([self.hook] if self.hook is not None else [])):
            one.tell(report)

    def _save(self, *, wait: bool = True) -> None:
        """Save where training stands, unless that has been done."""
        if self.saver is None:
            return
        if self.saved_step != self.trainer.step_count:
            self._poll(wait=True)
            step = self.trainer.step_count
            self.trainer.statistics.join(self.trainer.joined)
            self.saver.begin(
                self.trainer.pieces(),
                Meta(
                    step=step,
                    seed=self.job.settings.seed,
                    model=self.job.model.name,
                    model_hash=identity(self.job.model),
                    plan=self.job.plan.text(),
                    world=self.mesh.world,
                    extra={
                        "workload": self.job.train.text(),
                        ORIGIN: self.origin,
                        "sync": self.trainer.plan.sync.policy,
                        "replicas": self.trainer.rounds.replicas,
                        "joined": self.trainer.joined,
                        "copies": self.trainer.copies,
                        "batch": self.trainer.train.global_batch,
                        "sequences": self.sequences,
                        "spread": [] if self.trainer.spread is None else self.trainer.spread.smoothed,
                    }
                    | ({"adapter": msgspec.to_builtins(self.about)} if self.about is not None else {}),
                ),
            )
            self.saved_step = step
        if wait:
            self._poll(wait=True)

    def export(self) -> None:
        """Write the adapters of a run that is done as its job says; collective."""
        wrong, job = (), self.job
        if self.about is None or not job.out or not job.export or self.trainer.step_count < job.steps:
            return
        if self.mesh.first:
            try:
                self.exported = str(export(job.export, job.out, job.weights))
            except MeshwrightError as error:
                wrong = error.diagnostics
        agree(self.mesh["world"], wrong, self.mesh.device)

    def _poll(self, *, wait: bool = False) -> None:
        done = self.saver.wait() if wait else self.saver.poll()
        self.saved = str(done) if done is not None else self.saved

    def _divergence(self, loss: float, norm: float) -> Diagnostic:
        step = self.trainer.step_count + 1
        if self.trainer.rounds.averages:
            message = f"a replica's loss was not a number in the round that ends with step {step}, which is lost"
            return Diagnostic(code="L004", message=message, help="a lower --lr, a longer --warmup, or --dtype fp32")
        kept = f"; the state before it is {self.saved}" if self.saved else ""
        return Diagnostic(
            code="L004",
            message=f"step {step} is not a number: loss {loss:.6g}, gradient norm {norm:.6g}; it was not applied{kept}",
            help="a lower --lr, a longer --warmup, or --dtype fp32",
        )

    def summary(self, timeline: Timeline | None, **said: Any) -> RunSummary:
        """The run so far, with its last steps' `timeline`, which the first rank has, and what else is said of it;
        collective."""
        done, place = self.trainer.step_count, self.mesh
        peaks = share(place["world"], str(peak_bytes(place.device)).encode(), place.device)
        steps = {"step": np.arange(self.first, done + 1)}
        steps |= {name: np.array(column, np.float64) for name, column in self.done.items()}
        ranks = {"rank": np.arange(len(peaks)), "peak_bytes": np.array([int(p) for p in peaks], np.int64)}
        found = timeline or Timeline.bare(identity=self.job.identity)
        kept = np.isin(steps["step"] - 1, found.steps.number)  # the recorder counts the steps that were done before
        found = msgspec.structs.replace(
            found,
            counters=tuple(
                Counter(name=name, unit="", time_s=found.steps.end_s, value=steps[name][kept])
                for name in ("loss", "grad_norm")
            )
            if kept.any()
            else (),
            records={"step": steps, "rank": ranks},
        )
        return RunSummary.of(
            found,
            done,
            device=device_name(place.device),
            stopped=self.stopped and done < self.job.steps,
            saved=self.saved,
            exported=self.exported,
            lengths=self.corpus.lengths() if place.first else None,
            data_s=self.done["data"].tolist(),
            batches=[] if self.growth is None else [int(size) for size in self.done["batch"]],
            **said,
        )

    def close(self) -> None:
        """End threads, files and the processes that make batches."""
        if self.feeding is not None:
            self.feeding.close()
        if self.saver is not None:
            self.saver.close()
        if self.metrics is not None:
            self.metrics.close()
        for one in self.reporters:
            one.close()
        if self.progress is not None:
            self.progress.close()
