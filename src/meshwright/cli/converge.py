"""``meshwright converge``: sync policies, ways of feedback and workloads, trained at equal tokens on real text, or at
equal samples on labelled ones, and their losses and accuracies side by side."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright.cli import options
from meshwright.cli.needs import lacking
from meshwright.cli.output import console, note, print_json
from meshwright.cli.run_rates import usual_of
from meshwright.cli.run_worlds import wrong_faulty
from meshwright.errors import Diagnostic, MeshwrightError
from meshwright.run.environment import launched

if TYPE_CHECKING:
    from meshwright.run.study import Study, StudyProgress
    from meshwright.spec.model import Model
    from meshwright.spec.workload import Train
    from meshwright.world.trace import JobWorld

DESCRIPTION = """Train each of several sync policies for equal tokens on the same text, and compare their losses; of a
classifier for equal samples (--data digits), and their accuracies too. --feedback adds what layers learn from in place
of gradients, --workload other optimizers and batches.

Every policy is trained with every seed, one replica a process, on this machine; loss is measured on the last 20th of
the text, or on the samples that are held out, which none trains on.
Results go to --out run by run (results.csv, summary.json, table.md): Ctrl-C ends in
order and leaves what is done, the same command goes on, and one that names more policies or seeds adds to it.

Exit code 0: trained, or ended on request; 1: a process died; 2: the question is wrong."""
NEEDED = ("torch", "safetensors", "tokenizers")
MODEL, TRAIN, REPLICAS, STEPS, SEEDS, LR, WARMUP = "llama-1m", "batch=16,seq=64,dtype=fp32", 4, "256", 3, 3e-3, 0.1
POLICIES = "step bf16 int8 powersgd:rank=4 topk local:h=8 local:h=64"
FORMAT_VERSION = 1
#: How a policy begins that says what layers learn from, or other words of the workload; the one of every step.
FEEDBACK, WORKLOAD, USUAL_SYNC = "feedback=", "train=", "step"
#: Numbers among the options: field -> (least, most, whole numbers only, what is wanted in words).
NUMBERS = {
    "replicas": (2, 64, True, "a number of replicas, 2 to 64"),
    "seeds": (1, 1000, True, "a number of seeds"),
    "lr": (1e-9, 1e6, False, "a learning rate such as 3e-3"),
}
WANTED = {
    "data": "--data TEXT: a file, a folder, package:NAME for an installed Python package, sample, or digits",
    "out": "--out FOLDER, where results are kept",
}


class ConvergeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of ``meshwright converge``."""

    model: options.positional("MODEL", f"Catalog name or config.json; {MODEL} if left out.") = ""
    sync: options.text(
        "WORDS", f"Policies as a plan's sync= has them, with blanks between, each with @RATE if need be; {POLICIES}."
    ) = ""
    feedback: options.text(
        "WORDS", "Ways of feedback as a plan's feedback= has them, such as dfa dfa:micro@1e-3, each under sync=step."
    ) = ""
    workload: options.text(
        "WORDS", "Other words of --train, such as optimizer=lars@0.5 batch=256,clusters=4, each under sync=step."
    ) = ""
    data: options.text("TEXT", "A file, a .jsonl, a folder, package:NAME of an installed package, sample, digits.") = ""
    world: options.text("WORDS", "How clients differ, such as skew=0.3; or faulty=2:reversed, faulty replicas.") = ""
    train: options.text("WORKLOAD", f"{TRAIN} if left out; batch is that of all replicas.") = ""
    replicas: options.text("COUNT", f"Processes, one replica each; {REPLICAS} if left out.") = ""
    steps: options.text("COUNT[,COUNT...]", f"Steps of every run, or several such numbers; {STEPS} if left out.") = ""
    ladder: options.text("COUNT[,COUNT...]", "More numbers of steps, for sync=step alone: losses as tokens.") = ""
    seeds: options.text("COUNT", f"Runs of each, with seeds from 0; {SEEDS} if left out.") = ""
    lr: options.text("RATE", f"Learning rate, reached after a tenth of a run; {LR:g} if left out.") = ""
    tokenizer: options.text("FILE", "A Hugging Face tokenizer.json; bytes if left out.") = ""
    device: options.text("KIND", "cpu or cuda; cpu if left out.") = ""
    out: options.text("FOLDER", "Where results are kept, and found again.") = ""
    json: options.JSON = False


def run(argv: list[str]) -> int:
    """0 when every policy was trained, or it was asked to end."""
    given, wrong = options.read(ConvergeOptions, argv, command="converge", description=DESCRIPTION)
    study = _read(given, wrong)
    from meshwright.run.study import begin, conduct, trials

    out = Path(given.out)
    begin(study, out)
    note(
        f"training {study.model.name} on {study.text}, {study.train.text()}, {study.replicas} replicas: "
        f"{sum(1 for _ in trials(study))} runs in {out}"
    )
    try:
        done = conduct(study, out, lambda progress: _said(progress, out), quiet=not sys.stderr.isatty())
    except KeyboardInterrupt:  # between two runs
        done = False
    if not done:
        note("ended on request: the same command goes on")
    _show(out, given)
    return 0


