"""Training from Python: the run that ``meshwright run`` starts, with a function of one's own that sees every step."""

from __future__ import annotations

from typing import Any

import msgspec

from meshwright.answer.predict import predict
from meshwright.answer.swarm import world_of
from meshwright.errors import MeshwrightError
from meshwright.plan import Plan, check
from meshwright.plan.executable import unexecutable
from meshwright.plan.slices import Portions, portions_of
from meshwright.run import data, launch, loop
from meshwright.run.data import tokenizer
from meshwright.run.dmoe import train as dmoe
from meshwright.run.job import Job, RunSummary
from meshwright.run.reports import Told
from meshwright.run.settings import Settings
from meshwright.run.swarm import train as swarm
from meshwright.spec.cluster import Cluster
from meshwright.spec.model import Model
from meshwright.spec.workload import Train


def train(
    model: Model,
    cluster: Cluster,
    workload: Train,
    plan: Plan,
    *,
    text: str = data.documents.SAMPLE,
    words: str = "bytes",
    settings: Settings | None = None,
    on_step: Told | None = None,
    device: str = "auto",
    **job: Any,
) -> RunSummary | None:
    """Train a plan on a `text`, as ``--data`` names it, with the tokenizer that `words` names: a process a rank on this
    machine, or the processes that a launcher started. `on_step` is called on the first rank with the
    :class:`~.reports.StepReport` of every step, and ends the run in order when it returns True; of runs on GPUs it is a
    function of a module. `job` are fields of a :class:`~.job.Job`: ``steps``, ``out``, ``resume``, ``weights``.

    Returns:
        Losses, seconds and the measured timeline; None on other ranks than the first of a launched job.

    Raises:
        MeshwrightError: everything that is wrong with the plan, before anything is started; what the run raises.
    """
    plan, settings = plan.on(cluster.num_devices), settings or Settings()
    wrong = check(plan, model, cluster, workload) or unexecutable(plan, model, workload, precision=settings.precision)
    if wrong:
        raise MeshwrightError(wrong)
    prediction = predict(model, cluster, workload, plan, detail=False)
    corpus = str(data.build(text, tokenizer.load(words), data.cache_folder()))
    asked = Job(
        model=model,
        plan=plan,
        train=workload,
        settings=settings,
        text=text,
        tokenizer=words,
        corpus=corpus,
        ideal_s=prediction.mfu * prediction.step_time_s,
        identity=prediction.identity,
        schedule_params=prediction.schedule_params,
        frozen_order=None if prediction.filled is None else prediction.filled.order,
        portions=Portions() if plan.several else portions_of(plan, prediction.cluster),
        **job,
    )
    if plan.asks_peers:
        trained = dmoe.train if plan.passes.peers else swarm.train
        return msgspec.convert(trained(asked, world_of(None, plan), on_step), RunSummary)
    found = launch.start(loop.train, asked, on_step, num_ranks=plan.num_ranks, device=device, stops=True)
    return None if found is None else msgspec.convert(found, RunSummary, str_keys=True)
