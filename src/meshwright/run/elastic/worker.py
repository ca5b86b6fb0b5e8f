"""A worker of an elastic run: one rank of one formation, from the state that is in memory to its last step."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import torch

from meshwright.plan import parse
from meshwright.plan.slices import Portions
from meshwright.run import clocks, launch, mesh
from meshwright.run.begin import begin, begin_base, checkpoints
from meshwright.run.elastic.formation import Begin, Over, Settled, Stepped, Word
from meshwright.run.elastic.memory import Snapshots, written
from meshwright.run.elastic.restore import restored
from meshwright.run.environment import keep_memory, own_cores
from meshwright.run.exchanges import in_step
from meshwright.run.gather import gather
from meshwright.run.job import Job
from meshwright.run.loop import RankRun, recorded
from meshwright.run.opened import divided, open_corpus
from meshwright.run.result import StepResult
from meshwright.run.trainer import Trainer
from meshwright.run.world import Report, World, meet

#: A worker that has lost its peer leaves it to the launcher to find out who died; for so long.
PATIENCE_S = 5.0
#: After so long without an answer a collective gives up.
TIMEOUT_S = 120.0


def of_job(job: Job) -> Callable[[Begin, Sequence[int], Sequence[int], Connection, Connection], None]:
    """Return the work of the workers of a job."""

    def work(order: Begin, before: Sequence[int], fds: Sequence[int], words: Connection, done: Connection) -> None:
        signal.signal(signal.SIGTERM, launch.stop)
        keep_memory()
        own_cores(order.rank, order.size)
        say = _Speaker(words)
        try:
            _train(job, order, before, fds, say, _Speaker(done))
        except BaseException as error:
            report = launch.report_of(error)
            if report.consequence:
                time.sleep(PATIENCE_S)  # it is ended before that, if another's death was the cause
            say(Over(order.epoch, report))
            launch.end_process(report.exit_code or 1)

    return work


class _Speaker:
    """A way to the launcher, by the host or past it; one that is gone hears nothing."""

    def __init__(self, words: Connection):
        self.words, self.lock = words, threading.Lock()

    def __call__(self, word: Word) -> None:
        with self.lock, contextlib.suppress(OSError):
            self.words.send_bytes(msgspec.json.encode(word))


def _train(
    job: Job, order: Begin, before: Sequence[int], fds: Sequence[int], say: _Speaker, say_done: _Speaker
) -> None:
    plan = parse(order.plan).on(order.size)
    world = World(order.rank, order.size, order.rank, order.size, socket.gethostname(), torch.device("cpu"))
    launch.open_group(world, TIMEOUT_S, init_method=f"file://{order.store}")
    job = msgspec.structs.replace(job, plan=plan, schedule_params=order.params)
    place = mesh.build(in_step(plan), device=world.device)
    corpus = open_corpus(world, job, place)
    trainer = Trainer(
        job.model,
        plan,
        job.train,
        place,
        settings=job.settings,
        schedule_params=order.params,
        portions=Portions(counts=order.counts),
    )
    memory = Snapshots(trainer, fds, order.epoch)
    found = restored(trainer, written(before))
    if found is not None:
        begin_base(job, trainer)
        trainer.sequences = found.step * job.train.global_batch
    else:
        goes_on = job.resume or (order.epoch > 0 and bool(checkpoints(job.out)))
        begin(msgspec.structs.replace(job, resume=goes_on), trainer)
    trainer.settle()
    if trainer.joined:
        trainer.statistics.join(joined=True)
        memory.keep(trainer.step_count)
    memory.arrived()
    if world.size > 1:
        meet()
    step = trainer.step_count
    source = "memory" if found else "disk" if step else "nowhere"
    say(Settled(order.epoch, step, found.newest if found else step, source))
    trainer.before_totals.append(memory.arrived)

    def stepped(step: int, result: StepResult, seconds: float) -> None:
        # first: whatever is killed when, a step that others go on after has been told
        say_done(Stepped(order.epoch, order.rank, step, result.loss, result.grad_norm, seconds))
        if trainer.round_ended:  # within a round replicas differ, and what one held is not what all go on from
            trainer.statistics.join(trainer.joined)
            memory.keep(step)

    run = RankRun(job, trainer, *divided(job, corpus, world, place))
    run.after_step.append(stepped)
    with closing(run), recorded(place, job.steps - step) as recorder:
        began = clocks.probe()
        run.steps()
        run.export()
        memory.arrived()
        whole = not order.counts  # the measured timeline is that of equal ranks
        timeline = gather(recorder, plan, before=began, identity=job.identity) if whole else None
        summary: dict[str, Any] = msgspec.to_builtins(run.summary(timeline))
    launch.leave()
    say(Over(order.epoch, Report(result=summary if world.first else {"stopped": summary["stopped"]})))