def _said(progress: StudyProgress, out: Path) -> None:
    """One run is done: say so, and write the tables anew."""
    left = (progress.total - progress.done) * progress.seconds / 60
    loss = f"held-out loss {progress.loss:.4f}" if math.isfinite(progress.loss) else "diverged"
    note(
        f"{progress.done}/{progress.total}  {progress.trial}: {loss}  ({progress.seconds:.0f} s; "
        f"about {left:,.0f} min left)"
    )
    _written(out)


def _written(out: Path) -> Any:
    """Write the tables of a study's folder; what they show."""
    from meshwright.atomic import write_bytes
    from meshwright.report.losses_text import markdown, to_csv
    from meshwright.sync.losses import compared
    from meshwright.sync.studies import results

    rows = results(out)
    found = compared(rows)
    summary = {"format_version": FORMAT_VERSION, "policies": msgspec.to_builtins(found)}
    write_bytes(out / "results.csv", to_csv(rows).encode())
    write_bytes(out / "summary.json", msgspec.json.format(msgspec.json.encode(summary), indent=2))
    write_bytes(out / "table.md", markdown(found).encode())
    return found


def _show(out: Path, given: ConvergeOptions) -> None:
    found = _written(out)
    if given.json:
        print_json({"format_version": FORMAT_VERSION, "policies": msgspec.to_builtins(found)})
        return
    from meshwright.report.losses_text import render

    render(found, console())
    note(f"wrote {out / 'results.csv'}, summary.json and table.md")


def _read(given: ConvergeOptions, wrong: list[Diagnostic]) -> Study:
    """The study, once nothing is wrong with it."""
    wrong += options.missing({name: getattr(given, name) for name in WANTED}, WANTED, command="converge")
    numbers = options.numbers(given, NUMBERS, wrong, command="converge")
    steps = _counts(given.steps or STEPS, "--steps", wrong)
    ladder = _counts(given.ladder, "--ladder", wrong)
    if given.device and given.device not in ("cpu", "cuda"):
        wrong.append(_bad(f"--device {given.device}", "it is cpu or cuda"))
    if launched():
        wrong.append(_bad("a launcher", "converge starts the processes of every run itself: run it without one"))
    if given.out and Path(given.out).is_file():
        wrong.append(_bad(f"--out {given.out}", "it is a file: name a folder"))
    wrong += lacking("converge", *NEEDED)
    from meshwright.spec.model import load as load_model
    from meshwright.spec.workload import parse as parse_train

    model = _found(lambda: load_model(given.model or MODEL), wrong)
    train = _found(lambda: parse_train(given.train or TRAIN), wrong)
    replicas = numbers.get("replicas", REPLICAS)
    fed = [f"{FEEDBACK}{words}" for words in given.feedback.split()]
    fed += [f"{WORKLOAD}{words}" for words in given.workload.split()]
    said = given.sync or ("" if fed else POLICIES)
    policies = tuple(dict.fromkeys([*said.split(), *fed]))
    world = _found(lambda: _world(given.world), wrong)
    if model is not None and train is not None:
        wrong += _samples(given, model)
        policies = _policies(policies, replicas, model, train, world, wrong)
    if wrong:
        raise MeshwrightError(wrong)
    from meshwright.run.study import Study, opened, policies_that_grow, unjoined
    from meshwright.sync.losses import workload

    for policy in policies_that_grow(policies):
        help = "rounds grow by learning rates of the policy, and this study has its own: train it with meshwright run"
        wrong.append(_bad(f"--sync {policy}", help))
    for policy, every, count in unjoined(policies, steps):
        help = f"take a multiple of {every}, so that the last step ends a round"
        wrong.append(_bad(f"--steps {count} with sync={policy}", help))
    if wrong:
        raise MeshwrightError(wrong)
    for policy in policies:
        batch = workload(train, policy).global_batch
        for count in steps:
            if count * train.global_batch % batch:
                help = f"{count} steps of {train.global_batch} are no whole number of steps of {batch}: say others"
                wrong.append(_bad(f"--workload {policy.removeprefix(WORKLOAD)}", help))
    if wrong:
        raise MeshwrightError(wrong)
    corpus, digest = opened(given.data, given.tokenizer or "bytes", train, model, given.world)
    return Study(
        model=model,
        train=train,
        replicas=replicas,
        policies=policies,
        steps=steps,
        ladder=ladder,
        seeds=numbers.get("seeds", SEEDS),
        lr=numbers.get("lr", LR),
        warmup=WARMUP,
        text=given.data,
        corpus=corpus,
        digest=digest,
        device=given.device or "cpu",
        world=given.world,
        **usual_of(model),
    )


