"""What a target cannot express: all of it at once, named, with a plan that it can; never dropped."""

import msgspec
import pytest
from hypothesis import given, settings

from meshwright import plan as plans
from meshwright.errors import Infeasible, MeshwrightError
from meshwright.export import TARGETS, export
from meshwright.spec import cluster, model, workload
from tests.export.questions import ask, legal

ON = "64xh100"
TRAIN = "batch=512,seq=8192"


def gaps(target, name, words, on=ON, train=TRAIN):
    with pytest.raises(Infeasible) as caught:
        ask(target, name, on, train, words)
    assert {d.code for d in caught.value.diagnostics} == {"E001"}
    return caught.value


def nearest_words(error):
    """The plan that the last diagnostic offers, None when it offers none."""
    _, found, rest = error.diagnostics[-1].help.partition('--plan "')
    return rest.partition('"')[0] if found else None


def test_an_unknown_target_is_misuse_and_names_the_nearest():
    with pytest.raises(MeshwrightError) as caught:
        ask("torchtitn", "llama3-8b", "8xh100", "batch=8,seq=2048", "fsdp")
    assert caught.value.exit_code == 2
    (only,) = caught.value.diagnostics
    assert (only.code, only.help) == ("E002", "did you mean torchtitan, torchtitan-toml, torchft?")


def test_an_illegal_plan_is_misuse_whatever_the_target():
    with pytest.raises(MeshwrightError) as caught:
        ask("megatron", "llama3-8b", "8xh100", "batch=8,seq=2048", "tp3")
    assert caught.value.exit_code == 2
    assert {d.code for d in caught.value.diagnostics} == {"P010", "P011", "P012"}


def test_all_gaps_are_listed_at_once_with_facet_value_reason_and_one_nearest_plan():
    error = gaps("accelerate", "llama3-70b", "tp8 pp4 zero1 selective")
    assert error.exit_code == 1
    assert [d.place for d in error.diagnostics] == [
        "plan.layout.pp = 4",
        "plan.layout.sp = True",
        "plan.layout.zero = 1",
        "plan.memory.recompute = selective",
    ]
    assert all(d.message.startswith("Accelerate 1.15.0 cannot express ") for d in error.diagnostics)
    assert nearest_words(error) == "tp8 dp8 mb1 zero2 nosp"


