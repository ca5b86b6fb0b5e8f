"""The serving engine under H2O's budget, on tiny random models in float64: a whole budget changes no answer, and under
a smaller one answers, scores and kept tokens are those of plain loops within transformers' model."""

from __future__ import annotations

from math import ceil, exp, tanh

import msgspec
import numpy as np
import pytest
import torch

from meshwright.endpoint.figures import FrontFigures
from meshwright.errors import MeshwrightError
from meshwright.plan import parse as plan_of
from meshwright.run.serve import heavy
from meshwright.run.serve.built import engine
from meshwright.serving.batching import Iterate
from meshwright.simulate.serve_plain import Clock
from meshwright.simulate.serve_pool import ReplicaPool
from meshwright.spec.serve import engine_words as parse
from tests.run.served_models import LIMITS, answers, generated, greedy, prompts, published, served
from tests.serving.costs import replica, requests

pytestmark = pytest.mark.usefixtures("one_thread")
#: Of transformers' function of attention: the share that is kept, where each part of the text ends, and what came out.
LOOPS = {"share": 1.0, "ends": (), "kept": {}}


def staying(tokens, share):
    """How many of so many tokens stay: a share of them, or so many."""
    return min(tokens, int(share[:-1])) if isinstance(share, str) else ceil(tokens * share)


def attention_by_loops(module, query, key, value, mask, scaling, softcap=None, sliding_window=None, **_):
    """H2O's attention of one text [1, heads, tokens, d] (2306.14048, algorithm 1), a part of the text at a time: each
    token sees what was kept and its part up to itself; behind a part the tokens with the least attention leave, but
    for the last half of the budget."""
    q, k, v = (x[0].detach().numpy() for x in (query, key, value))
    shared, out = len(q) // len(k), np.zeros((q.shape[1], len(q), v.shape[-1]))
    for head in range(len(k)):
        sums: dict[int, float] = {}
        begin = 0
        for end in LOOPS["ends"]:
            for place in range(begin, end):
                sums[place] = 0.0
                for mine in range(head * shared, (head + 1) * shared):
                    seen = [at for at in sums if not sliding_window or at > place - sliding_window]
                    scores = [scaling * float(q[mine, place] @ k[head, at]) for at in seen]
                    scores = [softcap * tanh(score / softcap) for score in scores] if softcap else scores
                    whole = sum(map(exp, scores))
                    for at, score in zip(seen, scores):
                        sums[at] += exp(score) / whole
                        out[place, mine] += exp(score) / whole * v[head, at]
            budget = staying(end, LOOPS["share"])
            last = end - (budget + 1) // 2
            others = sorted((at for at in sums if at < last), key=sums.get)
            for at in others[: len(sums) - budget]:
                del sums[at]
            begin = end
        LOOPS["kept"][module.layer_idx, head] = set(sums)
    return torch.from_numpy(out).unsqueeze(0), None


