"""Words of a plan that serving has: what they change in an answer, and how they are refused."""

import pytest

import meshwright as mw
from meshwright.answer.serving import predict_serving
from meshwright.cost.engine import engine_profile
from meshwright.errors import MeshwrightError
from meshwright.spec.serve import parse

WORDS = "concurrency=8,prompt=256,output=64,requests=24"


def asked(words=WORDS, *, model="llama3-8b", on="1xh100", plan="tp1"):
    return predict_serving(mw.load_model(model), mw.load_cluster(on), parse(words), mw.parse_plan(plan), detail=False)


def test_weights_of_four_bits_answer_faster_and_leave_more_room():
    usual, stored = (asked("batch=1,prompt=64,output=32", on="1xa100-80", plan=plan) for plan in ("bf16", "w4a16"))
    # 16 GB are read for a token against 5.7: tables and heads stay, and kernels reach less of the bandwidth
    assert 1.5 < usual.metrics.tpot_s.mean / stored.metrics.tpot_s.mean < 16.1 / 5.7
    assert stored.kv_blocks > usual.kv_blocks


def test_weights_of_four_bits_do_not_help_large_batches():
    # MARLIN (2408.11743): near four times as fast up to 16 to 32 requests, none of it where compute bounds
    prompts = [asked("batch=8,prompt=4096,output=2", on="1xa100-80", plan=plan) for plan in ("bf16", "w4a16")]
    assert prompts[1].metrics.ttft_s.mean > 0.9 * prompts[0].metrics.ttft_s.mean


def test_attention_groups_make_room_where_ranks_would_repeat_the_latent():
    one, groups = (asked(model="deepseek-v2-lite", on="8xh100", plan=plan) for plan in ("tp8 ep8", "tp8 adp8 ep8"))
    assert groups.kv_blocks > 5 * one.kv_blocks


def test_every_attention_group_computes_prompts_at_once():
    # two prompts of a whole budget: one group after the other with one budget for all, at once with one for each
    words = "batch=2,prompt=8192,output=2"
    each, all_ = (
        asked(said, model="deepseek-v2-lite", on="2xh100", plan="tp2 adp2 ep2").metrics.ttft_s.mean
        for said in (words, words + ",budget=8192")
    )
    assert each < 0.85 * all_


def test_a_skewed_router_takes_longer():
    even, skewed = (
        asked("batch=8,prompt=2048,output=2", model="mixtral-8x7b", on="8xh100", plan=f"tp8 ep8 imbalance={ratio}")
        for ratio in (1, 2)
    )
    assert 1.1 < skewed.metrics.ttft_s.mean / even.metrics.ttft_s.mean < 2.0


@pytest.mark.parametrize(
    ("model", "on", "plan", "said"),
    [
        ("mixtral-8x7b", "8xh100", "tp4 dp2 ep8", "P018|ep8 * etp1 = 8 ranks hold the experts, and tp is 4"),
        ("mixtral-8x7b", "8xh100", "tp8 ep2 etp2", "P018|ep2 * etp2 = 4 ranks"),
        ("mixtral-8x7b", "8xh100", "tp8 ep8 dispatch=sent", "P017|between attention groups, and there is one|say adp"),
        ("mixtral-8x7b", "8xh100", "tp8 adp8 ep4 dispatch=sent", "P017|etp=2 ranks split each|dispatch=gathered"),
        ("mixtral-8x7b", "8xh100", "tp8 adp3 ep8", "P011|adp=3 groups do not divide the tp=8 ranks"),
        ("llama3-8b", "8xh100", "tp8 ep2", "P017|llama3-8b has no experts"),
        ("gpt2", "16xh100", "tp16 adp2", "P011|tp/adp=8 does not divide num_heads=12"),
        ("llama3-8b", "1xa100-80", "fp8", "P022|a100_80gb_sxm does not multiply fp8|bf16 weights=fp8"),
        ("llama3-8b", "1xh100", "nvfp4", "P022|does not multiply nvfp4|bf16 weights=nvfp4"),
        ("llama3-8b", "1xh100", "fp8 weights=int8", "P022|weights=int8 stores 1 bytes a weight, and fp8 has 1"),
        ("llama3-8b", "4xh100", "cp4 ulysses", "P015|split by heads is tensor parallelism|say ring or allgather"),
        ("mamba2-2.7b", "2xh100", "cp2", "P027|go from token to token|say cp1"),
        ("t5-base", "1xh100", "tp1", "W014|reads 2 streams of tokens (encoder, decoder)|a decoder is served"),
        ("vit-huge-patch14", "1xh100", "tp1", "W014|no tokens of a request's own length"),
        ("falcon-7b", "2xh100", "tp1 adp1 dp2", ""),
    ],
)
def test_a_plan_that_cannot_be_served_is_refused_with_the_way_out(model, on, plan, said):
    if not said:
        assert asked(model=model, on=on, plan=plan).fits
        return
    with pytest.raises(MeshwrightError) as caught:
        asked(model=model, on=on, plan=plan)
    text = str(caught.value)
    assert caught.value.exit_code == 2
    assert all(part in text for part in said.split("|")), text