@pytest.mark.parametrize(
    ("target", "name", "words", "place"),
    [
        ("torchtitan", "llama3-8b", "zero1", "plan.layout.zero = 1"),
        ("torchtitan", "llama3-8b", "fsdp cp2 ring", "plan.sequence.algorithm = ring"),
        ("torchtitan", "llama3-8b", "fsdp selective", "plan.memory.recompute = selective"),
        ("torchtitan", "qwen3-30b-a3b", "ep8 fsdp overlap=dp,ep", "plan.overlap.ep = True"),
        ("torchtitan-toml", "qwen3-30b-a3b", "ep8 fsdp overlap=dp,ep", "plan.overlap.ep = True"),
        ("megatron", "mixtral-8x7b", "pp4 ep8 zero1 overlap=dp,ep", "plan.overlap.ep = True"),
        ("megatron", "mixtral-8x7b", "ep8 zero1 full overlap=dp,ep", "plan.overlap.ep = True"),
        ("deepspeed", "mixtral-8x7b", "ep8 zero1 overlap=dp,ep", "plan.overlap.ep = True"),
        ("accelerate", "llama3-8b", "zero1 tp2 nosp", "plan.layout.zero = 1"),
        ("accelerate", "llama3-8b", "zero1 shard8", "plan.layout.shard = 8"),
        ("torchtitan", "llama3-8b", "fsdp loss=fused", "plan.memory.loss = fused"),
        ("torchtitan-toml", "llama3-8b", "fsdp loss=in-place", "plan.memory.loss = in-place"),
        ("megatron", "llama3-8b", "tp8 loss=copied", "plan.memory.loss = copied"),
        ("deepspeed", "llama3-8b", "fsdp loss=fused", "plan.memory.loss = fused"),
        ("accelerate", "llama3-8b", "fsdp loss=in-place", "plan.memory.loss = in-place"),
        ("megatron", "llama3-8b", "tp8 operators", "plan.memory.recompute = operators"),
        ("deepspeed", "llama3-8b", "fsdp operators", "plan.memory.recompute = operators"),
        ("torchtitan", "llama3-8b", "fsdp full recompute_layers=2", "plan.memory.layers = 2"),
        ("torchtitan", "llama3-8b", "fsdp unfused", "plan.memory.attention = unfused"),
        ("torchtitan", "llama3-8b", "fsdp fp16", "plan.precision.compute = fp16"),
        ("torchtitan", "llama3-8b", "fsdp moments=bf16", "plan.precision"),
        ("torchtitan", "llama3-8b", "fsdp overlap=none", "plan.overlap.dp = False"),
        ("torchtitan", "llama3-8b", "fsdp pp2 overlap=dp", "plan.overlap.pp = False"),
        ("torchtitan", "llama3-8b", "pp2 dualpipe", "plan.pipeline.schedule = dualpipe"),
        ("torchtitan", "llama3-8b", "fsdp pp2 vpp4 hanayo", "plan.pipeline.schedule = hanayo"),
        ("torchtitan", "llama3-8b", "dp4 cp4 allgather", "plan.layout.zero = 0"),
        ("torchtitan", "llama3-8b", "dp8 tp2 pp4 fsdp order=tp-cp-pp-dp", "plan.layout.order = "),
        ("torchtitan", "llama3.2-1b", "fsdp pp2", "plan.layout.pp = 2"),
        ("torchtitan", "qwen3-30b-a3b", "tp2 ep8 fsdp", "plan.experts.etp = 0"),
        ("torchtitan", "qwen3-30b-a3b", "ep8 dp64", "plan.experts.ep = 8"),
        ("torchtitan", "mistral-7b", "fsdp", "model"),
        ("torchtitan-toml", "llama3-8b", "tp2 fsdp nosp", "plan.layout.sp = False"),
        ("torchtitan-toml", "llama3-8b", "tp2 dp8", "plan.layout.zero = 0"),
        ("torchtitan-toml", "llama3-8b", "tp8 dp1", "plan.precision"),
        ("torchtitan-toml", "qwen3-8b", "pp2 fsdp", "plan.layout.pp = 2"),
        ("torchtitan-toml", "deepseek-v2-lite", "cp2 fsdp", "plan.layout.cp = 2"),
        ("megatron", "llama3-8b", "pp4 zb-h1 overlap=dp", "plan.pipeline.schedule = zb-h1"),
        ("megatron", "llama3-8b", "pp4", "plan.overlap.pp = True"),
        ("megatron", "llama3-8b", "pp4 fsdp overlap=dp", "plan.layout.zero = 3"),
        ("megatron", "llama3-8b", "dp16 master=none", "plan.precision.master = none"),
        ("megatron", "llama3-8b", "dp16 moments=bf16", "plan.precision.moments = bf16"),
        ("megatron", "llama3-8b", "selective recompute_layers=2", "plan.memory.layers = 2"),
        ("megatron", "llama3-8b", "cp2 tp8 ulysses", "plan.sequence.algorithm = ulysses"),
        ("megatron", "gemma2-9b", "dp8", "model"),
        ("megatron", "bloom-7b1", "dp8", "model"),
        ("megatron", "gpt-oss-20b", "cp2 zero1", "plan.layout.cp = 2"),
        ("megatron", "minimax-m2", "dp8", "model"),
        ("deepspeed", "llama3-8b", "pp4 zero1", "plan.layout.pp = 4"),
        ("deepspeed", "llama3-8b", "hsdp8", "plan.layout.shard = 8"),
        ("deepspeed", "llama3-8b", "cp2 zero1", "plan.sequence.algorithm = ring"),
        ("deepspeed", "llama3-8b", "cp2 tp2 ulysses zero1 nosp", "plan.layout.cp = 2"),
        ("megatron", "llama3-8b", "tp2 zero1 gathered=kept", "plan.memory.gathered"),
        ("deepspeed", "llama3-8b", "dp16 grads=bf16", "plan.overlap.dp = True"),
        ("deepspeed", "llama3-8b", "dp16 overlap=none", "plan.precision.grads = fp32"),
        ("deepspeed", "llama3-8b", "zero1 fp8", "plan.precision.compute = fp8"),
        ("deepspeed", "gpt-oss-20b", "zero1 ep8", "plan.experts.ep = 8"),
        ("accelerate", "llama3-8b", "tp2 dp8 nosp", "plan.layout.zero = 0"),
        ("accelerate", "mixtral-8x7b", "fsdp ep8", "plan.experts.ep = 8"),
        ("accelerate", "llama3-8b", "fsdp cp2 ulysses", "plan.sequence.algorithm = ulysses"),
        ("accelerate", "llama3-8b", "fsdp pp2", "plan.layout.pp = 2"),
    ],
)
def test_a_facet_that_the_target_lacks_is_named(target, name, words, place):
    layout = plans.parse(words).layout
    on = f"{layout.num_ranks}xh100" if layout.dp else ON
    places = [d.place for d in gaps(target, name, words, on, "batch=512,seq=4096").diagnostics]
    assert any(found.startswith(place) for found in places), places


