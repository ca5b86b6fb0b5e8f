"""``meshwright run``: train a plan for real, and say how far the prediction was off."""

from __future__ import annotations

import atexit
import gc
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright.cli import options
from meshwright.cli.guard import show
from meshwright.cli.needs import lacking
from meshwright.cli.output import console, note, print_json, unwritable
from meshwright.cli.question import OPTIONAL, WANTED, asked, path_of, read_parts
from meshwright.cli.run_adapters import EXPORTS, adapted, reported, weights_of
from meshwright.cli.run_data import not_there, opened, share_held_out, wrong_clusters, wrong_samples
from meshwright.cli.run_feeding import batch_seconds, waits, wrong_workers
from meshwright.cli.run_graph import is_graph_run, run_graph
from meshwright.cli.run_images import run_images
from meshwright.cli.run_linked import contradictions, on_links, over
from meshwright.cli.run_options import (
    DATA,
    DESCRIPTION,
    DEVICES,
    DTYPES,
    NEEDED,
    NUMBERS,
    OWN,
    SCALES,
    STEPS,
    RunOptions,
)
from meshwright.cli.run_rates import by_policy, usual_of
from meshwright.cli.run_room import of_files, without_room
from meshwright.cli.run_swarm import swarmed, wrong_peers
from meshwright.cli.run_worlds import bad, elastic, measured, no_clients, recovered, unelastic, unknown, wrong_world
from meshwright.errors import Diagnostic, MeshwrightError
from meshwright.run.environment import is_first, launched, num_cores, num_threads
from meshwright.spec.decay import SCHEDULES
from meshwright.spec.model import read_from

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshwright.answer.prediction import Prediction
    from meshwright.plan import Plan
    from meshwright.run.job import Job
    from meshwright.spec.cluster import Cluster
    from meshwright.spec.model import Model
    from meshwright.spec.workload import Train
    from meshwright.timeline import Timeline


def run(argv: list[str]) -> int:
    """0 when it was trained, 1 when a process died or the loss was not a number."""
    if not launched():
        atexit.register(gc.freeze)  # an end that looks through all that torch has made takes most of a second
        return _run(argv)
    # One of many processes that a launcher started: one speaks, and none waits for the interpreter to end in order.
    from meshwright.run.launch import end_process

    try:
        code = _run(argv)
    except MeshwrightError as error:
        code = error.exit_code
        if is_first() or getattr(error, "speaks", False):
            show(error, as_json="--json" in argv)
    end_process(code)


def _run(argv: list[str]) -> int:
    given, wrong = options.read(RunOptions, argv, command="run", description=DESCRIPTION)
    if is_graph_run(given):
        return run_graph(given, wrong)
    if given.denoise:
        return run_images(given, wrong)
    job, predicted = _read(given, wrong)
    from meshwright.run import launch, loop
    from meshwright.sync.policy import read

    num_ranks = job.plan.num_ranks
    if is_first():
        note(_begin(job, num_ranks))
    if not job.plan.several and read(job.plan.sync.policy).rule.decider is not None:
        return _of_clients(given, job, predicted)
    if job.plan.asks_peers:
        return swarmed(given, job, predicted, _write)
    if given.elastic:
        return elastic(given, job, predicted, _write)
    if given.world and job.faulty is None:
        return recovered(given, job, predicted, _write)
    device, batch_s = "cpu" if given.link else given.device or "auto", batch_seconds(given, job)
    with on_links(given.link, num_ranks, predicted) as (enter, predicted):
        summary = launch.start(loop.train, job, num_ranks=num_ranks, device=device, stops=True, enter=enter)
    if summary is None:  # another rank than the first of a launched job
        return 0
    lengths, batches = summary.pop("lengths"), summary.pop("batches")
    prediction, comparison = predicted(lengths, batches[-1] if batches else 0), None
    if batches:
        summary["grown"] = _grown(summary["step_s"], batches, lambda batch: predicted(lengths, batch).step_time_s)
    timeline = measured(summary, prediction)
    if (waited := waits(job, prediction, summary, batch_s)) is not None:
        summary["data"] = waited
    if summary["step_s"]:
        from meshwright.compare import compare

        comparison = compare(prediction, timeline)
    if given.json:
        from meshwright.report.run_text import to_json

        print_json(to_json(prediction, summary, comparison))
    else:
        from meshwright.report.run_text import render

        render(prediction, summary, comparison, console())
    _write(given, summary, timeline)
    return 0


