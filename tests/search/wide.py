"""Questions over all that a search is asked about: models, clusters, framework profiles, and every facet of a plan."""

from hypothesis import assume
from hypothesis import strategies as st
from msgspec.structs import replace

from meshwright import schedules
from meshwright.cost import Costs, load_framework, standard
from meshwright.plan.facets.layout import DEFAULT_ORDER
from meshwright.search.bounds import CoreScope
from meshwright.search.space import Space, cores, default
from meshwright.spec import cluster
from meshwright.spec.cluster import Cluster
from meshwright.spec.model import transformer
from meshwright.spec.workload import Lora, Train

#: Of published widths, so that kernels and exchanges outweigh the host; one layer is one block however it is cut.
DENSE = transformer(layers=12, hidden=2048, heads=16, kv_heads=8, ffn=5632, vocab=1024, gated=True, name="dense")
NARROW = transformer(layers=12, hidden=1024, heads=16, vocab=50304, max_seq_len=4096, name="narrow")
SINGLE = transformer(layers=1, hidden=2048, heads=16, vocab=1024, name="single")
#: Experts in all layers but the first, and few tokens for each: exchanges take longer than what is computed.
MIXTURE = transformer(
    layers=12, hidden=2048, heads=16, ffn=5632, vocab=1024, gated=True, experts=8, top_k=2, moe_ffn=5632,
    dense_layers=1, name="mixture",
)  # fmt: skip
MODELS = (DENSE, NARROW, MIXTURE, SINGLE)
ALIKE = ("8xh100", "16xa100-80", "16xt4", "8xmi250x")
CLUSTERS = {name: cluster.load(name) for name in (*ALIKE, "4xa100-80 + 4xh100", "8xa100-80 + 8xh100")}
# every step of a ring takes long here, so one message of a stage is far cheaper than one of each layer
CLUSTERS["slow steps"] = cluster.load("2xp5").reaching({"all_gather": 20.0, "all_reduce": 20.0})
PROFILES = ("default", "torchtitan", "megatron-lm", "megatron-bridge-2026", "deepspeed", "nanotron")
ORDERS = (DEFAULT_ORDER, ("dp", "tp", "cp", "pp"), ("cp", "dp", "tp", "pp"), ("tp", "cp", "pp", "dp"))
OVERLAPS = (("dp", "pp"), ("dp", "pp", "usual"), (), ("dp",), ("pp",), ("dp", "pp", "tp"), ("dp", "ep", "pp"))
#: Whose order is not worked out from the times of the plan's passes, which takes longer.
SCHEDULES = tuple(name for name, family in schedules.families().items() if "t_f" not in family.params)


HOST = ("host_us_per_kernel", "host_us_per_collective", "host_us_per_pass", "host_us_per_dispatch")


@st.composite
def costs(draw) -> Costs:
    """The costs of a framework profile: with what its host takes, with nothing, or with much for every pass."""
    framework = load_framework(draw(st.sampled_from(PROFILES)))
    taken = draw(st.sampled_from((None, {}, {"host_us_per_pass": 3000.0})))
    if taken is not None:
        framework = replace(framework, **dict.fromkeys(HOST, 0.0) | taken)
    return standard(framework)


def limited(where: Cluster, memory_gb: float | None) -> Cluster:
    """The cluster with so much memory on every device, where some plans do not fit."""
    if memory_gb is None:
        return where
    islands = [replace(i, device=replace(i.device, memory_bytes=int(memory_gb * 1e9))) for i in where.islands]
    return replace(where, islands=tuple(islands))


@st.composite
def wide_questions(draw, most=None):
    """((model, cluster, workload, space), costs), of a space that is not empty and has `most` plans."""
    name, values = draw(st.sampled_from(tuple(CLUSTERS))), 2
    model, where = draw(st.sampled_from(MODELS)), limited(CLUSTERS[name], draw(st.sampled_from((None, 6, 10, 24))))
    train = Train(
        global_batch=draw(st.sampled_from((8, 16, 32))),
        seq_len=draw(st.sampled_from((128, 512, 4096))),
        dtype=draw(st.sampled_from(("bf16", "bf16", "fp32"))),
        dropout=draw(st.booleans()),
        lora=draw(st.sampled_from((None, None, None, Lora()))),
        optimizer=draw(st.sampled_from(("adamw", "sgd"))),
    )

    def some(*known, most=values):
        return tuple(draw(st.lists(st.sampled_from(known), min_size=1, max_size=most, unique=True)))

    mixture, islands = model is MIXTURE, len(where.islands) > 1
    sizes = {
        "tp": some(1, 1, 2, 4) if not islands else some(1, 2),
        "cp": some(1, 1, 2),
        "pp": some(1, 2, 4, 6),
        "mb": some(1, 2, most=1),
        "ep": some(1, 2, 4) if mixture else (1,),
        "etp": some(0, 1, most=1) if mixture else (0,),
    }
    rest = {
        "order": some(*ORDERS),
        "sp": some(True, False),
        "algorithm": some("ring", "ulysses", "allgather", most=1),
        "recompute": some("none", "selective", "operators", "full"),
        "recompute_layers": some(0, 0, 1),
        "attention": some("flash", "unfused", most=1),
        "dtype": some("", "fp8", "fp32", "fp16"),
        "grads": some("fp32", "bf16"),
        "master": some("fp32", "none", "bf16"),
        "moments": some("fp32", "bf16", "fp8"),
        "overlap": some(*OVERLAPS),
        "imbalance": some(1.0, 1.5, most=1),
        "loss": some("eager", "fused"),
        "ulysses": some(1, 1, 2, most=1),
        "gathered": some("again", "kept", most=1),
        "params": some("bf16", "bf16", "fp8", most=1),
        "schedule": some(*SCHEDULES),
        "vpp": draw(st.sampled_from((None, (1, 2, 3, 4, 6)))),
        "zero": some(0, 1, 2, 3),
        "gather": some("ahead", "after"),
        "shard": draw(st.sampled_from((None, None, (0, 1, 2)))),
        "stages": some("even", "balanced"),
        "shares": ("even", "balanced") if islands else ("even",),
    }
    if draw(st.booleans()):  # replicas alone, and little to compute: the step ends with what is exchanged
        sizes |= {"tp": (1,), "cp": (1,), "pp": some(1, 2, 4, 6)}
        rest |= {"overlap": (("dp", "pp"),), "vpp": some(1, 2, 3, 6)}
        train = replace(train, seq_len=draw(st.sampled_from((128, 512))))
    asked = model, where, train
    space = Space(domains=default(*asked).domains | sizes | rest)
    number = sum(CoreScope.of(space, core, *asked).size() for core in cores(space, *asked))
    assume(number if most is None else 0 < number <= most)
    return (*asked, space), draw(costs())
