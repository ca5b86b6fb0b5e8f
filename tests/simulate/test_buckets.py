"""Whole gradients are summed over replicas in buckets of a framework's size."""

import math

import pytest

from meshwright.cost import Costs
from meshwright.cost.chain import Estimate
from meshwright.cost.framework import Defaults, Framework
from meshwright.plan import parse
from meshwright.simulate.price import Pricer
from meshwright.simulate.step import simulate
from meshwright.spec.cluster import load
from meshwright.spec.dimensions import transformer
from meshwright.spec.workload import Train
from meshwright.work import Collective

MODEL = transformer(layers=4, hidden=1024, heads=8, ffn=4096, vocab=8192, max_seq_len=1024)
BUCKET = 25 * 2**20
EACH, PER_BYTE = 1e-3, 1e-9


def a_message(work, device):
    """Every collective takes a millisecond and a nanosecond a byte; nothing else takes any time."""
    if isinstance(work, Collective):
        return Estimate(EACH + work.num_bytes * PER_BYTE, "network", "given", 0.0)
    return Estimate(0.0, "gemm", "given", 0.0)


def exchanges(plan, bucket_bytes):
    """Seconds and bytes of what a step exchanges over replicas."""
    framework = Framework(name="buckets", defaults=Defaults(bucket_bytes=bucket_bytes))
    costs = Costs(framework, links=(a_message,))
    run = simulate(parse(plan), MODEL, load("8xh100"), Train(global_batch=8, seq_len=1024), costs)
    pricer = Pricer(costs)
    for program in run.lowered.programs:
        if program.kind == "exchange" and len(program.moves) == 1:
            (move,) = program.moves
            yield move.op, move.num_bytes, pricer.moved(program).seconds


def test_gradients_go_in_equal_messages_none_above_a_bucket():
    found = [e for e in exchanges("dp8 mb1 grads=fp32", BUCKET) if e[1] > 4]
    assert any(size > BUCKET for _, size, _ in found)
    for op, size, seconds in found:
        assert op == "all_reduce"
        assert seconds == pytest.approx(math.ceil(size / BUCKET) * EACH + size * PER_BYTE)


@pytest.mark.parametrize("plan, bucket", [("dp8 mb1", 0), ("dp8 zero1 mb1", BUCKET), ("dp8 zero3 mb1", BUCKET)])
def test_frameworks_without_buckets_and_sharded_states_send_a_layer_at_once(plan, bucket):
    found = list(exchanges(plan, bucket))
    assert any(size > BUCKET for _, size, _ in found)
    assert all(seconds == pytest.approx(EACH + size * PER_BYTE) for _, size, seconds in found)