def _grown(step_s: list[float], batches: list[int], predicted: Callable[[int], float]) -> dict[str, Any]:
    """The steps that were done with each batch of a run whose batch grew, and the seconds of all steps, measured and
    predicted."""
    counts = {batch: batches.count(batch) for batch in dict.fromkeys(batches)}
    return {
        "steps": counts,
        "measured_s": sum(step_s),
        "predicted_s": sum(count * predicted(batch) for batch, count in counts.items()),
    }


#: Options that runs of clients do without.
KEPT = ("job_trace", "tensorboard", "wandb", "callback")


def _of_clients(given: RunOptions, job: Job, predicted: Callable[[Any], Prediction]) -> int:
    """The run of a plan whose replicas are clients of a server, in the world that is said."""
    from meshwright.run import clients, launch
    from meshwright.world.crowd import Crowd
    from meshwright.world.trace import read

    kept = [f"--{word.replace('_', '-')}" for word in KEPT if getattr(given, word)]
    if kept:
        raise MeshwrightError([bad(word, "versions of clients are in metrics.jsonl, in --out") for word in kept])
    if job.data_workers:
        raise MeshwrightError([bad("--data-workers with clients of a server", "each makes its own batches: drop it")])
    world = (read(given.world).clients if given.world else None) or Crowd()
    num_ranks = job.plan.num_ranks
    summary = launch.start(clients.train, job, world, num_ranks=num_ranks, device=given.device or "auto", stops=True)
    if summary is None:
        return 0
    prediction = predicted(None)
    timeline = measured(summary, prediction)
    summary.pop("lengths", None)
    if given.json:
        from meshwright.report.run_text import to_json

        print_json(to_json(prediction, summary, None))
    else:
        from meshwright.report.run_text import render, render_clients

        render(prediction, summary, None, console())
        render_clients(summary["clients"], console())
    _write(given, summary, timeline)
    return 0


def threaded(cluster: Cluster) -> str:
    """Return a sentence where ranks compute on more threads than the core that predictions take for each; else ""."""
    threads = num_threads()
    if not cluster.islands[0].device.cores or threads == 1:
        return ""
    return (
        f"OMP_NUM_THREADS={threads}: every rank computes on {threads} threads, and {cluster.name} is predicted with a "
        "core each, so the errors below compare two things: OMP_NUM_THREADS=1, or a plan of more ranks"
    )


def _with_devices(plan: Plan, model: Model, cluster: Cluster, train: Train, framework: str) -> Plan:
    """The plan with devices for pools that leave them open, those that a prediction gives them."""
    if not plan.several:
        return plan
    from meshwright.answer.allot import allotted
    from meshwright.cost import standard_on

    costs = standard_on(cluster, framework or cluster.islands[0].device.framework or OWN)
    return allotted(plan, model, cluster, train, costs)[0]


