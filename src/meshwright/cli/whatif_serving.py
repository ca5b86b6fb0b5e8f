"""``meshwright whatif --serve``: which technique of serving helps a plan of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright.cli import options
from meshwright.cli.guard import INTERRUPTED
from meshwright.cli.output import console, print_json, unwritable
from meshwright.cli.progress import Progress
from meshwright.cli.question import Question, path_of, read_parts, with_lengths
from meshwright.cli.serving import SERVED, bounded
from meshwright.errors import Diagnostic, MeshwrightError

if TYPE_CHECKING:
    from meshwright.plan import Plan
    from meshwright.search.serving.learned import AskedWords, Gains
    from meshwright.spec.cluster import Cluster
    from meshwright.spec.model import Model
    from meshwright.spec.requests import Requests
    from meshwright.spec.serve import Serve

ALL, LEARNED = "all", "learned"


def whatif_served(question: Question, given: Any, wrong: list[Diagnostic]) -> int:
    """Try every technique, those that are said together, or the one that records choose; 0 when one keeps the
    objectives, 1 when none does, 130 where somebody ended the trials before one did."""
    from meshwright.answer.serving_check import oversized, refused
    from meshwright.cost.engine import engine_profile
    from meshwright.cost.standard import serving_costs
    from meshwright.search.serving.evaluate import ServingEvaluator
    from meshwright.search.serving.techniques import Technique, put_over, techniques, what_helps
    from meshwright.spec.serve import parse

    wrong = [*wrong, *options.missing(msgspec.structs.asdict(question), SERVED, command="whatif")]
    for option in ("train", "report"):
        if getattr(given, option):
            message, help = f"--{option} is of a training step", "drop it, or drop --serve"
            wrong.append(Diagnostic(code="X004", message=message, place="meshwright whatif --serve", help=help))
    wrong += [] if given.recipes == LEARNED else _unkept(given.records)
    question = msgspec.structs.replace(question, serve=bounded(question.serve, given.slo, wrong))
    parts, found = read_parts(msgspec.structs.replace(question, train="", framework=""))
    wrong += found
    serve = requests = None
    try:
        serve = parse(question.serve, base=question.base)
        requests = serve.drawn()
    except MeshwrightError as error:
        wrong += error.diagnostics
    if len(parts) == 3 and requests is not None:
        model, cluster, plan = parts
        if plan.several:
            message = "techniques are put over a plan of one pool, and this one has several"
            help = "say one pool; meshwright predict --serve answers each set of words over several"
            raise MeshwrightError([*wrong, Diagnostic(code="X004", message=message, place="--plan", help=help)])
        plan = plan.on(cluster.num_devices)
        wrong += refused(plan, model, cluster, serve) + oversized(model, requests, serve.engine)
        if given.recipes not in (ALL, LEARNED):
            try:
                put_over(serve, plan, given.recipes)
            except MeshwrightError as error:
                wrong += error.diagnostics
    if wrong:
        raise MeshwrightError(wrong)
    said = None
    if given.recipes == ALL:
        tried = list(techniques(model, cluster, serve))
    elif given.recipes == LEARNED:
        said = _expected(given.records, model, cluster, plan, serve, requests)
        tried = [Technique(words, True) for words in _chosen(said, model, cluster, plan, serve)]
    else:
        tried = [Technique(given.recipes, _exact(given.recipes))]
    profile = engine_profile(serve.engine.profile)
    evaluator = ServingEvaluator(model, cluster, serve, requests, serving_costs(profile.library), profile)
    progress = Progress("techniques", least_s=1.0)
    ranking = what_helps(evaluator, plan, tried, lambda done, total: progress("tried", done, total))
    if given.records and said is None:
        from meshwright.search.serving import learned

        learned.write(given.records, learned.records_of(_asked(question), ranking))
    if given.json:
        print_json(ranking.to_json() | ({} if said is None else {"learned": msgspec.to_builtins(said)}))
    else:
        from meshwright.report.serving_whatif_text import render

        render(ranking, console(), said)
    if any(one.good for one in ranking.attempts):
        return 0
    return INTERRUPTED if ranking.stopped else 1


def _unkept(path: str) -> list[Diagnostic]:
    """X104 and X006 for a file that no records can be added to: one that cannot be written, or that holds others."""
    from meshwright.atomic import is_stream
    from meshwright.search.serving.learned import read

    wrong = unwritable(path, "--records")
    if path and not wrong and Path(path).exists() and not is_stream(path):
        try:
            read(path)
        except MeshwrightError as error:
            wrong += error.diagnostics
    return wrong


def _asked(question: Question) -> AskedWords:
    """Return a question in words that mean the same in any folder: its files by their whole paths."""
    from meshwright.search.serving.learned import AskedWords

    def whole(text: str) -> str:
        file = Path(path_of(text, question.base))
        is_file = ("/" in text or text.endswith((".json", ".toml"))) and file.exists()
        return str(file.resolve()) if is_file else text

    serve = with_lengths(question.serve, lambda name: str((question.base / name).resolve()))
    return AskedWords(whole(question.model), whole(question.on), whole(question.plan), serve)


def _expected(path: str, model: Model, cluster: Cluster, plan: Plan, serve: Serve, requests: Requests) -> Gains:
    """Return the gains that the records of a file say a question's techniques have, of those that leave the model's
    results as they are; "" is the file that is shipped.

    Raises:
        MeshwrightError: X006 for a file without records of the question's measure, or one that cannot be read.
    """
    from meshwright.search.serving.evaluate import rate_of
    from meshwright.search.serving.learned import SHIPPED, RecordedGains, features, read
    from meshwright.search.serving.techniques import measure_of

    measure = measure_of(bool(serve.objectives) and rate_of(requests) < float("inf"))
    known = RecordedGains(read(path or SHIPPED), measure)
    if not known.questions:
        message = f"no record of {path or 'those that are shipped'} says what a technique gains in {measure}"
        help = "whatif --serve --try all --records FILE writes some; with --slo they are of rates"
        raise MeshwrightError.one("X006", message, place=f"--records {path or 'FILE'}", help=help)
    return known.expects(features(model, cluster, plan, serve, requests), _exact)


def _chosen(said: Gains, model: Model, cluster: Cluster, plan: Plan, serve: Serve) -> list[str]:
    """Return the technique that is said to gain most of those that can be put over a plan and change it or its engine;
    none where none is said to gain."""
    from meshwright.answer.serving_check import refused
    from meshwright.search.serving.techniques import HELPS, put_over

    for words, gain in said.expected:
        if gain <= HELPS:
            break
        try:
            other, changed = put_over(serve, plan, words)
        except MeshwrightError:
            continue  # words of another version
        if (other, changed) != (serve, plan) and not refused(changed, model, cluster, other):
            return [words]
    return []


def _exact(words: str) -> bool:
    """Whether the model computes what it did under words: not with other precisions, nor where less of a context is
    kept."""
    from meshwright.plan.facets import fields
    from meshwright.plan.text import plain_words
    from meshwright.serving.decided import budget_shares

    said = {key.strip().lower(): value.strip() for key, _, value in (part.partition("=") for part in words.split(","))}
    budget = said.pop("kv_budget", "")
    if budget and not budget_shares(budget, 1).exact:
        return False
    keys = set(said)
    lossy = {"kv", "chunk_cache", *(n for n, f in fields().items() if f.facet == "precision")}
    spelled = {word for word, said in plain_words().items() if any(facet == "precision" for facet, _, _ in said)}
    return not keys & (lossy | spelled)
