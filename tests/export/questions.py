"""Questions for the exporters, and random ones for property tests."""

import ast

from hypothesis import assume
from hypothesis import strategies as st

from meshwright import plan as plans
from meshwright import schedules
from meshwright.export import export
from meshwright.plan.facets.layout import DEFAULT_ORDER
from meshwright.plan.facets.memory import ATTENTION_KERNELS, RECOMPUTE_MODES
from meshwright.plan.facets.sequence import CP_ALGORITHMS
from meshwright.spec import cluster, model, workload
from tests.random_plans import sized

MODELS = ("llama3-8b", "llama3.2-1b", "qwen3-30b-a3b", "deepseek-v2-lite", "mixtral-8x7b", "gpt-oss-20b", "gpt3-13b")


def ask(target, name, on, train, words):
    """The export of a question in words."""
    nouns = model.load(name), cluster.load(on), workload.parse(train), plans.parse(words)
    return export(target, *nouns, framework=None)


@st.composite
def legal(draw):
    """(model, cluster, workload, plan), the plan legal and of any facets."""
    one_of = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    asked, kinds = model.load(one_of(*MODELS)), one_of("h100", "a100-80 + h100")
    moe = any(hasattr(block.mlp, "experts") for block in asked.blocks)
    family = schedules.get(one_of(*schedules.families(), "2bp:1f1b"))
    tp, pp, cp, dp = one_of(1, 2, 4), one_of(1, 2, 4), one_of(1, 1, 2), one_of(1, 2, 4)
    assume("+" not in kinds or tp * pp * cp * dp > 1)
    zero, microbatch = one_of(0, 1, 2, 3), one_of(1, 2)
    plan = plans.Plan(
        layout=plans.Layout(
            tp=tp,
            pp=pp,
            cp=cp,
            dp=dp,
            sp=moe or draw(st.booleans()),
            zero=zero,
            shard=one_of(0, 2) if zero else 0,
            order=one_of(DEFAULT_ORDER, ("tp", "cp", "pp", "dp"), ("cp", "tp", "dp", "pp")),
        ),
        pipeline=plans.Pipeline(schedule=family.name, vpp=one_of(*(family.vpps or (1, 2))), microbatch=microbatch),
        sequence=plans.Sequence(algorithm=one_of(*CP_ALGORITHMS)),
        experts=plans.Experts(ep=one_of(1, 2, 4), etp=one_of(0, 1)) if moe else plans.Experts(),
        memory=plans.Memory(
            recompute=(mode := one_of(*RECOMPUTE_MODES)),
            layers=one_of(0, 1) if mode != "none" else 0,
            attention=one_of(*ATTENTION_KERNELS),
        ),
        precision=plans.Precision(
            compute=one_of("", "bf16", "fp16", "fp32", "fp8", "fp8_row", "mxfp8", "nvfp4"),
            grads=one_of("fp32", "bf16"),
            master=one_of("fp32", "none", "bf16"),
            moments=one_of("fp32", "bf16"),
        ),
        overlap=plans.Overlap(dp=draw(st.booleans()), tp=draw(st.booleans()), pp=draw(st.booleans())),
    )
    train = workload.Train(
        global_batch=dp * microbatch * pp * one_of(2, 4),
        seq_len=2048,
        optimizer=one_of("adamw", "adam", "lion", "momentum"),
        dropout=draw(st.booleans()),
    )
    where = sized(plan, kinds)
    assume(not plans.check(plan, asked, where, train))
    return asked, where, train, plan


def listed(text: str) -> list[int]:
    """What Megatron's ``--moe-layer-freq`` reads from a sum of repeated lists, such as ``([0]*3+[1]*58)``."""

    def read(node: ast.expr) -> list[int]:
        match node:
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return read(left) + read(right)
            case ast.BinOp(left=left, op=ast.Mult(), right=ast.Constant(value=int(times))):
                return read(left) * times
            case ast.List(elts=items):
                return [item.value for item in items]
        raise AssertionError(f"no pattern of layers: {text}")

    return read(ast.parse(text, mode="eval").body)
