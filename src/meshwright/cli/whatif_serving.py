"""``meshwright whatif --serve``: which technique of serving helps a plan of one's own."""

from __future__ import annotations

from typing import Any

import msgspec

from meshwright.cli import options
from meshwright.cli.output import console, print_json
from meshwright.cli.progress import Progress
from meshwright.cli.question import Question, read_parts
from meshwright.cli.serving import SERVED, bounded
from meshwright.errors import Diagnostic, MeshwrightError

ALL = "all"


def whatif_served(question: Question, given: Any, wrong: list[Diagnostic]) -> int:
    """Try every technique, or those that are said together; 0 when one keeps the objectives, 1 when none does."""
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
        plan = plan.on(cluster.num_devices)
        wrong += refused(plan, model, cluster, serve) + oversized(model, requests, serve.engine)
        if given.recipes != ALL:
            try:
                put_over(serve, plan, given.recipes)
            except MeshwrightError as error:
                wrong += error.diagnostics
    if wrong:
        raise MeshwrightError(wrong)
    tried = (
        list(techniques(model, cluster, serve))
        if given.recipes == ALL
        else [Technique(given.recipes, _exact(given.recipes))]
    )
    profile = engine_profile(serve.engine.profile)
    evaluator = ServingEvaluator(model, cluster, serve, requests, serving_costs(profile.library), profile)
    progress = Progress("techniques", least_s=1.0)
    ranking = what_helps(evaluator, plan, tried, lambda done, total: progress("tried", done, total))
    if given.json:
        print_json(ranking.to_json())
    else:
        from meshwright.report.serving_whatif_text import render

        render(ranking, console())
    return 0 if any(one.good for one in ranking.attempts) else 1


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