def _read(given: RunOptions, wrong: list[Diagnostic]) -> tuple[Job, Callable[[Any], Prediction]]:
    """The job, and its prediction for documents of given lengths, once nothing is wrong with either."""
    said = {field: getattr(given, field) for field in (*WANTED, *OPTIONAL)}
    said["model"] = given.plan_file or given.model
    from meshwright.plan import Plan

    question = asked(said)
    if given.plan_file.endswith(".toml") and given.model:
        question = msgspec.structs.replace(question, model=_here(given.model))
    wrong += options.missing(msgspec.structs.asdict(question), WANTED, command="run")
    wrong += options.missing({"data": given.data}, {"data": DATA}, command="run")
    numbers = options.numbers(given, NUMBERS, wrong, command="run")
    wrong += unwritable(given.trace, "--trace") + unwritable(given.lengths, "--lengths")
    wrong += unwritable(given.routing, "--routing") + unwritable(given.variances, "--variances")
    wrong += unwritable(given.job_trace, "--job-trace") + reported(given)
    wrong += _contradictions(given) + contradictions(given.link, given.device, given.world) + lacking("run", *NEEDED)
    wrong += not_there(given) if not wrong else []
    parts, found = read_parts(question)
    peers = [part for part in parts if isinstance(part, Plan) and part.asks_peers]
    wrong += wrong_peers(given, peers[0]) if peers else wrong_world(given)
    if wrong or found:
        raise MeshwrightError([*wrong, *found])
    model, cluster, train, plan = parts
    wrong += wrong_workers(given, train)
    if is_first() and (threads := threaded(cluster)):
        note(threads)
    plan = _with_devices(plan, model, cluster, train, question.framework)
    plan, train = _computed_in(given.dtype, plan.on(cluster.num_devices), train)
    weights = weights_of(given, question, train)
    train = adapted(given, weights, model, train, wrong)
    precision = "float64" if given.dtype == "float64" else ""
    from meshwright.plan import check, lowered
    from meshwright.plan.executable import unexecutable

    if given.routing and not model.mixtures:
        wrong.append(bad(f"--routing {given.routing}", f"{model.name} has no experts that a router chooses among"))
    if given.variances and not any(map(lowered.read, plan.kinds.lowered)):
        wrong.append(bad(f"--variances {given.variances}", "the plan has no operators in fewer bits: say lowered=bf16"))
    wrong += (
        wrong_samples(given, model)
        + wrong_clusters(given, model, plan)
        + ([] if plan.asks_peers or wrong else no_clients(given, plan))
    )
    wrong += check(plan, model, cluster, train) or unexecutable(plan, model, train, precision=precision)
    if wrong:
        raise MeshwrightError(wrong)

    def predicted(lengths: Any, batch: int = 0, link: Any = None) -> Prediction:
        from meshwright.answer.predict import predict
        from meshwright.cost import standard_on
        from meshwright.spec.lengths import Lengths

        packed = msgspec.structs.replace(train, global_batch=batch) if batch else train
        # those that are trained on, where none were said and the model has a place for them
        unsaid = train.lengths is None and len(model.flows) == 1 and not plan.several
        unsaid = unsaid and not plan.kinds.mbs  # whose microbatches are priced at whole sequences
        if lengths is not None and unsaid:
            found = msgspec.structs.replace(msgspec.convert(lengths, Lengths), said=given.lengths)
            packed = msgspec.structs.replace(packed, lengths=found, pack=train.pack or "concat")
        costs = standard_on(cluster, question.framework or cluster.islands[0].device.framework or OWN)
        where, costs = over(cluster, costs, link)
        return predict(model, where, packed, plan, costs=costs, detail=False)

    job = _job(msgspec.structs.replace(given, weights=weights), numbers, precision, predicted)
    if (file := read_from(path_of(question.model, question.base))) is not None:
        job = msgspec.structs.replace(job, config=str(file))
    wrong = [*unknown(given, job), *(unelastic(job) if given.elastic else ())]
    if wrong:
        raise MeshwrightError(wrong)
    return job, predicted


