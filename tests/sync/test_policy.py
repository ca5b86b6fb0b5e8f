"""The record of synchronisation: its seven choices, its words, and that it does not change."""

import pytest

import meshwright as mw
from meshwright.errors import MeshwrightError
from meshwright.plan import parse
from meshwright.search.find import find
from meshwright.search.restrict import restricted
from meshwright.search.space import default
from meshwright.spec.dimensions import transformer
from meshwright.spec.workload import Train
from meshwright.sync.policy import read
from meshwright.sync.record import Outer

MODEL = transformer(layers=4, hidden=32, heads=4, vocab=64, ffn=48, max_seq_len=64)
TRAIN = Train(global_batch=8, seq_len=16)


def test_every_step_is_the_sum_of_gradients_among_all():
    policy = read("step")
    assert str(policy) == (
        "when every step | fragments reduce | group all | codec none | combine sum | outer taken | delay 0"
    )
    assert policy.exact and policy.text == "step"


def test_local_steps_are_the_mean_of_parameters_once_in_h():
    policy = read("local:codec=int8,h=8,moments=mean")
    assert (policy.when, policy.fragments, policy.codec, policy.combine) == (
        8,
        ("parameters", "moments"),
        "int8",
        "mean",
    )
    assert not policy.exact and policy.text == "local:h=8,codec=int8,moments=mean"


def test_an_outer_step_of_rate_one_without_momentum_takes_the_result_as_it_is():
    assert Outer().taken and not Outer(rate=0.7).taken and not Outer(momentum=0.9).taken
    assert str(Outer(rate=0.7, momentum=0.9, nesterov=True)) == "nesterov(rate=0.7, momentum=0.9)"


def test_rounds_with_an_outer_step_are_words_of_the_record():
    """The usual values are the papers': Nesterov's of 0.7 and 0.9 (2311.08105, section 3.1), and for parts half of a
    replica's own, five steps late, in four bits (2501.18512, sections 2.2 and 4.1)."""
    assert str(read("diloco:h=500")) == (
        "when every 500 steps | fragments parameters | group all | codec none | combine mean | "
        "outer nesterov(rate=0.7, momentum=0.9) | delay 0"
    )
    assert str(read("streaming-diloco:h=100,parts=4")) == (
        "when every 100 steps | fragments parameters in 4 strided parts | group all | codec fp4 | combine mean | "
        "outer nesterov(rate=0.7, momentum=0.9, mix=0.5) | delay 5"
    )
    assert str(read("eager-diloco:h=100,parts=8,pattern=sequential,codec=fp4")) == (
        "when every 100 steps | fragments parameters in 8 sequential parts | group all | codec fp4 | combine mean | "
        "outer nesterov(rate=0.7, momentum=0.9, eager) | delay 100"
    )
    plain = read("diloco:h=1,rate=1,momentum=0")
    assert plain.outer.taken and not plain.exact and read(plain.text) == plain


@pytest.mark.parametrize(
    ["words", "said"],
    [
        ("diloco:h=8,parts=5", "4 layers are not divided into 5 parts.*say parts=4"),
        ("diloco:h=3,parts=4", "4 parts are not due at different steps of 3.*say parts=3"),
        ("diloco:h=8,delay=8", "8 steps late is not there when the next exchange begins, 8 steps later.*say delay=7"),
        ("streaming-diloco:h=3,parts=9,delay=20", "9 parts.*say parts=3.*say delay=2"),
    ],
)
def test_rounds_that_cannot_be_are_refused_with_the_nearest_that_can(words, said):
    with pytest.raises(MeshwrightError, match=f"(?s)Y003.*{said}"):
        mw.predict(MODEL, mw.load_cluster("4xh100"), TRAIN, parse(f"dp4 mb1 sync={words}"))


@pytest.mark.parametrize(
    ["plan", "train", "said"],
    [
        ("dp4 hsdp2", {}, "replicas of one rank.*say start=update"),
        ("dp4", {"optimizer": "lamb"}, "before the norms that others wait for are known.*start=update"),
    ],
)
def test_layers_are_updated_within_the_backward_where_nothing_else_is_waited_for(plan, train, said):
    with pytest.raises(MeshwrightError, match=f"(?s)Y003.*{said}"):
        mw.predict(
            MODEL,
            mw.load_cluster("4xh100"),
            Train(global_batch=8, seq_len=16, **train),
            parse(f"{plan} mb1 sync=diloco:h=4,start=backward"),
        )


def test_a_table_on_both_ends_of_a_pipeline_is_in_no_parts():
    tied = transformer(layers=4, hidden=32, heads=4, vocab=64, ffn=48, max_seq_len=64, tied_embeddings=True)
    with pytest.raises(MeshwrightError, match=r"(?s)Y003.*both ends of the pipeline.*say parts=1"):
        mw.predict(tied, mw.load_cluster("4xh100"), TRAIN, parse("dp2 pp2 mb1 sync=diloco:h=4,parts=2"))


def test_a_policy_does_not_change():
    with pytest.raises(AttributeError):
        read("step").when = 2


