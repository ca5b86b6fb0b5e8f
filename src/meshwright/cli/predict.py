"""``meshwright predict``: one training step of one plan, the serving of requests or the making of images under one, or
a reinforcement-learning job."""

from __future__ import annotations

import msgspec

from meshwright.cli import options
from meshwright.cli.feeding import unfed
from meshwright.cli.graphs import is_of_graph, predict_graph
from meshwright.cli.output import console, note, print_json, unwritable
from meshwright.cli.question import (
    DENOISE,
    FEED,
    GOAL,
    OPTIONAL,
    OR_SERVED,
    ROLLOUT,
    SERVE,
    WANTED,
    WORLD,
    asked,
    read_all,
    unserved,
)
from meshwright.cli.recommending import is_of_tables, predict_recommended

DESCRIPTION = """Predict one training step: does the plan fit, how long does it take, where does the time go.

Say MODEL, --on, --train and --plan, or name a question.toml that says them; options go over the file.

With --serve in place of --train: how fast requests are answered (TTFT, TPOT), and whether objectives are kept.

With --denoise in place of --train: how long a diffusion model takes to make images.

With --feed beside --train: whether the step waits for its data, and how many workers are enough.

With --rollout beside --train: how fast a reinforcement-learning job generates answers and trains on them.

Of a recommendation model, such as dlrm-dcnv2: --train batch=65536 --plan embeddings=auto.

Of a graph's vectors, such as freebase-pbg: --train batch=1000,negatives=100,shared=50 --plan partitions=16.

With --tokens also the whole training run: how long, what it costs, and whether --days and --budget are met; with
--world simulated failure by failure.

Exit code 0: it fits, in time and budget; 1: it does not; 2: the question is wrong."""


class PredictOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of ``meshwright predict``."""

    model: options.positional(
        "MODEL", "Catalog name, Hugging Face config.json, or a question.toml that says all four."
    ) = ""
    on: options.text("CLUSTER", "64xh100, a catalog name or a .toml file.") = ""
    train: options.text("WORKLOAD", "batch=SEQUENCES,seq=TOKENS and more: meshwright explain workload.") = ""
    serve: options.text(
        "REQUESTS", "rate=8,prompt=1024,output=256 or trace=FILE, ttft=500ms,tpot=50ms: meshwright explain serve."
    ) = ""
    denoise: options.text("IMAGES", "images=1,size=1024,steps=50 of a diffusion model: meshwright explain denoise.") = (
        ""
    )
    rollout: options.text(
        "ROLLOUTS",
        "prompts=512,samples=16,prompt=1024,output=8192 of reinforcement learning: meshwright explain rollout.",
    ) = ""
    feed: options.text(
        "FEED", "workers=8,read=2GB/s,tokenise=1.5us/token: where steps get their data: meshwright explain feed."
    ) = ""
    plan: options.text("PLAN", "Words such as 'tp8 pp4 vpp5 zero1', or a .toml file: meshwright explain plan.") = ""
    framework: options.text("NAME", "Whose host and memory costs: meshwright catalog frameworks.") = ""
    tokens: options.TOKENS = ""
    days: options.DAYS = ""
    budget: options.BUDGET = ""
    price: options.PRICE = ""
    world: options.text(
        "WORLD", "What the run meets: mtbf=3h,spares=4,repair=12h, catalog or failures.csv: meshwright explain world."
    ) = ""
    report: options.text("FILE", "Write the full report, one offline HTML file.") = ""
    slo: options.text("BOUNDS", "With --serve: bounds to keep, ttft=500ms,tpot=50ms@p90.") = ""
    engine_profile: options.text(
        "FILE", "With --serve: the engine as calibrate measured it; of one server (--server URL) nothing else is said."
    ) = ""
    records: options.text("FILE", "With --serve: write the times of every request, requests.csv or .parquet.") = ""
    trace: options.text("FILE", "Write the timeline for Perfetto or chrome://tracing, step.json.gz.") = ""
    job_trace: options.text("FILE", "Write what the run meets in the first draw of --world, event by event.") = ""
    json: options.JSON = False


def run(argv: list[str]) -> int:
    """0 when the plan fits, in time and budget if those were asked; 1 when it does not."""
    given, wrong = options.read(PredictOptions, argv, command="predict", description=DESCRIPTION)
    fields = (*WANTED, *OPTIONAL, *GOAL, *WORLD, *SERVE, *DENOISE, *ROLLOUT, *FEED)
    question = asked({field: getattr(given, field) for field in fields})
    if question.feed:
        others = {"--serve": question.serve, "--denoise": question.denoise, "--rollout": question.rollout}
        others |= {"a recommendation model": is_of_tables(question), "a model of a graph": is_of_graph(question)}
        wrong += [one for other, said in others.items() if said for one in unfed(other)]
    if is_of_tables(question):
        return predict_recommended(question, given, wrong)
    if is_of_graph(question):
        return predict_graph(question, given, wrong)
    if question.rollout:
        from meshwright.cli.rollouts import predict_rolled_out

        return predict_rolled_out(question, given, wrong)
    if question.denoise:
        from meshwright.cli.denoising import predict_denoised

        return predict_denoised(question, given, wrong)
    if question.serve:
        from meshwright.cli.serving import predict_served

        return predict_served(question, given, wrong)
    wrong += options.missing(msgspec.structs.asdict(question), WANTED | OR_SERVED, command="predict")
    wrong += unserved(given, ("slo", "engine_profile", "records"), "predict")
    wrong += unwritable(given.report, "--report") + unwritable(given.trace, "--trace")
    wrong += unwritable(given.job_trace, "--job-trace")
    if given.job_trace:
        wanted = {"world": "--world, which says what the run meets"}
        wrong += options.missing({"world": question.world}, wanted, command="predict")
    prediction = read_all([question], also_wrong=wrong)[0]()
    if given.json:
        print_json(prediction.to_json())
    else:
        from meshwright.report.text import render

        render(prediction, console())
    _write_files(prediction, given)
    return 0 if prediction.good else 1


def _write_files(prediction, given: PredictOptions) -> None:
    if given.report:
        from meshwright.report.html import write as write_report

        write_report(prediction, given.report)
        note(f"wrote {given.report}")
    if given.trace:
        from meshwright.trace.chrome import write as write_trace

        write_trace(prediction.timeline, given.trace)
        note(f"wrote {given.trace}")
    if given.job_trace:
        from meshwright.trace.chrome import write as write_trace

        write_trace(prediction.run.timeline, given.job_trace)
        note(f"wrote {given.job_trace}")