def _job(given: RunOptions, numbers: dict[str, Any], precision: str, predicted: Callable[[Any], Prediction]) -> Job:
    """Return the job that every rank is given. The data are read here, unless a launcher started the ranks: then
    each machine does it for itself."""
    from meshwright.plan.slices import Portions, portions_of
    from meshwright.run.companions import origin_of
    from meshwright.run.data import augment
    from meshwright.run.job import KEEP, Job
    from meshwright.run.settings import Settings
    from meshwright.world.trace import read as read_world

    prediction = useful = predicted(None)
    model, plan, train = prediction.model, prediction.plan, prediction.train
    words = given.tokenizer or "bytes"
    if not given.tokenizer and given.weights and (Path(given.weights) / "tokenizer.json").is_file():
        words = given.weights  # what the weights were trained on
    elif not given.tokenizer and given.resume:
        words = origin_of(given.out).get("tokenizer", words)
    if not launched():
        of_files(words, given.weights)
    wrong = [] if given.anyway else without_room(prediction, "cpu" if given.link else given.device)
    if wrong:
        raise MeshwrightError(wrong)
    found = opened(given, model, train, plan, words, share_held_out(numbers))
    if found.text is not None and found.text.rows is not None:  # padding is no use
        useful = predicted(msgspec.to_builtins(found.text.lengths()))
    steps = math.ceil(train.tokens / train.tokens_per_step) if train.tokens else STEPS
    set_by = {"decay": "decay_steps"} | {f: f for f in ("lr", "warmup", "clip", "seed", "min_lr", "weight_decay")}
    nodes = 1 if given.link else prediction.cluster.islands[0].node.devices  # linked ranks have a host each
    said = {f: numbers[o] for o, f in set_by.items() if o in numbers}
    settings = Settings(precision=precision, node_ranks=nodes, drives=given.drives, **usual_of(model) | said)
    if given.schedule:
        settings = msgspec.structs.replace(settings, schedule=given.schedule)
    if given.betas:
        settings = msgspec.structs.replace(settings, betas=_betas(given.betas))
    if not plan.several:
        chosen = {*said, *(["schedule"] if given.schedule else [])}
        settings = by_policy(settings, plan.pools[0].plan, chosen, numbers.get("steps", steps))
    if given.scale_lr:
        settings = settings.scaled(given.scale_lr, train.global_batch, numbers["base_batch"])
    used = useful.batches
    return Job(
        model=model,
        plan=plan,
        train=train,
        settings=settings,
        text=given.data,
        tokenizer=words,
        corpus=found.corpus,
        judged_text=given.eval_data,
        judged_corpus=found.judged,
        augment=augment.read(given.augment),
        clusters=given.clusters,
        steps=numbers.get("steps", steps),
        out=given.out,
        resume=given.resume,
        save_every=numbers.get("save_every", 0),
        judged_every=numbers.get("eval_every", 0),
        held_out=share_held_out(numbers) if given.eval_every and not given.eval_data else 0.0,
        keep=numbers.get("keep", KEEP),
        data_workers=numbers.get("data_workers", 0),
        prefetch=numbers.get("prefetch", 0),
        weights=given.weights,
        adapter=given.adapter,
        export="" if given.export == "none" else given.export or EXPORTS[0],
        tensorboard=given.tensorboard,
        wandb=given.wandb,
        callback=given.callback,
        routing=given.routing,
        variances=given.variances,
        ideal_s=useful.mfu * useful.step_time_s,
        identity=prediction.identity,
        schedule_params=prediction.schedule_params,
        frozen_order=None if prediction.filled is None else prediction.filled.order,
        faulty=read_world(given.world).faulty if given.world else None,
        portions=Portions() if plan.several else portions_of(plan, prediction.cluster),
        group_costs=None if used is None or used.groups is None else used.groups.costs,
    )


def _computed_in(dtype: str, plan: Plan, train: Train) -> tuple[Plan, Train]:
    """Plan and workload with the type of --dtype instead of their own; float64 is no type of theirs."""
    if dtype in ("", "float64"):
        return plan, train

    def plain(one: Plan) -> Plan:
        return msgspec.structs.replace(one, precision=msgspec.structs.replace(one.precision, compute=""))

    pools = tuple(msgspec.structs.replace(pool, plan=plain(pool.plan)) for pool in plan.several)
    plan = msgspec.structs.replace(plan, several=pools) if pools else plain(plan)
    return plan, msgspec.structs.replace(train, dtype=dtype)


