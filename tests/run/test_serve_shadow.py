"""The serving engine under ShadowKV's budget, on a tiny random model in float64."""

import pytest
import torch

from meshwright.errors import MeshwrightError
from meshwright.plan import parse as plan_of
from meshwright.run.serve import shadow
from meshwright.run.serve.built import engine
from meshwright.spec.serve import engine_words as parse
from tests.run.served_models import LIMITS, answers, generated, greedy, prompts, published, served

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    net = published("llama", folder)
    return folder, net, generated(net)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(shadow, "RECENT", 2)
    monkeypatch.setattr(shadow, "CHUNK", 2)
    monkeypatch.setattr(shadow, "OUTLIERS", 0.2)


def asked(**said):
    return [greedy(i, prompt, limit, **said) for i, (prompt, limit) in enumerate(zip(prompts(), LIMITS))]


@pytest.mark.parametrize("words", ["budget=7,block=4,kv_blocks=14,max_batch=4", "policy=vllm-v0,block=4,kv_blocks=90"])
def test_a_whole_budget_changes_no_answer_and_is_at_no_distance(llama, words):
    one = served(llama[0], f"{words},kv_budget=shadowkv:1")
    assert answers(one, asked(), every=2) == llama[2]
    said = one.figures()
    assert said.compared and said.score_distance < 1e-12
    assert all(not layer for layer in one.executor.layers.kv.kept)  # whoever left is forgotten


def test_ranks_of_tensor_parallelism_and_stages_answer_as_one_process(llama):
    one = engine(llama[0], plan_of("tp2 pp2"), parse("block=4,kv_blocks=90,kv_budget=shadowkv:1"), dtype="float64")
    try:
        assert answers(one, asked()[:3]) == llama[2][:3]
    finally:
        one.close()


def test_keys_of_lower_rank_and_fewer_chunks_are_at_a_distance_that_is_said(llama, monkeypatch):
    monkeypatch.setattr(shadow, "RANK", 4)  # of 16
    apart = []
    for share in (0.2, 0.7):
        one = served(llama[0], f"block=4,kv_blocks=90,kv_budget=shadowkv:{share}")
        made = answers(one, asked())
        assert [len(answer) for answer in made] == list(LIMITS)
        apart.append(one.figures().score_distance)
    assert all(0 < distance < 2 for distance in apart)


def test_a_token_attends_to_outliers_the_last_tokens_and_the_chunks_of_the_best_landmarks(llama, monkeypatch):
    """By plain loops over heads: which chunks are chosen, and what comes of a low-rank key."""
    monkeypatch.setattr(shadow, "RANK", 5)
    one = served(llama[0], "block=4,kv_blocks=90,kv_budget=shadowkv:0.3")
    seen = []
    chosen = shadow.ShadowCore._chosen

    def noted(self, module, kept, q):
        found = chosen(self, module, kept, q)
        seen.append((kept, q, found, module))
        return found

    monkeypatch.setattr(shadow.ShadowCore, "_chosen", noted)
    answers(one, asked()[2:3])
    kept, q, (keys, values), module = seen[0]
    chunks, shared, d = kept.landmarks.shape
    turns = one.executor.layers._turns_of(module, torch.arange(2 * chunks))
    for head in range(shared):
        mine = q[head * 2 : head * 2 + 2] @ kept.landmarks[:, head].T * d**-0.5
        best = mine.softmax(-1).max(0).values
        best[kept.outliers[head]] = -1
        some = sorted(best.argsort(descending=True)[: keys.shape[1] // 2].tolist())
        at = torch.tensor([2 * chunk + i for chunk in some for i in range(2)])
        plain = kept.low[at] @ kept.basis[:, head * d : (head + 1) * d]
        cos, sin = (table[at, 0] for table in turns)
        wanted = plain * cos + plain.roll(d // 2, -1) * sin
        torch.testing.assert_close(keys[head], wanted)
        torch.testing.assert_close(values[head], kept.values[at, head])
    whole = kept.low @ kept.basis  # the best approximation of rank 5: nothing of the basis is left over
    torch.testing.assert_close(whole @ kept.basis.T, kept.low)
    assert kept.low.shape == (2 * chunks, 5) and kept.outliers.shape == (shared, 2)


def test_what_shadows_are_not_served_with_is_said_at_once(llama, tmp_path):
    published("mistral", tmp_path)
    words = "kv_budget=shadowkv,prefix_cache=yes,preempt=swap,host=1MiB,policy=static,draft=ngram"
    with pytest.raises(MeshwrightError) as raised:
        engine(tmp_path, plan_of("tp1"), parse(words), dtype="float64")
    assert [d.code for d in raised.value.diagnostics] == ["W014"] * len(raised.value.diagnostics)
    assert len(raised.value.diagnostics) >= 5
