"""Makes the records of serving techniques that the catalog ships: ``python tools/try_techniques.py``.

Every technique that computes what the model does is tried on every model, place and workload below, as ``meshwright
whatif --serve --try all --records FILE`` does, in a quarter of an hour of two cores.
"""

from __future__ import annotations

import gzip
from concurrent.futures import ProcessPoolExecutor
from itertools import product

import msgspec

from meshwright.answer.serving_check import refused
from meshwright.cost.engine import engine_profile
from meshwright.cost.standard import serving_costs
from meshwright.plan import parse as parse_plan
from meshwright.search.serving import learned
from meshwright.search.serving.evaluate import ServingEvaluator
from meshwright.search.serving.learned import AskedWords, TechniqueRecord, records_of
from meshwright.search.serving.techniques import techniques, what_helps
from meshwright.spec.cluster import load as load_cluster
from meshwright.spec.model import load as load_model
from meshwright.spec.serve import parse as parse_serve

MODELS = ("llama3.1-8b", "mistral-7b", "qwen2.5-14b", "phi-2")
PLACES = (("1xa100-80", "tp1"), ("1xh100", "tp1"), ("2xh100", "tp2"), ("2xa100-80", "dp2"))
WORKLOADS = (
    "batch=16,prompt=512,output=lognormal:mean=128;sigma=0.6",
    "batch=256,prompt=512,output=lognormal:mean=256;sigma=0.6",
    "batch=128,prompt=1024,prefix=768:groups=8,output=lognormal:mean=128;sigma=0.6",
    "batch=512,prompt=1024,prefix=512:groups=64,output=64",
    "batch=128,prompt=1536,output=32",
)


def tried(asked: AskedWords) -> list[TechniqueRecord]:
    """Try every exact technique on one question; none where it is refused."""
    model, cluster, serve = load_model(asked.model), load_cluster(asked.on), parse_serve(asked.serve)
    plan, profile = parse_plan(asked.plan).on(cluster.num_devices), engine_profile(serve.engine.profile)
    if refused(plan, model, cluster, serve):
        return []
    costs = serving_costs(profile.library)
    evaluator = ServingEvaluator(model, cluster, serve, serve.drawn(), costs, profile)
    exact = [one for one in techniques(model, cluster, serve) if one.exact]
    return records_of(asked, what_helps(evaluator, plan, exact))


def main() -> None:
    """Try everything and write the file."""
    questions = [AskedWords(m, on, plan, serve) for m, (on, plan), serve in product(MODELS, PLACES, WORKLOADS)]
    with ProcessPoolExecutor() as pool:
        found = [record for some in pool.map(tried, questions) for record in some]
    lines = b"".join(msgspec.json.encode(one) + b"\n" for one in found)
    learned.SHIPPED.parent.mkdir(exist_ok=True)
    learned.SHIPPED.write_bytes(gzip.compress(lines, mtime=0))
    print(f"{len(found)} records of {len(questions)} questions")


if __name__ == "__main__":
    main()
