"""The serving engine against transformers' ``generate`` on tiny random models in float64: the same greedy answers token
by token under every policy and with every feature that claims to be exact, and what sampling and bounds do."""

from __future__ import annotations

import resource
import warnings
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch

from meshwright.endpoint.seam import Prompted, Sampling
from meshwright.errors import MeshwrightError
from meshwright.plan import parse as plan_of
from meshwright.run.serve import built
from meshwright.run.serve.built import engine
from meshwright.run.serve.packed import PackedRow, PackedTokens
from meshwright.run.serve.ranks import cut
from meshwright.run.serve.sampling import TokenChoice, choose
from meshwright.spec.serve import engine_words as parse
from tests.run.served_models import FAMILIES, LIMITS, answers, generated, greedy, prompts, published, served

pytestmark = pytest.mark.usefixtures("one_thread")
#: Chunked prompts, shared prefixes and so few blocks that requests are evicted and computed again.
CROWDED = "block=4,budget=7,kv_blocks=12,prefix_cache=yes,max_batch=4"


def asked():
    return [greedy(i, prompt, limit) for i, (prompt, limit) in enumerate(zip(prompts(), LIMITS))]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A folder, the model in it, and its greedy answers."""
    folder = tmp_path_factory.mktemp("llama")
    net = published("llama", folder)
    return folder, net, generated(net)


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"llama"}))
def test_greedy_answers_are_those_of_transformers(family, tmp_path):
    wanted = generated(published(family, tmp_path))
    one = served(tmp_path, CROWDED)
    assert answers(one, asked()) == wanted
    assert one.figures().preempted and one.figures().cache_hits


@pytest.mark.parametrize(
    "words",
    [
        *("policy=static,block=4,kv_blocks=40,max_batch=4", "policy=orca,block=4,kv_blocks=40,max_batch=4"),
        *("policy=vllm-v0,block=4,kv_blocks=12", "policy=vllm-v0,block=4,kv_blocks=13,preempt=swap,host=1MiB"),
        *("policy=vllm-v1,budget=5,block=1,kv_blocks=50", "policy=sarathi,budget=6,block=4,kv_blocks=12"),
        *("policy=past-future,block=4,kv_blocks=13,prefix_cache=yes", "policy=flover,block=4,kv_blocks=40"),
        *("policy=sarathi,budget=6,block=4,kv_blocks=12,preempt=swap,host=64KiB,prefix_cache=yes,order=lpm",),
        *("block=4,kv_blocks=100,draft=ngram", "policy=vllm-v0,block=4,kv_blocks=13,draft=ngram,guesses=2"),
    ],
)
def test_no_policy_and_no_feature_changes_an_answer(llama, words):
    folder, _, wanted = llama
    assert answers(served(folder, words), asked()) == wanted
    assert answers(served(folder, words), asked(), every=3) == wanted  # they come while others are answered


def test_a_draft_model_changes_no_answer_and_its_guesses_come_true(llama, tmp_path):
    folder, _, wanted = llama
    published("qwen3", tmp_path)
    other = served(folder, f"block=4,kv_blocks=16,prefix_cache=yes,preempt=swap,host=1MiB,draft={tmp_path}")
    assert answers(other, asked()) == wanted
    same = served(folder, f"policy=sarathi,budget=24,block=4,kv_blocks=16,guesses=3,draft={folder}")
    assert answers(same, asked()) == wanted
    said = same.figures()
    assert said.accepted == said.drafted > 0  # the model guesses what it says itself
    assert said.iterations < other.figures().iterations


def test_what_is_drawn_depends_on_the_seed_alone(llama):
    folder = llama[0]
    kinds = [{"temperature": 0.8}, {"top_k": 5}, {"top_p": 0.6, "temperature": 1.3}]
    many = [
        Prompted(number=i, prompt=tuple(prompt), limit=12, sampling=Sampling(seed=i, **kinds[i % 3]))
        for i, prompt in enumerate(prompts())
    ]
    together = answers(served(folder, CROWDED), many)
    guessed = answers(served(folder, "block=4,kv_blocks=90,draft=ngram"), many)
    alone = [answers(served(folder, "block=4,kv_blocks=20"), [one])[0] for one in many]
    assert together == guessed == alone
    begun = alone[0][:5]  # an answer that was broken off goes on as it would have
    rest = Prompted(number=9, prompt=(*many[0].prompt, *begun), limit=7, answered=5, sampling=many[0].sampling)
    assert answers(served(folder, "block=4,kv_blocks=20"), [rest]) == [alone[0][5:]]


def test_penalties_and_biases_are_those_of_transformers(llama):
    folder, net, wanted = llama
    ids = prompts()
    kinds = [
        ({"repetition_penalty": 1.4}, {"repetition_penalty": 1.4}),
        ({"logit_bias": ((7, 2.5), (11, -1.0))}, {"sequence_bias": [[[7], 2.5], [[11], -1.0]]}),
        ({"presence_penalty": 0.7, "frequency_penalty": 0.4}, {}),
    ]
    for ours, theirs in kinds:
        expected = []
        for prompt, limit in zip(ids, LIMITS):
            own = [] if theirs else [Counting(len(prompt), 0.4, 0.7)]
            said = {"max_new_tokens": limit, "do_sample": False, "pad_token_id": 0, "logits_processor": own, **theirs}
            tokens = torch.tensor([prompt])
            expected.append(
                net.generate(tokens, attention_mask=torch.ones_like(tokens), **said)[0, len(prompt) :].tolist()
            )
        assert expected != wanted
        many = [
            Prompted(number=i, prompt=tuple(p), limit=n, sampling=Sampling(temperature=0.0, **ours))
            for i, (p, n) in enumerate(zip(ids, LIMITS))
        ]
        assert answers(served(folder, CROWDED), many) == expected  # evicted, and computed again
        assert answers(served(folder, "block=4,kv_blocks=100,draft=ngram"), many) == expected
        cut = expected[0][:4]  # an answer that was broken off goes on as it would have
        rest = msgspec.structs.replace(many[0], prompt=(*ids[0], *cut), limit=LIMITS[0] - 4, answered=4)
        assert answers(served(folder, "block=4,kv_blocks=20"), [rest]) == [expected[0][4:]]


class Counting:
    """transformers' protocol of a processor: OpenAI's penalties of what the answer holds so far."""

    def __init__(self, prompt, frequency, presence):
        self.prompt, self.frequency, self.presence = prompt, frequency, presence

    def __call__(self, input_ids, scores):
        counts = torch.bincount(input_ids[0, self.prompt :], minlength=scores.shape[-1]).to(scores.dtype)
        return scores - self.frequency * counts - self.presence * (counts > 0)


def test_a_token_of_little_probability_beside_the_likeliest_is_cut_off():
    scores = torch.tensor([[2.0, 1.0, 0.0, -1.0]], dtype=torch.float64)  # shares 1, 0.37, 0.14, 0.05 of the likeliest's
    drawn = choose(scores.expand(400, -1), [TokenChoice(Sampling(min_p=0.2, seed=3), place) for place in range(400)])
    assert set(drawn) == {0, 1}


def test_draws_have_the_shares_of_the_cut_distribution():
    scores = torch.tensor([[2.0, 1.0, 0.0, -1.0]], dtype=torch.float64)
    places = range(20_000)

    def shares(**said):
        choices = [TokenChoice(Sampling(seed=3, **said), place) for place in places]
        drawn = torch.tensor(choose(scores.expand(len(choices), -1), choices))
        return torch.bincount(drawn, minlength=4) / len(choices)

    soft = torch.softmax(scores[0] / 2, 0)
    # four standard deviations of a share at 20,000 draws are below 0.0142
    assert (shares(temperature=2.0) - soft).abs().max() < 0.0142
    two = torch.softmax(scores[0, :2], 0)
    for said in ({"top_k": 2}, {"top_p": 0.7}):  # the first token has 0.64 of the probability
        found = shares(**said)
        assert (found[:2] - two).abs().max() < 0.0142 and not found[2:].any()


def test_scores_are_the_models_own_log_probabilities(llama):
    folder, net, wanted = llama
    prompt, answer = prompts()[2], wanted[2][:4]
    one = served(folder, "block=4,budget=5,kv_blocks=20,prefix_cache=yes")
    answers(one, [greedy(0, prompt, 1)])  # the prefix is cached, and its scores are wanted all the same
    one.submit(greedy(1, prompt, 4, logprobs=2, prompt_logprobs=1))
    pieces = []
    while not one.idle:
        pieces += one.step()
    with torch.no_grad():
        logs = net(torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
    scores = [score for piece in pieces for score in piece.scores]
    expected = logs[len(prompt) - 1 : -1]
    assert [s.logprob for s in scores] == pytest.approx(expected.max(-1).values.tolist(), rel=1e-6)
    assert [[i for i, _ in s.others] for s in scores] == expected.topk(2).indices.tolist()
    told = pieces[0].prompt_scores
    own = [logs[at - 1, token].item() for at, token in enumerate(prompt) if at]
    assert told[0] is None and [s.logprob for s in told[1:]] == pytest.approx(own, rel=1e-6)


def test_answers_end_at_a_stop_token_that_is_told_and_not_before_the_fewest(llama):
    folder, _, wanted = llama
    token = wanted[1][3]
    first = wanted[1].index(token)
    one = served(folder, "block=4,kv_blocks=20")
    one.submit(greedy(0, prompts()[1], 11, stop_ids=(token,)))
    pieces = []
    while not one.idle:
        pieces += one.step()
    assert [t for piece in pieces for t in piece.tokens] == wanted[1][: first + 1]
    assert pieces[-1].finish == "stop"
    (longer,) = answers(one, [greedy(1, prompts()[1], 11, stop_ids=(token,), min_tokens=8)])
    assert len(longer) >= 8 and token not in longer[:8] and longer[:first] == wanted[1][:first]


def test_whoever_cancels_frees_the_blocks_and_others_are_answered_alike(llama):
    folder, _, wanted = llama
    one = served(folder, "block=4,kv_blocks=40")
    for each in asked():
        one.submit(each)
    out = {i: [] for i in range(6)}
    for step in range(100):
        if step == 3:
            one.cancel(2)
            one.cancel(4)
            one.cancel(77)  # nobody
        for piece in one.step():
            assert step < 3 or piece.number not in (2, 4)
            out[piece.number] += piece.tokens
        if one.idle:
            break
    assert [out[i] for i in (0, 1, 3, 5)] == [wanted[i] for i in (0, 1, 3, 5)]
    assert one.figures().blocks_used == 0


@pytest.mark.parametrize(
    ("prompt", "limit", "more", "said"),
    [
        ((1, 2), 100, {}, "the cache has room for 80"),
        ((1, 2), 127, {}, "the model's context 128"),
        ((1, 97), 1, {}, "token 97 is not among the 97"),
        ((), 1, {}, "a token of prompt at least"),
        ((1,), 0, {}, "may generate one at least"),
        ((1,), 1, {"adapter": "x"}, "no adapter 'x'; there are none"),
        ((1,), 1, {"sampling": Sampling(stop_ids=(97,), min_tokens=1)}, "stop token 97 is not among the 97"),
        ((1,), 1, {"sampling": Sampling(logprobs=21)}, "logprobs is 21, and an engine tells 0 to 20"),
    ],
)
def test_a_request_that_cannot_be_served_is_told_why(llama, prompt, limit, more, said):
    one = served(llama[0], "block=4,kv_blocks=20")
    one.submit(Prompted(number=5, prompt=prompt, limit=limit, **more))
    (piece,) = one.step()
    assert (piece.number, piece.finish) == (5, "error") and said in piece.error
    assert one.idle


def test_iterations_are_recorded_with_the_requests_that_took_part(llama):
    one = served(llama[0], "block=4,kv_blocks=20")
    answers(one, [greedy(3, prompts()[0], 3)])
    assert [record.running for record in one.records] == [1, 1, 1]
    assert [(record.tokens, record.requests) for record in one.records] == [
        (5, ((3, 5, 0, 1),)),
        (1, ((3, 1, 5, 1),)),
        (1, ((3, 1, 6, 1),)),
    ]
    assert all(record.begin_s <= record.end_s for record in one.records)


@pytest.mark.parametrize(
    ("plan", "words", "said"),
    [
        ("dp2", "", "dp2: an engine is one replica"),
        ("nano2", "", "nano=2 is predicted, and no engine serves it"),
        ("tp1", "kv=fp8", "kv=fp8 is predicted"),
        ("tp1", "kv_budget=flexgen:0.2", "kv_budget=flexgen is predicted"),
        ("tp1", "budget=auto", "follows from a prediction"),
        ("tp1", "draft=mtp,speculation=dsi", "draft=mtp is predicted"),
        ("tp3", "", "tp3 does not divide 4 heads and 2 key-value heads"),
        ("pp3", "", "pp3 stages of 2 layers"),
        ("tp2 ep2", "", "ep2 and etp1 split the experts"),
        ("a=[tp1] + b=[tp1] + c=[tp1] a->c:kv b->c:kv", "", "3 pools with 2 links are predicted"),
        ("a=[tp1] + b=[tp1] a->b", "", "nothing that requests need flows over a->b"),
        ("a=[tp1] + b=[tp1 dp2] a->b:kv", "", "dp2: an engine is one replica"),
        ("a=[tp1] + b=[tp3] a->b:kv", "", "tp3 does not divide 4 heads"),
        ("a=[tp1 part=0:1] + b=[tp1] a->b:kv", "", "a says part=0:1, and each pool that serves holds the whole"),
        ("a=[tp1 fp8] + b=[tp1] a->b:kv", "", "the pools compute in '' and 'fp8'"),
        ("a=[tp1] + b=[tp1] a->b:kv", "kv_budget=h2o:0.5", "a KV budget in pools is predicted, and not served"),
        ("a=[tp1] + b=[tp1] a->b:kv", "kv_send=layerwise", "kv_send=layerwise is predicted, and not served"),
        ("tp1", "policy=orca,draft=ngram", "policy=orca computes one token of every answer"),
    ],
)
def test_words_that_are_not_served_are_refused_with_what_is(llama, plan, words, said):
    with pytest.raises(MeshwrightError) as error:
        engine(llama[0], plan_of(plan), parse(words))
    found = [one for one in error.value.diagnostics if said in one.message]
    assert found and all(one.help and one.code == "W014" for one in error.value.diagnostics)


@pytest.mark.parametrize(("family", "plan"), [("qwen3_moe", "tp2"), ("gemma2", "pp2")])
def test_ranks_of_tensor_parallelism_and_stages_answer_as_one_process(family, plan, tmp_path):
    wanted = generated(published(family, tmp_path))
    words = parse(f"{CROWDED},preempt=swap,host=64KiB,draft=ngram")
    one = engine(tmp_path, plan_of(plan), words, dtype="float64")
    try:
        assert answers(one, asked()) == wanted
        assert one.figures().preempted
        # and its iterations are those of one process, which are the simulator's (test_serve_simulated)
        alone = served(tmp_path, f"{CROWDED},preempt=swap,host=64KiB,draft=ngram")
        assert answers(alone, asked()) == wanted
        assert [record.requests for record in one.records] == [record.requests for record in alone.records]
    finally:
        one.close()


def test_an_iteration_is_cut_between_sequences_for_the_stages():
    rows = [PackedRow(5, 0, (0,)), PackedRow(1, 4, (1,)), PackedRow(2, 2, (2,)), PackedRow(1, 7, (3,))]
    packed = PackedTokens(list(range(9)), list(range(9)), rows, [4, 5, 8])
    one, two = cut(packed, 2)
    assert (one.tokens, one.rows, one.wanted) == ([0, 1, 2, 3, 4], rows[:1], [4])
    assert (two.tokens, two.rows, two.wanted) == ([5, 6, 7, 8], rows[1:], [0, 3])
    assert [len(part.rows) for part in cut(packed, 9)] == [1, 1, 1, 1]
    assert cut(packed, 1) == [packed]


def rounded(weight: torch.Tensor, largest: float, width: int, form: torch.dtype | None = None) -> torch.Tensor:
    """A matrix as symmetric codes of runs of so many numbers stand for it."""
    out = weight.clone()
    for begin in range(0, weight.shape[1], width):
        part = weight[:, begin : begin + width]
        scale = part.abs().amax(1, keepdim=True) / largest
        codes = part / scale
        out[:, begin : begin + width] = (codes.round() if form is None else codes.to(form).to(part.dtype)) * scale
    return out


@pytest.mark.parametrize(
    ("plan", "largest", "width", "form", "most"),
    [
        # uniform rounding errors are a step over the square root of 12; a row's largest number is 2 to 3 deviations
        ("weights=int8", 127, 10**6, None, 0.01),
        ("weights=int4", 7, 128, None, 0.15),
        ("weights=fp8", 448, 10**6, torch.float8_e4m3fn, 0.04),  # three bits of mantissa: 2**-4 at most
    ],
)
def test_stored_weights_compute_as_the_rounded_matrices_and_say_how_far_these_are(
    tmp_path, plan, largest, width, form, most
):
    net = published("qwen3_moe", tmp_path)
    one = engine(tmp_path, plan_of(plan), parse("block=4,kv_blocks=40"), dtype="float64")
    apart = whole = 0.0
    with torch.no_grad():
        for name, weight in net.model.layers.named_parameters():
            if weight.dim() < 2 or name.endswith("gate.weight"):
                continue
            for matrix in weight if weight.dim() == 3 else weight[None]:
                new = rounded(matrix, largest, width, form)
                apart, whole = apart + (new - matrix).square().sum(), whole + matrix.square().sum()
                matrix.copy_(new)
    assert answers(one, asked()) == generated(net)
    rounding = one.executor.layers.rounding
    assert rounding == pytest.approx((apart / whole).sqrt().item(), rel=1e-6) and 0 < rounding < most


@pytest.fixture(scope="module")
def adapters(llama, tmp_path_factory):
    """Two adapters of other ranks and matrices as PEFT writes them, and the greedy answers under each."""
    import peft

    folder, _, _ = llama
    found = {}
    for seed, (name, rank, targets) in enumerate((("one", 2, ["q_proj", "v_proj"]), ("two", 5, ["o_proj", "up_proj"]))):
        torch.manual_seed(seed)
        import transformers

        base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
        config = peft.LoraConfig(r=rank, lora_alpha=7, target_modules=targets, init_lora_weights=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of transformers' own names
            net = peft.get_peft_model(base, config).eval()
        with torch.no_grad():
            for parameter in net.parameters():
                if parameter.requires_grad:
                    parameter.mul_(6.0)  # so that answers change
        path = tmp_path_factory.mktemp(name)
        net.double().save_pretrained(path)
        found[name] = path, generated(net)
    return found


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ("tp1", "block=4,kv_blocks=40,budget=9,prefix_cache=yes"),
        ("tp1", "block=4,kv_blocks=24,lora=slots,adapter_slots=1,policy=vllm-v0"),
        ("tp2", "block=4,kv_blocks=40,draft=ngram"),
    ],
)
def test_requests_of_several_adapters_are_answered_together_as_each_alone(llama, adapters, plan, words):
    folder, _, plain = llama
    wanted = [(plain, ""), *((said, name) for name, (_, said) in adapters.items())]
    paths = {name: path for name, (path, _) in adapters.items()}
    one = engine(folder, plan_of(plan), parse(words), dtype="float64", adapters=paths)
    many, right = [], []
    for i, (prompt, limit) in enumerate(zip(prompts(), LIMITS)):
        for answered, name in wanted:
            many.append(msgspec.structs.replace(greedy(len(many), prompt, limit), adapter=name))
            right.append(answered[i])
    try:
        assert answers(one, many, every=1) == right
        assert right[0] != right[1] != right[2]
    finally:
        one.close()


def test_adapters_that_cannot_be_served_are_refused(llama, adapters, tmp_path):
    folder, paths = llama[0], {"one": adapters["one"][0]}
    with pytest.raises(MeshwrightError, match="lora=merged is predicted, and not served"):
        engine(folder, words=parse("lora=merged"), dtype="float64", adapters=paths)
    with pytest.raises(MeshwrightError, match="adapters in static batches"):
        engine(folder, words=parse("policy=static"), dtype="float64", adapters=paths)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "adapter_config.json").write_text((paths["one"] / "adapter_config.json").read_text())
    with pytest.raises(MeshwrightError, match="cannot read adapters"):
        engine(folder, dtype="float64", adapters={"x": tmp_path / "a"}, words=parse("kv_blocks=9"))


def test_a_large_cache_takes_memory_as_its_blocks_are_used(llama):
    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    before = resident()
    one = served(llama[0], "block=16,kv_blocks=400000")  # 400,000 blocks of 16 tokens of 512 bytes: 3.3 GB
    answers(one, [greedy(0, prompts()[0], 5)])
    assert one.executor.layers.token_bytes * 16 * 400_000 > 3e9
    assert resident() - before < 3e8


def test_the_cache_takes_a_quarter_of_a_host_s_free_memory_or_the_share_that_is_said(monkeypatch):
    monkeypatch.setattr(built, "free_bytes", lambda device: 1 << 16)
    held = [SimpleNamespace(token_bytes=64, mesh=SimpleNamespace(device=torch.device("cpu")))]
    model = SimpleNamespace(max_seq_len=2048, vocab=64)
    # blocks of 4 tokens of 64 bytes: 256 of them in 64 KiB
    found = [built.num_blocks(parse(f"block=4{said}"), model, held) for said in ("", ",memory=0.5", ",kv_blocks=999")]
    assert found == [64, 128, 999]
