"""The batches that many devices take: ImageNet in an hour (Goyal et al., 2017, arXiv 1706.02677), BERT in 76 minutes
(You et al., 2019, arXiv 1904.00962)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from meshwright.answer.predict import predict
from meshwright.cost.collectives import collective_seconds
from meshwright.papers.checks.images import large_batch
from meshwright.papers.outcome import WITHIN, Check, Fact, Figure, Outcome, by_processes
from meshwright.plan import parse as parse_plan
from meshwright.spec.cluster import load as load_cluster
from meshwright.spec.model import load as load_model
from meshwright.spec.workload import parse as parse_train
from meshwright.work import Collective, Group, Hop

#: Sequences that BERT is pre-trained on: a million steps of 512; nine of ten are of 128 tokens, the last of 512.
BERT_SEQUENCES, SHORT, LONG, OF_SHORT = 512e6, 128, 512, 0.9


def nodes(count: int, devices: int, inside_gb_s: float, nic_gb_s: float) -> Group:
    """All devices of `count` nodes, with so many gigabytes a second between a node's devices and out of a node."""
    inside = Hop(name="node", members=devices, gb_s=inside_gb_s, latency_us=1.0, below=1, topology="ring")
    outside = Hop(
        name="network", members=count, gb_s=nic_gb_s, latency_us=5.0, below=devices, topology="fat_tree", scale_out=True
    )
    return Group(size=count * devices, hops=(inside, outside) if count > 1 else (inside,))


def all_reduce(group: Group) -> Callable[[float], float]:
    """Seconds of an all-reduce by its bytes."""
    return lambda size: collective_seconds(Collective(op="all_reduce", num_bytes=size, group=group))


def imagenet() -> Outcome:
    """The linear rule, its warm-up, and the network that sums ResNet-50's gradients; its step is the row's figures'."""
    errors = [_rule_error(eta) for eta in (2e-3, 1e-3)]
    warm = [rate(8192, epoch) for epoch in range(7)]
    return Outcome(
        figures=(
            Figure(
                "network that sums 100 MB in 125 ms (12.8 without overhead)",
                15,
                _network(100e6, 0.125),
                "Gbit/s",
                WITHIN,
                0.15,
                why="its 15 is an estimate with room for overhead; ours includes the sums inside a server",
            ),
            Figure("learning rate of minibatch 8192 after the warm-up", 3.2, warm[5], "", WITHIN, 1e-9, restated=True),
            Figure(
                "one step of k eta against k of eta: error for twice the rate (second order)",
                4.0,
                errors[0] / errors[1],
                "x",
                WITHIN,
                0.1,
            ),
        ),
        facts=(
            Fact("the rule is exact where gradients do not change", _rule_error(0.05, curved=False) < 1e-12),
            Fact("warm-up starts at 0.1, grows evenly over five epochs and stays", _even(warm), restated=True),
        ),
        baseline="8 GPUs of one server",
        assumptions=(
            "its section 4: 100 MB of gradients in servers of 8 with 50 Gbit/s; halving-doubling priced as the fastest "
            "algorithm of the cost model",
            "accuracy is not simulated",
        ),
    )


def bert() -> Outcome:
    """BERT-Large on the sequences of its pre-training, on 16 and on 1,024 chips."""
    few, many = _bert_hours(16, 512, 512), _bert_hours(1024, 65536, 32768)
    why = (
        "steps come out a quarter shorter than both of its times: how a compiler fused BERT in 2019 is not known, the "
        "default profile of TPUs is of later ones, and input, saving and compilation are not counted"
    )
    return Outcome(
        figures=(
            Figure("minutes on 1,024 TPU v3", 76, 60 * many, "min", WITHIN, 0.1, why, headline=True),
            Figure("days on 16 TPU v3", 3, few / 24, "days", WITHIN, 0.1, why, headline=True),
            Figure("times sooner on 64 times the chips", 72 * 60 / 76, few / many, "x", WITHIN, 0.2, why),
        ),
        baseline="batches of 512 on 16 chips, by Adam",
        assumptions=(
            "its abstract (v1): a million steps of 512 sequences, or 8,599 of 65,536 and then 32,768, which are as "
            "many; nine tenths of 128 tokens and the last of 512, as BERT's",
        ),
        missing=("that batches of 32,868 lose nothing is shown by training BERT, which was not done here",),
    )


def _bert_hours(chips: int, short_batch: int, long_batch: int) -> float:
    """Hours of BERT-Large's pre-training with one batch for short sequences and another for long ones."""
    model, cluster, seconds = load_model("bert-large"), load_cluster(f"{chips}xtpu_v3"), 0.0
    for batch, tokens, share in ((short_batch, SHORT, OF_SHORT), (long_batch, LONG, 1 - OF_SHORT)):
        optimizer = "lamb" if short_batch > 512 else "adamw"
        train = parse_train(f"batch={batch},seq={tokens},optimizer={optimizer}")
        step = predict(model, cluster, train, parse_plan(f"mb{batch // chips}"), detail=False)
        seconds += step.step_time_s * share * BERT_SEQUENCES / batch
    return seconds / 3600


def rate(minibatch: int, epoch: float) -> float:
    """The learning rate of a minibatch: 0.1 for each 256 examples, reached evenly from 0.1 over five epochs."""
    full = 0.1 * minibatch / 256
    return 0.1 + (full - 0.1) * min(epoch / 5, 1.0)


def _even(warm: list[float]) -> bool:
    steps = np.diff(warm)
    return warm[0] == 0.1 and bool(np.allclose(steps[:5], steps[0])) and steps[5] == 0.0


def _network(size: float, wanted_s: float) -> float:
    """Gbit/s of a server at which 32 servers of 8 sum so many bytes in so many seconds, by bisection."""
    low, high = 0.1, 100.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if all_reduce(nodes(32, 8, 20.0, middle))(size) < wanted_s else (middle, high)
    return high * 8


def _rule_error(eta: float, k: int = 8, curved: bool = True) -> float:
    """Distance between k small steps and one k times as large on the same examples, of least squares or of a linear
    loss, after one large step."""
    rng = np.random.default_rng(0)
    features, targets = rng.standard_normal((k, 32, 6)), rng.standard_normal((k, 32))
    start = rng.standard_normal(6)

    def slope(w: np.ndarray, i: int) -> np.ndarray:
        wrong = features[i] @ w - targets[i] if curved else -targets[i]
        return features[i].T @ wrong / 32

    small = start.copy()
    for i in range(k):
        small = small - eta * slope(small, i)
    large = start - eta * k * np.mean([slope(start, i) for i in range(k)], axis=0)
    return float(np.linalg.norm(small - large))


CHECKS = {
    "imagenet-1h": Check(lambda: by_processes(imagenet(), "training on digits", large_batch)),
    "lamb": Check(bert),
}