@pytest.mark.parametrize(
    ("target", "train", "place"),
    [
        ("torchtitan", "optimizer=lion", "train.optimizer"),
        ("torchtitan", "dropout=yes", "train.dropout"),
        ("torchtitan", "causal=no", "train.causal"),
        ("torchtitan", "phase=lora", "train.phase"),
        ("torchtitan", "seq=262144", "train.seq_len"),
        ("megatron", "lengths=512;4096", "train.lengths"),
        ("megatron", "optimizer=lion", "train.optimizer"),
        ("deepspeed", "optimizer=muon", "train.optimizer"),
        ("deepspeed", "optimizer=momentum,clusters=4", "train.clusters"),
        ("megatron", "grow=0.5,most=4096", "train.grow"),
        ("torchtitan", "align=0.9", "train.align"),
    ],
)
def test_what_the_workload_asks_and_the_target_lacks_is_named(target, train, place):
    workload = train if "seq=" in train else f"seq=4096,{train}"
    words = "dp64 fsdp" if target == "torchtitan" else "zero1"
    found = gaps(target, "llama3-8b", words, train=f"batch=512,{workload}").diagnostics
    assert place in [d.place for d in found]


def test_ranks_that_do_not_fill_alike_nodes_cannot_be_launched():
    where = cluster.load("8xh100 + 4xh100")  # the second island: half of a node like those of the first
    whole, half = where.islands
    half = msgspec.structs.replace(half, node=whole.node)
    where = msgspec.structs.replace(where, islands=(whole, half))
    question = model.load("llama3-8b"), where, workload.parse("batch=12,seq=2048"), plans.parse("dp12")
    with pytest.raises(Infeasible) as caught:
        export("megatron", *question, framework=None)
    assert [d.place for d in caught.value.diagnostics] == ["plan.layout.dp = 12"]


@pytest.mark.parametrize("target", TARGETS)
@given(question=legal())
@settings(max_examples=60)
def test_a_legal_plan_is_exported_or_refused_and_what_is_offered_instead_is_exported(target, question):
    asked, where, train, plan = question
    try:
        exported = export(target, asked, where, train, plan, framework=None)
    except Infeasible as error:
        words = nearest_words(error)
        if words is None:
            return
        offered = plans.parse(words)
        try:
            export(target, asked, where, train, offered, framework=None)
        except Infeasible as left:  # only what no plan can mend
            assert not [d for d in left.diagnostics if d.place.startswith("plan.")]
    else:
        assert exported.text and exported.notes
        assert export(target, asked, where, train, plan, framework=None) == exported


def test_the_same_plan_said_with_its_axes_of_one_in_another_order_is_no_gap():
    plan = plans.parse("tp2 fsdp order=cp-tp-dp-pp")
    assert plan.layout.order != plans.Plan().layout.order
    a = ask("torchtitan", "llama3-8b", ON, TRAIN, "tp2 fsdp order=cp-tp-dp-pp")
    b = ask("torchtitan", "llama3-8b", ON, TRAIN, "tp2 fsdp")
    assert a.text.replace(" order=cp-tp-dp-pp", "") == b.text


@pytest.mark.parametrize("target", ["megatron", "deepspeed", "torchtitan", "accelerate", "torch-ddp", "torchft"])
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("zero2 hold=1,2", ["hold=1,2"]),
        ("mb3 shares=1,1 mbs=1,3", ["mbs=1,3"]),
        ("dtypes=fp32,fp32", ["dtypes=fp32,fp32"]),
    ],
)
def test_what_each_kind_of_replicas_has_of_its_own_is_named_and_not_dropped(target, words, said):
    error = gaps(target, "llama3.2-1b", f"dp8 {words}", on="4xa100-40 + 4xh100", train="batch=16,seq=128")
    message = " ".join(d.message for d in error.diagnostics)
    assert all(one in message for one in said)
    nearest = nearest_words(error)
    assert nearest is None or said[0] not in nearest