def _here(text: str) -> str:
    return str(Path(text).resolve()) if text.endswith(".json") else text


def _contradictions(given: RunOptions) -> list[Diagnostic]:
    """Return a diagnostic for each option with an unknown value, for options that exclude one another, and for an
    output folder that cannot be used."""
    out = []
    if given.model and given.plan_file and not given.plan_file.endswith(".toml"):
        help = f"{given.plan_file} is a model too, and --model replaces that of a .toml file: name one of them"
        out.append(bad(f"--model {given.model}", help))
    known_words = (("device", DEVICES), ("dtype", DTYPES), ("scale_lr", SCALES), ("schedule", SCHEDULES))
    for option, known in known_words:
        said = getattr(given, option)
        if said and said not in known:
            out.append(bad(f"--{option.replace('_', '-')} {said}", f"it is one of {', '.join(known)}"))
    if bool(given.scale_lr) != bool(given.base_batch):
        out.append(
            bad("--scale-lr without --base-batch, or the reverse", "say both: --scale-lr linear --base-batch 32")
        )
    needed = (("held_out", "eval_every"), ("eval_data", "eval_every"), ("schedule", "decay"), ("min_lr", "decay"))
    for option, needs in needed:
        if getattr(given, option) and not getattr(given, needs):
            said, other = (f"--{one.replace('_', '-')}" for one in (option, needs))
            out.append(bad(said, f"it says how, and {other} says when: add it"))
    if given.betas and _betas(given.betas) is None:
        out.append(bad(f"--betas {given.betas}", "two numbers from 0 to below 1: --betas 0.9,0.95"))
    for option in ("resume", "save_every", "keep"):
        if getattr(given, option) and not given.out:
            out.append(bad(f"--{option.replace('_', '-')}", "it needs a folder of checkpoints: --out FOLDER"))
    if given.lengths and launched():
        out.append(bad("--lengths", "the text's lengths are written where it is tokenised: run it without a launcher"))
    if given.out and Path(given.out).is_file():
        out.append(bad(f"--out {given.out}", "it is a file: name a folder"))
    elif given.out and (Path(given.out) / "index.json").is_file():
        held = Path(given.out).parent
        out.append(bad(f"--out {given.out}", f"it is a checkpoint: name the folder it is in, {held}"))
    elif given.out and not given.resume and any(Path(given.out).glob("step-*")):
        out.append(bad(f"--out {given.out}", "it holds checkpoints of a run: --resume goes on, or name another folder"))
    return out


def _betas(text: str) -> tuple[float, float] | None:
    """Two decays of moments; None for anything else."""
    try:
        first, second = (float(part) for part in text.split(","))
    except ValueError:
        return None
    return (first, second) if 0 <= first < 1 and 0 <= second < 1 else None


def _begin(job: Job, num_ranks: int) -> str:
    processes = f"{num_ranks} process{'es' * (num_ranks > 1)}"
    shared = ""
    if num_ranks > num_cores() and not launched():
        shared = f" that share {num_cores()} cores"
    return f"training {job.model.name} under {job.plan.text()}, {job.train.text()}, on {processes}{shared}"


def _write(given: RunOptions, summary: dict[str, Any], timeline: Timeline) -> None:
    """Write the timeline where that is asked for, and say what there is on the disk."""
    if given.trace:
        from meshwright.trace import write

        write(timeline, given.trace)
        note(f"wrote {given.trace}")
    if summary.get("exported"):
        note(f"wrote {summary['exported']}")
    if summary["saved"]:
        more = ": --resume goes on from it" if summary["stopped"] else ""
        note(f"saved {summary['saved']}{more}")