def looped(net, tokens, parts, share):
    """The scores [tokens, vocab] of a text in parts of so many tokens, and what is kept."""
    from transformers import AttentionInterface

    AttentionInterface.register("loops", attention_by_loops)
    net.set_attn_implementation("loops")
    LOOPS.update(share=share, ends=tuple(np.cumsum(parts)), kept={})
    with torch.no_grad():
        return net(torch.tensor([tokens]), use_cache=False).logits[0], LOOPS["kept"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders and models by family, and the greedy answers of the first."""
    found = {}
    for family in ("llama", "gemma2"):
        folder = tmp_path_factory.mktemp(family)
        found[family] = folder, published(family, folder)
    return found, generated(found["llama"][1])


def asked(**said):
    return [greedy(i, prompt, limit, **said) for i, (prompt, limit) in enumerate(zip(prompts(), LIMITS))]


@pytest.mark.parametrize(
    "words",
    [
        "policy=vllm-v1,budget=7,block=4,kv_blocks=12,max_batch=4",
        "policy=vllm-v0,block=4,kv_blocks=13,preempt=swap,host=1MiB",
        "policy=static,block=4,kv_blocks=40,max_batch=4",
    ],
)
def test_a_whole_budget_changes_no_answer_and_is_at_no_distance(models, words):
    found, wanted = models
    one = served(found["llama"][0], f"{words},kv_budget=h2o:1")
    assert answers(one, asked(), every=2) == wanted
    said = one.figures()
    assert said.compared and said.score_distance < 1e-12


@pytest.mark.parametrize(
    ("family", "words", "share"),
    [
        ("llama", "policy=vllm-v0,block=2,kv_blocks=90", 0.4),
        ("llama", "policy=vllm-v1,budget=11,block=4,kv_blocks=90", 0.5),
        ("llama", "policy=static,block=1,kv_blocks=90,max_batch=4", 0.3),
        ("llama", "policy=vllm-v0,block=2,kv_blocks=90", "9t"),
        ("gemma2", "policy=sarathi,budget=9,block=1,kv_blocks=90", 0.3),
    ],
)
def test_scores_and_kept_tokens_are_those_of_loops_over_heads_and_tokens(models, family, words, share, monkeypatch):
    monkeypatch.setattr(heavy, "MOST", 300)  # a prompt of 17 sees 17 tokens by 4 heads: four queries at a time
    folder, net = models[0][family]
    one = served(folder, f"{words},kv_budget=h2o:{share}")
    for each in asked(logprobs=1):
        one.submit(each)
    made, scores, held = {i: [] for i in range(6)}, {i: [] for i in range(6)}, {}
    while not one.idle:
        for piece in one.step():
            made[piece.number] += piece.tokens
            scores[piece.number] += [score.logprob for score in piece.scores]
        held |= one.tables.held
        assert all(len(each.table) == each.one.blocks for each in one.tables.held.values())
    assert not one.figures().preempted
    kv, block, last = one.executor.layers.kv, one.decider.limits.block, one.records[-1].requests[-1][0]
    apart = whole = 0.0
    for number, prompt in enumerate(prompts()):
        text = prompt + made[number][:-1]
        parts = [new for record in one.records for who, new, _, _ in record.requests if who == number]
        found, kept = looped(net, text, parts, share)
        mine = found[len(prompt) - 1 :].log_softmax(-1)
        assert mine.argmax(-1).tolist() == made[number]
        assert scores[number] == pytest.approx(mine.max(-1).values.tolist(), rel=1e-6)
        if number == last:  # nobody has got its blocks since
            table = held[number].table
            assert "static" in words or len(table) == ceil(staying(len(text), share) / block)  # no more than is kept
            slots = [table[at // block] * block + at % block for at in range(staying(len(text), share))]
            for (layer, head), wanted in kept.items():
                assert set(kv.positions[layer].flatten(0, 1)[slots, head].tolist()) == wanted
        net.set_attn_implementation("eager")
        with torch.no_grad():
            exact = net(torch.tensor([text]), use_cache=False).logits[0, -1]
        apart, whole = apart + (found[-1] - exact).square().sum(), whole + exact.square().sum()
    said = one.figures()
    assert said.compared == 6 and said.score_distance > 0.001
    assert said.score_distance == pytest.approx((apart / whole).sqrt().item(), rel=1e-5)
    front = FrontFigures("tiny")
    front.reported(said)
    line = f'meshwright:kv_budget_score_distance{{model_name="tiny"}} {said.score_distance}'
    assert line in front.text().decode()


@pytest.mark.parametrize("more", ["", ",preempt=swap,host=1MiB"])
def test_preempted_and_cancelled_requests_change_no_answer_under_a_budget(models, more):
    folder, words = models[0]["llama"][0], "policy=vllm-v0,block=2,kv_budget=h2o:0.5"
    alone = served(folder, f"{words},kv_blocks=90,max_batch=1")
    wanted = answers(alone, asked())
    one = served(folder, f"{words},kv_blocks=17{more}")
    assert answers(one, asked(), every=2) == wanted != models[1]
    assert one.figures().preempted
    gone = asked()
    for each in gone:
        one.submit(each)
    left = {i: [] for i in range(6)}
    for step in range(200):
        if step == 4:
            one.cancel(0)
            one.cancel(3)
        for piece in one.step():
            left[piece.number] += piece.tokens
        assert len(one.tables.free) == one.state.cache.bare
    assert one.idle and not one.figures().blocks_used
    assert [left[i] for i in (1, 2, 4, 5)] == [wanted[i] for i in (1, 2, 4, 5)]
    begun = msgspec.structs.replace(gone[2], prompt=(*gone[2].prompt, *wanted[2][:5]), limit=7, answered=5)
    assert answers(one, [begun]) == [wanted[2][5:]]  # as after an engine that died


def test_the_engine_runs_the_iterations_that_the_simulator_predicts_under_a_budget(models):
    words = "policy=vllm-v1,budget=24,max_batch=6,block=2,kv_blocks=13,kv_budget=h2o:0.4"
    one = served(models[0]["llama"][0], words)
    answers(one, asked())
    rows = [(0.0, len(prompt), limit) for prompt, limit in zip(prompts(), LIMITS)]
    side = replica("vllm-v1", max_batch=6, budget=24, block=2, blocks=13)
    side = msgspec.structs.replace(side, limits=one.decider.limits)
    clock = Clock(side, requests(*rows), skips=False, logs=True)
    ReplicaPool([clock], clock.requests).run()
    runs = [run for entry in clock.log for run in entry.decisions if isinstance(run, Iterate)]
    assert len(runs) > 10 and one.figures().preempted
    assert [{each[:3] for each in record.requests} for record in one.records] == [
        {(share.number, share.new, share.past) for share in run.shares} for run in runs
    ]


@pytest.mark.parametrize("plan", ["tp2", "pp2"])
def test_ranks_under_a_budget_answer_as_one_process(models, plan):
    folder, words = models[0]["llama"][0], "policy=vllm-v0,block=2,kv_blocks=17,kv_budget=h2o:0.5"
    one = engine(folder, plan_of(plan), parse(words), dtype="float64")
    try:
        assert answers(one, asked()) == answers(served(folder, words), asked())
        assert one.figures().preempted and one.figures().score_distance > 0.001
    finally:
        one.close()


@pytest.mark.parametrize(
    ("plan", "words", "said"),
    [
        ("tp1", "kv_budget=scalekv", "kv_budget=scalekv is predicted, and not served: layers keep alike"),
        ("tp1", "kv_budget=h2o,prefix_cache=yes", "a KV budget and shared prefixes"),
        ("tp1", "kv_budget=h2o,draft=ngram", "a KV budget and guesses"),
        ("tp4", "kv_budget=h2o", "a KV budget where tp4 repeats key-value heads"),
        ("tp1", "kv_budget=h3o", "no kv_budget policy 'h3o'"),
    ],
)
def test_what_a_budget_is_not_served_with_is_refused_with_the_reason(models, plan, words, said):
    with pytest.raises(MeshwrightError) as caught:
        engine(models[0]["llama"][0], plan_of(plan), parse(words), dtype="float64")
    found = [one for one in caught.value.diagnostics if said in one.message]
    assert found and found[0].help and found[0].code == ("W013" if "h3o" in words else "W014")