def test_a_budget_of_keys_needs_keys():
    with pytest.raises(
        MeshwrightError, match=r"kv_budget=h2o keeps a part of keys and values, and mamba2-2\.7b has none"
    ):
        asked(WORDS + ",kv_budget=h2o", model="mamba2-2.7b")


def test_everything_that_is_wrong_with_a_plan_is_said_at_once():
    with pytest.raises(MeshwrightError) as caught:
        asked(model="mixtral-8x7b", on="8xa100-80", plan="tp8 ep2 etp2 fp8 dispatch=sent")
    assert {"P018", "P017", "P022"} <= {d.code for d in caught.value.diagnostics}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("rate=2,prompt=128,output=4,policy=orca", "bert-base generates no tokens, and 4 are asked for|output=1"),
        ("rate=2,prompt=128,output=1", "policy=vllm-v1 may cut a prompt|static, orca, vllm-v0 or trtllm"),
    ],
)
def test_an_encoder_answers_in_one_pass_over_a_whole_prompt(words, said):
    with pytest.raises(MeshwrightError) as caught:
        asked(words, model="bert-base")
    assert [d.code for d in caught.value.diagnostics] == ["W014"]
    assert all(part in str(caught.value) for part in said.split("|"))
    found = asked("rate=200,prompt=256,output=1,requests=200,policy=orca", model="bert-base")
    # 2 x 85e6 weights x 256 tokens at the H100's 989 TFLOP/s, at least
    assert found.metrics.ttft_s.p50 > 2 * 85e6 * 256 / 989e12 and found.preemptions == 0


def test_a_scan_decodes_as_fast_behind_any_context():
    state, grown = (asked(f"batch=1,prompt={n},output=64", model="mamba2-2.7b").metrics for n in (64, 8192))
    assert grown.tpot_s.mean == pytest.approx(state.tpot_s.mean, rel=1e-6)  # decoding does not know what came before


def test_context_parallel_ranks_answer_a_long_prompt_sooner():
    one, four = (
        asked("batch=1,prompt=100000,output=4", model="llama3.1-8b", on=on, plan=plan).metrics.ttft_s.mean
        for on, plan in (("1xh100", "tp1"), ("4xh100", "cp4"))
    )
    assert 2.5 < one / four < 4


@pytest.mark.parametrize(
    ("words", "plan", "said"),
    [
        (WORDS, "tp1 slots=4", "P050|slots=4: no layer's weights come from elsewhere|weights_from=host, disk or peer"),
        (WORDS, "tp1 weights_from=peer", "P050|has no neighbour with memory|say weights_from=host"),
        (WORDS, "tp1 weights_from=host resident=31", "P050|2 slots and 31 resident layers of 32|all layers have room"),
        (WORDS, "tp1 sums=nccl", "P051|ranks that split a token's work, and there is one"),
        (WORDS, "tp1 sums=star", "P051|ranks that split a token's work, and there is one"),
        (WORDS, "tp1 act_order=gathered", "P051|reorders quantised weights, and none are|weights=int4"),
        (WORDS, "tp1 padding=yes", "W014|padding=yes: policy=vllm-v1|policy=static"),
        (WORDS, "tp1 shared_prefix=once", "W014|begin with nothing in common|say prefix="),
    ],
)
def test_a_word_with_nothing_to_act_on_is_refused(words, plan, said):
    with pytest.raises(MeshwrightError) as caught:
        asked(words, plan=plan)
    assert all(part in str(caught.value) for part in said.split("|")), caught.value


def test_a_disk_needs_to_be_in_the_cluster():
    with pytest.raises(MeshwrightError, match="says no drive that weights could come from"):
        asked(on="1xrtx4090", plan="weights_from=disk")


