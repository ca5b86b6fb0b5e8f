"""Recipes trained for real: the plans of a row under real processes, against one process.

A plan is trained on a small model in float64 and compared in its losses, its first gradients and its parameters. Plans
of as many ranks share one job, and a plan that several rows name is trained once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache

import msgspec

from meshwright.answer.predict import predict
from meshwright.errors import Diagnostic, MeshwrightError
from meshwright.lower.filling import FrozenOrder
from meshwright.papers.outcome import AT_MOST, DIED, Fact, Figure, Outcome, by_processes
from meshwright.plan import Plan, parse
from meshwright.plan.facets.sequence import PIECED, STATIC
from meshwright.plan.slices import portions_of
from meshwright.spec.cluster import Cluster
from meshwright.spec.cluster import load as load_cluster
from meshwright.spec.dimensions import transformer
from meshwright.spec.model import Model, from_config
from meshwright.spec.workload import Train

_SHAPE = {"layers": 4, "hidden": 32, "heads": 4, "kv_heads": 2, "vocab": 67, "ffn": 48, "gated": True}
_EXPERTS = {"experts": 4, "top_k": 2, "moe_ffn": 24}
DENSE = transformer(**_SHAPE, max_seq_len=32, name="small")
EXPERTS = transformer(**_SHAPE, **_EXPERTS, max_seq_len=32, name="small with experts")
#: The same of two layers, which are enough where no pipeline cuts them.
_SHALLOW = _SHAPE | {"layers": 2}
SHALLOW = transformer(**_SHALLOW, max_seq_len=32, name="shallow")
SHALLOW_EXPERTS = transformer(**_SHALLOW, **_EXPERTS, max_seq_len=32, name="shallow with experts")
STATES = {
    "architectures": ["Mamba2ForCausalLM"],
    "model_type": "mamba2",
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_heads": 8,
    "head_dim": 8,
    "state_size": 16,
    "n_groups": 2,
    "conv_kernel": 4,
    "expand": 2,
    "chunk_size": 8,
    "vocab_size": 67,
}
PARTS = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 32,
    "vocab_size": 67,
    "parallel_ways": 2,
}
#: A diffusion transformer behind a frozen encoder of images of 32 x 32, in as few numbers.
ENCODED = {
    "architectures": ["DiTPipeline"],
    "vae": {"block_out_channels": [4, 4, 8, 8], "layers_per_block": 1, "norm_num_groups": 2},
    "transformer": {
        "num_layers": 4,
        "num_attention_heads": 4,
        "attention_head_dim": 8,
        "patch_size": 2,
        "sample_size": 4,
        "num_embeds_ada_norm": 5,
    },
}
TRAIN = Train(global_batch=4, seq_len=16, dtype="fp32")
IMAGES = Train(global_batch=8, seq_len=32**2, image=32, dtype="fp32")
STEPS = 2
#: Relative to a tensor's largest element; the order of sums is what differs.
TOLERANCE = 1e-9
#: Processes that a sequence is cut over.
CUT_RANKS = 4

#: What was found in this process: the largest difference of a plan, or why it does not train.
_found: dict[str, float | Diagnostic] = {}


def model_of(plan: Plan) -> Model:
    """The small model that a plan is trained on: one with experts where it spreads experts, one with states where it
    cuts their sequences, one with a frozen encoder where it says when that is run, and deeper where a pipeline cuts its
    layers."""
    if plan.pipeline.filling:
        return from_config(ENCODED, name="small with an encoder")
    if plan.sequence.scans in PIECED:
        return from_config(STATES, name="small with states")
    if plan.layout.pp > 1:
        return EXPERTS if plan.experts.ep > 1 else DENSE
    return SHALLOW_EXPERTS if plan.experts.ep > 1 else SHALLOW


def train_of(plan: Plan) -> Train:
    """The small workload that a plan is trained on: with whole documents where groups share them, of images where a
    frozen encoder reads them."""
    if plan.pipeline.filling:
        return IMAGES
    return TRAIN if plan.sequence.groups == STATIC else msgspec.structs.replace(TRAIN, pack="packed")


def read(text: str) -> Plan:
    """A plan of a row with its ranks counted."""
    plan = parse(text)
    layout = plan.layout
    return plan.on(layout.tp * layout.pp * layout.cp * max(1, layout.dp))


def cluster_of(plan: Plan) -> Cluster:
    """The devices that a plan is legal on: all alike, or two kinds, half of the ranks on each, where it tells them
    apart. They are names: its ranks are processes of one machine."""
    ranks = plan.layout.num_ranks
    apart = plan.layout.shares or plan.kinds.any
    return load_cluster(f"{ranks // 2}xh100 + {ranks // 2}xa100" if apart else f"{ranks}xh100")


def train(texts: Iterable[str], *, done: Callable[[int], None] = lambda _: None) -> None:
    """Train plans that were not yet, those of equal size in one job; `done` is told how many after each."""
    sizes: dict[int, list[str]] = {}
    for text in dict.fromkeys(t for t in texts if t not in _found):
        sizes.setdefault(read(text).layout.num_ranks, []).append(text)
    for together in sizes.values():
        _found.update(_trained(together))
        done(len(together))


def _trained(texts: Sequence[str]) -> dict[str, float | Diagnostic]:
    """Each plan's largest difference. Where one of several ends their job, each has a job of its own."""
    from meshwright.run.equality import EqualityCase, apart

    plans = [read(text) for text in texts]
    cases = [
        EqualityCase(
            model=model_of(p),
            plan=p,
            train=train_of(p),
            steps=STEPS,
            portions=portions_of(p, cluster_of(p)),
            frozen_order=_frozen_order(p),
        )
        for p in plans
    ]
    try:
        return {text: found.most for text, found in zip(texts, apart(cases), strict=True)}
    except MeshwrightError as error:
        if len(texts) > 1:
            return {name: what for text in texts for name, what in _trained([text]).items()}
        return {texts[0]: error.diagnostics[0]}


