"""Small questions whose whole space can be evaluated plan by plan."""

from hypothesis import strategies as st

from meshwright import schedules
from meshwright.search.evaluate import Evaluator
from meshwright.search.space import (
    EVEN,
    Space,
    cores,
    default,
    exchanges_once,
    inners,
    pipelines,
    plan_of,
    states,
    together,
)
from meshwright.search.walk import Walk
from meshwright.spec import cluster
from meshwright.spec.workload import Train
from tests.random_plans import GPT, LLAMA, MIXTURE

CLUSTERS = {name: cluster.load(name) for name in ("8xh100", "16xa100-80", "4xa100-80 + 4xh100")}


@st.composite
def questions(draw, clusters=tuple(CLUSTERS)):
    """(model, cluster, workload, space) with a few hundred plans."""
    one_of = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    where = CLUSTERS[one_of(*clusters)]
    model = one_of(GPT, LLAMA, *([MIXTURE] if len(where.islands) == 1 else []))
    train = Train(global_batch=one_of(8, 16), seq_len=1024)
    families = list(schedules.families())
    space = default(model, where, train)
    chosen = {
        "tp": (1, 4) if len(where.islands) > 1 else (one_of(1, 2), 4),
        "cp": (1, one_of(1, 2)),
        "pp": (one_of(1, 2), 4),
        "mb": (1,),
        "ep": (one_of(1, 2),) if model is MIXTURE else (1,),
        "etp": (0,),
        "order": (("tp", "cp", "dp", "pp"), one_of(("tp", "cp", "pp", "dp"), ("dp", "tp", "cp", "pp"))),
        "sp": (True,),
        "algorithm": (one_of("ring", "ulysses", "allgather"),),
        "recompute": tuple(dict.fromkeys(("none", one_of("selective", "full")))),
        "schedule": tuple(dict.fromkeys(("1f1b", one_of(*families)))),
        "vpp": (1, 2),
        "zero": tuple(dict.fromkeys((one_of(0, 1), one_of(2, 3)))),
        "stages": ("even", "balanced") if len(where.islands) > 1 else ("even",),
    }
    if model is MIXTURE:
        chosen["ep"] = tuple(n for n in chosen["ep"] if n <= 2)
    return model, where, train, Space(domains=space.domains | {k: tuple(dict.fromkeys(v)) for k, v in chosen.items()})


def everything(space, model, where, train):
    """Every point of a space, plan by plan."""
    for core in cores(space, model, where, train):
        for inner in inners(space, core, model, where, train):
            for piped in pipelines(space, core, model, train):
                for state in states(space, core, where, train):
                    among = states(space, core, where, train)
                    apart = inner.shares == EVEN or exchanges_once(core, state)
                    if apart and together(core.pp, piped, state, among):
                        yield core, inner, piped, state


def walk_of(question, keep=1, **options):
    model, where, train, space = question
    return Walk(space, Evaluator(model, where, train), keep=keep, **options)


__all__ = ["everything", "plan_of", "questions", "walk_of"]