def _world(words: str) -> JobWorld:
    """The world of a study: how clients differ, or faulty workers.

    Raises:
        MeshwrightError: O001 for words that are none, L005 for those of another world.
    """
    from meshwright.world.trace import JobWorld, read

    if not words:
        return JobWorld()
    found = read(words)
    if found.of_job or found.slow is not None or (found.clients is not None and found.faulty is not None):
        help = "a study knows how clients differ (speeds, jitter, links, drop, skew) or faulty=, with seed="
        raise MeshwrightError(_bad(f"--world {words}", help))
    return found


def _samples(given: ConvergeOptions, model: Model) -> list[Diagnostic]:
    """List the errors in options of text for a model of labelled samples."""
    from meshwright.spec.naming import classifies

    if not classifies(model):
        return []
    wrong = [_bad("--feedback", f"{model.name} learns by gradients: drop it")] if given.feedback else []
    return wrong + ([_bad("--tokenizer", f"{model.name} reads no text: drop it")] if given.tokenizer else [])


def _policies(
    policies: tuple[str, ...],
    replicas: int,
    model: Model,
    train: Train,
    world: JobWorld | None,
    wrong: list[Diagnostic],
) -> tuple[str, ...]:
    """The policies in their shortest words, the usual one among them; what is wrong with any is added to `wrong`."""
    from meshwright.plan import check, parse
    from meshwright.plan.executable import unexecutable
    from meshwright.spec.cluster import load
    from meshwright.sync.losses import words_of, workload
    from meshwright.sync.record import USUAL

    if train.global_batch % replicas:
        wrong.append(_bad(f"batch={train.global_batch}", f"{replicas} replicas share it: take a multiple"))
        return policies
    cluster = load(f"{replicas}xh100")  # any will do: losses do not depend on it
    out = [USUAL]
    for words in policies:
        words, at, rate = words.partition("@")
        policy = _found(lambda words=words: _shortest(words), wrong)
        if at and not _positive(rate):
            option = {FEEDBACK: "feedback", WORKLOAD: "workload"}.get(words[: words.find("=") + 1], "sync")
            said = f"--{option} {words.removeprefix(FEEDBACK).removeprefix(WORKLOAD)}@{rate}"
            wrong.append(_bad(said, "behind the @ is a learning rate, as in dist-lion@3e-4"))
        if policy is None:
            continue
        asked = _found(lambda policy=policy: workload(train, policy), wrong)
        if asked is None:
            continue
        if asked.grow or asked.global_batch % replicas:
            help = f"{replicas} replicas share a batch, and one that grows has other samples than the rest"
            wrong.append(_bad(f"--workload {words.removeprefix(WORKLOAD)}", help))
            continue
        plan = parse(f"dp{replicas} mb{asked.global_batch // replicas} {words_of(policy)}").on(replicas)
        wrong += check(plan, model, cluster, asked) or unexecutable(plan, model, asked, precision="")
        if world is not None and world.faulty is not None:
            wrong += wrong_faulty(world.faulty, plan, f"--world with {policy}")
        out.append(policy + at + rate)
    if world is not None and world.clients is not None and all(_alone(policy) for policy in out):
        help = "clients differ, and no policy here is of clients: say one, such as fedavg:h=8"
        wrong.append(_bad("--world", help))
    return tuple(dict.fromkeys(out))


def _alone(policy: str) -> bool:
    """Whether the replicas of a policy are no clients of a server."""
    from meshwright.sync.losses import sync_of
    from meshwright.sync.policy import read

    return read(sync_of(policy)).rule.decider is None


def _shortest(words: str) -> str:
    """A policy in its shortest words; those of a way of feedback, or of a workload, are its own."""
    from meshwright.plan.facets.feedback import read as read_feedback
    from meshwright.sync.policy import read

    if words.startswith(WORKLOAD):
        return words
    if not words.startswith(FEEDBACK):
        return read(words).text
    found = read_feedback(words.removeprefix(FEEDBACK))
    return USUAL_SYNC if found is None else FEEDBACK + found.text


def _positive(text: str) -> bool:
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False


def _found(ask: Any, wrong: list[Diagnostic]) -> Any:
    """The value of `ask`; None, and what is wrong with it, where it raises."""
    try:
        return ask()
    except MeshwrightError as error:
        wrong += error.diagnostics
        return None


def _counts(text: str, option: str, wrong: list[Diagnostic]) -> tuple[int, ...]:
    """Numbers of steps with commas between them, each once, the least first."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if any(not word.isdecimal() or not 1 <= int(word) <= 10**9 for word in words):
        wrong.append(_bad(f"{option} {text}", "it is a number of steps, or several with commas between"))
        return ()
    return tuple(sorted({int(word) for word in words}))


def _bad(place: str, help: str) -> Diagnostic:
    return Diagnostic(code="L005", message=f"{place} cannot be", place="meshwright converge", help=help)