def _frozen_order(plan: Plan) -> FrozenOrder | None:
    """The frozen passes of ranks in a plan's waits, as its prediction found it."""
    if not plan.pipeline.filling:
        return None
    found = predict(model_of(plan), cluster_of(plan), train_of(plan), plan, detail=False).filled
    return None if found is None else found.order


@cache
def _cut() -> dict[str, float]:
    """For every way to cut a sequence, how far real processes are from one."""
    from meshwright.run.sequences import apart

    return apart(CUT_RANKS)


def of_parts() -> Outcome:
    """The outcome of a model whose blocks have parts with streams of their own, trained by a process for each part."""
    from meshwright.run.equality import EqualityCase, apart

    model = from_config(PARTS, name="small of two parts")
    words = ("tp2 mb2", "tp2 mb1 full")
    cases = [EqualityCase(model=model, plan=read(text), train=TRAIN, steps=STEPS) for text in words]
    what = "largest difference from one process, blocks of two parts under"
    return Outcome(
        figures=tuple(
            Figure(f"{what} {text!r}", None, found.most, "", AT_MOST, TOLERANCE)
            for text, found in zip(words, apart(cases), strict=True)
        )
    )


def cut_over_processes(found: Outcome, name: str) -> Outcome:
    """An outcome with what real processes made of a cut sequence, outputs and gradients."""

    def real() -> Outcome:
        what = f"outputs and gradients on {CUT_RANKS} processes, furthest from one"
        return Outcome(figures=(Figure(what, None, _cut()[name], "", AT_MOST, TOLERANCE),))

    return by_processes(found, "the exchange between real processes", real)


def judged(texts: Sequence[str]) -> Outcome:
    """Train the plans in `texts` and return the outcome: a figure for each, and a fact that does not hold for each
    plan whose training failed."""
    train(texts)
    figures, facts, passing = [], [], False
    for text in texts:
        what, count = _found[text], read(text).layout.num_ranks
        if isinstance(what, Diagnostic):
            facts.append(Fact(f"{text!r} trains on {count} processes: {what.message}", False))
            passing = passing or what.code == DIED
        else:
            name = f"largest difference from one process, {text!r} on {count} processes"
            figures.append(Figure(name, None, what, "", AT_MOST, TOLERANCE))
    return Outcome(figures=tuple(figures), facts=tuple(facts), passing=passing)
