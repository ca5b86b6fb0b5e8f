"""Small models, clusters and random plans for property tests."""

from functools import cache
from typing import NamedTuple

from hypothesis import assume
from hypothesis import strategies as st

from meshwright import plan as plans
from meshwright import schedules
from meshwright.plan import Plan
from meshwright.plan.facets.layout import DEFAULT_ORDER
from meshwright.plan.facets.memory import ATTENTION_KERNELS, RECOMPUTE_MODES
from meshwright.plan.facets.sequence import CP_ALGORITHMS
from meshwright.spec import cluster
from meshwright.spec.cluster import Cluster
from meshwright.spec.model import Model, load, transformer
from meshwright.spec.workload import Train

GPT = transformer(layers=12, hidden=256, heads=8, vocab=1024, max_seq_len=128, name="gpt")
LLAMA = transformer(layers=12, hidden=256, heads=8, kv_heads=4, ffn=512, vocab=1024, gated=True, name="llama")
MIXTURE = transformer(
    layers=12,
    hidden=256,
    heads=8,
    ffn=512,
    vocab=1024,
    gated=True,
    experts=8,
    top_k=2,
    moe_ffn=128,
    shared_ffn=128,
    dense_layers=1,
    name="mixture",
)
LATENT = load(
    "deepseek-v2-lite", num_hidden_layers=8, hidden_size=256, num_attention_heads=8, n_routed_experts=8, vocab_size=1024
)
MODELS = (GPT, LLAMA, MIXTURE, LATENT)
CLUSTERS = {name: cluster.load(name) for name in ("64xh100", "64xa100-80", "32xa100-80 + 32xh100")}
#: Devices of the clusters that random plans are asked on, of as many as the plan has ranks.
DEVICES = ("h100", "a100-80", "a100-80 + h100")
STORED = ("fp32", "bf16", "fp16", "fp8", "none")
PRECISIONS = ("", "fp32", "fp16", "bf16", "fp8")
#: How context parallelism exchanges: each algorithm, then what swaps heads inside it.
SEQUENCES = (
    *(plans.Sequence(algorithm=name) for name in CP_ALGORITHMS),
    plans.Sequence(algorithm="ring", ulysses=2),
    plans.Sequence(algorithm="allgather", ulysses=2),
)
SCHEDULES = (*schedules.families(), "2bp:1f1b", "2bp:interleaved")


@cache
def of_size(num_devices: int, devices: str = "h100") -> Cluster:
    """A cluster of that many devices, in equal parts of each kind."""
    kinds = devices.split(" + ")
    return cluster.load(" + ".join(f"{num_devices // len(kinds)}x{kind}" for kind in kinds))


def sized(plan: Plan, devices: str = "h100") -> Cluster:
    """A cluster of as many devices as the plan has ranks."""
    return of_size(plan.layout.num_ranks, devices)


class Question(NamedTuple):
    """What a prediction is asked for."""

    plan: Plan
    model: Model
    where: Cluster
    train: Train

    def __repr__(self) -> str:
        return f"{self.model.name} on {self.where.name}, {self.train.text()}: {self.plan}"


@st.composite
def plans_in_words(draw):
    """Any plan that can be said, legal or not."""
    one_of, count = lambda *values: draw(st.sampled_from(values)), st.integers(1, 64)
    family = schedules.get(one_of(*SCHEDULES))
    zero = one_of(0, 1, 2, 3)
    vpp = 1 if family.name == "1f1b" else draw(count)  # with chunks the word means interleaved
    return plans.Plan(
        layout=plans.Layout(
            tp=draw(count),
            pp=draw(count),
            dp=draw(st.integers(0, 64)),
            cp=draw(count),
            sp=draw(st.booleans()),
            zero=zero,
            shard=draw(st.integers(0, 64)),
            order=tuple(draw(st.permutations(DEFAULT_ORDER))),
            stages=tuple(draw(st.lists(count, max_size=4))),
        ),
        pipeline=plans.Pipeline(schedule=family.name, vpp=vpp, microbatch=draw(count)),
        sequence=plans.Sequence(algorithm=one_of(*CP_ALGORITHMS), ulysses=draw(count)),
        experts=plans.Experts(ep=draw(count), etp=draw(st.integers(0, 8)), imbalance=draw(st.floats(1.0, 1e5))),
        memory=plans.Memory(
            recompute=one_of(*RECOMPUTE_MODES),
            layers=draw(st.integers(0, 8)),
            attention=one_of(*ATTENTION_KERNELS),
            loss=one_of("eager", "copied", "in-place", "fused"),
            gathered=one_of("again", "kept"),
        ),
        precision=plans.Precision(
            compute=one_of(*PRECISIONS, "fp8_row", "fp8_block", "mxfp8", "nvfp4"),
            params=one_of("bf16", "fp8"),
            grads=one_of(*STORED),
            master=one_of(*STORED),
            moments=one_of(*STORED),
        ),
        overlap=plans.Overlap(dp=draw(st.booleans()), tp=draw(st.booleans()), pp=draw(st.booleans())),
    )


@st.composite
def legal_plans(draw, models=MODELS, devices=DEVICES):
    """A question that `check` has nothing against."""
    one_of = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    model, kinds = one_of(*models), one_of(*devices)
    family = schedules.get(one_of(*SCHEDULES))
    tp, pp, cp, dp = one_of(1, 2, 4), one_of(1, 2, 4), one_of(1, 1, 2, 4), one_of(1, 2, 4)
    assume((2 if "+" in kinds else 1) <= tp * pp * cp * dp <= 64)
    zero, microbatch = one_of(0, 1, 2, 3), one_of(1, 2)
    moe = model in (MIXTURE, LATENT)
    plan = plans.Plan(
        layout=plans.Layout(
            tp=tp,
            pp=pp,
            dp=dp,
            cp=cp,
            sp=moe or draw(st.booleans()),
            zero=zero,
            shard=one_of(0, 1, 2) if zero else 0,
            order=one_of(DEFAULT_ORDER, ("tp", "cp", "pp", "dp")),
        ),
        pipeline=plans.Pipeline(schedule=family.name, vpp=one_of(*(family.vpps or (1, 2))), microbatch=microbatch),
        sequence=one_of(*SEQUENCES[:3] if cp < 4 else SEQUENCES),
        experts=plans.Experts(ep=one_of(1, 2, 4), etp=one_of(0, 1)) if moe else plans.Experts(),
        memory=plans.Memory(recompute=one_of(*RECOMPUTE_MODES), attention=one_of(*ATTENTION_KERNELS)),
        precision=plans.Precision(compute=one_of(*PRECISIONS), master=one_of("fp32", "none")),
        overlap=plans.Overlap(dp=draw(st.booleans()), tp=draw(st.booleans()), pp=draw(st.booleans())),
    )
    num_microbatches = pp * one_of(2, 4)
    train = Train(global_batch=dp * microbatch * num_microbatches, seq_len=128, dropout=draw(st.booleans()))
    where = sized(plan, kinds)
    assume(not plans.check(plan, model, where, train))
    return Question(plan, model, where, train)
