"""The serving simulator against its plain reference, on requests of 1,024 tokens answered with 256."""

from __future__ import annotations

from bench.result import Result, best, once
from meshwright import serving
from meshwright.cost.standard import serving_costs
from meshwright.lower.forward import Forward
from meshwright.lower.place import Mesh
from meshwright.plan import parse
from meshwright.serving.cache import EngineLimits
from meshwright.simulate.iterations import priced
from meshwright.simulate.serve import simulate
from meshwright.simulate.serve_pool import served_alone
from meshwright.simulate.served import HostTimes, Replica
from meshwright.spec import cluster, model
from meshwright.spec.serve import parse as requests_of


def replica() -> Replica:
    """One replica of Llama-3-8B on an H100 under vLLM V1's policy."""
    where, plan = cluster.load("1xh100"), parse("tp1").on(1)
    forward = Forward(model.load("llama3-8b"), plan, Mesh(plan, where))
    costs = priced(forward, where.islands[0].device, serving_costs(), tokens=8448, batch=256, context=2048)
    limits = EngineLimits(max_batch=256, budget=8192, block=16, blocks=28_000)
    policy = serving.get("batching", "vllm-v1")
    return Replica(policy=policy, limits=limits, costs=costs, host=HostTimes(step_s=1e-3, request_s=1e-5))


def serving_simulator() -> Result:
    """Poisson requests at three quarters of what the replica can answer."""
    one = replica()
    many, few = (requests_of(f"rate=15,prompt=1024,output=256,requests={count}").drawn() for count in (1_000_000, 300))
    seconds = best(lambda: simulate(one, many), times=3)
    plain = once(lambda: served_alone(one, few, skips=False))
    return Result(
        what=f"serving simulator, {len(many):,} Poisson requests of 1,024 + 256 tokens",
        value=len(many) / seconds,
        unit="requests/s",
        target=100_000.0,
        at_least=True,
        reference=len(few) / plain,
    )
