"""Plans of served models: the best of a whole space beside what rules of thumb choose."""

from __future__ import annotations

from meshwright.papers.evaluate import served_metrics
from meshwright.papers.outcome import AT_MOST, WITHIN, Check, Figure, Outcome
from meshwright.search.restrict import restricted
from meshwright.search.serving.find import find_serving
from meshwright.search.serving.space import default, forms
from meshwright.spec.cluster import Cluster
from meshwright.spec.cluster import load as load_cluster
from meshwright.spec.model import Model
from meshwright.spec.model import load as load_model
from meshwright.spec.serve import Serve
from meshwright.spec.serve import parse as parse_serve

#: Models that APEX plans for (section 6), one engine, and 256 conversations that are there at once.
MODELS = ("qwen2.5-32b", "llama3.1-70b", "mistral-large-2", "mixtral-8x22b")
REQUESTS = "batch=256,lengths=azure-conv,policy=vllm-v1"
#: The rule of thumb: the whole node splits every matrix.
HEURISTIC = "tp=8"
WHY = "splitting every matrix over a node of NVSwitch is all but best for these; the abstract's case is not known here"


def _fastest(model: Model, cluster: Cluster, serve: Serve, *fix: str) -> tuple[float, float]:
    """Tokens a second of the plan that has most of them, and the seconds until it was found."""
    fixed = ["nano=1", "budget=0", *fix]
    space = restricted(default(model, cluster, serve, {"policy"}), fix=fixed, forms=forms())
    found = find_serving(model, [cluster], serve, spaces=[space], objective="throughput", top=1)
    return served_metrics(found.best[0].prediction).throughput_tokens_per_s, found.seconds


def apex() -> Outcome:
    """The largest gain of the fastest plan of a node over the rule of thumb, and how long the slowest search takes."""
    cluster, serve = load_cluster("8xh100"), parse_serve(REQUESTS)
    gains, spent = [], 0.0
    for model in map(load_model, MODELS):
        best, seconds = _fastest(model, cluster, serve)
        usual, _ = _fastest(model, cluster, serve, HEURISTIC)
        gains.append(best / usual)
        spent = max(spent, seconds)
    return Outcome(
        figures=(
            Figure("largest gain over the heuristic", 3.37, max(gains), "x", WITHIN, 0.1, headline=True, why=WHY),
            Figure("seconds until the best plan is found, at most", 900.0, spent, "s", AT_MOST, here=True),
        ),
        baseline="tensor parallelism over the whole node",
        assumptions=("256 requests as long as a conversation service's, all there at once, on 8 H100",),
        missing=("power by what a device does: the energy of plans is of its rated power",),
    )


CHECKS = {"apex": Check(apex)}