def test_streamed_weights_bound_an_iteration_by_the_link_they_come_over():
    # Llama-3-70B: 80 layers of 855,638,016 + 16,384 parameters of 2 bytes over PCIe at the host's rate
    cluster = mw.load_cluster("1xa100-80")
    comes = 80 * 855_654_400 * 2 / (cluster.islands[0].node.pcie_gb_s * 1e9)
    found = asked("batch=1,prompt=64,output=8", model="llama3-70b", on="1xa100-80", plan="weights_from=host")
    assert found.fits and found.metrics.tpot_s.mean == pytest.approx(comes, rel=0.01)
    half = asked("batch=1,prompt=64,output=8", model="llama3-70b", on="1xa100-80", plan="weights_from=host resident=32")
    assert half.metrics.tpot_s.mean == pytest.approx(comes * 48 / 80, rel=0.01)


def test_a_padded_engine_computes_every_prompt_as_long_as_the_longest(tmp_path):
    (tmp_path / "l.csv").write_text("prompt_tokens,output_tokens\n" + "100,1\n" * 7 + "450,1\n")
    words = f"batch=64,lengths={tmp_path / 'l.csv'},policy=static"
    packed, padded, longest = (
        asked(said, model="bert-base", plan=plan).metrics.e2e_s.mean
        for said, plan in (
            (words, "tp1"),
            (words, "padding=yes"),
            ("batch=64,prompt=450,output=1,policy=static", "tp1"),
        )
    )
    assert padded == longest > 1.5 * packed


def test_the_host_issues_each_kernel_of_attention_that_is_several():
    # a short prompt waits for the host: 9 kernels of BERT's layer beside attention, which is 1 of them or 5
    def host(plan):
        found = asked("batch=1,prompt=64,output=1,policy=static", model="bert-base", plan=plan)
        return sum(seconds for cause, seconds in found.attribution.items() if cause != "idle")

    step = engine_profile().step_us * 1e-6 + engine_profile().request_us * 1e-6
    assert (host("unfused") - step) / (host("tp1") - step) == pytest.approx(14 / 10, rel=0.01)


def test_scores_of_separate_kernels_lie_in_rows_of_whole_vectors():
    # lengths between the nodes of a table, which are no multiples of 8, take no longer than those around them
    lengths = (256, 352, 368, 480)
    times = [
        asked(f"batch=16,prompt={n},output=1,policy=static", model="bert-base", on="1xa100-80", plan="unfused")
        for n in lengths
    ]
    attention = [one.attribution["attention"] / n**2 for one, n in zip(times, lengths)]
    assert max(attention) < 1.3 * min(attention)  # 2.3 times where a node of 362 tokens is priced as it is


def test_a_prefix_read_once_decodes_faster_the_more_requests_share_it():
    def ratio(batch):
        words = f"batch={batch},prompt=4096,output=32,prefix=4000,prefix_cache=yes,policy=static"
        each, once = (asked(words, plan=plan).metrics.itl_s.p50 for plan in ("tp1", "shared_prefix=once"))
        return each / once

    assert ratio(4) < ratio(64) and ratio(64) > 1.5


def test_nano_batches_answer_more_where_products_bound_and_less_where_reading_weights_does():
    def ratio(words):
        one, two = (
            asked(words, model="llama2-70b", on="8xa100-80", plan=plan).metrics.throughput_tokens_per_s
            for plan in ("tp8", "tp8 nano2")
        )
        return two / one

    assert ratio("concurrency=600,prompt=512,output=64,requests=900,max_batch=1024,budget=2048") > 1.1
    assert ratio("batch=4,prompt=64,output=16") < 0.75


def test_streams_cost_less_than_as_many_models():
    # ParScale (2505.10475): small batches wait for the weights, which all streams read once
    one, eight = (asked("batch=1,prompt=64,output=64", plan=plan).metrics.tpot_s.mean for plan in ("tp1", "streams=8"))
    assert one < eight < 1.5 * one


def test_a_head_for_tokens_further_ahead_is_one_more_layer():
    words = "batch=1,prompt=64,output=128"
    plain, ahead = (
        asked(said, model="deepseek-v3", on="8xh200", plan="tp8 ep8 fp8")
        for said in (words, words + ",draft=mtp,guesses=1,accept=0.85")
    )
    assert any("trained head for tokens further ahead" in one for one in ahead.warnings) and not any(
        "trained head" in one for one in plain.warnings
    )
    # 1.85 tokens a round of one verified guess, which takes the head's layer of 61 and a second row besides
    assert 1.4 < plain.metrics.tpot_s.mean / ahead.metrics.tpot_s.mean < 1.85
    # a layer of experts: 256 of 3 x 7168 x 2048 over 8 ranks in fp8; attention and the shared expert; two joined states
    held = ahead.memory[0].alive["weights of the draft model"]
    assert 256 * 3 * 7168 * 2048 / 8 < held - 2 * 7168**2 * 2 < 1.2 * 256 * 3 * 7168 * 2048 / 8