@pytest.mark.parametrize(
    ["words", "text", "codec"],
    [
        ("int8", "int8", "int8"),
        ("step:codec=int8", "int8", "int8"),
        ("step:codec=none", "step", "none"),
        ("powersgd:rank=2", "powersgd:rank=2", "powersgd:rank=2"),
        ("powersgd:rank=4", "powersgd", "powersgd"),  # the usual rank
        ("dgc:momentum=0.5,share=0.01", "dgc:share=0.01,momentum=0.5", "dgc:share=0.01,momentum=0.5"),
        ("local:h=8,codec=topk,share=0.1", "local:h=8,codec=topk,share=0.1", "topk:share=0.1"),
    ],
)
def test_the_name_of_a_codec_is_the_usual_rule_with_it(words, text, codec):
    policy = read(words)
    assert (policy.text, policy.codec) == (text, codec) and read(policy.text) == policy
    assert policy.exact == (codec == "none")


@pytest.mark.parametrize(
    ["words", "said"],
    [
        ("powersgb", "Y001.*powersgd"),
        ("none", "Y001"),
        ("powersgd:rank=0", "Y002.*rank=0 is not a whole number of at least 1"),
        ("topk:share=0", "Y002.*share=0 is not a number above 0 and up to 1"),
        ("topk:share=nan", "Y002.*share=nan"),
        ("int8:share=0.1", "Y002.*int8 has no option 'share'"),
        ("local:h=8,codec=int9", "Y002.*codec=int9 is not"),
        ("diloco:h=8,rate=0", "Y002.*rate=0 is not a number above 0 and up to 10"),
        ("diloco:h=8,momentum=1", "Y002.*momentum=1 is not a number from 0 and up to 0.9999"),
        ("diloco:h=8,delay=x", "Y002.*delay=x is not a whole number of at least 0"),
    ],
)
def test_words_that_mean_nothing_are_refused(words, said):
    with pytest.raises(MeshwrightError, match=f"(?s){said}"):
        read(words)


@pytest.mark.parametrize(
    ["plan", "said"],
    [
        ("dp4 fsdp sync=int8", r"Y003.*scatters sums.*gathered by every rank.*take zero1 with shard2"),
        ("dp4 zero1 sync=powersgd", r"Y003.*scatters sums.*several messages.*take zero1 with shard2"),
        ("dp4 zero2 shard2 sync=int8", r"Y003.*scatters sums"),
        ("dp4 sync=qsdp", r"Y003.*the plan shards none.*take fsdp"),
        ("dp2 tp2 fsdp sync=qsdp", r"Y003.*tensor-parallel ranks.*drop tp"),
        ("dp4 sync=gossip:codec=mgard", r"Y003.*neighbours receive what they expect.*take codec=topk"),
        ("dp4 sync=fedavg:h=2,codec=mgard", r"Y003.*a server receives what it expects.*take codec=topk"),
        ("dp1 pp4 sync=int8", r"Y003.*the plan has one"),
        ("dp4 sync=local:h=4,codec=dgc", r"Y003.*take codec=topk"),
    ],
)
def test_a_plan_whose_gradients_cannot_travel_in_a_code_is_refused_with_what_can(plan, said):
    with pytest.raises(MeshwrightError, match=f"(?s){said}"):
        mw.predict(MODEL, mw.load_cluster("4xh100"), TRAIN, parse(plan + " mb1"))


def test_encoded_gradients_go_with_pipelines_sequences_and_sharding_inside_groups():
    for plan in ("dp4", "dp2 pp2", "dp2 cp2", "dp4 zero1 shard2", "dp2 tp2 sync=fp16", "dp2 tp2 sync=int8", "dp2 tp2"):
        words = plan if "sync" in plan else plan + " sync=powersgd"
        mw.predict(MODEL, mw.load_cluster("4xh100"), TRAIN, parse(words + " mb1"))


def test_a_prediction_says_that_a_code_is_approximate_and_takes_longer_to_encode_more():
    plain, coded = (
        mw.predict(mw.load_model("llama3-8b"), mw.load_cluster("8xh100"), mw.parse_train("batch=8,seq=4096"), parse(p))
        for p in ("dp4 pp2 mb1", "dp4 pp2 mb1 sync=powersgd")
    )
    assert any("is approximate: gradients travel in powersgd" in line for line in coded.cautions)
    assert not any("sync=" in line for line in plain.cautions)
    assert coded.attribution["optimizer"] > plain.attribution["optimizer"]
    more = coded.memory[0].alive["parameters"] - plain.memory[0].alive["parameters"]
    assert more == pytest.approx(plain.memory[0].alive["gradients"], rel=1e-6)  # what was lost is as large as these


def test_a_search_takes_a_codec_where_it_is_asked_for_and_never_by_itself():
    asked = mw.load_model("llama3.2-1b"), mw.load_cluster("4x1xh100,10gbe"), mw.parse_train("batch=16,seq=4096")
    space = default(*asked)
    by_itself = find(*asked, space=space, top=1).best[0]
    told = find(*asked, space=restricted(space, fix=["sync=powersgd"]), top=1).best[0]
    assert by_itself.plan.sync.policy == "step" and told.plan.sync.policy == "powersgd"
    assert told.prediction.step_time_s < by_itself.prediction.step_time_s  # over slow links
